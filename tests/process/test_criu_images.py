"""The real CRIU restores sockets from images that were rewritten for another pod."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from snapshot_agent.domain.criu_log import failure
from tests.process.node import REPOSITORY


def on_stage(criu: Path, folder: Path, how: str) -> dict[str, Any]:
    command = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command += [sys.executable, "-m", "tests.process.stage", str(criu), str(folder), how]
    done = subprocess.run(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, timeout=100, check=True
    )
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_a_worker_goes_on_with_the_name_and_addresses_of_its_new_pod(
    criu: Path, tmp_path: Path
) -> None:
    report = on_stage(criu, tmp_path, "rewritten")
    assert report == {
        "dump": 0,
        "moved": 21,
        "closed": 3,
        "restore": 0,
        "exit": 0,
        "worker": {
            "host": "target-host",
            "listener": "10.77.0.2",
            "accepts": True,
            "datagrams": "10.77.0.2",
            "inside": {
                "loopback": "127.0.0.1",
                "pod4": "10.77.0.2",
                "pod6": "fd77::2",
                "mapped": "::ffff:10.77.0.2",
            },
            "half closed": "tail",
            # The peer of the second had ended it before the dump, which it still reads.
            "outside": {"connected": "ENOTCONN", "left": "b''", "accepted": "ENOTCONN"},
        },
    }


def test_without_the_addresses_of_its_new_pod_its_listener_is_named(
    criu: Path, tmp_path: Path
) -> None:
    assert on_stage(criu, tmp_path, "as dumped") == {"dump": 0, "restore": 1}
    cause = failure((tmp_path / "restore.log").read_text(), "restore")
    assert cause.message.startswith("CRIU did not restore: inet: Can't bind inet socket (id ")
    assert "address" in cause.next_step


def test_a_unix_socket_to_a_process_outside_of_the_tree_is_named(
    criu: Path, tmp_path: Path
) -> None:
    assert on_stage(criu, tmp_path, "unix peer") == {"dump": 1}
    cause = failure((tmp_path / "dump.log").read_text(), "dump")
    assert cause.message.startswith("CRIU did not dump: unix: External socket is used.")
    assert "unix sockets" in cause.next_step
