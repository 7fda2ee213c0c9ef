"""The files of a part that another process has written: their digests, and what the disk has."""

import asyncio
import ctypes
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import xxhash

from snapshot_agent.adapters.copying import (
    CHUNK_BYTES,
    PIECE_BYTES,
    WRITE_BACK_BYTES,
    ByteCounter,
    WriteBack,
    copied,
    digested,
    listed,
    read_checked,
)
from snapshot_shared.artifact import Encryption, FileEntry
from snapshot_shared.encrypting import PartCipher
from snapshot_shared.errors import ArtifactCorrupt, InvalidName
from snapshot_shared.tasks import calls_under_way
from tests.support.agent_rig import ignored

SIZES = (0, 1, PIECE_BYTES, PIECE_BYTES + 1, CHUNK_BYTES - 1, CHUNK_BYTES, 3 * CHUNK_BYTES + 5)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "part"
    made.mkdir()
    return made


@pytest.fixture
def part(folder: Path) -> Iterator[int]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def entry_of(path: Path) -> FileEntry:
    data = path.read_bytes()
    chunks = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
    return FileEntry(
        name=path.name,
        size=len(data),
        chunk_bytes=CHUNK_BYTES,
        chunks=[xxhash.xxh3_128_hexdigest(chunk) for chunk in chunks],
    )


def entries_of(folder: Path) -> list[FileEntry]:
    return [entry_of(path) for path in sorted(folder.iterdir())]


def fill(folder: Path, *sizes: int) -> None:
    for number, size in enumerate(sizes):
        (folder / f"file-{number}").write_bytes(random.Random(number).randbytes(size))


async def test_every_file_has_the_digests_of_its_chunks_in_their_order_and_passes_with_them(
    folder: Path, part: int
) -> None:
    fill(folder, *SIZES)
    done: list[int] = []

    async def note(count: int) -> None:
        done.append(count)

    found = await digested(part, ByteCounter(note))
    assert found == entries_of(folder)
    assert done == sorted(done)
    counter = ByteCounter(ignored)
    await read_checked(part, found, counter)
    assert done[-1] == counter.done == sum(SIZES)


