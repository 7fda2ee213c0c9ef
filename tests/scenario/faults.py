"""What a seed decides: how the world is set up, what people ask for, and what goes wrong when.

A fault is a value, so that a list of them can be printed, shortened and run again.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from snapshot_api.views import orders_of
from snapshot_shared import files, subjects
from snapshot_shared.artifact import ROOT_MANIFEST
from snapshot_shared.errors import ArtifactExists
from snapshot_shared.orders import CLEANING
from tests.scenario.adversary import forge, thieves
from tests.scenario.builds import BUILDS
from tests.scenario.gpu import begin_crowd, begin_flood
from tests.scenario.node import MOUNT, SHARED
from tests.scenario.worker import Habits
from tests.support.objects import (
    checkpoint_document,
    pod_document,
    pod_template,
    restore_document,
    snapshot_document,
)

if TYPE_CHECKING:
    from tests.scenario.loop import Process
    from tests.scenario.world import World

FAULT_S = 40.0
"""How long things go wrong, in seconds."""


class Fault(msgspec.Struct, frozen=True):
    """Something that goes wrong at a time: to whom, for how long or how much."""

    at: float
    kind: str
    target: str = ""
    amount: float = 0.0

    def __str__(self) -> str:
        return f"{self.at:7.3f} {self.kind} {self.target} {self.amount:.3f}".rstrip()


class Settings(msgspec.Struct, frozen=True):
    """How a world is set up. `room` is how many orders fit into their stream, 0 for the usual.

    `stale_s` is how late an operator may hear of what was written into the store, at most. One
    operator is the active one by a lock of a file, or by a lease that can be lost. `builds` are the
    versions of the nodes. Without `mirrored` and `direct` a world does less, and so is faster.
    """

    nodes: int = 2
    operators: int = 1
    rates: tuple[float, ...] = (1.0, 1.0, 1.0)
    restart_s: float = 1.0
    fault_s: float = FAULT_S
    conflicts: float = 0.0
    store_errors: float = 0.0
    lost_news: float = 0.0
    stale_s: float = 0.0
    lease: Literal["file", "lease"] = "file"
    builds: tuple[str, ...] = ("current",)
    latency_s: float = 0.002
    duplicates: float = 0.0
    lost_answers: float = 0.0
    room: int = 0
    mirrored: bool = True
    direct: bool = True
    quarantine: Literal["incomplete", "all"] = "incomplete"
    habits: dict[str, Habits] = {}
    applied: tuple[tuple[Any, ...], ...] = ()
    """When which manifests are applied together."""
    deleted: tuple[tuple[float, str, str], ...] = ()
    verified: tuple[tuple[float, str, str], ...] = ()
    aborted: tuple[tuple[float, str, str], ...] = ()
    imported: tuple[tuple[float, float], ...] = ()
    """When somebody notes what is captured, and when one of that is named again."""
    cordoned: tuple[tuple[float, float, str], ...] = ()
    """When a node is cordoned, and when it is uncordoned again."""


def settings_of(seed: int) -> Settings:
    """Decide the world of a seed."""
    rng = random.Random(f"settings {seed}")
    nodes = rng.choice((2, 2, 3))
    is_bad = rng.random() < 0.5
    names = ["a", "b"][: rng.choice((1, 1, 2))]
    applied: list[tuple[Any, ...]] = [*_together(seed), *thieves(seed)]
    deleted: list[tuple[float, str, str]] = []
    habits: dict[str, Habits] = {}
    alike = _alike(seed)
    for name in names:
        checkpoint = _checkpoint(name, rng)
        applied.append((rng.random() * 3, alike(checkpoint)))
        habits[name] = _habits(rng)
        for index in range(rng.choice((0, 1, 1, 2))):
            pod = f"{name}-restored-{index}"
            applied.append((rng.random() * 30, _restore(pod, name, rng, nodes)))
            if rng.random() < 0.25:
                deleted.append((5 + rng.random() * 50, "Pod", pod))
        if rng.random() < 0.25:
            applied.append((5 + rng.random() * 30, _snapshot(f"{name}-again", name)))
        if rng.random() < 0.3:
            deleted.append((2 + rng.random() * 50, "DynamoCheckpoint", name))
        if rng.random() < 0.15:
            deleted.append((2 + rng.random() * 50, "Snapshot", name))
    stale = random.Random(f"stale {seed}")
    stale_s = stale.choice((0.0, 0.0, 0.2, 3.0))
    operators = rng.choice((1, 1, 2))
    return Settings(
        nodes=nodes,
        operators=2 if stale_s and stale.random() < 0.5 else operators,
        stale_s=stale_s,
        lease=random.Random(f"lease {seed}").choice(("file", "lease")),
        builds=_builds(seed, nodes),
        rates=tuple(rng.choice((1.0, 1.0, 0.5, 2.0)) if is_bad else 1.0 for _ in range(nodes)),
        restart_s=rng.choice((0.2, 1.0, 10.0)),
        conflicts=rng.choice((0.0, 0.0, 0.05)),
        store_errors=rng.choice((0.0, 0.0, 0.002)),
        lost_news=rng.choice((0.0, 0.0, 0.1)),
        latency_s=rng.choice((0.0005, 0.002, 0.05)),
        duplicates=rng.choice((0.0, 0.0, 0.1)),
        lost_answers=rng.choice((0.0, 0.0, 0.02)),
        room=random.Random(f"room {seed}").choice((0, 0, 0, 0, 2)),
        mirrored=seed % 4 == 0,
        direct=seed % 4 == 1,
        quarantine=random.Random(f"quarantine {seed}").choice(("incomplete", "all")),
        habits=habits,
        applied=tuple(applied),
        deleted=tuple(deleted),
        verified=tuple(_verifications(seed, names)),
        aborted=tuple(_aborts(seed, names)),
        imported=tuple(_imports(seed)),
        cordoned=tuple(_cordons(seed, nodes)),
    )


def together() -> list[dict[str, Any]]:
    """Return a worker, a snapshot of it, and a pod that is restored from that."""
    return [
        pod_document("t", gpus=1),
        _snapshot("t", "t"),
        restore_document("t", "t-restored", gpus=1),
    ]


def _together(seed: int) -> Iterator[tuple[Any, ...]]:
    """In one world of five they are applied at once, in any order."""
    rng = random.Random(f"together {seed}")
    if rng.random() < 0.2:
        documents = together()
        rng.shuffle(documents)
        yield rng.random() * 10, *documents


def _builds(seed: int, nodes: int) -> tuple[str, ...]:
    """Two worlds of five have nodes of several versions."""
    rng = random.Random(f"builds {seed}")
    if rng.random() < 0.6:
        return ("current",)
    return tuple(rng.choice(("current", "older", "newer", "newer", "next")) for _ in range(nodes))


def _aborts(seed: int, names: list[str]) -> Iterator[tuple[float, str, str]]:
    rng = random.Random(f"aborts {seed}")
    for name in names:
        if rng.random() < 0.2:
            yield rng.random() * 20, rng.choice(("DynamoCheckpoint", "Snapshot")), name


def _imports(seed: int) -> Iterator[tuple[float, float]]:
    rng = random.Random(f"imports {seed}")
    if rng.random() < 0.3:
        noted = 5 + rng.random() * 30
        yield noted, noted + rng.random() * 30


def _cordons(seed: int, nodes: int) -> Iterator[tuple[float, float, str]]:
    rng = random.Random(f"cordons {seed}")
    for index in range(nodes):
        if rng.random() < 0.15:
            begin = rng.random() * 30
            yield begin, begin + rng.random() * 20, f"node-{index}"


def _verifications(seed: int, names: list[str]) -> Iterator[tuple[float, str, str]]:
    rng = random.Random(f"verifications {seed}")
    for name in names:
        for _ in range(rng.choice((0, 0, 1, 3))):
            yield 5 + rng.random() * 40, rng.choice(("DynamoCheckpoint", "Snapshot")), name


def faults_of(seed: int) -> list[Fault]:
    """Decide what goes wrong in the world of a seed."""
    rng = random.Random(f"faults {seed}")
    settings = settings_of(seed)
    count = rng.choice((0, 1, 1, 2, 3, 5, 8))
    kinds, weights = zip(*WEIGHTS.items(), strict=True)
    found = []
    for kind in rng.choices(kinds, weights, k=count):
        # Most of a capture happens in the first seconds.
        at = rng.random() * rng.choice((6.0, 20.0, FAULT_S))
        found.append(Fault(at, kind, _target(kind, rng, settings), rng.random()))
    more = [*_unknowns(seed), *_stalls(seed, settings)]
    more += [*_crowds(seed, settings), *_cancellations(seed, settings), *_depths(seed, settings)]
    more += [*_handovers(seed, settings), *_forgeries(seed)]
    return sorted([*found, *more], key=lambda fault: fault.at)


def _stalls(seed: int, settings: Settings) -> Iterator[Fault]:
    """Have the artifact root of a node hang in one of four worlds."""
    rng = random.Random(f"stall {seed}")
    for _ in range(rng.choice((0, 0, 0, 2))):
        node = f"node-{rng.randrange(settings.nodes)}"
        yield Fault(rng.random() * 10.0, "stall", node, rng.random())


def _crowds(seed: int, settings: Settings) -> Iterator[Fault]:
    """Have clients take more than their share of a GPU memory service in one of four worlds."""
    rng = random.Random(f"crowds {seed}")
    for _ in range(rng.choice((0, 0, 0, 3))):
        node = f"node-{rng.randrange(settings.nodes)}"
        yield Fault(rng.random() * 20.0, rng.choice(("flood", "crowd")), node, rng.random())


def _cancellations(seed: int, settings: Settings) -> Iterator[Fault]:
    """Cancel tasks twice and three times in one of four worlds, also as their service ends."""
    rng = random.Random(f"cancellations {seed}")
    for _ in range(rng.choice((0, 0, 0, 2))):
        target = f"node-{rng.randrange(settings.nodes)}/{rng.choice(('agent', 'agent', 'gms'))}"
        at = rng.random() * rng.choice((4.0, 20.0))
        yield Fault(at, "cancel-again", target, rng.random())
        if rng.random() < 0.7:
            yield Fault(at + rng.random() * 10.0, "term", target)


def _handovers(seed: int, settings: Settings) -> Iterator[Fault]:
    """Have operators end when they are asked to, in one of eight worlds."""
    rng = random.Random(f"handovers {seed}")
    for _ in range(rng.choice((0,) * 7 + (2,))):
        operator, at = f"operator-{rng.randrange(settings.operators)}", rng.random() * 20.0
        yield Fault(at, "cancel-again", operator, rng.random())
        yield Fault(at + rng.random() * 10.0, "term", operator)


def _forgeries(seed: int) -> Iterator[Fault]:
    """Have a user forge statuses in the worlds in which the user has pods."""
    rng = random.Random(f"forgeries {seed}")
    if any(True for _ in thieves(seed)):
        for _ in range(rng.choice((3, 6, 12))):
            yield Fault(rng.random() * FAULT_S, "forge", "", rng.random())


def _depths(seed: int, settings: Settings) -> Iterator[Fault]:
    """Have a node and a person send values that are nested deeply in one of eight worlds."""
    rng = random.Random(f"depths {seed}")
    for _ in range(rng.choice((0,) * 7 + (3,))):
        node = f"node-{rng.randrange(settings.nodes)}"
        yield Fault(rng.random() * FAULT_S, "deep", node, rng.random())


def _unknowns(seed: int) -> Iterator[Fault]:
    rng = random.Random(f"unknown {seed}")
    for _ in range(rng.choice((0, 0, 1, 3))):
        yield Fault(rng.random() * FAULT_S, "unknown", rng.choice(tuple(_UNKNOWN)), rng.random())


WEIGHTS = {
    "crash": 4,
    "fuse": 8,
    "pause": 3,
    "partition": 3,
    "bus-crash": 1,
    "bus-leader": 1,
    "bus-wipe": 1,
    "power": 1,
    "retire": 1,
    "upgrade": 2,
    "jump": 1,
    "full": 1,
    "eio": 1,
    "flip": 1,
    "kill-worker": 1,
    "kill-transfer": 1,
    "poison": 1,
    "hang": 4,
    "apart": 2,
    "operator-clock": 1,
    "rewind": 1,
    "hostile": 2,
    "truncate": 1,
}


def _target(kind: str, rng: random.Random, settings: Settings) -> str:
    node = f"node-{rng.randrange(settings.nodes)}"
    operator = f"operator-{rng.randrange(settings.operators)}"
    if kind in ("hang", "apart", "operator-clock"):
        return operator
    if kind in ("crash", "fuse", "pause", "partition"):
        return rng.choice((f"{node}/agent", f"{node}/agent", f"{node}/gms", operator))
    is_of_all = kind.startswith("bus-") or kind in ("flip", "rewind", "truncate")
    return "" if is_of_all else node


def _checkpoint(name: str, rng: random.Random) -> dict[str, Any]:
    document = checkpoint_document(
        name,
        podTemplateSpec=pod_template(resources={"limits": {"nvidia.com/gpu": _gpus(rng)}}),
        sourcePolicy=rng.choice(("Resume", "Resume", "Terminate")),
        activeDeadlineSeconds=rng.choice((120, 120, 300)),
    )
    document["spec"]["deletionPolicy"] = rng.choice(("Delete", "Delete", "Retain"))
    return document


def _alike(seed: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """In one world of four all checkpoints have one identity; in some of them, other workers."""
    rng = random.Random(f"alike {seed}")
    is_alike, has_other_worker = rng.random() < 0.25, rng.random() < 0.3

    def alike(checkpoint: dict[str, Any]) -> dict[str, Any]:
        spec = checkpoint["spec"]
        if is_alike:
            spec["identity"]["model"] = "example/alike"
        if is_alike and not has_other_worker:
            spec["job"]["podTemplateSpec"] = pod_template(
                resources={"limits": {"nvidia.com/gpu": 1}}
            )
        return checkpoint

    return alike


def _restore(name: str, source: str, rng: random.Random, nodes: int) -> dict[str, Any]:
    gpus = _gpus(rng)
    node = f"node-{rng.randrange(nodes)}" if rng.random() < 0.5 else None
    return restore_document(source, name, node, gpus)


def _snapshot(name: str, pod: str) -> dict[str, Any]:
    return snapshot_document(name, pod, deadlineSeconds=120)


def _gpus(rng: random.Random) -> int:
    return rng.choice((1, 1, 2))


def _habits(rng: random.Random) -> Habits:
    if rng.random() < 0.85:
        return Habits(warm_s=rng.random() * 2, quiet_s=rng.random() * 0.2)
    odd = rng.choice(("never_ready", "never_quiet", "refuses", "ends_when_asked", "ignores_term"))
    return Habits(**{odd: True})


def act(world: World, fault: Fault) -> None:
    if world.is_over:
        return
    world.note(str(fault))
    if on_process := _ON_PROCESSES.get(fault.kind):
        if process := _process(world, fault.target):
            on_process(world, fault, process)
    else:
        _ACTS[fault.kind](world, fault)


def _process(world: World, target: str) -> Process | None:
    if target.startswith("operator"):
        return world.operators[int(target.rpartition("-")[2])]
    name, _, service = target.partition("/")
    node = world.node(name)
    if service == "agent":
        return node.agent
    return node.gms.process if node.gms else None


def _fuse(_: World, fault: Fault, process: Process) -> None:
    process.fuse, process.blow = 1 + int(fault.amount**2 * 2000), process.kill


def _hang(world: World, fault: Fault, process: Process) -> None:
    """Stop an operator wherever it is in its work, for longer than a lease lasts, or shorter."""

    def stop() -> None:
        process.stop()
        world.loop.in_world(2.0 + fault.amount * 40, process.resume)

    process.fuse, process.blow = 1 + world.rng.randrange(400), stop


def _apart(world: World, fault: Fault) -> None:
    """Part an operator from the store and the lease; a file is always within reach."""
    if world.settings.lease == "lease":
        world.apart.add(fault.target)
        world.loop.in_world(fault.amount**2 * 60, world.apart.discard, fault.target)


def _operator_clock(world: World, fault: Fault) -> None:
    """Set the clock of an operator wrong, by up to two hours."""
    world.is_clock_wrong = True
    machine = world.machines[int(fault.target.rpartition("-")[2])]
    machine.jump += (fault.amount - 0.5) * 14400


def _hostile(world: World, fault: Fault) -> None:
    """Have a node report what nobody should believe about an order that it has."""
    lie = _lie(world, fault.target, lambda: world.rng.choice(_LIES))
    if lie is None:
        return
    subject, data = lie
    data = world.rng.choice((data, data, data, data[:-9], b"[" * 100_000, b"\xff" * 64))
    _publish(world, subject, data)


def _deep(world: World, fault: Fault) -> None:
    """Have a node and a person send values that are nested as deeply as a decoder may take them."""
    depth = 1 + int(fault.amount * 1100)
    nested = b"[" * depth + b"1" + b"]" * depth
    manifest = _snapshot("deep", "deep")
    manifest["spec"]["source"]["podRef"]["depth"] = "nested"
    world.people.spawn(world.apply(manifest, nested=nested))
    if lie := _lie(world, fault.target, lambda: {"depth": "nested"}):
        _publish(world, lie[0], lie[1].replace(b'"nested"', nested))


def _publish(world: World, subject: str, lie: bytes) -> None:
    world.rules.lies.add(lie)
    world.server.inject(subject, lie)


def _lie(world: World, node: str, values: Callable[[], dict[str, Any]]) -> tuple[str, bytes] | None:
    """Return a report about an order that a node has, and its subject; None when it has none."""
    orders = [
        item for value in world.rules.present() for item in orders_of(value) if item.node == node
    ]
    if not orders:
        return None
    item = world.rng.choice(orders)
    failure = {"reason": "Superseded", "message": "a lie", "retryable": True}
    report = {
        "type": "snapback.v1.report",
        "order": item.order,
        "attempt": item.attempt,
        "n": 9,
        "kind": "failed",
        "node": item.node,
        "service": item.service,
        "at": 0.0,
    }
    data = json.dumps({**report, "failure": {**failure, "values": values()}}).encode()
    return f"snap.report.{item.node}.{item.order}.failed", data


_LIES: tuple[dict[str, Any], ...] = (
    *({"attempt": attempt} for attempt in (0, -5, 7, 999_999, 1_000_000, 2**62, 2**63, True, "9")),
    {"attempt": [[[[[[[[1]]]]]]]]},
    {"a": {"b": {"c": {}}}},
    {"text": "x" * 10_000},
    {"devices": list(range(5000))},
)


def _truncate(world: World, _: Fault) -> None:
    """Lose the answers to orders that clean up which the operator has not seen."""
    stream = world.server.streams.get(subjects.REPORTS)
    for message in list(stream.messages.values()) if stream is not None else ():
        order = message.subject.split(".")[3]
        if order.partition("-")[0] in CLEANING:
            stream.delete(message.sequence)  # type: ignore[union-attr]


def _flood(world: World, fault: Fault) -> None:
    node = world.node(fault.target)
    if node.machine.is_on:
        begin_flood(node, connections=1 + int(fault.amount * 12))


def _crowd(world: World, fault: Fault) -> None:
    node = world.node(fault.target)
    if node.machine.is_on:
        begin_crowd(node, hold_s=fault.amount * 5.0)


def _cancel_again(_: World, fault: Fault, process: Process) -> None:
    """Have whatever a service cancels from here on be cancelled twice or three times."""
    process.cancels_again = 1 + round(fault.amount)


def _pause(world: World, fault: Fault, process: Process) -> None:
    process.stop()
    world.loop.in_world(fault.amount**2 * 100, process.resume)


def _power(world: World, fault: Fault) -> None:
    node = world.node(fault.target)
    if node.machine.is_on:
        node.lose_power()
        boots = node.machine.boots
        away = 1 + fault.amount**2 * 200
        world.loop.in_world(
            away,
            lambda: node.boot() if not node.machine.is_on and node.machine.boots == boots else None,
        )


def _retire(world: World, fault: Fault) -> None:
    """Lose a node for good; sooner or later somebody deletes its Node object."""
    node = world.node(fault.target)
    if node.machine.is_on and sum(not other.is_retired for other in world.nodes) > 1:
        node.lose_power()
        node.is_retired = True
        world.ask_to_delete(30 + 100 * fault.amount, "Node", node.name)


def _upgrade(world: World, fault: Fault) -> None:
    """Replace the services of a node by those of an older or newer build."""
    builds = ("older", "current", "newer")
    world.node(fault.target).become(BUILDS[builds[int(fault.amount * len(builds))]])


def _jump(world: World, fault: Fault) -> None:
    world.node(fault.target).machine.jump += (fault.amount - 0.5) * 7200


def _stall(world: World, fault: Fault) -> None:
    world.node(fault.target).machine.hangs_until = world.loop.now + fault.amount**2 * 90.0


def _full(world: World, fault: Fault) -> None:
    limits = world.disk.limits
    limits[fault.target] = int(fault.amount * 40_000)
    world.loop.in_world(fault.amount * 30, limits.pop, fault.target, None)


def _eio(world: World, fault: Fault) -> None:
    operation = world.rng.choice(("read", "write", "fsync"))
    world.disk.fail(operation, 1 + int(fault.amount * 30), machine=fault.target)


def _flip(world: World, fault: Fault) -> None:
    files = [
        (path, content)
        for path, content in sorted(world.disk.tree().items())
        if path.startswith("/shared/") and content
    ]
    if files:
        path, content = files[int(fault.amount * len(files))]
        world.disk.flip(f"{MOUNT}{path}", world.rng.randrange(8 * len(content)))
        world.has_flipped_bits = True


def _unknown(world: World, fault: Fault) -> None:
    """Put something below the artifact root that no content knows."""
    path = _UNKNOWN[fault.target](world)
    with (
        files.opened(files.open_root(SHARED, create=True)) as root,
        files.opened(files.make_dir(root, path[:-1])) as folder,
        contextlib.suppress(ArtifactExists),  # put there before
    ):
        files.write_new(folder, path[-1], b"nobody's")
    is_sealed = path[-1] == ROOT_MANIFEST
    is_generation = path[2].startswith("gen-")
    is_moved = world.settings.quarantine == "all" or (is_generation and not is_sealed)
    world.unknown["/".join(path)] = is_moved


def _above(world: World) -> tuple[str, ...]:
    """Give a generation that the newest content has not begun."""
    contents = [*world.rules.contents()]
    uid = contents[-1].metadata.uid if contents else world.new_uid()
    return ("default", uid, "gen-900", "process", "state")


_UNKNOWN: dict[str, Callable[[World], tuple[str, ...]]] = {
    "incomplete": lambda world: ("default", world.new_uid(), "gen-1", "process", "state"),
    "sealed": lambda world: ("default", world.new_uid(), "gen-1", ROOT_MANIFEST),
    "above": _above,
    "elsewhere": lambda world: ("other", world.new_uid(), "gen-2", "gpu-0", "shard"),
    "folder": lambda _: ("models", "llama", "weights"),
    "file": lambda world: ("default", world.new_uid(), "notes"),
}


def _kill_worker(world: World, fault: Fault) -> None:
    living = [w for w in world.node(fault.target).workers.values() if w.process.is_alive]
    if living:
        living[int(fault.amount * len(living))].process.kill(1)


def _kill_transfer(world: World, fault: Fault) -> None:
    for process in list(world.node(fault.target).running):
        if process.name.endswith("/transfer"):
            process.kill()


def _poison(world: World, fault: Fault) -> None:
    noise = world.rng.choice(
        (b"", b"{", b"\xff" * 64, b'{"type":"snapback.v9.run_order"}', b"[" * 1000)
    )
    world.server.inject(f"snap.order.{fault.target}.agent.dump-{world.new_uid()}", noise)


def _bus_crash(world: World, fault: Fault) -> None:
    world.server.crash()
    restart = world.server.restart
    world.loop.in_world(fault.amount**2 * 30, lambda: world.server.is_up or restart())


_ON_PROCESSES: dict[str, Callable[[Any, Fault, Process], None]] = {
    "crash": lambda _world, _fault, process: process.kill(),
    "fuse": _fuse,
    "pause": _pause,
    "partition": lambda world, fault, process: world.partition(process.name, fault.amount**2 * 60),
    "hang": _hang,
    "cancel-again": _cancel_again,
    "term": lambda _world, _fault, process: process.terminate(),
}
_ACTS: dict[str, Callable[[Any, Fault], None]] = {
    "bus-crash": _bus_crash,
    "bus-leader": lambda world, fault: world.server.stall(fault.amount * 8),
    "bus-wipe": lambda world, _: world.server.wipe(),
    "power": _power,
    "retire": _retire,
    "upgrade": _upgrade,
    "jump": _jump,
    "stall": _stall,
    "full": _full,
    "eio": _eio,
    "flip": _flip,
    "unknown": _unknown,
    "kill-worker": _kill_worker,
    "kill-transfer": _kill_transfer,
    "poison": _poison,
    "apart": _apart,
    "operator-clock": _operator_clock,
    "rewind": lambda world, fault: world.rewind(fault),
    "hostile": _hostile,
    "truncate": _truncate,
    "flood": _flood,
    "crowd": _crowd,
    "deep": _deep,
    "forge": forge,
}
