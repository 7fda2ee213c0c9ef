"""A network that a killed CRIU has locked, opened again by the real nft."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from snapshot_agent.helper.settling import Records
from tests.process.node import CRIU, Node

pytestmark = [pytest.mark.process, pytest.mark.waits]


async def test_the_tables_of_criu_are_removed_and_those_of_others_stay(
    node: Node, tmp_path: Path
) -> None:
    worker = await node.container("worker")
    for family, name in (("inet", "CRIU-7f3a"), ("ip6", "CRIU-1"), ("inet", "of-the-pod")):
        worker.in_network(str(CRIU / "nft"), "add", "table", family, name)
    assert worker.tables().count("CRIU-") == 2
    network = os.stat(f"/proc/{worker.pid}/ns/net").st_ino  # noqa: PTH116 - no such path
    Records(tmp_path / "dumps", CRIU / "nft").open_network(network)
    assert worker.tables() == "table inet of-the-pod\n"
    await worker.goes_on()
