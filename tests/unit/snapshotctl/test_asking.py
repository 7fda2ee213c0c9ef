"""Where the question of `ask` goes."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from snapshotctl.adapters import asking


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
