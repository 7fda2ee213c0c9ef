"""Revisions: Snapshots of one name, of which a restore takes the newest that is captured."""

from __future__ import annotations

from collections.abc import Iterable

from snapshot_api.kinds import AnyObject
from snapshot_api.meta import is_true
from snapshot_api.v1alpha1.snapshot import Snapshot


def ordered(found: Iterable[AnyObject], name: str) -> list[Snapshot]:
    """Return the revisions of a name among objects of its namespace, the oldest first.

    Revisions that are being deleted are left out.
    """
    revisions = [
        each
        for each in found
        if isinstance(each, Snapshot)
        and each.spec.revision_of == name
        and not each.metadata.deletion_timestamp
    ]
    return sorted(revisions, key=_age)


def _age(revision: Snapshot) -> tuple[str, int, str]:
    """Return what grows with each revision. A timestamp has whole seconds: llm-9 is before llm-10.

    https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/object-meta/
    """
    meta = revision.metadata
    return meta.creation_timestamp, len(meta.name), meta.name


def newest(found: Iterable[AnyObject], name: str) -> Snapshot | None:
    """Return the newest captured revision of a name, or else the newest, if there is one."""
    revisions = ordered(found, name)
    captured = [each for each in revisions if is_captured(each)]
    return next(reversed(captured or revisions), None)


def is_captured(revision: Snapshot) -> bool:
    """Whether a revision can be restored from."""
    return is_true(revision.status.conditions, "Ready")


def is_over(revision: Snapshot) -> bool:
    """Whether the capture of a revision has ended, well or not."""
    return is_captured(revision) or is_true(revision.status.conditions, "Failed")


def surplus(found: Iterable[AnyObject], name: str, keep: int) -> list[Snapshot]:
    """Return the revisions of a name that are over and older than the newest `keep` captured ones.

    If fewer than `keep` (1 or more) are captured, it is none: a failed capture may be worth a look.
    """
    revisions = ordered(found, name)
    kept = [each for each in revisions if is_captured(each)][-keep:]
    if len(kept) < keep:
        return []
    older = revisions[: revisions.index(kept[0])]
    return [each for each in older if is_over(each)]


def next_name(found: Iterable[AnyObject], name: str) -> str:
    """Return the name of the next revision of a name: that with the next number."""
    numbers = [
        int(number)
        for each in found
        for number in [each.metadata.name.removeprefix(f"{name}-")]
        if number != each.metadata.name and number.isdecimal() and number.isascii()
    ]
    return f"{name}-{max(numbers, default=0) + 1}"
