"""The artifact root as a whole: what lies in it, and the quarantine for what is nobody's."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from snapback_client.frames import error_of
from snapshot_agent.adapters.copying import ROOT
from snapshot_agent.ports import Listing, Stray
from snapshot_shared import subjects
from snapshot_shared.api import FoundGeneration, InventoryReply, InventoryRequest
from snapshot_shared.artifact import QUARANTINE, ROOT_MANIFEST, generation_of
from snapshot_shared.bus import Bus
from snapshot_shared.codec import MAX_FRAME_BYTES, decode_json, encode_json
from snapshot_shared.errors import ArtifactCorrupt, ArtifactExists, ArtifactMissing, InvalidName
from snapshot_shared.files import make_dir, open_dir, open_root, opened, secure
from snapshot_shared.ids import check_label, check_node, check_uid

_NOT_OURS = frozenset({"lost+found"})
"""What file systems put into their root; the rest of it is hidden."""


class ArtifactLibrary:
    """The `Library` port over one directory, which other agents may use, too."""

    def __init__(self, root: Path) -> None:
        """Use `root`; when it is missing, it is empty."""
        self._root = root

    async def listing(self, now: float) -> Listing:
        return await ROOT.run(self._listing, (), now)

    async def set_aside(self, path: Sequence[str], label: str) -> bool:
        return await ROOT.run(self._set_aside, tuple(path), label)

    async def set_aside_before(self) -> int:
        return await ROOT.run(self._set_aside_before)

    def _set_aside_before(self) -> int:
        count = 0
        with contextlib.suppress(FileNotFoundError), opened(open_root(self._root)) as root:
            for label, _ in _statuses(root, (QUARANTINE,)):
                generations, strays = self._listing((QUARANTINE, label), 0.0)
                count += len(generations) + len(strays)
        return count

    def _listing(self, above: tuple[str, ...], now: float) -> Listing:
        generations: list[FoundGeneration] = []
        strays: list[Stray] = []
        with contextlib.suppress(FileNotFoundError), opened(open_root(self._root)) as root:
            for path, status in _entries(root, above):
                age_s = now - status.st_mtime
                number = generation_of(*path) if len(path) == 3 else None
                if number is None or not stat.S_ISDIR(status.st_mode):
                    strays.append(Stray(path, age_s))
                    continue
                found = FoundGeneration(
                    namespace=path[0],
                    content_uid=path[1],
                    generation=number,
                    age_s=age_s,
                    sealed=_is_sealed(root, (*above, *path)),
                )
                generations.append(found)
        return Listing(generations, strays)

    def _set_aside(self, path: tuple[str, ...], label: str) -> bool:
        *folders, name = path
        try:
            with opened(open_root(self._root)) as root, opened(open_dir(root, folders)) as source:
                os.stat(name, dir_fd=source, follow_symlinks=False)
                with opened(make_dir(root, (QUARANTINE, label, *folders))) as target:
                    _require_vacant(target, name)
                    os.rename(name, name, src_dir_fd=source, dst_dir_fd=target)
                    secure(target, name)
        except (FileNotFoundError, ArtifactMissing):
            return False
        return True


class OperatorInventories:
    """The `Inventories` port: the operator is asked over NATS."""

    def __init__(self, bus: Bus, node: str) -> None:
        """Ask as `node`."""
        self._bus = bus
        self._node = node

    async def judge(self, found: Sequence[FoundGeneration]) -> InventoryReply:
        request = InventoryRequest(node=self._node, generations=list(found))
        subject = subjects.inventory(check_node(self._node))
        data = await self._bus.request(subject, encode_json(request))
        reply = decode_json(data, InventoryReply, limit=MAX_FRAME_BYTES)
        if reply.failure is not None:
            raise error_of(reply.failure)
        return reply


def _entries(root: int, above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], os.stat_result]]:
    """Walk down as far as generations; give them, and what stands in the way to others."""
    todo: list[tuple[str, ...]] = [()]
    while todo:
        folder = todo.pop()
        for name, status in _statuses(root, (*above, *folder)):
            if name.startswith(".") or (not folder and name in _NOT_OURS):
                continue
            if stat.S_ISDIR(status.st_mode) and _leads_on((*folder, name)):
                todo.append((*folder, name))
            else:
                yield (*folder, name), status


def _leads_on(path: tuple[str, ...]) -> bool:
    """Say whether generations may lie below a folder."""
    checks = (check_label, check_uid)
    if len(path) > len(checks):
        return False
    try:
        checks[len(path) - 1](path[-1])
    except InvalidName:
        return False
    return True


def _statuses(root: int, path: tuple[str, ...]) -> list[tuple[str, os.stat_result]]:
    """List a folder; one that is gone, closed to us, or none at all is empty."""
    found: list[tuple[str, os.stat_result]] = []
    try:
        with opened(open_dir(root, path)) as folder:
            for name in sorted(os.listdir(folder)):  # noqa: PTH208 - of a descriptor
                with contextlib.suppress(FileNotFoundError):
                    found.append((name, os.stat(name, dir_fd=folder, follow_symlinks=False)))
    except (ArtifactMissing, ArtifactCorrupt, InvalidName, PermissionError):
        return []
    return found


def _is_sealed(root: int, path: tuple[str, ...]) -> bool:
    try:
        with opened(open_dir(root, path)) as folder:
            status = os.stat(ROOT_MANIFEST, dir_fd=folder, follow_symlinks=False)
    except (FileNotFoundError, ArtifactMissing, ArtifactCorrupt):
        return False
    return stat.S_ISREG(status.st_mode)


def _require_vacant(folder: int, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.stat(name, dir_fd=folder, follow_symlinks=False)
        raise ArtifactExists(f"{name!r:.80} is in quarantine already")
