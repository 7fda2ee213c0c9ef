"""What the API server is answered, and the certificate that this is served with."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer, TestServer
from cryptography import x509
from kubernetes_asyncio.client import Configuration

from snapshot_api.validate import Problem
from snapshot_api.well_known import STANDBY_VARIABLES
from snapshot_operator.kube import conversion, rbac
from snapshot_operator.kube.admission import (
    JUDGED,
    MAX_BYTES,
    PAGE,
    Admission,
    Answer,
    Request,
    RequestedKind,
    review,
)
from snapshot_operator.kube.certificates import Certificates, renewal, renewed
from snapshot_operator.kube.webhook_tls import MountedCertificate, new_context, take
from snapshot_operator.kube.webhooks import Endpoint, configurations, introduced
from snapshot_shared.errors import InvalidInput
from snapshot_shared.http import HEAD_S, Guests, serving
from snapshot_shared.kube_client import KubeClient
from tests.support.objects import checkpoint_document
from tests.unit.tables import each

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


def stored(
    snapshot: dict[str, Any] = SNAPSHOT, content: dict[str, Any] = CONTENT, **committed: str
) -> dict[str, Any]:
    """Return by their paths a snapshot and its content, which has an artifact."""
    status = {"committed": COMMITTED | committed}
    return {
        "namespaces/team/snapshots/llm": snapshot,
        "snapshotcontents/content": content | {"status": status},
    }


class Api:
    """The API server: what it has, and how often it was asked."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.status = 200
        self.asked = 0
        self.queries: list[dict[str, str]] = []
        self.labels: dict[str, str] = {}
        """By namespace, the selector that matches it."""
        self.more: Any = None
        """What a page continues with."""

    async def answer(self, request: web.BaseRequest) -> web.Response:
        self.asked += 1
        self.queries.append(dict(request.query))
        found = self.objects.get(request.path.rpartition("/v1alpha1/")[2])
        if "continue" in request.query:
            found = self.more
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
def behind() -> Api:
    return Api()


@pytest.fixture
async def admission(behind: Api) -> AsyncIterator[Admission]:
    async with RawTestServer(behind.answer) as server:
        host = f"http://127.0.0.1:{server.port}"
        async with KubeClient(Configuration(host=host)) as client:
            yield Admission(client)


def request(document: Any, old: Any = None, operation: str = "CREATE") -> Request:
    encoded = [msgspec.Raw(json.dumps(each).encode()) for each in (document, old)]
    return Request("u", operation, RequestedKind(), "team", "n", *encoded)


def pod(**annotations: str) -> Any:
    marks = {f"nvidia.com/{key.replace('_', '-')}": text for key, text in annotations.items()}
    return {"metadata": {"annotations": marks}, "spec": {"containers": [{"name": "main"}]}}


async def test_a_pod_that_asks_for_nothing_or_is_there_already_is_left_alone_without_a_read(
    behind: Api, admission: Admission
) -> None:
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
    behind: Api, admission: Admission, pins: dict[str, str], outcome: str
) -> None:
    behind.objects = stored()
    found = await admission.pod(request(pod(restore_from="llm", **pins)))
    assert found.outcome == outcome
    assert [problem.path for problem in found.refused] == (
        ["metadata.annotations[nvidia.com/restore-from]"] if outcome == "denied" else []
    )


@pytest.mark.parametrize("status", [200, 503])
async def test_what_is_not_there_or_cannot_be_read_is_left_to_the_restore(
    behind: Api, admission: Admission, status: int
) -> None:
    behind.status = status
    pinned = pod(restore_from="llm", restore_from_uid="another", restore_digest=DIGEST)
    assert (await admission.pod(request(pinned))).outcome == "changed"


async def test_a_name_of_revisions_is_that_of_the_newest_captured_one_on_any_page(
    behind: Api, admission: Admission
) -> None:
    revision = SNAPSHOT | {"spec": CRIU_SNAPSHOT["spec"] | {"revisionOf": "chat"}}
    objects = stored(revision, driver="criu")
    other = SNAPSHOT | {"metadata": META | {"name": "other", "uid": "u"}}
    page = {"metadata": {"continue": "more"}, "items": [other]}
    behind.objects = {
        "snapshotcontents/content": objects["snapshotcontents/content"],
        "namespaces/team/snapshots": page,
    }
    behind.more = {"metadata": {}, "items": [revision]}
    answer = await admission.pod(request(pod(restore_from="chat", restore_digest="sha256:1")))
    assert answer.outcome == "denied"
    # An object of a tenant may be large, and a page is decoded at once.
    limits = {query["limit"] for query in behind.queries if "limit" in query}
    assert limits == {str(PAGE)}
    assert PAGE <= 20
    assert is_placeholder(await admission.pod(request(pod(restore_from="chat"))))


