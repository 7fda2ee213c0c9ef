"""The commands of `sim`: arm a fault in a service of a local cluster, and start it again."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from snapshot_shared.api import Fault, FaultAction
from snapshot_shared.errors import NotFound
from snapshot_shared.steps import Place
from snapshotctl.domain import faults
from snapshotctl.ports import Cluster, Screen, Switch

_MEANINGS: dict[FaultAction, str] = {
    "crash": "is killed with SIGKILL",
    "stall": "waits until the deadline of the step",
    "fail": "reports InjectedFault",
}


async def arm(switch: Switch, screen: Screen, node: str, action: FaultAction, at: Place) -> None:
    """Arm a fault and say what will happen and what to do."""
    armed = await switch.arm(node, at.service, Fault(action=action, step=at.step, verb=at.verb))
    if not screen.wants_table:
        screen.value({"node": node, "service": at.service, "armed": msgspec.to_builtins(armed)})
        return
    screen.line(
        f"Armed: the {at.service} of {node} {_MEANINGS[action]} when {at.verb} begins its step "
        f"{at.step}, once.",
        strong=True,
    )
    others = [fault for fault in armed if (fault.verb, fault.step) != (at.verb, at.step)]
    for other in others:
        screen.line(f"  armed before     {other.action} at {other.verb} {other.step}")
    for line in faults.looks(node, at, action):
        screen.line(f"  {line}")


async def clear(switch: Switch, screen: Screen, node: str, services: Sequence[str]) -> None:
    """Disarm all faults of some services of a node. NotFound when none of them answers."""
    cleared: list[str] = []
    unheard: list[NotFound] = []
    for service in services:
        try:
            await switch.clear(node, service)
            cleared.append(service)
        except NotFound as error:
            # A service that was killed has nothing armed either; the other one may have.
            unheard.append(error)
    if not cleared:
        raise unheard[0]
    if screen.wants_table:
        screen.line(f"Nothing is armed in {' and '.join(cleared)} of {node}.")
    else:
        screen.value({"node": node, "services": cleared, "armed": []})


async def restart(cluster: Cluster, screen: Screen, node: str, services: Sequence[str]) -> None:
    """Start services of a node that ended again, on their state."""
    started = await cluster.restart(node, services)
    if not screen.wants_table:
        screen.value({"node": node, "started": started})
        return
    for name in started:
        screen.line(f"{name} answers again.", strong=True)
    screen.line("  look             snapshotctl get dynamocheckpoints")
