"""The `gms` command as a person runs it, against a real service."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import snapback_client as client
from gms.adapters.transfer_process import TransferProcesses
from snapshot_shared.service import VERSION
from tests.support.gms_rig import MIB, Other, committed, gms, program, transfer_processes
from tests.support.waiting import wait_until
from tests.support.weights import flip

GMS = Path(sys.executable).with_name("gms")


def commit(device: int, *, changed: bool = False, name: str = "w") -> None:
    with client.connect(device, lock="RW", name="worker") as pool:
        arrays = pool.allocate_many({name: (9 * MIB, "u1"), "tail": (5000, "f4")})
        arrays[name][:] = np.arange(9 * MIB, dtype="u1")
        if changed:
            arrays["tail"][7] = 1.0
        pool.commit()


def save(device: int, root: Path) -> Path:
    return Path(json.loads(gms("save", "-d", device, "--root", root, "-o", "json"))["path"])


@pytest.fixture
def part(service: Any, tmp_path: Path) -> Path:
    """A part that was saved from device 0."""
    commit(0)
    return save(0, tmp_path)


def test_status_shows_devices_holders_and_the_last_events(service: Any) -> None:
    with committed(size=1000, name="worker"):
        text = gms("status")
        assert service.uuids[0] in text
        assert "RO worker (pid" in text
        assert "commit" in text
        found = json.loads(gms("status", "-o", "json", "--events", 2))
    assert [event["kind"] for event in found["events"]] == ["grant", "commit"]
    assert found["devices"][0]["domains"][0]["sessions"][0]["client"] == "worker"


def test_what_was_saved_is_verified_and_loaded_into_another_device_once(part: Path) -> None:
    assert "every digest matches" in gms("verify", part)
    assert json.loads(gms("verify", part.parent, "-o", "json"))[0]["part"] == str(part)
    assert "generation 1" in gms("load", part, "--device", 1)
    assert "nothing was read" in gms("load", part, "--device", 1)
    with client.connect(1, lock="RO") as pool:
        assert np.array_equal(pool["w"], np.arange(9 * MIB, dtype="u1"))


def test_a_load_replaces_another_layout_only_when_asked_to(service: Any, part: Path) -> None:
    commit(1, name="other")
    assert "GenerationMismatch" in gms("load", part, "-d", 1, status=1)
    with client.connect(1, lock="RO") as pool:
        assert "other" in pool.arrays()
    assert "generation 2" in gms("load", part, "-d", 1, "--replace")


def test_drop_frees_what_is_committed_and_says_how_much(service: Any) -> None:
    commit(1)
    layout = service.layout(1)
    said = gms("drop", "--device", 1)
    assert said == f"9.02 MiB of device 1 are free: layout {layout.layout_id}\n"
    after = service.device(1)
    assert (after.used, after.domains[0].layout) == (0, None)
    assert "NotFound: nothing is committed on device 1" in gms("drop", "-d", 1, status=1)
    commit(1)


def test_drop_is_refused_while_sessions_use_the_layout_and_names_each(service: Any) -> None:
    commit(0)
    hold = (
        "import sys, snapback_client as client\n"
        "pool = client.connect(lock='RO', name='second')\n"
        "print('held')\n"
        "sys.stdin.read()\n"
    )
    with client.connect(0, lock="RO", name="first"), Other(hold) as other:
        said = gms("drop", status=1)
        assert "error: NotEligible: the layout of " in said
        assert f"in use by first (pid {os.getpid()}), second (pid {other.pid})\n" in said
        assert "next: put them to sleep or end them" in said
    with client.connect(0, lock="RO") as pool:
        assert "w" in pool
    assert "are free" in gms("drop")


def test_drop_is_refused_while_a_writer_replaces_the_layout(service: Any) -> None:
    commit(0)
    with client.connect(0, lock="RO") as pool:
        generation = pool.generation
    with client.connect(0, lock="RW", name="loader", if_match=generation):
        assert "in use by loader (pid " in gms("drop", status=1)
    assert "are free" in gms("drop")


def test_drop_frees_only_the_layout_that_is_named(service: Any) -> None:
    commit(0)
    said = gms("drop", "--layout", "another", status=1)
    assert "error: StaleLayout: " in said
    assert "next: see what is committed: gms status" in said
    layout = json.loads(gms("status", "-o", "json"))["devices"][0]["domains"][0]["layout"]
    dropped = json.loads(gms("drop", "--layout", layout["layout_id"], "-o", "json"))
    assert dropped == {"device": service.uuids[0], "layout": layout}


def test_verify_names_the_chunk_that_is_damaged(part: Path) -> None:
    shard = part / "shard-0000.bin"
    flip(shard, 12345)
    text = gms("verify", part, status=1)
    assert "ArtifactCorrupt" in text
    assert f"chunk 0 of {shard}" in text


def test_diff_separates_equal_parts_from_different_ones(part: Path, tmp_path: Path) -> None:
    assert gms("diff", part, part).startswith("equal")
    commit(1, changed=True)
    other = save(1, tmp_path / "other")
    found = json.loads(gms("diff", part, other, "-o", "json", status=1))
    assert not found["equal"]
    assert "tail" in found["changed"]
    assert 0 < found["changed_bytes"] <= 9 * MIB + 20000
    assert found["added"] == found["removed"] == found["resized"] == []


def test_diff_compares_the_parts_of_two_generations_by_their_names(
    service: Any, part: Path, tmp_path: Path
) -> None:
    assert gms("diff", part.parent, part.parent) == "gpu-0: equal: 9.02 MiB\n"
    commit(1)
    other = save(1, tmp_path / "other")
    found = gms("diff", part.parent, other.parent, status=1)
    assert f"gpu-0: only in {part.parent}\n" in found
    assert f"gpu-1: only in {other.parent}\n" in found
    rows = json.loads(gms("diff", part.parent, other.parent, "-o", "json", status=1))
    assert [(row["part"], row["difference"]) for row in rows] == [("gpu-0", None), ("gpu-1", None)]
    mixed = gms("diff", part, part.parent, status=1)
    assert "name two parts or two generations" in mixed


def test_an_error_has_the_form_of_snapshotctl() -> None:
    said = gms("verify", "/nowhere", status=1).splitlines()
    assert said[0] == "error: ArtifactMissing: there is no part at /nowhere"
    assert said[1].startswith("next: name the folder of a part")


def test_the_version_is_printed() -> None:
    assert subprocess.check_output([str(GMS), "--version"], text=True) == f"gms {VERSION}\n"


def test_bench_measures_and_leaves_nothing(service: Any) -> None:
    rows = json.loads(gms("bench", "--calls", 50, "--regions", 4, "-o", "json"))
    assert [row["calls"] for row in rows] == [10, 50, 1, 20]
    assert all(row["p50_us"] > 0 for row in rows)
    assert service.device().used == 0


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        ("status --socket-dir /nowhere", 1, "no GPU memory service answers at /nowhere"),
        ("save -d 7", 1, "device 7 is not served here"),
        ("save", 1, "nothing is committed on device 0"),
        ("load /nowhere", 1, "/nowhere is not the path of a part"),
        ("diff /nowhere /nowhere", 1, "there is no part at /nowhere"),
        ("status --events -1", 2, "Invalid value"),
        ("nothing", 2, "No such command"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    service: Any, words: str, status: int, says: str
) -> None:
    assert says in gms(*words.split(), status=status)


def test_without_a_folder_of_sockets_it_says_what_to_set() -> None:
    text = gms("status", status=1, GMS_SOCKET_DIR="", SNAPBACK_SOCKET_DIR="")
    assert "set GMS_SOCKET_DIR" in text


@pytest.mark.parametrize("command", ["status", "save", "bench"])
@pytest.mark.parametrize("folder", ["gms", "./gms", "/run/../gms", "/run/gms/.", "/run/gms "])
def test_a_folder_of_sockets_that_depends_on_something_else_is_refused(
    command: str, folder: str
) -> None:
    text = gms(command, "--socket-dir", folder, status=1)
    assert f"--socket-dir={folder!r} is no absolute path" in text


def test_an_interrupt_ends_a_save_and_leaves_nothing(launch: Any, tmp_path: Path) -> None:
    launch(capacities=(1024 * MIB,), transfers=TransferProcesses())
    with client.connect(lock="RW") as pool:
        pool.allocate("w", 900 * MIB, "u1")
        pool.commit()
    with program("gms", "save", "--root", str(tmp_path)) as process:
        wait_until(lambda: any(tmp_path.rglob("gpu-0")))
        # Or the save may be over before the interrupt.
        for pid in transfer_processes():
            os.kill(pid, signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert process.stderr.read() == "interrupted\n"
        assert process.wait(30) == 130
    wait_until(lambda: not any(tmp_path.rglob("gpu-0")))
