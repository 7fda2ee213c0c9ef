"""A server of others under `snapback-run`, captured and restored on a local cluster."""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from snapshot_shared.objects.kubernetes import HOSTNAME_LABEL
from tests.bench.pause import is_ready, until
from tests.integration.gms.test_run import ask
from tests.process import node as nodes
from tests.support.live_cluster import LiveCluster, find

pytestmark = [
    pytest.mark.process,
    pytest.mark.waits,
    # A plain process has the mounts of this machine, so that none may come or go meanwhile.
    pytest.mark.xdist_group("mounts"),
]


def engine(
    folder: Path, name: str, node: str, port: int, driver: str, source: str = ""
) -> dict[str, Any]:
    """Return a pod with the server of moto, which keeps what it stores in memory."""
    url = f"http://127.0.0.1:{port}/moto-api/"
    options = ["--ready", url]
    env = []
    if driver == "cooperative":
        replay = f"{url}recorder/replay-recording"
        options += ["--state", "moto_recording", "--restore", replay]
        env = [{"name": "MOTO_ENABLE_RECORDING", "value": "1"}]
    program = [sys.executable, "-m", "moto.server", "-p", str(port)]
    container = {
        "name": "main",
        "command": ["snapback-run", *options, "--", *program],
        "env": env,
        "workingDir": str(folder),
    }
    mark = {"nvidia.com/restore-from": source} if source else {"nvidia.com/capture-driver": driver}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "annotations": mark},
        "spec": {"nodeSelector": {HOSTNAME_LABEL: node}, "containers": [container]},
    }


def snapshot(name: str, driver: str) -> dict[str, Any]:
    spec = {"source": {"podRef": {"name": name}}, "sourcePolicy": "Terminate", "driver": driver}
    kind = {"apiVersion": "nvidia.com/v1alpha1", "kind": "Snapshot"}
    return {**kind, "metadata": {"name": name}, "spec": spec}


@pytest.mark.parametrize("driver", ["cooperative", "criu"])
async def test_a_server_of_others_is_captured_and_restored_as_it_is(
    criu: Path, tmp_path: Path, driver: str
) -> None:
    if why := nodes.lacking():
        pytest.skip(why)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    stored = f"http://127.0.0.1:{port}/bucket/key"
    folder = tmp_path / "engine"
    folder.mkdir()
    cluster = LiveCluster(tmp_path, tools=criu.parents[1])
    try:
        await cluster.up("one", "two")
        async with cluster.session() as session:
            await session.apply(engine(folder, "source", "one", port, driver))
            await until(session, "Pod", "source", is_ready)
            await asyncio.to_thread(ask, stored.rpartition("/")[0], "PUT")
            await asyncio.to_thread(ask, stored, "PUT", b"what was stored")
            await session.apply(snapshot("source", driver))
            await until(session, "Snapshot", "source", is_ready)
            await session.until(
                lambda values: find(values, "Pod", "source").status.phase != "Running", "its end"
            )
            # A restored engine has only what was captured.
            (folder / "moto_recording").unlink(missing_ok=True)
            await session.apply(engine(folder, "again", "two", port, driver, "source"))
            await until(session, "Pod", "again", is_ready)
            assert await asyncio.to_thread(ask, stored) == b"what was stored"
    finally:
        left = await cluster.down()
    assert left == []
