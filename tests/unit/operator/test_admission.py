"""What the API server is answered, and when it asks at all."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from aiohttp import web
from kubernetes_asyncio.client import Configuration

from snapshot_operator.kube import rbac
from snapshot_operator.kube.admission import Admission, Answer, Request, RequestedKind, review
from snapshot_operator.kube.webhooks import Endpoint, configurations
from snapshot_shared.kube_client import KubeClient
from snapshot_shared.validation import Problem
from tests.support.objects import checkpoint_document

UID = "00000000-0000-4000-8000-00000000000a"
DIGEST = "sha256:" + "0" * 64
META = {"uid": UID, "resourceVersion": "1", "namespace": "team"}
SNAPSHOT: dict[str, Any] = {
    "apiVersion": "nvidia.com/v1alpha1",
    "kind": "Snapshot",
    "metadata": {"name": "llm", **META},
    "spec": {"source": {"podRef": {"name": "p"}}},
    "status": {"boundSnapshotContentName": "content"},
}
CONTENT: dict[str, Any] = {
    "apiVersion": "nvidia.com/v1alpha1",
    "kind": "SnapshotContent",
    "metadata": {"name": "content", "uid": UID, "resourceVersion": "1"},
    "spec": {
        "snapshotRef": {"namespace": "team", "name": "llm", "uid": UID},
        "source": {"namespace": "team", "podRef": {"name": "p"}, "nodeName": "n"},
    },
}
COMMITTED = {"generation": 1, "rootDigest": DIGEST, "bytes": 1, "parts": [], "vector": []}


class Api:
    """The API server: what it has, and how often it was asked."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.status = 200
        self.asked = 0
        self.labels: dict[str, str] = {}
        """By namespace, the selector that matches it."""

    async def answer(self, request: web.Request) -> web.Response:
        self.asked += 1
        found = self.objects.get(request.path.rpartition("/v1alpha1/")[2])
        if request.path == "/api/v1/namespaces":
            name = request.query["fieldSelector"].removeprefix("metadata.name=")
            is_matched = self.labels.get(name) == request.query["labelSelector"]
            items = [{"metadata": {"name": name}}] if is_matched else None
            found = {"metadata": {"resourceVersion": "1"}, "items": items}
        if self.status != 200 or found is None:
            status = self.status if self.status != 200 else 404
            return web.json_response({"kind": "Status", "code": status}, status=status)
        return web.json_response(found)


@pytest.fixture
async def api() -> AsyncIterator[tuple[Api, Admission]]:
    behind = Api()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", behind.answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = "http://{}:{}".format(*runner.addresses[0][:2])
    async with KubeClient(Configuration(host=url)) as client:
        yield behind, Admission(client)
    await runner.cleanup()


def request(document: Any, old: Any = None, operation: str = "CREATE") -> Request:
    encoded = [msgspec.Raw(json.dumps(each).encode()) for each in (document, old)]
    return Request("u", operation, RequestedKind(), "team", "n", *encoded)


def pod(**annotations: str) -> Any:
    marks = {f"nvidia.com/{key.replace('_', '-')}": text for key, text in annotations.items()}
    return {"metadata": {"annotations": marks}, "spec": {"containers": [{"name": "main"}]}}


async def test_a_pod_that_asks_for_nothing_or_is_there_already_is_left_alone_without_a_read(
    api: tuple[Api, Admission],
) -> None:
    behind, admission = api
    assert (await admission.pod(request(pod()))).outcome == "allowed"
    later = await admission.pod(request(pod(restore_from="llm"), operation="UPDATE"))
    assert later.outcome == "allowed"
    assert behind.asked == 0


@pytest.mark.parametrize(
    ("pins", "outcome"),
    [
        ({"restore_from_uid": UID}, "changed"),
        ({"restore_from_uid": "another"}, "denied"),
        ({"restore_content": "content"}, "changed"),
        ({"restore_content": "another"}, "denied"),
        ({"restore_digest": DIGEST}, "changed"),
        ({"restore_digest": "sha256:1"}, "denied"),
        ({"restore_policy": "Immediate"}, "changed"),
        ({"restore_driver": "cooperative"}, "changed"),
        ({"restore_driver": "criu"}, "denied"),
    ],
)
async def test_a_pod_is_changed_where_what_is_stored_now_is_what_it_asks_for(
    api: tuple[Api, Admission], pins: dict[str, str], outcome: str
) -> None:
    behind, admission = api
    behind.objects = {
        "namespaces/team/snapshots/llm": SNAPSHOT,
        "snapshotcontents/content": CONTENT | {"status": {"committed": COMMITTED}},
    }
    found = await admission.pod(request(pod(restore_from="llm", **pins)))
    assert found.outcome == outcome
    assert [problem.path for problem in found.refused] == (
        ["metadata.annotations[nvidia.com/restore-from]"] if outcome == "denied" else []
    )


