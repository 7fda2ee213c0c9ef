"""How exceptions become failures that people read."""

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
    failure_of,
    pods_own,
)


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
