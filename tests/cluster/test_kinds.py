"""A kind of two versions on a real API server, which asks the operator to convert its objects."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from snapshot_api.schema.definitions import converted, definitions
from snapshot_operator.kube.admission import Admission, serving
from snapshot_operator.kube.definitions import Definitions
from snapshot_operator.kube.webhook_tls import Introduction
from snapshot_operator.kube.webhooks import Endpoint
from snapshot_shared.clocks import Clocks
from snapshot_shared.errors import Failure
from snapshot_shared.kube_client import KubeClient, load_configuration
from tests.cluster.cluster import Cluster
from tests.cluster.kubectl import Kubectl
from tests.cluster.simulated import until
from tests.support.ports import free_port
from tests.support.widget import KIND
from tests.support.widget.registered import document, register

pytestmark = pytest.mark.cluster


@pytest.fixture
async def kubectl(
    own_cluster: Cluster,
    namespace: Kubectl,
    kubeconfig: str,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Kubectl]:
    """Commands where the kind is defined, and its objects are converted as an operator does it."""
    register(monkeypatch)
    assert namespace.namespace is not None
    address, waits = own_cluster.host_address, list[Failure | None]()
    [name] = converted()

    async def report(failure: Failure | None) -> None:
        waits.append(failure)

    def is_introduced() -> bool:
        found = own_cluster.kubectl.get("crd", name)["spec"]["conversion"]["webhook"]
        return "caBundle" in found["clientConfig"]

    clocks = Clocks(time.monotonic, time.time, "boot")
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(KubeClient(await load_configuration(kubeconfig)))
        port = free_port(address)
        endpoint = Endpoint(namespace.namespace, url=f"https://{address}:{port}")
        known = Introduction(client, endpoint, clocks, random.random, converted=[name])
        context = await stack.enter_async_context(known.kept())
        at = f"{address}:{port}"
        await stack.enter_async_context(serving(Admission(client), known.knows, at, context))
        wanted = definitions([KIND], endpoint.client_config)
        await Definitions(client, wanted, "apply", random.random, report).ensure()
        assert waits == [None]
        await asyncio.to_thread(until, is_introduced, "the API server knows who converts")
        yield namespace
        await asyncio.to_thread(own_cluster.kubectl.run, "delete", "crd", name)


async def test_a_kind_of_two_versions_is_served_converted_scaled_and_explained(
    kubectl: Kubectl,
) -> None:
    async def run(*words: str, given: Any = None) -> tuple[str, str]:
        result = await asyncio.to_thread(kubectl.try_, *words, given=json.dumps(given))
        return result.stdout, result.stderr

    old = document("v1alpha1", count=2, partNames=["a", "b"])
    _, warned = await run("create", "-f", "-", given=old)
    assert "nvidia.com/v1alpha1 Widget is deprecated; use nvidia.com/v1beta1" in warned
    for version, spec in (
        ("v1beta1", {"replicas": 2, "limit": 10, "parts": [{"name": "a"}, {"name": "b"}]}),
        ("v1alpha1", old["spec"]),
    ):
        shown, _ = await run("get", f"widgets.{version}.nvidia.com", "one", "-o", "json")
        found = json.loads(shown)
        assert found["apiVersion"] == f"nvidia.com/{version}"
        for part in found["spec"].get("parts", ()):
            assert part.pop("weight") == 1
        assert found["spec"].items() >= spec.items()
    await run("scale", "widget/one", "--replicas=3")
    table, _ = await run("get", "wdg")
    assert table.split()[:5] == ["NAME", "REPLICAS", "AGE", "one", "3"]
    heavy = document(limit=5, parts=[{"name": "a", "weight": 6}])
    _, refused = await run("replace", "-f", "-", given=heavy)
    assert "spec.parts: Invalid value:" in refused
    assert "no part of a widget may weigh more than its limit" in refused
    explained, _ = await run("explain", "widget.spec.replicas")
    assert "How many widgets there are." in explained
