"""Which operator of a cluster is the active one, by a Lease of a real API server."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from msgspec.structs import replace

from snapshot_operator.kube.lease import KubeLease, StoreRewound
from snapshot_shared.clocks import Clocks
from snapshot_shared.kube_client import KubeClient
from tests.cluster.lying_proxy import Answer, Lie
from tests.cluster.rig import Rig, opened

pytestmark = pytest.mark.cluster

LASTS_S = 3


@pytest.fixture
async def rig(kubeconfig: str) -> AsyncIterator[Rig]:
    async with opened(kubeconfig, "lease") as found:
        yield found


def lease_of(rig: Rig, identity: str, client: KubeClient) -> KubeLease:
    clocks = Clocks(time.monotonic, time.time, "boot")
    place = (rig.namespace, "operator")
    return KubeLease(client, place, identity, clocks, random.random, LASTS_S)


async def held(lease: KubeLease, within_s: float) -> tuple[AsyncExitStack, asyncio.Event]:
    stack = AsyncExitStack()
    async with asyncio.timeout(within_s):
        return stack, await stack.enter_async_context(lease.held())


async def test_the_lease_is_held_by_one_and_the_next_has_it_at_once_when_it_is_given_back(
    rig: Rig,
) -> None:
    first, lost = await held(lease_of(rig, "first", rig.direct), 5.0)
    second = lease_of(rig, "second", rig.direct)
    with pytest.raises(TimeoutError):
        await held(second, 2.0 * LASTS_S)
    assert not lost.is_set()
    await first.aclose()
    next_one, _ = await held(second, 0.8 * LASTS_S)
    await next_one.aclose()


async def test_a_holder_that_is_cut_off_stops_before_another_can_take_the_lease(rig: Rig) -> None:
    first, lost = await held(lease_of(rig, "first", rig.client), 5.0)
    second = asyncio.ensure_future(held(lease_of(rig, "second", rig.direct), 10.0 * LASTS_S))
    await asyncio.sleep(LASTS_S / 2)
    with rig.proxy.lying(Lie("cut")):
        async with asyncio.timeout(LASTS_S):
            await lost.wait()
        assert not second.done()
        stack, _ = await second
        await first.aclose()
    await stack.aclose()


async def test_a_holder_whose_renewal_was_stored_though_no_answer_came_keeps_the_lease(
    rig: Rig,
) -> None:
    first, lost = await held(lease_of(rig, "first", rig.client), 5.0)
    with rig.proxy.lying(Lie("lost", "PUT", times=1)):
        await asyncio.sleep(2.0 * LASTS_S)
    assert not lost.is_set()
    await first.aclose()


async def test_a_holder_learns_that_another_has_taken_the_lease(rig: Rig) -> None:
    first, lost = await held(lease_of(rig, "first", rig.direct), 5.0)
    await rig.patch(rig.path("leases", "operator"), spec={"holderIdentity": "intruder"})
    async with asyncio.timeout(LASTS_S):
        await lost.wait()
    await first.aclose()


async def test_a_holder_whose_lease_is_older_than_its_last_renewal_stops(rig: Rig) -> None:
    lease = lease_of(rig, "first", rig.direct)
    first, _ = await held(lease, 5.0)
    found = await lease._found()
    assert found is not None
    # As an API server whose etcd was restored from a backup: all that it has is older.
    newer = replace(found, metadata=found.metadata | {"resourceVersion": str(2**62)})
    with pytest.raises(StoreRewound, match=f"was at {2**62}"):
        await lease._renewed(newer)
    await first.aclose()


@pytest.mark.parametrize("answer", [403, 429, 500, "cut"])
async def test_a_failure_of_the_api_server_is_waited_out_by_who_stands_by(
    rig: Rig, answer: Answer
) -> None:
    with rig.proxy.lying(Lie(answer)):
        waiting = asyncio.ensure_future(held(lease_of(rig, "first", rig.client), 30.0))
        await asyncio.sleep(LASTS_S / 2)
        assert not waiting.done()
    stack, _ = await waiting
    await stack.aclose()


async def test_a_holder_whose_renewals_get_answers_of_no_api_server_stops_in_time(
    rig: Rig,
) -> None:
    first, lost = await held(lease_of(rig, "first", rig.client), 5.0)
    with rig.proxy.lying(Lie("page")):
        async with asyncio.timeout(LASTS_S):
            await lost.wait()
    await first.aclose()


async def test_what_others_wrote_beside_the_spec_of_the_lease_is_kept(rig: Rig) -> None:
    first, lost = await held(lease_of(rig, "first", rig.direct), 5.0)
    written = {"labels": {"team": "a"}, "annotations": {"note": "b"}}
    await rig.patch(rig.path("leases", "operator"), metadata=written)
    await asyncio.sleep(LASTS_S)
    assert not lost.is_set()
    await first.aclose()
    meta = (await rig.get("leases", "operator"))["metadata"]
    assert {name: meta[name] for name in written} == written
