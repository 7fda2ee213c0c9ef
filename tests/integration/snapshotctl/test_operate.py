"""What people on call do, in a cluster of real services."""

from __future__ import annotations

import asyncio
import json
import tarfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from snapshot_shared import subjects
from snapshot_shared.bus import Bus
from snapshot_shared.ids import NodeName, OrderId
from snapshot_shared.permissions import User
from snapshotctl.adapters import processes, worker_socket
from snapshotctl.domain.cluster import ProcessRecord
from tests.integration.snapshotctl.conftest import EXAMPLES, Cli, interrupt

CHECKPOINT = "dynamocheckpoint/demo-llm"
POD = """\
apiVersion: v1
kind: Pod
metadata:
  name: {name}
spec:
  containers:
    - name: main
      command: ["sleep", "1000"]
"""


@pytest.fixture
def one_node(cli: Cli) -> Iterator[Cli]:
    """A user whose default cluster runs, with one node."""
    cli.ok("up", "--nodes", "1", "--gpu-memory", "64MiB")
    yield cli
    cli.ok("down", "--purge")


def _checkpoint() -> str:
    text = (EXAMPLES / "checkpoint.yaml").read_text()
    return text.replace('"512"', '"16"').replace('value: "10"', 'value: "1"')


def _kill(cli: Cli, name: str) -> None:
    [found] = [found for found in cli.record()["processes"] if found["name"] == name]
    handle = processes.opened(msgspec.convert(found, ProcessRecord))
    assert handle is not None
    asyncio.run(processes.end([handle], grace_s=0))


def _publish_as_operator(cli: Cli, subject: str, payload: bytes) -> None:
    """Put something on the stream of orders, in place of what stands there."""

    async def publish() -> None:
        user = User("operator")
        key = str(cli.state() / "keys" / f"{user.name}.nk")
        bus = Bus(cli.record()["url"], "test", credentials=key, inbox=user.inbox)
        await bus.connect(patiently=False)
        try:
            await bus.publish(subject, payload)
        finally:
            await bus.close()

    asyncio.run(publish())


def _worker_answers(cli: Cli) -> bool:
    [pod] = cli.ok("get", "pods", "-o", "json").value()

    async def ask() -> bytes:
        folder = Path(cli.record()["socket_dir"]) / "node-1"
        client = await worker_socket.connect(folder, pod["metadata"]["uid"])
        try:
            return await asyncio.wait_for(client.ask("Who is there?"), 20.0)
        finally:
            await client.close()

    return b"error" not in asyncio.run(ask())


def _orders(cli: Cli, *words: str) -> list[dict[str, Any]]:
    return cli.ok("orders", *words, "-o", "json").value()  # type: ignore[no-any-return]


def test_a_cordoned_node_gets_no_pod_and_an_uncordoned_one_does(running: Cli) -> None:
    assert running.ok("cordon", "node-1").out == "node/node-1 cordoned\n"
    assert running.ok("cordon", "node-1").out == "node/node-1 already cordoned\n"
    assert " Ready,SchedulingDisabled " in running.ok("nodes").out
    [node] = running.ok("nodes", "-o", "json").value()
    assert node["node"]["spec"] == {"unschedulable": True}
    running.ok("apply", "-f", "-", stdin=POD.format(name="waits"))
    late = running.run("wait", "pod/waits", "--for", "condition=PodScheduled", "--timeout", "1s")
    assert (late.code, "node-1 is cordoned" in late.err) == (6, True)
    freed = running.ok("uncordon", "node-1", "-o", "json").value()
    assert freed == {"node": "node-1", "unschedulable": False, "changed": True}
    running.ok("wait", "pod/waits", "--for", "condition=PodScheduled", "--timeout", "30s")
    missing = running.run("cordon", "node-9")
    assert (missing.code, "snapshotctl get nodes" in missing.err) == (3, True)


