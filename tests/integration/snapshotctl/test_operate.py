"""What people on call do, in a cluster of real services."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from snapshot_shared import subjects
from snapshot_shared.ids import NodeName, OrderId
from tests.integration.snapshotctl.conftest import CHECKPOINT, Cli, example, pod
from tests.support.gms_rig import gms
from tests.support.waiting import wait_until
from tests.support.weights import flip


def _publish_as_operator(cli: Cli, subject: str, payload: bytes) -> None:
    """Put something on the stream of orders, in place of what stands there."""
    cli.on_bus(lambda bus: bus.publish(subject, payload), "operator")


def _order_of(cli: Cli, owner: str) -> dict[str, Any]:
    """The one order of an object that is under way on node-1."""
    [found] = [line for line in cli.value("orders", "node-1") if line["owner"] == owner]
    return found  # type: ignore[no-any-return]


def test_a_node_is_cordoned_and_uncordoned(one_node: Cli) -> None:
    assert one_node.ok("cordon", "node-1").out == "node/node-1 cordoned\n"
    assert one_node.ok("cordon", "node-1").out == "node/node-1 already cordoned\n"
    assert " Ready,SchedulingDisabled " in one_node.ok("nodes").out
    [node] = one_node.value("nodes")
    assert node["node"]["spec"] == {"unschedulable": True}
    freed = one_node.value("uncordon", "node-1")
    assert freed == {"node": "node-1", "unschedulable": False, "changed": True}
    one_node.refused(3, "did you mean node/node-1?", "cordon", "node-9")


def test_an_order_is_shown_with_its_whole_life(one_node: Cli) -> None:
    one_node.schedule("lives")
    started = one_node.until(
        lambda pod: pod["status"]["phase"] == "Running" and pod, "get", "pod/lives"
    )
    uid = started["metadata"]["uid"]
    one_node.ok("delete", "pod/lives")
    one_node.ok("wait", "pod/lives", "--for", "delete", "--timeout", "60s")
    life = one_node.value("orders", "show", f"run-{uid}")
    kinds = [report["kind"] for report in life["reports"]]
    assert kinds[:2] == ["accepted", "started"]
    assert life["owner"] == "-"
    shown = one_node.ok("orders", "show", f"stop-{uid}").out
    assert "   stopped    +" in shown
    unknown = one_node.run("orders", "show", "dump-00000000-0000-0000-0000-000000000001")
    assert unknown.code == 3
    assert one_node.run("orders", "show", "nonsense").code == 2


def test_the_orders_of_a_node_that_does_not_exist_are_not_found(one_node: Cli) -> None:
    one_node.refused(3, "Node nope does not exist", "orders", "nope")
    wait_until(lambda: one_node.ok("orders", "node-1").out == "")


def test_an_aborted_capture_lets_the_worker_go_on_and_leaves_nothing(one_node: Cli) -> None:
    one_node.ok("sim", "stall", "node-1", "--at", "copy-state")
    one_node.apply(example("checkpoint.yaml"))
    dumping = ("dump", "working: copy-state")
    one_node.until(lambda lines: dumping in [(o["verb"], o["state"]) for o in lines], "orders")
    ended = one_node.ok("abort", "demo-llm", "--timeout", "60s")
    assert " Aborted: the capture was aborted by " in ended.out
    checkpoint = one_node.value("get", CHECKPOINT)
    assert checkpoint["status"]["phase"] == "Failed"
    assert {c["reason"] for c in checkpoint["status"]["conditions"]} == {"Aborted"}
    [pod] = one_node.pods().values()
    assert b"error" not in one_node.said_by(pod)
    one_node.refused(4, "failed already: Aborted", "abort", "snapshot/demo-llm")
    one_node.ok("delete", CHECKPOINT)
    one_node.ok("wait", CHECKPOINT, "--for", "delete", "--timeout", "60s")
    assert list((one_node.state() / "artifacts").rglob("part.json")) == []


def test_a_dead_message_is_listed_shown_and_its_order_sent_again(one_node: Cli) -> None:
    before = _numbers(one_node)
    one_node.kill("node-1-agent")
    one_node.schedule("poisoned")
    line = _order_of(one_node, "pod/poisoned")
    assert (line["state"], line["attempt"]) == ("queued", 1)
    subject = subjects.order(NodeName("node-1"), "agent", OrderId(line["order"]))
    # It claims to be newer than whatever the operator orders, so no sweep replaces it.
    _publish_as_operator(one_node, subject, b'{"attempt": 1000000, "x": "\\u001b"}')
    assert _order_of(one_node, "pod/poisoned")["state"] == "not on the stream"
    one_node.ok("sim", "restart", "node-1")
    message = _dead_after(one_node, before)
    number = str(message["number"])
    assert (message["order"], message["payload"]["attempt"]) == (line["order"], 1000000)
    assert f"\n{number} " in one_node.ok("dead", "ls", "node-1").out
    shown = one_node.ok("dead", "show", number).out
    assert "refused  InvalidMessage: " in shown
    assert f"snapshotctl dead requeue {number}" in shown
    sent = one_node.ok("dead", "requeue", number).out
    assert f"{line['order']}, attempt 1, is queued for agent on node-1 again" in sent
    life = one_node.value("orders", "show", line["order"])
    assert life["dead"] == [message["number"]]
    assert life["payload"]["attempt"] == 1
    show = ("orders", "show", line["order"])
    one_node.until(lambda life: life["state"].startswith("answered: started"), *show)
    one_node.refused(4, "is not wanted any more", "dead", "requeue", number)
    assert one_node.run("dead", "requeue", "77").code == 3


def _numbers(cli: Cli) -> set[int]:
    """The numbers of the dead letters, which other tests have left."""
    return {each["number"] for each in cli.value("dead", "ls")}


def _dead_after(cli: Cli, before: set[int]) -> dict[str, Any]:
    """Wait for one more dead letter."""
    [found] = cli.until(lambda dead: [d for d in dead if d["number"] not in before], "dead", "ls")
    return found  # type: ignore[no-any-return]


SECRET = "hf_0123456789abcdef"


def test_a_bundle_holds_everything_and_no_key_and_no_environment(
    one_node: Cli, tmp_path: Path
) -> None:
    document = (
        pod("secretive")
        + f"""\
      env:
        - name: HF_TOKEN
          value: {SECRET}
        - name: PLAIN
          value: plain-0123456789
