"""Durable and safe file operations: fsynced, beneath a root, never through a link.

Everything takes an already opened directory descriptor and path components; a component is one
name, so `..` and absolute paths cannot occur. Directories are 0700 and files 0600.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import stat
from collections.abc import Iterator, Sequence

from snapshot_shared.errors import (
    ArtifactCorrupt,
    ArtifactExists,
    ArtifactMissing,
    ArtifactRootEmpty,
    InvalidName,
    NoSpace,
)

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def check_component(name: str) -> str:
    """Return one path component: printable ASCII without slashes, not `.` or `..`, at most 128.

    Other names exist, but people could not distinguish them where they are shown.
    """
    if not (name.isascii() and name.isprintable()) or "\\" in name:
        raise InvalidName(
            f"{name[:80]!r} is not a plain file name",
            next_step="use printable ASCII characters without slashes and backslashes",
            value=name[:80],
        )
    return _check_step(name)


def _check_step(name: str) -> str:
    """Return a name that leads one step down, whatever characters others have put into it."""
    if (
        not name
        or name in (".", "..")
        or "/" in name
        or "\0" in name
        or len(os.fsencode(name)) > 128
    ):
        raise InvalidName(f"{name[:80]!r} is not a plain file name", value=name[:80])
    return name


@contextlib.contextmanager
def opened(fd: int) -> Iterator[int]:
    """Close a descriptor at the end of a block."""
    try:
        yield fd
    finally:
        os.close(fd)


def make_folder(path: str | os.PathLike[str]) -> None:
    """Create a directory and what is missing above it, durably.

    What is there already is secured too: its maker may have ended before that.
    """
    path = os.path.abspath(path)
    try:
        os.mkdir(path, 0o700)
    except FileNotFoundError:
        make_folder(os.path.dirname(path))
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
    except FileExistsError:
        if not os.path.isdir(path):
            raise
    except OSError as error:
        raise translated(error, path) from error
    else:
        _secure_entry(os.path.dirname(path))
    _secure_entry(path)


def _secure_entry(path: str) -> None:
    # A folder that may be entered but not read cannot be synced.
    with contextlib.suppress(PermissionError), opened(open_root(os.path.dirname(path))) as folder:
        secure(folder, path)


def take_lock(path: str | os.PathLike[str]) -> int | None:
    """Lock a file that is made when it is missing; None when another process holds the lock.

    Closing the descriptor frees it, and so does the end of the process.
    """
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def open_root(path: str | os.PathLike[str], *, create: bool = False) -> int:
    """Open a root directory; its own path may hold links, nothing beneath it may."""
    if create:
        make_folder(path)
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def open_own(path: str | os.PathLike[str]) -> int:
    """Open a directory that others may have replaced: ArtifactCorrupt where it is a link.

    The path above it may hold links. FileNotFoundError or ArtifactMissing: it is not there.
    """
    above, name = os.path.split(path)
    with opened(open_root(above)) as folder:
        return open_dir(folder, [name])


def open_dir(root: int, parts: Sequence[str], *, foreign: bool = False) -> int:
    """Open the directory `parts` beneath `root`, following no link. The caller closes it.

    `foreign` is for folders that others have named, which may have any characters.
    """
    check = _check_step if foreign else check_component
    current = os.dup(root)
    try:
        for part in parts:
            following = _openat(current, check(part), _DIRECTORY)
            os.close(current)
            current = following
    except BaseException:
        os.close(current)
        raise
    return current


def open_artifact(root: int, parts: Sequence[str]) -> int:
    """Open a directory of an artifact to read it. ArtifactRootEmpty, ArtifactMissing.

    A root that holds nothing at all was not mounted, rather than every artifact lost.
    """
    try:
        return open_dir(root, parts)
    except ArtifactMissing as error:
        if any(name[0] != "." and name != "lost+found" for name in os.listdir(root)):
            raise
        raise ArtifactRootEmpty(
            f"{'/'.join(parts)} is not there, nor anything else below the artifact root",
            path="/".join(parts),
        ) from error


def make_dir(root: int, parts: Sequence[str], *, exclusive: bool = False) -> int:
    """Create the directories `parts` beneath `root`, durably, and open the last.

    With `exclusive` the last one must not exist yet: ArtifactExists else.
    """
    current = os.dup(root)
    try:
        for index, part in enumerate(parts):
            is_last = index == len(parts) - 1
            try:
                os.mkdir(check_component(part), 0o700, dir_fd=current)
            except FileExistsError:
                if exclusive and is_last:
                    raise ArtifactExists(
                        f"{'/'.join(parts)} exists already", path="/".join(parts)
                    ) from None
            except OSError as error:
                raise translated(error, part) from error
            # One that was there too: its maker may have ended before that.
            secure(current, part)
            following = _openat(current, part, _DIRECTORY)
            os.close(current)
            current = following
    except BaseException:
        os.close(current)
        raise
    return current


def open_regular(
    directory: int,
    name: str,
    *,
    size: int | None = None,
    shared: bool = False,
    writable: bool = False,
) -> int:
    """Open a regular file for reading, which has, if given, exactly `size` bytes.

    It must have this one name, unless it may be `shared`: by artifacts that hold the same bytes.
    """
    mode = os.O_RDWR if writable else os.O_RDONLY
    flags = mode | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    fd = _openat(directory, check_component(name), flags)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or (found.st_nlink != 1 and not shared):
            raise ArtifactCorrupt(f"{name} is not a plain file with one link", file=name)
        if size is not None and found.st_size != size:
            raise ArtifactCorrupt(
                f"{name} has {found.st_size} bytes, its manifest says {size}",
                file=name,
                found=found.st_size,
                expected=size,
            )
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_bounded(directory: int, name: str, limit: int) -> bytes:
    """Read a whole small file. ArtifactCorrupt when it has more than `limit` bytes."""
    with opened(open_regular(directory, name)) as fd:
        size = os.fstat(fd).st_size
        if size > limit:
            raise ArtifactCorrupt(
                f"{name} has {size} bytes, the limit is {limit}", file=name, found=size, limit=limit
            )
        data = b""
        while len(data) < size and (piece := os.read(fd, size - len(data))):
            data += piece
        return data


def read_end(directory: int, name: str, limit: int) -> bytes:
    """Return the last `limit` bytes of a file that others may have put there."""
    with opened(open_regular(directory, name)) as fd:
        return os.pread(fd, limit, max(0, os.fstat(fd).st_size - limit))


def read_file(path: str | os.PathLike[str]) -> bytes:
    """Read a whole file of our own, however long it is."""
    with opened(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as fd:
        return read_all(fd)


def read_all(fd: int) -> bytes:
    """Read on to the end of a file of our own."""
    pieces: list[bytes] = []
    while piece := os.read(fd, 1 << 20):
        pieces.append(piece)
    return b"".join(pieces)


def create_file(directory: int, name: str) -> int:
    """Create a file that must not exist, for writing, 0600."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return _openat(directory, check_component(name), flags, 0o600)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write every byte or raise. NoSpace when the disk is full."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except OSError as error:
            raise _write_failed(error, fd, len(view)) from error


