"""Where a fault has to be armed: which service of a node has the step that was named."""

from __future__ import annotations

from collections.abc import Sequence

from snapshot_shared import steps
from snapshot_shared.errors import InvalidInput
from snapshot_shared.steps import Place
from snapshotctl.domain.exits import WrongArguments

_CAPTURES = "apply -f deploy/examples/checkpoint.yaml"
_RESTORES = "apply -f deploy/examples/restore.yaml"
_TRIGGERS = {
    **dict.fromkeys(("run", "prepare", "dump", "save", "seal", "release"), _CAPTURES),
    **dict.fromkeys(("load", "commit", "restore"), _RESTORES),
    "stop": "delete pod NAME",
    "delete": "delete dynamocheckpoint NAME",
}
"""What leads to an order; an abort, a drop or a check follow from something else."""

_OF_A_POD = ("stop", "load", "commit", "drop", "restore")


def place(step: str, verb: str | None, service: str | None) -> Place:
    """Find the one place that is meant. WrongArguments lists the steps, or those to choose from."""
    try:
        found = steps.find(step, verb=verb or "", service=service or "")
    except InvalidInput as error:
        raise WrongArguments(error.message) from error
    if len(found) > 1:
        choices = " or ".join(f"--verb {each.verb} ({each.service})" for each in found)
        raise WrongArguments(f"several verbs have a step {step!r}", next_step=f"add {choices}")
    return found[0]


def services(service: str | None) -> Sequence[str]:
    """Give the services that are meant: the one named, or both. WrongArguments."""
    if service is None:
        return tuple(steps.VERBS_OF)
    if service not in steps.VERBS_OF:
        raise WrongArguments(f"--service {service!r} is not one of {', '.join(steps.VERBS_OF)}")
    return (service,)


def looks(node: str, at: Place, action: str) -> list[str]:
    """Say what makes the fault happen and where to look afterwards, one line each."""
    trigger = _TRIGGERS.get(at.verb)
    lines = [f"make it happen   snapshotctl {trigger}"] if trigger else []
    kind = "pods" if at.verb in _OF_A_POD else "dynamocheckpoints"
    lines.append(f"look             snapshotctl get {kind}")
    if action == "crash":
        lines.append(f"start it again   snapshotctl sim restart {node} --service {at.service}")
    return [*lines, f"think again      snapshotctl sim {action} {node} --clear"]
