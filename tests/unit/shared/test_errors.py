"""How exceptions become failures that people read, and lines of /proc that are malformed."""

from __future__ import annotations

import errno
import os

import pytest

from snapback_client.frames import error_of
from snapshot_shared.errors import (
    DAMAGE,
    ContainerFailed,
    Failure,
    Incompatible,
    ProcMalformed,
    failure_of,
    pods_own,
)
from snapshot_shared.proc import cgroups_in, stat_words
from tests.unit.tables import each


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.EIO, "StorageFailed"),
        (errno.EROFS, "StorageFailed"),
        (errno.ENOSPC, "NoSpace"),
        (errno.EDQUOT, "NoSpace"),
        (errno.EPIPE, "Internal"),
    ],
)
def test_an_error_of_the_disk_is_named_as_one(number: int, reason: str) -> None:
    failure = failure_of(OSError(number, os.strerror(number), "part.bin"))
    assert failure.reason == reason
    assert "part.bin" in failure.message


@pytest.mark.parametrize("reason", sorted(DAMAGE))
def test_what_a_pod_calls_damage_is_a_failure_of_the_pod(reason: str) -> None:
    said = Failure(reason=reason, message="chunk 3", values={"chunk": 3, "message": "m"})
    with pytest.raises(ContainerFailed, match=f"chunk 3 .{reason}.") as raised, pods_own():
        raise error_of(said)
    assert raised.value.values == said.values


def test_what_a_pod_says_of_itself_stays_what_it_is() -> None:
    with pytest.raises(Incompatible), pods_own():
        raise Incompatible("other GPUs")


STAT = b"42 (a) b (c)) S 7 42 41 0 -1 4194560 1 0 0 0 2 3 0 0 20 0 1 0 123456 7 8 9\n"
PATH = "/proc/42/stat"


def test_a_name_with_brackets_and_blanks_does_not_move_the_other_words() -> None:
    words = stat_words(STAT, PATH)
    assert (words[0], words[1], words[3], words[19]) == (b"S", b"7", b"41", b"123456")


@each(
    "line",
    [
        b"",
        b"\n",
        b"42",
        b"42 (a",
        b"42 (a)",
        b"42 (a) S 7 42",
        STAT.replace(b" 7 42 41", b" x 42 41"),
        STAT.replace(b"123456", b"1.5"),
    ],
)
def test_a_line_of_stat_that_is_malformed_is_named(line: bytes) -> None:
    with pytest.raises(ProcMalformed, match=PATH) as caught:
        stat_words(line, PATH)
    assert caught.value.values["path"] == PATH


def test_cgroups_are_listed_by_their_controllers() -> None:
    text = "3:memory,pids:/a:b\n0::/user.slice\n"
    assert cgroups_in(text, "/proc/1/cgroup") == [("memory,pids", "/a:b"), ("", "/user.slice")]


@pytest.mark.parametrize("text", ["\n", "0", "0:memory", "junk\n0::/a\n"])
def test_a_line_of_cgroup_that_is_malformed_is_named(text: str) -> None:
    with pytest.raises(ProcMalformed, match="/proc/1/cgroup"):
        cgroups_in(text, "/proc/1/cgroup")