@pytest.mark.parametrize(
    ("labels", "status", "warned"),
    [
        ({"team": "team=a"}, 200, ""),
        ({"team": "team=b", "other": "team=a"}, 200, "is not selected (team=a)"),
        ({"team": "team=a"}, 503, "cannot be read now"),
    ],
)
async def test_a_pod_starts_cold_where_the_operator_reconciles_nothing(
    behind: Api, admission: Admission, labels: dict[str, str], status: int, warned: str
) -> None:
    behind.labels, behind.status = labels, status
    selective = Admission(admission._client, selector="team=a")
    answer = await selective.pod(request(pod(restore_from="llm")))
    warnings = (f"namespace team {warned}: the pod starts cold",) if warned else ()
    assert (answer.refused, answer.warned) == ((), warnings)
    assert bool(answer.patch) != bool(warned)


async def test_a_source_that_this_version_cannot_read_is_left_to_the_restore(
    behind: Api, admission: Admission
) -> None:
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
        (stored(driver="criu+cuda"), True),
    ],
)
async def test_a_pod_is_a_placeholder_where_the_driver_of_its_source_brings_the_process(
    behind: Api, admission: Admission, objects: Any, waits_for_a_process: bool
) -> None:
    behind.objects = objects
    answer = await admission.pod(request(pod(restore_from="llm")))
    assert answer.outcome == "changed"
    assert is_placeholder(answer) == waits_for_a_process
    shared = [change for change in answer.patch if "3Gi" in json.dumps(change)]
    assert bool(shared) == ("namespaces/team/dynamocheckpoints/llm" in objects)


PROFILE = "profiles/block-iouring.json"


@pytest.mark.parametrize(
    ("of_source", "setting", "node", "nodes", "is_given"),
    [
        (f"Localhost/{PROFILE}", PROFILE, "", [{}], True),
        ("RuntimeDefault", PROFILE, "node-1", [{}], True),
        ("Unconfined", PROFILE, "", [{}], False),
        ("", PROFILE, "", [{}], False),
        (f"Localhost/{PROFILE}", "", "", [{}], False),
        (f"Localhost/{PROFILE}", PROFILE, "", [], False),
        (f"Localhost/{PROFILE}", PROFILE, "", None, False),
    ],
)
async def test_a_placeholder_gets_a_profile_if_its_source_had_one_and_a_node_has_it(
    behind: Api,
    admission: Admission,
    of_source: str,
    setting: str,
    node: str,
    nodes: Any,
    is_given: bool,
) -> None:
    source = CONTENT["spec"]["source"] | {"seccompProfile": of_source}
    content = CONTENT | {"spec": CONTENT["spec"] | {"source": source}}
    behind.objects = stored(CRIU_SNAPSHOT, content, driver="criu")
    if nodes is not None:
        behind.objects["/api/v1/nodes"] = {"items": nodes}
    confining = Admission(admission._client, seccomp_profile=setting)
    document = pod(restore_from="llm")
    document["spec"] |= {"nodeName": node} if node else {}
    answer = await confining.pod(request(document))
    assert is_placeholder(answer)
    assert ("localhostProfile" in json.dumps(answer.patch)) == is_given
    asked = [query for query in behind.queries if "labelSelector" in query]
    label = "nvidia.com/snapback-seccomp=profiles_block-iouring.json"
    assert {query["labelSelector"] for query in asked} <= {label}
    field = f"metadata.name={node}" if node else ""
    assert {query.get("fieldSelector", "") for query in asked} <= {field}


@pytest.mark.parametrize("status", [200, 503])
async def test_a_pod_names_the_driver_of_a_source_that_is_not_there_or_cannot_be_read(
    behind: Api, admission: Admission, status: int
) -> None:
    behind.status = status
    named = pod(restore_from="llm", restore_driver="criu")
    assert is_placeholder(await admission.pod(request(named)))
    named["spec"]["hostPID"] = True
    refused = await admission.pod(request(named))
    assert [problem.path for problem in refused.refused] == ["spec.hostPID"]


