"""Dynamo's own frontend routes to workers that were restored (`make test-engines`).

Frontend, discovery and worker are Dynamo's, from PyPI, and find each other by Kubernetes. Nothing
of Snapback runs in them. The definition and the account, which Dynamo's operator makes for a graph,
come from here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.agents import waiting, with_agents
from tests.cluster.cluster import Cluster
from tests.cluster.kubectl import Kubectl, KubectlError
from tests.cluster.rig import Rig, polled
from tests.cluster.simulated import ROOT, container, pod

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

INSTALLED = ROOT / ".engines-dynamo"
NAMESPACE, GRAPH, ACCOUNT, PORT = "default-demo", "demo", "discovery", 8000
PLURAL = "dynamoworkermetadatas"
TOKENS = 8
TMP = [{"name": "tmp", "emptyDir": {}}]


@pytest.fixture
def nodes(own_cluster: Cluster, nats_url: str, artifacts: Path, rig: Rig) -> Kubectl:
    """Commands in the namespace of the rig, with an agent and its helper on every node."""
    kubectl = own_cluster.kubectl.within(rig.namespace)
    kubectl.apply(definition())
    for document in account(rig.namespace):
        kubectl.apply(document)
    return with_agents(kubectl, nats_url, artifacts, helper=True)


def definition() -> dict[str, Any]:
    """Return the kind by which workers of Dynamo describe themselves."""
    data = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    spec = {"type": "object", "properties": {"data": data}}
    schema = {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec}}}
    version = {"name": "v1alpha1", "served": True, "storage": True, "schema": schema}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.nvidia.com"},
        "spec": {
            "group": "nvidia.com",
            "scope": "Namespaced",
            "names": {"kind": "DynamoWorkerMetadata", "plural": PLURAL},
            "versions": [version],
        },
    }


def account(namespace: str) -> list[dict[str, Any]]:
    """Return an account that may find workers and be found."""
    reads, writes = ["get", "list", "watch"], ["create", "update", "patch", "delete"]
    rules = [
        {"apiGroups": [""], "resources": ["pods", "endpoints"], "verbs": reads},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": reads},
        {"apiGroups": ["nvidia.com"], "resources": [PLURAL], "verbs": [*reads, *writes]},
    ]
    rbac = "rbac.authorization.k8s.io"
    subject = {"kind": "ServiceAccount", "name": ACCOUNT, "namespace": namespace}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": ACCOUNT}},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "Role",
            "metadata": {"name": ACCOUNT},
            "rules": rules,
        },
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            "metadata": {"name": ACCOUNT},
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": ACCOUNT},
            "subjects": [subject],
        },
    ]


def labels(component: str) -> dict[str, str]:
    return {
        "app": component,
        "nvidia.com/dynamo-component-type": component,
        "nvidia.com/dynamo-namespace": NAMESPACE,
        "nvidia.com/dynamo-component": component,
        "nvidia.com/dynamo-discovery-backend": "kubernetes",
        "nvidia.com/dynamo-discovery-enabled": "true",
    }


def service(component: str, port: int) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": component, "labels": labels(component)},
        "spec": {"selector": {"app": component}, "ports": [{"name": "http", "port": port}]},
    }


def component(name: str, kind: str, namespace: str, node: str, *words: str) -> dict[str, Any]:
    """Return a pod of a component, as Dynamo's operator starts it."""
    fields = {
        "POD_NAME": "metadata.name",
        "POD_NAMESPACE": "metadata.namespace",
        "POD_UID": "metadata.uid",
        "POD_IP": "status.podIP",
        "DYN_TCP_RPC_HOST": "status.podIP",
    }
    values = {
        "DYN_NAMESPACE": NAMESPACE,
        "DYN_COMPONENT": kind,
        "DYN_PARENT_DGD_K8S_NAME": GRAPH,
        "DYN_PARENT_DGD_K8S_NAMESPACE": namespace,
        "DYN_DISCOVERY_BACKEND": "kubernetes",
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "HF_HUB_OFFLINE": "1",
        "HOME": "/tmp",
        "NO_COLOR": "1",
        "PYTHONPATH": str(INSTALLED),
    }
    env: list[dict[str, Any]] = [{"name": key, "value": text} for key, text in values.items()]
    env += [
        {"name": key, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for key, path in fields.items()
    ]
    mounts = [{"name": "tmp", "mountPath": "/tmp"}]
    main = container("main", sys.executable, *words, env=env, volumeMounts=mounts)
    found = pod(name, main, nodeName=node, volumes=TMP, serviceAccountName=ACCOUNT)
    found["metadata"]["labels"] = labels(kind)
    return found


def worker(name: str, namespace: str, node: str) -> dict[str, Any]:
    program = str(ROOT / "tests/engines/dynamo_worker.py")
    words = (program, "--model-path", str(INSTALLED / "model"), "--model-name", "demo")
    return component(name, "worker", namespace, node, *words)


ASK = """
import json, sys, urllib.request
path, body = sys.argv[1], sys.argv[2].encode() or None
url, headers = f"http://127.0.0.1:8000{path}", {"Content-Type": "application/json"}
with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=10) as answer:
    print(answer.read().decode())
"""


async def asked(nodes: Kubectl, path: str, body: Any = None) -> Any:
    """Return what the frontend answers, or None if it does not."""
    words = ("exec", "frontend", "--container=main", "--", sys.executable, "-c", ASK, path)
    with contextlib.suppress(KubectlError, json.JSONDecodeError):
        said = json.dumps(body) if body is not None else ""
        return json.loads(await asyncio.to_thread(nodes.run, *words, said))
    return None


async def completion(nodes: Kubectl) -> Any:
    message = {"role": "user", "content": "A cold worker"}
    body = {"model": "demo", "messages": [message], "max_tokens": TOKENS}
    return await asked(nodes, "/v1/chat/completions", body)


async def instances(nodes: Kubectl) -> set[int]:
    """Return the ids of the workers to which the frontend routes."""
    found = await asked(nodes, "/health") or {"instances": []}
    return {each["instance_id"] for each in found["instances"] if each["endpoint"] == "generate"}


async def registered(nodes: Kubectl) -> set[str]:
    """Return the names by which workers have registered."""
    found = await asyncio.to_thread(nodes.list, f"{PLURAL}.nvidia.com")
    return {item["metadata"]["name"] for item in found}


async def test_a_frontend_routes_to_both_copies_of_a_worker_and_to_the_one_that_is_left(
    rig: Rig, nodes: Kubectl, own_cluster: Cluster
) -> None:
    space = rig.namespace
    for kind, port in (("frontend", PORT), ("worker", 9090)):
        nodes.apply(service(kind, port))
    words = ("-m", "dynamo.frontend", "--http-port", str(PORT))
    nodes.apply(component("frontend", "frontend", space, "node-2", *words))
    await rig.captured("llm", worker("source", space, "node-1")["spec"], driver="criu")
    # It was captured before it registered. No Service selects the pod of its Job.
    copies = {"copy-1": "node-1", "copy-2": "node-2"}
    for name, node in copies.items():
        nodes.apply(waiting(worker(name, space, node), "llm"))
    for name in copies:
        await rig.restored(name)
    await polled(lambda: registered(nodes), lambda names: {*copies} <= names)
    answer = await polled(lambda: completion(nodes))
    assert answer["usage"]["completion_tokens"] == TOKENS
    found = await asked(nodes, "/v1/models")
    assert [each["id"] for each in found["data"]] == ["demo"]
    await polled(lambda: instances(nodes), lambda ids: len(ids) == len(copies))
    own_cluster.kill("node-1")
    try:
        left = await polled(lambda: completion(nodes))
        assert left["usage"]["completion_tokens"] == TOKENS
    finally:
        await asyncio.to_thread(own_cluster.start, "node-1")
