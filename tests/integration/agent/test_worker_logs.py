"""Logs of workers within their limit, while the workers write to them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from snapshot_agent.adapters.worker_logs import WorkerLogs

MIB = 2**20


@pytest.fixture
def log(tmp_path: Path) -> Path:
    found = tmp_path / "pods/uid/main/log"
    found.parent.mkdir(parents=True)
    found.touch()
    return found


def taken(log: Path) -> int:
    return log.stat().st_blocks * 512


def test_a_log_has_its_end_and_its_size_and_takes_no_more_than_the_limit(
    tmp_path: Path, log: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logs = WorkerLogs(tmp_path, 2 * MIB)
    with log.open("ab", buffering=0) as worker:
        worker.write(b"x" * MIB)
        logs.cut()
        assert log.read_bytes() == b"x" * MIB
        for _ in range(3):
            worker.write(b"y" * (2 * MIB))
            size = log.stat().st_size
            logs.cut()
            assert log.stat().st_size == size
            assert MIB <= taken(log) <= 2 * MIB
        worker.write(b"the end\n")
        logs.cut()
    assert log.read_bytes().endswith(b"y" * MIB + b"the end\n")
    assert log.read_bytes().startswith(b"\0" * MIB)
    assert caplog.text.count("uid/main/log takes more than 2097152 bytes") == 3


def test_a_log_without_a_limit_is_whole(tmp_path: Path, log: Path) -> None:
    log.write_bytes(b"x" * MIB)
    WorkerLogs(tmp_path, 0).cut()
    assert log.read_bytes() == b"x" * MIB


def test_nothing_is_freed_of_what_a_worker_has_put_in_the_place_of_its_log(
    tmp_path: Path, log: Path
) -> None:
    others = tmp_path / "weights"
    others.write_bytes(b"x" * MIB)
    for name in ("link", "hard", "pipe", "folder"):
        (log.parent.parent / name).mkdir()
    (log.parent.parent / "link/log").symlink_to(others)
    os.link(others, log.parent.parent / "hard/log")
    os.mkfifo(log.parent.parent / "pipe/log")
    (log.parent.parent / "folder").rmdir()
    (log.parent.parent / "folder").symlink_to(tmp_path)
    (tmp_path / "log").write_bytes(b"x" * MIB)
    log.write_bytes(b"x" * MIB)
    WorkerLogs(tmp_path, 4096).cut()
    assert others.read_bytes() == (tmp_path / "log").read_bytes() == b"x" * MIB
    assert taken(log) < MIB


def test_an_agent_without_pods_has_no_logs(tmp_path: Path) -> None:
    WorkerLogs(tmp_path, 1).cut()
