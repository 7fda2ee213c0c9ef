"""The files that `--state` of snapback-run names, in one tar archive.

Zeros become holes, in the archive and in the files that are made of it. A sparse cache would
otherwise take its length in the artifact, and be written while the worker is quiet.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, cast

log = logging.getLogger("snapback-run")

_COPIED = 64 * 1024
"""How much is read and written at a time: what has no other byte than zeros becomes a hole."""
_ZEROS = bytes(_COPIED)
_LEAST = 4096
"""The least hole that a file system can have."""


def pack(paths: Sequence[Path], archive: Path) -> None:
    """Write files and folders into an archive, in order, each below its number.

    tarfile.TarError for what `unpack` could not put back. A path that is not there is left out.
    """
    with archive.open("wb") as file:
        # To write an archive, tarfile calls these two methods alone.
        sparse: Any = _Sparse(file)
        with _Archive(fileobj=sparse, mode="w", copybufsize=_COPIED) as tar:
            for number, path in enumerate(paths):
                where = path.resolve()
                if where.exists():
                    tar.add(where, str(number), filter=_checked(where))
                else:
                    log.warning("--state names %s, which is not there", path)
        file.truncate(file.tell())


def unpack(archive: Path, paths: Sequence[Path]) -> None:
    """Put files and folders back in the places of `paths`, with their modes and times.

    OSError, tarfile.TarError, ValueError and LookupError for another archive than `pack` has made
    of as many paths.
    """
    made: list[tuple[tarfile.TarInfo, Path]] = []
    with _Archive.open(archive) as tar:
        for member in tar:
            path = paths[int(member.name.partition("/")[0])].resolve()
            path.parent.mkdir(parents=True, exist_ok=True)
            placed, folder = _placed(member, path)
            # With this filter nothing is written outside of the folder.
            tar.extract(placed, folder, filter="data")
            made.append((member, folder / placed.name))
    # Last, for each file that is made changes the time of its folder, and needs its mode.
    for member, path in reversed(made):
        if member.isdir() or member.isreg():
            # A folder that was there may belong to another user.
            with contextlib.suppress(PermissionError):
                path.chmod(member.mode & 0o777)
                os.utime(path, (member.mtime, member.mtime))


class _Sparse:
    """A file that is written from its begin to its end, with a hole for zeros."""

    def __init__(self, file: IO[bytes]) -> None:
        """Write to `file`, which has to be truncated at its end afterwards."""
        self._file = file

    def write(self, data: bytes) -> int:
        if len(data) >= _LEAST and data == _ZEROS[: len(data)]:
            self._file.seek(len(data), os.SEEK_CUR)
        else:
            self._file.write(data)
        return len(data)

    def tell(self) -> int:
        return self._file.tell()


class _Holes:
    """A file that is read from an offset on, without a reading of its holes."""

    def __init__(self, file: IO[bytes], at: int = 0) -> None:
        """Read `file` by its descriptor; its own position does not matter."""
        self._fd = file.fileno()
        self._at = at

    def read(self, count: int) -> bytes:
        is_hole = self._at + count <= self._next_data()
        data = _ZEROS[:count] if is_hole else os.pread(self._fd, count, self._at)
        self._at += len(data)
        return data

    def _next_data(self) -> int:
        try:
            return os.lseek(self._fd, self._at, os.SEEK_DATA)
        except OSError as error:
            # Without data from here on; any other error is of a file system that does not know.
            is_rest_hole = error.errno == errno.ENXIO
            return os.fstat(self._fd).st_size if is_rest_hole else self._at


class _Archive(tarfile.TarFile):
    """An archive whose files are read and made with holes."""

    def addfile(self, tarinfo: tarfile.TarInfo, fileobj: Any = None) -> None:
        super().addfile(tarinfo, fileobj and cast("Any", _Holes(fileobj)))

    def makefile(self, tarinfo: tarfile.TarInfo, targetpath: Any) -> None:
        source = _Holes(cast("IO[bytes]", self.fileobj), tarinfo.offset_data)
        with Path(os.fsdecode(targetpath)).open("wb") as file:
            target, left = _Sparse(file), tarinfo.size
            while left:
                data = source.read(min(left, _COPIED))
                if not data:
                    raise tarfile.ReadError(f"{tarinfo.name} ends too early")
                left -= target.write(data)
            file.truncate(tarinfo.size)


def _checked(path: Path) -> Callable[[tarfile.TarInfo], tarfile.TarInfo]:
    """Return a filter that refuses what could not be put back at a path. tarfile.FilterError."""

    def check(member: tarfile.TarInfo) -> tarfile.TarInfo:
        placed, folder = _placed(member, path)
        tarfile.data_filter(placed, str(folder))
        return member

    return check


def _placed(member: tarfile.TarInfo, path: Path) -> tuple[tarfile.TarInfo, Path]:
    """Return a member of an archive as it stands at a path, and the folder that it must not leave.

    tarfile.FilterError: it is a link in the place of the path itself, which would lead elsewhere.
    """
    number, _, below = member.name.partition("/")
    if not below:
        if member.issym() or member.islnk():
            raise tarfile.LinkOutsideDestinationError(member, member.linkname)
        return member.replace(name=path.name, deep=False), path.parent
    placed = member.replace(name=below, deep=False)
    if member.islnk():
        # Of a link to a file below another number a copy is made.
        placed.linkname = member.linkname.removeprefix(f"{number}/")
    return placed, path
