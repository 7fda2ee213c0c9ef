"""What an upgrade would meet: captures and restores under way, and nodes that it does not reach."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from snapshot_api.facts import Node
from snapshot_api.kinds import AnyObject
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.v1alpha1.restore import SnapshotRestore
from snapshot_api.views import phase, state
from snapshot_shared.orders import version_gap
from snapshotctl.views.finding import Finding, fail, ok, warn


def upgrade_findings(objects: Sequence[AnyObject]) -> Iterator[Finding]:
    """Yield what deserves a wait, and what an upgrade would lose.

    The messages are those of this build, so it has to be of the release that is upgraded to.
    """
    moving = [value for value in objects if state(value) == "busy"]
    captures = [value for value in moving if isinstance(value, SnapshotContent)]
    restores = [value for value in moving if isinstance(value, SnapshotRestore)]
    yield from map(_capture, captures)
    if not captures:
        yield ok("no capture is under way")
    yield from map(_restore, restores)
    if not restores:
        yield ok("no restore is under way")
    nodes = [value for value in objects if isinstance(value, Node)]
    found = [finding for node in nodes for finding in _node(node)]
    yield from found
    if not found:
        yield ok(f"all {len(nodes)} nodes answer, and read the messages of this release")


def _capture(value: SnapshotContent) -> Finding:
    ref = value.spec.snapshot_ref
    where = f"snapshot/{ref.name} --namespace {ref.namespace}"
    return warn(
        f"the capture of {ref.namespace}/{ref.name} is {phase(value)}: an attempt that the upgrade "
        "ends begins again, and the worker pauses once more",
        f"wait for its end: snapshotctl watch {where}",
    )


def _restore(value: SnapshotRestore) -> Finding:
    namespace, pod = value.metadata.namespace, value.spec.pod_ref.name
    return warn(
        f"the restore of {namespace}/{pod} is {phase(value)}: the new agent goes on with it, but a "
        "process that CRIU brings back has 20 s",
        f"wait for its end: snapshotctl watch pod/{pod} --namespace {namespace}",
    )


def _node(node: Node) -> Iterator[Finding]:
    name = node.metadata.name
    if gap := version_gap(node.status.schemas):
        yield fail(
            f"node {name} reads no message of this release: {gap}",
            "upgrade by way of the release between the two",
        )
    if not phase(node).startswith("Ready"):
        yield fail(
            f"node {name} is {phase(node)}: the upgrade waits for it, and orders there are lost",
            f"see why: snapshotctl explain node/{name}",
        )
