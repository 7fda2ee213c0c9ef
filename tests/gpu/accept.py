"""A first acceptance on a GPU: what only real hardware can say.

    make accept GIB=8 OUT=accept.json
    python3 tests/gpu/accept.py --gib 8 --out accept.json

It needs this tree, msgspec, and what a GPU machine has: numpy, xxhash and cuda-bindings, and
PyTorch for the step that is about it. Nothing is installed. A line is written for each step, and
the JSON after each. Exit status 1 when a step has failed; what cannot be tried is skipped, with
the reason. The steps are explained in docs/how-to/accept-on-a-gpu.md.

This process makes no call of the driver, which may hang: children do, and are killed after each
step.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import resource
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    *(str(ROOT / each / "src") for each in ("services/gms", "services/gms-client", "shared")),
    str(ROOT),
]
sys.path[:0] = SOURCES

MIB, GIB = 2**20, 2**30
_PR_SET_PDEATHSIG = 1
SLACK = 64 * MIB
"""What the driver may count more or less than it was asked for."""

SETTLES_S = 30.0
"""How long the memory of a process that ended may take to be free."""

UID = "00000000-0000-4000-8000-000000000001"


class Broken(Exception):
    """What was seen is not what has to be; `trace` is what a child wrote about it."""

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


class Skipped(Exception):
    """This machine cannot try the step; the message says why."""


class OutOfTime(Exception):
    """A step has used its time."""


def require(holds: object, otherwise: str) -> None:
    """Raise Broken with `otherwise` unless the condition holds."""
    if not holds:
        raise Broken(otherwise)


class Child:
    """A process of a role, which says a line of JSON for each thing it has done."""

    def __init__(self, role: str, arguments: Sequence[object], environment: dict[str, str]) -> None:
        self._role = role
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        command = [sys.executable, __file__, "--role", role, str(os.getpid()), *map(str, arguments)]
        path = [*SOURCES, *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process: Any = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            # A line that were read ahead would not be seen by select.
            bufsize=0,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path)} | environment,
            # A group of its own, so that its children are killed with it.
            start_new_session=True,
        )

    def hear(self, within_s: float = 120.0) -> Any:
        """Wait for the next thing it says.

        Raise Broken if it ends before that, and Skipped if it says that something is missing.
        """
        if not select.select([self.process.stdout], [], [], within_s)[0]:
            raise Broken(f"{self._role} said nothing for {within_s:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            status, written = self.process.wait(), self.errors()
            # The message of an error of the product has its next step on a line of its own.
            lines = [line for line in written.splitlines() if not line.startswith("Next: ")]
            last = lines[-1] if lines else ""
            raise Broken(f"{self._role} ended with {status}: {last}", written)
        said = json.loads(line)
        if isinstance(said, dict) and "missing" in said:
            raise Skipped(said["missing"])
        return said

    def tell(self, word: str = "") -> None:
        self.process.stdin.write(f"{word}\n".encode())

    def errors(self) -> str:
        """Return the end of what it wrote to standard error."""
        self._errors.seek(0)
        return self._errors.read()[-4000:].strip()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        self._errors.close()


class Run:
    """What a step has: the options, the facts of the machine, and children."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.facts: dict[str, Any] = {}
        self.found: dict[str, Any] = {}
        """What the step has found so far, which is kept if it fails or its time runs out."""
        self._children: list[Child] = []

    @property
    def device(self) -> dict[str, Any]:
        """The first device."""
        return self.facts["devices"][0]

    def size(self, share: float, most: int) -> int:
        """Return a share of the device in whole granules, and at most `most`."""
        wanted = min(int(self.device["capacity"] * share), most)
        return max(1, wanted // self.device["granularity"]) * self.device["granularity"]

    def start(self, role: str, *arguments: object, **environment: str) -> Child:
        child = Child(role, arguments, environment)
        self._children.append(child)
        return child

    def begun(self, role: str, *arguments: object) -> Child:
        """Start a role, and wait until it says something."""
        child = self.start(role, *arguments)
        child.hear()
        return child

    def ask(self, role: str, *arguments: object, **environment: str) -> Any:
        """Run a role to its first answer."""
        child = self.start(role, *arguments, **environment)
        found = child.hear(self.options.limit_s)
        self.kill(child)
        return found

    def kill(self, child: Child) -> None:
        child.kill()
        self._children.remove(child)

    def kill_all(self) -> None:
        while self._children:
            self.kill(self._children[-1])

    @contextlib.contextmanager
    def serving(self) -> Iterator[str]:
        """Run the service on every device; yields the folder of its socket."""
        child = self.start("serve")
        yield child.hear()
        with contextlib.suppress(BrokenPipeError):
            child.process.stdin.close()
        child.process.wait(SETTLES_S)
        self.kill(child)

    def used(self) -> int:
        """Return how many bytes of the first device any process has. Skipped without a meter."""
        found = self.ask("used", self.device["uuid"])
        if found is None:
            raise Skipped("neither NVML nor nvidia-smi tells the memory in use")
        return int(found)

    def settled(self, at_most: int) -> int:
        """Return the memory in use once it is at most this, or after the time for that."""
        end = time.monotonic() + SETTLES_S
        while (used := self.used()) > at_most and time.monotonic() < end:
            time.sleep(0.2)
        return used


def facts(run: Run) -> None:
    """What machine this is."""
    run.facts = run.ask("facts", run.options.folder)
    run.found |= run.facts


def conformance(run: Run) -> None:
    """Every device keeps every rule."""
    broken = []
    for each in run.facts["devices"]:
        lines = run.ask("conformance", each["index"])
        run.found[each["uuid"]] = {
            "holds": sum(line.startswith("holds") for line in lines),
            "skipped": [line for line in lines if line.startswith("skipped")],
        }
        broken += [line for line in lines if line.startswith("BROKEN")]
    require(not broken, "; ".join(broken))


def footprint(run: Run) -> None:
    """An idle server costs nothing, and a sleeping client its context."""
    uuid, size, before = run.device["uuid"], run.size(0.1, GIB), run.used()
    with run.serving() as folder:
        idle = run.used() - before
        bare = run.begun("context", uuid)
        context = run.used() - before - idle
        run.kill(bare)
        run.settled(before + idle + SLACK)
        client = run.begun("hold", folder, uuid, size, "asleep")
        asleep = run.used() - before - size
        run.kill(client)
        gone = run.settled(before + size + SLACK) - before - size
    left = run.settled(before + SLACK) - before
    run.found.update(
        idle_server=idle,
        context=context,
        sleeping_client=asleep,
        client_gone=gone,
        server_gone=left,
    )
    require(idle < SLACK, f"an idle server takes {idle} bytes: it has made a context")
    more = f"a sleeping client takes {asleep} bytes, its context {context}"
    require(asleep - context < SLACK, more)
    require(gone < SLACK, f"{gone} bytes of a client stayed after its end")
    require(left < SLACK, f"{left} bytes stayed after the server's end")


def addresses(run: Run) -> None:
    """Fresh processes get the addresses that they ask for, with PyTorch first in half of them."""
    run.found |= {"plain": 0, "torch": 0}
    refused = []
    for number in range(run.options.processes):
        kind = "torch" if number % 2 and run.facts["torch"] else "plain"
        answer = run.ask("reserve", kind, run.device["uuid"])
        run.found[kind] += 1
        refused += [answer] if answer != "exact" else []
    require(not refused, f"{len(refused)} processes got others: {refused[0] if refused else ''}")


def full_device(run: Run) -> None:
    """A full device refuses, gives back, and has room again when a foreign process is killed."""
    uuid, found = run.device["uuid"], run.found
    found |= run.ask("fill", uuid)
    with run.serving() as folder:
        # It has its context before the device is full.
        client = run.begun("allocate", folder, uuid, run.size(0.3, 64 * GIB))
        foreign = run.start("eat", uuid, 0.9)
        found["foreign_bytes"] = foreign.hear()
        client.tell()
        # It is refused, or waits, meanwhile.
        time.sleep(1.0)
        killed = time.monotonic()
        run.kill(foreign)
        got = client.hear(2 * SETTLES_S)
        require(got["at"] > killed, "a device that another process had filled gave memory")
        found |= {"after_kill_s": round(got["at"] - killed, 3), "refusals": got["refusals"]}


def killed_processes(run: Run) -> None:
    """A reader that writes faults alone; what a killed reader or writer had is free again."""
    uuid, size, found = run.device["uuid"], run.size(0.05, 512 * MIB), run.found
    with run.serving() as folder:
        run.begun("hold", folder, uuid, size, "awake")
        reader = run.begun("read", folder, uuid)
        vandal = run.start("vandal", folder, uuid)
        require(vandal.hear() == "tries", "the reader that writes did not come so far")
        found["vandal"] = vandal.hear()
        require(found["vandal"] != "wrote", "a reader has written")
        reader.tell()
        require(reader.hear() == "read", "the fault of one process ended another")
        run.kill(reader)
        before = run.used()
        writer = run.begun("write", folder, uuid, size)
        during = run.used()
        require(during >= before + size, "the writer has no memory")
        begin = time.monotonic()
        run.kill(writer)
        run.ask("lock", folder, uuid)
        found["next_lock_s"] = round(time.monotonic() - begin, 3)
        stayed = run.settled(before + SLACK) - before
        found["memory_back_s"] = round(time.monotonic() - begin, 3)
        require(stayed < SLACK, f"{stayed} bytes of a killed writer stayed")
    found["xid"] = [line[-120:] for line in output("dmesg").splitlines() if "Xid" in line][-3:]


def bandwidth(run: Run) -> None:
    """Saves and loads against the disk and PCIe alone, by the number of requests."""
    free = shutil.disk_usage(run.options.folder).free
    wanted = int(run.options.gib * GIB)
    size = run.size(0.4, min(wanted, free // 3))
    found = run.found
    found["bytes"] = size
    if size < wanted:
        found["why_smaller"] = f"{free} bytes of disk, {run.device['capacity']} of the device"
    with tempfile.TemporaryDirectory(prefix="accept-", dir=run.options.folder) as folder:
        threads = run.options.threads
        child = run.start("bandwidth", folder, run.device["index"], size, threads)
        try:
            while (said := child.hear(run.options.limit_s)) is not None:
                found |= said
        finally:
            # Before the folder goes.
            run.kill(child)


def gds(run: Run) -> None:
    """KvikIO reads a part into the device, whose bytes are verified, beside a load by the host."""
    free = shutil.disk_usage(run.options.folder).free
    size = run.size(0.2, min(int(run.options.gib * GIB), 4 * GIB, free // 3))
    threads = max(map(int, run.options.threads.split(",")))
    with tempfile.TemporaryDirectory(prefix="accept-", dir=run.options.folder) as folder:
        run.found |= run.ask("gds", folder, run.device["index"], size, threads)
    if run.found["way"] != "gds":
        why = "there is no GPUDirect Storage here, and the host has read it all"
        raise Skipped(f"{why}: {run.found}")


def pytorch(run: Run) -> None:
    """A model in a pool, with a captured CUDA graph, answers alike after ten sleeps."""
    if not run.facts["torch"]:
        raise Skipped("PyTorch is not installed")
    if not run.facts["torch_cuda"]:
        raise Skipped(f"PyTorch {run.facts['torch']} finds no CUDA device")
    with run.serving() as folder:
        writer = run.start("torch_writer", folder, run.device["uuid"], run.size(0.1, 2 * GIB))
        found = run.found
        found |= writer.hear(run.options.limit_s)
        other = run.ask("torch_reader", folder, found.pop("state"))
        require(other["sums"] == found.pop("sums"), "another process has other bytes")
        # Outside of a graph the library may choose another order of the same sums.
        is_alike = math.isclose(other["answer"], found["answer"], rel_tol=0.02)
        require(is_alike, f"another process answers {other['answer']}, and not {found['answer']}")


def checkpoints(run: Run) -> None:
    """A process whose pool is asleep is locked, checkpointed, restored and unlocked."""
    uuid, size = run.device["uuid"], run.size(0.05, 512 * MIB)
    failed = []
    with run.serving() as folder:
        run.begun("hold", folder, uuid, size, "awake")
        for state in ("asleep", "awake"):
            worker = run.start("worker", folder, uuid, state)
            first, before = worker.hear(), run.used()
            run.found[state] = done = run.ask("checkpoint", worker.process.pid)
            is_through = list(done["status"].values()) == [0] * 4
            # Awake it has imports, which not every driver checkpoints: what it says is noted.
            if not is_through and state == "asleep":
                failed.append(f"a process that sleeps: {done['status']}")
            if is_through:
                # Memory that it shares no longer would be there twice.
                done["more_memory"] = run.used() - before
                worker.tell()
                done["same_bytes"] = worker.hear() == first
                if not done["same_bytes"]:
                    failed.append(f"{state}: other bytes after the checkpoint")
            run.kill(worker)
    require(not failed, "; ".join(failed))


CONTROLS = ("none", "started", "allocated", "exportable", "reserved", "let-go", "imported")
"""What a process has of CUDA: no CUDA, a context, memory by cuMemAlloc, memory that it may export,
addresses, addresses of memory that it has imported and unmapped, and such memory mapped."""

NO_PROCESS = (1, 3)
"""How the driver answers for a process that does not use CUDA."""


def controls(run: Run) -> None:
    """What the driver does with processes of each kind: a control for `checkpoints`."""
    failed = []
    for kind in CONTROLS:
        process = run.start("control", kind)
        first = process.hear()
        run.found[kind] = done = run.ask("checkpoint", process.process.pid)
        statuses = list(done["status"].values())
        if statuses == [0] * 4:
            process.tell()
            done["same_bytes"] = process.hear() == first
            if not done["same_bytes"] or done["left_open"]:
                failed.append(f"{kind}: {done}")
        elif kind == "none" and statuses[0] not in NO_PROCESS:
            failed.append(f"{kind}: the driver says {statuses[0]}, and not one of {NO_PROCESS}")
        elif kind not in ("none", "imported"):
            # Of what is imported the driver decides by its version: what it says is noted.
            failed.append(f"{kind}: {done['status']}")
        run.kill(process)
    require(not failed, "; ".join(failed))


CAPTURES = (
    ("memory", "criu+cuda", ""),
    ("pool", "criu+cuda", ""),
    ("pool", "cooperative", ""),
    ("llama", "criu+cuda", "transformers"),
    ("shared-llama", "criu+cuda", "transformers"),
    ("shared-llama", "cooperative", "transformers"),
)
"""Kinds of `engine.py`, by which drivers they are captured, and the library that they need."""


def captures(run: Run) -> None:
    """The product captures and restores engines, by a local cluster on this machine."""
    missing = [name for name in ("nats", "typer", "asyncinotify") if not has(name)]
    if missing:
        raise Skipped(f"the dependencies of the product are not installed: {', '.join(missing)}")
    mib, failed = int(run.options.gib * 1024), []
    with tempfile.TemporaryDirectory(prefix="accept-", dir=run.options.folder) as folder:
        child = run.start("captures", folder, mib, run.options.engines)
        try:
            while (said := child.hear(run.options.limit_s)) is not None:
                run.found |= said
                found = said.items()
                failed += [f"{case}: {row['failed']}" for case, row in found if "failed" in row]
        finally:
            run.kill(child)
            # Its processes are no children of ours.
            Cluster(Path(folder)).run("down")
    require(not failed, "; ".join(failed))


def has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def flags(run: Run) -> None:
    """Memory for RDMA and for fabric handles is granted where the device says that it has them."""
    for each in run.facts["devices"]:
        run.found[each["uuid"]] = granted = run.ask("flags", each["index"])
        require(granted["plain"] == 0, f"plain memory: {granted['plain']}")
        has_rdma = each["capabilities"].get("gpu-direct-rdma")
        require(granted["rdma"] == 0 or not has_rdma, f"it has RDMA, and says {granted['rdma']}")
        is_made = bool(each["capabilities"]["rdma-memory"])
        wanted = bool(has_rdma and granted["rdma"] == 0)
        require(is_made == wanted, f"the service has RDMA memory: {is_made}")


def visible_devices(run: Run) -> None:
    """CUDA_VISIBLE_DEVICES reorders what a process sees, and uuids stay those of the devices."""
    expected = [each["uuid"] for each in run.facts["devices"]][::-1]
    if len(expected) < 2:
        raise Skipped("there is one device")
    by_index = run.ask("uuids", CUDA_VISIBLE_DEVICES=",".join(map(str, range(len(expected))[::-1])))
    by_uuid = run.ask("uuids", CUDA_VISIBLE_DEVICES=",".join(expected))
    # Indices may be in another order than that of this process (CUDA_DEVICE_ORDER, or set already).
    require(by_uuid == expected, f"by uuid: {by_uuid} and not {expected}")
    run.found |= {"by_index": by_index, "by_uuid": by_uuid}


STEPS: tuple[Callable[[Run], None], ...] = (
    *(facts, conformance, pytorch, checkpoints, controls, captures, addresses, flags),
    *(visible_devices, bandwidth, gds, footprint, full_device, killed_processes),
)
"""In the order of their value: a step that disturbs the device or takes long comes late."""


def say(what: object = None, **more: object) -> None:
    """Write a line: a value, or fields of an object."""
    sys.stdout.write(json.dumps(more or what) + "\n")
    sys.stdout.flush()


def output(*command: str) -> str:
    """Return what a program prints, or nothing where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def role_facts(folder: str) -> None:
    from gms.adapters.cuda import open_devices
    from snapback_client.cuda import CudaDriver

    settings = ("NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
    queried = (
        "name,driver_version,persistence_mode,compute_mode,mig.mode.current,pcie.link.gen.current"
    )
    torch = version("torch")
    told = ("index", "uuid", "product", "capacity", "granularity")
    say(
        devices=[
            {name: getattr(each.info, name) for name in told}
            | {"capabilities": dict(each.info.capabilities)}
            for each in open_devices()
        ],
        driver_api=CudaDriver().version,
        nvidia_smi=output("nvidia-smi", f"--query-gpu={queried}", "--format=csv,noheader"),
        cuda_bindings=version("cuda-bindings"),
        torch=torch,
        torch_cuda=bool(torch) and _torch_finds_a_device(),
        python=sys.version.split()[0],
        kernel=os.uname().release,
        processors=os.cpu_count(),
        memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        disk_free=shutil.disk_usage(folder).free,
        environment={name: os.environ.get(name) for name in settings},
    )


def _torch_finds_a_device() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def role_conformance(ordinal: str) -> None:
    from gms.conformance.run import check, open_rig

    lines: list[str] = []
    with contextlib.closing(open_rig("cuda", int(ordinal))) as rig:
        check(rig, lambda line: lines.append(line.strip()))
    say(lines)


def role_keep() -> None:
    """Have the first device open until the end."""
    with contextlib.suppress(OSError):
        os.open("/dev/nvidia0", os.O_RDONLY)
    sys.stdin.read()


def role_used(uuid: str) -> None:
    with contextlib.suppress(Exception):
        from cuda.bindings import nvml

        nvml.init_v2()
        handle = nvml.device_get_handle_by_uuid(uuid)
        say(int(nvml.device_get_memory_info_v2(handle).used))
        return
    asked = ("--query-gpu=memory.used", "--format=csv,noheader,nounits")
    found = output("nvidia-smi", "-i", uuid, *asked)
    say(int(found) * MIB if found.isdigit() else None)


class Service:
    """The service on some devices, its loop in a thread."""

    def __init__(self, devices: Sequence[Any], folder: Path) -> None:
        from gms.adapters.lease_socket import LeaseServer
        from gms.handlers.memory_server import MemoryServer
        from gms.handlers.sessions import LeaseSessions

        self.folder = folder
        self.gms = MemoryServer(node="accept", incarnation=folder.name, devices=devices)
        self._lease = LeaseServer(folder, LeaseSessions(self.gms))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.run(self._start())

    async def _start(self) -> None:
        self._lease.start()

    async def _stop(self) -> None:
        await self._lease.close()
        await self.gms.drained()

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def stop(self) -> None:
        self.run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


@contextlib.contextmanager
def served(devices: Sequence[Any]) -> Iterator[Service]:
    with tempfile.TemporaryDirectory(prefix="gms-") as folder:
        service = Service(devices, Path(folder))
        yield service
        service.stop()
    for each in devices:
        each.close()


def role_serve() -> None:
    from gms.adapters.cuda import open_devices

    with served(open_devices()) as service:
        say(str(service.folder))
        sys.stdin.read()


def connected(folder: str, uuid: str, lock: str, **options: Any) -> Any:
    import snapback_client

    return snapback_client.connect(uuid, lock=lock, socket_dir=folder, deadline_s=30, **options)


def role_context(uuid: str) -> None:
    """Hold the context of a device, and a little memory that was filled as a client fills it."""
    from snapback_client.cuda import CudaDriver, CudaRange

    driver = CudaDriver()
    prop = driver.allocation(driver.find(uuid))
    size = int(driver.call("cuMemGetAllocationGranularity", prop, 0))
    handle = driver.call("cuMemCreate", size, prop, 0)
    descriptor = int(driver.call("cuMemExportToShareableHandle", handle, driver.posix, 0))
    at = CudaRange(driver, uuid, size, address=None, exact=False)
    at.map(descriptor, 0, size, writable=True)
    at.clear(0, size)
    say("held")
    sys.stdin.read()


def role_hold(folder: str, uuid: str, size: str, state: str) -> None:
    """Commit memory, and hold it awake or asleep."""
    from tests.gpu.engine import pattern

    pool = connected(folder, uuid, "RW")
    array = pool.allocate("weights", int(size), "uint8")
    array.set(pattern(int(size)))
    pool.commit()
    if state == "asleep":
        pool.sleep()
    say(state)
    sys.stdin.read()


def role_read(folder: str, uuid: str) -> None:
    """Read all the time, and say so when it is asked."""
    pool = connected(folder, uuid, "RO")
    say("reading")
    while True:
        pool["weights"].get()
        if select.select([sys.stdin], [], [], 0)[0] and sys.stdin.readline():
            say("read")


def role_vandal(folder: str, uuid: str) -> None:
    pool = connected(folder, uuid, "RO")
    array = pool["weights"]
    array.flags.writeable = True
    say("tries")
    try:
        array.set(0)
    except Exception as error:  # noqa: BLE001 - what the driver says of it is the finding
        say(str(error))
    else:
        say("wrote")


def role_write(folder: str, uuid: str, size: str) -> None:
    """Write all the time what is never committed."""
    pool = connected(folder, uuid, "RW", domain="kv")
    array = pool.allocate("draft", int(size), "uint8")
    array.set(1)
    say("writing")
    while True:
        array.set(1)


def role_lock(folder: str, uuid: str) -> None:
    connected(folder, uuid, "RW", domain="kv").close()
    say("locked")


def role_reserve(kind: str, uuid: str) -> None:
    from snapback_client.mappings import AddressTaken
    from snapback_client.reservation import address_of, reserve

    if kind == "torch":
        import torch

        torch.empty(MIB, dtype=torch.uint8, device="cuda")
    held = []
    try:
        for ordinal in (0, 1, 7):
            for is_kv in (False, True):
                address = address_of(ordinal, is_kv=is_kv)
                held.append(reserve("cuda", uuid, 256 * GIB, address=address, exact=True))
    except AddressTaken as error:
        say(str(error))
    else:
        say("exact")


def device_of(uuid: str) -> Any:
    from gms.adapters.cuda import open_devices

    return next(each for each in open_devices() if each.info.uuid == uuid)


def role_fill(uuid: str) -> None:
    """Take all of a device in 64 pieces, and give it back."""
    from snapback_client.errors import OutOfDeviceMemory

    device = device_of(uuid)
    granule = device.info.granularity
    made: list[int] = []
    size = max(1, device.info.capacity // 64 // granule) * granule
    begin = time.monotonic()
    with contextlib.suppress(OutOfDeviceMemory):
        while len(made) <= 2 * 64:
            made.append(device.create(size))
    taken = time.monotonic()
    for handle in made:
        device.release(handle)
    freed = time.monotonic()
    device.release(device.create(size))
    say(
        filled_bytes=len(made) * size,
        create_gib_s=round(len(made) * size / GIB / (taken - begin), 1),
        release_gib_s=round(len(made) * size / GIB / max(freed - taken, 1e-6), 1),
    )


def role_eat(uuid: str, share: str) -> None:
    """Hold a share of what is free, as a program does that knows nothing of the service."""
    from snapback_client.cuda import CudaDriver

    driver = CudaDriver()
    device = driver.find(uuid)
    driver.call("cuCtxPushCurrent", driver.call("cuDevicePrimaryCtxRetain", device))
    free, _ = driver.call("cuMemGetInfo")
    size = int(free * float(share)) // (2 * MIB) * 2 * MIB
    driver.call("cuMemAlloc", size)
    say(size)
    sys.stdin.read()


def role_allocate(folder: str, uuid: str, size: str) -> None:
    """Ask for memory until there is enough, from the moment on when it is told to."""
    from snapback_client.errors import OutOfDeviceMemory

    with connected(folder, uuid, "RW", domain="kv") as pool:
        pool.allocate("first", 1, "uint8")
        say("connected")
        sys.stdin.readline()
        refusals = 0
        while True:
            try:
                pool.allocate("second", int(size), "uint8")
            except OutOfDeviceMemory:
                refusals += 1
            else:
                say({"at": time.monotonic(), "refusals": refusals})
                return
            time.sleep(0.05)


def role_uuids() -> None:
    from snapback_client.cuda import CudaDriver

    driver = CudaDriver()
    say([driver.uuid_of(driver.call("cuDeviceGet", n)) for n in range(driver.devices)])


def role_flags(ordinal: str) -> None:
    from snapback_client.cuda import CudaDriver

    driver, found = CudaDriver(), {}
    device = driver.call("cuDeviceGet", int(ordinal))
    kinds = {
        "plain": {},
        "rdma": {"rdma": True},
        "fabric": {"fabric": True},
        "fabric and rdma": {"fabric": True, "rdma": True},
    }
    for name, wanted in kinds.items():
        prop = driver.allocation(device, **wanted)
        status, handle = driver.api.cuMemCreate(2 * MIB, prop, 0)
        found[name] = int(status)
        if not found[name]:
            driver.call("cuMemRelease", handle)
    say(found)


def role_worker(folder: str, uuid: str, state: str) -> None:
    """Say the sum of the bytes, and again when it is asked."""
    pool = connected(folder, uuid, "RO")
    first = int(pool["weights"].get().sum())
    if state == "asleep":
        pool.sleep()
    say(first)
    sys.stdin.readline()
    if pool.is_asleep:
        pool.wake()
    say(int(pool["weights"].get().sum()))


def role_checkpoint(pid: str) -> None:
    from snapback_client.cuda import CudaDriver

    api = CudaDriver().api
    if not hasattr(api, "cuCheckpointProcessCheckpoint"):
        say({"missing": "these bindings have no calls for checkpoints of processes"})
        return
    lock = api.CUcheckpointLockArgs()
    lock.timeoutMs = 10_000
    status: dict[str, int] = {}
    unified, left_open = opened(pid).count("/dev/nvidia-uvm"), -1
    begin = time.monotonic()
    for verb in ("Lock", "Checkpoint", "Restore", "Unlock"):
        arguments = lock if verb == "Lock" else None
        (found,) = getattr(api, f"cuCheckpointProcess{verb}")(int(pid), arguments)
        status[verb.lower()] = int(found)
        if int(found):
            break
        if verb == "Checkpoint":
            left_open = len(opened(pid))
    seconds = round(time.monotonic() - begin, 3)
    say(status=status, seconds=seconds, unified_mappings=unified, left_open=left_open)


def opened(pid: str) -> list[str]:
    """Return the device files of NVIDIA that a process maps, one for each mapping, or has open."""
    lines = Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape").splitlines()
    found = [line.partition("/dev/")[2] for line in lines]
    paths = [f"/dev/{path}" for path in found if path.startswith("nvidia")]
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            # One by its descriptor is no mapping.
            target = str(entry.readlink())
            paths += [f"{target} (open)"] if target.startswith("/dev/nvidia") else []
    return paths


def role_control(kind: str) -> None:
    """Have what the kind says, and say how many of its bytes are right, again when it is asked."""
    right = of_cuda(kind) if kind != "none" else lambda: 0
    say(right())
    sys.stdin.readline()
    say(right())


def of_cuda(kind: str) -> Callable[[], int]:
    """Make what a kind of `CONTROLS` says; return what counts its bytes that are right."""
    import numpy as np

    from snapback_client.cuda import CudaDriver
    from tests.gpu.engine import pattern

    driver, size = CudaDriver(), 64 * MIB
    call = driver.call
    device = call("cuDeviceGet", 0)
    call("cuCtxPushCurrent", call("cuDevicePrimaryCtxRetain", device))
    given = pattern(size)
    back = np.zeros_like(given)

    def right() -> int:
        call("cuMemcpyDtoH", back.ctypes.data, at, size)
        return int((back == given).sum())

    if kind == "started":
        return lambda: 0
    if kind == "reserved":
        call("cuMemAddressReserve", 256 * GIB, 0, 0, 0)
        return lambda: 0
    if kind == "allocated":
        at = call("cuMemAlloc", size)
    else:
        prop = driver.allocation(device)
        handle = call("cuMemCreate", size, prop, 0)
        if kind != "exportable":
            descriptor = int(call("cuMemExportToShareableHandle", handle, driver.posix, 0))
            call("cuMemRelease", handle)
            handle = call("cuMemImportFromShareableHandle", descriptor, driver.posix)
            os.close(descriptor)
        at = call("cuMemAddressReserve", size, 0, 0, 0)
        call("cuMemMap", at, size, 0, handle, 0)
        call("cuMemRelease", handle)
        access = driver.api.CUmemAccessDesc()
        access.location = prop.location
        access.flags = driver.api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        call("cuMemSetAccess", at, size, [access], 1)
    call("cuMemcpyHtoD", at, given.ctypes.data, size)
    if kind == "let-go":
        call("cuCtxSynchronize")
        call("cuMemUnmap", at, size)
        return lambda: 0
    return right


class Cluster:
    """A local cluster on the GPUs of this machine, by the programs of this tree."""

    def __init__(self, folder: Path) -> None:
        services = sorted(str(each) for each in (ROOT / "services").glob("*/src"))
        path = [
            *services,
            str(ROOT / "shared" / "src"),
            *filter(None, [os.environ.get("PYTHONPATH")]),
        ]
        self.environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path),
            "XDG_STATE_HOME": str(folder / "state"),
            "XDG_CONFIG_HOME": str(folder / "config"),
        }

    def run(self, *words: str, said: str = "") -> subprocess.CompletedProcess[str]:
        """Run a command of snapshotctl."""
        command = [sys.executable, "-P", "-m", "snapshotctl", *words]
        return subprocess.run(
            command, input=said, capture_output=True, text=True, check=False, env=self.environment
        )

    def ok(self, *words: str, said: str = "") -> str:
        done = self.run(*words, said=said)
        require(done.returncode == 0, f"snapshotctl {' '.join(words)}: {done.stderr.strip()}")
        return done.stdout

    def apply(self, kind: str, name: str, version: str, spec: Any, **marks: str) -> None:
        annotations = {f"nvidia.com/{key.replace('_', '-')}": text for key, text in marks.items()}
        value = {
            "apiVersion": version,
            "kind": kind,
            "metadata": {"name": name, "annotations": annotations},
            "spec": spec,
        }
        self.ok("apply", "-f", "-", said=json.dumps(value))

    def pod(self, name: str, kind: str, port: int, mib: int, **marks: str) -> Any:
        """Start an engine, or restore one. Return its first answer."""
        program = str(ROOT / "tests" / "gpu" / "engine.py")
        engine = [sys.executable, program, kind, str(port), str(mib)]
        if kind in ("memory", "llama"):
            ready = ["--ready", f"http://127.0.0.1:{port}/"]
            engine = [sys.executable, "-P", "-m", "snapback_client.run", *ready, "--", *engine]
        # Those that name devices are the agent's to say.
        others = ("SNAPBACK_", "CUDA_", "NVIDIA_")
        variables = {k: v for k, v in self.environment.items() if not k.startswith(others)}
        container = {
            "name": "main",
            "command": engine,
            "env": [{"name": key, "value": value} for key, value in variables.items()],
            "resources": {"limits": {"nvidia.com/gpu": 1}},
        }
        self.apply("Pod", name, "v1", {"containers": [container]}, **marks)
        self.ok("wait", f"pod/{name}", "--timeout", "180s")
        return answer_of(port)

    def took(self, target: str, span: str) -> float:
        """Return how long what has the root span took, in seconds."""
        rows = json.loads(self.ok("trace", target, "-o", "json"))
        [found] = [row for row in rows if row["name"] == span]
        return round((found["end_ns"] - found["start_ns"]) / 1e9, 2)


def answer_of(port: int) -> Any:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=60) as reply:
        return json.load(reply)["answer"]


def role_captures(folder: str, mib: str, engines: str) -> None:
    cluster = Cluster(Path(folder))
    started = cluster.run("up", "--device", "cuda", "--driver", "criu")
    if started.returncode:
        say({"missing": started.stderr.strip()})
        return
    for number, (kind, driver, needed) in enumerate(CAPTURES):
        can_run = not needed or (has(needed) and _torch_finds_a_device())
        if can_run and kind in engines.split(","):
            found = one_capture(cluster, number, kind, driver, int(mib))
            say({f"{kind} by {driver}": found})
    say(None)


def one_capture(cluster: Cluster, number: int, kind: str, driver: str, mib: int) -> dict[str, Any]:
    """Capture an engine, end it, and restore it."""
    from tests.support.ports import free_port

    name, port, found = f"engine-{number}", free_port(), {}
    marks = {"capture_driver": driver} if driver != "cooperative" else {}
    try:
        begin = time.monotonic()
        first = cluster.pod(name, kind, port, mib, **marks)
        found["cold_start_s"] = round(time.monotonic() - begin, 2)
        spec = {"source": {"podRef": {"name": name}}, "driver": driver}
        cluster.apply("Snapshot", name, "nvidia.com/v1alpha1", spec)
        cluster.ok("wait", f"snapshot/{name}", "--timeout", "180s")
        found["capture_s"] = cluster.took(f"snapshot/{name}", "capture")
        [content] = [
            each
            for each in json.loads(cluster.ok("get", "snapshotcontents", "-o", "json"))
            if each["spec"]["snapshotRef"]["name"] == name
        ]
        found["bytes"] = content["status"]["committed"]["bytes"]
        found["same_after_capture"] = answer_of(port) == first
        cluster.ok("delete", f"pod/{name}")
        cluster.ok("wait", f"pod/{name}", "--for=delete")
        again = cluster.pod(f"{name}-again", kind, port, mib, restore_from=name)
        found["restore_s"] = cluster.took(f"pod/{name}-again", "restoration")
        found["same_after_restore"] = again == first
        cluster.ok("delete", f"pod/{name}-again")
        cluster.ok("delete", f"snapshot/{name}")
        require(found["same_after_capture"] and found["same_after_restore"], "another answer")
    except Broken as error:
        found["failed"] = str(error)
        found["log"] = cluster.run("logs", name).stdout[-1000:]
    return found


class Transfers:
    """Saves and loads of the weights of a device, and what the disk and PCIe do alone."""

    def __init__(self, service: Service, device: str, folder: Path) -> None:
        from gms.adapters.transfer_process import TransferProcesses

        self._service = service
        self._device = device
        self.folder = folder
        self._processes = TransferProcesses()
        self._numbers = itertools.count()
        self.generation: Any = None

    def layout(self) -> Any:
        committed = self._service.gms.table.device(self._device).weights.committed
        return committed.ref

    def seconds(self, task: Any) -> tuple[float, Any]:
        from gms.domain.tasks import TransferDone

        async def follow() -> Any:
            async with contextlib.aclosing(self._processes.run(task)) as events:
                async for event in events:
                    if isinstance(event, TransferDone):
                        return event
            raise Broken("a transfer ended without a result")

        begin = time.monotonic()
        done = self._service.run(follow())
        return time.monotonic() - begin, done

    def place(self, threads: int) -> dict[str, Any]:
        return {
            "socket_dir": str(self._service.folder),
            "root": str(self.folder),
            "device": self._device,
            "namespace": "default",
            "content_uid": UID,
            "generation": 1,
            "part": "gpu-0",
            "deadline_s": 300.0,
            "threads": threads,
        }

    def save(self, threads: int) -> tuple[float, Any]:
        from gms.domain.tasks import SaveTask

        order = f"save-{UID}-gpu-0"
        return self.seconds(SaveTask(**self.place(threads), order=order, layout=self.layout()))

    def load(self, threads: int, saved: Any, **options: Any) -> tuple[float, Any]:
        """Load beside what is committed, and drop it."""
        from gms.domain.tasks import LoadTask

        # One that was dropped is not taken again.
        token = f"load-{next(self._numbers)}"
        task = LoadTask(
            **self.place(threads),
            **options,
            part_digest=saved.digest,
            load_token=token,
            layout_id=saved.layout.layout_id,
            structure_hash=saved.layout.structure_hash,
            if_match=self.generation,
        )
        loaded = self.seconds(task)
        gms = self._service.gms
        self._service.run(gms.drop_hidden_when_unused(self._device, token, wait_s=30))
        return loaded


def disk_gb_s(folder: Path, size: int, threads: int, *, write: bool) -> float:
    """Return the rate of O_DIRECT requests in files of their own, which are written first."""
    from tests.bench import disk

    call, memory = os.pwritev if write else os.preadv, [disk.huge_pages() for _ in range(threads)]
    begin = time.monotonic()
    disk.raw_transfer(
        folder / "raw", memory, size, call, threads=threads, files=disk.files_of(size)
    )
    return size / (time.monotonic() - begin) / 1e9


def pcie_gb_s(uuid: str, granule: int) -> dict[str, float]:
    """Return the rates of copies from and to pinned memory, two at a time."""
    from snapback_client.cuda import CudaDriver, CudaRange
    from snapback_client.frames import Access

    device, size, found = device_of(uuid), 8 * granule, {}
    at = CudaRange(CudaDriver(), uuid, size, address=None, exact=False)
    handle = device.create(size)
    descriptor = device.export(handle, Access.RW)
    at.map(descriptor, 0, size, writable=True)
    os.close(descriptor)
    copiers = [at.copier(size) for _ in range(2)]
    for name, is_read in (("to_device", False), ("to_host", True)):
        begin, count = time.monotonic(), 0
        while time.monotonic() - begin < 1.0:
            for copier in copiers:
                for _ in range(8):
                    (copier.read if is_read else copier.write)(0, copier.buffer)
            for copier in copiers:
                copier.flush()
            count += 8 * len(copiers)
        found[name] = round(count * size / (time.monotonic() - begin) / 1e9, 2)
    for copier in copiers:
        copier.close()
    at.release()
    device.release(handle)
    device.close()
    return found


def filled(pool: Any, size: int) -> None:
    """Make arrays of so many bytes in all, no two of which are equal."""
    import numpy as np

    piece = min(256 * MIB, size)
    block = np.random.default_rng(1).integers(0, 255, piece, dtype="u1")
    for number in range(-(-size // piece)):
        length = min(piece, size - number * piece)
        block[:8] = number
        pool.allocate(f"weights-{number}", length, "uint8").set(block[:length])


def nodding(pool: Any, times: int, after: Callable[[], object] = lambda: None) -> dict[str, float]:
    """Let a pool sleep and wake; calls `after` each time, and returns the medians."""
    sleeps, wakes = [], []
    for _ in range(times):
        begin = time.monotonic()
        pool.sleep()
        slept = time.monotonic()
        pool.wake()
        wakes.append(time.monotonic() - slept)
        sleeps.append(slept - begin)
        after()
    return {
        "sleep_ms": round(1000 * statistics.median(sleeps), 1),
        "wake_ms": round(1000 * statistics.median(wakes), 1),
    }


def role_bandwidth(folder: str, ordinal: str, size: str, threads: str) -> None:
    from gms.adapters.cuda import open_devices

    devices = open_devices()
    info, probed = devices[int(ordinal)].info, min(int(size), 4 * GIB)
    with served(devices) as service:
        transfers = Transfers(service, info.uuid, Path(folder) / "parts")
        pcie = pcie_gb_s(info.uuid, info.granularity)
        say({"pcie_gb_s": pcie})
        with connected(str(service.folder), info.uuid, "RW") as pool:
            filled(pool, int(size))
            transfers.generation = pool.commit()
            say(nodding(pool, 5))
        for count in map(int, threads.split(",")):
            say({f"{count} requests": one_round(transfers, count, probed, pcie)})
    say(None)


def one_round(
    transfers: Transfers, threads: int, probed: int, pcie: dict[str, float]
) -> dict[str, float]:
    """Save, load, write and read with so many requests at a time; rates in GB/s."""
    transfers.folder.mkdir(parents=True)
    saving, saved = transfers.save(threads)
    raw_write = disk_gb_s(transfers.folder, probed, threads, write=True)
    loading, _ = transfers.load(threads, saved)
    raw_read = disk_gb_s(transfers.folder, probed, threads, write=False)
    shutil.rmtree(transfers.folder)
    save, load = saved.moved / saving / 1e9, saved.moved / loading / 1e9
    return {
        "save": round(save, 2),
        "load": round(load, 2),
        "disk_write": round(raw_write, 2),
        "disk_read": round(raw_read, 2),
        "save_of_limit": round(save / min(raw_write, pcie["to_host"]), 2),
        "load_of_limit": round(load / min(raw_read, pcie["to_device"]), 2),
    }


def role_gds(folder: str, ordinal: str, size: str, threads: str) -> None:
    """Load a part by the host and by KvikIO, in turn."""
    from gms.adapters.cuda import open_devices

    if importlib.util.find_spec("kvikio") is None:
        say({"missing": "KvikIO is not installed"})
        return
    devices = open_devices()
    info = devices[int(ordinal)].info
    with served(devices) as service:
        transfers = Transfers(service, info.uuid, Path(folder) / "parts")
        with connected(str(service.folder), info.uuid, "RW") as pool:
            filled(pool, int(size))
            transfers.generation = pool.commit()
        transfers.folder.mkdir(parents=True)
        _, saved = transfers.save(int(threads))
        rates: dict[str, list[float]] = {"posix-direct": [], "gds": []}
        way = ""
        for _ in range(3):
            for backend, found in rates.items():
                # Its digests are compared with what the device has, or it fails.
                spent, done = transfers.load(int(threads), saved, backend=backend)
                found.append(saved.moved / spent / 1e9)
                way = done.backend
    say(
        {"way": way, "bytes": int(size), "requests": int(threads)}
        | {f"{name} GB/s": round(statistics.median(found), 2) for name, found in rates.items()}
    )


def role_torch_writer(folder: str, uuid: str, size: str) -> None:
    """Commit a model, capture its answer in a graph, and replay that after each of ten sleeps."""
    import torch

    from snapback_client.torch import TorchMemory

    torch.manual_seed(1)
    with connected(folder, uuid, "RW") as pool:
        memory = TorchMemory({"weights": pool})
        # Few and large layers: each makes the answer smaller.
        side = min(8192, math.isqrt(int(size) // 4))
        options = {"bias": False, "device": memory.device, "dtype": torch.bfloat16}
        with memory.region("weights"):
            layers = range(max(2, int(size) // (2 * side * side)))
            model = torch.nn.Sequential(*(torch.nn.Linear(side, side, **options) for _ in layers))
        model.requires_grad_(False)
        memory.publish(model)
        given = torch.ones(1, side, device=memory.device, dtype=torch.bfloat16)
        answered = replayed(model, given) if memory.device != "cpu" else lambda: model(given)
        before = answered().clone()
        places = [each.data_ptr() for each in model.parameters()]

        def same() -> None:
            require(torch.equal(answered(), before), "the model answers otherwise after a sleep")

        times = nodding(pool, 10, same)
        require(places == [each.data_ptr() for each in model.parameters()], "a tensor has moved")
        parameters = sum(each.numel() * each.element_size() for each in model.parameters())
        say(
            **times,
            parameter_bytes=parameters,
            committed_of_parameters=round(sum(pool.sizes().values()) / parameters, 3),
            state=pool.save_state().hex(),
            sums=[sum_of(each) for each in model.state_dict().values()],
            answer=before.float().abs().sum().item(),
        )
        sys.stdin.read()


def replayed(model: Any, given: Any) -> Callable[[], Any]:
    """Capture the answer of a model in a CUDA graph; return what replays it."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        model(given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        answer = model(given)

    def replay() -> Any:
        answer.zero_()
        graph.replay()
        torch.cuda.synchronize()
        return answer

    return replay


def sum_of(tensor: Any) -> int:
    """Return the sum of the bytes of a tensor."""
    import torch

    return int(tensor.view(torch.uint8).sum(dtype=torch.int64).item())


def role_torch_reader(folder: str, state: str) -> None:
    """Answer as the model does whose tensors are committed, in their order."""
    import torch

    import snapback_client
    from snapback_client.torch import TorchMemory

    with snapback_client.restore(bytes.fromhex(state), socket_dir=folder) as pool:
        memory = TorchMemory({"weights": pool})
        tensors = memory.tensors()
        names = sorted(tensors, key=lambda name: int(name.partition(".")[0]))
        side = tensors[names[0]].shape[1]
        value = torch.ones(1, side, device=memory.device, dtype=torch.bfloat16)
        for name in names:
            value = torch.nn.functional.linear(value, tensors[name])
        sums = [sum_of(tensors[name]) for name in names]
        say({"sums": sums, "answer": value.float().abs().sum().item()})


class Row(NamedTuple):
    """How a step has ended."""

    step: str
    result: str
    reason: str
    seconds: float
    found: dict[str, Any]
    trace: str


def attempt(step: Callable[[Run], None], run: Run, limit_s: float) -> Row:
    """Carry out a step within its time and kill all of its children."""

    def stop(*_: object) -> None:
        raise OutOfTime(f"it took longer than {limit_s:.0f} s")

    begin, result, reason, trace = time.monotonic(), "ok", "", ""
    run.found = {}
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(limit_s, 0.01))
    try:
        if step is not facts and not run.facts:
            raise Skipped("no device was found")
        step(run)
    except Skipped as skipped:
        result, reason = "skipped", str(skipped)
    except Exception as error:  # noqa: BLE001 - whatever goes wrong is a finding, and others follow
        result, reason = "failed", str(error) or type(error).__name__
        trace = getattr(error, "trace", "") or traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        run.kill_all()
    return Row(step.__name__, result, reason, round(time.monotonic() - begin, 1), run.found, trace)


def write_report(path: Path, options: argparse.Namespace, rows: Sequence[Row]) -> None:
    """Write the JSON, whole or not at all."""
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "result": "failed" if any(row.result == "failed" for row in rows) else "ok",
        "gib": options.gib,
        "steps": [row._asdict() for row in rows],
    }
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(report, indent=1) + "\n")
    new.rename(path)


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    names = [step.__name__ for step in STEPS]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("accept.json"), help="where the JSON goes")
    parser.add_argument("--gib", type=float, default=8.0, help="how much is saved and loaded (8)")
    parser.add_argument("--folder", default=".", help="a folder of the disk that is measured (.)")
    parser.add_argument("--threads", default="8,16", help="requests at a time (8,16)")
    kinds = ",".join(dict.fromkeys(kind for kind, _, _ in CAPTURES))
    parser.add_argument("--engines", default=kinds, help=f"kinds to capture ({kinds})")
    parser.add_argument("--processes", type=int, default=10, help="fresh processes (10)")
    parser.add_argument("--limit-s", type=float, default=300.0, help="of all steps together (300)")
    parser.add_argument("--only", default="", help=f"of {','.join(names)}")
    options = parser.parse_args(arguments)
    options.only = [name for name in options.only.split(",") if name]
    if unknown := set(options.only) - set(names):
        parser.error(f"no step is called {', '.join(sorted(unknown))}")
    return options


def main(arguments: Sequence[str]) -> int:
    options = parsed(arguments)
    # As ctrl-C does, so that children are killed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    run, rows, end = Run(options), [], time.monotonic() + options.limit_s
    # Without persistence mode the driver starts a device anew for each process, in 1 to 3 s.
    keeper = Child("keep", [], {})
    for step in STEPS:
        # Without the facts of the machine no step knows its devices.
        if options.only and step.__name__ not in options.only and step is not facts:
            continue
        # One step that hangs must leave time to the others.
        left = min(end - time.monotonic(), 0.4 * options.limit_s)
        row = attempt(step, run, left)
        rows.append(row)
        about = row.reason or json.dumps(row.found)
        print(f"{row.result:8}{row.step:18}{row.seconds:6.1f} s  {about[:200]}", flush=True)
        write_report(options.out, options, rows)
    keeper.kill()
    return int(any(row.result == "failed" for row in rows))


def play(role: str, parent: str, arguments: Sequence[str]) -> None:
    """Be a child, which ends with its parent."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != int(parent):
        sys.exit(1)
    globals()[f"role_{role}"](*arguments)
    sys.stdout.flush()
    # Threads and handlers of the driver may hang at the end of the interpreter.
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--role"]:
        play(sys.argv[2], sys.argv[3], sys.argv[4:])
    sys.exit(main(sys.argv[1:]))
