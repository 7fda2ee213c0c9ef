"""Workers that use CUDA go on elsewhere: the real helper and CRIU, with a fake of the driver."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from snapshot_agent.adapters import procfs
from snapshot_agent.domain.cuda import CudaRefused, CudaStuck, CudaTimedOut, State
from snapshot_shared.errors import (
    CriuFailed,
    DeadlineExceeded,
    Incompatible,
    NoSpace,
    NotEligible,
    OutcomeUnknown,
    SnapbackError,
)
from tests.process.cuda_stage import TOOLS, Stage, goes_on, staged, until
from tests.support.cuda_rig import UUIDS, CudaNode, cuda_node
from tests.support.cuda_rig import library as compiled

pytestmark = [pytest.mark.process, pytest.mark.waits]

BOTH = ("parent", "child")


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    if missing := [name for name in ("ip", "unshare") if shutil.which(name) is None]:
        pytest.skip(f"{' and '.join(missing)} missing: install iproute2 and util-linux")
    if not ((TOOLS / "criu" / "criu").exists() and (TOOLS / "snapback-init").exists()):
        pytest.skip("CRIU or snapback-init is missing: run `make criu init`")
    return compiled(tmp_path_factory.mktemp("libcuda"))


@pytest.fixture
def cuda(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaNode]:
    folder = tmp_path / "cuda"
    folder.mkdir()
    yield from cuda_node(folder, library, monkeypatch)


@pytest.fixture
def node(tmp_path: Path, cuda: CudaNode) -> Iterator[Stage]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as layers:
        yield from staged(tmp_path, Path(layers), cuda)


def called(node: Stage, *, since: int = 0) -> list[str]:
    """The verbs that have succeeded. The driver was never asked for a process that was stopped."""
    calls = node.cuda.calls()
    assert [call for call in calls if call.what == "stopped"] == []
    return node.cuda.verbs()[since:]


async def test_a_worker_goes_on_after_its_dump_and_on_another_device_after_its_restore(
    node: Stage,
) -> None:
    assert await node.driver.is_ready()
    source = node.worker("child")
    part = await node.dump(source)
    verbs = ("lock", "checkpoint", "restore", "unlock")
    assert called(node) == [verb for verb in verbs for _ in BOTH]
    assert goes_on(source, *BOTH)
    facts = json.loads((part / "criu.json").read_text())["cuda"]
    assert facts == {
        "processes": 2,
        "driver": [580, 65, 6],
        "gpus": [{"uuid": UUIDS[0], "product": "NVIDIA H100"}],
    }
    last = {who: source.lines.counts(who)[-1] for who in BOTH}
    source.end()

    node.given.uuids[:] = [UUIDS[2]]
    node.cuda.place(UUIDS[3], UUIDS[2])
    target = node.placeholder()
    restored = await node.restore(part, target)
    assert called(node, since=8) == ["restore", "restore", "unlock", "unlock"]
    assert target.is_restored()
    assert goes_on(target, *BOTH)
    for who in BOTH:
        counts = target.lines.counts(who)
        assert counts == list(range(counts[0], counts[-1] + 1))
        assert 1 < counts[0] <= last[who]
    pids = sorted(each.pid for each in procfs.family_of(*restored))
    assert node.cuda.states(pids) == [State.RUNNING] * 2
    assert [node.cuda.device(pid) for pid in pids] == [1, 1]


async def test_a_restored_worker_is_dumped_again(node: Stage) -> None:
    source = node.worker()
    part = await node.dump(source)
    source.end()
    middle = node.placeholder()
    middle.worker = replace(middle.worker, process=await node.restore(part, middle))
    assert goes_on(middle)
    part = await node.dump(middle)
    assert goes_on(middle)
    middle.end()
    target = node.placeholder()
    process = await node.restore(part, target)
    assert goes_on(target)
    assert node.cuda.states([process.pid]) == [State.RUNNING]
    called(node)


@pytest.mark.parametrize(
    ("fault", "what", "kind", "says"),
    [
        ("lock 0 busy", "child", CudaRefused, "NOT_READY"),
        ("lock {child} error 801", "child", CudaRefused, "NOT_SUPPORTED"),
        ("checkpoint {child} error 801", "child", CudaRefused, "NOT_SUPPORTED"),
        ("lock 0 hang", "", DeadlineExceeded, "dump-process"),
        ("checkpoint 0 hang", "", DeadlineExceeded, "dump-process"),
        ("checkpoint 0 late", "", DeadlineExceeded, "dump-process"),
        ("", "keeps", NotEligible, "/dev/nvidia0 open"),
        ("criu fail", "child", CriuFailed, "it was told to"),
    ],
)
async def test_a_worker_goes_on_when_a_step_of_its_dump_fails_or_hangs(
    node: Stage, fault: str, what: str, kind: type[SnapbackError], says: str
) -> None:
    source = node.worker(*([what] if what else []))
    if fault.startswith("criu"):
        node.criu_does(fault.removeprefix("criu "))
    else:
        node.cuda.faults(fault.format(child=source.tree()[-1]))
    within_s = 4.0 if kind is DeadlineExceeded else 60.0
    with pytest.raises(kind, match=says):
        await node.dump(source, within_s)
    assert goes_on(source, *(BOTH if what == "child" else ()))
    assert list((node.folder / "helper" / "dumps").iterdir()) == []
    called(node)


async def test_a_capture_that_is_given_up_in_a_checkpoint_leaves_its_worker_running(
    node: Stage,
) -> None:
    source = node.worker()
    node.cuda.faults("checkpoint 0 slow 2000")
    dump = asyncio.ensure_future(node.dump(source))
    await reached(node, "checkpoint")
    dump.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dump
    await node.settle(source)
    assert source.runs()
    assert goes_on(source)
    assert called(node)[-2:] == ["restore", "unlock"]


@pytest.mark.parametrize("step", ["lock", "checkpoint"])
async def test_a_worker_goes_on_when_the_helper_is_killed_between_its_lock_and_criu(
    node: Stage, step: str
) -> None:
    source = node.worker("child")
    node.cuda.faults(f"{step} 0 slow 1500")
    dump = asyncio.ensure_future(node.dump(source))
    await reached(node, step)
    node.kill_helper()
    with pytest.raises(SnapbackError):
        await dump
    node.cuda.faults()
    node.start_helper()
    await node.settle(source)
    assert source.runs()
    assert goes_on(source, *BOTH)
    called(node)


async def test_a_helper_that_is_asked_to_stop_lets_a_worker_go_first(node: Stage) -> None:
    source = node.worker("child")
    node.cuda.faults("checkpoint 0 slow 1500")
    dump = asyncio.ensure_future(node.dump(source))
    await reached(node, "checkpoint")
    node.stop_helper()
    with pytest.raises(SnapbackError):
        await dump
    assert goes_on(source, *BOTH)
    assert list((node.folder / "helper" / "dumps").iterdir()) == []


async def test_what_is_on_devices_has_to_fit_on_the_disk_before_anything_is_locked(
    node: Stage,
) -> None:
    source = node.worker("child")
    node.uses(*((pid, 10_000_000) for pid in source.tree()))
    with pytest.raises(NoSpace, match=r"needs 2\d{13} bytes"):
        await node.dump(source)
    assert called(node) == []


async def test_a_helper_that_starts_lets_a_worker_go_by_itself(node: Stage) -> None:
    source = node.worker()
    node.cuda.faults("checkpoint 0 slow 1500")
    dump = asyncio.ensure_future(node.dump(source))
    await reached(node, "checkpoint")
    node.kill_helper()
    with pytest.raises(SnapbackError):
        await dump
    node.start_helper()
    assert goes_on(source)
    until(lambda: not list((node.folder / "helper" / "dumps").iterdir()), "no record")


async def test_a_worker_is_ended_when_the_helper_was_killed_with_its_criu(node: Stage) -> None:
    source = node.worker()
    node.criu_does("hang")
    dump = asyncio.ensure_future(node.dump(source))
    await asyncio.to_thread(until, (node.folder / "criu-hangs").exists, "CRIU")
    node.kill_helper()
    with pytest.raises(SnapbackError):
        await dump
    node.criu_does("")
    node.start_helper()
    await node.settle(source)
    until(lambda: not source.runs(), "the end of the worker")


async def test_a_worker_is_ended_when_its_criu_hangs_and_was_killed(node: Stage) -> None:
    source = node.worker()
    node.criu_does("hang")
    with pytest.raises(OutcomeUnknown, match="CRIU was ended by signal 9"):
        await node.dump(source, 5.0)
    await node.settle(source)
    until(lambda: not source.runs(), "the end of the worker")
    # CRIU may have stopped it, so the driver was not asked.
    assert called(node) == ["lock", "checkpoint"]


async def test_a_worker_that_the_driver_does_not_let_go_is_ended(node: Stage) -> None:
    source = node.worker()
    node.cuda.faults("restore 0 error 304")
    with pytest.raises(CudaStuck, match=f"process {source.pid}"):
        await node.dump(source)
    await node.settle(source)
    until(lambda: not source.runs(), "the end of the worker")


async def test_a_stopped_worker_is_refused_before_the_driver_is_asked_for_it(node: Stage) -> None:
    source = node.worker("child")
    child = source.tree()[-1]
    os.kill(child, signal.SIGSTOP)
    until(lambda: (found := procfs.read(child)) is not None and found.state == "T", "a stop")
    with pytest.raises(NotEligible, match=f"process {child} is stopped"):
        await node.dump(source)
    assert called(node) == []
    os.kill(child, signal.SIGCONT)
    assert goes_on(source, *BOTH)


@pytest.mark.parametrize(
    ("fault", "kind"), [("restore 0 error 801", CudaRefused), ("unlock 0 hang", CudaTimedOut)]
)
async def test_a_restored_tree_that_cannot_have_its_devices_is_ended_and_never_announced(
    node: Stage, fault: str, kind: type[SnapbackError]
) -> None:
    source = node.worker("child")
    part = await node.dump(source)
    source.end()
    target = node.placeholder()
    node.cuda.faults(fault)
    with pytest.raises(kind):
        await node.restore(part, target)
    assert not target.is_restored()
    until(lambda: target.tree() == [target.pid], "the end of what was restored")
    assert target.runs()
    assert target.lines.said == []
    called(node)


@pytest.mark.parametrize(
    ("driver", "given", "kind", "says"),
    [
        ("575.57.08", [UUIDS[1]], NotEligible, "580"),
        ("610.10", [UUIDS[0]], Incompatible, "575.57.08"),
        ("575.57.08", [UUIDS[0], UUIDS[1]], Incompatible, "the devices"),
        ("575.57.08", ["gpu-0"], NotEligible, "gpu-0"),
    ],
)
async def test_a_place_that_does_not_fit_is_refused_before_anything_is_restored(
    node: Stage, driver: str, given: list[str], kind: type[SnapbackError], says: str
) -> None:
    node.version("575.57.08")
    source = node.worker()
    part = await node.dump(source)
    source.end()
    node.version(driver)
    node.given.uuids[:] = given
    target = node.placeholder()
    with pytest.raises(kind, match=says):
        await node.restore(part, target)
    assert target.tree() == [target.pid]
    assert not target.is_restored()


async def test_a_node_is_ready_only_while_its_helper_answers_and_its_driver_fits(
    node: Stage,
) -> None:
    node.version("570.133.20")
    assert not await node.driver.is_ready()
    node.version("580.65.06")
    node.cuda.place()
    assert not await node.driver.is_ready()
    node.cuda.place(*UUIDS)
    assert await node.driver.is_ready()
    node.kill_helper()
    assert not await node.driver.is_ready()


async def reached(node: Stage, step: str) -> None:
    """Wait until the driver has begun to do something."""

    def has_begun() -> bool:
        return any((call.what, call.verb) == ("begin", step) for call in node.cuda.calls())

    await asyncio.to_thread(until, has_begun, step)
