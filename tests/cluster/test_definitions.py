"""The operator applies its definitions on a real API server, and leaves alone those of others.

The definitions here are ours under other names: those of the session are not touched.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import random
import uuid
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import msgspec
import pytest

from snapshot_operator.kube import rbac
from snapshot_operator.kube.crds import PART_OF, VERSION_ANNOTATION, definitions
from snapshot_operator.kube.definitions import PATH, Definitions, Mode
from snapshot_shared.errors import AlreadyExists, Failure, NotFound
from snapshot_shared.kube_client import MERGE_PATCH, KubeClient, load_configuration
from snapshot_shared.tasks import end_all
from tests.cluster.lying_proxy import Lie, LyingProxy, lying_proxy
from tests.support.waiting import until

pytestmark = pytest.mark.cluster


class Rig(NamedTuple):
    """Definitions of a group of this test alone, behind a proxy that has the operator's rights."""

    direct: KubeClient
    client: KubeClient
    proxy: LyingProxy
    wanted: list[dict[str, Any]]
    reported: list[Failure | None]

    @property
    def first(self) -> str:
        return str(self.wanted[0]["metadata"]["name"])

    def definitions(self, mode: Mode = "apply") -> Definitions:
        async def report(failure: Failure | None) -> None:
            self.reported.append(failure)

        return Definitions(self.client, self.wanted, mode, random.random, report)

    async def get(self, name: str) -> Any:
        return msgspec.json.decode(await self.direct.request("GET", f"{PATH}/{name}"))

    async def exists(self, name: str) -> bool:
        with contextlib.suppress(NotFound):
            await self.get(name)
            return True
        return False

    async def foreign(self) -> None:
        """Have another product define the first kind."""
        document = copy.deepcopy(self.wanted[0])
        document["metadata"] |= {"labels": {PART_OF[0]: "dynamo"}, "annotations": {}}
        await self.direct.request("POST", PATH, body=document)
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
async def rig(kubeconfig: str) -> AsyncIterator[Rig]:
    configuration = await load_configuration(kubeconfig)
    unique = uuid.uuid4().hex[:8]
    wanted = in_group(f"g{unique}.example.com")
    names = tuple(document["metadata"]["name"] for document in wanted)
    async with contextlib.AsyncExitStack() as stack:
        direct = await stack.enter_async_context(KubeClient(configuration))
        proxy = await stack.enter_async_context(lying_proxy(configuration))
        with_rights = proxy.configuration
        token = await _token(direct, f"definitions-{unique}", names)
        with_rights.api_key["BearerToken"] = token
        with_rights.api_key_prefix["BearerToken"] = "Bearer"
        client = await stack.enter_async_context(KubeClient(with_rights))
        yield Rig(direct, client, proxy, wanted, [])
        for name in names:
            with contextlib.suppress(NotFound):
                await direct.request("DELETE", f"{PATH}/{name}")
        await direct.request("DELETE", f"/api/v1/namespaces/definitions-{unique}")
        # A refused request is a right that is missing from the role.
        assert not proxy.refused


async def _token(direct: KubeClient, namespace: str, names: tuple[str, ...]) -> str:
    """Return a token with the operator's rights on definitions, for other names."""
    rbac_api = "/apis/rbac.authorization.k8s.io/v1"
    await direct.request("POST", "/api/v1/namespaces", body={"metadata": {"name": namespace}})
    role = rbac.cluster_role()
    role["metadata"]["name"] = namespace
    role["rules"] = [
        {**rule, "resourceNames": list(names)}
        for rule in role["rules"]
        if rule["apiGroups"] == ["apiextensions.k8s.io"]
    ]
    binding = {
        "metadata": {"name": namespace},
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "ClusterRole",
            "name": namespace,
        },
        "subjects": [{"kind": "ServiceAccount", "name": "operator", "namespace": namespace}],
    }
    accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
    with contextlib.suppress(AlreadyExists):
        await direct.request("POST", accounts, body={"metadata": {"name": "operator"}})
    await direct.request("POST", f"{rbac_api}/clusterroles", body=role)
    await direct.request("POST", f"{rbac_api}/clusterrolebindings", body=binding)
    body = {"spec": {"expirationSeconds": 3600}}
    answer = await direct.request("POST", f"{accounts}/operator/token", body=body)
    return str(msgspec.json.decode(answer)["status"]["token"])


