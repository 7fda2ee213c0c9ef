"""Plain processes that the agent starts in namespaces, dumped and restored by the real CRIU."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from msgspec.structs import replace

from snapshot_agent.adapters import procfs
from snapshot_shared.orders import RestoreOrder
from tests.integration.snapshotctl.conftest import Cli, needs_engines
from tests.process import node as nodes
from tests.process.node import INIT, PYTHON, WORKER, Node, Pause
from tests.support.agent_rig import Pod, fresh_uid, is_gone
from tests.support.waiting import until

pytestmark = [
    pytest.mark.process,
    pytest.mark.waits,
    # A plain process has the mounts of this machine, so that none may come or go meanwhile.
    pytest.mark.xdist_group("mounts"),
]

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
        pod = self.pod(name=name, command=words)
        order = replace(self.run_order(pod, standby=waits), driver="criu")
        report = await self.carry_out(order)
        assert report.kind == "started", report
        wanted = "waiting for a restore" if waits else "count"
        await until(lambda: wanted in log_of(pod), f"the start of {name}")
        return pod

    async def restored(self, pod: Pod, artifact: Any) -> RestoreOrder:
        order = self.restore_order(pod, artifact)
        report = await self.carry_out(order)
        assert report.kind == "restored", report
        return order


@pytest_asyncio.fixture
async def node(criu: Path, nats_url_session: str) -> AsyncIterator[Node]:
    if why := nodes.lacking():
        pytest.skip(why)
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


async def goes_on(pod: Pod) -> list[dict[str, Any]]:
    """Wait for more counts of a worker, whose connections, memory and files have to be whole."""
    before = len(lines_of(pod))
    await until(lambda: len(lines_of(pod)) > before + 2, f"another count of {pod.ref.name}")
    for line in lines_of(pod)[before:]:
        for way in ("child", "tcp", "named", "anonymous"):
            assert line[way] == line["count"], line
        assert line["ghost"] == "still here"
        assert line["heap"] in (True, None)
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
    if why := nodes.lacking():
        pytest.skip(why)
    cli = Cli(tmp_path)
    out = cli.ok("demo", *options, "--driver", "criu").out
    assert f"all {count} answers are the same, byte for byte" in out
    run = re.search(r" demo-([0-9a-f]{8}): ", out)
    assert run is not None
    assert cli.left(run[1]) == []


def test_a_worker_that_was_restored_is_asked_and_has_programs_beside_it(
    criu: Path, tmp_path: Path
) -> None:
    if why := nodes.lacking():
        pytest.skip(why)
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
        dead = cli.run("exec", source, "--", "true")
        assert (dead.code, "name a pod that runs: demo-llm-restored\n" in dead.err) == (3, True)
    finally:
        cli.purge()


async def test_a_plain_process_waits_in_its_place_until_it_is_restored(node: PlainNode) -> None:
    source = await node.worker("source")
    artifact = await node.captured(source, fresh_uid())
    assert (await node.carry_out(node.stop_order(source))).kind == "stopped"
    target = await node.worker("target", waits=True)
    placed = await node.carry_out(node.place_order(target, artifact))
    assert placed.kind == "placed", placed
    lines = await goes_on(target)
    assert not any("restored" in line["did"] for line in lines)
    await node.restored(target, artifact)
    await goes_on(target)
    assert [line["did"] for line in lines_of(target) if line["did"]][-1] == "restored 1"


async def test_a_plain_process_goes_on_in_another_pod_and_ends_with_its_code(
    node: PlainNode,
) -> None:
    source = await node.worker("source")
    content = fresh_uid()
    artifact = await node.captured(source, content)
    counted = (await goes_on(source))[-1]["count"]
    assert (await node.carry_out(node.stop_order(source))).kind == "stopped"

    target = await node.worker("target", waits=True)
    await node.restored(target, artifact)
    assert (await goes_on(target))[0]["count"] < counted
    os.kill(target.pid(node.journal), 0)

    run = node.run_order(target)
    assert (await node.carry_out(node.stop_order(target))).kind == "stopped"
    exited = await node.answer(run, "exited")
    assert exited.exit_codes == {"main": 7}
    assert node.left() == []


async def test_a_restored_plain_process_is_captured_and_restored_again(node: PlainNode) -> None:
    artifact = None
    pod = await node.worker("first")
    for name in ("second", "third"):
        artifact = await node.captured(pod, fresh_uid())
        assert (await node.carry_out(node.stop_order(pod))).kind == "stopped"
        pod = await node.worker(name, waits=True)
        await node.restored(pod, artifact)
        await goes_on(pod)


async def test_a_plain_process_goes_on_when_its_agent_is_killed_while_it_is_dumped(
    node: PlainNode,
) -> None:
    worker = await node.worker("worker")
    content = fresh_uid()
    prepared = await node.carry_out(node.prepare_order(worker, content))
    assert prepared.kind == "prepared", prepared
    pause = Pause(node.programs, "post-dump")
    dump = node.dump_order(worker, content, prepared.vector)
    await node.send(dump)
    await pause.reached()
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


async def test_a_plain_process_that_ends_while_it_is_dumped_leaves_nothing(
    node: PlainNode,
) -> None:
    worker = await node.worker("worker")
    content = fresh_uid()
    prepared = await node.carry_out(node.prepare_order(worker, content))
    pause = Pause(node.programs, "post-dump")
    dump = node.dump_order(worker, content, prepared.vector)
    await node.send(dump)
    await pause.reached()
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
