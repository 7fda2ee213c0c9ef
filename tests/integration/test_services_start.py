"""Services that are told to work where they cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cuda_rig import UUIDS, CudaNode

SERVICES = ("snapshot_operator.main", "snapshot_agent.main", "gms.main")


def start(module: str, folder: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    own = {k: v for k, v in os.environ.items() if not k.startswith("SNAPBACK_")}
    places = {
        "SNAPBACK_NODE": "node-1",
        "SNAPBACK_STATE_DIR": str(folder / "state"),
        "SNAPBACK_ARTIFACT_ROOT": str(folder / "artifacts"),
        "SNAPBACK_SOCKET_DIR": str(folder / "sockets"),
    }
    return subprocess.run(
        [sys.executable, "-m", module],
        env=own | places | settings,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.parametrize("module", SERVICES)
def test_a_state_folder_that_is_a_file_is_refused_in_one_line_with_what_to_do(
    module: str, tmp_path: Path
) -> None:
    (tmp_path / "state").write_text("a file")
    ended = start(module, tmp_path)
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert str(tmp_path / "state") in last
    assert "check this path" in last
    assert "Traceback" not in ended.stderr
    assert (tmp_path / "state").read_text() == "a file"


def test_a_damaged_object_store_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    store = tmp_path / "state/objects.sqlite"
    store.write_bytes(b"no database " * 1000)
    ended = start("snapshot_operator.main", tmp_path)
    assert ended.returncode == 1
    assert f"StorageFailed: the object store {store} cannot be opened" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert store.read_bytes() == b"no database " * 1000


@pytest.mark.parametrize("module", [*SERVICES, "snapshot_page.main"])
def test_an_http_address_that_is_none_is_refused_by_its_variable(
    module: str, tmp_path: Path
) -> None:
    ended = start(module, tmp_path, SNAPBACK_HTTP_ADDRESS="9090")
    assert ended.returncode == 1
    assert "SNAPBACK_HTTP_ADDRESS='9090'" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("package", ["", "raise FileNotFoundError(2, 'no usable directory')"])
def test_gms_without_the_bindings_of_cuda_says_in_one_line_what_to_install(
    tmp_path: Path, package: str
) -> None:
    # Before the package that is installed here.
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "cuda.py").write_text(package)
    ended = start(
        "gms.main", tmp_path, SNAPBACK_GMS_DEVICE="cuda", PYTHONPATH=str(tmp_path / "hidden")
    )
    refused(ended, "the Python bindings of CUDA cannot be imported: ")
    assert "pip install" in ended.stderr


@pytest.mark.parametrize(
    ("faults", "devices", "expected"),
    [
        (["cuInit 0 error 100"], UUIDS[0], "the CUDA driver does not start: cuInit: CUDA_ERROR_NO"),
        ([], "", "the CUDA driver does not start: cuInit: CUDA_ERROR_NO_DEVICE"),
        ([], f"{UUIDS[0]} vmm=0", "device 0 has no virtual-memory-management"),
    ],
)
def test_gms_without_what_cuda_needs_says_in_one_line_what_is_missing(
    tmp_path: Path, cuda_node: CudaNode, faults: list[str], devices: str, expected: str
) -> None:
    cuda_node.faults(*faults)
    cuda_node.place(devices)
    refused(start("gms.main", tmp_path, SNAPBACK_GMS_DEVICE="cuda"), expected)


def refused(ended: subprocess.CompletedProcess[str], expected: str) -> None:
    assert ended.returncode == 1
    assert f"CudaUnavailable: {expected}" in ended.stderr
    assert "Next: " in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_kind_of_device_that_does_not_exist_is_refused_by_its_variable(tmp_path: Path) -> None:
    ended = start("gms.main", tmp_path, SNAPBACK_GMS_DEVICE="tpu")
    assert ended.returncode == 1
    assert "SNAPBACK_GMS_DEVICE='tpu'" in ended.stderr
