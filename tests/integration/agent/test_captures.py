"""Captures of a live worker, without devices: prepare, dump, seal, release, and their refusals."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from snapshot_agent import main
from snapshot_agent.adapters import artifacts
from snapshot_agent.adapters.cooperative import Cooperative
from snapshot_agent.domain import control
from snapshot_agent.domain.driving import Phase, Phases, Release
from snapshot_agent.handlers import captures, prepare
from snapshot_agent.ports import Dump, Stage, Worker
from snapshot_shared.artifact import PartManifest, RootManifest
from snapshot_shared.codec import decode_json, digest
from snapshot_shared.errors import NoSpace
from snapshot_shared.orders import Progress, VectorEntry
from tests.support.agent_rig import Rig, failure_of, fresh_uid, is_gone, state_of
from tests.support.waiting import until

MIB = 1024 * 1024


def sockets(rig: Rig) -> list[Path]:
    return sorted((rig.state / "guards").glob("*.sock"))


async def test_a_worker_is_captured_whole_and_goes_on(node: Rig) -> None:
    pod = await node.running("--answer", "42", "--state-bytes", str(20 * MIB))
    content = fresh_uid()
    artifact = await node.captured(pod, content)
    await until(lambda: "snapshot-complete 1" in pod.events(), "the worker's release")
    assert state_of(pod.pid(node.journal)) not in "TX"
    assert (node.guards(), sockets(node)) == ([], [])
    assert not (pod.control / control.QUIESCE).exists()

    folder = node.generation(content)
    root_bytes = (folder / "root.json").read_bytes()
    part_bytes = (folder / "process" / "part.json").read_bytes()
    root = decode_json(root_bytes, RootManifest)
    part = decode_json(part_bytes, PartManifest)
    assert digest(root_bytes) == artifact.root_digest
    assert root.parts[0].digest == digest(part_bytes)
    chunks = {entry.name: len(entry.chunks) for entry in part.files}
    assert chunks == {"answer.json": 1, "weights.bin": 3}
    assert part.bytes == root.bytes == sum(entry.size for entry in part.files)
    assert part.facts is not None
    assert part.facts.driver == "cooperative"
    assert json.loads((folder / "process" / "answer.json").read_text()) == {"answer": "42"}
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "process" / "weights.bin").stat().st_mode & 0o777 == 0o600


async def test_progress_reports_rising_bytes_up_to_the_size_of_the_part(rig: Rig) -> None:
    async with rig.agent(), rig.bus.listening(f"snap.progress.{rig.node}.>") as queue:
        pod = await rig.running("--state-bytes", str(20 * MIB))
        _, dumped = await rig.staged(pod, fresh_uid())
        assert dumped.part is not None
        done = [0]
        while done[-1] < dumped.part.bytes:
            delivery = await asyncio.wait_for(queue.get(), 5)
            done.append(json.loads(delivery.data)["done"])
    assert done == sorted(done)
    assert done[-1] == dumped.part.bytes


async def test_a_worker_is_quiet_and_held_until_its_release_which_says_for_how_long(
    node: Rig,
) -> None:
    pod, content = await node.running(), fresh_uid()
    before = time.monotonic()
    await node.staged(pod, content)
    assert len(node.guards()) == 1
    (held,) = (await node.status())["captures"]
    assert (held["content"], held["attempt"]) == (content, 1)
    assert 0 < held["ends_in_s"] <= 600
    assert pod.events()[-1] == "quiesced 1"
    goes_on = await node.carry_out(node.release_order(pod, content))
    assert 0 < goes_on.paused_s < time.monotonic() - before
    assert (await node.status())["captures"] == []


async def test_a_worker_whose_policy_is_terminate_gets_its_report_and_is_ended(node: Rig) -> None:
    pod, content = await node.running(), fresh_uid()
    await node.staged(pod, content)
    order = node.release_order(pod, content, policy="Terminate")
    assert (await node.done(order, "released")).paused_s == 0
    assert is_gone(pod.pid(node.journal))
    assert (await node.exited(pod)).exit_code == 128 + signal.SIGTERM


async def test_a_worker_can_be_captured_again_and_old_state_does_not_come_along(node: Rig) -> None:
    pod, second = await node.running(), fresh_uid()
    await node.captured(pod, fresh_uid())
    await until(lambda: "snapshot-complete 1" in pod.events(), "the worker's release")
    (pod.control / "state" / "stale").write_text("of the first capture")
    await node.captured(pod, second)
    names = {path.name for path in (node.generation(second) / "process").iterdir()}
    assert names == {"answer.json", "weights.bin", "part.json"}


async def test_a_second_capture_of_the_same_container_is_refused_while_one_holds_it(
    node: Rig,
) -> None:
    pod, content = await node.running(), fresh_uid()
    await node.staged(pod, content)
    another = node.prepare_order(pod, fresh_uid())
    assert content in (await node.refused(another, "NotEligible", kind="rejected")).message


async def test_a_capture_that_waits_for_others_of_its_node_leaves_its_worker_alone(
    node: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, late = [await node.running() for _ in range(3)]
    one, two, content = [fresh_uid() for _ in range(3)]
    before = [*late.events()]
    prepared = await node.prepared(first, one)
    await node.prepared(second, two)
    monkeypatch.setattr(captures, "BUSY_S", 0.3)
    busy = await node.refused(node.prepare_order(late, content), "NodeBusy")
    assert (busy.retryable, [*late.events()]) == (True, before)
    monkeypatch.setattr(captures, "BUSY_S", 60.0)
    again = node.prepare_order(late, content, attempt=2)
    async with node.bus.listening(f"snap.progress.{node.node}.>") as queue:
        await node.send(again)
        async with asyncio.timeout(10):
            announced = decode_json((await queue.get()).data, Progress)
    assert announced.awaits == "2 captures under way on this node"
    assert [*late.events()] == before
    # The worker is still held at the end of its dump.
    await node.done(node.dump_order(first, one, prepared.vector), "staged")
    assert (await node.answer(again)).kind == "prepared"
    # A hold that ends without a dump gives its place back, too.
    other = await node.running()
    last = node.prepare_order(other, fresh_uid())
    await node.send(last)
    await node.done(node.release_order(second, two), "released")
    assert (await node.answer(last)).kind == "prepared"


async def test_a_container_is_free_again_when_the_memory_server_of_its_pod_does_not_answer(
    node: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "GMS_STARTS_S", 0.1)
    pod, content = await node.running(), fresh_uid()
    asked = node.prepare_order(pod, content, memory_server=True)
    assert (await node.refused(asked, "GmsUnavailable")).retryable
    await node.prepared(pod, content, attempt=2)


async def test_a_worker_that_never_becomes_ready_is_left_as_it_was(node: Rig) -> None:
    pod = await node.running("--never-ready")
    order = node.prepare_order(pod, fresh_uid(), ready_s=0.3)
    failure = await node.refused(order, "DeadlineExceeded")
    assert failure.retryable
    assert "ready" in failure.message
    assert not (pod.control / control.QUIESCE).exists()
    assert not (pod.control / control.ABORTED).exists()
    assert node.guards() == []


async def test_a_worker_that_never_becomes_quiet_is_let_go(node: Rig) -> None:
    pod, content = await node.running("--never-quiet"), fresh_uid()
    await node.refused(node.prepare_order(pod, content, quiesce_s=0.3), "DeadlineExceeded")
    assert not (pod.control / control.QUIESCE).exists()
    assert control.is_of((pod.control / control.ABORTED).read_bytes(), 1)
    assert ((await node.status())["captures"], node.guards(), sockets(node)) == ([], [], [])

    # The lock is free again: the next attempt gets as far as this one.
    await node.refused(node.prepare_order(pod, content, 2, quiesce_s=0.3), "DeadlineExceeded")


async def test_a_worker_that_cannot_be_captured_says_why_and_is_let_go_at_once(node: Rig) -> None:
    pod, content = (
        await node.running("--refuses", "OSError: locked\x1b[2J" + "x" * 5000),
        fresh_uid(),
    )
    failure = await node.refused(node.prepare_order(pod, content, quiesce_s=2.0), "WorkerRefused")
    assert not failure.retryable
    assert "the worker cannot be captured: OSError: locked" in failure.message
    assert len(failure.message) < 600
    assert control.is_of((pod.control / control.ABORTED).read_bytes(), 1)
    assert ((await node.status())["captures"], node.guards(), sockets(node)) == ([], [], [])


async def test_what_a_worker_waits_for_is_announced_and_in_the_error(node: Rig) -> None:
    pod, content = await node.running("--waits-for", "2 requests under way"), fresh_uid()
    async with node.bus.listening(f"snap.progress.{node.node}.>") as queue:
        order = node.prepare_order(pod, content, quiesce_s=1.0)
        failure = await node.refused(order, "DeadlineExceeded")
        announced = json.loads((await asyncio.wait_for(queue.get(), 5)).data)
    assert (announced["step"], announced["awaits"]) == ("quiesce", "2 requests under way")
    assert "did not become quiet within 1 s: 2 requests under way" in failure.message


async def test_a_worker_that_never_becomes_quiet_is_killed_where_the_policy_says_so(
    node: Rig,
) -> None:
    pod = await node.running("--never-quiet")
    order = node.prepare_order(pod, fresh_uid(), quiesce_s=0.3, on_failure="Kill")
    await node.done(order, "failed")
    await node.exited(pod)
    assert is_gone(pod.pid(node.journal))


async def test_an_abort_that_says_so_ends_all_containers_of_the_pod_and_another_none(
    node: Rig,
) -> None:
    stuck, other = await node.running(), await node.running()
    for pod, on_failure in ((stuck, "Kill"), (other, "Resume")):
        content = fresh_uid()
        await node.prepared(pod, content)
        await node.done(node.abort_order(pod, content, on_failure=on_failure), "aborted")
    assert (await node.exited(stuck)).exit_code == 128 + signal.SIGKILL
    assert is_gone(stuck.pid(node.journal))
    assert not is_gone(other.pid(node.journal))
    assert node.guards() == []


async def test_a_worker_that_exits_instead_of_becoming_quiet_is_named_with_its_code(
    node: Rig,
) -> None:
    pod = await node.running("--exit-at-quiesce", "9")
    failure = await node.refused(node.prepare_order(pod, fresh_uid()), "SourceExited")
    assert failure.values["exit_code"] == 9
    assert (await node.exited(pod)).exit_code == 9
    assert node.guards() == []


async def test_a_pod_of_another_uid_is_refused(node: Rig) -> None:
    pod = await node.running()
    order = node.prepare_order(node.pod(), fresh_uid())
    await node.refused(order, "StalePodReference", kind="rejected")
    assert pod.events()[-1].startswith("started")


@pytest.mark.parametrize(
    ("more", "fields"),
    [([VectorEntry(part="gpu-0", ordinal=0)], {}), ([], {"driver": "respawn"})],
    ids=["plan", "driver"],
)
async def test_a_dump_of_another_plan_or_driver_is_refused_and_the_worker_stays_held(
    node: Rig, more: list[VectorEntry], fields: dict[str, Any]
) -> None:
    pod, content, dump = await node.held()
    order = node.dump_order(pod, content, [*dump.vector, *more], **fields)
    await node.refused(order, "NotEligible", kind="rejected")
    assert len((await node.status())["captures"]) == 1
    assert not node.generation(content).exists()


async def test_a_capture_that_the_disk_has_no_room_for_is_refused_before_the_worker_is_frozen(
    node: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = artifacts.SPARE_BYTES + 2**20 - 1
    monkeypatch.setattr(artifacts, "free_bytes", lambda _: free)
    pod = await node.running("--state-bytes", str(2**20))
    failure = await node.refused(node.prepare_order(pod, fresh_uid()), "NoSpace")
    assert failure.values["free"] == free
    # The worker is told the same reason.
    told = json.loads((pod.control / control.ABORTED).read_bytes())
    assert (told["reason"], told["message"]) == ("NoSpace", failure.message)
    await until(lambda: "snapshot-aborted 1" in pod.events(), "the worker's release")


async def test_an_abort_lets_the_worker_go_on_and_keeps_the_attempt_from_coming_back(
    node: Rig,
) -> None:
    pod, content, dump = await node.held()
    await node.done(node.abort_order(pod, content), "aborted")
    await until(lambda: "snapshot-aborted 1" in pod.events(), "the worker's release")
    assert node.guards() == []

    await node.refused(dump, "Superseded", kind="rejected")

    await node.prepared(pod, content, attempt=2)


async def test_an_abort_ends_a_prepare_that_waits(node: Rig) -> None:
    pod, order = await node.asked()
    await node.done(node.abort_order(pod, order.content_uid), "aborted")
    failure_of(await node.answer(order), "Aborted")
    assert control.is_of((pod.control / control.ABORTED).read_bytes(), 1)
    assert node.guards() == []


async def test_a_worker_without_a_release_goes_on_at_the_deadline_of_the_hold(node: Rig) -> None:
    pod, content, dump = await node.held(hold_s=5.0)
    await node.carry_out(dump)
    await until(lambda: "snapshot-aborted 1" in pod.events(), "the worker's release")
    # By the agent itself, and not by its guard.
    log = node.state / "guards" / "log"
    assert not log.exists() or "freed" not in log.read_text()
    assert (node.generation(content) / "process" / "part.json").exists()
    assert (await node.done(node.release_order(pod, content), "released")).unconfirmed
    assert (await node.status())["captures"] == []


async def test_a_worker_for_whose_dump_no_order_comes_goes_on_and_can_be_prepared_again(
    node: Rig,
) -> None:
    pod, content, dump = await node.held(dump_within_s=0.5)
    await until(lambda: "snapshot-aborted 1" in pod.events(), "the worker's release")
    assert (await node.refused(dump, "HoldDeadline")).retryable
    await node.done(node.abort_order(pod, content), "aborted")
    await node.prepared(pod, content, attempt=2)


@pytest.mark.parametrize("fails", [False, True])
async def test_a_worker_for_whose_release_no_order_comes_goes_on(node: Rig, fails: bool) -> None:
    pod, content, dump = await node.held(dump_within_s=0.5 if fails else 60.0)
    if fails:
        (pod.control / control.STATE / "link").symlink_to("/etc/hostname")
    dump = node.dump_order(pod, content, dump.vector, release_within_s=0.5)
    report = await node.carry_out(dump)
    assert report.kind == ("failed" if fails else "staged")
    await until(lambda: "snapshot-aborted 1" in pod.events(), "the worker's release")
    assert (await node.done(node.release_order(pod, content), "released")).unconfirmed


async def test_a_release_that_comes_too_late_ends_the_worker_where_it_is_to_end(node: Rig) -> None:
    pod, content, _ = await node.held(hold_s=1.0)
    await until(lambda: "snapshot-aborted 1" in pod.events(), "the worker's release")
    pid = pod.pid(node.journal)
    late = node.release_order(pod, content, policy="Terminate")
    assert (await node.carry_out(late)).unconfirmed
    assert not Path(f"/proc/{pid}").exists()


async def test_a_release_of_nothing_held_and_an_abort_of_nothing_known_are_done(node: Rig) -> None:
    pod = await node.running()
    await node.done(node.release_order(pod, fresh_uid()), "released")
    assert not (pod.control / control.COMPLETE).exists()
    await node.done(node.abort_order(None, fresh_uid()), "aborted")


async def test_a_worker_that_dies_while_it_is_held_does_not_stop_its_release(node: Rig) -> None:
    pod, content = await node.running(), fresh_uid()
    await node.staged(pod, content)
    os.kill(pod.pid(node.journal), signal.SIGKILL)
    await node.exited(pod)
    await until(lambda: not node.guards(), "the end of the guard")
    await node.done(node.release_order(pod, content), "released")
    assert sockets(node) == []


async def test_a_guard_that_dies_is_replaced(node: Rig) -> None:
    pod, content = await node.running(), fresh_uid()
    await node.staged(pod, content)
    (first,) = node.guards()
    os.kill(first, signal.SIGKILL)
    await until(lambda: node.guards() not in ([], [first]), "another guard")
    await node.done(node.release_order(pod, content), "released")
    assert node.guards() == []


# Workers that a program has to let go, until their driver is done with them.


def undone_by_a_program(
    log: Path, run: Callable[[Dump], Coroutine[Any, Any, None]], takes_s: float = 0.0
) -> type[Cooperative]:
    """A driver whose program writes a line into `log`, and whose stage that writes is `run`."""
    program = f'sleep {takes_s} && echo undone >>"$0"'

    class Driver(Cooperative):
        def __init__(self) -> None:
            super().__init__()
            freeze, copy, thaw = self.stages
            phases = Phases(during=Phase.BEGUN, after=Phase.SIGNAL)
            self.stages = (freeze, Stage(copy.name, run, writes=True, phases=phases), thaw)

        def release(self, worker: Worker, phase: Phase) -> Release:
            if phase is Phase.SIGNAL:
                return Release()
            return Release(("/bin/sh", "-c", program, str(log)), 5.0)

    return Driver


@pytest.mark.parametrize("returns", [True, False])
async def test_a_worker_whose_dump_was_undone_is_not_given_to_the_program_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, returns: bool
) -> None:
    async def fails(_dump: Dump) -> None:
        raise NoSpace("the disk is full")

    log = tmp_path / "undone"
    monkeypatch.setattr(main, "Cooperative", undone_by_a_program(log, fails))
    async with rig.agent():
        pod, content, dump = await rig.held()
        await rig.refused(dump, "NoSpace")
        assert log.read_text() == "undone\n"
    if returns:
        async with rig.agent():
            await rig.done(rig.abort_order(pod, content), "aborted")
    # By its guard, where no agent returns.
    await until(lambda: "snapshot-aborted 1" in pod.events(), "the worker's release")
    assert log.read_text() == "undone\n"


async def test_a_worker_that_its_driver_is_done_with_is_not_given_to_the_program(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    is_done = asyncio.Event()

    async def reads(dump: Dump) -> None:
        await dump.goes_on()
        is_done.set()
        await asyncio.Event().wait()

    log = tmp_path / "undone"
    monkeypatch.setattr(main, "Cooperative", undone_by_a_program(log, reads))
    async with rig.agent():
        pod, _, dump = await rig.held()
        await rig.send(dump)
        await asyncio.wait_for(is_done.wait(), 5)
    await until(lambda: "snapshot-aborted 1" in pod.events(), "the worker's release")
    assert not log.exists()


async def test_what_is_copied_while_the_guard_lets_the_worker_run_becomes_no_part(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def overtaken(_dump: Dump) -> None:
        os.kill(rig.guards()[0], signal.SIGTERM)
        await asyncio.sleep(0.2)

    driver = undone_by_a_program(tmp_path / "undone", overtaken)
    monkeypatch.setattr(main, "Cooperative", driver)
    async with rig.agent():
        _, content, dump = await rig.held()
        await rig.done(dump, "failed")
        assert not (rig.generation(content) / "process" / "part.json").exists()


async def test_a_dump_that_takes_longer_than_a_silence_is_not_ended(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def slowly(_dump: Dump) -> None:
        await asyncio.sleep(2.5)

    driver = undone_by_a_program(tmp_path / "undone", slowly)
    monkeypatch.setattr(main, "Cooperative", driver)
    async with rig.agent():
        pod, content, dump = await rig.held(dump_within_s=0.5)
        await rig.done(dump, "staged")
        await rig.done(rig.release_order(pod, content), "released")
        await until(lambda: "snapshot-complete 1" in pod.events(), "the worker's release")


async def test_an_abort_lasts_as_long_as_a_driver_may_take_to_let_a_worker_go(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun = asyncio.Event()

    async def hangs(_dump: Dump) -> None:
        begun.set()
        await asyncio.Event().wait()

    log = tmp_path / "undone"
    monkeypatch.setattr(main, "Cooperative", undone_by_a_program(log, hangs, 1.0))
    # As if the program took longer than that.
    monkeypatch.setattr(captures, "LET_GO_S", 0.2)
    monkeypatch.setattr(captures, "UNDO_S", 0.2)
    async with rig.agent():
        pod, content, dump = await rig.held()
        await rig.send(dump)
        await asyncio.wait_for(begun.wait(), 5)
        await rig.done(rig.abort_order(pod, content), "aborted")
        assert control.is_of((pod.control / control.ABORTED).read_bytes(), 1)
    assert set(log.read_text().split()) == {"undone"}


# Seals, deletion and verification.


def cut_short(generation: Path) -> None:
    with (generation / "process" / "weights.bin").open("r+b") as file:
        file.truncate(100)


def beside_another(generation: Path) -> None:
    (generation / "gpu-0").mkdir()


def with_another_manifest(generation: Path) -> None:
    path = generation / "process" / "part.json"
    path.write_bytes(path.read_bytes() + b"\n")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (cut_short, "'file': 'weights.bin'"),
        (beside_another, "'found': ['gpu-0', 'process']"),
        (with_another_manifest, "digest"),
    ],
)
async def test_what_is_not_as_it_was_staged_is_not_sealed(
    node: Rig, change: Callable[[Path], None], said: str
) -> None:
    pod, content = await node.running(), fresh_uid()
    prepared, dumped = await node.staged(pod, content)
    change(node.generation(content))
    failure = await node.refused(node.seal_order(pod, prepared, dumped.part), "ArtifactCorrupt")
    assert said in f"{failure.message} {failure.values}"
    assert not (node.generation(content) / "root.json").exists()


async def test_an_artifact_is_verified_whole_and_a_flipped_bit_is_named(node: Rig) -> None:
    pod, content = await node.running("--state-bytes", str(9 * MIB)), fresh_uid()
    artifact = await node.captured(pod, content)
    report = await node.done(node.verify_order(artifact), "verified")
    assert report.bytes > 9 * MIB
    assert report.proven is not None
    assert (report.proven.bytes, report.proven.driver) == (report.bytes, "cooperative")
    assert [(part.part, part.bytes) for part in report.proven.parts] == [("process", report.bytes)]

    with (node.generation(content) / "process" / "weights.bin").open("r+b") as file:
        file.seek(8 * MIB + 5)
        file.write(b"!")
    failure = await node.refused(node.verify_order(artifact, 2), "ArtifactCorrupt")
    assert (failure.values["file"], failure.values["chunk"]) == ("weights.bin", 1)


async def test_delete_removes_one_generation_and_nothing_beside_it(node: Rig) -> None:
    pod = await node.running()
    content, other = fresh_uid(), fresh_uid()
    await node.captured(pod, content)
    await until(lambda: "snapshot-complete 1" in pod.events(), "the worker's release")
    await node.captured(pod, other)
    beside = node.generation(content).parent / "gen-2"
    beside.mkdir()

    await node.done(node.delete_order(content), "deleted")
    assert not node.generation(content).exists()
    assert beside.exists()
    assert node.generation(other).exists()
    await node.done(node.delete_order(content, 2), "deleted")


async def test_what_was_deleted_is_not_written_again_by_an_order_that_comes_late(node: Rig) -> None:
    _, content, dump = await node.held()
    await node.done(node.delete_order(content), "deleted")
    await node.refused(dump, "Superseded", kind="rejected")
    assert not node.generation(content).exists()


async def test_a_worker_that_polls_learns_how_a_capture_ended_just_before_the_next_one(
    node: Rig,
) -> None:
    pod = await node.running("--poll-s", "5")
    await node.staged(pod, content := fresh_uid())
    await node.carry_out(node.release_order(pod, content))
    # The worker has not looked yet, and the files of the capture before go.
    await node.prepared(pod, fresh_uid())
    assert pod.events()[1:] == ["quiesced 1", "snapshot-complete 1, missed", "quiesced 1"]
