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
    one_node.ok("apply", "-f", "-", stdin=example("checkpoint.yaml"))
    wait_until(lambda: not processes.is_alive(agent), "the crash")
    [worker] = _workers(one_node)
    unserved = one_node.run("sim", "fail", "node-1", "--at", "thaw")
    assert (unserved.code, "sim restart node-1" in unserved.err) == (3, True)
    cleared = one_node.ok("sim", "fail", "node-1", "--clear", "-o", "json").value()
    assert cleared["services"] == ["gms"]

    restarted = one_node.ok("sim", "restart", "node-1", "-o", "json").value()
    assert restarted["started"] == ["node-1-agent"]
    again = one_node.process("node-1-agent")
    assert again.pid != agent.pid
    assert processes.is_alive(again)
    waited = one_node.run("wait", CHECKPOINT, "--timeout", "60s")
    assert waited.code == 1
    assert "AgentRestarted" in waited.err
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
    armed = one_node.ok("sim", "fail", "node-1", "--at", "gate", "-o", "json").value()
    assert [(f["action"], f["step"]) for f in armed["armed"]] == [
        ("stall", "quiesce"),
        ("fail", "gate"),
    ]
    one_node.ok("sim", "stall", "node-1", "--clear")
    left = one_node.ok("sim", "crash", "node-1", "--at", "thaw", "-o", "json").value()
    assert [f["step"] for f in left["armed"]] == ["thaw"]
    one_node.ok("sim", "crash", "node-1", "--clear")
    assert "gms of node-1" in one_node.ok("sim", "fail", "node-1", "--at", "write").out
    one_node.ok("apply", "-f", "-", stdin=example("checkpoint.yaml"))
    waited = one_node.run("wait", CHECKPOINT, "--timeout", "60s")
    assert (waited.code, "InjectedFault: save: step write failed" in waited.err) == (1, True)


def test_a_restart_of_what_runs_or_is_not_there_is_refused(one_node: Cli) -> None:
    running = one_node.here("sim", "restart", "node-1")
    assert (running.code, "nothing to start" in running.err) == (1, True)
    unknown = one_node.here("sim", "restart", "node-9")
    assert (unknown.code, "it has node-1" in unknown.err) == (3, True)


def test_a_part_that_died_is_named_and_is_started_again_where_it_was(one_node: Cli) -> None:
    url = one_node.record()["url"]
    one_node.kill("operator")
    up = one_node.here("up")
    assert (up.code, "operator" in up.err) == (1, True)
    assert "snapshotctl down --cluster default && snapshotctl up --cluster default" in up.err
    unserved = one_node.run("get", "pods")
    assert (unserved.code, "no operator answers" in unserved.err) == (5, True)
    again = "next: start it again: snapshotctl sim restart operator --cluster default"
    assert again in unserved.err
    one_node.kill("nats-server")
    unreached = one_node.run("get", "pods")
    assert (unreached.code, "cannot reach " in unreached.err) == (5, True)
    again = "next: start what is down again: snapshotctl sim restart nats-server --cluster default"
    assert again in unreached.err
    ill = one_node.run("doctor")
    assert "→ snapshotctl sim restart nats-server --cluster default\n" in ill.out
    early = one_node.here("sim", "restart", "operator")
    assert (early.code, "snapshotctl sim restart nats-server" in early.err) == (4, True)
    for name in ("nats-server", "operator"):
        assert one_node.ok("sim", "restart", name, "-o", "json").value()["started"] == [name]
    assert one_node.record()["url"] == url
    twice = one_node.here("sim", "restart", "operator")
    assert (twice.code, "operator runs" in twice.err) == (1, True)
    # Another run on this machine may have left something.
    one_node.until(
        lambda found: all(f["level"] == "ok" or "leftover" in f["what"] for f in found), "doctor"
    )
    wrong = one_node.here("sim", "restart", "operator", "--service", "gms")
    assert (wrong.code, "--service" in wrong.err) == (2, True)