@pytest.mark.parametrize("status", [200, 503])
async def test_what_is_not_there_or_cannot_be_read_is_left_to_the_restore(
    api: tuple[Api, Admission], status: int
) -> None:
    behind, admission = api
    behind.status = status
    pinned = pod(restore_from="llm", restore_from_uid="another", restore_digest=DIGEST)
    assert (await admission.pod(request(pinned))).outcome == "changed"


@pytest.mark.parametrize(
    ("labels", "status", "warned"),
    [
        ({"team": "team=a"}, 200, ()),
        (
            {"team": "team=b", "other": "team=a"},
            200,
            ("namespace team is not selected (team=a): the pod starts cold",),
        ),
        ({"team": "team=a"}, 503, ("namespace team cannot be read now: the pod starts cold",)),
    ],
)
async def test_a_pod_starts_cold_where_the_operator_reconciles_nothing(
    api: tuple[Api, Admission], labels: dict[str, str], status: int, warned: tuple[str, ...]
) -> None:
    behind, every = api
    behind.labels, behind.status = labels, status
    admission = Admission(every._client, selector="team=a")
    answer = await admission.pod(request(pod(restore_from="llm")))
    assert (answer.refused, answer.warned) == ((), warned)
    assert bool(answer.patch) != bool(warned)


async def test_a_source_that_this_version_cannot_read_is_left_to_the_restore(
    api: tuple[Api, Admission],
) -> None:
    behind, admission = api
    behind.objects = {"namespaces/team/snapshots/llm": SNAPSHOT | {"spec": {"source": 1}}}
    assert (await admission.pod(request(pod(restore_from="llm")))).outcome == "changed"


def is_placeholder(answer: Answer) -> bool:
    return any(change.get("value") == ["/snapback/snapback-init"] for change in answer.patch)


CRIU_SNAPSHOT = SNAPSHOT | {"spec": SNAPSHOT["spec"] | {"driver": "criu"}}
CHECKPOINT = checkpoint_document(driver="criu", sharedMemory={"size": "3Gi"})
CHECKPOINT["metadata"] |= META


@pytest.mark.parametrize(
    ("objects", "waits_for_a_process"),
    [
        ({}, False),
        ({"namespaces/team/snapshots/llm": SNAPSHOT}, False),
        ({"namespaces/team/snapshots/llm": CRIU_SNAPSHOT}, True),
        ({"namespaces/team/dynamocheckpoints/llm": CHECKPOINT}, True),
        (
            {
                "namespaces/team/snapshots/llm": SNAPSHOT,
                "snapshotcontents/content": CONTENT
                | {"status": {"committed": COMMITTED | {"driver": "criu+cuda"}}},
            },
            True,
        ),
    ],
)
async def test_a_pod_is_a_placeholder_where_the_driver_of_its_source_brings_the_process(
    api: tuple[Api, Admission], objects: Any, waits_for_a_process: bool
) -> None:
    behind, admission = api
    behind.objects = objects
    answer = await admission.pod(request(pod(restore_from="llm")))
    assert answer.outcome == "changed"
    assert is_placeholder(answer) == waits_for_a_process
    shared = [change for change in answer.patch if "3Gi" in json.dumps(change)]
    assert bool(shared) == ("namespaces/team/dynamocheckpoints/llm" in objects)


@pytest.mark.parametrize("status", [200, 503])
async def test_a_pod_names_the_driver_of_a_source_that_is_not_there_or_cannot_be_read(
    api: tuple[Api, Admission], status: int
) -> None:
    behind, admission = api
    behind.status = status
    named = pod(restore_from="llm", restore_driver="criu")
    assert is_placeholder(await admission.pod(request(named)))
    named["spec"]["hostPID"] = True
    refused = await admission.pod(request(named))
    assert [problem.path for problem in refused.refused] == ["spec.hostPID"]


@pytest.mark.parametrize("content", [None, CONTENT])
async def test_a_pod_that_does_not_wait_starts_cold_where_nothing_is_captured(
    api: tuple[Api, Admission], content: Any
) -> None:
    behind, admission = api
    behind.objects = {"namespaces/team/snapshots/llm": SNAPSHOT}
    if content:
        behind.objects["snapshotcontents/content"] = content
    found = await admission.pod(request(pod(restore_from="llm", restore_policy="Immediate")))
    assert (found.outcome, found.patch) == ("allowed", ())
    assert found.warned == ("llm is not captured yet, and the pod does not wait: it starts cold",)