@pytest.mark.parametrize("content", [None, CONTENT])
async def test_a_pod_that_does_not_wait_starts_cold_where_nothing_is_captured(
    behind: Api, admission: Admission, content: Any
) -> None:
    behind.objects = {"namespaces/team/snapshots/llm": SNAPSHOT}
    if content:
        behind.objects["snapshotcontents/content"] = content
    found = await admission.pod(request(pod(restore_from="llm", restore_policy="Immediate")))
    (env,) = (each["value"] for each in found.patch if each["path"] == "/spec/containers/0/env")
    assert "SNAPSHOT_CONTROL_DIR" in {row["name"] for row in env}
    assert STANDBY_VARIABLES[0] not in {row["name"] for row in env}
    assert found.warned == ("llm is not captured yet, and the pod does not wait: it starts cold",)


@pytest.mark.parametrize("status", [200, 503])
async def test_a_deletion_warns_of_readers_and_is_never_refused(
    behind: Api, admission: Admission, status: int
) -> None:
    behind.status = status
    reader = {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "SnapshotRestore",
        "metadata": {"name": "r", **META},
        "spec": {"podRef": {"name": "replica", "uid": UID}, "source": "n"},
    }
    page = {"metadata": {"continue": "more"}, "items": []}
    behind.objects = {"namespaces/team/snapshotrestores": page}
    behind.more = {"metadata": {}, "items": [reader]}
    found = await admission.deletion(request(None, SNAPSHOT, "DELETE"))
    assert found.outcome == "allowed"
    assert [text.rpartition(": ")[2] for text in found.warned] == (["replica"] * (status == 200))


@each(("value", "outcome"), [("true", "changed"), ("false", "allowed"), ("yes", "denied")])
async def test_a_pod_that_is_to_be_capturable_is_changed_and_another_is_not(
    admission: Admission, value: str, outcome: str
) -> None:
    assert (await admission.pod(request(pod(capturable=value)))).outcome == outcome


async def test_a_spec_is_judged_when_it_is_new_and_never_changes(
    behind: Api, admission: Admission
) -> None:
    old, new = checkpoint_document(), checkpoint_document(targetContainerName="engine")
    new["spec"]["job"]["podTemplateSpec"]["spec"]["hostNetwork"] = True
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
    named = {"namespace": "snapback-system", "name": "snapback-webhook", "port": 443}
    assert service.client_config == {"service": named}
    assert service.names[0] == "snapback-webhook.snapback-system.svc"
    url = Endpoint("snapback-system", url="https://198.51.100.7:9443/")
    assert url.client_config == {"url": "https://198.51.100.7:9443"}
    assert url.names == ["198.51.100.7", *service.names]


@pytest.mark.parametrize("url", ["", "https://198.51.100.7:9443"])
def test_operators_write_their_path_and_authorities_and_nothing_else(url: str) -> None:
    documents = configurations(Endpoint("snapback-system", url=url))
    for webhook in [one for document in documents for one in document["webhooks"]]:
        found = introduced(webhook, "5ec", "Y2E=")
        config = found.pop("clientConfig")
        path = config["url"].removeprefix(url) if url else config["service"]["path"]
        assert path in ("/5ec/restored-pods", "/5ec/objects", "/5ec/deletions")
        assert config["caBundle"] == "Y2E="
        assert found == {key: each for key, each in webhook.items() if key != "clientConfig"}
        # Another secret takes the place of the first, and other authorities stay.
        again = introduced({**found, "clientConfig": config}, "6ec")["clientConfig"]
        assert again["caBundle"] == "Y2E="
        assert "6ec" in json.dumps(again)
        assert "5ec" not in json.dumps(again)
    other = {"name": "other.example", "clientConfig": {"url": "https://example"}}
    assert introduced(other, "5ec", "Y2E=") == other


