"""A transfer of a GPU runs on the processors that are near it, where the kernel names them."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gms.transfer_child.gpu import cpus_of, stay_near

ADDRESS = "0000:3b:00.0"
ALLOWED = os.sched_getaffinity(0)
FIRST = min(ALLOWED)


def processors_after(folder: Path) -> set[int]:
    """Where a thread of its own may run after it was to stay near."""

    def stay() -> set[int]:
        stay_near(ADDRESS, folder)
        return os.sched_getaffinity(0)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(stay).result()


def place(folder: Path, node: str, cpus: str = "") -> None:
    device = folder / "bus/pci/devices" / ADDRESS
    device.mkdir(parents=True)
    (device / "numa_node").write_text(f"{node}\n")
    if cpus:
        nodes = folder / f"devices/system/node/node{node}"
        nodes.mkdir(parents=True)
        (nodes / "cpulist").write_text(f"{cpus}\n")


def test_it_runs_on_those_of_the_node_that_it_may_use(tmp_path: Path) -> None:
    place(tmp_path, "1", f"{FIRST},100000-100003")
    assert processors_after(tmp_path) == {FIRST}
    assert os.sched_getaffinity(0) == ALLOWED


@pytest.mark.parametrize(
    ("node", "cpus"),
    [("-1", ""), ("nonsense", ""), ("1", ""), ("1", "100000-100003"), ("1", "0-x")],
)
def test_it_runs_where_it_did_when_the_node_is_not_known(
    tmp_path: Path, node: str, cpus: str
) -> None:
    place(tmp_path, node, cpus)
    assert processors_after(tmp_path) == ALLOWED


def test_it_runs_where_it_did_when_the_kernel_does_not_know_the_device(tmp_path: Path) -> None:
    assert processors_after(tmp_path) == ALLOWED


@pytest.mark.parametrize(
    ("text", "cpus"), [("0\n", {0}), ("0-3,8", {0, 1, 2, 3, 8}), ("4-4", {4}), ("1,3", {1, 3})]
)
def test_processors_are_read_as_the_kernel_lists_them(text: str, cpus: set[int]) -> None:
    assert cpus_of(text) == cpus
