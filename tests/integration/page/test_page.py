"""The page over HTTP: a real page and operator, a real nats-server with users, a real client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from snapshot_api.facts import Node, Pod
from snapshot_api.kinds import AnyObject
from snapshot_api.manifests import parse
from snapshot_api.meta import ObjectMeta
from snapshot_operator.api.objects import Api
from snapshot_operator.core.restore import restore_for
from snapshot_operator.core.retention import Limits
from snapshot_operator.local.controllers import INDEXES
from snapshot_operator.local.store import SqliteStore
from snapshot_operator.runtime.cluster import Cluster
from snapshot_operator.runtime.nats import ChangePublisher
from snapshot_operator.runtime.upkeep import Retention
from snapshot_page.adapters.live_view import LiveView
from snapshot_page.handlers import Page
from snapshot_shared import subjects
from snapshot_shared.bus import Bus
from snapshot_shared.errors import Failure
from snapshot_shared.http import http_port
from snapshot_shared.service import system_clocks
from snapshot_shared.transitions import Restore
from tests.support import builders
from tests.support.nats_server import running_nats_server
from tests.support.objects import checkpoint as stored_checkpoint
from tests.support.objects import restore_document
from tests.support.page_stories import be_busy
from tests.support.page_world import GIB, PageWorld, checkpoint, page_world
from tests.support.waiting import until

PATIENCE_S = 150.0
CHECKPOINT = "dynamocheckpoints/default/llama-70b"


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[PageWorld]:
    async with page_world(tmp_path) as found:
        yield found
        assert "violation" not in found.log.lower()
        assert "Traceback" not in found.log


@pytest.fixture
async def http(world: PageWorld) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(world.url) as session:
        yield session


class Served:
    """A page, and what an operator publishes and answers of its objects."""

    def __init__(self, cluster: Cluster, url: str) -> None:
        self.cluster = cluster
        self.bus = Bus(url, "operator")
        self.view = LiveView(Bus(url, "page"), system_clocks(), "life", "")
        self.url = ""
        self.requests = 0
        """How often objects were requested of the operator."""

    async def endpoint(self, data: bytes, headers: Mapping[str, str]) -> bytes:
        self.requests += 1
        api = Api(self.cluster, Retention(self.cluster, Limits(), time.time), time.time, str)
        return await api.endpoints()["get"](data, headers)

    @contextlib.asynccontextmanager
    async def running(self, **limits: Any) -> AsyncIterator[Served]:
        await self.bus.connect()
        await self.bus.ensure_assets()
        await self.bus.serve("snap-operator", "0.1.0", {}, {subjects.api("get"): self.endpoint})
        announcer = ChangePublisher(self.bus, "one")
        self.cluster.subscribe(announcer.watcher)
        announcing = asyncio.create_task(announcer.run())
        await self.view._bus.connect()
        page = Page(self.view, ["ops.example"], beat_s=0.2, **limits)
        try:
            async with http_port("127.0.0.1:0", str, page.routes()) as port:
                self.url = f"http://127.0.0.1:{port}"
                async with aiohttp.ClientSession(self.url) as self.http:
                    yield self
                page.close()
        finally:
            announcing.cancel()
            await self.view._bus.close()
            await self.bus.close()


async def objects() -> Cluster:
    store = SqliteStore(None, timestamp=lambda: "2026-01-01T00:00:00Z").open()
    cluster = Cluster(store, INDEXES)
    await cluster.sync()
    return cluster


@pytest.fixture
async def served(nats_url: str) -> AsyncIterator[Served]:
    async with Served(await objects(), nats_url).running(max_streams=3, patience_s=0.5) as found:
        yield found


@pytest.fixture
def light(served: Served) -> aiohttp.ClientSession:
    """A client of a page around no operator, for what is about requests alone."""
    return served.http


class Stream:
    """The events of one reader, and the sections that they add up to."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._lines = response.content
        self.sections: dict[str, Any] = {}
        self.last_id = ""

    async def event(self) -> str:
        """Take the next event and give its kind."""
        fields: dict[str, str] = {}
        async with asyncio.timeout(PATIENCE_S):
            while line := (await self._lines.readline()).decode():
                name, _, value = line.rstrip("\n").partition(": ")
                if name:
                    fields[name] = value
                elif "event" in fields:
                    break
            else:
                return ""
        self.last_id = fields.get("id", self.last_id)
        self.sections |= json.loads(fields["data"])
        return fields["event"]

    async def until(self, holds: Any) -> None:
        while True:
            with contextlib.suppress(LookupError, ValueError):
                if holds(self.sections):
                    return
            assert await self.event(), self.sections


