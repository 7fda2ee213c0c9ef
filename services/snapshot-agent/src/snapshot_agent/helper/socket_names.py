"""The names of unix sockets, which CRIU binds again to those by which they were bound at first.

A server often binds a socket under another name and renames it when it can be connected to.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import PurePosixPath

from snapshot_agent.domain.criu_seen import SeenTree
from snapshot_agent.domain.criu_source import RenamedSocket
from snapshot_agent.helper.beneath import open_inside
from snapshot_shared.errors import SnapbackError
from snapshot_shared.files import open_dir, opened

MAX_NAMES = 10_000
"""How many names of a folder are looked at."""


def renamed(pid: int, seen: SeenTree) -> list[RenamedSocket]:
    """Return the sockets of a worker whose files have a new name in the same folder."""
    own = {each.inode for process in seen.processes for each in process.descriptors}
    found = []
    for each in seen.sockets:
        if each.inode not in own or not each.file or not each.path.startswith("/"):
            continue
        path = PurePosixPath(each.path)
        # A folder that is gone has no names.
        with (
            contextlib.suppress(OSError, SnapbackError),
            opened(open_inside(pid, str(path.parent))) as folder,
        ):
            names = [*_names(folder, each.file)]
            if names and path.name not in names:
                found.append(RenamedSocket(path=each.path, name=names[0]))
    return found


def _names(folder: int, inode: int) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in islice(entries, MAX_NAMES):
            status = os.stat(entry.name, dir_fd=folder, follow_symlinks=False)
            # sock_diag has the lower half of a number.
            if stat.S_ISSOCK(status.st_mode) and status.st_ino & 0xFFFF_FFFF == inode:
                yield entry.name


def rename(root: int, sockets: Iterable[RenamedSocket]) -> None:
    """Rename sockets below `root`, a container's, which were restored under their first names."""
    for each in sockets:
        path = PurePosixPath(each.path)
        with opened(open_dir(root, path.parts[1:-1])) as folder:
            if stat.S_ISSOCK(os.stat(path.name, dir_fd=folder, follow_symlinks=False).st_mode):
                os.rename(path.name, each.name, src_dir_fd=folder, dst_dir_fd=folder)
