"""Finds a transfer backend by its name: one of ours, or an entry point of another package."""

from __future__ import annotations

from gms.adapters.objects import Objects
from gms.adapters.pinned import page_locked
from gms.adapters.posix import Posix
from gms.domain.tasks import GDS, OBJECT
from gms.ports import TransferBackend
from snapshot_shared.errors import InvalidInput
from snapshot_shared.object_storage import ObjectStorage

GROUP = "snapback.transfer_backends"
"""The entry point group. Each point names what makes a backend when it is called."""

_OURS: dict[str, TransferBackend] = {
    "posix-direct": Posix(direct=True),
    "posix-buffered": Posix(direct=False),
    "pinned-host": Posix(direct=True, pages=page_locked, name="pinned-host"),
}

_IN_PLACE: dict[str, TransferBackend] = {"posix-direct": Posix(direct=True, in_place=True)}
"""Those that gain from memory in huge pages."""


def find_backend(
    name: str, *, storage: str = "", prefix: str = "", in_place: bool = False
) -> TransferBackend:
    """Return the backend of this name. InvalidInput names those that there are.

    Objects go below `prefix` in the object storage `storage`, a URL: ObjectStorageUnset without.
    `in_place` when the memory that it moves is in huge pages.
    """
    ours = (_OURS | _IN_PLACE if in_place else _OURS).get(name)
    if ours is not None:
        return ours
    if name == GDS:
        # Every restore waits for this import, and few need it.
        from gms.adapters.gds import Gds  # noqa: PLC0415

        return Gds(in_place=in_place)
    if name == OBJECT:
        return Objects(ObjectStorage(storage), prefix)
    # Every restore waits for this import, and few need it.
    from importlib.metadata import entry_points  # noqa: PLC0415

    points = entry_points(group=GROUP)
    if name not in points.names:
        known = sorted({*_OURS, GDS, OBJECT, *points.names})
        raise InvalidInput(
            f"SNAPBACK_TRANSFER_BACKEND={name!r}: there is no such transfer backend, only "
            + ", ".join(known),
            next_step="install the package that brings it, or choose another",
            found=name,
            expected=known,
        )
    try:
        found = points[name].load()()
    except Exception as error:
        raise InvalidInput(
            f"SNAPBACK_TRANSFER_BACKEND={name!r}: {points[name].value} cannot be used: "
            f"{type(error).__name__}: {error}",
            next_step="repair the package that brings it, or choose another",
            found=name,
        ) from error
    if not isinstance(found, TransferBackend):
        raise InvalidInput(
            f"SNAPBACK_TRANSFER_BACKEND={name!r}: {points[name].value} makes no transfer backend",
            next_step="it must have write_files and read_files, as gms.ports says",
            found=type(found).__name__,
        )
    return found
