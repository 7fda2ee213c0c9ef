"""The files of one part in several folders, each moved by threads of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Protocol

from gms.adapters.parallel import results_of
from gms.domain.transfer import FilePlan
from gms.ports import Advance, Moved
from snapshot_shared.files import require_space


class Move(Protocol):
    """Moves the plans with these indices, which are in one folder, in so many threads.

    It calls `advance` with the bytes of each chunk, and ends with what that raises.
    """

    def __call__(
        self, folder: int, indices: Sequence[int], threads: int, advance: Advance
    ) -> Moved:
        """Return what was moved."""
        ...


def in_folders(
    folders: Mapping[str, int],
    plans: Sequence[FilePlan],
    threads: int,
    move: Move,
    advance: Advance,
) -> Moved:
    """Move files in all their folders at a time, so that each disk has requests.

    The first error ends what is moved in the other folders at their next chunk, and is raised. The
    threads are shared out evenly: one for each folder at least, as far as there are so many.
    """
    found: dict[str, list[int]] = {}
    for index, plan in enumerate(plans):
        found.setdefault(plan.stripe, []).append(index)
    groups = list(found.items()) or [("", [])]
    at_once = min(threads, len(groups))
    errors: list[BaseException] = []

    def checked(size: int) -> None:
        if errors:
            raise errors[0]
        advance(size)

    def moved(group: tuple[str, list[int]]) -> Moved:
        stripe, indices = group
        try:
            return move(folders[stripe], indices, threads // at_once, checked)
        except BaseException as error:
            errors.append(error)
            raise

    parts: list[Moved] = []
    try:
        parts = results_of(groups, moved, at_once)
    except BaseException:
        if not errors:
            raise
    if errors:
        # Another folder may have been the first to end, with an error that follows from this one.
        raise errors[0]
    return Moved.of(parts)


def require_room(folders: Mapping[str, int], needed: Mapping[str, int], what: str) -> None:
    """NoSpace unless the bytes that each folder needs fit; several may be on one file system."""
    disks: dict[int, list[str]] = {}
    for stripe in needed:
        disks.setdefault(os.fstat(folders[stripe]).st_dev, []).append(stripe)
    for stripes in disks.values():
        where = ", ".join(f"stripe root {each}" for each in stripes if each)
        size = sum(needed[each] for each in stripes)
        require_space(folders[stripes[0]], size, f"{what} in {where}" if where else what)
