"""What a runtime decides of a container, as CRIU meets it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.process.killing import restore_in
from tests.process.node import Node, children_of
from tests.support.agent_rig import fresh_uid

pytestmark = [pytest.mark.process, pytest.mark.waits]


async def test_a_restored_process_has_the_cgroups_of_its_placeholder_and_sees_no_others(
    node: Node,
) -> None:
    halted = await restore_in(node, "resumed")
    halted.go_on()
    assert (await halted.answered()).kind == "restored"
    placeholder = halted.container.pid
    [restored] = children_of(placeholder)

    def cgroups(pid: int) -> tuple[int, str]:
        namespace = os.stat(f"/proc/{pid}/ns/cgroup").st_ino  # noqa: PTH116 - no such path
        return namespace, Path(f"/proc/{pid}/cgroup").read_text()

    assert cgroups(restored.pid) == cgroups(placeholder)
    assert cgroups(placeholder)[0] != cgroups(os.getpid())[0]


async def test_a_worker_is_refused_whose_files_the_helper_does_not_have(node: Node) -> None:
    worker = await node.container("worker")
    worker.upper.rename(worker.home / "elsewhere")
    order = node.prepare_order(worker, fresh_uid())  # type: ignore[arg-type]
    report = await node.carry_out(order)
    assert report.failure is not None
    assert report.failure.reason == "NotEligible"
    assert str(worker.upper) in report.failure.message
    assert "node.runtimeDir" in (report.failure.next_step or "")
    await worker.goes_on()


async def test_a_container_that_gains_no_privileges_gets_no_process_that_may(node: Node) -> None:
    worker = await node.container("worker")
    artifact = await node.captured(worker, fresh_uid())  # type: ignore[arg-type]
    target = await node.container("target", waits=True, no_new_privs=True)
    report = await node.carry_out(node.restore_order(target, artifact))  # type: ignore[arg-type]
    assert report.failure is not None
    assert report.failure.reason == "Incompatible"
    assert "NoNewPrivs" in report.failure.message
    await target.becomes("waits")
    again = await node.container("again", no_new_privs=True)
    artifact = await node.captured(again, fresh_uid())  # type: ignore[arg-type]
    report = await node.carry_out(node.restore_order(target, artifact, attempt=2))  # type: ignore[arg-type]
    assert report.kind == "restored"
    await target.goes_on()