def _write_failed(error: OSError, fd: int, left: int) -> Exception:
    name = f"fd {fd}"
    with contextlib.suppress(OSError):
        name = os.readlink(f"/proc/self/fd/{fd}")
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return translated(error, name)
    free = free_bytes(fd)
    return NoSpace(
        f"no space left while writing {name}: {left} more bytes are needed, {free} are free",
        needed=left,
        free=free,
        path=name,
    )


def write_new(directory: int, name: str, data: bytes) -> None:
    """Put a whole file in place durably: temporary name, fsync, link without replacing, fsync.

    An equal file that stands there already is success; a different one is ArtifactExists.
    """
    temporary = f".{name}.tmp"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary, dir_fd=directory)
    try:
        with opened(create_file(directory, temporary)) as fd:
            write_all(fd, data)
            secure(fd, name)
        try:
            os.link(
                temporary, name, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=False
            )
        except FileExistsError:
            os.unlink(temporary, dir_fd=directory)
            if not _holds(directory, name, data):
                raise ArtifactExists(f"another {name} stands there", file=name) from None
            secure(directory, name)
            return
        except OSError as error:
            raise translated(error, name) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=directory)
    secure(directory, name)


def _holds(directory: int, name: str, data: bytes) -> bool:
    with opened(open_regular(directory, name)) as fd:
        return os.fstat(fd).st_size == len(data) and read_all(fd) == data


def settle_new(directory: int, name: str) -> None:
    """Take away the second name that a killed `write_new` has left a file which is in place."""
    with contextlib.suppress(FileNotFoundError):
        os.stat(name, dir_fd=directory, follow_symlinks=False)
        os.unlink(f".{name}.tmp", dir_fd=directory)