def test_an_outage_is_a_cold_start_for_pods_that_can_and_a_refusal_for_all_else() -> None:
    annotations = {"cert-manager.io/inject-ca-from": "snapback-system/webhook"}
    pods, objects = configurations(
        Endpoint("snapback-system"), annotations=annotations, excluded=["other"]
    )
    found = [*pods["webhooks"], *objects["webhooks"]]
    assert [one["failurePolicy"] for one in found] == ["Fail", "Ignore", "Fail", "Ignore"]
    assert pods["metadata"]["annotations"] == annotations
    for one in pods["webhooks"]:
        ((excluded,),) = one["namespaceSelector"].values()
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
    behind: Api, admission: Admission
) -> None:
    plain, asking, without = (checkpoint_document() for _ in range(3))
    asking["spec"]["gpuMemoryService"] = {"enabled": True}
    without["spec"]["gpuMemoryService"] = {"enabled": False}
    refusing = Admission(admission._client, allows_gms=False)
    assert (await admission.object(request(asking))).outcome == "allowed"
    for document in (plain, without):
        assert (await refusing.object(request(document))).outcome == "allowed"
    (problem,) = (await refusing.object(request(asking))).refused
    assert problem.path == "spec.gpuMemoryService"
    assert "SNAPBACK_ALLOW_GMS_SNAPSHOT" in problem.text
    assert behind.asked == 0


@contextlib.asynccontextmanager
async def posting(admission: Admission) -> AsyncIterator[Callable[..., Awaitable[tuple[int, Any]]]]:
    """Serve reviews at paths that begin with `/secret`; yield what posts a body to a path."""
    app = admission.app("secret".__eq__, Guests())
    async with TestServer(app) as server, aiohttp.ClientSession() as session:

        async def post(body: bytes, path: str = "/secret/restored-pods") -> tuple[int, str]:
            async with session.post(server.make_url(path), data=io.BytesIO(body)) as found:
                return found.status, await found.text()

        yield post


def body(document: Any, **more: Any) -> bytes:
    asked = {"uid": "u", "operation": "CREATE", "namespace": "team", "object": document}
    return json.dumps({"request": asked | more}).encode()


async def test_a_caller_that_does_not_know_the_path_learns_nothing(
    behind: Api, admission: Admission
) -> None:
    behind.objects["namespaces/team/snapshots/llm"] = SNAPSHOT
    asks = body(pod(restore_from="llm", restore_from_uid="another"))
    async with posting(admission) as post:
        for path in ("/restored-pods", "/guess/restored-pods", "/objects", "/secret"):
            assert await post(asks, path) == (404, "" if "guess" in path else "404: Not Found")
        assert behind.asked == 0
        status, said = await post(asks)
    assert status == 200
    assert "another" in said
    assert UID not in said


@each(
    ("document", "path"),
    [
        ([], "restored-pods"),
        (None, "restored-pods"),
        ({"spec": {}}, "restored-pods"),
        ({"spec": {"containers": []}}, "restored-pods"),
        ({"spec": {"containers": ["main"]}}, "restored-pods"),
        ({"metadata": [], "spec": {"containers": [{}]}}, "restored-pods"),
        ([], "objects"),
        (None, "objects"),
    ],
)
async def test_a_review_of_no_object_is_a_bad_request(
    admission: Admission, document: Any, path: str
) -> None:
    async with posting(admission) as post:
        assert (await post(body(document), f"/secret/{path}"))[0] == 400


async def test_a_review_that_is_nested_or_larger_than_any_object_is_refused(
    admission: Admission,
) -> None:
    async with posting(admission) as post:
        assert (await post(b'{"request": ' + b"[" * 3000))[0] == 400
        deep = b'{"request": {"uid": "u", "operation": "CREATE", "object": ' + b"[" * 3000
        assert (await post(deep + b"]" * 3000 + b"}}"))[0] == 400
        assert (await post(b" " * (MAX_BYTES + 1)))[0] == 413


async def test_objects_are_converted_for_those_who_know_the_path_in_larger_reviews(
    admission: Admission,
) -> None:
    asked = {"uid": "u", "desiredAPIVersion": "nvidia.com/v1alpha1", "objects": [SNAPSHOT]}
    review = json.dumps({"request": asked}).encode()
    padded = review + b" " * (MAX_BYTES + 1 - len(review))
    async with posting(admission) as post:
        assert (await post(review, "/guess/conversions"))[0] == 404
        status, said = await post(padded, "/secret/conversions")
        assert (status, json.loads(said)["response"]["convertedObjects"]) == (200, [SNAPSHOT])
        assert (await post(b"{}", "/secret/conversions"))[0] == 400
        too_large = b" " * (conversion.MAX_BYTES + 1)
        assert (await post(too_large, "/secret/conversions"))[0] == 413


