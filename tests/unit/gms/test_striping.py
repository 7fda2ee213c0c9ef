"""How files are moved in several folders at a time, and how an error in one ends the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from gms.adapters.striping import in_folders
from gms.domain.transfer import FilePlan
from gms.ports import Advance, Moved

PLANS = [FilePlan(f"shard-{n}", 1, 1, (), stripe) for n, stripe in enumerate(["", "a", "a"])]
FOLDERS = {"": 10, "a": 11}


class DiskFailed(Exception):
    """What the disk of one folder answers."""


def test_every_folder_gets_its_files_and_its_share_of_the_threads() -> None:
    calls = []
    sizes = []

    def move(folder: int, indices: Sequence[int], threads: int, advance: Advance) -> Moved:
        calls.append((folder, list(indices), threads))
        advance(folder)
        return Moved(files=[], bytes=len(indices), backend="some")

    assert in_folders(FOLDERS, PLANS, 4, move, sizes.append).bytes == 3
    assert sorted(calls) == [(10, [0], 2), (11, [1, 2], 2)]
    assert sorted(sizes) == [10, 11]


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_an_error_in_one_folder_ends_the_others_at_their_next_chunk(is_wrapped: bool) -> None:
    failed = threading.Event()
    chunks = []

    def move(folder: int, indices: Sequence[int], threads: int, advance: Advance) -> Moved:
        del indices, threads
        if folder == FOLDERS["a"]:
            failed.set()
            raise DiskFailed("no more")
        assert failed.wait(30)
        try:
            # The other thread has yet to note its error when this one is first here.
            for number in range(3000):
                advance(number)
                time.sleep(0.01)
        except DiskFailed as error:
            if is_wrapped:
                raise RuntimeError("a backend with errors of its own") from error
            raise
        return Moved(files=[], bytes=1, backend="some")

    with pytest.raises(DiskFailed, match="no more"):
        in_folders(FOLDERS, PLANS, 2, move, chunks.append)
    assert len(chunks) < 3000


def test_an_error_of_the_progress_is_raised_as_it_is() -> None:
    def refuse(size: int) -> None:
        raise DiskFailed(str(size))

    def move(folder: int, indices: Sequence[int], threads: int, advance: Advance) -> Moved:
        del indices, threads
        advance(folder)
        raise AssertionError("the error was not raised")

    with pytest.raises(DiskFailed, match=r"10|11"):
        in_folders(FOLDERS, PLANS, 2, move, refuse)
