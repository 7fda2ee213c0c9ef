"""One simulated world, with the faults that a seed decides.

Nodes, a bus, operators, a store, a disk, and people who ask for things. The operator, the agents
and the GPU memory services are the product's own.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import random
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from snapshot_agent.domain.spec import ProcessSpec
from snapshot_api.kinds import KINDS, AnyObject
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_operator.core.conditions import timestamp
from snapshot_operator.core.inventory import Policy
from snapshot_operator.local import garbage
from snapshot_operator.local.controllers import CONTROLLERS, INDEXES
from snapshot_operator.local.store import SqliteStore
from snapshot_operator.ports import Event
from snapshot_operator.runtime.cluster import Cluster
from snapshot_operator.runtime.world import World as OperatorWorld
from snapshot_operator.wiring import Environment, encoded_schemas
from snapshot_operator.wiring import serve as serve_operator
from snapshot_shared import api, subjects
from snapshot_shared.bus import REQUEST_S, Handler
from snapshot_shared.clocks import Clocks
from snapshot_shared.codec import decode_json, encode_json
from snapshot_shared.errors import SnapbackError
from snapshot_shared.telemetry import Telemetry
from tests.scenario.adversary import is_tenants
from tests.scenario.builds import BUILDS, CURRENT_BUILD, Build, BuildBus
from tests.scenario.bus import Faults, SimBus, SimServer
from tests.scenario.crash_rig import mounted
from tests.scenario.disk import SimDisk
from tests.scenario.faults import Fault, Settings, act
from tests.scenario.loop import CURRENT, Machine, Process, Quiet, VirtualLoop
from tests.scenario.node import MOUNT, SimNode, owner_of
from tests.scenario.rules import Kind, Rules
from tests.scenario.store import Candidate, Lease, SimStore, at_once
from tests.scenario.worker import Habits, SimWorker
from tests.support.objects import restore_document, snapshot_document

log = logging.getLogger(__name__)

EPOCH = 1_800_000_000.0
SETTLE_S = 1800.0
"""How long after the last fault everything must be settled, in seconds of virtual time."""
JUMPED_S = 30_000.0
"""How much longer that takes when the clock of an operator was wrong, in seconds."""
REWOUND_S = 3600.0
"""How much longer when the store has forgotten a capture, whose hold then ends by itself."""
IN_FLIGHT_S = 1.0
"""How long a message may be on its way, in seconds: of before the store was restored, or of an
operator that was stopped while it sent it."""
LOOK_S = 1.0
AGAIN_S = 15.0
"""How often to look when nothing has changed, in seconds."""
CHANGING = ("apply", "delete", "verify", "abort", "cordon")
"""The requests of people that change something."""
REFUSED = ("RequestExpired", "StoreBusy", "Conflict")
"""Why a request was refused that is asked again, as a new one."""


class World:
    """Everything, for one seed."""

    def __init__(self, seed: int, settings: Settings, faults: list[Fault]) -> None:
        self.seed = seed
        self.settings = settings
        self.faults = faults
        self.rng = random.Random(seed)
        self.loop = VirtualLoop(self.rng)
        self.loop.set_exception_handler(self._unhandled)
        self.epoch = EPOCH
        self.disk = SimDisk(lambda: owner_of(CURRENT.get()), mount=str(MOUNT))
        self.disk.os.takes_direct = settings.direct
        self.rules = Rules(self)
        self.disk.on_misuse = self.rules.misused
        self.notes: list[str] = []
        self.has_flipped_bits = False
        self.unknown: dict[str, bool] = {}
        """Files that nobody asked for, by their path below the root; whether they must be moved."""
        self.is_over = False
        self.is_healed = False
        self.network = Faults(self.rng, slowest_s=settings.latency_s)
        self.network.repeated = settings.duplicates
        self.network.postponed = settings.duplicates
        self.network.lost_answers = settings.lost_answers
        self.network.lost_requests = settings.lost_answers
        self.network.lost_announcements = settings.lost_news
        self.server = _Server(self.rules, settings.room)
        self.buses: dict[str, SimBus] = {}
        self.store = SqliteStore(
            None, timestamp=lambda: timestamp(self.wall), new_uid=self.new_uid
        ).open()
        self.store.subscribe(self._stored)
        self.stores: dict[Process, SimStore] = {}
        self.apart: set[str] = set()
        """The operators, by name, that reach neither the store nor the lease."""
        self.lease = Lease(self)
        self.version = 0
        self.is_rewound = False
        self.rewound_at = -IN_FLIGHT_S
        self.is_clock_wrong = False
        self.is_crowded = any(fault.kind in ("flood", "crowd") for fault in faults)
        self.refused = 0
        """How many sessions were refused to clients that had more than their share."""
        self._copies: dict[Fault, bytes] = {}
        self.machines = [Machine(f"operator-{index}") for index in range(settings.operators)]
        self.operators: list[Process | None] = [None] * settings.operators
        self.nodes = [
            SimNode(
                self,
                f"node-{index}",
                rate=settings.rates[index % len(settings.rates)],
                build=BUILDS[settings.builds[index % len(settings.builds)]],
            )
            for index in range(settings.nodes)
        ]

    @property
    def wall(self) -> float:
        """The time of a clock that is right, in seconds since the epoch."""
        return EPOCH + self.loop.now

    @property
    def has_just_rewound(self) -> bool:
        """Whether messages may arrive that were sent before the store was restored."""
        return self.loop.now < self.rewound_at + IN_FLIGHT_S

    @property
    def has_just_resumed(self) -> bool:
        """Return whether an operator may send an order that it decided on before it was stopped.

        Another operator may have led meanwhile. The nodes refuse the older attempt.
        """
        running = [operator for operator in self.operators if operator is not None]
        return any(self.loop.now < operator.resumed_at + IN_FLIGHT_S for operator in running)

    def is_apart(self, process: Process) -> bool:
        return process.name in self.apart

    def node(self, name: str) -> SimNode:
        return next(node for node in self.nodes if node.name == name)

    def read(self, path: str) -> bytes:
        """Read a file of the disk as it is. OSError."""
        content = self.disk.image[self.disk.os.find(path)]
        return bytes(content) if isinstance(content, bytearray) else b""

    def note(self, line: str) -> None:
        self.notes.append(f"{self.loop.now:9.3f} {line}")

    def new_uid(self) -> str:
        return str(uuid.UUID(int=self.rng.getrandbits(128), version=4))

    def _stored(self, event: Event) -> None:
        self.version += 1
        self.rules.changed(event.change, event.value)
        for store in list(self.stores.values()):
            store.stored(event)

    def bus(self, name: str, process: Process, build: Build = CURRENT_BUILD) -> Any:
        """Connect a process; the server learns of its end."""
        return self._joined(BuildBus(self.server, name, faults=self.network), process, build)

    def _joined(self, bus: BuildBus, process: Process, build: Build) -> BuildBus:
        self.buses[process.name] = bus
        bus.build = build
        process.at_exit(bus, lambda: self.server.drop_client(bus))
        return bus

    def partition(self, name: str, seconds: float) -> None:
        if bus := self.buses.get(name):
            self.server.cut(bus)
            self.loop.in_world(seconds, self.server.heal, bus)

    def habits_of(self, spec: ProcessSpec) -> Habits:
        return self.settings.habits.get(spec.env["POD_NAME"], Habits())

    def workers(self) -> Iterator[SimWorker]:
        """Give every worker that lives."""
        for node in self.nodes:
            for worker in node.workers.values():
                if worker.process.is_alive:
                    yield worker

    def ended(self, process: Process, task: asyncio.Task[None]) -> None:
        """Note how a service's main task ended; it is a crash, and it is started again."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.note(f"{process} ended: {error!r}")
        process.kill(1)

    def defect(self, task: asyncio.Task[None]) -> None:
        """Note that a part of the world itself is broken."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.rules.fail("defect", f"{task.get_name()}: {error!r}")

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not self.is_over and error is not None:
            self.rules.fail("defect", f"{context['message']}: {error!r}")

    def stop(self) -> None:
        self.is_over = True
        self.loop.call_soon(self.loop.stop)

    # Operators.

    def start_operator(self, index: int) -> None:
        """Start one operator; it is started again whenever it ends."""
        process = Process(self.loop, self.machines[index], f"operator-{index}")
        self.operators[index] = process
        delay = 0.5 + self.rng.random() * self.settings.restart_s
        process.at_exit("again", lambda: self.loop.in_world(delay, self.start_operator, index))
        task = process.spawn(self._operator(process), "operator")
        task.add_done_callback(lambda done: self.ended(process, done))

    async def _operator(self, process: Process) -> None:
        """Be one operator: stand by until it is the active one, and serve while it is."""
        machine = process.machine
        clocks = Clocks(
            lambda: self.loop.now,
            lambda: EPOCH + self.loop.now + machine.jump,
            machine.boot_id,
        )
        bus = _OperatorBus(self, process)
        self._joined(bus, process, CURRENT_BUILD)
        environment = Environment(
            bus=bus,
            telemetry=Telemetry("snap-operator", "operator", "0"),
            clocks=clocks,
            jitter=self.rng.random,
            new_id=self.new_uid,
            # No age protects anything here: what is known must be enough.
            policy=Policy(self.settings.quarantine, after_s=0.0),
            is_mirrored=self.settings.mirrored,
        )
        await bus.connect_and_ensure()
        async with Candidate(self, process).held() as lost:
            process.on_term = lost.set
            cluster = Cluster(SimStore(self, process), INDEXES)
            await serve_operator(
                lost, cluster, OperatorWorld(CONTROLLERS, garbage.collect), environment
            )

    def copy_store(self, fault: Fault) -> None:
        """Copy the store, for a fault that brings it back later."""
        self._copies[fault] = self.store._db.serialize()

    def rewind(self, fault: Fault) -> None:
        """Restore the store from an older copy of it, as people do: with no operator running."""
        for operator in self.operators:
            if operator is not None:
                operator.kill()
        self.store._db.deserialize(self._copies[fault])
        self.is_rewound = True
        # What a server without a leader has not answered yet arrives after the stall.
        self.rewound_at = max(self.loop.now, self.server.stalled_until)
        self.version += 1
        self.rules.rewound(self._everything())

    # People.

    async def ask_for(self, verb: str, request: Any, reply: Any, *refused: str) -> Any:
        """Ask the operator until it answers, and again while it refuses for one of these reasons.

        Each time is a new request: nobody waits for the earlier ones any more.
        """
        while True:
            headers = api.age_headers(self.wall, REQUEST_S)
            try:
                data = await self.user.request(
                    subjects.api(verb), encode_json(request), headers=headers
                )
                answer = decode_json(data, reply)
            except SnapbackError:
                await asyncio.sleep(1.0)
                continue
            failure = answer.failure
            if failure is None or failure.reason not in (*REFUSED, *refused):
                return answer
            await asyncio.sleep(5.0)

    async def apply(self, *documents: dict[str, Any], nested: bytes = b"") -> None:
        """Apply manifests together; `nested` is what stands for each value "nested" in them."""
        texts = [json.dumps(document).encode() for document in documents]
        request = api.ApplyRequest(
            documents=[msgspec.Raw(text.replace(b'"nested"', nested)) for text in texts]
        )
        reply = await self.ask_for("apply", request, api.ApplyReply)
        if reply.failure is not None:
            names = ", ".join(document["metadata"]["name"] for document in documents)
            self.note(f"apply {names}: {reply.failure}")

    async def delete(self, kind: str, name: str) -> None:
        """Delete the object that has this name now; a Node only when it has been away for long."""
        space = None if kind == "Node" else "default"
        reading = api.GetRequest(kind=kind, namespace=space, name=name)
        found = await self.ask_for("get", reading, api.GetReply)
        reply = found
        if found.failure is None:
            uid = found.items[0]["metadata"]["uid"]
            request = api.DeleteRequest(kind=kind, namespace=space, name=name, uid=uid)
            reply = await self.ask_for("delete", request, api.DeleteReply, "Forbidden")
        self.note(f"delete {kind} {name}: {reply.failure or 'ok'}")

    async def verify(self, kind: str, name: str) -> None:
        request = api.VerifyRequest(kind=kind, namespace="default", name=name)
        reply = await self.ask_for("verify", request, api.VerifyReply)
        self.note(f"verify {kind} {name}: {reply.failure or reply.verification}")

    async def abort(self, kind: str, name: str) -> None:
        """Ask for a capture to be ended."""
        request = api.AbortRequest(kind=kind, namespace="default", name=name, by="people@desk")
        reply = await self.ask_for("abort", request, api.AbortReply)
        self.note(f"abort {kind} {name}: {reply.failure or reply.capture}")

    async def import_(self, at: float) -> None:
        """Note what is captured; name the first of it again at a time, and restore from it."""
        reading = api.GetRequest(kind="SnapshotContent")
        found = await self.ask_for("get", reading, api.GetReply)
        captured = [
            content
            for content in (decode_json(encode_json(i), SnapshotContent) for i in found.items)
            if content.status.committed is not None
        ]
        await asyncio.sleep(max(at - self.loop.now, 0.0))
        for content in captured[:1]:
            await self.apply(_naming(content), restore_document("imported", "from-import", gpus=1))

    async def cordon(self, until: float, node: str) -> None:
        """Let nothing new begin on a node until a time, or as long as the operator is not there."""
        for unschedulable in (True, False):
            request = api.CordonRequest(node=node, unschedulable=unschedulable)
            reply = await self.ask_for("cordon", request, api.CordonReply)
            self.note(f"cordon {node} {unschedulable}: {reply.failure or reply.changed}")
            await asyncio.sleep(max(until - self.loop.now, 0.0))

    # The run.

    def run(self) -> list[str]:
        """Live through it all; the broken rules."""
        asyncio.set_event_loop(None)
        # The collector would end what is forgotten at moments that no seed decides.
        gc.disable()
        try:
            self.loop.run_until_complete(self._main())
        except Quiet:
            self.rules.fail("lost", "nothing can happen any more")
        except RuntimeError as error:
            if not self.is_over:
                raise
            log.debug("%s", error)
        finally:
            self.is_over = True
            with mounted(self.disk):
                self.loop.bury()
            self.store.close()
            self.loop.close()
            gc.enable()
        return self.rules.broken

    async def _main(self) -> None:
        with mounted(self.disk):
            for index in range(self.settings.operators):
                self.start_operator(index)
            for node in self.nodes:
                node.boot()
            self.people = Process(self.loop, Machine("desk"), "people")
            self.user = self.bus("people", self.people)
            await self.people.spawn(self.user.connect())
            self._people_act()
            for fault in self.faults:
                self.loop.in_world(fault.at, act, self, fault)
                if fault.kind == "rewind":
                    self.loop.in_world(fault.at * fault.amount, self.copy_store, fault)
            await self._until(self.settings.fault_s)
            self.heal()
            await self._settle()

    def _people_act(self) -> None:
        """Have people do what they do, each at its time."""
        settings = self.settings
        asked: tuple[tuple[Callable[..., Any], tuple[tuple[Any, ...], ...]], ...] = (
            (self.apply, settings.applied),
            (self.delete, settings.deleted),
            (self.verify, settings.verified),
            (self.abort, settings.aborted),
            (self.import_, settings.imported),
            (self.cordon, settings.cordoned),
        )
        for work, rows in asked:
            for at, *arguments in rows:
                self._later(at, work, *arguments)

    def _later(self, delay_s: float, work: Callable[..., Any], *arguments: Any) -> None:
        self.loop.in_world(delay_s, lambda: self.people.spawn(work(*arguments)))

    def ask_to_delete(self, delay_s: float, kind: str, name: str) -> None:
        self._later(delay_s, self.delete, kind, name)

    async def _until(self, end: float) -> None:
        while self.loop.now < end:
            await asyncio.sleep(LOOK_S)
            self.rules.look()

    def heal(self) -> None:
        """End every fault: what was away comes back, and nothing more breaks."""
        self.note("healed")
        self.network.repeated = self.network.postponed = 0.0
        self.network.lost_answers = self.network.lost_requests = 0.0
        self.network.lost_announcements = 0.0
        if not self.server.is_up:
            self.server.restart()
        for bus in self.buses.values():
            self.server.heal(bus)
        self.disk.heal()
        self.is_healed = True
        self.apart.clear()
        for machine in self.machines:
            machine.jump = 0.0
        for node in self.nodes:
            node.heal()
        for operator in self.operators:
            if operator is not None:
                operator.fuse = None
                operator.resume()

    async def _settle(self) -> None:
        """Wait until nothing is left to do, and nothing is left behind."""
        within_s = SETTLE_S
        within_s += JUMPED_S if self.is_clock_wrong else 0.0
        within_s += REWOUND_S if self.is_rewound else 0.0
        end = self.loop.now + within_s
        left: list[tuple[Kind, str]] = [("lost", "nothing was looked at")]
        seen, again_at = -1, 0.0
        while left and not self.is_over:
            await asyncio.sleep(LOOK_S)
            self.rules.look()
            if seen == self.version and self.loop.now < again_at:
                continue
            seen, again_at = self.version, self.loop.now + AGAIN_S
            # What is wrong with the objects of the adversary is the work of the adversary.
            values = [each for each in self.rules.present() if not is_tenants(each)]
            left = [("lost", line) for line in self.rules.unsettled(values)]
            left = left or list(self.rules.left_behind(values))
            if self.loop.now > end:
                for kind, line in left:
                    self.rules.fail(kind, f"{within_s} s after the last fault: {line}")
        self._check_events()

    def _check_events(self) -> None:
        """What the store has reported is what it holds."""
        held = {value.metadata.uid: value for value in self._everything()}
        if held != {value.metadata.uid: value for value in self.rules.present()}:
            self.rules.fail("defect", "what was reported of the store is not what it holds")

    def _everything(self) -> list[AnyObject]:
        return [value for kind in KINDS for value in at_once(self.store.list(kind))]


class _OperatorBus(BuildBus):
    """The bus of an operator; no request is carried out that its client does not wait for."""

    def __init__(self, world: World, process: Process) -> None:
        super().__init__(world.server, process.name, faults=world.network)
        self._world = world
        self._process = process

    async def serve(
        self, name: str, version: str, metadata: Mapping[str, str], endpoints: Mapping[str, Handler]
    ) -> None:
        def watched(subject: str, handler: Handler) -> Handler:
            async def answer(data: bytes, headers: Mapping[str, str]) -> bytes:
                is_late = self._is_late(headers)
                reply = await handler(data, headers)
                if is_late and b'"failure":' not in reply:
                    what = f"{self._process} carried out {subject} for nobody: {data!r}"
                    self._world.rules.fail("stale", what)
                return reply

            return answer

        changing = {subjects.api(verb) for verb in CHANGING}
        watching = {
            subject: watched(subject, handler) if subject in changing else handler
            for subject, handler in endpoints.items()
        }
        await super().serve(name, version, metadata, watching)

    def _is_late(self, headers: Mapping[str, str]) -> bool:
        """Whether a request has outlived its client's wait, as far as right clocks can say."""
        if self._process.machine.jump:
            return False
        return self._world.wall > float(headers[api.ASKED_AT]) + float(headers[api.WITHIN])


