"""The number that a process has for a device, from the names that it was given."""

from __future__ import annotations

import pytest

from snapback_client.devices import count_of, names_of, ordinal_of
from tests.unit.tables import each


@each(
    ("cuda", "visible", "expected"),
    [
        (["GPU-aaaa", "GPU-bbbb"], [], 1),
        ([], ["GPU-aaaa", "GPU-bbbb"], 1),
        (["GPU-bbbb"], ["GPU-aaaa", "GPU-bbbb"], 0),
        ([], ["2", "3"], 1),
        ([], ["GPU-a", "GPU-b"], 1),
        ([], ["GPU-aaaa"], 3),
        ([], [], 3),
    ],
)
def test_a_device_has_the_number_of_its_name_here_or_else_its_index(
    cuda: list[str], visible: list[str], expected: int
) -> None:
    assert ordinal_of("GPU-bbbb", 3, cuda=cuda, visible=visible) == expected


@pytest.mark.parametrize("visible", [["2", "3"], ["GPU-a", "GPU-b"]])
def test_the_number_of_a_device_stands_for_it_again(visible: list[str]) -> None:
    number = ordinal_of("GPU-bbbb", 3, cuda=[], visible=visible)
    assert names_of(number, cuda=[], visible=visible) == [visible[1]]


@pytest.mark.parametrize(
    ("cuda", "visible", "expected"),
    [
        ([], [], 1),
        ([], ["GPU-a", "GPU-b"], 2),
        (["GPU-a", "GPU-b", "GPU-c"], [], 3),
        (["GPU-b"], ["GPU-a", "GPU-b"], 1),
        (["GPU-real", "GPU-other"], ["GPU-simulated"], 1),
    ],
)
def test_a_process_has_as_many_devices_as_both_cuda_and_its_environment_name(
    cuda: list[str], visible: list[str], expected: int
) -> None:
    assert count_of(cuda=cuda, visible=visible) == expected
