"""Faults in a cluster of real services: what a user sees, and that nothing stays frozen."""

from __future__ import annotations

import pytest

from snapshot_shared import subjects
from snapshot_shared.codec import decode_json
from snapshot_shared.ids import check_node
from snapshotctl.adapters import processes
from tests.integration.snapshotctl.conftest import CHECKPOINT, Cli, example
from tests.support.agent_rig import state_of
from tests.support.waiting import wait_until

pytestmark = pytest.mark.turns


def _workers(cli: Cli) -> list[int]:
    return [member.pid for member in cli.members() if "worker.py" in member.command]


def test_an_agent_that_is_crashed_while_the_worker_is_frozen_recovers_when_it_is_restarted(
    one_node: Cli,
) -> None:
    agent = one_node.process("node-1-agent")
    one_node.ok("sim", "crash", "node-1", "--at", "copy-state")
    one_node.apply(example("checkpoint.yaml"))
    wait_until(lambda: not processes.is_alive(agent), "the crash")
    [worker] = _workers(one_node)
    one_node.refused(3, "sim restart node-1", "sim", "fail", "node-1", "--at", "thaw")
    cleared = one_node.value("sim", "fail", "node-1", "--clear")
    assert cleared["services"] == ["gms"]

    restarted = one_node.value("sim", "restart", "node-1")
    assert restarted["started"] == ["node-1-agent"]
    again = one_node.process("node-1-agent")
    assert again.pid != agent.pid
    assert processes.is_alive(again)
    waited = one_node.refused(1, "AgentRestarted", "wait", CHECKPOINT, "--timeout", "60s")
    assert "dump, step copy-state" in waited.err
    assert _workers(one_node) == [worker]
    assert state_of(worker) != "T"
    subject = subjects.rpc(check_node("node-1"), "agent", "status")
    held = decode_json(one_node.on_bus(lambda bus: bus.request(subject, b"")), dict)
    assert held["captures"] == []
    [pod] = one_node.pods().values()
    assert b"error" not in one_node.said_by(pod)


def test_what_is_armed_is_shown_and_can_be_disarmed(one_node: Cli) -> None:
    one_node.ok("sim", "stall", "node-1", "--at", "quiesce")
    armed = one_node.value("sim", "fail", "node-1", "--at", "gate")
    assert [(f["action"], f["step"]) for f in armed["armed"]] == [
        ("stall", "quiesce"),
        ("fail", "gate"),
    ]
    timed = one_node.ok("sim", "stall", "node-1", "--at", "fence", "--for", "90s").out
    assert "waits for 90 s when prepare begins its step fence" in timed
    one_node.ok("sim", "stall", "node-1", "--clear")
    left = one_node.value("sim", "crash", "node-1", "--at", "thaw")
    assert [f["step"] for f in left["armed"]] == ["thaw"]
    one_node.ok("sim", "crash", "node-1", "--clear")
    assert "gms of node-1" in one_node.ok("sim", "fail", "node-1", "--at", "write").out
    one_node.apply(example("checkpoint.yaml"))
    one_node.refused(
        1, "InjectedFault: save: step write failed", "wait", CHECKPOINT, "--timeout", "60s"
    )


def test_a_restart_of_what_runs_or_is_not_there_is_refused(one_node: Cli) -> None:
    one_node.refused(1, "nothing to start", "sim", "restart", "node-1")
    one_node.refused(3, "it has node-1", "sim", "restart", "node-9")


def test_a_part_that_died_is_named_and_is_started_again_where_it_was(one_node: Cli) -> None:
    url = one_node.record()["url"]
    one_node.kill("operator")
    up = one_node.refused(1, "operator", "up")
    assert "snapshotctl down --cluster default && snapshotctl up --cluster default" in up.err
    unserved = one_node.refused(5, "no operator answers", "get", "pods")
    again = "next: start it again: snapshotctl sim restart operator --cluster default"
    assert again in unserved.err
    one_node.kill("nats-server")
    unreached = one_node.refused(5, "cannot reach ", "get", "pods")
    again = "next: start what is down again: snapshotctl sim restart nats-server --cluster default"
    assert again in unreached.err
    ill = one_node.run("doctor")
    assert "→ snapshotctl sim restart nats-server --cluster default\n" in ill.out
    one_node.refused(4, "snapshotctl sim restart nats-server", "sim", "restart", "operator")
    for name in ("nats-server", "operator"):
        assert one_node.value("sim", "restart", name)["started"] == [name]
    assert one_node.record()["url"] == url
    one_node.refused(1, "operator runs", "sim", "restart", "operator")
    # Another run on this machine may have left something.
    one_node.until(
        lambda found: all(f["level"] == "ok" or "leftover" in f["what"] for f in found), "doctor"
    )
    one_node.refused(2, "--service", "sim", "restart", "operator", "--service", "gms")
