"""What is read of logs and asked of workers that may be other than expected."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from snapshot_shared.errors import NotFound
from snapshot_shared.holes import punch_hole
from snapshotctl.adapters import asking, cluster_logs
from snapshotctl.adapters.cluster_logs import ClusterLogs, LogFile, lines_of
from snapshotctl.domain.cluster import ClusterPaths, ClusterRecord
from tests.unit.snapshotctl.conftest import cluster_record


@pytest.fixture
def record(tmp_path: Path) -> ClusterRecord:
    return cluster_record(tmp_path)


@pytest.fixture
def pod(tmp_path: Path) -> Path:
    folder = ClusterPaths(tmp_path, tmp_path).node("node-1", "agent") / "pods" / "uid"
    (folder / "main").mkdir(parents=True)
    return folder


def test_the_last_lines_of_each_container_are_read(record: ClusterRecord, pod: Path) -> None:
    (pod / "main/log").write_bytes(
        b"x" * cluster_logs.TAIL_BYTES + b"".join(b"\n%d" % n for n in range(20))
    )
    (pod / "side").mkdir()
    (pod / "side/log").write_text("one\n")
    last = [("main", str(n)) for n in range(20 - cluster_logs.WORKER_LINES, 20)]
    assert ClusterLogs(record).worker("node-1", "uid") == [*last, ("side", "one")]
    assert ClusterLogs(record).worker("node-1", "unknown") == []


def test_a_container_whose_program_is_missing_has_no_log(record: ClusterRecord, pod: Path) -> None:
    (pod / "side").mkdir()
    (pod / "side/log").write_text("one\n")
    assert [log.name for log in ClusterLogs(record).containers("node-1", "uid")] == ["side"]


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


async def _lines(log: LogFile, tail: int | None) -> list[str]:
    return [line async for _, line in lines_of([log], tail, follow=False)]


@pytest.mark.parametrize(
    ("text", "tail", "expected"),
    [
        ("one\ntwo\nthree\n", None, ["one", "two", "three"]),
        ("one\ntwo\nthree\n", 2, ["two", "three"]),
        ("one\ntwo\nthree", 2, ["two", "three"]),
        ("one\ntwo\n", 5, ["one", "two"]),
        ("one\ntwo\n", 0, []),
        ("one\ntwo", 0, []),
        ("\n\n", 1, [""]),
        ("", 3, []),
        ("x" * 70_000 + "\n" + "y" * 70_000 + "\nend\n", 2, ["y" * 70_000, "end"]),
    ],
)
async def test_the_last_lines_of_a_log_are_shown(
    tmp_path: Path, text: str, tail: int | None, expected: list[str]
) -> None:
    (tmp_path / "log").write_text(text)
    assert await _lines(LogFile("x", tmp_path, ("log",)), tail) == expected


@pytest.mark.parametrize("tail", [None, 3, 50_000])
async def test_a_log_whose_beginning_was_freed_begins_with_its_first_whole_line(
    tmp_path: Path, tail: int | None
) -> None:
    lines = [f"line {number}" for number in range(40_000)]
    path = tmp_path / "log"
    path.write_text("".join(f"{line}\n" for line in lines))
    with path.open("r+b") as file:
        punch_hole(file.fileno(), 0, 256 * 1024)
    found = await _lines(LogFile("x", tmp_path, ("log",)), tail)
    if tail == 3:
        assert found == lines[-3:]
    else:
        whole = len(path.read_bytes()[256 * 1024 :].split(b"\n")) - 2
        assert found == lines[-whole:]


async def test_a_log_that_begins_anew_is_read_anew_and_what_is_no_plain_file_is_named(
    tmp_path: Path,
) -> None:
    path = tmp_path / "log"
    path.write_text("one\nhalf")
    log = LogFile("x", tmp_path, ("log",))
    async with asyncio.timeout(30), contextlib.aclosing(lines_of([log], 2, follow=True)) as lines:
        with path.open("a") as file:
            file.write(" whole\ntwo\n")
        assert [await anext(lines), await anext(lines)] == [("x", "half whole"), ("x", "two")]
        later = asyncio.ensure_future(anext(lines))
        path.write_text("new\n")
        assert await later == ("x", "new")
    path.unlink()
    path.symlink_to("/etc/passwd")
    with pytest.raises(NotFound, match="the log of x cannot be read"):
        await _lines(log, None)


async def test_the_logs_of_a_pod_are_followed_until_it_is_deleted(tmp_path: Path) -> None:
    logs = []
    for name in ("main", "side"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "log").write_text(f"{name}\nhalf")
        logs.append(LogFile(name, tmp_path, (name, "log")))
    async with asyncio.timeout(30), contextlib.aclosing(lines_of(logs, None, follow=True)) as lines:
        assert [await anext(lines), await anext(lines)] == [("main", "main"), ("side", "side")]
        shutil.rmtree(tmp_path / "main")
        assert await anext(lines) == ("main", "half")
        shutil.rmtree(tmp_path / "side")
        assert [line async for line in lines] == [("side", "half")]


@pytest.mark.parametrize(
    ("to", "expected"),
    [("8000", "127.0.0.1:8000"), ("worker.sock", "/pod/worker.sock"), ("²", "/pod/²")],
)
def test_only_digits_of_ascii_are_a_port(
    monkeypatch: pytest.MonkeyPatch, to: str, expected: str
) -> None:
    monkeypatch.setenv("POD_SOCKET_DIR", "/pod")
    assert asking._where(to) == expected


def test_a_worker_that_says_a_little_at_a_time_is_not_waited_for_without_end(
    tmp_path: Path,
) -> None:
    ended = threading.Event()

    def drip() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            while not ended.wait(0.1):
                connection.sendall(b"x")

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "worker.sock"))
        listener.listen()
        listener.settimeout(20)
        dripping = threading.Thread(target=drip)
        dripping.start()
        asked = json.dumps({"to": "worker.sock", "line": "x", "timeout_s": 0.5})
        done = subprocess.run(
            [sys.executable, asking.__file__, asked],
            env={"POD_SOCKET_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
            timeout=20,
        )
        ended.set()
        dripping.join()
    assert (done.returncode, done.stdout) == (1, "")
    assert "the whole answer was not there in time" in done.stderr
