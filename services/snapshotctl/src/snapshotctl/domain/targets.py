"""Which object a command means: `KIND NAME`, `KIND/NAME`, or a bare name."""

from __future__ import annotations

from typing import NamedTuple

from snapshot_shared.errors import InvalidName, NotFound
from snapshot_shared.ids import NodeName, check_label, check_name
from snapshot_shared.objects import KINDS, Kind, find_kind
from snapshotctl.domain.exits import WrongArguments

VERIFIABLE = ("DynamoCheckpoint", "Snapshot", "SnapshotContent")
"""What leads to an artifact, in the order in which a bare name is looked up."""
TRACED = (*VERIFIABLE, "Pod", "SnapshotRestore")
"""What may have a trace."""


class Target(NamedTuple):
    """One object, or all of a kind. `namespace` is None for a kind that has none, or for all."""

    kind: Kind
    namespace: str | None
    name: str | None

    def __str__(self) -> str:
        """Write as people type it: `pod/worker`."""
        return f"{self.kind.name.lower()}/{self.name or '*'}"

    @property
    def typed(self) -> str:
        """Write as arguments of a command, with the namespace where it is not the default."""
        space = self.namespace or "default"
        return str(self) if space == "default" else f"{self} -n {space}"


def kind_named(text: str) -> Kind:
    """Find a kind by any of its names. WrongArguments lists them all."""
    try:
        return find_kind(text)
    except NotFound as error:
        raise WrongArguments(error.message, next_step=error.next_step) from error


def target(words: list[str], namespace: str | None) -> Target:
    """Read one or two words as a target in a namespace (None: all). WrongArguments else."""
    if len(words) == 1:
        words = words[0].split("/", 1)
    if len(words) > 2 or not words:
        raise WrongArguments(
            f"expected KIND NAME or KIND/NAME, found {len(words)} words",
            next_step="for example: pod my-worker, or pod/my-worker",
        )
    kind = kind_named(words[0])
    name = checked_name(words[1]) if len(words) == 2 else None
    return Target(kind, place(kind, namespace), name)


def one_target(words: list[str], namespace: str) -> Target:
    """As `target`, with a name. WrongArguments when there is none."""
    found = target(words, namespace)
    if found.name is None:
        raise WrongArguments(
            f"which {found.kind.name}? a name is missing",
            next_step=f"for example: {found.kind.name.lower()} my-name",
        )
    return found


def everywhere(found: Target) -> Target:
    """Widen a target to all namespaces. WrongArguments when it names one object."""
    if found.name is not None:
        raise WrongArguments(
            "a name and --all-namespaces exclude each other",
            next_step=f"leave one of them out: get {found.kind.plural} -A",
        )
    return found._replace(namespace=None)


def place(kind: Kind, namespace: str | None) -> str | None:
    """Give the namespace in which a kind is looked for. WrongArguments for a bad one."""
    return None if not kind.namespaced or namespace is None else checked_namespace(namespace)


def checked_namespace(text: str) -> str:
    """Return a namespace. WrongArguments for a bad one."""
    try:
        return check_label(text)
    except InvalidName as error:
        raise WrongArguments(error.message, next_step=error.next_step) from error


def told(name: str, namespace: str) -> list[Target]:
    """Give what a name may mean where nodes count, too, in the order in which it is looked up."""
    if "/" in name:
        return [one_target([name], namespace)]
    return [*traced(name, namespace), Target(KINDS["Node"], None, checked_name(name))]


def traced(name: str, namespace: str) -> list[Target]:
    """Give what a name may mean to `trace`, in the order in which it is looked up."""
    if "/" in name:
        return [one_target([name], namespace)]
    kinds = (KINDS[kind] for kind in TRACED)
    return [Target(kind, place(kind, namespace), checked_name(name)) for kind in kinds]


def verified(name: str, namespace: str) -> list[Target]:
    """Give what a name may mean to `verify`, in the order in which it is looked up."""
    if "/" in name:
        found = one_target([name], namespace)
        if found.kind.name not in VERIFIABLE:
            raise WrongArguments(
                f"a {found.kind.name} holds no artifact",
                next_step="name a checkpoint, a snapshot or a snapshotcontent",
            )
        return [found]
    kinds = (KINDS[kind] for kind in VERIFIABLE)
    return [Target(kind, place(kind, namespace), checked_name(name)) for kind in kinds]


def aborted(name: str, namespace: str) -> list[Target]:
    """Give what a name may mean to `abort`, in the order in which it is looked up."""
    if "/" in name:
        found = one_target([name], namespace)
        if found.kind.name in ("Pod", "SnapshotRestore"):
            pod = found.name if found.kind.name == "Pod" else "POD"
            raise WrongArguments(
                "a restore ends with its pod",
                next_step=f"end both: snapshotctl delete pod {pod}",
            )
        if found.kind.name not in VERIFIABLE:
            raise WrongArguments(
                f"a {found.kind.name} has no capture",
                next_step="name a checkpoint, a snapshot or a snapshotcontent",
            )
        return [found]
    kinds = (KINDS[kind] for kind in VERIFIABLE)
    return [Target(kind, place(kind, namespace), checked_name(name)) for kind in kinds]


def node_named(text: str) -> NodeName:
    """Return the name of a node. WrongArguments when it cannot be one."""
    return NodeName(checked_name(text))


def checked_name(name: str) -> str:
    """Return the name of an object. WrongArguments for a bad one."""
    try:
        return check_name(name)
    except InvalidName as error:
        raise WrongArguments(error.message, next_step=error.next_step) from error