async def ensured(rig: Rig, mode: Mode = "apply") -> None:
    async with asyncio.timeout(30.0):
        await rig.definitions(mode).ensure()


async def test_definitions_are_applied_and_served_when_that_is_done(rig: Rig) -> None:
    await ensured(rig)
    for document in rig.wanted:
        found = await rig.get(document["metadata"]["name"])
        assert found["metadata"]["labels"][PART_OF[0]] == PART_OF[1]
        managers = {row["manager"] for row in found["metadata"]["managedFields"]}
        assert rbac.NAME in managers
        held = {row["type"]: row["status"] for row in found["status"]["conditions"]}
        assert held["Established"] == "True"
    assert rig.reported == [None]


async def test_a_second_start_changes_none(rig: Rig) -> None:
    await ensured(rig)
    before = [await rig.get(document["metadata"]["name"]) for document in rig.wanted]
    await ensured(rig)
    after = [await rig.get(document["metadata"]["name"]) for document in rig.wanted]
    assert after == before


async def test_a_definition_of_another_product_keeps_all_from_being_applied_until_it_is_gone(
    rig: Rig,
) -> None:
    await rig.foreign()
    before = await rig.get(rig.first)
    waiting = asyncio.ensure_future(rig.definitions().ensure())
    try:
        await until(lambda: rig.reported, "the report")
        (failure,) = rig.reported
        assert failure is not None
        assert failure.reason == "CRDsOwnedByOther"
        rig.proxy.requests.clear()
        await asyncio.sleep(3.0)
        assert not waiting.done()
        # It waits by a watch alone.
        assert [key for key in rig.proxy.requests if key[0] != "WATCH"] == []
        assert await rig.get(rig.first) == before
        assert not await rig.exists(rig.wanted[1]["metadata"]["name"])
        await rig.direct.request("DELETE", f"{PATH}/{rig.first}")
        async with asyncio.timeout(30.0):
            await waiting
    finally:
        await end_all(waiting)
    assert rig.reported[-1] is None
    assert (await rig.get(rig.first))["metadata"]["labels"][PART_OF[0]] == PART_OF[1]


async def test_a_definition_of_another_product_is_taken_over_where_it_may_be(rig: Rig) -> None:
    await rig.foreign()
    await ensured(rig, "adopt")
    assert (await rig.get(rig.first))["metadata"]["labels"][PART_OF[0]] == PART_OF[1]


async def test_an_older_operator_leaves_newer_definitions_as_they_are(rig: Rig) -> None:
    await ensured(rig)
    body = {"metadata": {"annotations": {VERSION_ANNOTATION: "99.0.0"}}}
    await rig.direct.request("PATCH", f"{PATH}/{rig.first}", body=body, content_type=MERGE_PATCH)
    before = await rig.get(rig.first)
    await ensured(rig)
    assert await rig.get(rig.first) == before


async def test_absent_definitions_that_others_apply_are_waited_for(rig: Rig) -> None:
    waiting = asyncio.ensure_future(rig.definitions("keep").ensure())
    try:
        await until(lambda: rig.reported, "the report")
        assert rig.reported[0] is not None
        assert rig.reported[0].reason == "CRDsMissing"
        for document in rig.wanted:
            await rig.direct.request("POST", PATH, body=document)
        async with asyncio.timeout(30.0):
            await waiting
    finally:
        await end_all(waiting)


async def test_a_failure_of_the_api_server_is_waited_out(rig: Rig) -> None:
    with rig.proxy.lying(Lie(500, times=2), Lie("cut", times=1)):
        await ensured(rig)


async def test_a_definition_that_the_api_server_refuses_is_reported_with_its_message(
    rig: Rig,
) -> None:
    rig.wanted[0]["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["type"] = "string"
    waiting = asyncio.ensure_future(rig.definitions().ensure())
    try:
        await until(lambda: rig.reported, "the report")
        assert rig.reported[0] is not None
        assert rig.reported[0].reason == "CRDsRefused"
        assert "openAPIV3Schema" in rig.reported[0].message
    finally:
        await end_all(waiting)
