"""The archive of a bundle, written whole or not at all, and the ends of logs for it."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import platform
import sys
import tarfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from snapshot_shared.errors import NoSpace, SnapbackError
from snapshot_shared.files import open_root, opened, read_end
from snapshotctl.domain.bundle_files import LOG_BYTES, BundleFile
from snapshotctl.domain.exits import WrongArguments

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write(path: Path, members: Sequence[BundleFile], *, now: float) -> int:
    """Write an archive for its owner alone and return its size in bytes. NoSpace, WrongArguments.

    It gets its name when it is complete; after an error nothing is left behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        # A link that another user has put in its place is not followed.
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "wb") as file:
            with tarfile.open(fileobj=file, mode="w:gz") as archive:
                _fill(archive, path.name.partition(".")[0], members, int(now))
            file.flush()
            os.fsync(fd)
        size = temporary.stat().st_size
        temporary.replace(path)
    except OSError as error:
        if error.errno in _FULL:
            raise NoSpace(
                f"no space left for {path}: {error.strerror}",
                next_step="name a file on another disk: snapshotctl bundle --file /else/x.tar.gz",
            ) from error
        raise WrongArguments(
            f"{path} cannot be written: {error.strerror or error}",
            next_step="name a file in a folder that you may write to, with -o",
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    return size


def _fill(archive: tarfile.TarFile, folder: str, members: Sequence[BundleFile], now: int) -> None:
    for name, data in members:
        entry = tarfile.TarInfo(f"{folder}/{name}")
        entry.size, entry.mtime, entry.mode = len(data), now, 0o600
        archive.addfile(entry, io.BytesIO(data))


def log_ends(folder: Path) -> list[BundleFile]:
    """Return the end of each log in a folder that is a plain file and can be read."""
    found = []
    for name in sorted(path.name for path in folder.glob("*.log")):
        with contextlib.suppress(OSError, SnapbackError), opened(open_root(folder)) as root:
            found.append(BundleFile(f"logs/{name}", read_end(root, name, LOG_BYTES)))
    return found


def versions() -> dict[str, Any]:
    """Return the versions of Python, the system and the installed packages."""
    installed = {found.name: found.version for found in metadata.distributions()}
    return {
        "python": sys.version,
        "system": platform.platform(),
        "packages": dict(sorted(installed.items())),
    }
