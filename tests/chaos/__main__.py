"""`make chaos SECONDS=120 SEED=n`: real processes, killed and paused at random; then the rules.

Three nats-servers whose leader is killed every 5 s, two operators on one store of which one is
paused now and then, four nodes whose services are killed and paused and whose artifact root hangs
for a while, and JetStream wiped once; meanwhile users capture, restore and delete. Then the faults
stop. Exit status 1 when a rule of the product is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import random
import shutil
import sys
import time
from pathlib import Path

from snapshot_api.kinds import AnyObject
from snapshot_shared import subjects
from snapshot_shared.bus import Bus
from snapshot_shared.codec import decode_json, encode_json
from snapshot_shared.errors import BusUnavailable
from snapshot_shared.frames import StatusReply
from snapshot_shared.ids import NodeName
from snapshotctl.adapters import processes
from snapshotctl.adapters.processes import to_the_end
from tests.chaos.machines import OPERATORS, SERVERS, Machines, machines
from tests.chaos.traffic import Traffic
from tests.support import rules

NODES = 4
USERS = 4
START_S = 60.0
HEAL_S = 120.0
"""An order delivered to a service as it is killed comes again after 30 s; several may in a row."""
TELL_S = 10.0
LEADER_S = 5.0


class Chaos:
    """One run: the faults, the users, and the judgement."""

    def __init__(self, found: Machines, bus: Bus, seed: int, seconds: float) -> None:
        self._machines = found
        self._bus = bus
        self._seconds = seconds
        self._chance = random.Random(seed)
        self._stalls = random.Random(f"stalls {seed}")
        self._began = time.monotonic()
        self._is_wiping = False
        self.traffic = Traffic(bus, seed, [node.name for node in found.nodes])

    async def run(self) -> list[str]:
        """Do it all; give what is broken at the end."""
        users = [asyncio.ensure_future(self.traffic.use(i)) for i in range(USERS)]
        background = [asyncio.ensure_future(t) for t in (self.traffic.listen(), self._tell())]
        try:
            await self._faults()
            self.traffic.stopping.set()
            self._machines.start_all()
            print(f"{self._now()} the faults stop; {HEAL_S:.0f} s to heal", flush=True)
            try:
                async with asyncio.timeout(HEAL_S):
                    await asyncio.gather(*users)
                    values = await self._settled()
            except TimeoutError:
                values = await self.traffic.objects()
            return await self._broken(values)
        finally:
            for task in (*users, *background):
                task.cancel()
            await asyncio.gather(*users, *background, return_exceptions=True)

    async def _settled(self) -> list[AnyObject]:
        while True:
            values = await self.traffic.objects()
            if not rules.unsettled(values):
                return values
            await asyncio.sleep(1.0)

    async def _faults(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._seconds), asyncio.TaskGroup() as faults:
                faults.create_task(self._kill_leaders())
                faults.create_task(self._pause_operators())
                faults.create_task(self._break_nodes())
                faults.create_task(self._stall_disks())
                faults.create_task(self._wipe_once(self._seconds / 2))

    async def _kill_leaders(self) -> None:
        while True:
            await asyncio.sleep(LEADER_S)
            if not self._is_wiping:
                leader = await self._leader()
                await self._machines.kill(leader, "leader")
                self._machines.start(leader)

    async def _leader(self) -> str:
        """Name the server that leads the orders; any, while there is none."""
        with contextlib.suppress(Exception):
            stream = self._bus.client.jetstream(timeout=2.0)
            cluster = (await stream.stream_info(subjects.ORDERS)).cluster
            if cluster is not None and cluster.leader in SERVERS:
                return cluster.leader
        return self._chance.choice(SERVERS)

    async def _pause_operators(self) -> None:
        while True:
            await asyncio.sleep(self._chance.uniform(5, 12))
            name = self._chance.choice(OPERATORS)
            await self._machines.pause(name, self._chance.uniform(10, 20), "operator")

    async def _break_nodes(self) -> None:
        chance, services = self._chance, self._machines.services
        async with asyncio.TaskGroup() as under_way:
            while True:
                await asyncio.sleep(chance.uniform(2, 5))
                under_way.create_task(self._break(chance.choice(services)))

    async def _stall_disks(self) -> None:
        chance, nodes = self._stalls, [node.name for node in self._machines.nodes]
        async with asyncio.TaskGroup() as under_way:
            while True:
                await asyncio.sleep(chance.uniform(3, 12))
                stall = self._machines.stall(chance.choice(nodes), chance.uniform(0.5, 30))
                under_way.create_task(stall)

    async def _break(self, name: str) -> None:
        service = name.rpartition("-")[2]
        seconds = self._chance.uniform(0.2, 8)
        if self._chance.random() < 0.5:
            await self._machines.pause(name, seconds, service)
            return
        await self._machines.kill(name, service)
        await asyncio.sleep(seconds)
        self._machines.start(name)

    async def _wipe_once(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        self._is_wiping = True
        await self._machines.wipe()
        print(f"{self._now()} JetStream is wiped", flush=True)
        await asyncio.sleep(LEADER_S)
        self._is_wiping = False

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(TELL_S)
            print(f"{self._now()} {self._figures()}", flush=True)

    def _now(self) -> str:
        return f"{time.monotonic() - self._began:5.0f} s "

    def _figures(self) -> str:
        counts = {**self.traffic.outcomes, **self._machines.counts}
        return ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))

    async def _broken(self, values: list[AnyObject]) -> list[str]:
        run, artifacts = self._machines.run, self._machines.places.artifacts
        with contextlib.suppress(BusUnavailable):
            await self.traffic.replay()
        return [
            *(f"unsettled: {line}" for line in rules.unsettled(values)),
            *(f"ended: {name}" for name in self._machines.fallen()),
            *(f"frozen: {line}" for line in rules.frozen(run)),
            *(f"held: {line}" for line in rules.held(run)),
            *(f"doubled: {line}" for line in rules.doubled(self.traffic.reports)),
            *(f"artifact: {line}" for line in await rules.damaged(artifacts, values)),
            *await self._memory_in_use(values),
        ]

    async def _memory_in_use(self, values: list[AnyObject]) -> list[str]:
        """Name the devices whose memory or fence outlived the pods and captures that had them."""
        if values:
            return []
        found: list[str] = []
        for node in self._machines.nodes:
            question = subjects.rpc(NodeName(node.name), "gms", "status")
            data = await self.traffic.persistently(lambda q=question: self._bus.request(q, b""))
            found += [
                f"memory: {device.used} bytes of {device.endpoint} are in use"
                for device in decode_json(data, StatusReply).devices
                if device.used or device.fence is not None
            ]
        return found

    def summary(self) -> str:
        counted = (self.traffic.outcomes, self._machines.counts)
        lines = [f"  {n:5} {what}" for counts in counted for what, n in sorted(counts.items())]
        lines += [f"  {count:5} of {what}" for what, count in self.traffic.reasons.most_common()]
        orders = {(report.order, report.attempt) for report in self.traffic.reports}
        lines.append(f"  {len(orders):5} orders and attempts, {len(self.traffic.reports)} reports")
        lines.append(f"  {self.traffic.longest_s:5.1f} s the longest time without progress")
        return "\n".join(lines)


async def _ready(bus: Bus, nodes: int) -> None:
    """Wait until the operator answers and every node is there."""
    traffic = Traffic(bus, 0, [])
    async with asyncio.timeout(START_S):
        while True:
            with contextlib.suppress(BusUnavailable):
                presence = await traffic.client.presence()
                if sum(len(found.devices) > 0 for found in presence.values()) == nodes:
                    await traffic.objects()
                    return
            await asyncio.sleep(0.5)


def _keep(run: Chaos, found: Machines, values: list[AnyObject], where: Path) -> None:
    """Keep what tells how a rule came to be broken: objects, reports, logs, journals, folders."""
    shutil.rmtree(where, ignore_errors=True)
    ignored = shutil.ignore_patterns("keys", "nats", "*.bin")
    shutil.copytree(found.places.state, where, symlinks=True, ignore=ignored)
    lines = [encode_json(value) for value in (*values, *run.traffic.reports)]
    (where / "told.jsonl").write_bytes(b"\n".join(lines))


async def chaos(seconds: float, seed: int, keep: Path) -> int:
    """Run, print, and leave nothing behind but `keep`, if a rule is broken: then give 1."""
    broken: list[str] = []
    with machines(NODES) as found:
        bus = Bus(found.url, "chaos", credentials=found.root)
        try:
            found.start_all()
            await bus.connect()
            await _ready(bus, NODES)
            print(f"chaos with seed {seed} for {seconds:.0f} s, run {found.run}", flush=True)
            run = Chaos(found, bus, seed, seconds)
            broken = await run.run()
            print(run.summary())
            if broken:
                _keep(run, found, await run.traffic.objects(), keep / f"seed-{seed}")
        finally:
            await to_the_end(_cleaned(found, bus))
    left = processes.members(found.run)
    broken += [f"left: {member.pid} {member.command}" for member in left]
    for line in broken:
        print(f"BROKEN {line}")
    if broken:
        print(f"what they left is kept in {keep / f'seed-{seed}'}")
    print(f"leftover {len(left)}; {'BROKEN' if broken else 'every rule holds'}; seed {seed}")
    return 1 if broken else 0


async def _cleaned(found: Machines, bus: Bus) -> None:
    await bus.close()
    await found.end()


def main() -> int:
    """Read the arguments and run."""
    parser = argparse.ArgumentParser(prog="make chaos")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 1_000_000)
    parser.add_argument(
        "--keep", type=Path, default=Path(".chaos"), help="where a broken run leaves what it wrote"
    )
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    try:
        return asyncio.run(chaos(given.seconds, given.seed, given.keep))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
