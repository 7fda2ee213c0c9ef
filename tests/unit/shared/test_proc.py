"""Lines of /proc are taken apart in one place, and one that is malformed is an error of ours."""

from __future__ import annotations

import pytest

from snapshot_shared.errors import ProcMalformed
from snapshot_shared.proc import cgroups_in, stat_words
from tests.unit.tables import each

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
