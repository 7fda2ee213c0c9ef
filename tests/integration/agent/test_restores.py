"""Restores into a worker that waits: filled, signalled, answered; and what is refused."""

import os
import signal

import pytest

from snapshot_agent.domain import control
from tests.support.agent_rig import NOWHERE, Pod, Rig, fresh_uid
from tests.support.waiting import until


async def test_a_waiting_worker_goes_on_where_the_captured_one_was_and_heeds_no_late_abort(
    node: Rig,
) -> None:
    pod, artifact = await node.restorable("--answer", "42", "--state-bytes", "20971520")
    report = await node.done(node.restore_order(pod, artifact), "restored")
    assert report.bytes > 20971520
    assert pod.events()[-1] == "restored 42 20971520"
    assert (pod.control / "state" / "weights.bin").stat().st_mode & 0o777 == 0o600
    assert not any(r.kind == "ready" and r.order == f"run-{pod.ref.uid}" for r in node.reports)

    await node.done(node.restore_abort(pod), "aborted")
    assert not (pod.control / control.RESTORE_FAILED).exists()
    assert (pod.control / control.RESTORE_COMPLETE).exists()
    assert pod.events()[-1] == "restored 42 20971520"


async def test_a_restored_worker_can_be_captured_again(node: Rig) -> None:
    pod, artifact = await node.restorable("--answer", "7")
    await node.carry_out(node.restore_order(pod, artifact))
    (pod.control / control.READY).write_text('{"attempt": 0}')
    again = await node.captured(pod, fresh_uid())
    third = await node.running(standby=True)
    await node.carry_out(node.restore_order(third, again))
    assert third.events()[-1] == "restored 7 1024"


async def test_a_corrupted_part_never_reaches_the_worker(node: Rig) -> None:
    pod, artifact = await node.restorable("--state-bytes", "9437184")
    folder = node.generation(artifact.content_uid)
    with (folder / "process" / "weights.bin").open("r+b") as file:
        file.seek(9000000)
        file.write(b"!")
    failure = await node.refused(node.restore_order(pod, artifact), "ArtifactCorrupt")
    assert (failure.values["file"], failure.values["chunk"]) == ("weights.bin", 1)
    await until(lambda: pod.events()[-1] == "restore-failed", "the worker's answer")
    assert not (pod.control / control.RESTORE_COMPLETE).exists()
    assert list((pod.control / "state").iterdir()) == []


async def test_a_file_that_a_client_of_nfs_has_left_in_a_part_does_no_harm(node: Rig) -> None:
    pod, artifact = await node.restorable()
    part = node.generation(artifact.content_uid) / "process"
    (part / ".nfs000000000e8b6e5400000001").write_bytes(b"removed while it was open")
    await node.carry_out(node.restore_order(pod, artifact))
    other, artifact = await node.restorable()
    (node.generation(artifact.content_uid) / "process" / "another").write_bytes(b"")
    await node.refused(node.restore_order(other, artifact), "ArtifactCorrupt")


@pytest.mark.parametrize("victim", ["root.json", "process/part.json", "a link"])
async def test_a_changed_manifest_is_refused_before_the_worker_is_touched(
    node: Rig, victim: str
) -> None:
    pod, artifact = await node.restorable()
    folder = node.generation(artifact.content_uid)
    if victim == "a link":
        path = folder / "process" / "weights.bin"
        path.rename(folder / "elsewhere")
        path.symlink_to(folder / "elsewhere")
    else:
        (folder / victim).write_bytes((folder / victim).read_bytes() + b" ")
    await node.refused(node.restore_order(pod, artifact), "ArtifactCorrupt")
    untouched(pod)


async def test_a_worker_that_spoils_its_own_folder_does_not_speak_ill_of_the_artifact(
    node: Rig,
) -> None:
    pod, artifact = await node.restorable()
    elsewhere = pod.control.with_name("elsewhere")
    pod.control.rename(elsewhere)
    pod.control.symlink_to(elsewhere)
    await node.refused(node.restore_order(pod, artifact), "ControlFolderBroken")


async def test_a_restore_is_refused_of_what_is_not_there_and_into_a_worker_that_does_not_wait(
    node: Rig,
) -> None:
    pod, artifact = await node.restorable()
    await node.refused(node.restore_order(pod, NOWHERE), "ArtifactMissing")
    cold = await node.running()
    await node.refused(node.restore_order(cold, artifact), "NotEligible", kind="rejected")


async def test_a_restore_on_a_node_whose_artifact_root_is_empty_says_nothing_of_the_artifact(
    rig: Rig,
) -> None:
    (rig.root / "lost+found").mkdir(parents=True)
    async with rig.agent():
        pod = await rig.running(standby=True)
        failure = await rig.refused(rig.restore_order(pod, NOWHERE), "ArtifactRootEmpty")
        assert "mount" in failure.next_step
        untouched(pod)


async def test_a_worker_that_does_not_serve_again_in_time_fails_the_restore(node: Rig) -> None:
    pod, artifact = await node.restorable(waits="--never-restored")
    # Of an earlier attempt, of which none stays.
    (pod.control / control.RESTORED).write_bytes(control.body(1))
    await node.refused(node.restore_order(pod, artifact, ready_s=0.3), "DeadlineExceeded")
    assert control.is_of((pod.control / control.RESTORE_FAILED).read_bytes(), 1)
    assert not (pod.control / control.RESTORE_COMPLETE).exists()


async def test_an_abort_tells_a_waiting_worker_why_and_keeps_a_restore_from_beginning(
    node: Rig,
) -> None:
    pod, artifact = await node.restorable()
    await node.done(node.restore_abort(pod, why="a part is damaged"), "aborted")
    await until(lambda: pod.events()[-1] == "restore-failed", "the worker's answer")
    assert "a part is damaged" in (pod.control / control.RESTORE_FAILED).read_text()
    await node.refused(node.restore_order(pod, artifact), "Superseded", kind="rejected")


@pytest.mark.parametrize("with_", [signal.SIGKILL, signal.SIGTERM])
async def test_a_restore_that_a_restart_cut_off_goes_on_where_it_was(
    rig: Rig, with_: signal.Signals
) -> None:
    process = await rig.process()
    pod, artifact = await rig.restorable(waits="--never-restored")
    order = rig.restore_order(pod, artifact)
    await rig.send(order)
    await until((pod.control / control.RESTORE_COMPLETE).exists, "the signal")
    state = (pod.control / "state" / "weights.bin").stat()
    os.kill(process.pid, with_)
    await process.wait()
    assert not (pod.control / control.RESTORE_FAILED).exists()
    await rig.process()
    (pod.control / ".restored").write_text('{"attempt": 1}')
    (pod.control / ".restored").rename(pod.control / control.RESTORED)
    assert (await rig.answer(order)).kind == "restored"
    assert (pod.control / "state" / "weights.bin").stat() == state


def untouched(pod: Pod) -> None:
    assert {path.name for path in pod.control.iterdir()} == {"state"}
    assert pod.events()[-1] == "standby"