def row_of(sections: dict[str, Any]) -> dict[str, Any]:
    [found] = [row for row in sections["objects"]["rows"] if row["key"] == CHECKPOINT]
    return found  # type: ignore[no-any-return]


@contextlib.asynccontextmanager
async def reading(http: aiohttp.ClientSession, **headers: str) -> AsyncIterator[Stream]:
    async with http.get("/events", headers=headers) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        yield Stream(response)


async def test_a_browser_sees_a_capture_grow_step_by_step(
    world: PageWorld, http: aiohttp.ClientSession
) -> None:
    async with reading(http) as stream:
        await stream.until(lambda s: s["objects"]["all"] == 0)
        node = await world.join("node-1")
        node.used, node.sessions = [7 * GIB, 0], [1, 0]
        await node.appear()
        await stream.until(lambda s: s["nodes"]["rows"][0]["gpus"][0]["used"] == 7 * GIB)
        row = stream.sections["nodes"]["rows"][0]
        assert (row["phase"], row["slots"], row["agent"]) == ("Ready", 2, "0.1.0")
        assert row["gms"] == "0.1.0"
        assert row["gpus"][0]["sessions"] == 1

        await world.apply(checkpoint("llama-70b"))
        await world.run_worker()
        saves = await world.prepare(4 * GIB)
        await world.progress(saves[0], "write", GIB, 4 * GIB)
        await stream.until(lambda s: row_of(s)["step"]["done"] == GIB + 3 * 2**20)
        assert row_of(stream.sections)["step"]["what"] == "save gpu-0: write on node-1"
        assert stream.sections["about"]["follow"] == CHECKPOINT

        await world.done(await world.order("release"))
        for save in saves:
            part = {"part": save["part"], "bytes": 4 * GIB, "digest": "sha256:" + "0" * 64}
            await world.report(save, "staged", part=part)
        await world.done(await world.order("seal"), root_digest="sha256:" + "1" * 64)
        await stream.until(lambda s: row_of(s)["phase"] == "Ready")
        await stream.until(lambda s: s["artifacts"]["rows"][0]["size"] >= 8 * GIB)


async def test_the_details_have_orders_reports_and_spans_and_no_spec_or_value_of_the_environment(
    world: PageWorld, http: aiohttp.ClientSession
) -> None:
    await be_busy(world)
    async with http.get(f"/api/objects/{CHECKPOINT}") as response:
        found = await response.json()
    labels = [(arrow["label"], arrow.get("of")) for arrow in found["flow"]["arrows"]]
    assert ("leased", "save gpu-0") in labels
    assert found["flow"]["lanes"] == ["operator", "agent node-3", "gms node-3"]
    assert {"freeze", "order dump"} <= {bar["name"] for bar in found["waterfall"]["bars"]}
    [part] = [part for part in found["parts"] if part["part"] == "gpu-1"]
    assert 0 < part["done"] < part["total"]

    await world.dead_message("node-1", "snap.order.x", Failure(reason="Poison", message="bad"))
    async with reading(http) as stream:
        await stream.until(lambda s: s["problems"]["all"] == 1)
        texts = [json.dumps(stream.sections)]
    for row in stream.sections["objects"]["rows"]:
        async with http.get(f"/api/objects/{row['key']}") as response:
            assert response.status == 200
            texts.append(await response.text())
    for text in texts:
        assert "TOP-SECRET" not in text
        assert "API_KEY" not in text
        assert '"spec"' not in text


