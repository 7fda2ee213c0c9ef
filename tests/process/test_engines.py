"""A server of others under `snapback-run`, captured and restored on a local cluster."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.bench import engines
from tests.integration.gms.test_run import ask
from tests.process import node as nodes
from tests.support.live_cluster import LiveCluster, find, snapshot
from tests.support.ports import free_port

pytestmark = [
    pytest.mark.process,
    pytest.mark.waits,
    # A plain process has the mounts of this machine, so that none may come or go meanwhile.
    pytest.mark.xdist_group("mounts"),
]


@pytest.mark.parametrize("driver", ["cooperative", "criu"])
async def test_a_server_of_others_is_captured_and_restored_as_it_is(
    criu: Path, tmp_path: Path, driver: str
) -> None:
    if why := nodes.lacking():
        pytest.skip(why)
    [moto] = [each for each in engines.engines() if each.row == f"moto's server as it is, {driver}"]
    port = free_port()
    stored = f"http://127.0.0.1:{port}/bucket/key"
    folder = tmp_path / "engine"
    folder.mkdir()
    cluster = LiveCluster(tmp_path, tools=criu.parents[1])
    try:
        await cluster.up(engines.SOURCE, engines.TARGET)
        async with cluster.session() as session:
            await session.apply(engines.pod(moto, "source", folder, port))
            await session.reaches("Pod", "source")
            await asyncio.to_thread(ask, stored.rpartition("/")[0], "PUT")
            await asyncio.to_thread(ask, stored, "PUT", b"what was stored")
            await session.apply(snapshot("source", "source", "Terminate", driver=driver))
            await session.reaches("Snapshot", "source")
            await session.until(
                lambda values: find(values, "Pod", "source").status.phase != "Running", "its end"
            )
            # A restored engine has only what was captured.
            (folder / "moto_recording").unlink(missing_ok=True)
            await session.apply(engines.pod(moto, "again", folder, port, "source"))
            await session.reaches("Pod", "again")
            assert await asyncio.to_thread(ask, stored) == b"what was stored"
    finally:
        left = await cluster.down()
    assert left == []
