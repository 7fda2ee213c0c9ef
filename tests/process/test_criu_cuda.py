"""Workers that use CUDA go on elsewhere: the real helper and CRIU, with a fake of the driver."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import replace

import pytest

from snapshot_agent.adapters import procfs
from snapshot_agent.domain.cuda import CudaRefused, CudaTimedOut, State
from snapshot_shared import errors
from tests.process.cuda_stage import Stage, goes_on
from tests.support.cuda_rig import UUIDS
from tests.support.waiting import wait_until

BOTH = ("parent", "child")


def called(stage: Stage, *, since: int = 0) -> list[str]:
    """The verbs that have succeeded. The driver was never asked for a process that was stopped."""
    calls = stage.cuda.calls()
    assert [call for call in calls if call.what == "stopped"] == []
    return stage.cuda.verbs()[since:]


async def test_a_worker_goes_on_after_its_dump_and_on_another_device_after_its_restore(
    stage: Stage,
) -> None:
    assert (await stage.driver.state()).failure is None
    source = stage.worker("child")
    part = await stage.dump(source)
    verbs = ("lock", "checkpoint", "restore", "unlock")
    assert called(stage) == [verb for verb in verbs for _ in BOTH]
    assert goes_on(source, *BOTH)
    facts = json.loads((part / "criu.json").read_text())["cuda"]
    assert facts == {
        "processes": 2,
        "driver": [580, 65, 6],
        "gpus": [{"uuid": UUIDS[0], "product": "NVIDIA H100"}],
    }
    last = {who: source.lines.counts(who)[-1] for who in BOTH}
    source.end()

    stage.given.uuids[:] = [UUIDS[2]]
    stage.cuda.place(UUIDS[3], UUIDS[2])
    target = stage.placeholder()
    restored = await stage.restore(part, target)
    assert called(stage, since=8) == ["restore", "restore", "unlock", "unlock"]
    assert target.is_restored()
    assert goes_on(target, *BOTH)
    for who in BOTH:
        counts = target.lines.counts(who)
        assert counts == list(range(counts[0], counts[-1] + 1))
        assert 1 < counts[0] <= last[who]
    pids = sorted(each.pid for each in procfs.family_of(*restored))
    assert stage.cuda.states(pids) == [State.RUNNING] * 2
    assert [stage.cuda.device(pid) for pid in pids] == [1, 1]


async def test_a_restored_worker_is_dumped_again(stage: Stage) -> None:
    source = stage.worker()
    part = await stage.dump(source)
    source.end()
    middle = stage.placeholder()
    middle.worker = replace(middle.worker, process=await stage.restore(part, middle))
    assert goes_on(middle)
    part = await stage.dump(middle)
    assert goes_on(middle)
    middle.end()
    target = stage.placeholder()
    process = await stage.restore(part, target)
    assert goes_on(target)
    assert stage.cuda.states([process.pid]) == [State.RUNNING]
    called(stage)


@pytest.mark.parametrize(
    ("fault", "what", "kind", "says"),
    [
        ("lock 0 busy", "child", CudaRefused, "NOT_READY"),
        ("lock {child} error 801", "child", CudaRefused, "NOT_SUPPORTED"),
        ("checkpoint {child} error 801", "child", CudaRefused, "NOT_SUPPORTED"),
        ("lock 0 hang", "", errors.DeadlineExceeded, "dump-process"),
        ("checkpoint 0 hang", "", errors.DeadlineExceeded, "dump-process"),
        ("checkpoint 0 late", "", errors.DeadlineExceeded, "dump-process"),
        ("", "keeps", errors.NotEligible, "/dev/nvidia0 open"),
        ("criu fail", "child", errors.CriuFailed, "it was told to"),
    ],
)
async def test_a_worker_goes_on_when_a_step_of_its_dump_fails_or_hangs(
    stage: Stage, fault: str, what: str, kind: type[errors.SnapbackError], says: str
) -> None:
    source = stage.worker(*([what] if what else []))
    if fault.startswith("criu"):
        stage.criu_does(fault.removeprefix("criu "))
    else:
        stage.cuda.faults(fault.format(child=source.tree()[-1]))
    within_s = 4.0 if kind is errors.DeadlineExceeded else 60.0
    with pytest.raises(kind, match=says):
        await stage.dump(source, within_s)
    assert goes_on(source, *(BOTH if what == "child" else ()))
    assert stage.left() == []
    called(stage)


async def test_a_capture_that_is_given_up_in_a_checkpoint_leaves_its_worker_running(
    stage: Stage,
) -> None:
    source = stage.worker()
    stage.cuda.faults("checkpoint 0 slow 2000")
    dump = asyncio.ensure_future(stage.dump(source))
    await stage.reached("checkpoint")
    dump.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dump
    await stage.settle(source)
    assert source.runs()
    assert goes_on(source)
    assert called(stage)[-2:] == ["restore", "unlock"]


async def test_a_helper_that_is_asked_to_stop_lets_a_worker_go_first(stage: Stage) -> None:
    source = stage.worker("child")
    stage.cuda.faults("checkpoint 0 slow 1500")
    dump = asyncio.ensure_future(stage.dump(source))
    await stage.reached("checkpoint")
    stage.stop_helper()
    with pytest.raises(errors.SnapbackError):
        await dump
    assert goes_on(source, *BOTH)
    assert stage.left() == []


async def test_what_is_on_devices_has_to_fit_on_the_disk_before_anything_is_locked(
    stage: Stage,
) -> None:
    source = stage.worker("child")
    stage.uses(*((pid, 10_000_000) for pid in source.tree()))
    with pytest.raises(errors.NoSpace, match=r"needs [\d.]+ TiB"):
        await stage.dump(source)
    assert called(stage) == []


async def test_a_worker_is_ended_when_its_criu_hangs_and_was_killed(stage: Stage) -> None:
    source = stage.worker()
    stage.criu_does("hang")
    with pytest.raises(errors.OutcomeUnknown, match="CRIU was ended by signal 9"):
        # Long enough for all that comes before CRIU on a busy machine.
        await stage.dump(source, 10.0)
    await stage.settle(source)
    wait_until(lambda: not source.runs(), "the end of the worker")
    # CRIU may have stopped it, so the driver was not asked.
    assert called(stage) == ["lock", "checkpoint"]


async def test_a_stopped_worker_is_refused_before_the_driver_is_asked_for_it(stage: Stage) -> None:
    source = stage.worker("child")
    child = source.tree()[-1]
    os.kill(child, signal.SIGSTOP)
    wait_until(lambda: (found := procfs.read(child)) is not None and found.state == "T", "a stop")
    with pytest.raises(errors.NotEligible, match=f"process {child} is stopped"):
        await stage.dump(source)
    assert called(stage) == []
    os.kill(child, signal.SIGCONT)
    assert goes_on(source, *BOTH)


@pytest.mark.parametrize(
    ("fault", "kind"), [("restore 0 error 801", CudaRefused), ("unlock 0 hang", CudaTimedOut)]
)
async def test_a_restored_tree_that_cannot_have_its_devices_is_ended_and_never_announced(
    stage: Stage, fault: str, kind: type[errors.SnapbackError]
) -> None:
    source = stage.worker("child")
    part = await stage.dump(source)
    source.end()
    target = stage.placeholder()
    stage.cuda.faults(fault)
    with pytest.raises(kind):
        await stage.restore(part, target)
    assert not target.is_restored()
    wait_until(lambda: target.tree() == [target.pid], "the end of what was restored")
    assert target.runs()
    assert target.lines.said == []
    called(stage)


@pytest.mark.parametrize(
    ("driver", "given", "kind", "says"),
    [
        ("575.57.08", [UUIDS[1]], errors.NotEligible, "580"),
        ("610.10", [UUIDS[0]], errors.Incompatible, "575.57.08"),
        ("575.57.08", [UUIDS[0], UUIDS[1]], errors.Incompatible, "the devices"),
        ("575.57.08", ["gpu-0"], errors.NotEligible, "gpu-0"),
    ],
)
async def test_a_place_that_does_not_fit_is_refused_before_anything_is_restored(
    stage: Stage, driver: str, given: list[str], kind: type[errors.SnapbackError], says: str
) -> None:
    stage.version("575.57.08")
    source = stage.worker()
    part = await stage.dump(source)
    source.end()
    stage.version(driver)
    stage.given.uuids[:] = given
    target = stage.placeholder()
    with pytest.raises(kind, match=says):
        await stage.restore(part, target)
    assert target.tree() == [target.pid]
    assert not target.is_restored()


async def test_a_node_is_ready_only_while_its_helper_answers_and_its_driver_fits(
    stage: Stage,
) -> None:
    stage.version("570.133.20")
    assert (await stage.driver.state()).failure is not None
    stage.version("580.65.06")
    stage.cuda.place()
    assert (await stage.driver.state()).failure is not None
    stage.cuda.place(*UUIDS)
    assert (await stage.driver.state()).failure is None
    stage.kill_helper()
    assert (await stage.driver.state()).failure is not None
