"""Plain processes that the agent starts in namespaces, dumped and restored by the real CRIU."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from snapshot_agent.adapters import procfs
from snapshot_shared.orders import DumpOrder
from snapshot_shared.steps import CRIU_STEPS
from tests.bench import engines
from tests.integration.gms.test_run import ask
from tests.integration.snapshotctl.conftest import Cli, needs_engines
from tests.process import node as nodes
from tests.process.node import INIT, PYTHON, REPOSITORY, WORKER, Node, Pause, are_whole
from tests.support.agent_rig import Pod, fresh_uid, is_gone
from tests.support.live_cluster import LiveCluster, find, snapshot
from tests.support.ports import free_port
from tests.support.waiting import until

# A plain process has the mounts of this machine, so that none may come or go meanwhile.
pytestmark = pytest.mark.xdist_group("mounts")

STATES = Path(__file__).with_name("state_worker.py")
SHORT = ("--size-mib", "16", "--warm-up", "short")


class PlainNode(Node):
    """A node whose agent starts the workers."""

    def __init__(self, folder: Path, url: str, sockets: Path) -> None:
        super().__init__(folder, url, sockets)
        # In memory, as /run is; the rest is where the workers see it.
        self.run = Path(tempfile.mkdtemp(prefix="snapback-run-", dir="/dev/shm"))

    async def close(self) -> None:
        for pod in self.pods.values():
            if (first := procfs.child_of(pod.pid(self.journal))) is not None:
                procfs.send(first, signal.SIGKILL)
        await super().close()
        shutil.rmtree(self.run)

    @property
    def environment(self) -> dict[str, str]:
        return super().environment | {"SNAPBACK_WORLD": "standalone", "SNAPBACK_INIT": str(INIT)}

    async def worker(self, name: str, *, waits: bool = False) -> Pod:
        """Run a pod that CRIU may dump, or one that waits for a process."""
        words = [PYTHON, str(WORKER), "--heap-mib", "8", "--folder", "/dev/shm/data", "--port", "0"]
        # CRIU can dump no io_uring.
        words.append("--ring")
        pod = self.pod(name=name, command=words)
        await self.done(self.run_order(pod, standby=waits), "started")
        wanted = "waiting for a restore" if waits else "count"
        await until(lambda: wanted in log_of(pod), f"the start of {name}")
        return pod

    async def halted(self, worker: Pod) -> tuple[Pause, DumpOrder]:
        """Dump a worker until CRIU has written its images."""
        prepared = await self.prepared(worker, content := fresh_uid())
        pause = Pause(self.programs, "post-dump")
        dump = self.dump_order(worker, content, prepared.vector)
        await self.send(dump)
        await pause.reached()
        return pause, dump


@pytest.fixture
async def node(criu: Path, nats_url_session: str) -> AsyncIterator[Node]:
    async with nodes.opened(nats_url_session, PlainNode, parent=None) as made:
        await made.process()
        yield made


def log_of(pod: Pod) -> str:
    try:
        return (pod.home / "log").read_text(errors="replace")
    except FileNotFoundError:
        return ""


def lines_of(pod: Pod) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log_of(pod).splitlines() if line.startswith("{")]


async def started(node: PlainNode, *words: str, copies: int = 1) -> list[Pod]:
    """Start a pod, and pods of the same program that wait for its process."""
    pods = [node.pod(name=f"pod-{number}", command=words) for number in range(1 + copies)]
    for pod in pods:
        await node.done(node.run_order(pod, standby=pod is not pods[0]), "started")
    return pods


async def goes_on(pod: Pod) -> list[dict[str, Any]]:
    """Wait for more counts of a worker, whose connections, memory and files have to be whole."""
    before = len(lines_of(pod))
    await until(lambda: len(lines_of(pod)) > before + 2, f"another count of {pod.ref.name}")
    are_whole(lines_of(pod)[before:])
    return lines_of(pod)[before:]


@pytest.mark.parametrize(
    ("options", "count"),
    [
        pytest.param(SHORT, 3, id="text"),
        pytest.param(("--engine", "onnx"), 20, id="onnx", marks=needs_engines),
    ],
)
def test_a_demo_loses_a_node_and_its_worker_goes_on_as_the_process_that_it_was(
    criu: Path, tmp_path: Path, options: Sequence[str], count: int
) -> None:
    cli = Cli(tmp_path)
    out = cli.ok("demo", *options, "--driver", "criu").out
    assert f"all {count} answers are the same, byte for byte" in out
    run = re.search(r" demo-([0-9a-f]{8}): ", out)
    assert run is not None
    assert cli.left(run[1]) == []


def test_a_worker_that_was_restored_is_asked_and_has_programs_beside_it(
    criu: Path, tmp_path: Path
) -> None:
    cli = Cli(tmp_path)
    try:
        out = cli.ok("demo", *SHORT, "--driver", "criu", "--keep").out
        run = re.search(r" (demo-[0-9a-f]{8}): ", out)
        assert run is not None
        cli.environment["SNAPBACK_CLUSTER"] = run[1]
        answer = cli.ok("ask", "demo-llm-restored", "My name is", "-o", "json").value()
        assert answer["answer"]["answer"] == "Ada."
        shown = "echo $POD_NAME $NODE_NAME; ps ax"
        ran = cli.program("exec", "demo-llm-restored", "-c", "main", "--", "sh", "-c", shown).out
        assert ran.startswith("demo-llm-restored node-2\n")
        assert "deploy/examples/text_worker.py" in ran
        assert "snapback-init" not in ran
        pods = cli.ok("get", "pods", "-o", "json").value()
        [source] = {pod["metadata"]["name"] for pod in pods} - {
            "demo-llm-restored",
            "demo-llm-restored-too-small",
        }
        spans = cli.ok("trace", "pod/demo-llm-restored", "-o", "json").value()
        shown = [span["name"] for span in spans if span["name"] in CRIU_STEPS]
        # The pages are checked beside what CRIU does, up to the end of `await-pages`.
        shown.remove("check-pages")
        assert shown == [
            *("check-images", "read-images", "unpack-files", "restore-memory"),
            *("await-pages", "thaw-restored"),
        ]
        dead = cli.run("exec", source, "--", "true")
        assert (dead.code, "name a pod that runs: demo-llm-restored\n" in dead.err) == (3, True)
    finally:
        cli.purge()


async def test_a_plain_process_waits_in_its_place_until_it_is_restored(node: PlainNode) -> None:
    source = await node.worker("source")
    artifact = await node.captured(source, fresh_uid())
    await node.done(node.stop_order(source), "stopped")
    target = await node.worker("target", waits=True)
    await node.done(node.place_order(target, artifact), "placed")
    lines = await goes_on(target)
    assert not any("restored" in line["did"] for line in lines)
    await node.done(node.restore_order(target, artifact), "restored")
    await goes_on(target)
    assert [line["did"] for line in lines_of(target) if line["did"]][-1] == "restored 1"


ONLY_WAITS = """
at=$SNAPSHOT_CONTROL_DIR
touch $at/ready-for-snapshot && echo waits
until [ -e $at/snapshot-complete ] || [ -e $at/restore-complete ]; do sleep 0.1; done
ls $at && exec sleep 600
"""


async def test_a_worker_that_only_waits_is_restored_though_it_writes_no_file(
    node: PlainNode,
) -> None:
    source, copy = await started(node, "sh", "-c", ONLY_WAITS)
    await until(lambda: "waits" in log_of(source), "the start of the worker")
    artifact = await node.captured(source, fresh_uid())
    await until(lambda: "snapshot-complete" in log_of(source), "the end of its wait")
    await node.done(node.restore_order(copy, artifact), "restored")
    await until(lambda: "restore-complete" in log_of(copy), "the end of its wait")
    # The agent writes `restored` for it, so an abort leaves it alone.
    await node.done(node.restore_abort(copy), "aborted")
    assert {file.name for file in copy.control.iterdir()} >= {"restore-complete", "restored"}


def lost_by_criu() -> set[str]:
    """Return the states of which the documentation says that CRIU does not bring them back."""
    text = (REPOSITORY / "docs/how-to/after-a-restore.md").read_text()
    _, _, section = text.partition("## What CRIU does not bring back\n")
    names, _, _ = section.partition("\n## ")
    rows = re.findall(r"^\| (?!state |---)(.+?) \|", names, re.MULTILINE)
    return {name.strip("`") for row in rows for name in row.split(", ")}


POLLS = """
# Has a file of its control directory open until it gets SIGUSR1.
import os, pathlib, signal, time
control = pathlib.Path(os.environ["SNAPSHOT_CONTROL_DIR"])
held = open(control / "ready-for-snapshot", "w")
signal.signal(signal.SIGUSR1, lambda *_: held.close())
print("waits", flush=True)
while not {"snapshot-aborted", "restore-complete"} & {*os.listdir(control)}:
    time.sleep(0.1)
