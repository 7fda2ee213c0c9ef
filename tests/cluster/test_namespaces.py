"""Which namespaces are reconciled, as a real API server sees their labels."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncIterator
from typing import NamedTuple

import pytest

from snapshot_operator.kube.namespaces import PATH, SelectedNamespaces, is_selected
from snapshot_shared.errors import InvalidInput
from snapshot_shared.kube_client import MERGE_PATCH, KubeClient, load_configuration
from snapshot_shared.tasks import end_all
from tests.cluster.lying_proxy import Lie, LyingProxy, lying_proxy
from tests.support.waiting import until

pytestmark = pytest.mark.cluster


class Rig(NamedTuple):
    """A selection behind a proxy that lies, and two namespaces, of which the first is selected."""

    selected: SelectedNamespaces
    proxy: LyingProxy
    direct: KubeClient
    names: tuple[str, str]
    reported: list[str]

    async def label(self, name: str, value: str | None) -> None:
        body = {"metadata": {"labels": {"test": value}}}
        await self.direct.request("PATCH", f"{PATH}/{name}", body=body, content_type=MERGE_PATCH)


@pytest.fixture
async def rig(kubeconfig: str) -> AsyncIterator[Rig]:
    configuration = await load_configuration(kubeconfig)
    unique = uuid.uuid4().hex[:8]
    names = (f"one-{unique}", f"two-{unique}")
    async with (
        KubeClient(configuration) as direct,
        lying_proxy(configuration) as proxy,
        KubeClient(proxy.configuration) as client,
    ):
        for name, labels in zip(names, ({"test": unique}, {}), strict=True):
            body = {"metadata": {"name": name, "labels": labels}}
            await direct.request("POST", PATH, body=body)
        selected = SelectedNamespaces(client, f"test in ({unique}, other)", random.random)
        await selected.sync()
        reported: list[str] = []
        selected.subscribe(reported.append)
        following = asyncio.ensure_future(selected.run())
        try:
            yield Rig(selected, proxy, direct, names, reported)
        finally:
            await end_all(following)
            for name in names:
                await direct.request("DELETE", f"{PATH}/{name}")


async def test_a_namespace_is_selected_while_its_labels_match(rig: Rig) -> None:
    one, two = rig.names
    assert rig.selected.has(one)
    assert not rig.selected.has(two)
    await rig.label(two, "other")
    await until(lambda: rig.selected.has(two), "the second")
    assert rig.reported == [two]
    await rig.label(one, None)
    await until(lambda: not rig.selected.has(one), "the end of the first")
    assert rig.reported == [two]


async def test_the_api_server_says_of_one_namespace_whether_it_is_selected(rig: Rig) -> None:
    one, two = rig.names
    selector = f"test in ({one.removeprefix('one-')}, other),!nothing"
    assert await is_selected(rig.direct, selector, one)
    assert not await is_selected(rig.direct, selector, two)
    assert not await is_selected(rig.direct, selector, "none-such")


@pytest.mark.parametrize("lie", [Lie("cut"), Lie(410, "WATCH", times=1), Lie(500, times=2)])
async def test_labels_that_changed_while_nothing_was_watched_are_seen_later(
    rig: Rig, lie: Lie
) -> None:
    one, two = rig.names
    with rig.proxy.lying(lie):
        rig.proxy.cut_watches()
        await rig.label(two, "other")
        await rig.label(one, None)
        await asyncio.sleep(2.0)
    await until(lambda: rig.selected.has(two) and not rig.selected.has(one), "the changes")
    assert rig.reported == [two]


async def test_an_operator_starts_when_the_api_server_answers_again(rig: Rig) -> None:
    async with KubeClient(rig.proxy.configuration) as client:
        later = SelectedNamespaces(client, "!absent", random.random)
        with rig.proxy.lying(Lie(500)):
            syncing = asyncio.ensure_future(later.sync())
            await asyncio.sleep(1.0)
            assert not syncing.done()
        async with asyncio.timeout(30.0):
            await syncing
        assert later.has(rig.names[1])


async def test_a_selector_that_is_none_ends_the_operator_with_its_name(rig: Rig) -> None:
    async with KubeClient(rig.proxy.configuration) as client:
        with pytest.raises(InvalidInput, match="SNAPBACK_NAMESPACE_SELECTOR='a in b'"):
            await SelectedNamespaces(client, "a in b", random.random).sync()