def write_replacing(
    directory: int,
    name: str,
    data: bytes,
    *,
    mode: int = 0o600,
    owner: tuple[int, int] = (-1, -1),
    durable: bool = True,
) -> None:
    """Put a whole file in place, over an older one: temporary name, fsync, rename, fsync.

    `owner` is a uid and a gid; -1 is that of this process. Without `durable` there is no fsync.
    """
    temporary = f".{check_component(name)}.tmp"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary, dir_fd=directory)
    try:
        with opened(create_file(directory, temporary)) as fd:
            own_by(fd, owner, mode)
            write_all(fd, data)
            if durable:
                secure(fd, name)
        os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except Exception:
        # What it takes of a full disk may be what others need.
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=directory)
        raise
    if durable:
        secure(directory, name)


def own_by(fd: int, owner: tuple[int, int], mode: int) -> None:
    """Set uid and gid of an open file or directory (-1 changes neither), and its mode."""
    if owner != (-1, -1):
        os.fchown(fd, *owner)
    os.fchmod(fd, mode)


def remove_tree(parent: int, name: str, *, durable: bool = True) -> None:
    """Remove a directory tree beneath `parent`, following no link. Absent is success."""
    try:
        directory = os.open(_check_step(name), _DIRECTORY, dir_fd=parent)
    except FileNotFoundError:
        pass
    else:
        with opened(directory) as top:
            _empty(top)
        os.rmdir(name, dir_fd=parent)
    if durable:
        # Also of an absent one: what removed it may have ended before that.
        secure(parent, name)


def _empty(top: int) -> None:
    """Remove what is in a directory; a tree may be deeper than descriptors or calls may nest.

    So what is further down is moved to the top first.
    """
    folders = _without_files(top)
    fresh = (f".{number}" for number in itertools.count())
    taken = set(folders)
    while folders:
        name = folders.pop()
        with opened(os.open(name, _DIRECTORY, dir_fd=top)) as folder:
            for below in _without_files(folder):
                folders.append(next(found for found in fresh if found not in taken))
                os.rename(below, folders[-1], src_dir_fd=folder, dst_dir_fd=top)
        os.rmdir(name, dir_fd=top)


def _without_files(directory: int) -> list[str]:
    """Return the names of the directories in one, once all else in it is removed."""
    folders: list[str] = []
    for name in os.listdir(directory):
        if stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
            folders.append(name)
        else:
            os.unlink(name, dir_fd=directory)
    return folders


def names_in(directory: int) -> list[str]:
    """Name everything that is in a directory."""
    return os.listdir(directory)


def secure_tree(directory: int) -> None:
    """Fsync a directory and all that is beneath it, following no link. NoSpace."""
    for name in os.listdir(directory):
        if stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
            with opened(_openat(directory, name, _DIRECTORY)) as folder:
                secure_tree(folder)
        else:
            with opened(open_regular(directory, name, shared=True)) as file:
                secure(file, name)
    secure(directory, ".")


def free_bytes(directory: int) -> int:
    """Return the bytes that an unprivileged writer can still use on the file system."""
    found = os.fstatvfs(directory)
    return found.f_bavail * found.f_frsize


def require_space(directory: int, needed: int, what: str) -> None:
    """NoSpace with both numbers unless `needed` bytes fit."""
    check_space(free_bytes(directory), needed, what)


def check_space(free: int, needed: int, what: str) -> None:
    """NoSpace with both numbers unless `needed` bytes fit where so many are free."""
    if free < needed:
        raise NoSpace(f"{what} needs {needed} bytes, {free} are free", needed=needed, free=free)


def translated(error: OSError, name: str) -> Exception:
    """Name an OS error in the product's words: a full disk, a missing or a linked file."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpace(f"no space left while writing {name}", path=name)
    if error.errno == errno.ENOENT:
        return ArtifactMissing(f"{name} does not exist", path=name)
    if error.errno in (errno.ELOOP, errno.ENOTDIR):
        return ArtifactCorrupt(f"{name} is a link or no directory", path=name)
    if error.errno == errno.EEXIST:
        return ArtifactExists(f"{name} exists already", path=name)
    return error


def _openat(directory: int, name: str, flags: int, mode: int = 0) -> int:
    try:
        return os.open(name, flags, mode, dir_fd=directory)
    except OSError as error:
        raise translated(error, name) from error


def secure(fd: int, name: str) -> None:
    """Fsync a file or a directory; `name` is what that is about. NoSpace."""
    try:
        os.fsync(fd)
    except OSError as error:
        raise translated(error, name) from error
