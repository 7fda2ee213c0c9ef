"""Trees of files of a container as one archive, and back.

An archive is a tar file as POSIX.1-2001 (pax) has it: times to the nanosecond, extended attributes
as `SCHILY.xattr.*`, files with holes as GNU tar's sparse format 1.0. Entries are in the order of
their path's parts, a folder before what is in it; the first is the root of the tree, `.`. Of the
upper folder of an overlay, a name that was deleted is the device 0/0, and a folder that hides the
one below it has the attribute `trusted.overlay.opaque`.

Sockets are left out: who restores a process binds its sockets anew. Attributes are kept of files
and folders, and of them those that a container may have set: `user.*`, ACLs, capabilities.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import stat
import sys
import tarfile
from array import array
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple
from urllib.parse import quote_from_bytes, unquote_to_bytes

from snapshot_agent.helper.beneath import (
    LIMIT_ENTRIES,
    empty,
    lies_above,
    open_beneath,
    open_folder,
    remove,
    status_of,
    walk,
)
from snapshot_shared.errors import ArtifactCorrupt, NotEligible
from snapshot_shared.files import opened, translated, write_all

_LIMIT_PATH = 4095
"""Bytes of a path: what the kernel takes in one call."""
_LIMIT_RECORDS = 1 << 20
"""Bytes of names and attributes of one entry."""
_LIMIT_LINKED = 64 << 20
"""Bytes of the paths of files with several names."""
_LIMIT_EXTENTS = 1 << 20
"""Extents of one file with holes."""

_BLOCK = tarfile.BLOCKSIZE
_BUFFER = 1 << 20
_PIECE = 64 << 10
_HOLE = 4 << 10
"""Bytes of the smallest hole that is made of zeros."""
_ZEROS = bytes(_HOLE)

_CODEC = ("utf-8", "surrogateescape")
_XATTR = "SCHILY.xattr."
_OPAQUE = "trusted.overlay.opaque"
_WHITEOUT = "trusted.overlay.whiteout"
_ELSEWHERE = ("trusted.overlay.redirect", "trusted.overlay.metacopy")
_KEPT = ("security.capability", "system.posix_acl_access", "system.posix_acl_default")

_RECORDS_KNOWN = frozenset(
    {
        "GNU.sparse.major",
        "GNU.sparse.minor",
        "GNU.sparse.name",
        "GNU.sparse.realsize",
        "atime",
        "gid",
        "hdrcharset",
        "linkpath",
        "mtime",
        "path",
        "size",
        "uid",
    }
)
_RECORD = re.compile(rb"([1-9][0-9]{0,7}) ([ -<>-~]+)=")
_NUMBER = re.compile(r"[0-9]{1,18}", re.ASCII)
_TIME = re.compile(r"(-?)([0-9]{1,12})\.([0-9]{9})", re.ASCII)

_CHANGED = (
    errno.E2BIG,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.ELOOP,
    errno.ESTALE,
    errno.EXDEV,
    errno.ENAMETOOLONG,
)
"""What a tree answers that is not still, has another mount in it or too many files."""
_REFUSED = (
    *_CHANGED,
    errno.EBUSY,
    errno.EEXIST,
    errno.EFBIG,
    errno.EINVAL,
    errno.EISDIR,
    errno.EMLINK,
    errno.ENOTEMPTY,
)
"""What a file system answers to an entry that no tree of files can have given."""


def pack(
    source: int,
    sink: int,
    *,
    leave_out: Collection[str],
    is_upper: bool,
    limit_entries: int = LIMIT_ENTRIES,
) -> int:
    """Write the tree below the directory `source` into the file `sink`; return the bytes written.

    Nothing may change in the tree meanwhile. `leave_out` are paths relative to its root. With
    `is_upper` the tree is the upper folder of an overlay, to read which takes CAP_SYS_ADMIN.
    NotEligible, naming the path, for devices and other things that no archive can have; NoSpace.
    """
    packing = _Packing(_Sink(sink), is_upper=is_upper)
    path = "."
    try:
        with opened(open_folder(source, ".")) as root:
            packing.add_folder(root, path)
        for found in walk(source, frozenset(leave_out), limit_entries):
            path = found.path
            if not found.is_left:
                packing.add(found.folder, found.name, path, found.status)
        return packing.end()
    except OSError as error:
        if error.errno in _CHANGED:
            raise _ineligible(path, str(error.strerror)) from error
        raise translated(error, _shown(path)) from error


def unpack(
    archive: int,
    target: int,
    *,
    leave_out: Collection[str],
    is_upper: bool,
    limit_bytes: int = sys.maxsize,
    limit_entries: int = LIMIT_ENTRIES,
) -> int:
    """Put what an archive has into the directory `target`; return the bytes of files in it.

    The archive is hostile: nothing outside the directory is touched, nor a mount in it, nor
    `leave_out` (paths relative to it). What has the name of an entry is replaced, but a folder
    by a folder, which gets its owner, mode, times and attributes. With `is_upper` deleted names are
    removed, and folders that hide others emptied first. It imports nothing and starts no process.
    ArtifactCorrupt, naming the entry, for what `pack` does not write; NoSpace; NotEligible when the
    file system is read-only, which folders that are there may be on. Each may leave a part of the
    tree.
    """
    unpacking = _Unpacking(target, frozenset(leave_out), is_upper=is_upper)
    reader = _Reader(archive)
    total = 0
    for number, entry in enumerate(_entries(reader)):
        total += entry.size
        if number > limit_entries or total > limit_bytes:
            raise _corrupt(
                entry.path, f"is beyond the limit of {limit_entries} files, {limit_bytes} bytes"
            )
        unpacking.add(entry, reader)
    unpacking.end()
    return total


def _shown(path: str) -> str:
    # Its bytes need not be UTF-8, and a message must be.
    return repr(path if len(path) <= 200 else f"...{path[-200:]}")


def _ineligible(path: str, why: str) -> NotEligible:
    return NotEligible(f"{_shown(path)} cannot be archived: {why}", path=_shown(path))


def _corrupt(path: str, why: str) -> ArtifactCorrupt:
    return ArtifactCorrupt(f"{_shown(path)} of the archive {why}", file=_shown(path))


def _is_kept(attribute: str) -> bool:
    return attribute.startswith("user.") or attribute in _KEPT


def _padding(size: int) -> int:
    return -size % _BLOCK


def _attributes_of(fd: int) -> list[str]:
    try:
        return os.listxattr(fd)
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            return []
        raise


class _Sink:
    """A file that is written from its offset on, in large pieces."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._held = bytearray()
        self.size = 0

    def write(self, data: bytes | bytearray) -> None:
        self._held += data
        self.size += len(data)
        if len(self._held) >= _BUFFER:
            self.flush()

    def flush(self) -> None:
        write_all(self._fd, bytes(self._held))
        self._held.clear()

    def copy(self, fd: int, start: int, size: int) -> None:
        """Write a range of a file. OSError: ESTALE when the file has less."""
        end = start + size
        if size > _PIECE:
            self.flush()
        while start < end:
            if size > _PIECE:
                done = os.sendfile(self._fd, fd, start, end - start)
                self.size += done
            else:
                piece = os.pread(fd, end - start, start)
                done = len(piece)
                self.write(piece)
            if not done:
                raise OSError(errno.ESTALE, "it has become shorter")
            start += done


