"""Which changes of a status become Events, and how the API server gets them."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web
from kubernetes_asyncio.client import Configuration
from msgspec.structs import replace

from snapshot_operator.core.conditions import with_conditions
from snapshot_operator.kube.events import MAX_WAITING, EventRecorder, happenings
from snapshot_shared.kube_client import KubeClient
from snapshot_shared.manifests import parse
from snapshot_shared.objects.kinds import AnyObject
from tests.support.objects import checkpoint_document
from tests.unit.tables import each

CHECKPOINT = parse(checkpoint_document())
Row = tuple[str, bool, str, str]


def standing(*rows: Row, value: Any = CHECKPOINT) -> AnyObject:
    status = replace(value.status, conditions=with_conditions([], value, 0.0, *rows))
    changed: AnyObject = replace(value, status=status)
    return changed


@each(
    ("rows", "said"),
    [
        ([("Ready", False, "PodPending", "soon")], [("Normal", "PodPending", "soon")]),
        ([("Ready", False, "WorkerNotReady", "see")], [("Warning", "WorkerNotReady", "see")]),
        ([("Ready", False, "Refused", "no quota")], [("Warning", "Refused", "no quota")]),
        (
            [("Ready", True, "Captured", "1 byte"), ("Failed", False, "Captured", "")],
            [("Normal", "Captured", "1 byte")],
        ),
        (
            [("Ready", False, "JobGone", "no job"), ("Failed", True, "JobGone", "no job")],
            [("Warning", "JobGone", "no job")],
        ),
        (
            [("DeprecatedFieldSet", True, "DeprecatedFieldSet", "one")],
            [("Warning", "DeprecatedFieldSet", "one")],
        ),
        (
            [("nvidia.com/Restored", False, "LoadFailed", "no room")],
            [("Warning", "LoadFailed", "no room")],
        ),
    ],
)
def test_a_condition_that_gets_another_reason_says_so_once(
    rows: list[Row], said: list[tuple[str, str, str]]
) -> None:
    assert list(happenings(standing(), standing(*rows))) == said
    assert not list(happenings(standing(*rows), standing(*rows)))


def test_another_message_for_the_same_reason_is_no_news() -> None:
    rows = [standing(("Ready", False, "PodPending", text)) for text in ("1", "2")]
    assert not list(happenings(*rows))


def test_what_is_in_no_namespace_says_nothing() -> None:
    row = ("Ready", True, "Captured", "1 byte")
    meta = replace(CHECKPOINT.metadata, namespace=None)
    assert not list(happenings(standing(), replace(standing(row), metadata=meta)))


async def test_events_are_posted_in_order_and_one_that_is_refused_ends_nothing() -> None:
    answers, got = [500, 201, 201], asyncio.Queue[Any]()

    async def answer(request: web.Request) -> web.Response:
        await got.put((request.path, await request.json()))
        return web.json_response({"code": answers[0]}, status=answers.pop(0))

    app = web.Application()
    app.router.add_post("/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = "http://{}:{}".format(*runner.addresses[0][:2])
    reasons = ["PodPending", "WorkerStarting", "Captured"]
    async with KubeClient(Configuration(host=url)) as client:
        recorder = EventRecorder(client, lambda: 0.0)
        for reason in reasons:
            recorder.changed(standing(), standing(("Ready", True, reason, "x" * 2000)))
        running = asyncio.ensure_future(recorder.run())
        async with asyncio.timeout(10.0):
            seen = [await got.get() for _ in reasons]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    await runner.cleanup()
    assert [body["reason"] for _, body in seen] == reasons
    path, body = seen[1]
    assert path == "/api/v1/namespaces/default/events"
    assert body["involvedObject"]["kind"] == "DynamoCheckpoint"
    assert len(body["message"]) == 1024
    assert body["lastTimestamp"] == "1970-01-01T00:00:00Z"


async def test_what_cannot_be_posted_takes_no_more_memory() -> None:
    async with KubeClient(Configuration(host="http://127.0.0.1:1")) as client:
        recorder = EventRecorder(client, lambda: 0.0)
        for number in range(MAX_WAITING + 5):
            recorder.changed(standing(), standing(("Ready", False, f"Reason{number}", "")))
        assert recorder._waiting.qsize() == MAX_WAITING