def test_an_order_is_shown_with_its_whole_life(running: Cli) -> None:
    running.ok("apply", "-f", "-", stdin=POD.format(name="lives"))
    running.ok("wait", "pod/lives", "--for", "condition=PodScheduled", "--timeout", "30s")
    uid = running.ok("get", "pod/lives", "-o", "json").value()["metadata"]["uid"]
    running.ok("delete", "pod/lives")
    running.ok("wait", "pod/lives", "--for", "delete", "--timeout", "60s")
    life = running.ok("orders", "show", f"run-{uid}", "-o", "json").value()
    kinds = [report["kind"] for report in life["reports"]]
    assert kinds[:2] == ["accepted", "started"]
    assert life["owner"] == "-"
    shown = running.ok("orders", "show", f"stop-{uid}").out
    assert "   stopped    +" in shown
    unknown = running.run("orders", "show", "dump-00000000-0000-0000-0000-000000000001")
    assert unknown.code == 3
    assert running.run("orders", "show", "nonsense").code == 2


def test_the_orders_of_a_node_that_does_not_exist_are_not_found(running: Cli) -> None:
    unknown = running.run("orders", "nope")
    assert (unknown.code, "Node nope does not exist" in unknown.err) == (3, True)
    assert running.ok("orders", "node-1").out == ""


def test_an_aborted_capture_lets_the_worker_go_on_and_leaves_nothing(one_node: Cli) -> None:
    one_node.ok("sim", "stall", "node-1", "--at", "copy-state")
    one_node.ok("apply", "-f", "-", stdin=_checkpoint())
    _until(one_node, "dump", "working: copy-state")
    ended = one_node.ok("abort", "demo-llm", "--timeout", "60s")
    assert " Aborted: the capture was aborted by " in ended.out
    checkpoint = one_node.ok("get", CHECKPOINT, "-o", "json").value()
    assert checkpoint["status"]["phase"] == "Failed"
    assert {c["reason"] for c in checkpoint["status"]["conditions"]} == {"Aborted"}
    assert _worker_answers(one_node)
    again = one_node.run("abort", "snapshot/demo-llm")
    assert (again.code, "failed already: Aborted" in again.err) == (4, True)
    one_node.ok("delete", CHECKPOINT)
    one_node.ok("wait", CHECKPOINT, "--for", "delete", "--timeout", "60s")
    assert list((one_node.state() / "artifacts").rglob("part.json")) == []


def _until(cli: Cli, verb: str, state: str) -> None:
    """Return when an order of a verb stands somewhere."""
    cli.until(lambda lines: (verb, state) in [(o["verb"], o["state"]) for o in lines], "orders")


def test_waiting_for_an_abort_can_be_interrupted(one_node: Cli) -> None:
    one_node.ok("sim", "stall", "node-1", "--at", "copy-state")
    one_node.ok("apply", "-f", "-", stdin=_checkpoint())
    _until(one_node, "dump", "working: copy-state")
    _kill(one_node, "node-1-agent")
    waiting = one_node.start("abort", "demo-llm", "--timeout", "60s")
    _until(one_node, "abort", "queued")
    ended = interrupt(waiting)
    assert (ended.code, ended.err) == (130, "interrupted\n")


def test_a_committed_capture_is_not_aborted(one_node: Cli) -> None:
    one_node.ok("apply", "-f", "-", stdin=_checkpoint())
    one_node.ok("wait", CHECKPOINT, "--timeout", "60s")
    refused = one_node.run("abort", "demo-llm")
    assert refused.code == 4
    assert "generation 1 is committed" in refused.err
    assert "next: to remove what was captured: snapshotctl delete" in refused.err


