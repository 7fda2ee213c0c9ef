"""A real operator and a real page, on a real nats-server with the product's users.

The nodes are played by the test, over their own keys. So each state of the page can be had at once,
and what the page needs is proven to be permitted to a viewer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec

from snapshot_api.facts import Node
from snapshot_operator.core.conditions import timestamp
from snapshot_operator.core.presence import node_absent, node_from
from snapshot_operator.local.store import SqliteStore
from snapshot_shared import subjects
from snapshot_shared.api import ApplyReply, ApplyRequest
from snapshot_shared.bus import Bus
from snapshot_shared.codec import decode_json, encode_json
from snapshot_shared.errors import Failure, NotFound
from snapshot_shared.ids import NodeName, OrderId, token
from snapshot_shared.orders import (
    TERMINAL,
    DeadLetter,
    PartResult,
    Presence,
    PresenceDevice,
    Progress,
    Report,
)
from snapshot_shared.permissions import User, users_of
from snapshot_shared.spans import SpanRecord
from snapshotctl.adapters.inotify import appears
from tests.support.builders import vector
from tests.support.keyed_server import KeyedServer, keyed_server
from tests.support.objects import checkpoint_document, pod_template, restore_document

GIB = 1024**3
DIGEST = "sha256:" + "0" * 64
PATIENCE_S = 30.0
PRESENCE_EVERY_S = 10.0
LOST = "node-4"
PAUSED_S = 0.064
PRODUCT = "NVIDIA H100 80GB HBM3"


def device_uuid(node: str, index: int) -> str:
    """Return the uuid of a played device, in the form that NVIDIA's driver gives."""
    return f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{node}.{index}')}"


class PlayedNode:
    """One node: what its agent and its GPU memory service publish and answer."""

    def __init__(self, name: str, agent: Bus, gms: Bus, product: str, gpus: int) -> None:
        self.name = NodeName(name)
        self.agent = agent
        self.gms = gms
        self.devices = [
            PresenceDevice(
                index=index,
                uuid=device_uuid(name, index),
                product=product,
                capacity_bytes=80 * GIB,
            )
            for index in range(gpus)
        ]
        self.version = "0.1.0"
        self.used = [0] * gpus
        self.sessions = [0] * gpus

    async def appear(self) -> None:
        presence = Presence(
            node=self.name,
            boot_id="boot",
            version="0.1.0",
            devices=self.devices,
            drivers=["cooperative"],
            artifact_root="/artifacts",
            free_bytes=1536 * GIB,
            slots=2,
            at=time.time(),
        )
        await self.agent.put(subjects.NODES_BUCKET, token(self.name), encode_json(presence))

    async def status(self, _data: bytes, _headers: Any) -> bytes:
        devices = [
            {
                "uuid": device.uuid,
                "index": device.index,
                "product": device.product,
                "endpoint": f"{self.name}-gpu{device.index}",
                "capacity": device.capacity_bytes,
                "used": used,
                "free": device.capacity_bytes - used,
                "retired": 0,
                "domains": [
                    {
                        "domain": "weights",
                        "lock": "RO",
                        "sessions": [
                            {
                                "session": n,
                                "access": "RO",
                                "client": "engine",
                                "pid": 100 + n,
                                "state": "active",
                            }
                            for n in range(sessions)
                        ],
                    }
                ],
            }
            for device, used, sessions in zip(self.devices, self.used, self.sessions, strict=True)
        ]
        return encode_json(
            {"node": self.name, "incarnation": "one", "devices": devices, "version": self.version}
        )


