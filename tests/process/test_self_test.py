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


@pytest.fixture(autouse=True)
def left_nothing() -> Iterator[None]:
    """No process of a test is left, and none of its folders."""
    yield
    running = {each.pid for each in procfs.running()} - {os.getpid()}
    assert not [pid for pid in running if os.environ["PYTEST_CURRENT_TEST"].split()[0] in of(pid)]
    assert not list(Path("/run").glob("self-test-*"))


def of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    return ""


def test_a_criu_that_dumps_and_restores_is_fit(criu: Path) -> None:
    self_test(criu)


@pytest.mark.parametrize("verb", ["dump", "restore"])
def test_a_criu_that_fails_is_unfit_for_the_reason_in_its_log(
    criu: Path, tmp_path: Path, verb: str
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
        self_test(failing)
    assert "use CRIU 4.2 or later" in caught.value.next_step
