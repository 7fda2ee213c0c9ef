"""What PyTorch's allocator says is in use, as values."""

from __future__ import annotations

from snapback_client.torch_devices import live_blocks


def test_blocks_stand_one_behind_the_other_and_all_but_inactive_ones_are_in_use() -> None:
    snapshot = [
        {
            "address": 0x1000,
            "total_size": 0x400,
            "blocks": [
                {"size": 0x100, "state": "active_allocated"},
                {"size": 0x200, "state": "inactive"},
                {"size": 0x100, "state": "active_pending_free"},
            ],
        },
        {"address": 0x9000, "total_size": 0x100, "blocks": [{"size": 0x100, "state": "inactive"}]},
        {"address": 0x5000, "total_size": 0, "blocks": []},
    ]
    assert live_blocks(snapshot) == [(0x1000, 0x100), (0x1300, 0x100)]
    assert live_blocks([]) == []
