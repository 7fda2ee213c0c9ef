"""What the operator costs beside many objects: memory, and processor time of each thing it does.

`make bench-operator COUNT=10000`. Times are processor-seconds of one process, so that others on the
machine change them little. The status is 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from msgspec.structs import replace

from snapshot_api.kinds import KINDS
from snapshot_operator.core.content import content_name
from snapshot_operator.local.store import SqliteStore
from snapshot_operator.ports import Event
from snapshot_shared.api import VerifyRequest
from snapshot_shared.codec import encode_json
from snapshot_shared.ids import derived_uid
from snapshot_shared.orders import DeviceRef
from tests.bench import common
from tests.bench.common import Benchmark, Judged, Results, goal
from tests.bench.machine import memory_mb
from tests.support.objects import checkpoint_document, presence
from tests.support.operator_world import World

TITLE = "Operator"
FULL = 10_000
AT_ONCE = (5, 40, 200)
ROUNDS = 5
MORE = 40
"""How many more checkpoints are applied one after another, beside those that wait."""
FLAT = 1.2
FAILURES = 1000
A_SECOND = "{:,} a CPU-s"
CAPTURE, ONE_MORE, STATUS = "capture", "one more", "status"
OURS = "snapback"


async def measure(options: argparse.Namespace, folder: Path) -> Results:
    check_whole(options)
    with common.measuring(folder, count=options.count) as found:
        await read_costs(found, folder)
        await work_costs(found)
    return found


def check_whole(options: argparse.Namespace) -> None:
    """Write no page about fewer checkpoints than the goals are for."""
    if options.count != FULL:
        options.page = None


async def read_costs(found: Results, folder: Path) -> None:
    """Measure an operator that starts on a full store, in a process of its own."""
    count = found.facts["count"]
    pods = max(count // 10, 1)
    path = folder / "objects.sqlite"
    common.say(f"filling a store with {count:,} checkpoints, {pods:,} pods and contents")
    await fill(path, count, pods)
    common.say("reading it")
    command = [sys.executable, "-m", "tests.bench.operator", "--store", str(path)]
    for _ in range(ROUNDS):
        read = await asyncio.to_thread(subprocess.check_output, command)
        for what, value in json.loads(read).items():
            found.add(what, OURS, value)


def judged(found: Results) -> Iterator[Judged]:
    rows, count = found.samples, found.facts["count"]
    mb, sync_s, noop, events = (
        median(rows[what][OURS]) for what in ("mb", "sync_s", "noop", "events")
    )
    yield from list_goals(mb, sync_s, count)
    yield noop_goal(noop)
    yield events_goal("watch events", events)
    captures = {number: min(each) for number, each in rows[CAPTURE].items()}
    for number, cost in captures.items():
        yield shown(f"a capture, {number} at once", ms(cost))
    flat = max(captures.values()) / min(captures.values())
    yield limited("most over least of these", flat, most=FLAT)
    few, many = (median(rows[ONE_MORE][f"{waiting:,}"]) for waiting in (10, count))
    for waiting, cost in ((10, few), (count, many)):
        yield shown(f"one more beside {waiting:,} that wait", ms(cost))
    yield limited("of these, many over few", many / few, most=FLAT)
    for verb, [ratio] in rows[STATUS].items():
        what = f"status after {FAILURES:,} failures of {verb}, over that after 10"
        yield limited(what, ratio, most=1.02, found="{:.3f} x")


def list_goals(mb: float, sync_s: float, count: int) -> Iterator[Judged]:
    """Judge what it takes to read all objects, of which there may be fewer than all."""
    yield limited("memory, all objects read", mb, most=180, wanted="180 MB", found="{:.0f} MB")
    most = 0.5 * max(count / FULL, 0.1)
    yield limited("list and index", sync_s, most=most, wanted="0.5 CPU-s", found="{:.2f} s")


def noop_goal(a_second: float) -> Judged:
    return limited("no-op reconciles", a_second, least=5000, wanted=A_SECOND, found="{:,.0f}")


def events_goal(what: str, a_second: float) -> Judged:
    return limited(what, a_second, least=30000, wanted=A_SECOND, found="{:,.0f}")


def limited(what: str, value: float, **limits: Any) -> Judged:
    return goal(TITLE, "", what, value, **limits)


def shown(what: str, found: str) -> Judged:
    """Return what has no goal."""
    return Judged(TITLE, "", what, "", found, "met")


async def work_costs(found: Results) -> None:
    """Measure captures, checkpoints that wait, and failures that repeat."""
    count = found.facts["count"]
    common.say(f"{', '.join(map(str, AT_ONCE))} captures at once")
    # In turns: the speed of a machine that is shared changes from one minute to the next.
    for _ in range(ROUNDS):
        for number in AT_ONCE:
            found.add(CAPTURE, f"{number}", await capture_cost(number))
    common.say(f"one more checkpoint beside 10, and beside {count:,} that wait")
    await one_more(found, 10, count)
    for verb in ("delete", "stop", "verify"):
        common.say(f"{FAILURES:,} times a {verb} that fails")
        ten, many = await status_sizes(verb)
        found.add(STATUS, verb, many / ten)


async def captured_world() -> World:
    """Return a world whose one checkpoint is Ready."""
    world = World()
    await world.join(presence("node-0"))
    await world.apply(checkpoint_document())
    await world.answer_all()
    return world


async def fill(path: Path, count: int, pods: int) -> None:
    """Write a store as an operator leaves it: some captured checkpoints with all their objects."""
    world = await captured_world()
    model = {type(value).__name__: value for value in await world.everything()}
    store = SqliteStore(path, timestamp=lambda: "2026-01-01T00:00:00Z").open()
    store._db.execute("PRAGMA synchronous=OFF")
    for number in range(pods // 4 + 1):
        node = renamed(model["Node"], f"node-{number}")
        await stored(store, node)
    for number in range(count):
        names = ("DynamoCheckpoint",) if number >= pods else tuple(KINDS)
        for kind in names:
            if kind in model and kind != "Node":
                await stored(store, of_checkpoint(model, kind, number))
    store.close()


async def stored(store: SqliteStore, value: Any) -> None:
    """Store an object with its status and its own uid."""
    store._new_uid = lambda: value.metadata.uid
    made = await store.create(value)
    assert made.metadata.uid == value.metadata.uid


def renamed(value: Any, name: str) -> Any:
    uid = derived_uid(type(value).__name__, name)
    return replace(value, metadata=replace(value.metadata, name=name, uid=uid))


def of_checkpoint(model: dict[str, Any], kind: str, number: int) -> Any:
    """Return the object of a kind that belongs to checkpoint `number`."""
    name = f"llm-{number}"
    uids = {other: derived_uid(other, name) for other in model}
    value = model[kind]
    owners = [
        replace(owner, name=name, uid=uids[owner.kind]) for owner in value.metadata.owner_references
    ]
    if kind == "SnapshotContent":
        name = content_name(renamed(model["Snapshot"], name))
        reference = replace(value.spec.snapshot_ref, uid=uids["Snapshot"], name=f"llm-{number}")
        pod = replace(value.spec.source.pod_ref, uid=uids["Pod"])
        source = replace(value.spec.source, pod_ref=pod, node_name=f"node-{number // 4}")
        value = replace(value, spec=replace(value.spec, snapshot_ref=reference, source=source))
    if kind == "Snapshot":
        bound = content_name(renamed(value, name))
        value = replace(value, status=replace(value.status, bound_snapshot_content_name=bound))
    if kind == "Pod":
        devices = [
            DeviceRef(ordinal=n, uuid=f"GPU-{number}-{n}") for n in range(len(value.status.devices))
        ]
        status = replace(value.status, node_name=f"node-{number // 4}", devices=devices)
        value = replace(value, status=status)
    meta = replace(value.metadata, name=name, uid=uids[kind], owner_references=owners)
    return replace(value, metadata=meta)


async def read(path: Path) -> dict[str, float]:
    """Measure an operator that starts on a store; in a process of its own."""
    world = World(store=SqliteStore(path, timestamp=lambda: "now").open())
    world.now = 1_800_000_000.0
    cluster, manager, spent = world.cluster, world.manager, time.process_time
    gc.collect()
    began = spent()
    await cluster.sync()
    sync_s = spent() - began
    memory = memory_mb("VmRSS")
    manager.resync()
    await manager.drain()
    rounds = 3
    began, before = spent(), manager.reconciles
    for _ in range(rounds):
        manager.resync()
        await manager.drain()
    noop = (manager.reconciles - before) / (spent() - began)
    changed = [value for kind in KINDS for value in cluster.all(kind)]
    decoders = {name: msgspec.json.Decoder(kind.type) for name, kind in KINDS.items()}
    raw = [(type(v).__name__, encode_json(newer(v))) for v in changed]
    began = spent()
    for kind, data in raw:
        cluster._take(Event("MODIFIED", decoders[kind].decode(data)))
    events = len(raw) / (spent() - began)
    world.store.close()
    return {"mb": memory, "sync_s": sync_s, "noop": noop, "events": events}


def newer(value: Any) -> Any:
    version = str(10**9 + int(value.metadata.resource_version))
    return replace(value, metadata=replace(value.metadata, resource_version=version))


async def capture_cost(count: int) -> float:
    """Return the processor-seconds a checkpoint from apply to Ready, when `count` are at once."""
    world = World()
    await world.join(*(presence(f"node-{number}") for number in range(count)))
    documents = [checkpoint_document(f"llm-{number}") for number in range(count)]
    gc.collect()
    # The collector may not run in the middle of what is measured.
    gc.disable()
    began = time.process_time()
    try:
        await world.apply(*documents)
        done: set[tuple[str, int]] = set()
        while waiting := [o for o in world.orders.history if (o.order, o.attempt) not in done]:
            for order in waiting:
                done.add((order.order, order.attempt))
                await world.answer_well(order)
    finally:
        gc.enable()
    phases = {value.status.phase for value in world.cluster.all("DynamoCheckpoint")}  # type: ignore[union-attr]
    assert phases == {"Ready"}, phases
    return (time.process_time() - began) / count


async def one_more(found: Results, *counts: int) -> None:
    """Measure one more checkpoint that finds no room, as so many others wait."""
    worlds = {waiting: await waiting_world(waiting) for waiting in counts}
    # As an operator that has started with them: `Cluster.sync` does the same.
    gc.collect()
    gc.freeze()
    for number in range(MORE):
        for waiting, world in worlds.items():
            began = time.process_time()
            await world.apply(checkpoint_document(f"more-{number}"))
            found.add(ONE_MORE, f"{waiting:,}", time.process_time() - began)


async def waiting_world(waiting: int) -> World:
    """Return a world whose one node is taken, and so many checkpoints that wait for it."""
    world = World()
    await world.join(presence("node-0"))
    for number in range(waiting + 1):
        await world.apply(checkpoint_document(f"llm-{number}"))
    return world


async def status_sizes(verb: str) -> tuple[int, int]:
    """Return the bytes of an object after 10 and after many failures of one of its orders."""
    world = await captured_world()
    kind = "Pod" if verb == "stop" else "SnapshotContent"
    if verb != "verify":
        await world.cluster.delete(await world.get("DynamoCheckpoint", "llm"))
        await world.settle()
    sizes = []
    for number in range(FAILURES):
        if verb == "verify":
            await world.api.verify(VerifyRequest(kind="Snapshot", name="llm"))
            await world.settle()
        last = next(order for order in reversed(world.orders.history) if order.verb == verb)
        await world.fail(last, "DeviceBusy")
        if number in (9, FAILURES - 1):
            sizes.append(len(encode_json(world.cluster.all(kind)[0])))
        await world.advance(601.0)
    return sizes[0], sizes[1]


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms CPU"


def lines(found: Results) -> Iterator[str]:
    count, pods = found.facts["count"], max(found.facts["count"] // 10, 1)
    yield (
        f"`make bench-operator COUNT={count}`: {count:,} DynamoCheckpoints, {pods:,} pods and as\n"
        "many contents in the store. Processor-seconds of the operator's decisions and its\n"
        f"store; orders are answered at once. Others took {found.others:.0%} of the processors."
    )
    yield from table(judged(found))


def table(rows: Iterable[Judged]) -> Iterator[str]:
    cells = ((row.what, row.wanted, row.found, row.verdict) for row in rows)
    return common.table(("what", "goal", "found", ""), cells)


NUMBERS: common.Numbers = {"count": (FULL, 10, f"of checkpoints ({FULL:,}, without which no page)")}
BENCH = Benchmark("operator", TITLE, __doc__, NUMBERS, measure, lines, judged)

if __name__ == "__main__":
    if sys.argv[1:2] == ["--store"]:
        print(json.dumps(asyncio.run(read(Path(sys.argv[2])))))
    else:
        common.run(BENCH.main)