async def test_whatever_was_written_while_the_disk_wrote_the_digests_are_of_what_is_there(
    folder: Path, part: int
) -> None:
    """Files grow, are rewritten in place, shortened, replaced and removed, as none of CRIU are."""
    chance = random.Random(7)
    write_back = WriteBack(part)
    paths = [folder / f"pages-{number}.img" for number in range(4)]
    for _ in range(60):
        path = chance.choice(paths)
        data = chance.randbytes(chance.choice((100, PIECE_BYTES, WRITE_BACK_BYTES)))
        match chance.randrange(6):
            case 0 if path.exists():
                with path.open("r+b") as file:
                    file.seek(chance.randrange(max(1, path.stat().st_size)))
                    file.write(data)
            case 1 if path.exists():
                os.truncate(path, path.stat().st_size // 2)
            case 2:
                path.unlink(missing_ok=True)
            case 3:
                (folder / "new").write_bytes(data)
                (folder / "new").rename(path)
            case _:
                with path.open("ab") as file:
                    file.write(data)
        write_back.go_on()
        await asyncio.sleep(0)
    await write_back.over()
    assert await digested(part, ByteCounter(ignored)) == entries_of(folder)


class Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


def dirty_pages(path: Path) -> int:
    """Return the pages of a file which the disk was not yet given, as `cachestat` counts them."""
    counts = (ctypes.c_uint64 * 5)()
    with path.open("rb") as file:
        whole = Range(0, 0)
        done = ctypes.CDLL(None).syscall(
            451, file.fileno(), ctypes.byref(whole), ctypes.byref(counts), 0
        )
    if done:
        pytest.skip("needs Linux 6.5 or later")
    return counts[1]


async def test_the_disk_is_given_what_has_grown_while_it_is_written(
    folder: Path, part: int
) -> None:
    path = folder / "pages-1.img"
    path.write_bytes(b"a" * WRITE_BACK_BYTES)
    if not dirty_pages(path):
        pytest.skip("the file system of temporary files is in memory")
    write_back = WriteBack(part)

    async def dirty_after(more: bytes) -> int:
        with path.open("ab") as file:
            file.write(more)
        write_back.go_on()
        await write_back.over()
        return dirty_pages(path)

    assert await dirty_after(b"") == 0
    # Too little to be worth it.
    assert await dirty_after(b"b" * (WRITE_BACK_BYTES - 1)) > 0
    assert await dirty_after(b"c") == 0


async def test_what_cannot_be_given_to_the_disk_early_is_no_error(folder: Path, part: int) -> None:
    (folder / "folder").mkdir()
    (folder / "pages-1.img").symlink_to("/dev/full")
    (folder / "pages-2.img").hardlink_to(__file__)
    (folder / "pages-3.img").write_bytes(bytes(WRITE_BACK_BYTES))
    write_back = WriteBack(part)
    write_back.go_on()
    await write_back.over()


async def test_what_a_part_cannot_hold_is_refused_and_nothing_reads_on(
    folder: Path, part: int
) -> None:
    fill(folder, *SIZES)
    (folder / "link").symlink_to("file-1")
    with pytest.raises(InvalidName, match="link"):
        await digested(part, ByteCounter(ignored))
    assert not calls_under_way()


async def test_a_cancelled_reading_is_over_when_its_caller_goes_on(folder: Path, part: int) -> None:
    fill(folder, *(2 * CHUNK_BYTES for _ in range(6)))
    begun = asyncio.Event()

    async def note(_count: int) -> None:
        begun.set()

    reading = asyncio.ensure_future(digested(part, ByteCounter(note)))
    await begun.wait()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert not calls_under_way()


@pytest.mark.parametrize("ends_with_a_hole", [False, True])
async def test_zeros_of_an_encrypted_part_are_holes_after_a_restore(
    tmp_path: Path, folder: Path, part: int, *, ends_with_a_hole: bool
) -> None:
    state, restored = tmp_path / "state", tmp_path / "restored"
    for made in (state, restored):
        made.mkdir()
    size = 6 * CHUNK_BYTES + 7
    (state / "sparse").touch()
    os.truncate(state / "sparse", size)
    with (state / "sparse").open("r+b") as file:
        file.seek(CHUNK_BYTES if ends_with_a_hole else size - 4)
        file.write(b"here")
    (state / "empty").touch()
    cipher = PartCipher(bytes(32), "part", Encryption(key="k", data_key=b""))
    source, target = (os.open(made, os.O_RDONLY | os.O_DIRECTORY) for made in (state, restored))
    entries = await copied(source, part, ByteCounter(ignored), cipher)
    assert (folder / "sparse").stat().st_size > size
    await read_checked(part, entries, ByteCounter(ignored), target, cipher=cipher)
    assert (restored / "sparse").read_bytes() == (state / "sparse").read_bytes()
    assert (restored / "sparse").stat().st_blocks * 512 < 2 * CHUNK_BYTES
    assert (restored / "empty").read_bytes() == b""
    for descriptor in (source, target):
        os.close(descriptor)


async def test_holes_stay_holes_in_a_part_and_after_a_restore(
    tmp_path: Path, folder: Path, part: int
) -> None:
    state, restored = tmp_path / "state", tmp_path / "restored"
    size, at = 60 * CHUNK_BYTES + 7, 40 * CHUNK_BYTES + 11
    for made in (state, restored):
        made.mkdir()
    with (state / "sparse").open("wb") as file:
        file.seek(at)
        file.write(b"here")
        file.truncate(size)
    (state / "hole").touch()
    os.truncate(state / "hole", 5)
    (state / "dense").write_bytes(bytes(3 * CHUNK_BYTES) + b"end")
    source, target = (os.open(made, os.O_RDONLY | os.O_DIRECTORY) for made in (state, restored))
    assert sum(taken for _, taken in listed(source)) < 4 * CHUNK_BYTES
    entries = await copied(source, part, ByteCounter(ignored))
    assert [(each.name, each.size) for each in entries] == [
        ("dense", 3 * CHUNK_BYTES + 3),
        ("hole", 5),
        ("sparse", size),
    ]
    assert [entries[0], entries[1]] == [entry_of(folder / "dense"), entry_of(folder / "hole")]
    counter = ByteCounter(ignored)
    await read_checked(part, entries, counter, target)
    assert counter.done == size + 5 + 3 * CHUNK_BYTES + 3
    # A reading without a copy, as of a verification.
    await read_checked(part, entries, ByteCounter(ignored))
    for made in (folder, restored):
        found = (made / "sparse").stat()
        assert (found.st_size, found.st_blocks * 512 <= CHUNK_BYTES) == (size, True)
        with (made / "sparse").open("rb") as file:
            file.seek(at - 1)
            assert file.read(6) == b"\0here\0"
        assert (made / "hole").read_bytes() == bytes(5)
        assert (made / "dense").read_bytes() == (state / "dense").read_bytes()
    with (folder / "sparse").open("r+b") as file:
        file.seek(50 * CHUNK_BYTES)
        file.write(b"x")
    with pytest.raises(ArtifactCorrupt, match="sparse: chunk 50 "):
        await read_checked(part, entries, ByteCounter(ignored))
    for descriptor in (source, target):
        os.close(descriptor)


@pytest.mark.parametrize("chunk", [0, 1, 3])
async def test_a_byte_that_changed_is_found_in_its_chunk_and_nothing_reads_on(
    folder: Path, part: int, chunk: int
) -> None:
    fill(folder, *SIZES)
    entries = entries_of(folder)
    with (folder / entries[-1].name).open("r+b") as file:
        file.seek(chunk * CHUNK_BYTES + 3)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(ArtifactCorrupt) as caught:
        await read_checked(part, entries, ByteCounter(ignored))
    found = caught.value.values
    assert (found["file"], found["chunk"]) == (entries[-1].name, chunk)
    assert not calls_under_way()
