"""Lease, selected namespaces and definitions, by an API server that refuses, lies and is away."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import random
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import pytest

from snapshot_api.schema.definitions import PART_OF, definitions
from snapshot_operator.kube import rbac
from snapshot_operator.kube.definitions import PATH, Definitions, Mode
from snapshot_operator.kube.lease import KubeLease
from snapshot_operator.kube.namespaces import PATH as NAMESPACES
from snapshot_operator.kube.namespaces import SelectedNamespaces, is_selected
from snapshot_shared.clocks import Clocks
from snapshot_shared.errors import Failure, InvalidInput
from snapshot_shared.kube_client import KubeClient
from snapshot_shared.tasks import end_all
from tests.cluster.lying_proxy import Answer, Lie
from tests.cluster.rig import RBAC, Rig, opened
from tests.support.waiting import until

pytestmark = pytest.mark.cluster

LASTS_S = 3


@pytest.fixture
async def rig(kubeconfig: str) -> AsyncIterator[Rig]:
    async with opened(kubeconfig, "one") as found:
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


@pytest.mark.parametrize("answer", ["cut", "page"])
async def test_a_holder_that_is_cut_off_stops_before_another_can_take_the_lease(
    rig: Rig, answer: Answer
) -> None:
    first, lost = await held(lease_of(rig, "first", rig.client), 5.0)
    second = asyncio.ensure_future(held(lease_of(rig, "second", rig.direct), 10.0 * LASTS_S))
    await asyncio.sleep(LASTS_S / 2)
    with rig.proxy.lying(Lie(answer)):
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


async def test_what_others_wrote_beside_the_spec_of_the_lease_is_kept(rig: Rig) -> None:
    first, lost = await held(lease_of(rig, "first", rig.direct), 5.0)
    written = {"labels": {"team": "a"}, "annotations": {"note": "b"}}
    await rig.patch(rig.path("leases", "operator"), metadata=written)
    await asyncio.sleep(LASTS_S)
    assert not lost.is_set()
    await first.aclose()
    meta = (await rig.get("leases", "operator"))["metadata"]
    assert {name: meta[name] for name in written} == written


class Selection(NamedTuple):
    """A selection behind a proxy that lies, and two namespaces, of which the first is selected."""

    rig: Rig
    selected: SelectedNamespaces
    one: str
    two: str
    reported: list[str]

    async def label(self, name: str, value: str | None) -> None:
        await self.rig.patch(f"{NAMESPACES}/{name}", metadata={"labels": {"test": value}})


@pytest.fixture
async def selection(rig: Rig) -> AsyncIterator[Selection]:
    one, two = rig.namespace, rig.namespace.replace("one", "two")
    await rig.post(NAMESPACES, {"metadata": {"name": two}})
    await rig.patch(f"{NAMESPACES}/{one}", metadata={"labels": {"test": one}})
    selected = SelectedNamespaces(rig.client, f"test in ({one}, other)", random.random)
    await selected.sync()
    reported: list[str] = []
    selected.subscribe(reported.append)
    following = asyncio.ensure_future(selected.run())
    yield Selection(rig, selected, one, two, reported)
    await end_all(following)
    await rig.delete(NAMESPACES, two)


async def test_a_namespace_is_selected_while_its_labels_match(
    rig: Rig, selection: Selection
) -> None:
    one, two = selection.one, selection.two
    selector = f"test in ({one}, other),!nothing"
    for name in (one, two, "none-such"):
        assert await is_selected(rig.direct, selector, name) == (name == one)
        assert selection.selected.has(name) == (name == one)
    await selection.label(two, "other")
    await until(lambda: selection.selected.has(two), "the second")
    assert selection.reported == [two]
    await selection.label(one, None)
    await until(lambda: not selection.selected.has(one), "the end of the first")
    assert selection.reported == [two]


@pytest.mark.parametrize("lie", [Lie("cut"), Lie(410, "WATCH", times=1), Lie(500, times=2)])
async def test_labels_that_changed_while_nothing_was_watched_are_seen_later(
    rig: Rig, selection: Selection, lie: Lie
) -> None:
    one, two = selection.one, selection.two
    with rig.proxy.lying(lie):
        rig.proxy.cut_watches()
        await selection.label(two, "other")
        await selection.label(one, None)
        await asyncio.sleep(2.0)
    await until(
        lambda: selection.selected.has(two) and not selection.selected.has(one), "the changes"
    )
    assert selection.reported == [two]


async def test_an_operator_starts_when_the_api_server_answers_again(rig: Rig) -> None:
    later = SelectedNamespaces(rig.client, "!absent", random.random)
    with rig.proxy.lying(Lie(500)):
        syncing = asyncio.ensure_future(later.sync())
        await asyncio.sleep(1.0)
        assert not syncing.done()
    async with asyncio.timeout(30.0):
        await syncing
    assert later.has(rig.namespace)


async def test_a_selector_that_is_none_ends_the_operator_with_its_name(rig: Rig) -> None:
    with pytest.raises(InvalidInput, match="SNAPBACK_NAMESPACE_SELECTOR='a in b'"):
        await SelectedNamespaces(rig.client, "a in b", random.random).sync()


class Defined(NamedTuple):
    """Our definitions in a group of this test alone: those of the session are not touched."""

    rig: Rig
    """With the rights of the operator."""
    wanted: list[dict[str, Any]]
    reported: list[Failure | None]

    @property
    def first(self) -> str:
        return str(self.wanted[0]["metadata"]["name"])

    async def ensure(self, mode: Mode = "apply") -> None:
        async def report(failure: Failure | None) -> None:
            self.reported.append(failure)

        async with asyncio.timeout(30.0):
            await Definitions(self.rig.client, self.wanted, mode, random.random, report).ensure()

    @contextlib.asynccontextmanager
    async def waiting(self) -> AsyncIterator[tuple[asyncio.Future[None], Failure]]:
        """Ensure them for the length of the block, and yield what was reported first."""
        ensuring = asyncio.ensure_future(self.ensure())
        try:
            await until(lambda: self.reported, "the report")
            assert self.reported[0] is not None
            yield ensuring, self.reported[0]
        finally:
            await end_all(ensuring)

    async def get(self, name: str) -> Any:
        return await self.rig.get(PATH, name)

    async def foreign(self) -> None:
        """Have another product define the first kind."""
        document = copy.deepcopy(self.wanted[0])
        document["metadata"] |= {"labels": {PART_OF[0]: "dynamo"}, "annotations": {}}
        await self.rig.post(PATH, document)
        # Until its controllers have written its status.
        await asyncio.sleep(3.0)


@pytest.fixture
async def defined(kubeconfig: str) -> AsyncIterator[Defined]:
    unique = f"g{uuid.uuid4().hex[:8]}"
    # Two, for speed.
    wanted = copy.deepcopy(definitions()[:2])
    for document in wanted:
        names = document["spec"]["names"]
        document["spec"]["group"] = f"{unique}.example.com"
        document["metadata"]["name"] = f"{names['plural']}.{unique}.example.com"
        # The short names would belong to the definitions of the session.
        names |= {"shortNames": [], "categories": []}
    own = [document["metadata"]["name"] for document in wanted]
    role = rbac.cluster_role()
    role["metadata"]["name"] = f"definitions-{unique}"
    role["rules"] = [
        {**rule, "resourceNames": own}
        for rule in role["rules"]
        if rule["apiGroups"] == ["apiextensions.k8s.io"]
    ]
    async with opened(kubeconfig, "definitions", role) as rig:
        yield Defined(rig, wanted, [])
        for name in own:
            await rig.delete(PATH, name)
        await rig.delete(f"{RBAC}/clusterroles/{role['metadata']['name']}")


async def test_definitions_are_applied_and_served_when_that_is_done(defined: Defined) -> None:
    with defined.rig.proxy.lying(Lie(500, times=2), Lie("cut", times=1)):
        await defined.ensure()
    for document in defined.wanted:
        found = await defined.get(document["metadata"]["name"])
        assert found["metadata"]["labels"][PART_OF[0]] == PART_OF[1]
        managers = {row["manager"] for row in found["metadata"]["managedFields"]}
        assert rbac.NAME in managers
        held = {row["type"]: row["status"] for row in found["status"]["conditions"]}
        assert held["Established"] == "True"
    assert defined.reported == [None]


async def test_a_definition_of_another_product_keeps_all_from_being_applied_until_it_is_gone(
    defined: Defined,
) -> None:
    await defined.foreign()
    before = await defined.get(defined.first)
    async with defined.waiting() as (ensuring, failure):
        assert failure.reason == "CRDsOwnedByOther"
        defined.rig.proxy.requests.clear()
        await asyncio.sleep(3.0)
        assert not ensuring.done()
        # It waits by a watch alone.
        assert [key for key in defined.rig.proxy.requests if key[0] != "WATCH"] == []
        assert await defined.get(defined.first) == before
        assert not await defined.rig.exists(PATH, defined.wanted[1]["metadata"]["name"])
        await defined.rig.delete(PATH, defined.first)
        await ensuring
    assert defined.reported[-1] is None
    assert (await defined.get(defined.first))["metadata"]["labels"][PART_OF[0]] == PART_OF[1]


async def test_a_definition_of_another_product_is_taken_over_where_it_may_be(
    defined: Defined,
) -> None:
    await defined.foreign()
    await defined.ensure("adopt")
    assert (await defined.get(defined.first))["metadata"]["labels"][PART_OF[0]] == PART_OF[1]


async def test_a_definition_that_the_api_server_refuses_is_reported_with_its_message(
    defined: Defined,
) -> None:
    defined.wanted[0]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["type"] = "string"
    async with defined.waiting() as (_, failure):
        assert failure.reason == "CRDsRefused"
        assert "openAPIV3Schema" in failure.message