async def test_a_spec_is_judged_when_it_is_new_and_never_changes(
    api: tuple[Api, Admission],
) -> None:
    _, admission = api
    old = checkpoint_document()
    new = checkpoint_document()
    new["spec"]["job"]["podTemplateSpec"]["spec"]["hostNetwork"] = True
    new["spec"]["job"]["targetContainerName"] = "engine"
    assert (await admission.object(request(old))).outcome == "allowed"
    changed = await admission.object(request(new, old, "UPDATE"))
    assert [problem.path for problem in changed.refused] == [
        "spec.job.targetContainerName",
        "spec.job.podTemplateSpec.spec.hostNetwork",
        "spec.job.targetContainerName",
    ]
    # What an older version has let in can be labelled and deleted.
    labelled = {**new, "metadata": {**new["metadata"], "labels": {"a": "b"}}}
    assert (await admission.object(request(labelled, new, "UPDATE"))).outcome == "allowed"


def answered(answer: Answer) -> Any:
    found = json.loads(review(request({}), answer))
    assert (found["kind"], found["apiVersion"]) == ("AdmissionReview", "admission.k8s.io/v1")
    return found["response"]


def test_a_refusal_has_a_cause_for_each_field_and_at_most_fifty() -> None:
    found = answered(Answer(tuple(Problem(f"spec.x{number}", "is bad") for number in range(60))))
    assert found["allowed"] is False
    status = found["status"]
    assert (status["code"], status["reason"]) == (422, "Invalid")
    assert status["message"].startswith("spec.x0: is bad; spec.x1: is bad")
    assert len(status["details"]["causes"]) == 50
    assert status["details"]["causes"][1]["field"] == "spec.x1"


def test_a_change_is_a_json_patch_and_no_change_is_none() -> None:
    change = {"op": "add", "path": "/spec/volumes", "value": []}
    found = answered(Answer(patch=(change,), warned=("look",)))
    assert json.loads(base64.b64decode(found.pop("patch"))) == [change]
    assert found == {"uid": "u", "allowed": True, "patchType": "JSONPatch", "warnings": ["look"]}
    assert answered(Answer()) == {"uid": "u", "allowed": True}


def test_the_webhooks_are_reached_by_a_service_or_a_url_with_the_names_of_the_certificate() -> None:
    service = Endpoint("snapback-system")
    assert service.client_config("/p", "Y2E=") == {
        "service": {
            "namespace": "snapback-system",
            "name": "snapback-webhook",
            "path": "/p",
            "port": 443,
        },
        "caBundle": "Y2E=",
    }
    assert service.names[0] == "snapback-webhook.snapback-system.svc"
    url = Endpoint("snapback-system", url="https://198.51.100.7:9443/")
    assert url.client_config("/p") == {"url": "https://198.51.100.7:9443/p"}
    assert url.names == ["198.51.100.7", *service.names]


def test_an_outage_is_a_cold_start_for_pods_and_a_refusal_for_our_own_kinds() -> None:
    annotations = {"cert-manager.io/inject-ca-from": "snapback-system/webhook"}
    pods, objects = configurations(
        Endpoint("snapback-system"), annotations=annotations, excluded=["other"]
    )
    (mutating,), (validating,) = pods["webhooks"], objects["webhooks"]
    assert (mutating["failurePolicy"], validating["failurePolicy"]) == ("Ignore", "Fail")
    assert pods["metadata"]["annotations"] == annotations
    ((excluded,),) = mutating["namespaceSelector"].values()
    assert {"kube-system", "snapback-system", "other"} <= {*excluded["values"]}


def test_the_operator_may_use_its_own_secret_and_configurations_alone() -> None:
    rules = [*rbac.cluster_role()["rules"], *rbac.lease_role("snapback-system")["rules"]]
    named = {
        (rule["resources"][0], *rule["verbs"]): rule.get("resourceNames")
        for rule in rules
        if rule["resources"][0] == "secrets" or "webhook" in rule["resources"][0]
    }
    assert named == {
        ("mutatingwebhookconfigurations", "get", "watch", "patch"): ["snapback-operator"],
        ("validatingwebhookconfigurations", "get", "watch", "patch"): ["snapback-operator"],
        ("secrets", "create"): None,
        ("secrets", "get", "watch", "update"): ["snapback-webhook-certificate"],
    }


async def test_an_operator_that_allows_no_memory_servers_refuses_checkpoints_with_one(
    api: tuple[Api, Admission],
) -> None:
    behind, allowing = api
    plain, asking = checkpoint_document(), checkpoint_document()
    asking["spec"]["gpuMemoryService"] = {"enabled": True}
    without = checkpoint_document()
    without["spec"]["gpuMemoryService"] = {"enabled": False}
    refusing = Admission(allowing._client, allows_gms=False)
    assert (await allowing.object(request(asking))).outcome == "allowed"
    for document in (plain, without):
        assert (await refusing.object(request(document))).outcome == "allowed"
    (problem,) = (await refusing.object(request(asking))).refused
    assert problem.path == "spec.gpuMemoryService"
    assert "SNAPBACK_ALLOW_GMS_SNAPSHOT" in problem.text
    assert behind.asked == 0
