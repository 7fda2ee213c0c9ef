"""The operator beside an API server whose etcd is restored from an older backup."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from snapshot_operator.core.restore import RESTORED
from snapshot_operator.kube.rbac import NAME
from snapshot_operator.kube.store import RESOURCES
from snapshot_shared.errors import StoreBusy
from tests.cluster import programs
from tests.cluster.cluster import Cluster
from tests.cluster.lying_proxy import Lie
from tests.cluster.target import define
from tests.cluster.test_agent import artifacts, nats_url, nodes, placeholder
from tests.cluster.test_faults import Captures, Crew, after_writes, captures, crew
from tests.cluster.test_operator import polled
from tests.cluster.test_program import Rig, rig

__all__ = ["artifacts", "captures", "crew", "nats_url", "nodes", "rig"]
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def own_cluster() -> Iterator[Cluster]:
    """A cluster for these tests alone, as they take objects away from all that runs in it."""
    if why := programs.lacking():
        pytest.skip(why)
    cluster = Cluster(f"etcd-{os.getpid()}")
    cluster.up(owned=True)
    try:
        yield cluster
    finally:
        cluster.down()


@pytest.fixture(scope="module")
def kubeconfig(own_cluster: Cluster) -> str:
    define(own_cluster.kubectl)
    return str(own_cluster.kubectl.kubeconfig)


@pytest.fixture(autouse=True)
def _forgiven(rig: Rig) -> Iterator[None]:
    """An API server that has just started refuses all, until it has read its roles."""
    yield
    rig.proxy.refused.clear()


@contextlib.asynccontextmanager
async def kept_running(crew: Crew) -> AsyncIterator[list[int]]:
    """Start the operator again whenever it has ended, as a kubelet does; yield how it ended."""
    ends: list[int] = []

    async def run() -> None:
        while True:
            operator = await crew.start()
            ends.append(await operator.process.wait())
            crew.running.remove(operator)

    running = asyncio.ensure_future(run())
    try:
        yield ends
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def restarted(ends: list[int]) -> None:
    """Wait until the operator has ended, as it does when it sees what became of its objects."""

    async def has_ended() -> bool:
        return bool(ends)

    await polled(has_ended)


async def renewed(rig: Rig) -> None:
    """Wait until the operator renews its Lease, by which it knows a store that has gone back."""
    path = f"/apis/coordination.k8s.io/v1/namespaces/{rig.namespace}/leases/{NAME}"
    before = (await rig.get(path))["metadata"]["resourceVersion"]

    async def is_renewed() -> bool:
        return bool((await rig.get(path))["metadata"]["resourceVersion"] != before)

    await polled(is_renewed)


async def overtaken(rig: Rig, version: int) -> None:
    """Write until the API server gives out versions that are newer than one it has given."""
    path = f"/api/v1/namespaces/{rig.namespace}/configmaps"
    made: Any = {"metadata": {"resourceVersion": "0"}}
    while int(made["metadata"]["resourceVersion"]) <= version:
        names = [{"metadata": {"generateName": "filler-"}} for _ in range(20)]
        await asyncio.gather(*(rig.direct.request("POST", path, body=name) for name in names))
        made = await rig.get(path)


@pytest.mark.parametrize("is_overtaken", [False, True], ids=["older", "overtaken"])
async def test_what_was_captured_after_the_backup_is_captured_again(
    captures: Captures,
    crew: Crew,
    rig: Rig,
    own_cluster: Cluster,
    tmp_path: Path,
    is_overtaken: bool,
) -> None:
    """Where versions are given again before the operator looks, they are no older than it knows."""
    async with kept_running(crew) as ends:
        await captures.apply("llm-00")
        wanted = await captures.ended("llm-00")
        own_cluster.back_up(tmp_path / "backup")
        await captures.apply("llm-01")
        await captures.reaches("llm-01", wanted)
        await renewed(rig)
        newest = int((await rig.get(rig.path("events")))["metadata"]["resourceVersion"])
        lies = [Lie("cut", kind=resource.plural) for resource in RESOURCES.values()]
        with rig.proxy.lying(*lies if is_overtaken else ()):
            await asyncio.to_thread(own_cluster.restore, tmp_path / "backup")
            if is_overtaken:
                await overtaken(rig, newest)
        await restarted(ends)
        await captures.apply("llm-01")
        await captures.reaches("llm-01", wanted)
        assert await captures.outcome("llm-00") == wanted


@pytest.mark.parametrize("number", [8, 13, 18, 26])
async def test_work_of_which_the_later_part_was_lost_ends_as_it_did(
    captures: Captures, crew: Crew, rig: Rig, own_cluster: Cluster, tmp_path: Path, number: int
) -> None:
    """Its orders are given again, and answered with what was done."""
    async with kept_running(crew) as ends:
        await captures.apply("llm-00")
        wanted = await captures.ended("llm-00")
        after_writes(rig, {number: partial(own_cluster.back_up, tmp_path / "backup")})
        await captures.apply("llm-01")
        await captures.reaches("llm-01", wanted)
        await asyncio.to_thread(own_cluster.restore, tmp_path / "backup")
        await restarted(ends)
        await captures.reaches("llm-01", wanted)
        await captures.end("llm-01")


async def test_an_artifact_whose_deletion_was_lost_is_known_as_damaged_once_it_is_read(
    captures: Captures, crew: Crew, rig: Rig, own_cluster: Cluster, tmp_path: Path
) -> None:
    async with kept_running(crew):
        await captures.apply("llm-00")
        await captures.ended("llm-00")
        own_cluster.back_up(tmp_path / "backup")
        await rig.direct.request("DELETE", rig.path("dynamocheckpoints", "llm-00"))

        async def is_deleted() -> bool:
            return not list(captures.artifacts.glob("*/*/gen-1"))

        await polled(is_deleted)
        await asyncio.to_thread(own_cluster.restore, tmp_path / "backup")
        await asyncio.to_thread(captures.nodes.apply, placeholder("later", "llm-00", "node-2"))

        async def refused() -> Any:
            with contextlib.suppress(StoreBusy):
                pods = await captures.items(f"/api/v1/namespaces/{rig.namespace}/pods")
                rows = [
                    row
                    for item in pods
                    if item["metadata"]["name"] == "later"
                    for row in item["status"].get("conditions", [])
                ]
                return next((row for row in rows if row["type"] == RESTORED), {})
            return {}

        found = await polled(refused)
        assert (found["status"], found["reason"]) == ("False", "ArtifactMissing")

        async def damaged() -> bool:
            # Written after the condition of the pod.
            rows = (await captures.outcome("llm-00"))["checkpoint"][0]["conditions"]
            return bool(rows["Ready"] == ("False", "ArtifactMissing"))

        await polled(damaged)