async def test_a_reader_that_comes_back_gets_what_has_changed_since_and_a_program_gets_all_as_json(
    world: PageWorld, http: aiohttp.ClientSession
) -> None:
    await world.join("node-1")
    async with reading(http) as other, reading(http) as stream:
        await stream.until(lambda s: s["nodes"]["rows"][0]["gms"] == "0.1.0")
        last = stream.last_id
        async with reading(http, **{"Last-Event-ID": last}) as again:
            await again.event()
            assert "objects" not in again.sections
            assert again.sections["now"] > 0
        async with reading(http, **{"Last-Event-ID": "another-life.999"}) as fresh:
            await fresh.event()
            assert "objects" in fresh.sections
        assert other.sections == {}

    async with http.get("/api/state") as response:
        found = await response.json()
    assert {"problems", "nodes", "objects", "artifacts", "about", "version"} <= set(found)
    async with http.get("/api/objects/pods/default/none") as response:
        assert response.status == 404
        assert (await response.json())["error"] == "there is no pods/default/none"
    async with http.get("/api/objects/x/..%2f..%2fetc/passwd") as response:
        assert response.status == 404


async def test_the_page_runs_its_script_alone_and_gives_nothing_to_another_site(
    light: aiohttp.ClientSession,
) -> None:
    async with light.get("/") as response:
        html = await response.text()
        policy = response.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert len(re.findall(r"'sha256-[^']+'", policy)) == 2
    # Names of XML are no addresses that are asked for.
    asked = re.findall(r"https?://(?!www\.w3\.org/2000/svg)", html)
    assert asked == []
    assert "Access-Control-Allow-Origin" not in response.headers
    headers = {"Sec-Fetch-Site": "cross-site"}
    for path in ("/events", "/api/state"):
        async with light.get(path, headers=headers) as response:
            assert response.status == 403
    async with light.get("/", headers=headers) as response:
        assert response.status == 200


async def test_a_name_that_was_rebound_to_the_page_is_refused(light: aiohttp.ClientSession) -> None:
    ours = ("localhost:1", "127.0.0.1", "[::1]:80", "10.0.0.7:90", "Ops.example")
    others = ("evil.example", "127.0.0.1.evil.example:80", "", "localhost.x")
    wrong = {}
    for host in (*ours, *others):
        for path in ("/",) if host in ours else ("/", "/events", "/api/state"):
            async with light.get(path, headers={"Host": host}) as response:
                if response.status not in ((200,) if host in ours else (400, 421)):
                    wrong[host, path] = response.status
    assert wrong == {}


async def test_nothing_but_reading_is_answered(light: aiohttp.ClientSession) -> None:
    answered = {}
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        for path in ("/", "/events", "/api/state", f"/api/objects/{CHECKPOINT}"):
            async with light.request(method, path) as response:
                if response.status != 405:
                    answered[method, path] = response.status
    assert answered == {}
    async with light.head("/") as response:
        assert response.status == 200


async def test_a_page_ends_at_once_although_it_has_readers_who_go_on_with_the_next(
    world: PageWorld, http: aiohttp.ClientSession
) -> None:
    await world.join("node-1")
    async with reading(http) as stream:
        await stream.until(lambda s: s["nodes"]["all"] == 1)
        last = stream.last_id
        async with asyncio.timeout(PATIENCE_S):
            assert await world.stop("page") == 0
        with contextlib.suppress(aiohttp.ClientError):
            while await stream.event():
                pass
    # A reader before NATS is reached is shown why, and causes no traceback.
    await world.start_page(SNAPBACK_NATS_URL="nats://127.0.0.1:1")
    async with aiohttp.ClientSession(world.url) as early, reading(early) as stream:
        await stream.until(lambda s: s["problems"]["rows"][0]["reason"] == "BusUnavailable")
        async with early.get("/readyz") as response:
            assert response.status == 503
    await world.stop("page")
    await world.start_page()
    async with (
        aiohttp.ClientSession(world.url) as again,
        reading(again, **{"Last-Event-ID": last}) as stream,
    ):
        await stream.until(lambda s: s["nodes"]["all"] == 1)


