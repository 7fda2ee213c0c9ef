"""The acceptance on a GPU, on the fake of the driver: its steps hold, and it says what does not."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.agent_rig import is_gone
from tests.support.backend_site import find_kvikio
from tests.support.cuda_rig import UUIDS, CudaNode
from tests.support.gms_rig import MIB, children_of
from tests.support.waiting import wait_until

PROGRAM = Path(__file__).parents[2] / "gpu" / "accept.py"
PLACED = [f"{uuid} bytes={512 * MIB} context={72 * MIB}" for uuid in UUIDS[:2]]
"""A context is more than what may be lost on the way."""

pytestmark = [pytest.mark.turns, pytest.mark.cpu(240), pytest.mark.timeout(400), pytest.mark.waits]


def started(folder: Path, *words: str) -> subprocess.Popen[str]:
    small = ["--gib", "0.0625", "--threads", "2", "--processes", "2"]
    places = ["--folder", folder, "--out", folder / "accept.json"]
    return subprocess.Popen(
        [sys.executable, PROGRAM, *places, *small, *words], stdout=subprocess.PIPE, text=True
    )


def accepted(folder: Path, *words: str) -> tuple[int, dict[str, Any], str]:
    """Run it and return its status, its steps by name, and what it printed."""
    process = started(folder, *words)
    said, _ = process.communicate(timeout=380)
    report = json.loads((folder / "accept.json").read_text())
    assert report["result"] == ("failed" if process.returncode else "ok")
    return process.returncode, {step["step"]: step for step in report["steps"]}, said


@pytest.mark.slow
def test_every_step_that_needs_no_pytorch_holds_on_the_fake(
    cuda_node: CudaNode, tmp_path: Path
) -> None:
    cuda_node.place(PLACED[0])
    # For `captures` there is tests/process/test_standalone_cuda.py.
    steps_here = (
        "conformance,pytorch,checkpoints,controls,addresses,flags,visible_devices,bandwidth,gds,"
        "footprint,full_device,killed_processes"
    )
    status, steps, said = accepted(tmp_path, "--only", steps_here)
    assert {
        name: step["reason"] for name, step in steps.items() if step["result"] == "failed"
    } == {}
    assert status == 0
    skipped = [name for name, step in steps.items() if step["result"] == "skipped"]
    assert skipped == ["pytorch", "visible_devices", "gds"]
    assert steps["gds"]["reason"] == "KvikIO is not installed"
    assert len(said.splitlines()) == len(steps) == 13
    found = {name: step["found"] for name, step in steps.items()}
    assert [each["uuid"] for each in found["facts"]["devices"]] == [UUIDS[0]]
    assert found["footprint"]["idle_server"] == 0
    assert found["footprint"]["sleeping_client"] == 72 * MIB
    assert found["full_device"]["filled_bytes"] == 512 * MIB
    assert "ILLEGAL_ADDRESS" in found["killed_processes"]["vandal"]
    assert found["bandwidth"]["bytes"] == 64 * MIB
    assert found["bandwidth"]["2 requests"]["load"] > 0
    assert found["checkpoints"]["asleep"]["same_bytes"]
    refused = {"lock": 0, "checkpoint": 0, "restore": 801}
    assert found["checkpoints"]["awake"]["status"] == refused
    assert found["controls"]["imported"]["status"] == refused
    assert found["controls"]["none"]["status"] == {"lock": 3}
    whole = [kind for kind, row in found["controls"].items() if row.get("same_bytes")]
    assert whole == ["started", "allocated", "exportable", "reserved", "let-go"]
    # What was saved is gone, and so are all who had memory.
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("accept")] == [
        "accept.json"
    ]
    assert cuda_node.foreign(400 * MIB).status == 0


def test_a_gpu_without_gpudirect_storage_loads_by_kvikio_and_is_no_measurement_of_it(
    cuda_node: CudaNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(find_kvikio(monkeypatch)))
    cuda_node.place(PLACED[0])
    status, steps, _ = accepted(tmp_path, "--only", "gds")
    assert (status, steps["gds"]["result"]) == (0, "skipped")
    assert "'way': 'gds-compat'" in steps["gds"]["reason"]


def test_each_of_several_devices_is_asked_for_what_it_can(
    cuda_node: CudaNode, tmp_path: Path
) -> None:
    cuda_node.place(PLACED[0], f"{PLACED[1]} rdma=0 fabric=2")
    status, steps, _ = accepted(tmp_path, "--only", "flags,visible_devices")
    assert status == 0
    assert steps["flags"]["found"][UUIDS[0]]["rdma"] == 0
    found = steps["flags"]["found"][UUIDS[1]]
    assert (found["rdma"], found["fabric"]) == (801, 800)
    assert steps["visible_devices"]["found"]["by_index"] == [UUIDS[1], UUIDS[0]]


@pytest.mark.parametrize(
    ("fault", "options", "reason"),
    [
        ("nohint", [], ".*2 processes got others.*"),
        ("hang", ["--limit-s", "25"], "it took longer than 10 s"),
    ],
    ids=["fails", "hangs"],
)
def test_a_step_that_fails_or_hangs_is_named_with_its_reason_and_the_others_go_on(
    cuda_node: CudaNode, tmp_path: Path, fault: str, options: list[str], reason: str
) -> None:
    cuda_node.place(*PLACED)
    cuda_node.faults(f"cuMemAddressReserve 0 {fault}")
    status, steps, _ = accepted(tmp_path, "--only", "addresses,flags", *options)
    assert status == 1
    assert {name: step["result"] for name, step in steps.items()} == {
        "facts": "ok",
        "addresses": "failed",
        "flags": "ok",
    }
    assert re.fullmatch(reason, steps["addresses"]["reason"], re.DOTALL)


def test_without_a_device_it_says_so_and_tries_nothing_else(
    cuda_node: CudaNode, tmp_path: Path
) -> None:
    cuda_node.place()
    status, steps, said = accepted(tmp_path)
    assert status == 1
    assert "CUDA_ERROR_NO_DEVICE" in steps["facts"]["reason"]
    assert "Traceback" not in said
    assert {step["reason"] for name, step in steps.items() if name != "facts"} == {
        "no device was found"
    }


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_its_children_end_with_it(cuda_node: CudaNode, tmp_path: Path, number: int) -> None:
    cuda_node.place(*PLACED)
    cuda_node.faults("cuMemAddressReserve 0 hang")
    process = started(tmp_path, "--only", "addresses")
    assert process.stdout
    assert process.stdout.readline().startswith("ok")
    children = wait_until(lambda: children_of(process.pid))
    os.kill(process.pid, number)
    process.communicate(timeout=30)
    wait_until(lambda: all(map(is_gone, children)))