print("goes on", flush=True)
time.sleep(600)
"""


async def test_a_process_that_had_a_control_file_open_for_a_moment_is_dumped_again(
    node: PlainNode,
) -> None:
    source, copy = await started(node, PYTHON, "-c", POLLS)
    await until(lambda: "waits" in log_of(source), "the start of the worker")
    pause = Pause(node.programs, "post-dump")
    capture = asyncio.create_task(node.captured(source, fresh_uid()))
    await pause.reached()
    first = procfs.child_of(source.pid(node.journal))
    assert first is not None
    procfs.send(first, signal.SIGUSR1)
    pause.end()
    artifact = await capture
    await node.done(node.restore_order(copy, artifact), "restored")
    await until(lambda: "goes on" in log_of(copy), "the end of its wait")


async def test_a_process_that_keeps_a_control_file_open_is_refused_and_goes_on(
    node: PlainNode,
) -> None:
    [source] = await started(node, PYTHON, "-c", POLLS, copies=0)
    await until(lambda: "waits" in log_of(source), "the start of the worker")
    prepared = await node.prepared(source, content := fresh_uid())
    failure = await node.refused(node.dump_order(source, content, prepared.vector), "CriuFailed")
    assert "ready-for-snapshot of its control directory open" in failure.message
    await node.done(node.abort_order(source, content), "aborted")
    await until(lambda: "goes on" in log_of(source), "the worker's release")


async def test_a_process_lacks_after_its_restore_the_states_that_the_documentation_names(
    node: PlainNode,
) -> None:
    """CPU affinity, timer slack and I/O priority are set again by the helper."""
    source, copy = await started(node, PYTHON, str(STATES))
    await until(lambda: len(lines_of(source)) == 1, "the state of the source")
    artifact = await node.captured(source, fresh_uid())
    await node.done(node.stop_order(source), "stopped")
    await node.done(node.restore_order(copy, artifact), "restored")
    await until(lambda: len(lines_of(copy)) == 1, "the state of the copy")
    (before,), (after,) = lines_of(source)[:1], lines_of(copy)
    assert after.pop("of a second thread")
    lost = {name for name, value in before.items() if after[name] != value}
    # What this kernel or this processor lacks cannot be lost here.
    documented = lost_by_criu() & before.keys()
    # The kernel itself may have put the memory into huge pages again.
    assert lost <= documented
    assert documented - lost <= {"huge pages"}


READS_ITS_UNLINKED_FILE = """
import json, tempfile, time
file = tempfile.TemporaryFile()
file.write(b"x" * 6000)
file.flush()
while True:
    file.seek(0)
    print(json.dumps({"bytes": len(file.read())}), flush=True)
    time.sleep(0.1)
