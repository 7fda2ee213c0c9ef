"""The operator applies its definitions on a real API server, and leaves alone those of others.

The definitions here are ours under other names: those of the session are not touched.
"""

from __future__ import annotations

import asyncio
import copy
import random
import uuid
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest

from snapshot_operator.kube import rbac
from snapshot_operator.kube.crds import PART_OF, VERSION_ANNOTATION, definitions
from snapshot_operator.kube.definitions import PATH, Definitions, Mode
from snapshot_shared.errors import Failure
from snapshot_shared.tasks import end_all
from tests.cluster.lying_proxy import Lie
from tests.cluster.rig import RBAC, Rig, opened
from tests.support.waiting import until

pytestmark = pytest.mark.cluster


class Defined(NamedTuple):
    """Definitions of a group of this test alone, behind a proxy that has the operator's rights."""

    rig: Rig
    wanted: list[dict[str, Any]]
    reported: list[Failure | None]

    @property
    def first(self) -> str:
        return str(self.wanted[0]["metadata"]["name"])

    def definitions(self, mode: Mode = "apply") -> Definitions:
        async def report(failure: Failure | None) -> None:
            self.reported.append(failure)

        return Definitions(self.rig.client, self.wanted, mode, random.random, report)

    async def get(self, name: str) -> Any:
        return await self.rig.get(PATH, name)

    async def foreign(self) -> None:
        """Have another product define the first kind."""
        document = copy.deepcopy(self.wanted[0])
        document["metadata"] |= {"labels": {PART_OF[0]: "dynamo"}, "annotations": {}}
        await self.rig.post(PATH, document)
        # Until its controllers have written its status.
        await asyncio.sleep(3.0)


def in_group(group: str) -> list[dict[str, Any]]:
    """Our definitions as those of another group, two of them for speed."""
    found = copy.deepcopy(definitions()[:2])
    for document in found:
        document["spec"]["group"] = group
        document["metadata"]["name"] = f"{document['spec']['names']['plural']}.{group}"
        # The short names would belong to the definitions of the session.
        document["spec"]["names"] |= {"shortNames": [], "categories": []}
    return found


@pytest.fixture
async def defined(kubeconfig: str) -> AsyncIterator[Defined]:
    unique = f"g{uuid.uuid4().hex[:8]}"
    wanted = in_group(f"{unique}.example.com")
    names = [document["metadata"]["name"] for document in wanted]
    role = rbac.cluster_role()
    role["metadata"]["name"] = f"definitions-{unique}"
    role["rules"] = [
        {**rule, "resourceNames": names}
        for rule in role["rules"]
        if rule["apiGroups"] == ["apiextensions.k8s.io"]
    ]
    async with opened(kubeconfig, "definitions", role) as rig:
        yield Defined(rig, wanted, [])
        for name in names:
            await rig.delete(PATH, name)
        await rig.delete(f"{RBAC}/clusterroles/{role['metadata']['name']}")


async def ensured(defined: Defined, mode: Mode = "apply") -> None:
    async with asyncio.timeout(30.0):
        await defined.definitions(mode).ensure()


async def test_definitions_are_applied_and_served_when_that_is_done(defined: Defined) -> None:
    await ensured(defined)
    for document in defined.wanted:
        found = await defined.get(document["metadata"]["name"])
        assert found["metadata"]["labels"][PART_OF[0]] == PART_OF[1]
        managers = {row["manager"] for row in found["metadata"]["managedFields"]}
        assert rbac.NAME in managers
        held = {row["type"]: row["status"] for row in found["status"]["conditions"]}
        assert held["Established"] == "True"
    assert defined.reported == [None]


async def test_a_second_start_changes_none(defined: Defined) -> None:
    await ensured(defined)
    before = [await defined.get(document["metadata"]["name"]) for document in defined.wanted]
    await ensured(defined)
    after = [await defined.get(document["metadata"]["name"]) for document in defined.wanted]
    assert after == before


async def test_a_definition_of_another_product_keeps_all_from_being_applied_until_it_is_gone(
    defined: Defined,
) -> None:
    await defined.foreign()
    before = await defined.get(defined.first)
    waiting = asyncio.ensure_future(defined.definitions().ensure())
    try:
        await until(lambda: defined.reported, "the report")
        (failure,) = defined.reported
        assert failure is not None
        assert failure.reason == "CRDsOwnedByOther"
        defined.rig.proxy.requests.clear()
        await asyncio.sleep(3.0)
        assert not waiting.done()
        # It waits by a watch alone.
        assert [key for key in defined.rig.proxy.requests if key[0] != "WATCH"] == []
        assert await defined.get(defined.first) == before
        assert not await defined.rig.exists(PATH, defined.wanted[1]["metadata"]["name"])
        await defined.rig.delete(PATH, defined.first)
        async with asyncio.timeout(30.0):
            await waiting
    finally:
        await end_all(waiting)
    assert defined.reported[-1] is None
    assert (await defined.get(defined.first))["metadata"]["labels"][PART_OF[0]] == PART_OF[1]


async def test_a_definition_of_another_product_is_taken_over_where_it_may_be(
    defined: Defined,
) -> None:
    await defined.foreign()
    await ensured(defined, "adopt")
    assert (await defined.get(defined.first))["metadata"]["labels"][PART_OF[0]] == PART_OF[1]


async def test_an_older_operator_leaves_newer_definitions_as_they_are(defined: Defined) -> None:
    await ensured(defined)
    newer = {"annotations": {VERSION_ANNOTATION: "99.0.0"}}
    await defined.rig.patch(f"{PATH}/{defined.first}", metadata=newer)
    before = await defined.get(defined.first)
    await ensured(defined)
    assert await defined.get(defined.first) == before


async def test_absent_definitions_that_others_apply_are_waited_for(defined: Defined) -> None:
    waiting = asyncio.ensure_future(defined.definitions("keep").ensure())
    try:
        await until(lambda: defined.reported, "the report")
        assert defined.reported[0] is not None
        assert defined.reported[0].reason == "CRDsMissing"
        for document in defined.wanted:
            await defined.rig.post(PATH, document)
        async with asyncio.timeout(30.0):
            await waiting
    finally:
        await end_all(waiting)


async def test_a_failure_of_the_api_server_is_waited_out(defined: Defined) -> None:
    with defined.rig.proxy.lying(Lie(500, times=2), Lie("cut", times=1)):
        await ensured(defined)


async def test_a_definition_that_the_api_server_refuses_is_reported_with_its_message(
    defined: Defined,
) -> None:
    defined.wanted[0]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["type"] = "string"
    waiting = asyncio.ensure_future(defined.definitions().ensure())
    try:
        await until(lambda: defined.reported, "the report")
        assert defined.reported[0] is not None
        assert defined.reported[0].reason == "CRDsRefused"
        assert "openAPIV3Schema" in defined.reported[0].message
    finally:
        await end_all(waiting)
