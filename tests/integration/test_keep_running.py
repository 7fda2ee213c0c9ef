"""`keep-running`, which is process 1 of an agent's container, around services of a few words."""

import signal
import subprocess
from pathlib import Path

KEEP_RUNNING = Path(__file__).resolve().parents[2] / "deploy" / "images" / "keep-running"
PATIENCE_S = 30


def _start(service: str) -> subprocess.Popen[str]:
    words = [str(KEEP_RUNNING), "bash", "-c", service]
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def test_a_service_that_is_told_to_stop_ends_in_its_own_way() -> None:
    service = "trap 'echo ended; exit 3' TERM; echo began; while :; do sleep 0.1; done"
    with _start(service) as process:
        assert _line(process) == "began\n"
        process.send_signal(signal.SIGTERM)
        assert _line(process) == "ended\n"
        assert process.wait(PATIENCE_S) == 3


def test_a_service_that_is_killed_is_started_again_and_one_that_ends_by_itself_is_not() -> None:
    with _start("exit 1") as process:
        assert process.wait(PATIENCE_S) == 1
    with _start("echo began; kill -KILL $$") as process:
        assert [_line(process) for _ in range(3)] == ["began\n"] * 3
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)
