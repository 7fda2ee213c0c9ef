"""What people get who apply, read and delete, and what comes late or means another object."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from snapshot_operator.api.objects import Api
from snapshot_shared import subjects
from snapshot_shared.api import (
    AbortRequest,
    ApplyRequest,
    CordonRequest,
    DeleteRequest,
    GetRequest,
    TemplateRequest,
    VerifyRequest,
    age_headers,
)
from snapshot_shared.bus import ASKED
from snapshot_shared.codec import digest, encode_json
from snapshot_shared.ids import NodeName
from tests.support.objects import checkpoint, checkpoint_document, pod_document
from tests.support.operator_world import World, payload, world_of
from tests.unit.tables import each

VERBS = (
    *("apply", "get", "view", "delete", "verify", "retention", "cordon", "abort", "requeue"),
    *("template.*", "inventory.*", "pods.*"),
)


async def apply(world: World, *documents: Any, dry_run: bool = False) -> Any:
    raw = [msgspec.Raw(msgspec.json.encode(document)) for document in documents]
    trace = f"00-{'a' * 32}-{'b' * 16}-01"
    request = ApplyRequest(documents=raw, traceparent=trace, dry_run=dry_run)
    return await world.ask("apply", request)


async def test_one_bad_document_stores_none_and_every_problem_is_named_with_its_document() -> None:
    world = World()
    bad = checkpoint_document("two")
    bad["spec"]["extra"] = 1
    bad["metadata"]["name"] = "A"
    reply = await apply(world, checkpoint_document("one"), bad)
    assert reply.failure.reason == "InvalidManifest"
    problems = reply.failure.values["problems"]
    assert [problem.split(":")[0] for problem in problems] == [
        "[1] metadata.name",
        "[1] spec.extra",
    ]
    assert await world.everything() == []


async def test_another_spec_under_the_same_name_is_refused() -> None:
    world = World()
    await apply(world, checkpoint_document())
    reply = await apply(world, checkpoint_document(activeDeadlineSeconds=7))
    assert reply.failure.reason == "AlreadyExists"
    [line] = reply.failure.values["lines"]
    assert line.startswith("spec.job.activeDeadlineSeconds: 7 is wanted, ")


async def test_a_dry_run_names_what_differs_and_shows_no_secret() -> None:
    world = World()
    document = checkpoint_document()
    await apply(world, document)
    [container] = document["spec"]["job"]["podTemplateSpec"]["spec"]["containers"]
    container["env"] = [*container.get("env", []), {"name": "API_TOKEN", "value": "s3cret-value"}]
    reply = await apply(world, document, dry_run=True)
    assert any("env" in line for line in reply.failure.values["lines"])
    assert "s3cret-value" not in str(reply.failure)


async def test_what_kubectl_has_noted_of_a_manifest_is_not_shown_where_it_differs() -> None:
    world = World()
    document = checkpoint_document()
    key = "kubectl.kubernetes.io/last-applied-configuration"
    for secret in ("hunter2", "hunter3"):
        document["metadata"]["annotations"] = {key: f'{{"env": "{secret}"}}', "note": secret * 100}
        reply = await apply(world, document)
    noted, note = reply.failure.values["lines"]
    assert noted == f"metadata.annotations[{key}]: it differs, and is not shown"
    assert note.startswith("metadata.annotations[note]: ")
    assert len(note) < 200


async def test_the_trace_of_apply_is_kept_on_the_object_and_its_children() -> None:
    world = World()
    await apply(world, checkpoint_document())
    await world.settle()
    for value in await world.everything():
        assert value.metadata.annotations["nvidia.com/traceparent"].startswith("00-aaaa")


@each("verb", VERBS)
@each("data", [b"", b"null", b"\xff\xfe", b"[" * 10_000, b'{"kind": 7, "after": 7, "node": 7}'])
async def test_noise_is_answered_with_a_reason(verb: str, data: bytes) -> None:
    answer = await World().ask(verb, data)
    assert answer.failure.reason == "InvalidMessage"


async def test_a_name_that_does_not_exist_says_how_to_list_what_does() -> None:
    answer = await World().ask("get", GetRequest(kind="dckpt", name="none"))
    assert answer.failure.reason == "NotFound"
    assert "snapshotctl get dynamocheckpoints" in answer.failure.next_step


async def test_lists_come_in_pages_that_join_without_gaps() -> None:
    world = World()
    names = [f"c{index:03}" for index in range(25)]
    await apply(world, *[checkpoint_document(name) for name in names])
    found: list[str] = []
    after: str | None = ""
    while after is not None:
        request = GetRequest(kind="DynamoCheckpoint", limit=10, after=after)
        page = await world.ask("get", request)
        found += [item["metadata"]["name"] for item in page.items]
        after = page.next or None
    assert found == names


async def test_a_viewer_is_shown_no_secret_and_whoever_may_apply_gets_what_was_applied() -> None:
    world = World()
    document = checkpoint_document()
    pod = document["spec"]["job"]["podTemplateSpec"]["spec"]["containers"][0]
    pod["env"] = [{"name": "HF_TOKEN", "value": "s3cr3t-1"}, {"name": "SIZE", "value": "s3cr3t-2"}]
    pod["args"] = ["--api-key", "s3cr3t-3"]
    document["metadata"]["annotations"] = {"example.com/password": "s3cr3t-4"}
    await apply(world, document)
    by_name = GetRequest(kind="DynamoCheckpoint", name=document["metadata"]["name"])
    for request in (by_name, GetRequest(kind="DynamoCheckpoint")):
        shown = await world.ask("view", request)
        assert b"s3cr3t" not in msgspec.json.encode(shown)
        [item] = (await world.ask("get", request)).items
        assert item["spec"]["job"]["podTemplateSpec"]["spec"]["containers"][0]["env"] == pod["env"]
        assert shown.items[0]["metadata"]["uid"] == item["metadata"]["uid"]


async def test_a_node_is_not_deleted_by_hand() -> None:
    world = await world_of(1)
    answer = await world.ask("delete", DeleteRequest(kind="node", name="node-1"))
    assert answer.failure.reason == "Forbidden"


async def test_only_the_node_of_a_pod_is_given_its_spec_and_the_digest_fits() -> None:
    world = await world_of(1)
    await world.apply(pod_document("restored"))
    (run,) = world.open("run")
    request = TemplateRequest(
        namespace="default", name="restored", uid=payload(run)["pod"]["uid"], node="node-1"
    )

    async def ask(request: TemplateRequest, node: str) -> Any:
        """Ask with the key of a node."""
        return await world.ask("template.*", request, {ASKED: subjects.template(NodeName(node))})

    answer = await ask(request, "node-1")
    assert digest(encode_json(answer.spec)) == payload(run)["template_digest"]
    wrong = msgspec.structs.replace(request, node="node-2")
    assert (await ask(wrong, "node-2")).failure.reason == "Forbidden"
    # Another node's key does not help whoever knows the pod.
    assert (await ask(request, "node-2")).failure.reason == "Forbidden"
    stale = msgspec.structs.replace(request, uid="00000000-0000-4000-8000-000000000000")
    assert (await ask(stale, "node-1")).failure.reason == "StalePodReference"


async def test_the_loop_turns_while_the_largest_manifest_is_checked() -> None:
    world = World()
    document = pod_document("big")
    document["metadata"]["annotations"] = {f"a/b{number}": "c" for number in range(40_000)}
    document["spec"]["containers"][0]["command"] = ["w"] * 300
    checking, turns = asyncio.ensure_future(apply(world, document)), 0
    while not checking.done():
        await asyncio.sleep(0)
        turns += 1
    assert checking.result().failure.values["problems"] == [
        "spec.containers[0].command: has 300 items, at most 256 are allowed"
    ]
    assert turns > 10


def in_cluster() -> World:
    world = World()
    world.api = Api(
        world.cluster, world.retention, world.clock, lambda: "request", is_in_cluster=True
    )
    return world


async def test_the_operator_of_a_cluster_stores_nothing_for_others() -> None:
    world = in_cluster()
    reply = await apply(world, checkpoint_document())
    assert reply.failure.reason == "Forbidden"
    assert reply.failure.next_step == "kubectl apply -f FILE"
    assert world.cluster.all("DynamoCheckpoint") == []
    checked = await apply(world, checkpoint_document(), dry_run=True)
    assert checked.failure is None


@pytest.mark.parametrize(
    ("kind", "name", "command"),
    [
        ("job", "llm", "kubectl delete job llm --namespace default"),
        ("pods", "p", "kubectl delete pod p --namespace default"),
        ("no", "node-1", "kubectl delete node node-1"),
    ],
)
async def test_the_operator_of_a_cluster_deletes_no_objects_of_kubernetes_for_others(
    kind: str, name: str, command: str
) -> None:
    reply = await in_cluster().ask("delete", DeleteRequest(kind=kind, name=name))
    assert (reply.failure.reason, reply.failure.next_step) == ("Forbidden", command)


async def test_the_operator_of_a_cluster_deletes_what_it_captured() -> None:
    world = in_cluster()
    await world.cluster.sync()
    await world.cluster.create(checkpoint())
    assert (await world.ask("delete", CHANGES["delete"])).failure is None


LATE_S = 33.0
PATIENCE_S = 5.0


@pytest.fixture
async def running() -> World:
    """A world in which the worker of a checkpoint is ordered to run."""
    return await world_of(1, answered=())


CHANGES: dict[str, Any] = {
    "delete": DeleteRequest(kind="dckpt", name="llm"),
    "cordon": CordonRequest(node="node-1", unschedulable=True),
    "abort": AbortRequest(kind="dckpt", name="llm", by="x"),
    "verify": VerifyRequest(kind="dckpt", name="llm"),
    "apply": ApplyRequest(documents=[]),
}


@pytest.mark.parametrize("verb", CHANGES)
async def test_a_change_whose_client_has_given_up_is_refused_and_done_never(
    running: World, verb: str
) -> None:
    before = await running.everything()
    headers = age_headers(running.now - LATE_S, PATIENCE_S)
    answer = await running.ask(verb, CHANGES[verb], headers)
    assert answer.failure.reason == "RequestExpired"
    assert "33.0 s ago" in answer.failure.message
    assert await running.everything() == before


async def test_a_question_is_answered_however_old_it_is(running: World) -> None:
    headers = age_headers(running.now - LATE_S, PATIENCE_S)
    answer = await running.ask("get", GetRequest(kind="dckpt", name="llm"), headers)
    assert answer.failure is None


async def test_a_deletion_that_names_another_incarnation_spares_the_one_there_is(
    running: World,
) -> None:
    request = DeleteRequest(kind="dckpt", name="llm", uid="of-before")
    assert (await running.ask("delete", request)).failure.reason == "Conflict"
    found = await running.get("DynamoCheckpoint", "llm")
    assert found.metadata.deletion_timestamp is None
    request = DeleteRequest(kind="dckpt", name="llm", uid=found.metadata.uid)
    assert (await running.ask("delete", request)).failure is None


@pytest.mark.parametrize("verb", ["abort", "verify"])
async def test_an_intervention_that_names_another_incarnation_is_a_conflict(
    running: World, verb: str
) -> None:
    await running.answer("run")
    request = msgspec.structs.replace(CHANGES[verb], uid="of-before")
    assert (await running.ask(verb, request)).failure.reason == "Conflict"