def test_a_dead_message_is_listed_shown_and_its_order_sent_again(one_node: Cli) -> None:
    assert one_node.ok("dead", "ls").err == "no dead letters\n"
    _kill(one_node, "node-1-agent")
    one_node.ok("apply", "-f", "-", stdin=POD.format(name="poisoned"))
    one_node.ok("wait", "pod/poisoned", "--for", "condition=PodScheduled", "--timeout", "30s")
    [line] = _orders(one_node, "node-1")
    assert (line["owner"], line["state"], line["attempt"]) == ("pod/poisoned", "queued", 1)
    subject = subjects.order(NodeName("node-1"), "agent", OrderId(line["order"]))
    # It claims to be newer than whatever the operator orders, so no sweep replaces it.
    _publish_as_operator(one_node, subject, b'{"attempt": 1000000, "x": "\\u001b"}')
    assert _orders(one_node)[0]["state"] == "not on the stream"
    one_node.ok("sim", "restart", "node-1")
    [message] = _dead(one_node)
    number = str(message["number"])
    assert (message["order"], message["payload"]["attempt"]) == (line["order"], 1000000)
    assert f"\n{number} " in one_node.ok("dead", "ls", "node-1").out
    shown = one_node.ok("dead", "show", number).out
    assert "refused  InvalidMessage: " in shown
    assert f"snapshotctl dead requeue {number}" in shown
    sent = one_node.ok("dead", "requeue", number).out
    assert f"{line['order']}, attempt 1, is queued for agent on node-1 again" in sent
    life = one_node.ok("orders", "show", line["order"], "-o", "json").value()
    assert life["dead"] == [message["number"]]
    assert life["payload"]["attempt"] == 1
    _until_started(one_node, line["order"])
    refused = one_node.run("dead", "requeue", number)
    assert (refused.code, "is not wanted any more" in refused.err) == (4, True)
    assert one_node.run("dead", "requeue", "77").code == 3


def _dead(cli: Cli) -> list[dict[str, Any]]:
    return cli.until(lambda found: found, "dead", "ls")  # type: ignore[no-any-return]


def _until_started(cli: Cli, order: str) -> None:
    cli.until(lambda life: life["state"].startswith("answered: started"), "orders", "show", order)


SECRET = "hf_0123456789abcdef"


def test_a_bundle_holds_everything_and_no_key_and_no_environment(
    one_node: Cli, tmp_path: Path
) -> None:
    document = (
        POD.format(name="secretive")
        + f"""\
      env:
        - name: HF_TOKEN
          value: {SECRET}
        - name: PLAIN
          value: plain-0123456789
"""
    )
    one_node.ok("apply", "-f", "-", stdin=document)
    one_node.ok("wait", "pod/secretive", "--for", "condition=PodScheduled", "--timeout", "30s")
    with (one_node.state() / "logs" / "node-1-agent.log").open("a") as log:
        log.write(f"a worker printed {SECRET}\n")
    path = tmp_path / "report.tar.gz"
    text = one_node.ok("bundle", "--file", str(path), "-o", "json").value()
    assert (text["file"], text["missing"]) == (str(path), [])
    files = _unpacked(path)
    listed = {member["name"] for member in text["members"]}
    assert {f"report/{name}" for name in listed} == set(files)
    wanted = {"versions.json", "settings.json", "doctor.json", "doctor.txt", "streams.json"}
    wanted |= {"nodes.json", "orders.json", "reports.json", "dead.json", "spans.json"}
    wanted |= {"objects/pods.json", "objects/nodes.json", "logs/operator.log", "cluster.json"}
    wanted |= {"logs/node-1-agent.log", "logs/nats-server.log", "README.txt"}
    assert wanted <= listed
    [pod] = json.loads(files["report/objects/pods.json"])
    assert pod["metadata"]["name"] == "secretive"
    everything = b"".join(files.values())
    seeds = [key.read_bytes().strip() for key in (one_node.state() / "keys").iterdir()]
    assert len(seeds) >= 5
    assert [seed for seed in seeds if seed in everything] == []
    assert SECRET.encode() not in everything
    assert b"plain-0123456789" not in everything
    assert b"a worker printed <redacted>" in files["report/logs/node-1-agent.log"]
    assert "accepted" in {report["kind"] for report in json.loads(files["report/reports.json"])}


def test_a_bundle_of_a_cluster_that_is_down_has_its_logs(one_node: Cli, tmp_path: Path) -> None:
    _kill(one_node, "nats-server")
    path = tmp_path / "down.tar.gz"
    text = one_node.ok("bundle", "--file", str(path))
    assert "   missing  everything of the cluster: cannot reach nats://127.0.0.1" in text.out
    files = _unpacked(path)
    assert b"nats-server ended" in files["down/doctor.txt"]
    assert "down/logs/nats-server.log" in files


