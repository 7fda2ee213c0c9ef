"""Which namespaces are reconciled, as a real API server sees their labels."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import NamedTuple

import pytest

from snapshot_operator.kube.namespaces import PATH, SelectedNamespaces, is_selected
from snapshot_shared.errors import InvalidInput
from snapshot_shared.tasks import end_all
from tests.cluster.lying_proxy import Lie
from tests.cluster.rig import Rig, opened
from tests.support.waiting import until

pytestmark = pytest.mark.cluster


class Selection(NamedTuple):
    """A selection behind a proxy that lies, and two namespaces, of which the first is selected."""

    rig: Rig
    selected: SelectedNamespaces
    one: str
    two: str
    reported: list[str]

    async def label(self, name: str, value: str | None) -> None:
        await self.rig.patch(f"{PATH}/{name}", metadata={"labels": {"test": value}})


@pytest.fixture
async def rig(kubeconfig: str) -> AsyncIterator[Rig]:
    async with opened(kubeconfig, "one") as found:
        yield found


@pytest.fixture
async def selection(rig: Rig) -> AsyncIterator[Selection]:
    one, two = rig.namespace, rig.namespace.replace("one", "two")
    await rig.post(PATH, {"metadata": {"name": two}})
    await rig.patch(f"{PATH}/{one}", metadata={"labels": {"test": one}})
    selected = SelectedNamespaces(rig.client, f"test in ({one}, other)", random.random)
    await selected.sync()
    reported: list[str] = []
    selected.subscribe(reported.append)
    following = asyncio.ensure_future(selected.run())
    yield Selection(rig, selected, one, two, reported)
    await end_all(following)
    await rig.delete(PATH, two)


async def test_a_namespace_is_selected_while_its_labels_match(selection: Selection) -> None:
    one, two = selection.one, selection.two
    assert selection.selected.has(one)
    assert not selection.selected.has(two)
    await selection.label(two, "other")
    await until(lambda: selection.selected.has(two), "the second")
    assert selection.reported == [two]
    await selection.label(one, None)
    await until(lambda: not selection.selected.has(one), "the end of the first")
    assert selection.reported == [two]


async def test_the_api_server_says_of_one_namespace_whether_it_is_selected(
    rig: Rig, selection: Selection
) -> None:
    one, two = selection.one, selection.two
    selector = f"test in ({one}, other),!nothing"
    assert await is_selected(rig.direct, selector, one)
    assert not await is_selected(rig.direct, selector, two)
    assert not await is_selected(rig.direct, selector, "none-such")


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
