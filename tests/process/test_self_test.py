"""Whether CRIU works on a node is told by a process that it dumps and restores."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshot_agent.adapters import procfs
from snapshot_agent.helper.self_test import self_test
from snapshot_shared import subjects
from snapshot_shared.codec import decode_json
from snapshot_shared.errors import NotEligible
from snapshot_shared.orders import Presence
from tests.process.node import Node

# They look for what others leave in /run.
pytestmark = pytest.mark.xdist_group("self-test")


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


def fail(program: Path, criu: Path, verb: str) -> None:
    """Write a CRIU that fails to do one thing, as one that is too old for its kernel does."""
    program.write_text(
        f"""#!/bin/sh
        [ "$1" = {verb} ] || exec {criu} "$@"
        until [ "$1" = --log-file ]; do shift; done
        echo "(00.1) Error (criu/sockets.c:1): Can't get 1:16 opt" >>"$2"
        exit 1
        """
    )
    program.chmod(0o755)


WITHOUT_LOOPBACK = """
import pathlib, sys
from snapshot_agent.helper.self_test import self_test
from snapshot_shared.errors import NotEligible
try:
    self_test(*map(pathlib.Path, sys.argv[1:]))
except NotEligible as error:
    print(error.next_step)
"""


def test_a_network_without_loopback_is_named_with_its_fix(criu: Path, run: Path) -> None:
    words = ["unshare", "--net", sys.executable, "-P", "-c", WITHOUT_LOOPBACK, criu, run]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stdout == "bring the loopback interface up: ip link set lo up\n", done.stderr


def test_a_criu_that_dumps_and_restores_is_fit(criu: Path, run: Path) -> None:
    self_test(criu, run)


def test_a_helper_whose_root_is_read_only_is_fit(criu: Path, tmp_path: Path) -> None:
    # As in its container: only what is mounted can be written to.
    apart = 'for each in /tmp "$FOLDER"; do mount --bind "$each" "$each"; done; '
    apart += 'mount -o remount,bind,ro /; exec "$@"'
    asked = "import os, pathlib; from snapshot_agent.helper.self_test import self_test; "
    asked += "self_test(pathlib.Path(os.environ['CRIU']), pathlib.Path(os.environ['FOLDER']))"
    subprocess.run(
        ["unshare", "--mount", "sh", "-ec", apart, "sh", sys.executable, "-c", asked],
        env={**os.environ, "CRIU": str(criu), "FOLDER": str(tmp_path)},
        check=True,
    )


@pytest.mark.parametrize("verb", ["dump", "restore"])
def test_a_criu_that_fails_is_unfit_for_the_reason_in_its_log(
    criu: Path, tmp_path: Path, run: Path, verb: str
) -> None:
    failing = tmp_path / "criu"
    fail(failing, criu, verb)
    with pytest.raises(NotEligible, match=f"CRIU did not {verb}: Can't get 1:16 opt") as caught:
        self_test(failing, run)
    assert "use CRIU 4.2 or later" in caught.value.next_step


async def test_the_presence_of_a_node_says_why_it_does_not_have_the_driver(
    criu: Path, node: Node
) -> None:
    subject = f"$KV.{subjects.NODES_BUCKET}.{node.node}"
    async with node.bus.listening(subject) as queue:

        async def says(fit: bool) -> Presence:
            """Wait for what the agent says after the first pings of a helper."""
            async with asyncio.timeout(60):
                while True:
                    said = decode_json((await queue.get()).data, Presence)
                    silent = any(each.why.reason == "HelperUnavailable" for each in said.unready)
                    if not silent and ("criu" in said.drivers) is fit:
                        return said

        well = await says(fit=True)
        assert "criu" not in [each.driver for each in well.unready]
        assert well.criu
        await node.kill_helper()
        fail(node.programs / "criu", criu, "dump")
        await node.start_helper()
        unfit = await says(fit=False)
    [why] = [each.why for each in unfit.unready if each.driver == "criu"]
    assert "CRIU did not dump: Can't get 1:16 opt" in why.message
    assert "use CRIU 4.2 or later" in why.next_step
    assert unfit.criu == well.criu
