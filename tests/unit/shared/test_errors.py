"""How exceptions become failures that people read."""

from __future__ import annotations

import errno
import os

import pytest

from snapshot_shared.errors import failure_of


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
