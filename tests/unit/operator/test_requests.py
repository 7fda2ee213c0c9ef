"""Requests that come late, or mean another object than there is, change nothing."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from snapshot_shared.api import (
    AbortReply,
    AbortRequest,
    ApplyReply,
    ApplyRequest,
    CordonReply,
    CordonRequest,
    DeleteReply,
    DeleteRequest,
    GetReply,
    GetRequest,
    VerifyReply,
    VerifyRequest,
    age_headers,
)
from snapshot_shared.codec import encode_json
from tests.support.objects import checkpoint_document
from tests.support.operator_world import World, world_of

LATE_S = 33.0
PATIENCE_S = 5.0


@pytest.fixture
async def world() -> World:
    world = await world_of(1)
    await world.apply(checkpoint_document())
    return world


async def ask(
    world: World, verb: str, request: Any, reply: type[Any], headers: dict[str, str] | None = None
) -> Any:
    endpoints = world.api.endpoints() | world.operations.endpoints()
    answer = await endpoints[verb](encode_json(request), headers or {})
    await world.settle()
    return msgspec.json.decode(answer, type=reply)


CHANGES: list[tuple[str, Any, type[Any]]] = [
    ("delete", DeleteRequest(kind="dckpt", name="llm"), DeleteReply),
    ("cordon", CordonRequest(node="node-1", unschedulable=True), CordonReply),
    ("abort", AbortRequest(kind="dckpt", name="llm", by="x"), AbortReply),
    ("verify", VerifyRequest(kind="dckpt", name="llm"), VerifyReply),
    ("apply", ApplyRequest(documents=[]), ApplyReply),
]


@pytest.mark.parametrize(("verb", "request_", "reply"), CHANGES, ids=[c[0] for c in CHANGES])
async def test_a_change_whose_client_has_given_up_is_refused_and_done_never(
    world: World, verb: str, request_: Any, reply: type[Any]
) -> None:
    before = await world.everything()
    headers = age_headers(world.now - LATE_S, PATIENCE_S)
    answer = await ask(world, verb, request_, reply, headers)
    assert answer.failure.reason == "RequestExpired"
    assert "33.0 s ago" in answer.failure.message
    assert await world.everything() == before


async def test_a_change_that_comes_in_time_is_done(world: World) -> None:
    headers = age_headers(world.now - 1.0, PATIENCE_S)
    request = CordonRequest(node="node-1", unschedulable=True)
    assert (await ask(world, "cordon", request, CordonReply, headers)).changed


async def test_a_question_is_answered_however_old_it_is(world: World) -> None:
    headers = age_headers(world.now - LATE_S, PATIENCE_S)
    answer = await ask(world, "get", GetRequest(kind="dckpt", name="llm"), GetReply, headers)
    assert answer.failure is None


async def test_a_deletion_that_names_another_incarnation_spares_the_one_there_is(
    world: World,
) -> None:
    request = DeleteRequest(kind="dckpt", name="llm", uid="of-before")
    answer = await ask(world, "delete", request, DeleteReply)
    assert answer.failure.reason == "Conflict"
    found = await world.get("DynamoCheckpoint", "llm")
    assert found.metadata.deletion_timestamp is None
    request = DeleteRequest(kind="dckpt", name="llm", uid=found.metadata.uid)
    assert (await ask(world, "delete", request, DeleteReply)).failure is None


@pytest.mark.parametrize("verb", ["abort", "verify"])
async def test_an_intervention_that_names_another_incarnation_is_a_conflict(
    world: World, verb: str
) -> None:
    await world.answer_well(world.open("run")[0])
    request: Any = AbortRequest(kind="dckpt", name="llm", by="x", uid="of-before")
    if verb == "verify":
        request = VerifyRequest(kind="dckpt", name="llm", uid="of-before")
    reply = AbortReply if verb == "abort" else VerifyReply
    assert (await ask(world, verb, request, reply)).failure.reason == "Conflict"


async def test_a_cordon_that_was_decided_on_an_older_node_is_a_conflict(world: World) -> None:
    node = world.cluster.get("Node", None, "node-1")
    assert node is not None
    version = node.metadata.resource_version
    request = CordonRequest(node="node-1", unschedulable=True, resource_version=version)
    assert (await ask(world, "cordon", request, CordonReply)).changed
    late = CordonRequest(node="node-1", unschedulable=False, resource_version=version)
    assert (await ask(world, "cordon", late, CordonReply)).failure.reason == "Conflict"
