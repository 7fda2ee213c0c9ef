"""The objects that the words of a command name: `KIND NAME`, `KIND/NAME`, or a bare name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from snapshot_api.kind import Kind
from snapshot_api.kinds import KINDS, find_kind
from snapshot_shared.errors import InvalidName, NotFound
from snapshot_shared.ids import NodeName, check_label, check_name
from snapshotctl.domain.exits import WrongArguments

NAMED = tuple(KINDS)
"""Every kind, in the order in which a bare name is looked up."""
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
        """Return it as people type it: `pod/worker`."""
        return f"{self.kind.name.lower()}/{self.name or '*'}"

    @property
    def typed(self) -> str:
        """It as arguments of a command, with the namespace where that is not the default."""
        space = self.namespace or "default"
        return str(self) if space == "default" else f"{self} -n {space}"


def kind_named(text: str) -> Kind:
    """Return a kind by any of its names. WrongArguments lists them all."""
    try:
        return find_kind(text)
    except NotFound as error:
        raise WrongArguments(error.message, next_step=error.next_step) from error


def target(words: list[str], namespace: str | None) -> Target:
    """Return the target of one or two words in a namespace (None: all). WrongArguments."""
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


def meant(words: list[str], namespace: str) -> list[Target]:
    """Return what words may mean: the one that they say, or for a bare name one of each kind.

    A word that is a kind is that. WrongArguments when it can be neither.
    """
    if len(words) != 1 or "/" in words[0] or _is_kind(words[0]):
        return [target(words, namespace)]
    return _of_kinds(NAMED, words[0], namespace)


def meant_one(words: list[str], namespace: str) -> list[Target]:
    """Return what words may mean that have to name one object. WrongArguments."""
    found = meant(words, namespace)
    return found if len(found) > 1 else [one_target(words, namespace)]


def several(words: list[str], namespace: str) -> list[list[Target]]:
    """Return what words may mean that name objects, as kubectl takes them. WrongArguments.

    That is KIND NAME NAME, KIND/NAME KIND/NAME, or bare names.
    """
    if any("/" in word for word in words) or not _is_kind(words[0]):
        return [meant_one([word], namespace) for word in words]
    names = words[1:] or [""]
    return [[one_target([words[0], name] if name else words, namespace)] for name in names]


def kinds_like(word: str) -> list[str]:
    """Return the names of kinds that a word may be a slip of."""
    names = [name for kind in KINDS.values() for name in (kind.plural, kind.name.lower())]
    return difflib.get_close_matches(word.lower(), names, n=2, cutoff=0.75)


def names_like(name: str, there: Iterable[Target]) -> list[Target]:
    """Return the targets that a name may be a slip of, the likeliest first."""
    by_name = {found.name or "": found for found in there}
    close = difflib.get_close_matches(name, by_name, n=3, cutoff=0.7)
    return [by_name[each] for each in close]


def _is_kind(text: str) -> bool:
    try:
        find_kind(text)
    except NotFound:
        return False
    return True


def one_target(words: list[str], namespace: str) -> Target:
    """Return the target of words that have to name one object. WrongArguments."""
    found = target(words, namespace)
    if found.name is None:
        raise WrongArguments(
            f"which {found.kind.name}? a name is missing",
            next_step=f"for example: {found.kind.name.lower()} my-name",
        )
    return found


def everywhere(found: Target) -> Target:
    """Return a target in all namespaces. WrongArguments when it names one object."""
    if found.name is not None:
        raise WrongArguments(
            "a name and --all-namespaces exclude each other",
            next_step=f"leave one of them out: get {found.kind.plural} -A",
        )
    return found._replace(namespace=None)


def place(kind: Kind, namespace: str | None) -> str | None:
    """Return the namespace in which a kind is looked up. WrongArguments for a bad one."""
    return None if not kind.namespaced or namespace is None else checked_namespace(namespace)


def checked_namespace(text: str) -> str:
    """Return a namespace. WrongArguments for a bad one."""
    try:
        return check_label(text)
    except InvalidName as error:
        raise WrongArguments(error.message, next_step=error.next_step) from error


def explained(name: str, namespace: str) -> list[Target]:
    """Return what a name may mean where nodes count, too, in the order of the look-up."""
    found = traced(name, namespace)
    return found if "/" in name else [*found, Target(KINDS["Node"], None, checked_name(name))]


def traced(name: str, namespace: str) -> list[Target]:
    """Return what a name may mean to `trace`, in the order of the look-up."""
    if "/" in name:
        return [one_target([name], namespace)]
    return _of_kinds(TRACED, name, namespace)


def verified(name: str, namespace: str) -> list[Target]:
    """Return what a name may mean to `verify`, in the order of the look-up."""
    if "/" in name:
        return [_with_artifact(one_target([name], namespace), "holds no artifact")]
    return _of_kinds(VERIFIABLE, name, namespace)


def aborted(name: str, namespace: str) -> list[Target]:
    """Return what a name may mean to `abort`, in the order of the look-up."""
    if "/" not in name:
        return _of_kinds(VERIFIABLE, name, namespace)
    found = one_target([name], namespace)
    if found.kind.name in ("Pod", "SnapshotRestore"):
        pod = found.name if found.kind.name == "Pod" else "POD"
        raise WrongArguments(
            "a restore ends with its pod", next_step=f"end both: snapshotctl delete pod {pod}"
        )
    return [_with_artifact(found, "has no capture")]


def _of_kinds(kinds: Sequence[str], name: str, namespace: str) -> list[Target]:
    found = (KINDS[kind] for kind in kinds)
    return [Target(kind, place(kind, namespace), checked_name(name)) for kind in found]


def _with_artifact(found: Target, problem: str) -> Target:
    if found.kind.name not in VERIFIABLE:
        raise WrongArguments(
            f"a {found.kind.name} {problem}",
            next_step="name a checkpoint, a snapshot or a snapshotcontent",
        )
    return found


def pod_named(text: str) -> str:
    """Return the name of a pod, from NAME or pod/NAME. WrongArguments for another kind."""
    found = one_target([text] if "/" in text else ["pod", text], "default")
    if found.kind.name != "Pod":
        raise WrongArguments(
            f"a {found.kind.name} has no process", next_step="name a pod: snapshotctl get pods"
        )
    return found.name or ""


def node_named(text: str) -> NodeName:
    """Return the name of a node. WrongArguments when it cannot be one."""
    return NodeName(checked_name(text))


def source_named(text: str) -> str:
    """Return the name in `NAME` or `snapshot/NAME` that a restore starts from. WrongArguments."""
    typed, mark, name = text.rpartition("/")
    if mark and kind_named(typed).name not in ("DynamoCheckpoint", "Snapshot"):
        raise WrongArguments(
            f"a pod is restored from a snapshot or a checkpoint, not from a {typed}",
            next_step="snapshotctl artifacts ls -A",
        )
    return checked_name(name)


def checked_name(name: str) -> str:
    """Return the name of an object. WrongArguments for a bad one."""
    try:
        return check_name(name)
    except InvalidName as error:
        raise WrongArguments(error.message, next_step=error.next_step) from error
