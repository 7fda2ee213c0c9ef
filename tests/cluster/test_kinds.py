"""A kind of two versions on a real API server, which asks our webhook to convert its objects."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import pytest
from aiohttp import web

from snapshot_api.schema.definitions import definitions, with_conversion
from snapshot_operator.kube import conversion
from snapshot_operator.kube.certificates import renewed
from snapshot_operator.kube.webhook_tls import new_context, take
from snapshot_shared.http import Guests, serving
from tests.cluster.cluster import Cluster
from tests.cluster.kubectl import Kubectl
from tests.support.widget import KIND
from tests.support.widget.registered import document, register

pytestmark = pytest.mark.cluster


@pytest.fixture
async def kubectl(
    own_cluster: Cluster, namespace: Kubectl, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Kubectl]:
    """Commands where the kind is defined, and its conversion webhook answers."""
    register(monkeypatch)
    address = own_cluster.host_address
    found = renewed(None, [address], datetime.now(UTC))
    context = new_context()
    take(context, found.certificate, found.key)

    async def convert(request: web.Request) -> web.Response:
        body = conversion.answer(await request.read())
        return web.Response(body=body, content_type="application/json")

    app = web.Application()
    app.router.add_post("/convert", convert)
    async with serving(app, f"{address}:0", Guests(), patience_s=60.0, context=context) as port:
        bundle = base64.b64encode(found.authorities).decode()
        client = {"url": f"https://{address}:{port}/convert", "caBundle": bundle}
        [definition] = definitions([KIND])
        name = definition["metadata"]["name"]
        await asyncio.to_thread(own_cluster.kubectl.apply, with_conversion(definition, client))
        await asyncio.to_thread(
            own_cluster.kubectl.run, "wait", f"crd/{name}", "--for=condition=Established"
        )
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