async def test_a_body_that_does_not_end_is_refused_after_its_time(
    admission: Admission, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("snapshot_operator.kube.admission.BODY_S", 0.05)
    more = asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.wait_for(more.wait(), 10)

    app = admission.app("secret".__eq__, Guests())
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        url = server.make_url("/secret/restored-pods")
        async with session.post(url, data=slowly()) as found:
            assert found.status == HTTPStatus.REQUEST_TIMEOUT
        more.set()


async def test_two_reviews_are_judged_at_a_time(
    admission: Admission, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More would hold the interpreter for longer than the loop may wait."""
    begun: list[asyncio.Event] = []

    async def held(work: Callable[..., Any], *arguments: Any) -> Any:
        begun.append(asyncio.Event())
        await asyncio.wait_for(begun[-1].wait(), 10)
        return work(*arguments)

    monkeypatch.setattr("snapshot_operator.kube.admission.in_thread", held)
    reviews = [asyncio.ensure_future(admission.object(request(SNAPSHOT))) for _ in range(3)]
    for _ in range(9):
        await asyncio.sleep(0)
    assert len(begun) == JUDGED
    begun[0].set()
    await reviews[0]
    await asyncio.sleep(0)
    assert len(begun) == JUDGED + 1
    for event in begun:
        event.set()
    await asyncio.gather(*reviews)


async def test_the_loop_turns_while_the_largest_object_is_judged(admission: Admission) -> None:
    document = checkpoint_document()
    template = document["spec"]["job"]["podTemplateSpec"]["spec"]
    env = [{"name": f"NAME_{n}", "value": "x" * 40, "extra": 1} for n in range(500)]
    template["containers"] = [{"name": f"c{n}", "image": "i", "env": env} for n in range(20)]
    judging, turns = asyncio.ensure_future(admission.object(request(document))), 0
    while not judging.done():
        await asyncio.sleep(0)
        turns += 1
    assert judging.result().outcome == "denied"
    assert turns > 10


NOW = datetime(2026, 1, 1, tzinfo=UTC)
DAY = timedelta(days=1)
NAMES = ["localhost", "198.51.100.7"]


def made(now: datetime = NOW, names: list[str] = NAMES) -> Certificates:
    return renewed(None, names, now)


def served(found: Certificates) -> x509.Certificate:
    return x509.load_pem_x509_certificate(found.certificate)


def names_of(found: Certificates) -> list[str]:
    names = served(found).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(each.value) for each in names]


def test_a_certificate_has_the_names_and_is_of_an_authority_that_makes_no_others() -> None:
    found = made()
    (authority,) = x509.load_pem_x509_certificates(found.authorities)
    served(found).verify_directly_issued_by(authority)
    assert names_of(found) == NAMES
    limits = authority.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert (limits.ca, limits.path_length) == (True, 0)


@pytest.mark.parametrize(("days", "is_kept"), [(0, True), (59, True), (60, False), (91, False)])
def test_a_certificate_of_ninety_days_is_renewed_after_sixty_by_the_same_authority(
    days: int, is_kept: bool
) -> None:
    found = made()
    later = renewed(found, NAMES, NOW + days * DAY)
    assert (later == found) is is_kept
    assert later.authorities == found.authorities
    served(later).verify_directly_issued_by(*x509.load_pem_x509_certificates(found.authorities))
    assert renewal(later) > NOW + days * DAY


def test_an_authority_is_followed_in_two_steps_and_both_are_trusted_meanwhile() -> None:
    found = made()
    late = NOW + 7 * 365 * DAY
    found = renewed(found, NAMES, late - DAY * 2000)
    first = renewed(found, NAMES, late)
    assert first.authorities.endswith(found.authorities)
    assert (first.certificate, first.key) == (found.certificate, found.key)
    second = renewed(first, NAMES, late)
    assert second.authorities == first.authorities
    (newer, older) = x509.load_pem_x509_certificates(second.authorities)
    served(second).verify_directly_issued_by(newer)
    assert renewed(second, NAMES, late) == second
    # The older one is kept as long as it lasts.
    assert older.not_valid_after_utc > late
    later = renewed(second, NAMES, late + 7 * 365 * DAY)
    (_, kept) = x509.load_pem_x509_certificates(later.authorities)
    assert kept == newer


def test_operators_with_other_names_share_one_certificate_and_do_not_take_turns() -> None:
    found = renewed(made(), ["other.example"], NOW + DAY)
    assert renewed(found, NAMES, NOW + DAY) == found
    assert {*names_of(found)} == {"other.example", *NAMES}


@each("field", Certificates._fields)
@each("value", [b"", b"no PEM"])
def test_what_cannot_be_read_is_made_again(field: str, value: bytes) -> None:
    found = renewed(made()._replace(**{field: value}), NAMES, NOW)
    assert getattr(found, field) not in (b"", b"no PEM")
    assert renewed(found, NAMES, NOW) == found


def test_a_key_that_is_none_of_the_authority_is_not_used() -> None:
    one, other = made(), made()
    found = renewed(one._replace(authority_key=other.authority_key), NAMES, NOW)
    assert found.authorities not in (one.authorities, other.authorities)


async def subject_served(context: ssl.SSLContext, trusted: Certificates) -> bytes:
    """Return the certificate that a client gets which trusts an authority alone."""

    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    client = ssl.create_default_context(cadata=trusted.authorities.decode())
    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    async with server:
        port = server.sockets[0].getsockname()[1]
        _, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=client, server_hostname="localhost"
        )
        found: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
    return found


async def test_a_certificate_is_taken_into_use_by_a_context_that_serves_already() -> None:
    one, other = made(datetime.now(UTC)), made(datetime.now(UTC))
    context = new_context()
    take(context, one.certificate, one.key)
    first = await subject_served(context, one)
    take(context, other.certificate, other.key)
    assert await subject_served(context, other) != first
    with pytest.raises(ssl.SSLError):
        take(context, one.certificate, other.key)
    assert await subject_served(context, other)


def put(folder: Path, found: Certificates) -> None:
    """Put a certificate into a folder as a kubelet does: both files by one rename of a link."""
    version = folder / f"..{len([*folder.iterdir()])}"
    version.mkdir(parents=True)
    (version / "tls.crt").write_bytes(found.certificate)
    (version / "tls.key").write_bytes(found.key)
    link = folder / "..data_tmp"
    link.symlink_to(version.name)
    link.rename(folder / "..data")
    for name in ("tls.crt", "tls.key"):
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"..data/{name}")


async def test_a_mounted_certificate_is_followed_and_a_broken_one_is_not_served(
    tmp_path: Path,
) -> None:
    one, other = made(datetime.now(UTC)), made(datetime.now(UTC))
    put(tmp_path, one)
    async with MountedCertificate(tmp_path).kept() as context:
        first = await subject_served(context, one)
        put(tmp_path, one._replace(key=other.key))
        put(tmp_path, other)
        async with asyncio.timeout(10):
            while True:
                try:
                    assert await subject_served(context, other) != first
                    break
                except ssl.SSLCertVerificationError:
                    await asyncio.sleep(0.05)


async def test_a_folder_without_a_certificate_is_named_with_its_setting(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="SNAPBACK_WEBHOOK_CERTIFICATE_DIR") as caught:
        async with MountedCertificate(tmp_path / "none").kept():
            pass
    assert "tls.crt" in (caught.value.next_step or "")


async def test_a_handshake_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("snapshot_shared.http.HEAD_S", 0.05)
    found = made(datetime.now(UTC))
    context = new_context()
    take(context, found.certificate, found.key)
    async with serving(
        web.Application(), "127.0.0.1:0", Guests(), patience_s=5.0, context=context
    ) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()


async def test_a_connection_without_an_end_of_its_handshake_counts_from_its_beginning() -> None:
    found = made(datetime.now(UTC))
    context = new_context()
    take(context, found.certificate, found.key)
    client = ssl.create_default_context(cadata=found.authorities.decode())
    app, guests = web.Application(), Guests(of_peer=2)
    async with serving(app, "127.0.0.1:0", guests, patience_s=5.0, context=context) as port:
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(9)]
        for reader, _ in opened[:7]:
            # Before the end of the time that a handshake may take.
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(), HEAD_S / 2) == b""
        url = f"https://localhost:{port}/nothing"
        async with aiohttp.ClientSession() as session, session.get(url, ssl=client) as answer:
            assert answer.status == 404
        for _, writer in opened:
            writer.close()
