"""A folder of the node where CRIU writes and reads when the artifact root does not do for it.

An NFS server may let no root of a node write, and CRIU cannot read what is encrypted. What is in
the folder is not encrypted, so it is best in memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

from snapshot_agent.adapters.copying import ROOT
from snapshot_shared.files import (
    make_dir,
    make_folder,
    open_root,
    opened,
    remove_tree,
    require_space,
)

_PREFIX = "snapback-"
_NFS_SUPER_MAGIC = 0x6969
_libc = ctypes.CDLL(None)


class Place(NamedTuple):
    """A folder for one dump or restore: its name below the scratch folder, and a descriptor."""

    name: str
    fd: int


class Scratch:
    """The scratch folder of one agent, which no other agent uses."""

    def __init__(self, folder: Path, artifacts: Path, *, always: bool) -> None:
        """Make `folder` when it is missing, and remove what a killed agent has left in it.

        Without `always` it is used where the artifact root `artifacts` is on NFS.
        """
        self.folder = folder
        self._artifacts = artifacts
        self._always = always
        make_folder(folder)
        for left in folder.glob(f"{_PREFIX}*"):
            self._remove(left.name)

    async def is_wanted(self) -> bool:
        """Whether CRIU has to write here rather than below the artifact root."""
        if self._always:
            return True
        return await ROOT.run(file_system_of, self._artifacts) == _NFS_SUPER_MAGIC

    @contextlib.asynccontextmanager
    async def place(self, needed: int = 0) -> AsyncIterator[Place]:
        """Make a folder for a block. NoSpace unless `needed` bytes are free for it."""
        name = f"{_PREFIX}{secrets.token_hex(8)}"
        try:
            async with ROOT.opened(self._make, name, needed) as fd:
                yield Place(name, fd)
        finally:
            await ROOT.run(self._remove, name)

    def _make(self, name: str, needed: int) -> int:
        with opened(open_root(self.folder)) as fd:
            require_space(fd, needed, f"a restore, in the scratch folder {self.folder},")
            return make_dir(fd, [name], exclusive=True)

    def _remove(self, name: str) -> None:
        with opened(open_root(self.folder)) as fd:
            remove_tree(fd, name, durable=False)


def file_system_of(path: Path) -> int:
    """Return the number of the type of a file system, as statfs(2) has it; 0 where it has none."""
    found = (ctypes.c_long * 32)()
    return found[0] if _libc.statfs(os.fsencode(path), found) == 0 else 0
