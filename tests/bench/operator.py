"""What the operator costs beside many objects: memory, and processor time of each thing it does.

`make bench-operator COUNT=10000`. Times are processor-seconds of one process, so that others on the
machine change them little. The status is 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from snapshot_operator.core.content import content_name
from snapshot_operator.local.controllers import CONTROLLERS, INDEXES
from snapshot_operator.local.store import SqliteStore
from snapshot_operator.ports import Event
from snapshot_operator.runtime.cluster import Cluster
from snapshot_operator.runtime.interpreter import Interpreter
from snapshot_operator.runtime.manager import Manager
from snapshot_operator.runtime.spans import Spans
from snapshot_shared.codec import encode_json
from snapshot_shared.ids import derived_uid
from snapshot_shared.objects.kinds import KINDS
from snapshot_shared.orders import DeviceRef
from snapshot_shared.telemetry import Telemetry
from tests.bench import output
from tests.bench.machine import Watch, describe
from tests.support.objects import checkpoint_document, presence
from tests.support.operator_world import MemoryOrders, World

TITLE = "Operator"
FULL = 10_000
AT_ONCE = (5, 40, 200)
ROUNDS = 5
MORE = 40
"""How many more checkpoints are applied one after another, beside those that wait."""
FLAT = 1.2
FAILURES = 1000


class Row(NamedTuple):
    """One thing measured, what is wanted of it, and whether that holds."""

    what: str
    wanted: str
    found: str
    verdict: Literal["met", "missed"]


def main() -> int:
    arguments = parser("make bench-operator", __doc__)
    arguments.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    options = parsed(arguments)
    if options.store:
        print(json.dumps(asyncio.run(read(options.store))))
        return 0
    watch = Watch()
    rows = measured(options.count)
    others = watch.others()
    return told(options, others, rows, section(options.count, others, rows))


def parser(program: str, about: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog=program, description=about)
    made.add_argument("--count", type=int, default=FULL, help=f"of checkpoints ({FULL:,})")
    made.add_argument("--json", type=Path, help="where to write what was found")
    made.add_argument(
        "--page", type=Path, help=f"where to write it for people, when all {FULL:,} were read"
    )
    return made


def parsed(arguments: argparse.ArgumentParser) -> argparse.Namespace:
    options = arguments.parse_args()
    if options.count < 10:
        arguments.error(f"--count is {options.count}: at least 10 checkpoints are needed")
    return options


def told(
    options: argparse.Namespace, others: float, rows: list[Row], text: str, **more: Any
) -> int:
    """Print what was found, and write it where that was asked for; give the status of the end."""
    for row in rows:
        print(f"{row.verdict:7} {row.what:58} {row.wanted:22} {row.found}")
    found = {"machine": describe(Path()), "others": others, "count": options.count, **more}
    page = options.page if options.count == FULL else None
    output.write(options.json, page, {**found, "rows": [row._asdict() for row in rows]}, text)
    return 1 if any(row.verdict == "missed" for row in rows) else 0


def measured(count: int) -> list[Row]:
    return [*read_costs(count), *asyncio.run(work_costs(count))]


def read_costs(count: int) -> list[Row]:
    """Measure an operator that starts on a full store, in a process of its own."""
    pods = max(count // 10, 1)
    with tempfile.TemporaryDirectory(prefix=".bench-") as folder:
        path = Path(folder) / "objects.sqlite"
        output.say(f"filling a store with {count:,} checkpoints, {pods:,} pods and contents")
        asyncio.run(fill(path, count, pods))
        output.say("reading it")
        command = [sys.executable, "-m", "tests.bench.operator", "--store", str(path)]
        found = [
            json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            for _ in range(ROUNDS)
        ]
        seen = {what: statistics.median(each[what] for each in found) for what in found[0]}
    share = count / FULL
    return [
        goal("memory, all objects read", "≤ 180 MB", seen["mb"], 180, "{:.0f} MB"),
        goal("list and index", "≤ 0.5 CPU-s", seen["sync_s"], 0.5 * max(share, 0.1), "{:.2f} s"),
        goal("no-op reconciles", "≥ 5,000 a CPU-s", seen["noop"], 5000, "{:,.0f}", more=True),
        goal("watch events", "≥ 30,000 a CPU-s", seen["events"], 30000, "{:,.0f}", more=True),
    ]


async def work_costs(count: int) -> list[Row]:
    """Measure captures, checkpoints that wait, and failures that repeat."""
    rows: list[Row] = []
    output.say(f"{', '.join(map(str, AT_ONCE))} captures at once")
    # In turns: the speed of a machine that is shared changes from one minute to the next.
    turns = [[await capture_cost(number) for number in AT_ONCE] for _ in range(ROUNDS)]
    captures = dict(zip(AT_ONCE, map(min, zip(*turns, strict=True)), strict=True))
    for number, cost in captures.items():
        rows.append(Row(f"a capture, {number} at once", "", ms(cost), "met"))
    flat = max(captures.values()) / min(captures.values())
    rows.append(goal("most over least of these", f"≤ {FLAT} x", flat, FLAT, "{:.2f} x"))
    output.say(f"one more checkpoint beside 10, and beside {count:,} that wait")
    beside = await one_more(10, count)
    for waiting, cost in beside.items():
        rows.append(Row(f"one more beside {waiting:,} that wait", "", ms(cost), "met"))
    ratio = beside[count] / beside[10]
    rows.append(goal("of these, many over few", f"≤ {FLAT} x", ratio, FLAT, "{:.2f} x"))
    for verb in ("delete", "stop", "verify"):
        output.say(f"{FAILURES:,} times a {verb} that fails")
        ten, many = await status_sizes(verb)
        what = f"status after {FAILURES:,} failures of {verb}, over that after 10"
        rows.append(goal(what, "≤ 1.02 x", many / ten, 1.02, "{:.3f} x"))
    return rows


def goal(
    what: str, wanted: str, value: float, limit: float, shown: str, *, more: bool = False
) -> Row:
    is_met = value >= limit if more else value <= limit
    return Row(what, wanted, shown.format(value), "met" if is_met else "missed")


async def fill(path: Path, count: int, pods: int) -> None:
    """Write a store as an operator leaves it: some captured checkpoints with all their objects."""
    world = World()
    await world.join(presence("node-0"))
    await world.apply(checkpoint_document())
    await world.answer_all()
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
    store = SqliteStore(path, timestamp=lambda: "now").open()
    spent, cluster, manager = operator(store)
    gc.collect()
    began = spent()
    await cluster.sync()
    sync_s = spent() - began
    memory = rss_mb()
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
    store.close()
    return {"mb": memory, "sync_s": sync_s, "noop": noop, "events": events}


def newer(value: Any) -> Any:
    version = str(10**9 + int(value.metadata.resource_version))
    return replace(value, metadata=replace(value.metadata, resource_version=version))


def operator(store: SqliteStore) -> tuple[Callable[[], float], Cluster, Manager]:
    cluster = Cluster(store, INDEXES)
    orders, now = MemoryOrders(), lambda: 1_800_000_000.0
    spans = Spans(Telemetry("snap-operator", "operator", "0"), now)
    interpreter = Interpreter(cluster, orders, spans)
    manager = Manager(cluster, CONTROLLERS, interpreter, now, jitter=lambda: 1.0)
    return time.process_time, cluster, manager


def rss_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1000
    raise RuntimeError("VmRSS is missing from /proc/self/status")


async def capture_cost(count: int) -> float:
    """Return the processor-seconds a checkpoint from apply to Ready, when `count` are at once."""
    world = World()
    await world.join(*(presence(f"node-{number}") for number in range(count)))
    documents = [checkpoint_document(f"llm-{number}") for number in range(count)]
    gc.collect()
    spent, began = Spent(), time.process_time()
    await world.apply(*documents)
    done: set[tuple[str, int]] = set()
    while waiting := [o for o in world.orders.history if (o.order, o.attempt) not in done]:
        for order in waiting:
            done.add((order.order, order.attempt))
            await world.answer_well(order)
    del spent
    phases = {value.status.phase for value in world.cluster.all("DynamoCheckpoint")}  # type: ignore[union-attr]
    assert phases == {"Ready"}, phases
    return (time.process_time() - began) / count


class Spent:
    """Keeps the collector from running in the middle of what is measured."""

    def __init__(self) -> None:
        gc.disable()

    def __del__(self) -> None:
        gc.enable()


async def one_more(*counts: int) -> dict[int, float]:
    """Return the processor-seconds of one more checkpoint that finds no room, as others wait."""
    worlds = {waiting: await waiting_world(waiting) for waiting in counts}
    # As an operator that has started with them: `Cluster.sync` does the same.
    gc.collect()
    gc.freeze()
    spent: dict[int, list[float]] = {waiting: [] for waiting in worlds}
    for number in range(MORE):
        for waiting, world in worlds.items():
            began = time.process_time()
            await world.apply(checkpoint_document(f"more-{number}"))
            spent[waiting].append(time.process_time() - began)
    return {waiting: statistics.median(found) for waiting, found in spent.items()}


async def waiting_world(waiting: int) -> World:
    """Return a world whose one node is taken, and so many checkpoints that wait for it."""
    world = World()
    await world.join(presence("node-0"))
    for number in range(waiting + 1):
        await world.apply(checkpoint_document(f"llm-{number}"))
    return world


async def status_sizes(verb: str) -> tuple[int, int]:
    """Return the bytes of an object after 10 and after many failures of one of its orders."""
    from snapshot_shared.api import VerifyRequest

    world = World()
    await world.join(presence("node-0"))
    await world.apply(checkpoint_document())
    await world.answer_all()
    kind = "Pod" if verb == "stop" else "SnapshotContent"
    if verb != "verify":
        await world.cluster.delete(await world.get("DynamoCheckpoint", "llm"))
        await world.settle()
    sizes = []
    for number in range(FAILURES):
        if verb == "verify":
            await world.api.verify(VerifyRequest(kind="Snapshot", name="llm"))
            await world.settle()
        (order,) = world.orders.history[-1:] if verb != "delete" else _last(world, verb)
        if order.verb != verb:
            (order,) = _last(world, verb)
        await world.fail(order, "DeviceBusy")
        if number in (9, FAILURES - 1):
            sizes.append(len(encode_json(world.cluster.all(kind)[0])))
        await world.advance(601.0)
    return sizes[0], sizes[1]


def _last(world: World, verb: str) -> list[Any]:
    return [next(order for order in reversed(world.orders.history) if order.verb == verb)]


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms CPU"


def section(count: int, others: float, rows: list[Row]) -> str:
    pods = max(count // 10, 1)
    intro = (
        f"`make bench-operator COUNT={count}`: {count:,} DynamoCheckpoints, {pods:,} pods and as\n"
        "many contents in the store. Processor-seconds of the operator's decisions and its store;\n"
        f"orders are answered at once. Others took {others:.0%} of the processors.\n"
    )
    return f"## {TITLE}\n\n{intro}\n{table(rows)}"


def table(rows: list[Row]) -> str:
    lines = [
        "| what | goal | found | |\n|---|---|---|---|",
        *(f"| {row.what} | {row.wanted} | {row.found} | {row.verdict} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    output.run(main)
