"""What PyTorch's allocator says is in use, and which arrays become no tensors; without PyTorch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from snapback_client.errors import InvalidInput
from snapback_client.torch import tensor_of
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


WHOLE = np.arange(12, dtype="i8").reshape(3, 4)


@pytest.mark.parametrize(
    "array",
    [WHOLE[:, ::2], WHOLE.T, WHOLE[:, :2], WHOLE[::-1], WHOLE.astype(">i8")],
)
def test_an_array_whose_bytes_alone_do_not_say_its_values_makes_no_tensor(array: Any) -> None:
    with pytest.raises(InvalidInput, match="of shape") as refused:
        tensor_of(array)
    assert refused.value.next_step == "take the array of the pool itself, and slice the tensor"