class _Packing:
    """An archive that is being written."""

    def __init__(self, sink: _Sink, *, is_upper: bool) -> None:
        self._sink = sink
        self._is_upper = is_upper
        self._first_names: dict[tuple[int, int], str] = {}
        self._first_names_size = 0

    def add(self, folder: int, name: str, path: str, status: os.stat_result) -> None:
        """Write one entry: what has a name in an open folder. OSError."""
        if len(os.fsencode(path)) > _LIMIT_PATH:
            raise _ineligible(path, f"its path is longer than {_LIMIT_PATH} bytes")
        match stat.S_IFMT(status.st_mode):
            case stat.S_IFDIR:
                with opened(open_folder(folder, name)) as fd:
                    self.add_folder(fd, path)
            case stat.S_IFCHR if self._is_upper and status.st_rdev == 0:
                self._add(path, status, tarfile.CHRTYPE)
            case stat.S_IFSOCK:
                pass
            case stat.S_IFCHR | stat.S_IFBLK:
                raise _ineligible(path, "it is a device")
            case _ if status.st_nlink > 1 and self._link(path, status):
                pass
            case stat.S_IFLNK:
                link = os.readlink(name, dir_fd=folder)
                self._add(path, status, tarfile.SYMTYPE, link=link)
            case stat.S_IFIFO:
                self._add(path, status, tarfile.FIFOTYPE)
            case _:
                flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOATIME
                with opened(open_beneath(folder, name, flags)) as fd:
                    self._add_file(fd, path, status)

    def add_folder(self, fd: int, path: str) -> None:
        """Write the entry of an open folder. OSError."""
        self._add(path, os.fstat(fd), tarfile.DIRTYPE, self._attributes(fd, path))

    def end(self) -> int:
        """Write what ends an archive; return the bytes of all of it."""
        self._sink.write(bytes(2 * _BLOCK))
        self._sink.flush()
        return self._sink.size

    def _link(self, path: str, status: os.stat_result) -> bool:
        """Write another name of a file that is in the archive, if it is."""
        first = self._first_names.get((status.st_dev, status.st_ino))
        if first is None:
            self._first_names[status.st_dev, status.st_ino] = path
            self._first_names_size += len(path)
            if self._first_names_size > _LIMIT_LINKED:
                raise _ineligible(path, "there are too many files with several names")
            return False
        self._add(path, status, tarfile.LNKTYPE, link=first)
        return True

    def _add_file(self, fd: int, path: str, status: os.stat_result) -> None:
        if not os.path.samestat(os.fstat(fd), status):
            raise OSError(errno.ESTALE, "it was replaced")
        attributes = self._attributes(fd, path)
        if attributes.pop(_WHITEOUT, None) is not None:
            self._first_names.pop((status.st_dev, status.st_ino), None)
            self._add(path, status, tarfile.CHRTYPE)
            return
        size = status.st_size
        if status.st_blocks * 512 >= size:
            self._add(path, status, tarfile.REGTYPE, attributes, size=size)
            self._sink.copy(fd, 0, size)
            self._sink.write(bytes(_padding(size)))
            return
        extents, stored = _map(fd, path, size)
        records = {
            "GNU.sparse.major": "1",
            "GNU.sparse.minor": "0",
            "GNU.sparse.name": path,
            "GNU.sparse.realsize": str(size),
        }
        stored += len(extents)
        name = "GNUSparseFile.0/file"
        self._add(name, status, tarfile.REGTYPE, attributes, size=stored, records=records)
        end = self._sink.size + stored
        self._sink.write(extents)
        for start, length in _extents(fd, size):
            self._sink.copy(fd, start, length)
        if self._sink.size != end:
            raise OSError(errno.ESTALE, "it was written to")
        self._sink.write(bytes(_padding(stored)))

    def _attributes(self, fd: int, path: str) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for name in _attributes_of(fd):
            if self._is_upper and name in _ELSEWHERE:
                raise _ineligible(path, f"it has {name}: its content is in another layer")
            if _is_kept(name) or (self._is_upper and name in (_OPAQUE, _WHITEOUT)):
                found[name] = os.getxattr(fd, name)
        # Other values say nothing of the folder itself.
        if found.get(_OPAQUE, b"y") != b"y":
            del found[_OPAQUE]
        return found

    def _add(
        self,
        path: str,
        status: os.stat_result,
        kind: bytes,
        attributes: Mapping[str, bytes] | None = None,
        *,
        link: str = "",
        size: int = 0,
        records: Mapping[str, str] | None = None,
    ) -> None:
        info = tarfile.TarInfo(path)
        info.type = kind
        info.linkname = link
        info.size = size
        info.mode = stat.S_IMODE(status.st_mode)
        info.uid, info.gid = status.st_uid, status.st_gid
        info.mtime = status.st_mtime_ns // 10**9
        info.pax_headers = {
            "mtime": _time(status.st_mtime_ns),
            "atime": _time(status.st_atime_ns),
            **(records or {}),
        }
        for name, value in (attributes or {}).items():
            info.pax_headers[f"{_XATTR}{quote_from_bytes(os.fsencode(name))}"] = value.decode(
                *_CODEC
            )
        if sum(len(value) for value in (attributes or {}).values()) > _LIMIT_RECORDS // 2:
            raise _ineligible(path, "its extended attributes are too long")
        self._sink.write(info.tobuf(tarfile.PAX_FORMAT, *_CODEC))


