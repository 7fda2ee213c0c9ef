"""The mounts that /proc/<pid>/mountinfo lists, and lines that the kernel never writes."""

from __future__ import annotations

import pytest

from snapshot_agent.domain.mounts import mounts_in
from snapshot_shared.errors import ProcMalformed

LINE = "36 35 98:0 /mnt1 /mnt\\0402 rw,noatime master:1 shared:2 - ext3 /dev/root rw,errors=remount"


def test_a_mount_has_its_words_without_escapes() -> None:
    (mount,) = mounts_in(LINE + "\n")
    assert (mount.id, mount.parent, mount.path, mount.fs_type) == (36, 35, "/mnt 2", "ext3")


@pytest.mark.parametrize(
    "line",
    ["", "36", LINE.partition(" - ")[0], LINE.replace("36 35", "x 35"), "36 35 98:0 / - a b c"],
)
def test_a_malformed_line_is_an_error_that_shows_it(line: str) -> None:
    with pytest.raises(ProcMalformed, match="mountinfo"):
        mounts_in(f"{LINE}\n{line}\n")
