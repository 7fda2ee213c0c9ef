"""What a decision asks of a Node."""

from __future__ import annotations

from collections.abc import Iterable

from snapshot_api.facts import AGENT_LABEL, Node, Pod
from snapshot_api.meta import condition, is_true
from snapshot_operator.core.plan import Reader
from snapshot_shared.orders import version_gap


def node(reader: Reader, name: str) -> Node | None:
    """Return a Node; None without a name."""
    found = reader.get("Node", None, name) if name else None
    return found if isinstance(found, Node) else None


def all_nodes(reader: Reader) -> list[Node]:
    """Return every Node, in the order of their names: the order in which they came is chance."""
    nodes = [found for found in reader.by_index("nodes", "") if isinstance(found, Node)]
    return sorted(nodes, key=lambda found: found.metadata.name)


def agents(found: Node) -> tuple[str, ...]:
    """Return the keys of a node in the index of those with an agent: one for all, and its name.

    It has none where the agent was lost, or has never been seen on a healthy bus. A node that is
    silent for a moment has its agent.
    """
    rows = found.status.conditions
    is_missed = (ready := condition(rows, "Ready")) is not None and ready.status == "False"
    is_gone = is_true(rows, "Lost") or not found.status.boot_id
    has_label = found.metadata.labels.get(AGENT_LABEL) == "true"
    return () if is_missed and is_gone and not has_label else ("", found.metadata.name)


def without_agent(reader: Reader, pod: Pod | None) -> str:
    """Return why no agent can capture or restore a pod, and what to do; empty where one can."""
    if pod is None:
        return ""
    if place := pod.status.node_name:
        if reader.by_index("agents", place) or node(reader, place) is None:
            return ""
        return (
            f"the pod is on node {place}, which has no snapshot agent. Next: start the agent of "
            "that node, or let the pod run on another one (nodeName in its spec)"
        )
    scheduled = condition(pod.status.conditions, "PodScheduled")
    is_stuck = scheduled is not None and scheduled.reason == "Unschedulable"
    if not is_stuck or _any_agent(reader):
        return ""
    return (
        "no node has a snapshot agent. Next: see why the agents do not run, or are not seen: "
        "snapshotctl nodes"
    )


def _any_agent(reader: Reader) -> bool:
    """Whether a node has an agent. Of many that wait, none is woken by one more node with one."""
    found = next(iter(reader.peek_index("agents", "")), None)
    return bool(reader.by_index("agents", found.metadata.name if found is not None else ""))


def known(reader: Reader, names: Iterable[str]) -> frozenset[str]:
    """Return those of the names that have a Node object."""
    return frozenset(name for name in set(names) if node(reader, name) is not None)


def is_silent(found: Node | None) -> bool:
    """Whether a node that is there has been silent for so long that nothing waits for it."""
    return found is not None and is_true(found.status.conditions, "Lost")


def unusable_for_new_work(found: Node) -> str:
    """Return why nothing new may begin on a node, for the end of a sentence; empty when it may."""
    if not is_true(found.status.conditions, "Ready"):
        return "is not ready"
    return "is cordoned" if found.spec.unschedulable else ""


def reading_node(nodes: Iterable[Node], home: str | None) -> str | None:
    """Return a node that can be ordered to read or remove an artifact, `home` before others."""
    ready = sorted(
        found.metadata.name
        for found in nodes
        if is_true(found.status.conditions, "Ready") and not version_gap(found.status.schemas)
    )
    return home if home in ready else next(iter(ready), None)
