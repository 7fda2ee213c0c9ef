"""The face of a `SimDisk`: objects that stand in for modules.

Paths below the disk's mount and descriptors from `FIRST` up are the disk's; everything else goes
to the real modules. Errors, flags and results are those of Linux. Descriptor numbers never come
again, and closing one that a crash has closed does nothing.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import itertools
import os
import sqlite3
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tests.scenario.disk import Owner, SimDisk

FIRST = 1_000_000
LONGEST = 255
"""The most bytes of a name."""

_numbers = itertools.count(FIRST)


@dataclass(slots=True, eq=False)
class _Open:
    """An open file description, which duplicated descriptors share."""

    inode: int
    flags: int
    position: int = 0
    descriptors: int = 1


class _Place(NamedTuple):
    """Where a path ends: the directory, the last name, and the inode there, if any."""

    directory: int
    name: str
    inode: int | None


def _error(number: int, path: object = None) -> OSError:
    return OSError(number, os.strerror(number), None if path is None else str(path))


def _or_real(name: str, simulated: Callable[..., Any]) -> Callable[..., Any]:
    real = getattr(os, name)

    @functools.wraps(simulated)
    def call(self: SimOs, what: Any, *rest: Any, **options: Any) -> Any:
        if self._ours(what, options.get("dir_fd", options.get("src_dir_fd"))):
            return simulated(self, what, *rest, **options)
        return real(what, *rest, **options)

    return call


def _beside_the_real(face: type[SimOs]) -> type[SimOs]:
    """Leave each call to the real `os` whose path or descriptor is none of the disk."""
    for name, method in list(vars(face).items()):
        if callable(method) and name[0] != "_" and name != "fsync" and hasattr(os, name):
            setattr(face, name, _or_real(name, method))
    return face


@_beside_the_real
class SimOs:
    """An `os` whose file operations work on a simulated disk."""

    def __init__(self, disk: SimDisk) -> None:
        self._disk = disk
        self._mount = disk.mount.rstrip("/") + "/"
        self._table: dict[int, tuple[_Open, Owner]] = {}
        self._dead: set[int] = set()
        self.takes_direct = True
        """Whether files may be read and written past the cache; sectors then have 512 bytes."""
        self.path = _SimPath(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    # Who is meant.

    def _ours(self, path: Any, dir_fd: int | None = None) -> bool:
        if isinstance(path, int):
            return path >= FIRST
        text = path if isinstance(path, str) else os.fsdecode(path)
        if text.startswith("/"):
            return f"{text}/".startswith(self._mount)
        return dir_fd is not None and dir_fd >= FIRST

    def opened(self, fd: int) -> _Open:
        """Give the open file behind a descriptor. EBADF."""
        found = self._table.get(fd)
        if found is None:
            if fd not in self._dead:
                self._disk.tell_of_misuse(fd)
            raise _error(errno.EBADF)
        return found[0]

    def find(self, path: Any, dir_fd: int | None = None) -> int:
        """Give the inode at a path, or behind a descriptor. ENOENT."""
        if isinstance(path, int):
            return self.opened(path).inode
        place = self._walk(path, dir_fd)
        if place.inode is None:
            raise _error(errno.ENOENT, path)
        return place.inode

    def _walk(self, path: Any, dir_fd: int | None) -> _Place:
        """Go along a path; what is missing at its end is no error, what is missing before is."""
        text = path if isinstance(path, str) else os.fsdecode(path)
        if "\0" in text:
            raise ValueError("embedded null byte")
        start = 1 if text.startswith("/") or dir_fd is None else self.opened(dir_fd).inode
        if text.startswith("/"):
            text = text[len(self._mount) - 1 :]
        names = [part for part in text.split("/") if part not in ("", ".")]
        trail, place = [start], _Place(start, ".", start)
        for left, name in zip(reversed(range(len(names))), names, strict=True):
            place = self._step(trail, name, path)
            if left and name != "..":
                if place.inode is None:
                    raise _error(errno.ENOENT, path)
                trail.append(place.inode)
        return place

    def _step(self, trail: list[int], name: str, path: Any) -> _Place:
        entries = self._disk.names(trail[-1])
        if name == "..":
            above = trail[-2] if len(trail) > 1 else self._disk.parent(trail[-1])
            trail[:] = [*trail[:-2], above]
            return _Place(above, ".", above)
        if len(name) > LONGEST // 4 and len(os.fsencode(name)) > LONGEST:
            raise _error(errno.ENAMETOOLONG, path)
        return _Place(trail[-1], name, entries.get(name))

    # Descriptors.

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        self._disk.begin("open")
        place = self._walk(path, dir_fd)
        inode = place.inode
        if inode is None:
            if not flags & os.O_CREAT:
                raise _error(errno.ENOENT, path)
            self._disk.begin("create")
            inode = self._disk.add(bytearray(), mode & 0o7777)
            self._disk.nodes[inode].opens = 1
            self._disk.enter("open", (place.directory, place.name, inode))
        else:
            self._check_open(inode, flags, path)
            self._disk.nodes[inode].opens += 1
            if flags & os.O_TRUNC:
                self._disk.resize(inode, 0)
        return self._descriptor(_Open(inode, flags))

    def _check_open(self, inode: int, flags: int, path: Any) -> None:
        if flags & os.O_CREAT and flags & os.O_EXCL:
            raise _error(errno.EEXIST, path)
        is_folder = isinstance(self._disk.image[inode], dict)
        if flags & os.O_DIRECTORY and not is_folder:
            raise _error(errno.ENOTDIR, path)
        if is_folder and flags & (os.O_ACCMODE | os.O_CREAT):
            raise _error(errno.EISDIR, path)

    def _descriptor(self, opened: _Open) -> int:
        fd = next(_numbers)
        self._table[fd] = (opened, self._disk.owner())
        return fd

    def close(self, fd: int) -> None:
        if fd in self._dead:
            self._dead.discard(fd)
            return
        opened = self.opened(fd)
        del self._table[fd]
        opened.descriptors -= 1
        if not opened.descriptors:
            node = self._disk.nodes[opened.inode]
            node.locks.pop(id(opened), None)
            node.opens -= 1
            self._disk.release(opened.inode)

    def close_all(self, chosen: Callable[[Owner], bool]) -> None:
        """Close the descriptors of the owners that are chosen."""
        for fd in [fd for fd, (_, owner) in self._table.items() if chosen(owner)]:
            self.close(fd)
            self._dead.add(fd)

    def dup(self, fd: int) -> int:
        opened = self.opened(fd)
        opened.descriptors += 1
        return self._descriptor(opened)

    def lseek(self, fd: int, position: int, how: int) -> int:
        opened = self.opened(fd)
        size = len(self._disk.data(opened.inode))
        if how == os.SEEK_DATA:
            opened.position = self._data_at(opened.inode, position, size)
        else:
            opened.position = (0, opened.position, size)[how] + position
        return opened.position

    def _data_at(self, inode: int, position: int, size: int) -> int:
        for start, stop in sorted(self._disk.nodes[inode].holes):
            if start <= position < stop:
                position = stop
        if position >= size:
            raise _error(errno.ENXIO)
        return position

    def locks(self, opened: _Open) -> dict[int, int]:
        """Give who has locked a file and how, by the identity of the open file."""
        return self._disk.nodes[opened.inode].locks

    def open_descriptors(self) -> list[int]:
        """Give the descriptors that are open, for tests that look for leaks."""
        return sorted(self._table)

    def opened_by(self, owner: Owner) -> list[int]:
        """Return the inodes of what a process has open, one a descriptor."""
        return [opened.inode for opened, found in self._table.values() if found == owner]

    # Bytes.

    def read(self, fd: int, count: int) -> bytes:
        opened = self.opened(fd)
        data = self.pread(fd, count, opened.position)
        opened.position += len(data)
        return data

    def pread(self, fd: int, count: int, offset: int) -> bytes:
        opened = self.opened(fd)
        if opened.flags & os.O_ACCMODE == os.O_WRONLY:
            raise _error(errno.EBADF)
        self._check_sectors(opened, count, offset)
        count //= self._disk.begin("read") or 1
        return bytes(self._disk.data(opened.inode)[offset : offset + count])

    def preadv(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        data = self.pread(fd, sum(map(len, views)), offset)
        done = 0
        for view in views:
            piece = data[done : done + len(view)]
            view[: len(piece)] = piece
            done += len(piece)
        return done

    def write(self, fd: int, data: Any) -> int:
        opened = self.opened(fd)
        done = self._write(opened, data, opened.position)
        if not opened.flags & os.O_APPEND:
            opened.position += done
        return done

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        return self._write(self.opened(fd), data, offset)

    def pwritev(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        return self._write(self.opened(fd), b"".join(buffers), offset)

    def _write(self, opened: _Open, data: Any, offset: int) -> int:
        if opened.flags & os.O_ACCMODE == os.O_RDONLY:
            raise _error(errno.EBADF)
        new = bytes(data)
        self._check_sectors(opened, len(new), offset)
        part = self._disk.begin("write")
        if part and len(new) > 1:
            new = new[: len(new) // part]
        if opened.flags & os.O_APPEND:
            offset = len(self._disk.data(opened.inode))
        return self._disk.write(opened.inode, offset, new) if new else 0

    def _check_sectors(self, opened: _Open, count: int, offset: int) -> None:
        if opened.flags & os.O_DIRECT and (count % 512 or offset % 512):
            raise _error(errno.EINVAL)

    def fsync(self, fd: int) -> None:
        if not self._ours(fd):
            # The folder that holds the mount: the real disk has nothing to secure.
            return
        self._disk.sync(self.opened(fd).inode)

    def fdatasync(self, fd: int) -> None:
        self._disk.sync(self.opened(fd).inode)

    def posix_fallocate(self, fd: int, offset: int, length: int) -> None:
        if self._write(self.opened(fd), bytes(length), offset) < length:
            raise _error(errno.ENOSPC)

    def ftruncate(self, fd: int, size: int) -> None:
        self._disk.begin("ftruncate")
        self._disk.resize(self.opened(fd).inode, size)

    # Names.

    def mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        place = self._vacant("mkdir", path, dir_fd)
        self._disk.enter("mkdir", (place.directory, place.name, self._disk.add({}, mode)))

    def makedirs(self, name: Any, mode: int = 0o777, exist_ok: bool = False) -> None:
        head = os.path.dirname(os.fsdecode(name).rstrip("/"))
        if self._ours(head) and not self.path.exists(head):
            self.makedirs(head, exist_ok=True)
        try:
            self.mkdir(name, mode)
        except FileExistsError:
            if not exist_ok or not self.path.isdir(name):
                raise

    def link(
        self,
        src: Any,
        dst: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
        **_: bool,
    ) -> None:
        inode = self.find(src, src_dir_fd)
        place = self._vacant("link", dst, dst_dir_fd)
        if isinstance(self._disk.image[inode], dict):
            raise _error(errno.EPERM, src)
        self._disk.enter("link", (place.directory, place.name, inode))

    def _vacant(self, operation: str, path: Any, dir_fd: int | None) -> _Place:
        self._disk.begin(operation)
        place = self._walk(path, dir_fd)
        if place.inode is not None:
            raise _error(errno.EEXIST, path)
        return place

    def rename(
        self, src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        self._disk.begin("rename")
        source = self._walk(src, src_dir_fd)
        target = self._walk(dst, dst_dir_fd)
        if source.inode is None:
            raise _error(errno.ENOENT, src)
        if target.inode == source.inode:
            return
        if target.inode is not None:
            self._check_replaced(source.inode, target.inode, dst)
        self._disk.enter(
            "rename",
            (source.directory, source.name, None),
            (target.directory, target.name, source.inode),
        )

    def _check_replaced(self, source: int, target: int, path: Any) -> None:
        moved, there = self._disk.image[source], self._disk.image[target]
        if isinstance(there, dict):
            if not isinstance(moved, dict):
                raise _error(errno.EISDIR, path)
            if there:
                raise _error(errno.ENOTEMPTY, path)
        elif isinstance(moved, dict):
            raise _error(errno.ENOTDIR, path)

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._disk.begin("unlink")
        place = self._walk(path, dir_fd)
        if place.inode is None:
            raise _error(errno.ENOENT, path)
        if isinstance(self._disk.image[place.inode], dict):
            raise _error(errno.EISDIR, path)
        self._disk.enter("unlink", (place.directory, place.name, None))

    def rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        self._disk.begin("rmdir")
        place = self._walk(path, dir_fd)
        if place.inode is None:
            raise _error(errno.ENOENT, path)
        if self._disk.names(place.inode):
            raise _error(errno.ENOTEMPTY, path)
        self._disk.enter("rmdir", (place.directory, place.name, None))

    def listdir(self, path: Any = ".") -> list[str]:
        self._disk.begin("listdir")
        return list(self._disk.names(self.find(path)))

    # What is known.

    def stat(self, path: Any, *, dir_fd: int | None = None, **_: bool) -> os.stat_result:
        return self.status(self.find(path, dir_fd))

    def fstat(self, fd: int) -> os.stat_result:
        return self.status(self.opened(fd).inode)

    def status(self, inode: int) -> os.stat_result:
        """Give the status of an inode."""
        content, node = self._disk.image[inode], self._disk.nodes[inode]
        kind = stat.S_IFDIR if isinstance(content, dict) else stat.S_IFREG
        size = 4096 if isinstance(content, dict) else len(content)
        links = node.links + (1 if isinstance(content, dict) else 0)
        who = os.getuid(), os.getgid()
        blocks = (size - sum(stop - start for start, stop in node.holes)) // 512
        plain = (kind | node.mode, inode, FIRST, links, *who, size, 0, 0, 0)
        return os.stat_result(plain, {"st_blocks": blocks})

    def statvfs(self, path: Any) -> os.statvfs_result:
        free = self._disk.free()
        return os.statvfs_result((1, 1, 2**40, free, free, 2**20, 2**20, 2**20, 0, 255))

    def fstatvfs(self, fd: int) -> os.statvfs_result:
        return self.statvfs(fd)

    def chmod(self, path: Any, mode: int, **options: Any) -> None:
        self._disk.nodes[self.find(path, options.get("dir_fd"))].mode = mode

    def fchmod(self, fd: int, mode: int) -> None:
        self.chmod(fd, mode)


class _SimPath:
    """`os.path` with its questions about files answered by the disk."""

    def __init__(self, sim: SimOs) -> None:
        self._sim = sim

    def __getattr__(self, name: str) -> Any:
        return getattr(os.path, name)

    def _mode(self, path: Any) -> int:
        try:
            return self._sim.stat(path).st_mode
        except (OSError, ValueError):
            return 0

    def exists(self, path: Any) -> bool:
        return self._mode(path) != 0

    def isdir(self, path: Any) -> bool:
        return stat.S_ISDIR(self._mode(path))


class SimFcntl:
    """An `fcntl` that knows simulated descriptors: flock, and the flags of open files."""

    def __init__(self, sim: SimOs) -> None:
        self._sim = sim

    def __getattr__(self, name: str) -> Any:
        return getattr(fcntl, name)

    def fcntl(self, fd: int, command: int, flags: int = 0) -> int:
        """Get or set flags; EINVAL where the disk takes no direct I/O."""
        if fd < FIRST:
            return fcntl.fcntl(fd, command, flags)
        opened = self._sim.opened(fd)
        if command == fcntl.F_GETFL:
            return opened.flags
        if command != fcntl.F_SETFL:
            raise _error(errno.ENOSYS)
        if flags & os.O_DIRECT and not self._sim.takes_direct:
            raise _error(errno.EINVAL)
        opened.flags = flags
        return 0

    def flock(self, fd: int, operation: int) -> None:
        """Lock without waiting: a lock that another has is refused even if waiting was asked."""
        if fd < FIRST:
            fcntl.flock(fd, operation)
            return
        opened = self._sim.opened(fd)
        locks = self._sim.locks(opened)
        others = [kind for holder, kind in locks.items() if holder != id(opened)]
        if operation & fcntl.LOCK_UN:
            locks.pop(id(opened), None)
        elif others and (operation & fcntl.LOCK_EX or fcntl.LOCK_EX in others):
            raise _error(errno.EWOULDBLOCK if operation & fcntl.LOCK_NB else errno.EDEADLK)
        else:
            locks[id(opened)] = operation & (fcntl.LOCK_EX | fcntl.LOCK_SH)


class SimSqlite:
    """An `sqlite3` whose files are databases in memory, which live as long as this does."""

    _disks = itertools.count()

    def __init__(self) -> None:
        self._disk = next(self._disks)
        self._kept: dict[str, sqlite3.Connection] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(sqlite3, name)

    def connect(self, path: str | os.PathLike[str], **options: Any) -> sqlite3.Connection:
        """Connect to the database of a path; its file only says that there is one."""
        uri = f"file:{self._disk}{path}?mode=memory&cache=shared"
        if uri not in self._kept:
            self._kept[uri] = sqlite3.connect(uri, uri=True)
        return sqlite3.connect(uri, uri=True, **options)
