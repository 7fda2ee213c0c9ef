"""Whether CRIU works on a node is told by a process that it dumps and restores."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshot_agent.adapters import procfs
from snapshot_agent.helper.self_test import self_test
from snapshot_shared.errors import NotEligible

pytestmark = [
    pytest.mark.process,
    pytest.mark.waits,
    # They look for what others leave in /run.
    pytest.mark.xdist_group("self-test"),
]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """A folder in place of /run, in which nothing is left, as no process of a test is."""
    found = tmp_path / "run"
    found.mkdir()
    yield found
    running = {each.pid for each in procfs.running()} - {os.getpid()}
    assert not [pid for pid in running if os.environ["PYTEST_CURRENT_TEST"].split()[0] in of(pid)]
    assert not [*found.iterdir()]


def of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    return ""


def test_a_criu_that_dumps_and_restores_is_fit(criu: Path, run: Path) -> None:
    self_test(criu, run)


@pytest.mark.parametrize("verb", ["dump", "restore"])
def test_a_criu_that_fails_is_unfit_for_the_reason_in_its_log(
    criu: Path, tmp_path: Path, run: Path, verb: str
) -> None:
    failing = tmp_path / "criu"
    failing.write_text(
        f"""#!/bin/sh
        [ "$1" = {verb} ] || exec {criu} "$@"
        until [ "$1" = --log-file ]; do shift; done
        echo "(00.1) Error (criu/sockets.c:1): Can't get 1:16 opt" >>"$2"
        exit 1
        """
    )
    failing.chmod(0o755)
    with pytest.raises(NotEligible, match=f"CRIU did not {verb}: Can't get 1:16 opt") as caught:
        self_test(failing, run)
    assert "use CRIU 4.2 or later" in caught.value.next_step