"""
    )
    one_node.schedule("secretive", document)
    with (one_node.state() / "logs" / "node-1-agent.log").open("a") as log:
        log.write(f"a worker printed {SECRET}\n")
    path = tmp_path / "report.tar.gz"
    text = one_node.value("bundle", "--file", str(path))
    assert (text["file"], text["missing"]) == (str(path), [])
    files = _unpacked(path)
    listed = {member["name"] for member in text["members"]}
    assert {f"report/{name}" for name in listed} == set(files)
    wanted = {"versions.json", "settings.json", "doctor.json", "doctor.txt", "streams.json"}
    wanted |= {"nodes.json", "orders.json", "reports.json", "dead.json", "spans.json"}
    wanted |= {"objects/pods.json", "objects/nodes.json", "logs/operator.log", "cluster.json"}
    wanted |= {"logs/node-1-agent.log", "logs/nats-server.log", "README.txt"}
    assert wanted <= listed
    [stored] = json.loads(files["report/objects/pods.json"])
    assert stored["metadata"]["name"] == "secretive"
    everything = b"".join(files.values())
    seeds = [key.read_bytes().strip() for key in (one_node.state() / "keys").iterdir()]
    assert len(seeds) >= 5
    assert [seed for seed in seeds if seed in everything] == []
    assert SECRET.encode() not in everything
    assert b"plain-0123456789" not in everything
    assert b"a worker printed <redacted>" in files["report/logs/node-1-agent.log"]
    assert "accepted" in {report["kind"] for report in json.loads(files["report/reports.json"])}


def _unpacked(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        found = {entry.name: archive.extractfile(entry) for entry in archive.getmembers()}
        return {name: file.read() for name, file in found.items() if file is not None}


def test_the_doctor_names_what_is_broken_with_its_fix(one_node: Cli) -> None:
    before = _numbers(one_node)
    one_node.kill("node-1-gms")
    _publish_as_operator(one_node, "snap.order.node-1.agent.nonsense", b"noise")
    message = _dead_after(one_node, before)
    one_node.refused(4, "which names no order", "dead", "requeue", str(message["number"]))
    one_node.ok("cordon", "node-1")
    ill = one_node.run("doctor")
    assert ill.code == 1
    restart = "snapshotctl sim restart node-1 --service gms --cluster default"
    assert f"fail  local cluster default: node-1-gms ended  → {restart}\n" in ill.out
    assert f"fail  the GMS of node-1 does not answer  → {restart}\n" in ill.out
    letters = f"{len(before) + 1} dead letter{'s' if before else ''}"
    assert f"warn  {letters}  → snapshotctl dead ls\n" in ill.out
    assert "warn  node-1 is cordoned  → snapshotctl uncordon node-1\n" in ill.out
    one_node.ok(*restart.split()[1:])
    one_node.ok("uncordon", "node-1")
    well = one_node.ok("doctor").out
    assert "ok    all 8 streams and buckets are as required\n" in well
    assert "ok    NATS stores what is written\n" in well
    assert "ok    node-1 is Ready\n" in well
    assert well.endswith(" 0 fail\n")


def test_a_paused_durable_shows_wherever_its_node_does(one_node: Cli) -> None:
    _pause_agent(one_node, paused=True)
    assert " Ready,OrdersPaused " in one_node.ok("nodes").out
    assert "node-1 agent gets no orders: its durable agent-node-1 is paused" in (
        one_node.ok("nodes").out
    )
    [node] = one_node.value("nodes")
    assert node["paused"] == ["agent"]
    told = one_node.ok("explain", "node/node-1").out
    assert "its durable agent-node-1 is paused" in told
    assert "nats consumer resume ORDERS agent-node-1" in told
    one_node.apply(pod("held"))
    one_node.until(lambda pod: pod["status"].get("orders"), "get", "pod/held")
    held = one_node.ok("explain", "pod/held").out
    assert "agent gets no orders: its durable agent-node-1 is paused" in held
    assert "nats consumer resume ORDERS agent-node-1" in held
    _pause_agent(one_node, paused=False)
    assert "paused" not in one_node.ok("explain", "node/node-1").out
    assert "Paused" not in one_node.ok("nodes").out


def _pause_agent(cli: Cli, *, paused: bool) -> None:
    """Pause the durable of the agent as `nats consumer pause` does, or resume it."""
    at = datetime.now(UTC) + timedelta(hours=1)
    body = json.dumps({"pause_until": at.isoformat()} if paused else {}).encode()
    subject = f"$JS.API.CONSUMER.PAUSE.{subjects.ORDERS}.agent-node-1"
    answer = cli.on_bus(lambda bus: bus.request(subject, body))
    assert json.loads(answer).get("error") is None


def test_damage_is_found_brings_into_quarantine_and_repair_lifts_it(one_node: Cli) -> None:
    assert one_node.run("verify", "demo-llm").code == 3
    one_node.apply(example("checkpoint.yaml"))
    one_node.ok("wait", CHECKPOINT, "--timeout", "60s")
    verified = one_node.ok("verify", "demo-llm")
    assert " is sound: node-1 read " in verified.out
    assert "MiB of snapshotcontent/" in verified.err.partition("reading ")[2]
    # It may be over before its last progress is read.
    assert re.search(r"^  artifact: .+ of 4 MiB\b", verified.out, re.MULTILINE)

    [shard] = (path for path in one_node.state().rglob("gpu-0/*") if path.name != "part.json")
    flip(shard, 4096)
    damaged = one_node.refused(
        1, f"part gpu-0: {shard.name}", "verify", "demo-llm", "--timeout", "60s"
    )
    assert "ArtifactCorrupt" in damaged.err
    assert "Ready (ArtifactCorrupt)" in one_node.ok("get", CHECKPOINT).out
    one_node.apply(example("restore.yaml"))
    refused = one_node.refused(
        1, "Quarantined", "wait", "pod/demo-llm-restored", "--timeout", "30s"
    )
    assert shard.name in refused.err

    flip(shard, 4096)
    sound = one_node.value("verify", "snapshot/demo-llm")
    assert sound["verified"] is True
    one_node.ok("wait", CHECKPOINT, "--timeout", "30s")


def test_memory_that_a_process_outside_of_pods_has_left_is_found_and_freed(running: Cli) -> None:
    record = running.record("default")
    folder = f"{record['socket_dir']}/node-1"
    program = (
        "import snapback_client as client; pool = client.connect(1); "
        "pool.allocate('w', (4,), 'i4'); pool.commit()"
    )
    environment = running.environment | {"GMS_SOCKET_DIR": folder}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)

    def left() -> str:
        return "\n".join(row for row in running.run("doctor").out.splitlines() if "no pod" in row)

    assert "GPU 1 of node-1 has 2 MiB that no pod has" in left()
    [words] = re.findall(r"gms (drop .*)$", running.run("doctor").out, re.MULTILINE)
    gms(*words.split())
    assert left() == ""