class PageWorld:
    """The page at `url`, and the means to have things happen on it.

    The bytes of a capture or a restore take `pace_s` seconds.
    """

    def __init__(self, server: KeyedServer, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.url = ""
        self.pace_s = 0.0
        self.nodes: dict[str, PlayedNode] = {}
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._orders: dict[tuple[str, int], dict[str, Any]] = {}
        self._news = asyncio.Condition()
        self._numbers: dict[tuple[str, int], int] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._cli: Bus | None = None

    @property
    def log(self) -> str:
        logs = sorted(self.folder.glob("*.log"))
        return "".join(file.read_text("utf-8", "replace") for file in logs)

    async def start(self, **settings: str) -> None:
        await (await self.server.root()).ensure_assets()
        self._cli = await self.server.bus(User("snapshotctl"))
        self._tasks.append(asyncio.create_task(self._collect()))
        await self.start_operator()
        await self.start_page(**settings)

    async def start_operator(self) -> None:
        environment = {
            "SNAPBACK_NATS_URL": self.server.url,
            "SNAPBACK_NATS_CREDENTIALS": self.server.seed(User("operator")),
            "SNAPBACK_STATE_DIR": str(self.folder / "operator"),
        }
        await self._start("operator", "snapshot_operator.main", environment)

    async def start_page(self, **settings: str) -> None:
        file = self.folder / "address"
        file.unlink(missing_ok=True)
        environment = {
            "SNAPBACK_NATS_URL": self.server.url,
            "SNAPBACK_NATS_CREDENTIALS": self.server.seed(User("viewer")),
            "SNAPBACK_HTTP_ADDRESS": "127.0.0.1:0",
            "SNAPBACK_PAGE_FILE": str(file),
            "SNAPBACK_NATS_CONTEXT": "snapback-default",
            **settings,
        }
        await self._start("page", "snapshot_page.main", environment)
        async with asyncio.timeout(PATIENCE_S):
            await appears(file)
        self.url = file.read_text().strip()

    async def _start(self, name: str, module: str, environment: dict[str, str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = await asyncio.create_subprocess_exec(
                sys.executable, "-m", module, env={**os.environ, **environment}, stderr=log
            )

    async def stop(self, name: str) -> int:
        """End the `operator` or the `page`."""
        process = self._processes.pop(name)
        process.terminate()
        return await process.wait()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for name in list(self._processes):
            await self.stop(name)

    # What people do.

    async def apply(self, *documents: dict[str, Any]) -> None:
        assert self._cli is not None
        raw = [msgspec.Raw(msgspec.json.encode(document)) for document in documents]
        trace = f"00-{os.urandom(16).hex()}-{os.urandom(8).hex()}-01"
        request = encode_json(ApplyRequest(documents=raw, traceparent=trace))
        async with asyncio.timeout(PATIENCE_S):
            while True:
                with contextlib.suppress(NotFound):
                    reply = await self._cli.request(subjects.api("apply"), request)
                    break
                await asyncio.sleep(0.05)
        found = decode_json(reply, ApplyReply)
        assert found.failure is None, found.failure

    # What nodes do.

    async def join(self, name: str, *, gpus: int = 2, product: str = PRODUCT) -> PlayedNode:
        agent = await self.server.bus(User("agent", NodeName(name)))
        gms = await self.server.bus(User("gms", NodeName(name)))
        node = PlayedNode(name, agent, gms, product, gpus)
        self.nodes[name] = node
        question = subjects.rpc(node.name, "gms", "status")
        await gms.serve("snap-gms", "0.1.0", {"node": name}, {question: node.status})
        self._tasks.append(asyncio.create_task(self._present(node)))
        await node.appear()
        return node

    async def _present(self, node: PlayedNode) -> None:
        while True:
            await asyncio.sleep(PRESENCE_EVERY_S)
            await node.appear()

    async def _collect(self) -> None:
        root = await self.server.root()
        async with root.listening("snap.order.>") as received:
            while True:
                delivery = await received.get()
                order = msgspec.json.decode(delivery.data)
                if isinstance(order, dict) and "order" in order:
                    order["service"] = delivery.subject.split(".")[3]
                    async with self._news:
                        self._orders[(order["order"], order["attempt"])] = order
                        self._news.notify_all()

    async def order(
        self, verb: str, wanted: Callable[[dict[str, Any]], bool] = lambda _: True
    ) -> dict[str, Any]:
        """Wait for an order that was not taken yet, and take it."""

        def found() -> tuple[str, int] | None:
            return next(
                (
                    key
                    for key, order in self._orders.items()
                    if key[0].startswith(f"{verb}-") and wanted(order)
                ),
                None,
            )

        async with asyncio.timeout(PATIENCE_S), self._news:
            while (key := found()) is None:
                await self._news.wait()
            return self._orders.pop(key)

    async def report(self, order: dict[str, Any], kind: str, **fields: Any) -> None:
        key = (order["order"], order["attempt"])
        self._numbers[key] = self._numbers.get(key, 0) + 1
        report = Report(
            order=key[0],
            attempt=key[1],
            n=self._numbers[key],
            kind=kind,  # type: ignore[arg-type]
            node=order["node"],
            service=order["service"],
            at=time.time(),
            **fields,
        )
        subject = subjects.report(order["node"], OrderId(key[0]), kind)
        await self._bus(order).publish(subject, encode_json(report))

    def _bus(self, order: dict[str, Any]) -> Bus:
        """The bus of the service that carries an order out."""
        node = self.nodes[order["node"]]
        return node.agent if order["service"] == "agent" else node.gms

    async def done(self, order: dict[str, Any], **fields: Any) -> None:
        """Accept an order and end it well."""
        await self.report(order, "accepted")
        await self.report(order, TERMINAL[order["order"].partition("-")[0]], **fields)

    async def fail(self, order: dict[str, Any], failure: Failure) -> None:
        await self.report(order, "accepted")
        await self.report(order, "failed", failure=failure)

    async def progress(self, order: dict[str, Any], step: str, done: int, total: int) -> None:
        message = Progress(
            order=order["order"],
            attempt=order["attempt"],
            node=order["node"],
            part=order.get("part", "process"),
            step=step,
            done=done,
            total=total,
            at=time.time(),
        )
        subject = subjects.progress(order["node"], OrderId(order["order"]))
        await self._bus(order).publish(subject, encode_json(message))

    async def span(
        self, order: dict[str, Any], name: str, start: float, seconds: float, **fields: Any
    ) -> None:
        """Publish a finished span below an order; `start` is seconds since the epoch."""
        _, trace, parent, _ = order["traceparent"].split("-")
        span = SpanRecord(
            trace_id=trace,
            span_id=os.urandom(8).hex(),
            parent_id=parent,
            name=name,
            service=f"snap-{order['service']}",
            node=order["node"],
            start_ns=int(start * 1e9),
            end_ns=int((start + seconds) * 1e9),
            **fields,
        )
        await self._bus(order).publish(subjects.span(order["node"], trace), encode_json(span))

    async def dead_message(self, node: str, subject: str, failure: Failure) -> None:
        message = DeadLetter(
            subject=subject,
            node=node,
            service="agent",
            sequence=7,
            at=time.time(),
            failure=failure,
            payload=b"TOP-SECRET",
        )
        bus = self.nodes[node].agent
        await bus.publish(subjects.dead(NodeName(node)), encode_json(message))

    # Whole stories.

    async def run_worker(self) -> dict[str, Any]:
        order = await self.order("run")
        await self.done(order)
        if not order.get("standby"):
            await self.report(order, "ready")
        return order

    async def prepare(self, bytes_a_gpu: int) -> list[dict[str, Any]]:
        """Carry a capture on to its saves and give them, leased; its process part is staged."""
        order = await self.order("prepare")
        await self.report(order, "accepted")
        await self.report(order, "prepared", vector=vector(order["devices"], bytes_a_gpu))
        began = time.time()
        await self.span(order, "quiesce", began - 0.08, 0.05)
        dump = await self.order("dump")
        saves = [await self.order("save") for _ in order["devices"]]
        for save in saves:
            await self.report(save, "accepted")
            await self.report(save, "leased")
        part = PartResult(part="process", bytes=3 * 2**20, digest=DIGEST)
        await self.done(dump, part=part)
        await self.span(dump, "freeze", began, 0.01)
        await self.span(dump, "copy-state", began + 0.01, 0.06)
        await self.span(dump, "thaw", began + 0.07, 0.01)
        return saves

    async def capture(self, bytes_a_gpu: int = 14 * GIB) -> None:
        await self.run_worker()
        saves = await self.prepare(bytes_a_gpu)
        await self.done(await self.order("release"), paused_s=PAUSED_S)
        await asyncio.sleep(self.pace_s)
        for save in saves:
            part = PartResult(part=save["part"], bytes=bytes_a_gpu, digest=DIGEST)
            await self.report(save, "staged", part=part)
        seal = await self.order("seal")
        await self.done(seal, root_digest=DIGEST, bytes=bytes_a_gpu * len(saves))

    async def restore(self, failure: Failure | None = None) -> None:
        """Play a restore, up to its end or to a load that fails."""
        await self.run_worker()
        loads = [await self.order("load") for _ in range(2)]
        await asyncio.sleep(self.pace_s)
        for load in loads:
            if failure is not None:
                await self.fail(load, failure)
            else:
                await self.done(load, bytes=load["bytes"])
        if failure is not None:
            return
        for _ in loads:
            await self.done(await self.order("commit"))
        await self.done(await self.order("restore"))


def checkpoint(name: str, *, node: str = "node-1", model: str = "", **meta: Any) -> dict[str, Any]:
    template = pod_template(env=[{"name": "API_KEY", "value": "TOP-SECRET"}])
    template["spec"]["nodeSelector"] = {"kubernetes.io/hostname": node}
    document = checkpoint_document(name, model=model, podTemplateSpec=template)
    document["metadata"] |= meta
    return document


def restored(name: str, source: str, node: str = "node-2") -> dict[str, Any]:
    spec = checkpoint(name, node=node)["spec"]["job"]["podTemplateSpec"]["spec"]
    return restore_document(source, name) | {"spec": spec}


async def lose_node(folder: Path) -> None:
    """Write into the store of an operator that does not run that it has lost a node."""
    (folder / "operator").mkdir(mode=0o700, parents=True, exist_ok=True)
    now = time.time() - 600
    path = folder / "operator" / "objects.sqlite"
    store = SqliteStore(path, timestamp=lambda: timestamp(now)).open()
    device = PresenceDevice(
        index=0, uuid=device_uuid(LOST, 0), product=PRODUCT, capacity_bytes=80 * GIB
    )
    presence = Presence(node=LOST, boot_id="boot", version="0.1.0", devices=[device], at=now)
    node = await store.create(node_from(presence, None, now))
    assert isinstance(node, Node)
    await store.update_status(node_absent(node, 95.0, now))
    store.close()


@contextlib.asynccontextmanager
async def page_world(folder: Path, **settings: str) -> AsyncIterator[PageWorld]:
    """Run an operator and a page; the nodes are node-1 to node-3, once they join."""
    users = users_of([NodeName(f"node-{number}") for number in (1, 2, 3)])
    async with keyed_server(folder, users) as server:
        world = PageWorld(server, folder)
        try:
            await world.start(**settings)
            yield world
        finally:
            await world.close()
