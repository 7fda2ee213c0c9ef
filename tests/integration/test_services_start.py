"""Services that are told to work where they cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cuda_rig import UUIDS, CudaNode

pytestmark = pytest.mark.turns

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


def refused(ended: subprocess.CompletedProcess[str], *said: str) -> None:
    """One line at the end says what is wrong, and what to do."""
    assert ended.returncode == 1
    assert [text for text in said if text not in ended.stderr.splitlines()[-1]] == []
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("module", SERVICES)
def test_a_state_folder_that_is_a_file_is_refused(module: str, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    refused(start(module, tmp_path), str(tmp_path / "state"), "check this path")
    assert (tmp_path / "state").read_text() == "a file"


def test_a_damaged_object_store_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    store = tmp_path / "state/objects.sqlite"
    store.write_bytes(b"no database " * 1000)
    ended = start("snapshot_operator.main", tmp_path)
    refused(ended, f"StorageFailed: the object store {store} cannot be opened")
    assert store.read_bytes() == b"no database " * 1000


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        *((each, "SNAPBACK_HTTP_ADDRESS", "9090") for each in (*SERVICES, "snapshot_page.main")),
        *((each, "SNAPBACK_HEALTH_ADDRESS", "8081") for each in SERVICES),
        ("gms.main", "SNAPBACK_GMS_DEVICE", "tpu"),
    ],
)
def test_a_setting_that_is_none_is_refused_by_its_variable(
    module: str, name: str, value: str, tmp_path: Path
) -> None:
    refused(start(module, tmp_path, **{name: value}), f"{name}='{value}'")


NO_CUDA = "CudaUnavailable: the CUDA driver does not start: cuInit: CUDA_ERROR_NO"


@pytest.mark.parametrize("package", ["", "raise FileNotFoundError(2, 'no usable directory')"])
def test_gms_without_the_bindings_of_cuda_says_in_one_line_what_to_install(
    tmp_path: Path, package: str
) -> None:
    # Before the package that is installed here.
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "cuda.py").write_text(package)
    environment = {"SNAPBACK_GMS_DEVICE": "cuda", "PYTHONPATH": str(tmp_path / "hidden")}
    said = "CudaUnavailable: the Python bindings of CUDA cannot be imported: "
    refused(start("gms.main", tmp_path, **environment), said, "Next: ", "pip install")


@pytest.mark.parametrize(
    ("faults", "devices", "expected"),
    [
        (["cuInit 0 error 100"], UUIDS[0], NO_CUDA),
        ([], "", f"{NO_CUDA}_DEVICE"),
        ([], f"{UUIDS[0]} vmm=0", "CudaUnavailable: device 0 has no virtual-memory-management"),
    ],
)
def test_gms_without_what_cuda_needs_says_in_one_line_what_is_missing(
    tmp_path: Path, cuda_node: CudaNode, faults: list[str], devices: str, expected: str
) -> None:
    cuda_node.faults(*faults)
    cuda_node.place(devices)
    refused(start("gms.main", tmp_path, SNAPBACK_GMS_DEVICE="cuda"), expected, "Next: ")