async def test_a_stopped_operator_is_a_problem_until_another_one_answers(
    world: PageWorld, http: aiohttp.ClientSession
) -> None:
    await world.join("node-1")
    async with reading(http) as stream:
        await stream.until(lambda s: s["nodes"]["all"] == 1)
        await world.stop("operator")
        await stream.until(lambda s: s["problems"]["rows"][0]["what"] == "Operator")
        assert stream.sections["nodes"]["all"] == 1
        await world.start_operator()
        await stream.until(lambda s: s["problems"]["all"] == 0)
        await world.apply(checkpoint("llama-70b"))
        await stream.until(lambda s: row_of(s)["kind"] == "DynamoCheckpoint")


# What a program around a page can count: one reader, many, slow ones, none.


def _stored(number: int) -> AnyObject:
    return stored_checkpoint(f"llm-{number}")


NODE = Node(metadata=ObjectMeta(name="node-1"))


async def test_nothing_is_read_and_nothing_kept_without_readers(served: Served) -> None:
    view = served.view
    await served.cluster.create(_stored(1))
    assert served.requests == 0
    async with reading(served.http) as stream:
        await stream.until(lambda s: s["objects"]["all"] == 1)
        assert view._task is not None
    nothing = "the facts stay although nobody reads"
    await until(lambda: view._task is None and not view._facts.entries, nothing)
    before = served.requests
    await served.cluster.create(_stored(2))
    await served.bus.client.flush()
    assert served.requests == before
    assert view._facts.entries == {}
    assert view.feed.since(0) == {}


async def test_what_changes_while_the_objects_are_listed_is_shown_as_it_is_then(
    served: Served,
) -> None:
    cluster = served.cluster
    stored = [await cluster.create(_stored(number)) for number in range(450)]
    async with reading(served.http) as stream:
        async with asyncio.timeout(PATIENCE_S):
            while not served.requests:  # noqa: ASYNC110 - the next turn of the loop
                await asyncio.sleep(0)
        for gone in (stored[0], stored[-1]):
            await cluster.delete(gone)
        await cluster.create(_stored(1000))
        await stream.until(lambda s: s["objects"]["all"] == 449)


async def test_a_change_is_shown_without_another_request(served: Served) -> None:
    found = await served.cluster.create(_stored(1))
    async with reading(served.http) as stream:
        await stream.until(lambda s: s["objects"]["rows"][0]["phase"] == "Pending")
        before = served.requests
        await served.cluster.update_status(builders.with_status(found, phase="Creating"))
        await stream.until(lambda s: s["objects"]["rows"][0]["phase"] == "Creating")
        assert served.requests == before
        async with served.http.get("/api/objects/dynamocheckpoints/default/llm-1") as response:
            assert ["model", "example/llm-1"] in (await response.json())["facts"]


async def test_a_durable_that_is_paused_is_shown_until_it_is_resumed(served: Served) -> None:
    await served.cluster.create(NODE)
    manager = served.bus.client.jetstream()
    await manager.add_consumer("ORDERS", durable_name="agent-node-1", ack_policy="explicit")
    brake = "$JS.API.CONSUMER.PAUSE.ORDERS.agent-node-1"
    held = ["agent gets no orders: its durable agent-node-1 is paused"]
    async with reading(served.http) as stream:
        await stream.until(lambda s: s["nodes"]["rows"][0]["held"] == [])
        await served.bus.request(brake, b'{"pause_until": "2999-01-01T00:00:00Z"}')
        await stream.until(lambda s: s["nodes"]["rows"][0]["held"] == held)
        await served.bus.request(brake, b"{}")
        await stream.until(lambda s: s["nodes"]["rows"][0]["held"] == [])


