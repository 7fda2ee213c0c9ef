"""What a disk can do: the same bytes in as many files, moved with nothing that a transfer adds."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gms.adapters.buffers import buffer_pages
from gms.domain.transfer import CHUNK_BYTES, SHARD_BYTES
from snapshot_shared.files import opened

Work = Callable[[memoryview, int], None]
"""Is given a chunk and where it stands in all the bytes."""


def huge_pages() -> mmap.mmap:
    """Return memory for one chunk with random bytes in it."""
    memory = buffer_pages(CHUNK_BYTES)
    memory[:] = os.urandom(len(memory))
    return memory


def files_of(size: int) -> int:
    """Return how many files a save of so many bytes has."""
    return -(-size // SHARD_BYTES)


def raw_transfer(
    path: Path,
    memory: Sequence[Any],
    size: int,
    call: Callable[..., int],
    *,
    threads: int = 4,
    files: int = 1,
    work: Work | None = None,
) -> None:
    """Do the least that moves the bytes: O_DIRECT from several threads, allocated, fsync.

    `call` is `os.pwritev` or `os.preadv`. Chunks of memory that are fewer than those of the files
    are used again and again. `work` is done on each chunk before it is written or after it is read.
    """
    is_new = call is os.pwritev
    flags = os.O_RDWR | os.O_DIRECT | (os.O_CREAT | os.O_TRUNC if is_new else 0)
    paths = [path if files == 1 else path.with_name(f"{path.name}-{n}") for n in range(files)]
    # All files but the last are whole chunks long.
    each = -(-size // files // CHUNK_BYTES) * CHUNK_BYTES
    descriptors: list[int] = []

    def move(at: int) -> int:
        place = memoryview(memory[at // CHUNK_BYTES % len(memory)])
        chunk = place[: min(CHUNK_BYTES, size - at)]
        if is_new and work:
            work(chunk, at)
        done = call(descriptors[at // each], [chunk], at % each)
        if work and not is_new:
            work(chunk, at)
        return done

    try:
        descriptors.extend(os.open(name, flags, 0o600) for name in paths)
        with ThreadPoolExecutor(threads) as pool:
            if is_new:
                for number, fd in enumerate(descriptors):
                    os.posix_fallocate(fd, 0, max(1, min(each, size - number * each)))
            if sum(pool.map(move, range(0, size, CHUNK_BYTES))) != size:
                raise OSError(f"{path}: fewer than {size} bytes were moved")
            list(pool.map(os.fsync, descriptors))
    finally:
        for fd in descriptors:
            os.close(fd)


def fio_seconds(folder: Path, size: int, verb: str, files: int) -> float:
    """Return how long fio takes for the bytes in as many files; `verb` is write or read."""
    names = [str(folder / f"fio-{number}") for number in range(files)]
    if verb == "write":
        # What a save writes is new.
        for name in names:
            Path(name).unlink(missing_ok=True)
    command = ["fio", "--name=limit", f"--rw={verb}", "--direct=1", "--bs=8M", "--iodepth=16"]
    command += ["--ioengine=libaio", f"--size={size}", "--end_fsync=1"]
    command += [f"--filename={':'.join(names)}", "--output-format=json"]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    speed = json.loads(found.stdout)["jobs"][0][verb]["bw_bytes"]
    return float(size / speed)


def drop(folder: Path) -> None:
    """Take all files beneath a folder out of the page cache; each must be on the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with opened(os.open(path, os.O_RDONLY)) as fd:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def warm(*places: Path) -> None:
    """Bring files, or those of folders, into the page cache."""
    for place in places:
        for path in place.iterdir() if place.is_dir() else [place]:
            with path.open("rb", buffering=0) as file:
                while file.read(CHUNK_BYTES):
                    pass


def removed(folder: Path, *names: str) -> None:
    """Remove what an earlier turn wrote, and wait until the file system has done so."""
    for name in names:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    with opened(os.open(folder, os.O_RDONLY | os.O_DIRECTORY)) as fd:
        os.fsync(fd)
