"""What a saver and a loader in a container read off their environment."""

from __future__ import annotations

import pytest

from gms.domain.containers import Settings, read_settings
from gms.domain.tasks import Way
from snapshot_shared.errors import InvalidInput

NEEDED = {"GMS_SOCKET_DIR": "/run/gms", "GMS_CHECKPOINT_DIR": "/store"}
PLAIN = {
    "socket_dir": "/run/gms",
    "checkpoint_dir": "/store",
    "order_file": "/store/order.json",
    "traceparent": "",
    "save_workers": 4,
    "load_workers": 8,
    "shard_bytes": None,
    "lock_s": None,
    "way": Way("posix-direct", ""),
}


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, {}),
        ({"GMS_ORDER_FILE": "/order"}, {"order_file": "/order"}),
        (
            {"GMS_SAVE_WORKERS": "64", "GMS_LOAD_WORKERS": "1"},
            {"save_workers": 64, "load_workers": 1},
        ),
        (
            {"GMS_SAVE_WORKERS": "65", "GMS_LOAD_WORKERS": "65"},
            {"save_workers": 64, "load_workers": 64},
        ),
        ({"GMS_SHARD_SIZE_BYTES": str(2**50 - 1)}, {"shard_bytes": 2**50 - 1}),
        ({"GMS_SAVE_LOCK_TIMEOUT_MS": "1500"}, {"lock_s": 1.5}),
    ],
)
def test_what_is_not_set_has_its_default(given: dict[str, str], found: dict[str, object]) -> None:
    assert read_settings(NEEDED | given) == Settings(**PLAIN | found)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", str(2**50), "\u0663"])
def test_a_number_that_is_none_is_named(text: str) -> None:
    with pytest.raises(InvalidInput, match="GMS_SAVE_WORKERS"):
        read_settings(NEEDED | {"GMS_SAVE_WORKERS": text})