def _unpacked(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        found = {entry.name: archive.extractfile(entry) for entry in archive.getmembers()}
        return {name: file.read() for name, file in found.items() if file is not None}


def test_the_doctor_finds_nothing_wrong_with_a_cluster_that_is_well(running: Cli) -> None:
    # The first sweep of an operator comes with its start, and its nodes' clocks are ours.
    well = running.ok("doctor")
    assert "ok    all 8 streams and buckets are as required\n" in well.out
    assert "ok    NATS stores what is written\n" in well.out
    assert "ok    node-1 is Ready\n" in well.out
    assert well.out.endswith(" 0 fail\n")


def test_the_doctor_names_what_is_broken_with_its_fix(one_node: Cli) -> None:
    _kill(one_node, "node-1-gms")
    _publish_as_operator(one_node, "snap.order.node-1.agent.nonsense", b"noise")
    [message] = _dead(one_node)
    refused = one_node.run("dead", "requeue", str(message["number"]))
    assert (refused.code, "which names no order" in refused.err) == (4, True)
    one_node.ok("cordon", "node-1")
    ill = one_node.run("doctor")
    assert ill.code == 1
    restart = "snapshotctl sim restart node-1 --service gms --cluster default"
    assert f"fail  local cluster default: node-1-gms ended  → {restart}\n" in ill.out
    assert f"fail  the GMS of node-1 does not answer  → {restart}\n" in ill.out
    assert "warn  1 dead letter  → snapshotctl dead ls\n" in ill.out
    assert "warn  node-1 is cordoned  → snapshotctl uncordon node-1\n" in ill.out
    one_node.ok(*restart.split()[1:])
    one_node.ok("uncordon", "node-1")
    found = one_node.ok("doctor", "-o", "json").value()
    assert {finding["level"] for finding in found} == {"ok", "warn"}


def test_names_are_completed_from_the_running_cluster(running: Cli) -> None:
    running.ok("apply", "-f", "-", stdin=POD.format(name="offered"))
    variables = {"_SNAPSHOTCTL_COMPLETE": "complete_bash"}
    for line, offered in {
        "cordon ": "node-1",
        "get pods off": "offered",
        "delete pod/off": "pod/offered",
        "trace off": "offered",
    }.items():
        variables |= {"COMP_WORDS": f"snapshotctl {line}", "COMP_CWORD": str(len(line.split(" ")))}
        shell = Cli(running.home)
        shell.environment |= variables
        assert shell.ok().out.split() == [offered]


def test_a_paused_durable_shows_wherever_its_node_does(one_node: Cli) -> None:
    _pause(one_node, "agent-node-1", paused=True)
    assert " Ready,OrdersPaused " in one_node.ok("nodes").out
    assert "node-1 agent gets no orders: its durable agent-node-1 is paused" in (
        one_node.ok("nodes").out
    )
    [node] = one_node.ok("nodes", "-o", "json").value()
    assert node["paused"] == ["agent"]
    told = one_node.ok("explain", "node/node-1").out
    assert "its durable agent-node-1 is paused" in told
    assert "nats consumer resume ORDERS agent-node-1" in told
    one_node.ok("apply", "-f", "-", stdin=POD.format(name="held"))
    one_node.until(lambda pod: pod["status"].get("orders"), "get", "pod/held")
    held = one_node.ok("explain", "pod/held").out
    assert "agent gets no orders: its durable agent-node-1 is paused" in held
    assert "nats consumer resume ORDERS agent-node-1" in held
    _pause(one_node, "agent-node-1", paused=False)
    assert "paused" not in one_node.ok("explain", "node/node-1").out
    assert "Paused" not in one_node.ok("nodes").out


def _pause(cli: Cli, durable: str, *, paused: bool) -> None:
    """Pause a durable as `nats consumer pause` does, or resume it."""

    async def ask() -> bytes:
        user = User("snapshotctl")
        key = str(cli.state() / "keys" / f"{user.name}.nk")
        bus = Bus(cli.record()["url"], "test", credentials=key, inbox=user.inbox)
        await bus.connect(patiently=False)
        try:
            at = datetime.now(UTC) + timedelta(hours=1)
            body = {"pause_until": at.isoformat()} if paused else {}
            subject = f"$JS.API.CONSUMER.PAUSE.{subjects.ORDERS}.{durable}"
            return await bus.request(subject, json.dumps(body).encode())
        finally:
            await bus.close()

    assert json.loads(asyncio.run(ask())).get("error") is None