"""


async def test_copies_that_are_restored_at_once_share_no_unlinked_file(node: PlainNode) -> None:
    source, *copies = await started(node, PYTHON, "-c", READS_ITS_UNLINKED_FILE, copies=8)
    await until(lambda: lines_of(source), "the start of the worker")
    (source.control / "ready-for-snapshot").touch()
    artifact = await node.captured(source, fresh_uid())
    orders = [node.restore_order(copy, artifact) for copy in copies]
    await asyncio.gather(*[node.done(order, "restored") for order in orders])
    for copy in copies:
        await until(lambda copy=copy: lines_of(copy), f"what {copy.ref.name} reads")
        assert {line["bytes"] for line in lines_of(copy)} == {6000}
    assert node.left() == []


WATCHES = """
import ctypes, os, pathlib, sys, time
at = pathlib.Path(os.environ["SNAPSHOT_CONTROL_DIR"])
watch = ctypes.CDLL(None).inotify_init()
ctypes.CDLL(None).inotify_add_watch(watch, sys.argv[1].encode(), 0x100)
(at / "ready-for-snapshot").touch()
print("waits", flush=True)
while not any((at / f"{end}-complete").exists() for end in ("snapshot", "restore")):
    time.sleep(0.1)
print([each.name for each in at.iterdir()], flush=True)
os.read(watch, 4096)
print("an event", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def mounted(folder: Path) -> Iterator[None]:
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("is_used", [False, True])
async def test_a_mount_of_the_node_that_is_gone_is_missed_by_those_alone_that_used_it(
    node: PlainNode, tmp_path: Path, *, is_used: bool
) -> None:
    change = f"cd {tmp_path}; " if is_used else ""
    words = ["sh", "-c", f"{change}{ONLY_WAITS}"]
    source, copy = [node.pod(name=name, command=words) for name in ("source", "copy")]
    with mounted(tmp_path):
        await node.done(node.run_order(source), "started")
        await until(lambda: "waits" in log_of(source), "the start of the worker")
        artifact = await node.captured(source, fresh_uid())
        await node.done(node.stop_order(source), "stopped")
    await node.done(node.run_order(copy, standby=True), "started")
    order = node.restore_order(copy, artifact)
    if is_used:
        failure = await node.refused(order, "Incompatible")
        assert failure.values["expected"] == [str(tmp_path)]
    else:
        await node.done(order, "restored")
        await until(lambda: "restore-complete" in log_of(copy), "the end of its wait")


async def test_a_mount_below_one_that_is_gone_and_a_watch_elsewhere_require_nothing(
    node: PlainNode, tmp_path: Path
) -> None:
    upper, lower, watched = (tmp_path / name for name in ("upper", "upper/lower", "watched"))
    watched.mkdir()
    words = [PYTHON, "-c", WATCHES, str(watched)]
    source, copy = [node.pod(name=name, command=words) for name in ("source", "copy")]
    upper.mkdir()
    with mounted(upper):
        lower.mkdir()
        with mounted(lower):
            await node.done(node.run_order(source), "started")
            await until(lambda: "waits" in log_of(source), "the start of the worker")
            artifact = await node.captured(source, fresh_uid())
            await node.done(node.stop_order(source), "stopped")
    # As on a node that has a mount of its own at the lower path.
    lower.mkdir()
    with mounted(lower):
        await node.done(node.run_order(copy, standby=True), "started")
        await node.done(node.restore_order(copy, artifact), "restored")
        await until(lambda: "restore-complete" in log_of(copy), "the end of its wait")
        (watched / "new").touch()
        await until(lambda: "an event" in log_of(copy), "what its watch sees")


async def test_a_plain_process_goes_on_in_other_pods_one_after_another_and_ends_with_its_code(
    node: PlainNode,
) -> None:
    pod = await node.worker("first")
    for name in ("second", "third"):
        artifact = await node.captured(pod, fresh_uid())
        counted = (await goes_on(pod))[-1]["count"]
        await node.done(node.stop_order(pod), "stopped")
        pod = await node.worker(name, waits=True)
        await node.done(node.restore_order(pod, artifact), "restored")
        assert (await goes_on(pod))[0]["count"] < counted
    os.kill(pod.pid(node.journal), 0)
    await node.done(node.stop_order(pod), "stopped")
    exited = await node.answer(node.run_order(pod), "exited")
    assert exited.exit_codes == {"main": 7}
    assert node.left() == []


async def test_a_plain_process_goes_on_when_its_agent_is_killed_while_it_is_dumped(
    node: PlainNode,
) -> None:
    worker = await node.worker("worker")
    pause, dump = await node.halted(worker)
    await node.kill_agent()
    pause.end()
    await until(lambda: "snapshot-aborted" in log_of(worker), "the worker's release")
    await goes_on(worker)
    assert node.left() == []
    await node.process()
    assert (await node.answer(dump)).kind == "failed"
    await goes_on(worker)


async def test_a_plain_process_ends_with_the_program_that_started_it(node: PlainNode) -> None:
    worker = await node.worker("worker")
    outer = worker.pid(node.journal)
    first = procfs.child_of(outer)
    assert first is not None
    os.kill(outer, signal.SIGKILL)
    assert (await node.answer(node.run_order(worker), "exited")).exit_code == 137
    await until(lambda: is_gone(first.pid), "the end of the worker")


async def test_a_plain_process_that_ends_while_it_is_dumped_leaves_nothing(node: PlainNode) -> None:
    worker = await node.worker("worker")
    pause, dump = await node.halted(worker)
    first = procfs.child_of(worker.pid(node.journal))
    assert first is not None
    procfs.send(first, signal.SIGKILL)
    pause.end()
    report = await node.answer(dump)
    assert report.failure is not None
    assert report.failure.reason in ("SourceExited", "CriuFailed")
    assert (await node.answer(node.run_order(worker), "exited")).exit_code == 137
    await until(lambda: node.left() == [], "the removal of what was left")
    assert "Traceback" not in (node.folder / "agent.log").read_text()


@pytest.mark.parametrize("driver", ["cooperative", "criu"])
async def test_a_server_of_others_is_captured_and_restored_as_it_is(
    criu: Path, tmp_path: Path, driver: str
) -> None:
    [moto] = [each for each in engines.engines() if each.row == f"moto's server as it is, {driver}"]
    port = free_port()
    stored = f"http://127.0.0.1:{port}/bucket/key"
    folder = tmp_path / "engine"
    folder.mkdir()
    cluster = LiveCluster(tmp_path, tools=criu.parents[1])
    try:
        await cluster.up(engines.SOURCE, engines.TARGET)
        async with cluster.session() as session:
            await session.apply(engines.pod(moto, "source", folder, port))
            await session.reaches("Pod", "source")
            await asyncio.to_thread(ask, stored.rpartition("/")[0], "PUT")
            await asyncio.to_thread(ask, stored, "PUT", b"what was stored")
            await session.apply(snapshot("source", "source", "Terminate", driver=driver))
            await session.reaches("Snapshot", "source")
            await session.until(
                lambda values: find(values, "Pod", "source").status.phase != "Running", "its end"
            )
            # A restored engine has only what was captured.
            (folder / "moto_recording").unlink(missing_ok=True)
            await session.apply(engines.pod(moto, "again", folder, port, "source"))
            await session.reaches("Pod", "again")
            assert await asyncio.to_thread(ask, stored) == b"what was stored"
    finally:
        left = await cluster.down()
    assert left == []
