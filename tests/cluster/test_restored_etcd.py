"""The operator beside an API server whose etcd is restored from an older backup."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from snapshot_operator.core.restore import RESTORED
from snapshot_operator.kube.rbac import NAME
from snapshot_operator.kube.store import RESOURCES
from snapshot_shared.errors import StoreBusy
from tests.cluster.agents import placeholder
from tests.cluster.captures import Captures, Crew, after_writes
from tests.cluster.cluster import Cluster
from tests.cluster.images import Images
from tests.cluster.lying_proxy import Lie
from tests.cluster.rig import SECONDS, Rig, polled
from tests.cluster.target import Target, define, started
from tests.support.waiting import until

pytestmark = [pytest.mark.cluster, pytest.mark.turns, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    """A cluster for these tests alone, as they take objects away from all that runs in it."""
    with started("etcd") as cluster:
        define(cluster.kubectl)
        yield Target(cluster.kubectl, cluster, Images(cluster))


@pytest.fixture(scope="module")
def own_cluster(target: Target) -> Cluster:
    assert target.own
    return target.own


@pytest.fixture(scope="module")
def kubeconfig(target: Target) -> str:
    return str(target.kubectl.kubeconfig)


@pytest.fixture
def rig(site: Rig) -> Iterator[Rig]:
    yield site
    # An API server that has just started refuses all, until it has read its roles.
    site.proxy.refused.clear()


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
    await until(lambda: ends, "the end of the operator", within_s=SECONDS)


async def renewed(rig: Rig) -> None:
    """Wait until the operator renews its Lease, by which it knows a store that has gone back."""
    before = await rig.get("leases", NAME)
    await polled(lambda: rig.get("leases", NAME), lambda found: found != before)


async def overtaken(rig: Rig, version: int) -> None:
    """Write until the API server gives out versions that are newer than one it has given."""
    made: Any = {"metadata": {"resourceVersion": "0"}}
    while int(made["metadata"]["resourceVersion"]) <= version:
        filler = {"metadata": {"generateName": "filler-"}}
        await asyncio.gather(*(rig.post("configmaps", filler) for _ in range(20)))
        made = await rig.get("configmaps")


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
        newest = int((await rig.get("events"))["metadata"]["resourceVersion"])
        lies = [Lie("cut", kind=resource.plural) for resource in RESOURCES.values()]
        with rig.proxy.lying(*lies if is_overtaken else ()):
            await asyncio.to_thread(own_cluster.restore, tmp_path / "backup")
            if is_overtaken:
                await overtaken(rig, newest)
        await restarted(ends)
        await captures.apply("llm-01")
        await captures.reaches("llm-01", wanted)
        assert await captures.outcome("llm-00") == wanted


# From the creation of the content on: a worker that was restored from an artifact whose content is
# lost has another outcome.
@pytest.mark.parametrize("number", [1, 6, 11, 19])
async def test_work_of_which_the_later_part_was_lost_ends_as_it_did(
    captures: Captures, crew: Crew, rig: Rig, own_cluster: Cluster, tmp_path: Path, number: int
) -> None:
    """Its orders are given again, and answered with what was done."""
    async with kept_running(crew) as ends:
        await captures.apply("llm-00")
        wanted = await captures.ended("llm-00")
        back_up = partial(own_cluster.back_up, tmp_path / "backup")
        after_writes(rig, {number: back_up}, since="POST snapshotcontents")
        await captures.apply("llm-01")
        await captures.reaches("llm-01", wanted)
        # The few writes that are lost may be overtaken by those of an API server that starts.
        await renewed(rig)
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
        await rig.delete("dynamocheckpoints", "llm-00")
        left = captures.artifacts
        await until(lambda: not list(left.glob("*/*/gen-1")), "the deletion", within_s=SECONDS)
        await asyncio.to_thread(own_cluster.restore, tmp_path / "backup")
        await asyncio.to_thread(captures.nodes.apply, placeholder("later", "llm-00", "node-2"))

        async def refused() -> Any:
            with contextlib.suppress(StoreBusy):
                row = (await rig.rows("pods", "later")).get(RESTORED, {})
                return row if row.get("status") == "False" else {}
            return {}

        found = await polled(refused)
        assert (found["status"], found["reason"]) == ("False", "ArtifactMissing")

        async def damaged() -> bool:
            # Written after the condition of the pod.
            rows = (await captures.outcome("llm-00"))["checkpoint"][0]["conditions"]
            return bool(rows["Ready"] == ("False", "ArtifactMissing"))

        await polled(damaged)
