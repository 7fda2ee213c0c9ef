"""What is read of logs that a worker may have replaced by something else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from snapshotctl.adapters.cluster_logs import TAIL_BYTES, WORKER_LINES, ClusterLogs
from snapshotctl.domain.cluster import ClusterPaths, ClusterRecord


@pytest.fixture
def record(tmp_path: Path) -> ClusterRecord:
    return ClusterRecord(
        name="x", run="r", boot_id="b", state_dir=str(tmp_path), socket_dir=str(tmp_path)
    )


@pytest.fixture
def pod(tmp_path: Path) -> Path:
    folder = ClusterPaths(tmp_path, tmp_path).node("node-1", "agent") / "pods" / "uid"
    (folder / "main").mkdir(parents=True)
    return folder


def test_the_last_lines_of_each_container_are_read(record: ClusterRecord, pod: Path) -> None:
    (pod / "main/log").write_bytes(b"x" * TAIL_BYTES + b"".join(b"\n%d" % n for n in range(20)))
    (pod / "side").mkdir()
    (pod / "side/log").write_text("one\n")
    last = [("main", str(n)) for n in range(20 - WORKER_LINES, 20)]
    assert ClusterLogs(record).worker("node-1", "uid") == [*last, ("side", "one")]
    assert ClusterLogs(record).worker("node-1", "unknown") == []


@pytest.mark.parametrize("kind", ["fifo", "link", "folder"])
def test_what_a_worker_puts_in_the_place_of_its_log_is_not_read(
    record: ClusterRecord, pod: Path, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret/log").write_text("a key\n")
    match kind:
        case "fifo":
            os.mkfifo(pod / "main/log")
            # Or a reader that opens it would hang.
            writer = os.open(pod / "main/log", os.O_RDWR | os.O_NONBLOCK)
            os.write(writer, b"a key\n")
        case "link":
            (pod / "main/log").symlink_to(tmp_path / "secret/log")
        case _:
            (pod / "side").symlink_to(tmp_path / "secret")
    assert ClusterLogs(record).worker("node-1", "uid") == []
