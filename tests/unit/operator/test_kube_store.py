"""What the store of a cluster makes of the bytes that an API server sends, and keeps of them."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer
from kubernetes_asyncio.client import Configuration

from snapshot_api.facts import JobSpec
from snapshot_api.identity import identity_hash
from snapshot_api.kinds import KINDS
from snapshot_operator.kube.store import RESOURCES, KubeStore
from snapshot_operator.kube.wire import MAX_CONTAINERS
from snapshot_operator.ports import Event
from snapshot_shared.errors import StoreBusy
from snapshot_shared.kube_client import KubeClient, path_kind
from snapshot_shared.tasks import end_all
from tests.support.objects import checkpoint_document
from tests.support.waiting import until
from tests.unit.tables import each

KIND = "DynamoCheckpoint"
PATH = RESOURCES[KIND].path()
NONE = {"metadata": {"resourceVersion": "1"}, "items": None}
END = "end"


def document(name: str = "llm", uid: str = "u-1", version: int = 5) -> dict[str, Any]:
    """Give a checkpoint as an API server has it."""
    found = checkpoint_document(name)
    found["metadata"] |= {"uid": uid, "resourceVersion": str(version), "generation": 1}
    return found


def later(value: dict[str, Any], do: Callable[[Any], object]) -> dict[str, Any]:
    """Give the next version of an object, in which something has changed."""
    found = copy.deepcopy(value)
    found["metadata"]["resourceVersion"] = str(int(value["metadata"]["resourceVersion"]) + 1)
    do(found)
    return found


def event(type_: str, value: dict[str, Any]) -> bytes:
    return json.dumps({"type": type_, "object": value}).encode() + b"\n"


class Server:
    """Has checkpoints and nothing else, and says of their changes what it is told to."""

    def __init__(self) -> None:
        self.pages: list[Any] = [NONE]
        self.lines: asyncio.Queue[bytes] = asyncio.Queue()
        self.lists = 0
        self.watched_from: list[str] = []
        self.objects: dict[str, dict[str, Any]] = {}

    def has(self, *pages: list[dict[str, Any]], version: int = 10) -> None:
        """List these pages from now on."""
        tokens = [*map(str, range(1, len(pages))), ""]
        self.pages = [
            {"metadata": {"resourceVersion": str(version), "continue": token}, "items": items}
            for items, token in zip(pages, tokens, strict=True)
        ]

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        is_asked_for = request.path == PATH
        if "/namespaces/" in request.path:
            found = self.objects.get(request.path.rpartition("/")[2])
            return web.json_response(found, status=200 if found else 404)
        if "watch" not in request.query:
            page = int(request.query.get("continue", "0"))
            self.lists += is_asked_for
            return web.Response(text=json.dumps(self.pages[page] if is_asked_for else NONE))
        response = web.StreamResponse()
        await response.prepare(request)
        if not is_asked_for:
            await asyncio.Event().wait()
        self.watched_from.append(request.query["resourceVersion"])
        while line := await self.lines.get():
            await response.write(line)
        return response


class Rig:
    """A store that follows a server."""

    def __init__(self, server: Server, store: KubeStore) -> None:
        self.server, self.store = server, store
        self._events: list[Event] = []
        store.subscribe(self._events.append)

    async def start(self) -> list[Any]:
        """List all kinds; return the checkpoints."""
        return [value for kind in KINDS for value in await self.store.list(kind)]

    async def reported(self, *lines: bytes) -> list[tuple[str, Any]]:
        """Send lines, and return what is reported of them."""
        end = document(END, END, 10**6)
        for line in (*lines, event("ADDED", end), event("DELETED", end)):
            self.server.lines.put_nowait(line)
        await until(self._has_ended, "the end")
        found = [(each.change, each.value) for each in self._events]
        self._events.clear()
        return found[:-2]

    def _has_ended(self) -> bool:
        last = self._events[-1:]
        return any(e.change == "DELETED" and e.value.metadata.name == END for e in last)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    behind = Server()
    async with RawTestServer(behind.answer) as server:
        host = f"http://127.0.0.1:{server.port}"
        async with KubeClient(Configuration(host=host)) as client:
            yield Rig(behind, KubeStore(client, jitter=lambda: 0.0))


@pytest.fixture
async def following(rig: Rig) -> AsyncIterator[Rig]:
    """A store that has read one checkpoint and follows it."""
    rig.server.has([document()])
    await rig.start()
    serving = asyncio.ensure_future(rig.store.run())
    yield rig
    await end_all(serving)


@pytest.mark.parametrize(
    ("part", "changed", "seen"),
    [
        ("metadata", {"annotations": {"nvidia.com/abort": "1"}}, "annotations"),
        ("metadata", {"labels": {"nvidia.com/x": "y"}}, "labels"),
        ("metadata", {"finalizers": ["nvidia.com/snapback"]}, "finalizers"),
        ("metadata", {"deletionTimestamp": "2026-01-01T00:00:00Z"}, "deletion_timestamp"),
        ("status", {"jobName": "llm"}, "job_name"),
    ],
    ids=["annotations", "labels", "finalizers", "deletion", "status"],
)
async def test_what_changes_beside_the_spec_is_seen_and_the_spec_is_kept(
    following: Rig, part: str, changed: dict[str, Any], seen: str
) -> None:
    (known,) = await following.store.list(KIND)
    new = later(document(), lambda found: found.setdefault(part, {}).update(changed))
    ((change, value),) = await following.reported(event("MODIFIED", new))
    assert change == "MODIFIED"
    assert [getattr(getattr(value, part), seen)] == list(changed.values())
    assert not getattr(getattr(known, part), seen)
    assert value.spec is known.spec  # type: ignore[union-attr]


async def test_a_spec_that_comes_in_other_bytes_is_decoded_whatever_its_generation(
    following: Rig,
) -> None:
    """A definition that changes has the server convert objects, and fill defaults in."""

    def convert(found: Any) -> None:
        found["spec"]["deletionPolicy"] = "Retain"
        found["spec"]["job"]["podTemplateSpec"]["spec"]["hostNetwork"] = True

    known: Any
    (known,) = await following.store.list(KIND)
    ((_, new),) = await following.reported(event("MODIFIED", later(document(), convert)))
    assert new.metadata.generation == known.metadata.generation
    assert new.spec.deletion_policy == "Retain"
    assert new.spec.job.pod_template_spec != known.spec.job.pod_template_spec


async def test_the_next_object_of_a_name_has_its_own_spec_although_its_generation_is_the_same(
    following: Rig,
) -> None:
    def replace(found: Any) -> None:
        found["metadata"]["uid"] = "u-2"
        found["spec"]["identity"]["model"] = "example/other"

    new = later(document(), replace)
    found = await following.reported(event("DELETED", document()), event("ADDED", new))
    (_, before), (_, after) = found
    assert [change for change, _ in found] == ["DELETED", "ADDED"]
    assert after.spec.identity.model == "example/other"
    assert identity_hash(after.spec.identity) != identity_hash(before.spec.identity)


async def test_a_version_that_is_known_is_not_reported_again(following: Rig) -> None:
    new = later(document(), lambda found: found["metadata"].update(labels={"nvidia.com/x": "y"}))
    lines = [event("MODIFIED", each) for each in (document(), new, new, document())]
    ((_, value),) = await following.reported(*lines)
    assert value.metadata.labels == {"nvidia.com/x": "y"}


async def test_what_cannot_be_decoded_is_left_out_and_the_rest_is_seen(following: Rig) -> None:
    strange = document("strange", "u-2", 7)
    strange["spec"]["identity"] = "none"
    lines = [event("ADDED", each) for each in (strange, document("next", "u-3", 8))]
    assert [value.metadata.name for _, value in await following.reported(*lines)] == ["next"]


async def test_an_object_of_a_newer_schema_is_not_taken_for_an_absent_one(rig: Rig) -> None:
    strange = document()
    strange["spec"]["identity"] = "none"
    rig.server.objects = {"llm": strange}
    with pytest.raises(StoreBusy, match="is there and cannot be read by this version"):
        await rig.store.read("DynamoCheckpoint", "default", "llm")
    assert await rig.store.read("DynamoCheckpoint", "default", "other") is None


async def test_a_watch_goes_on_from_the_last_bookmark(following: Rig) -> None:
    mark = {"kind": KIND, "metadata": {"creationTimestamp": None, "resourceVersion": "77"}}
    following.server.lines.put_nowait(event("BOOKMARK", mark))
    following.server.lines.put_nowait(b"")
    following.server.has([document()], version=80)
    assert await following.reported() == []
    assert following.server.watched_from == ["10", "77"]


async def test_an_expired_history_is_listed_again_and_what_is_not_there_is_gone(
    following: Rig,
) -> None:
    status = {"kind": "Status", "metadata": {}, "status": "Failure", "code": 410}
    following.server.lines.put_nowait(event("ERROR", status))
    following.server.lines.put_nowait(b"")
    following.server.has([document("new", "u-2", 90)], version=99)
    found = await following.reported()
    assert [(change, value.metadata.name) for change, value in found] == [
        ("ADDED", "new"),
        ("DELETED", "llm"),
    ]
    assert following.server.watched_from == ["10", "99"]


async def test_a_list_is_that_of_all_its_pages(rig: Rig) -> None:
    pages = [[document(f"c-{n}-{m}", f"u-{n}-{m}") for m in range(3)] for n in range(3)]
    rig.server.has(*pages)
    assert {value.metadata.uid for value in await rig.start()} == {
        each["metadata"]["uid"] for page in pages for each in page
    }


async def test_what_a_list_that_failed_had_is_gone_if_the_next_one_has_it_no_more(rig: Rig) -> None:
    rig.server.has([document("gone", "u-1")], [document("kept", "u-2")])
    rig.server.pages[1] = "no page"
    reading = asyncio.ensure_future(rig.start())
    await until(lambda: rig.server.lists == 2, "the page that fails")
    rig.server.has([document("kept", "u-2")], version=11)
    assert [value.metadata.name for value in await reading] == ["kept"]


async def test_an_object_that_is_nested_too_deep_to_be_decoded_hides_no_other(
    following: Rig,
) -> None:
    nested = b'{"a":' * 5000 + b"1" + b"}" * 5000
    deep = event("ADDED", document("deep", "u-2", 7))
    deeper = deep.replace(b'"spec": {"containers"', b'"spec": {"x":' + nested + b', "containers"')
    assert len(deeper) > len(deep)
    found = await following.reported(deeper, event("ADDED", document("next", "u-3", 8)))
    assert [value.metadata.name for _, value in found] == ["deep", "next"]


POD, JOB, CHECKPOINT = (RESOURCES[kind].value_in for kind in ("Pod", "Job", "DynamoCheckpoint"))

META = {
    "name": "worker-x",
    "namespace": "team",
    "uid": "0000",
    "resourceVersion": "7",
    "labels": {"app": "x", "nvidia.com/snapshot-checkpoint-id": "abc"},
    "annotations": {"kubectl.kubernetes.io/last": "x", "nvidia.com/restore-from": "llm"},
    "ownerReferences": [{"apiVersion": "batch/v1", "kind": "Job", "name": "llm", "uid": "j"}],
    "managedFields": [{"manager": "kubelet"}],
}


STARTED = "2026-01-01T00:00:00Z"


def encoded(**document: Any) -> bytes:
    return json.dumps({"metadata": META, **document}).encode()


def pod(restarts: str = "Never", **status: Any) -> Any:
    resources = {"limits": {"cpu": "500m", "nvidia.com/gpu": "2"}}
    container = {"name": "main", "image": "i", "resources": resources, "env": [{"name": "A"}]}
    spec = {"containers": [container], "nodeName": "node-1", "restartPolicy": restarts}
    return POD(encoded(spec=spec, status=status))


def test_of_labels_and_annotations_only_ours_are_kept() -> None:
    meta = pod().metadata
    assert meta.labels == {"nvidia.com/snapshot-checkpoint-id": "abc"}
    assert meta.annotations == {"nvidia.com/restore-from": "llm"}
    assert meta.owner_references[0].uid == "j"


def test_a_pod_is_its_node_its_containers_and_the_devices_that_they_ask_for() -> None:
    found = pod(phase="Running")
    assert found.status.node_name == "node-1"
    (container,) = found.spec.containers
    assert container.resources.limits == {"nvidia.com/gpu": "2"}
    assert found.status.phase == "Running"


@each(
    ("volumes", "started", "known"),
    [
        ([], None, "none"),
        (["gms-sockets"], None, "starting"),
        (["gms-sockets"], False, "starting"),
        (["models", "gms-sockets"], True, "ready"),
    ],
)
def test_a_pod_has_a_memory_server_from_the_start_of_its_init_container(
    volumes: list[str], started: bool | None, known: str
) -> None:
    status = {"initContainerStatuses": [{"name": "gms-server", "started": started}]}
    spec = {"containers": [], "volumes": [{"name": name} for name in volumes]}
    assert POD(encoded(spec=spec, status=status)).status.memory_server == known


@each(
    ("state", "known"),
    [
        ({"running": {"startedAt": STARTED}}, ("running", None, STARTED)),
        ({"running": {"startedAt": None}}, ("running", None, "")),
        ({"waiting": {"reason": "ContainerCreating"}}, ("waiting", None, "")),
        ({"terminated": {"exitCode": 137, "reason": "OOMKilled"}}, ("terminated", 137, "")),
        ({}, ("waiting", None, "")),
    ],
)
def test_the_state_of_a_container_is_one_of_three(state: Any, known: Any) -> None:
    (found,) = pod(containerStatuses=[{"name": "main", "state": state}]).status.container_statuses
    assert (found.state, found.exit_code, found.started_at) == known


@each(
    ("restarts", "code", "phase", "state"),
    [
        ("Never", 1, "Running", "terminated"),
        ("OnFailure", 1, "Running", "waiting"),
        ("OnFailure", 0, "Running", "terminated"),
        ("Always", 0, "Running", "waiting"),
        ("Always", 1, "Failed", "terminated"),
    ],
)
def test_a_container_that_its_kubelet_starts_again_has_not_ended_for_good(
    restarts: str, code: int, phase: str, state: str
) -> None:
    rows = [{"name": "main", "state": {"terminated": {"exitCode": code}}}]
    (found,) = pod(restarts, phase=phase, containerStatuses=rows).status.container_statuses
    assert found.state == state


def test_a_container_that_runs_names_the_image_that_it_runs() -> None:
    row = {"name": "main", "state": {"running": {}}, "imageID": "llm@sha256:a"}
    (found,) = pod(containerStatuses=[row]).status.container_statuses
    assert found.image_id == "llm@sha256:a"


@each("rows", ["containerStatuses", "initContainerStatuses"])
@each(
    ("waiting", "reason", "message"),
    [
        (
            {"reason": "CreateContainerConfigError", "message": 'secret "llm" not found'},
            "PodTemplateInvalid",
            'container main: secret "llm" not found',
        ),
        ({"reason": "ErrImagePull"}, "ImagePullBackOff", "container main: ErrImagePull"),
        ({"reason": "ContainerCreating"}, "", ""),
    ],
)
def test_a_pod_whose_container_cannot_start_says_why(
    rows: str, waiting: dict[str, str], reason: str, message: str
) -> None:
    status = pod(**{rows: [{"name": "main", "state": {"waiting": waiting}}]}).status
    assert (status.reason, status.message) == (reason, message)


STANDBY = {"name": "SNAPSHOT_RESTORE_STANDBY", "value": "1"}
NO_STANDBY = {"name": "SNAPSHOT_RESTORE_STANDBY", "value": "0"}
OF_A_FIELD = {"name": "SNAPSHOT_RESTORE_STANDBY", "valueFrom": {"fieldRef": {}}}


@each(
    ("annotations", "env", "cold"),
    [
        ({"nvidia.com/restore-from": "llm"}, [STANDBY], []),
        ({"nvidia.com/restore-from": "llm"}, [NO_STANDBY], ["main"]),
        ({"nvidia.com/restore-from": "llm"}, [STANDBY, OF_A_FIELD], ["main"]),
        ({"nvidia.com/restore-from": "llm"}, None, ["main"]),
        ({}, None, []),
    ],
)
def test_a_container_of_a_pod_to_restore_is_cold_unless_its_environment_says_standby(
    annotations: dict[str, str], env: Any, cold: list[str]
) -> None:
    container = {"name": "main", **({} if env is None else {"env": env})}
    meta = META | {"annotations": annotations}
    found = POD(encoded(metadata=meta, spec={"containers": [container]}))
    assert found.status.cold_containers == cold


@each(
    ("command", "workers"),
    [
        (["/snapback/snapback-init"], ["other"]),
        (["/snapback/snapback-init", "--", "serve"], ["other"]),
        (["serve", "/snapback/snapback-init"], ["main", "other"]),
        (["serve"], ["main", "other"]),
        (None, ["main", "other"]),
    ],
)
def test_a_container_of_a_pod_to_restore_runs_a_worker_unless_it_is_a_placeholder(
    command: Any, workers: list[str]
) -> None:
    main = {"name": "main", **({} if command is None else {"command": command})}
    spec = {"containers": [main, {"name": "other"}]}
    assert POD(encoded(spec=spec)).status.worker_containers == workers
    meta = META | {"annotations": {}}
    assert POD(encoded(metadata=meta, spec=spec)).status.worker_containers == []


def test_of_a_pod_with_very_many_containers_the_first_ones_are_looked_at() -> None:
    names = [f"c-{number}" for number in range(2000)]
    spec = {"containers": [{"name": name} for name in names]}
    status = {"containerStatuses": [{"name": name} for name in names]}
    found = POD(msgspec.json.encode({"metadata": META, "spec": spec, "status": status}))
    first = names[:MAX_CONTAINERS]
    assert [each.name for each in found.spec.containers] == first
    assert [each.name for each in found.status.container_statuses] == first


def test_a_job_has_its_counts_and_conditions() -> None:
    row = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}
    spec = {"template": {"spec": {"containers": [{"name": "main", "image": "i"}]}}}
    found = JOB(encoded(spec=spec, status={"failed": 3, "conditions": [row]}))
    assert found.status.failed == 3
    assert found.status.conditions[0].reason == "BackoffLimitExceeded"
    # As snapshotctl reads it.
    assert msgspec.json.decode(msgspec.json.encode(found.spec), type=JobSpec) == found.spec


@each(
    ("path", "kind"),
    [
        ("/api/v1/pods", "pods"),
        ("/api/v1/namespaces/a/pods/b/status", "pods/status"),
        ("/api/v1/namespaces/a", "namespaces"),
        ("/apis/nvidia.com/v1alpha1/snapshotcontents/x/status", "snapshotcontents/status"),
        ("/apis/nvidia.com/v1alpha1/namespaces/a/snapshots", "snapshots"),
    ],
)
def test_a_request_is_counted_by_what_it_is_about(path: str, kind: str) -> None:
    assert path_kind(path) == kind


def checkpoint(template: Any, **meta: Any) -> Any:
    document = checkpoint_document()
    document["metadata"] = {**META, **meta}
    document["spec"]["job"]["podTemplateSpec"] = template
    return CHECKPOINT(json.dumps(document).encode())


def template(**container: Any) -> dict[str, Any]:
    main = {"name": "main", "env": [{"name": "a.b"}], **container}
    return {"spec": {"containers": [main], "restartPolicy": "Always", "hostNetwork": True}}


def test_a_checkpoint_is_decoded_whatever_kubernetes_allows_in_its_template() -> None:
    long = {"kubectl.kubernetes.io/last-applied-configuration": "x" * 100_000}
    found = checkpoint(template(), annotations=long)
    (container,) = found.spec.job.pod_template_spec.spec.containers
    assert container.name == "main"
    assert found.metadata.annotations == {}


def test_templates_that_differ_in_a_field_that_is_not_kept_differ_here_too() -> None:
    one, other = checkpoint(template(image="a")), checkpoint(template(image="a", tty=True))
    assert one.spec.job != other.spec.job
    assert one.spec == checkpoint(template(image="a")).spec


@each(
    ("resources", "gpus"),
    [
        ({"limits": {"cpu": 0.5, "memory": 2e9, "nvidia.com/gpu": 1}}, {"nvidia.com/gpu": 1}),
        ({"limits": {"nvidia.com/gpu": 2.0}}, {"nvidia.com/gpu": 2}),
        ({"limits": {"nvidia.com/gpu": 0.5}}, {}),
        ({"limits": {"nvidia.com/gpu": None}}, {}),
        ({"limits": None}, {}),
        (None, {}),
    ],
)
def test_a_checkpoint_is_decoded_whatever_way_its_quantities_are_written(
    resources: Any, gpus: dict[str, Any]
) -> None:
    found = checkpoint(template(resources=resources, image=None))
    (container,) = found.spec.job.pod_template_spec.spec.containers
    assert (container.resources.limits, container.image) == (gpus, "")


@each("policy", ["Sometimes", None])
def test_a_checkpoint_is_decoded_whatever_its_template_says_of_restarts(policy: Any) -> None:
    # Its Job has a policy of its own.
    found = checkpoint({"spec": {**template()["spec"], "restartPolicy": policy}})
    assert found.spec.job.pod_template_spec.spec.containers