async def test_a_cordoned_node_is_read_again_for_its_spec(served: Served) -> None:
    ready = builders.row("Ready", "True", "AgentPresent")
    node = builders.with_status(await served.cluster.create(NODE), conditions=[ready])
    node = await served.cluster.update_status(node)
    async with reading(served.http) as stream:
        await stream.until(lambda s: s["nodes"]["rows"][0]["phase"] == "Ready")
        await served.cluster.update_spec(builders.with_spec(node, unschedulable=True))
        await stream.until(lambda s: s["nodes"]["rows"][0]["phase"] == "Ready,SchedulingDisabled")


async def test_a_pod_follows_its_restore_although_the_pod_does_not_change(served: Served) -> None:
    cluster = served.cluster
    pod = await cluster.create(parse(restore_document()))
    assert isinstance(pod, Pod)
    async with reading(served.http) as stream:
        await stream.until(lambda s: s["objects"]["rows"][0]["phase"] == "Pending")
        restore = await cluster.create(restore_for(pod))
        await cluster.update_status(builders.with_status(restore, state=Restore.LOADING))
        await stream.until(lambda s: s["objects"]["rows"][0]["phase"] == "Loading")
    kinds = [row["kind"] for row in stream.sections["objects"]["rows"]]
    assert kinds == ["Pod", "SnapshotRestore"]


async def test_readers_share_one_observer_and_one_too_many_is_refused(served: Served) -> None:
    async with contextlib.AsyncExitStack() as stack:
        requests = []
        for _ in range(3):
            stream = await stack.enter_async_context(reading(served.http))
            await stream.until(lambda s: "objects" in s)
            requests.append(served.requests)
        assert len(set(requests)) == 1
        async with served.http.get("/events") as refused:
            assert refused.status == 503
            assert int(refused.headers["Retry-After"]) > 0


async def test_a_reader_gets_a_beat_when_nothing_changes(served: Served) -> None:
    async with reading(served.http) as stream:
        while await stream.event() != "beat":
            pass
        assert stream.sections["now"] > 0


async def test_a_reader_that_takes_nothing_is_dropped_and_the_others_are_not_held_up(
    served: Served,
) -> None:
    for number in range(150):
        await served.cluster.create(_stored(number))
    host, port = served.url.removeprefix("http://").split(":")
    slow = socket.socket()
    # Before the connection, for its window is chosen with it: less has to be written to fill it.
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.connect((host, int(port)))
    slow.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    async with reading(served.http) as stream:
        await stream.until(lambda s: s["objects"]["all"] == 150)
        async with asyncio.timeout(PATIENCE_S):
            number = 150
            while served.view._readers > 1 or number < 160:
                await served.cluster.create(_stored(number))
                number += 1
                await stream.until(lambda s, wanted=number: s["objects"]["all"] == wanted)
    slow.close()


async def test_a_bus_that_is_gone_is_a_problem_and_what_changed_meanwhile_is_shown_afterwards(
    tmp_path: Path,
) -> None:
    async with (
        running_nats_server(tmp_path / "nats") as server,
        Served(await objects(), server.url).running() as served,
        reading(served.http) as stream,
    ):
        await stream.until(lambda s: s["problems"]["all"] == 0)
        await asyncio.to_thread(server.stop)
        await stream.until(lambda s: s["problems"]["rows"][0]["reason"] == "BusUnavailable")
        await served.cluster.create(_stored(1))
        await server.start_async()
        await stream.until(lambda s: s["problems"]["all"] == 0)
        await stream.until(lambda s: s["objects"]["all"] == 1)