class _Server(SimServer):
    """A server whose streams are looked at."""

    def __init__(self, rules: Rules, room: int) -> None:
        super().__init__()
        self._rules = rules
        self._room = room
        self._has_schemas = False

    def ensure(self) -> None:
        super().ensure()
        if not self._has_schemas:
            # An operator has been here before, so that the first of this world need not put them.
            self._has_schemas = True
            bucket = subjects.SCHEMAS_BUCKET
            for key, schema in encoded_schemas().items():
                self.streams[f"KV_{bucket}"].store(f"$KV.{bucket}.{key}", schema, {}, self.now)
        if self._room:
            orders = self.streams[subjects.ORDERS]
            orders.config = orders.config.evolve(max_msgs=self._room)

    def publish(self, subject: str, data: bytes, headers: Mapping[str, str]) -> int:
        sequence = super().publish(subject, data, headers)
        self._rules.published(subject, data)
        return sequence

    def ack(self, name: str, durable: str, sequence: int) -> None:
        super().ack(name, durable, sequence)
        if message := self.stream(name).messages.get(sequence):
            self._rules.acked(message.subject, message.data)


def _naming(content: SnapshotContent) -> dict[str, Any]:
    """Return a snapshot that imports the artifact of a content, and leaves it when it goes."""
    committed = content.status.committed
    assert committed is not None
    artifact = {
        "contentUID": content.metadata.uid,
        "generation": committed.generation,
        "rootDigest": committed.root_digest,
    }
    source = {"artifact": artifact}
    return snapshot_document(
        "imported", source=source, deletionPolicy="Retain", deadlineSeconds=120
    )