def _time(ns: int) -> str:
    return f"{'-' * (ns < 0)}{abs(ns) // 10**9}.{abs(ns) % 10**9:09}"


def _extents(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield offset and length of what is no hole in a file."""
    end = 0
    while end < size:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            raise
        end = min(os.lseek(fd, start, os.SEEK_HOLE), size)
        if start < end:
            yield start, end - start


def _map(fd: int, path: str, size: int) -> tuple[bytes, int]:
    """Return the map of a file with holes, as its entry begins, and the bytes that follow it."""
    lines = bytearray()
    count = stored = end = 0
    for start, length in _extents(fd, size):
        lines += b"%d\n%d\n" % (start, length)
        count += 1
        stored += length
        end = start + length
        if count >= _LIMIT_EXTENTS:
            raise _ineligible(path, f"it has more than {_LIMIT_EXTENTS} extents between holes")
    if end < size:
        # So that readers which know no size of the whole make the last hole, too.
        lines += b"%d\n0\n" % size
        count += 1
    text = b"%d\n%s" % (count, lines)
    return text + bytes(_padding(len(text))), stored


class _Entry(NamedTuple):
    """One entry of an archive: `size` bytes of its content follow it."""

    path: str
    kind: bytes
    mode: int
    uid: int
    gid: int
    size: int
    whole_size: int | None
    """The size of a file with holes, which are not in the archive."""
    link: str
    times: tuple[int, int]
    """When it was read and written, in ns."""
    attributes: Mapping[str, bytes]

    @property
    def parts(self) -> tuple[str, ...]:
        """The names on the way to it, none for the root of the tree."""
        return () if self.path == "." else tuple(self.path.split("/"))


class _Reader:
    """An archive from its offset on."""

    def __init__(self, fd: int) -> None:
        self._file = io.BufferedReader(io.FileIO(fd, closefd=False), _BUFFER)

    def exactly(self, size: int) -> bytes:
        """Return so many bytes. ArtifactCorrupt when the archive has fewer."""
        data = self._file.read(size)
        if len(data) != size:
            raise ArtifactCorrupt("the archive ends within an entry")
        return data

    def number(self) -> int:
        """Return the number in a line of a map of holes. ArtifactCorrupt."""
        line = self._file.readline(20)
        if not re.fullmatch(rb"[0-9]{1,18}\n", line):
            raise ArtifactCorrupt("the archive has a file with a bad map of its holes")
        return int(line)

    def position(self) -> int:
        """Return how far it was read."""
        return self._file.seek(0, os.SEEK_CUR)

    def go(self, offset: int) -> None:
        """Go on at an offset."""
        self._file.seek(offset)


def _entries(reader: _Reader) -> Iterator[_Entry]:
    """Yield the entries of an archive, each of which need not be read. ArtifactCorrupt."""
    while (block := reader.exactly(_BLOCK)) != bytes(_BLOCK):
        info, records = _header(block), dict[str, bytes]()
        if info.type == tarfile.XHDTYPE:
            if not 0 <= info.size <= _LIMIT_RECORDS:
                raise _corrupt(info.name, "has too many records")
            records = _records(reader.exactly(info.size + _padding(info.size))[: info.size])
            info = _header(reader.exactly(_BLOCK))
        entry = _entry(info, records)
        end = reader.position() + entry.size + _padding(entry.size)
        yield entry
        if reader.position() != end:
            reader.go(end)


def _header(block: bytes) -> tarfile.TarInfo:
    try:
        return tarfile.TarInfo.frombuf(block, *_CODEC)
    except (tarfile.HeaderError, ValueError) as error:
        raise ArtifactCorrupt(f"the archive has a bad header: {error}") from error


def _records(data: bytes) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    at = 0
    while at < len(data):
        match = _RECORD.match(data, at)
        end = at + int(match[1]) if match else 0
        if not match or not match.end() < end <= len(data) or data[end - 1 : end] != b"\n":
            raise ArtifactCorrupt("the archive has a bad record")
        key = match[2].decode("ascii")
        if key in found or not (key in _RECORDS_KNOWN or key.startswith(_XATTR)):
            raise ArtifactCorrupt(f"the archive has an unknown record, {key[:80]!r}")
        found[key] = data[match.end() : end - 1]
        at = end
    return found


def _entry(info: tarfile.TarInfo, records: Mapping[str, bytes]) -> _Entry:
    texts = {key: value.decode(*_CODEC) for key, value in records.items() if key in _RECORDS_KNOWN}
    is_sparse = "GNU.sparse.realsize" in texts
    path = texts.get("GNU.sparse.name" if is_sparse else "path", info.name)
    if info.type == tarfile.DIRTYPE:
        path = path.removesuffix("/")
    if not (path == "." and info.type == tarfile.DIRTYPE):
        _check(path, path)
    is_file = info.type in (tarfile.REGTYPE, tarfile.AREGTYPE)
    size = _number(path, texts.get("size"), info.size)
    if not is_file and (size or is_sparse):
        raise _corrupt(path, "has bytes though it is no file")
    link = texts.get("linkpath", info.linkname)
    if "\0" in link:
        raise _corrupt(path, "has a bad link")
    if info.type == tarfile.CHRTYPE and (info.devmajor or info.devminor):
        raise _corrupt(path, "is a device")
    return _Entry(
        path=path,
        kind=tarfile.REGTYPE if is_file else info.type,
        mode=info.mode & 0o7777,
        uid=_id(path, texts.get("uid"), info.uid),
        gid=_id(path, texts.get("gid"), info.gid),
        size=size,
        whole_size=_number(path, texts["GNU.sparse.realsize"], 0) if is_sparse else None,
        link=link,
        times=(_ns(path, texts.get("atime")), _ns(path, texts.get("mtime"))),
        attributes={
            os.fsdecode(unquote_to_bytes(key.removeprefix(_XATTR))): value
            for key, value in records.items()
            if key.startswith(_XATTR)
        },
    )


def _check(path: str, whose: str) -> None:
    """ArtifactCorrupt unless a path leads down from the root of the tree."""
    if (
        any(part in ("", ".", "..") for part in path.split("/"))
        or "\0" in path
        or len(os.fsencode(path)) > _LIMIT_PATH
    ):
        raise _corrupt(whose, "has a path that leads out of its tree, or none")


def _number(path: str, text: str | None, otherwise: int) -> int:
    if text is not None and not _NUMBER.fullmatch(text):
        raise _corrupt(path, "has a bad number")
    number = otherwise if text is None else int(text)
    if not 0 <= number < 1 << 60:
        raise _corrupt(path, "has a bad number")
    return number


def _id(path: str, text: str | None, otherwise: int) -> int:
    number = _number(path, text, otherwise)
    # The last one means no change to the kernel.
    if number >= (1 << 32) - 1:
        raise _corrupt(path, "has a bad owner")
    return number


def _ns(path: str, text: str | None) -> int:
    match = _TIME.fullmatch(text or "")
    if not match:
        raise _corrupt(path, "has a bad time")
    sign, seconds, rest = match.groups()
    return int(sign + "1") * (int(seconds) * 10**9 + int(rest))


class _Unpacking:
    """A folder that is being filled."""

    def __init__(self, target: int, leave_out: frozenset[str], *, is_upper: bool) -> None:
        self._target = target
        self._leave_out = leave_out
        self._is_upper = is_upper
        self._last: tuple[str, ...] | None = None
        self._folders: list[_Entry] = []

    def add(self, entry: _Entry, reader: _Reader) -> None:
        """Put an entry in its place. ArtifactCorrupt, NoSpace."""
        parts = entry.parts
        if self._last is not None and parts <= self._last:
            raise _corrupt(entry.path, "comes twice, or too late")
        self._last = parts
        self._settle(parts)
        if self._is_left_out(entry.path):
            return
        with _about(entry.path):
            self._check_attributes(entry)
            if not parts:
                self._enter_folder(self._target, ".", entry)
                return
            folder = "/".join(parts[:-1]) or "."
            flags = os.O_PATH | os.O_DIRECTORY
            with opened(open_beneath(self._target, folder, flags)) as fd:
                self._put(fd, parts[-1], entry, reader)

    def end(self) -> None:
        """Give the folders that are still open their times and the rest. ArtifactCorrupt."""
        self._settle(None)

    def _settle(self, parts: tuple[str, ...] | None) -> None:
        """Finish the folders in which the next entry is not."""
        while self._folders:
            above = self._folders[-1].parts
            if parts is not None and parts[: len(above)] == above:
                return
            entry = self._folders.pop()
            with (
                _about(entry.path),
                _read_only_stays(),
                opened(open_folder(self._target, entry.path)) as fd,
            ):
                os.fchown(fd, entry.uid, entry.gid)
                os.fchmod(fd, entry.mode)
                os.utime(fd, ns=entry.times)

    def _is_left_out(self, path: str) -> bool:
        return any(path == each or path.startswith(f"{each}/") for each in self._leave_out)

    def _check_attributes(self, entry: _Entry) -> None:
        for name, value in entry.attributes.items():
            if name == _OPAQUE and self._is_upper:
                if entry.kind != tarfile.DIRTYPE or entry.path == "." or value != b"y":
                    raise _corrupt(entry.path, "hides what nothing can hide")
            elif (
                not _is_kept(name)
                or "\0" in name
                or entry.kind not in (tarfile.REGTYPE, tarfile.DIRTYPE)
            ):
                raise _corrupt(entry.path, f"has the attribute {name[:80]!r}")

    def _put(self, folder: int, name: str, entry: _Entry, reader: _Reader) -> None:
        match entry.kind:
            case tarfile.DIRTYPE:
                self._make_folder(folder, name, entry)
            case tarfile.REGTYPE:
                self._clear(folder, name, entry)
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                with opened(os.open(name, flags, 0o600, dir_fd=folder)) as fd:
                    _fill(fd, entry, reader)
                    _finish(fd, entry)
            case tarfile.SYMTYPE:
                self._clear(folder, name, entry)
                os.symlink(entry.link, name, dir_fd=folder)
                os.chown(name, entry.uid, entry.gid, dir_fd=folder, follow_symlinks=False)
                os.utime(name, ns=entry.times, dir_fd=folder, follow_symlinks=False)
            case tarfile.CHRTYPE if self._is_upper:
                self._clear(folder, name, entry)
            case tarfile.LNKTYPE:
                self._link(folder, name, entry)
            case tarfile.FIFOTYPE:
                self._clear(folder, name, entry)
                os.mkfifo(name, 0o600, dir_fd=folder)
                # Opened for both, it does not wait for another side.
                with opened(open_beneath(folder, name, os.O_RDWR | os.O_NONBLOCK)) as fd:
                    if not stat.S_ISFIFO(os.fstat(fd).st_mode):
                        raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
                    _finish(fd, entry)
            case _:
                raise _corrupt(entry.path, f"is of a kind that is not allowed, {entry.kind!r}")

    def _clear(self, folder: int, name: str, entry: _Entry) -> None:
        if lies_above(entry.path, self._leave_out):
            raise _corrupt(entry.path, "would take the place of a folder with a mount in it")
        remove(folder, name)

    def _make_folder(self, folder: int, name: str, entry: _Entry) -> None:
        status = status_of(folder, name)
        if status is None or not stat.S_ISDIR(status.st_mode):
            remove(folder, name)
            os.mkdir(name, 0o700, dir_fd=folder)
        elif _OPAQUE in entry.attributes:
            below = f"{entry.path}/"
            keep = {each.removeprefix(below) for each in self._leave_out if each.startswith(below)}
            with opened(open_folder(folder, name)) as fd:
                empty(fd, keep)
        self._enter_folder(folder, name, entry)

    def _enter_folder(self, folder: int, name: str, entry: _Entry) -> None:
        with _read_only_stays(), opened(open_folder(folder, name)) as fd:
            _set_attributes(fd, entry)
        # They may be long, and many folders be open at once.
        self._folders.append(entry._replace(attributes={}))

    def _link(self, folder: int, name: str, entry: _Entry) -> None:
        _check(entry.link, entry.path)
        if self._is_left_out(entry.link):
            raise _corrupt(entry.path, f"is a link to {_shown(entry.link)}, which is left out")
        source_folder, _, source = entry.link.rpartition("/")
        self._clear(folder, name, entry)
        flags = os.O_PATH | os.O_DIRECTORY
        with opened(open_beneath(self._target, source_folder or ".", flags)) as fd:
            status = os.stat(source, dir_fd=fd, follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                raise _corrupt(entry.path, "is another name of a folder")
            os.link(source, name, src_dir_fd=fd, dst_dir_fd=folder, follow_symlinks=False)


def _finish(fd: int, entry: _Entry) -> None:
    """Give an open file what its entry says. OSError."""
    os.fchown(fd, entry.uid, entry.gid)
    # After the owner: a change of that takes such bits, and capabilities, away.
    os.fchmod(fd, entry.mode)
    _set_attributes(fd, entry)
    os.utime(fd, ns=entry.times)


def _set_attributes(fd: int, entry: _Entry) -> None:
    """Give an open file or folder the attributes of its entry, and no others. OSError."""
    wanted = {name: value for name, value in entry.attributes.items() if name != _OPAQUE}
    # A folder that was there has its own, and gives its default ACL to what is made in it.
    for name in _attributes_of(fd):
        if _is_kept(name) and name not in wanted:
            os.removexattr(fd, name)
    for name, value in wanted.items():
        os.setxattr(fd, name, value)


def _fill(fd: int, entry: _Entry, reader: _Reader) -> None:
    """Write the content of a file. OSError, ArtifactCorrupt."""
    whole, extents = entry.size, iter([(0, entry.size)])
    if entry.whole_size is not None:
        whole, extents = entry.whole_size, _read_map(entry, reader)
    for start, length in extents:
        for at in range(start, start + length, _PIECE):
            piece = reader.exactly(min(start + length - at, _PIECE))
            for begin, end in _runs(piece):
                _write_at(fd, piece[begin:end], at + begin)
    os.ftruncate(fd, whole)


def _runs(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield begin and end of what is not to be a hole: all but blocks of nothing but zeros."""
    begin = None
    for at in range(0, len(data), _HOLE):
        if data.startswith(_ZEROS[: len(data) - at], at):
            if begin is not None:
                yield begin, at
            begin = None
        elif begin is None:
            begin = at
    if begin is not None:
        yield begin, len(data)


def _read_map(entry: _Entry, reader: _Reader) -> Iterator[tuple[int, int]]:
    """Read where the content of a file with holes belongs. ArtifactCorrupt."""
    begin = reader.position()
    count = reader.number()
    if count > _LIMIT_EXTENTS:
        raise _corrupt(entry.path, f"has more than {_LIMIT_EXTENTS} extents between holes")
    numbers = array("q", (reader.number() for _ in range(2 * count)))
    starts, lengths = numbers[::2], numbers[1::2]
    used = reader.position() - begin
    reader.go(begin + used + _padding(used))
    end = 0
    for start, length in zip(starts, lengths, strict=True):
        if start < end:
            raise _corrupt(entry.path, "has a map of holes that is out of order")
        end = start + length
    if end > (entry.whole_size or 0) or used + _padding(used) + sum(lengths) != entry.size:
        raise _corrupt(entry.path, "has a map of holes that does not fit its sizes")
    return zip(starts, lengths, strict=True)


def _write_at(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, offset)
        view = view[done:]
        offset += done


@contextlib.contextmanager
def _read_only_stays() -> Iterator[None]:
    """Leave a folder as it is on a file system that is read-only.

    The upper folder of a container whose root is read-only has the root of the tree and the
    folders that its mounts are in, which whatever starts a container makes anew.
    """
    try:
        yield
    except OSError as error:
        if error.errno != errno.EROFS:
            raise


@contextlib.contextmanager
def _about(path: str) -> Iterator[None]:
    """Say of which entry an error of the file system is. ArtifactCorrupt, NoSpace, NotEligible."""
    try:
        yield
    except OSError as error:
        if error.errno in _REFUSED:
            raise _corrupt(path, f"cannot be unpacked: {error.strerror}") from error
        if error.errno == errno.EROFS:
            raise NotEligible(
                f"{_shown(path)} cannot be unpacked: the file system is read-only",
                path=_shown(path),
            ) from error
        raise translated(error, _shown(path)) from error
