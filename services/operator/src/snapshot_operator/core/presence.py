"""What the presence of agents says about nodes.

A missing key only stops new placement. After three TTLs of absence, counted on a monotonic clock
while the bus was healthy, a node is lost: its pods are Unknown, and its Node may be deleted. No
order fails and no worker ends for it; only deadlines and answers decide that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from snapshot_api.facts import UNKNOWN_ARTIFACTS, Node, NodeStatus
from snapshot_api.meta import Condition, ObjectMeta, condition, is_true
from snapshot_operator.core.conditions import timestamp, with_conditions
from snapshot_shared.artifact import QUARANTINE
from snapshot_shared.orders import Presence

LOST_AFTER_S = 90.0
"""Three times the TTL of the presence bucket, in seconds."""


def node_from(presence: Presence, found: Node | None, now: float) -> Node:
    """Return the Node object that a presence stands for."""
    node = found or Node(metadata=ObjectMeta(name=presence.node))
    rows = with_conditions(
        node.status.conditions,
        node,
        now,
        ("Ready", True, "AgentPresent", ""),
        ("Lost", False, "AgentPresent", ""),
    )
    rows = _with_unknown(rows, node, presence, now)
    status = NodeStatus(
        boot_id=presence.boot_id,
        version=presence.version,
        schemas=presence.schemas,
        devices=presence.devices,
        drivers=presence.drivers,
        criu=presence.criu,
        unready=presence.unready,
        verbs=presence.verbs,
        seccomp_profile=presence.seccomp_profile,
        artifact_root=presence.artifact_root,
        slots=presence.slots,
        conditions=rows,
    )
    return replace(node, status=status)


def _with_unknown(
    rows: list[Condition], node: Node, presence: Presence, now: float
) -> list[Condition]:
    """Set the condition for what below the artifact root belongs to no content."""
    unknown, quarantined = presence.unknown, presence.quarantined
    if not unknown and not quarantined:
        if condition(rows, UNKNOWN_ARTIFACTS) is None:
            return rows
        return with_conditions(
            rows, node, now, (UNKNOWN_ARTIFACTS, False, "NoUnknownArtifacts", "")
        )
    message = (
        f"below {presence.artifact_root}, {unknown} found that belong to no SnapshotContent, and "
        f"{quarantined} moved into {QUARANTINE}"
    )
    reason = "UnknownArtifactsMoved" if quarantined else "UnknownArtifactsFound"
    return with_conditions(rows, node, now, (UNKNOWN_ARTIFACTS, True, reason, message))


def node_absent(node: Node, absent_s: float, now: float) -> Node:
    """Return the Node object after `absent_s` seconds without presence on a healthy bus.

    It changes twice: when the presence is missed first, and when the node is lost.
    """
    rows = node.status.conditions
    is_lost = absent_s >= LOST_AFTER_S
    missed = condition(rows, "Ready")
    if missed is None or missed.status != "False":
        message = f"no presence since {timestamp(now - absent_s)}"
        rows = with_conditions(rows, node, now, ("Ready", False, "PresenceMissing", message))
    else:
        message = missed.message
    if is_lost and not is_true(rows, "Lost"):
        rows = with_conditions(rows, node, now, ("Lost", True, "PresenceMissing", message))
    return replace(node, status=replace(node.status, conditions=rows))


def absences(
    nodes: Iterable[Node],
    present: Mapping[str, Presence],
    last_seen: Mapping[str, float],
    monotonic: float,
) -> list[tuple[Node, float]]:
    """Return the nodes without presence, each with the seconds since it was last seen."""
    return [
        (node, monotonic - last_seen.get(node.metadata.name, monotonic))
        for node in nodes
        if node.metadata.name not in present
    ]
