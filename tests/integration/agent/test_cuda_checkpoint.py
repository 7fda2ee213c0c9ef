"""CUDA processes are locked, checkpointed and let go by a fake driver, which hangs and refuses.

The fake keeps the rules of the driver's documentation. A real GPU has not been met.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time

import pytest

from snapshot_agent.adapters import procfs
from snapshot_agent.domain.cuda import (
    CudaMissing,
    CudaRefused,
    CudaStuck,
    CudaTimedOut,
    LetGo,
    State,
)
from snapshot_agent.helper import cuda
from snapshot_shared.errors import InvalidInput
from tests.support.cuda_rig import UUIDS, CudaNode, Worker
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.turns, pytest.mark.waits]

HANGS_S = 2.0
"""How long a call that hangs is waited for, here."""

ENDS_S = 12.0
"""How long processes are let go of which one never runs; the others must run by then."""
BUSY_S = 60.0
"""How long is waited for what does not hang, on a machine that is busy."""

SAME = {uuid: uuid for uuid in UUIDS}
NOWHERE = "GPU-90000000-0000-4000-8000-000000000009"

CALLER = """
import sys
from snapshot_agent.helper import cuda
verb, *pids = sys.argv[1:]
calls = {
    "lock": cuda.lock_all,
    "checkpoint": cuda.checkpoint_all,
    "restore": lambda pids, within_s: cuda.restore_all(pids, {}, within_s),
}
calls[verb]([int(pid) for pid in pids], 60)
"""


@pytest.fixture
def node(cuda_node: CudaNode) -> CudaNode:
    return cuda_node


@pytest.fixture
def tree(node: CudaNode) -> Worker:
    """Two processes, parent and child, on a device each."""
    return node.worker(0, "child")


def runs(node: CudaNode, worker: Worker) -> bool:
    worker.ping("still here")
    return set(node.states(worker.pids)) == {State.RUNNING} and worker.answer() == "still here"


def checkpointed(pids: list[int]) -> None:
    cuda.lock_all(pids, BUSY_S)
    cuda.checkpoint_all(pids, BUSY_S, undo_s=BUSY_S)


def caller(verb: str, pids: list[int]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", CALLER, verb, *map(str, pids)])


def test_processes_that_use_cuda_are_found_among_others(node: CudaNode, tree: Worker) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert cuda.processes([os.getpid(), *tree.pids, gone.pid]) == tree.pids


def test_all_processes_are_locked_before_any_is_checkpointed_and_restored_before_any_is_unlocked(
    node: CudaNode, tree: Worker
) -> None:
    checkpointed(tree.pids)
    assert node.states(tree.pids) == [State.CHECKPOINTED] * 2
    cuda.restore_all(tree.pids, SAME, BUSY_S)
    assert node.states(tree.pids) == [State.LOCKED] * 2
    cuda.unlock_all(tree.pids, BUSY_S)
    verbs = ["lock", "checkpoint", "restore", "unlock"]
    assert node.verbs() == [verb for verb in verbs for _ in tree.pids]
    # Every device stays.
    assert {c.value for c in node.calls() if (c.what, c.verb) == ("begin", "restore")} == {0}
    assert runs(node, tree)


def test_a_worker_makes_no_call_of_cuda_from_its_lock_to_its_unlock(
    node: CudaNode, tree: Worker
) -> None:
    checkpointed(tree.pids)
    tree.ping("hello")
    cuda.restore_all(tree.pids, SAME, BUSY_S)
    assert not select.select([tree.process.stdout], [], [], 0.2)[0]
    cuda.unlock_all(tree.pids, BUSY_S)
    assert tree.answer() == "hello"


def test_a_lock_that_takes_too_long_leaves_all_processes_running(
    node: CudaNode, tree: Worker
) -> None:
    node.faults(f"lock {tree.pids[1]} busy")
    with pytest.raises(CudaRefused, match=rf"lock of process {tree.pids[1]}: .*NOT_READY"):
        cuda.lock_all(tree.pids, 0.5, grace_s=BUSY_S, undo_s=BUSY_S)
    assert [c.value for c in node.calls() if (c.what, c.verb) == ("begin", "lock")] == [500, 500]
    assert node.verbs() == ["lock", "unlock"]
    assert runs(node, tree)


def test_a_lock_without_a_timeout_is_never_asked_for(node: CudaNode, tree: Worker) -> None:
    node.faults("lock 0 busy")
    with pytest.raises(CudaRefused):
        cuda.lock_all(tree.pids, 0, undo_s=BUSY_S)


def test_a_checkpoint_that_fails_with_one_process_leaves_all_running(
    node: CudaNode, tree: Worker
) -> None:
    cuda.lock_all(tree.pids, BUSY_S)
    node.faults(f"checkpoint {tree.pids[1]} error 801")
    with pytest.raises(CudaRefused, match="NOT_SUPPORTED") as caught:
        cuda.checkpoint_all(tree.pids, BUSY_S, undo_s=BUSY_S)
    assert caught.value.values["refused"] == {str(tree.pids[1]): "CUDA_ERROR_NOT_SUPPORTED"}
    assert node.verbs()[-3:] == ["restore", "unlock", "unlock"]
    assert runs(node, tree)


@pytest.mark.parametrize("kind", ["hang", pytest.param("late", marks=pytest.mark.slow)])
def test_a_call_that_hangs_is_killed_and_all_processes_run_again_in_time(
    node: CudaNode, tree: Worker, kind: str
) -> None:
    node.faults(f"lock {tree.pids[0]} {kind}")
    began = time.monotonic()
    with pytest.raises(CudaTimedOut, match="did not answer"):
        cuda.lock_all(tree.pids, 0.1, grace_s=HANGS_S, undo_s=BUSY_S)
    assert time.monotonic() - began < HANGS_S + BUSY_S
    assert runs(node, tree)
    node.faults(f"checkpoint {tree.pids[0]} {kind}")
    cuda.lock_all(tree.pids, BUSY_S)
    with pytest.raises(CudaTimedOut):
        cuda.checkpoint_all(tree.pids, HANGS_S, undo_s=BUSY_S)
    assert runs(node, tree)


def test_a_killed_call_leaves_no_process_of_the_helper_behind(node: CudaNode, tree: Worker) -> None:
    node.faults("lock 0 hang")
    process = caller("lock", tree.pids)
    wait_until(lambda: len(node.calls()) == 2)
    calling = {each.pid for each in procfs.running() if each.parent == process.pid}
    assert len(calling) == 2
    process.kill()
    process.wait()
    wait_until(lambda: not calling & {each.pid for each in procfs.running()})


@pytest.mark.parametrize(
    ("verb", "reached"),
    [
        pytest.param("lock", State.LOCKED, marks=pytest.mark.slow),
        ("checkpoint", State.CHECKPOINTED),
        pytest.param("restore", State.LOCKED, marks=pytest.mark.slow),
    ],
)
def test_what_a_killed_caller_has_begun_goes_on_and_is_let_go(
    node: CudaNode, tree: Worker, verb: str, reached: State
) -> None:
    if verb != "lock":
        cuda.lock_all(tree.pids, BUSY_S)
    if verb == "restore":
        cuda.checkpoint_all(tree.pids, BUSY_S, undo_s=BUSY_S)
    node.faults(f"{verb} 0 slow 1500")
    before = len(node.calls())
    process = caller(verb, tree.pids)
    wait_until(lambda: len(node.calls()) == before + 2)
    process.kill()
    process.wait()
    wait_until(lambda: node.states(tree.pids) == [reached] * 2)
    node.faults()
    assert cuda.let_go(tree.pids, BUSY_S) == LetGo(tree.pids, [], {})
    assert runs(node, tree)


def test_processes_in_different_states_are_let_go_and_once_more_is_no_harm(
    node: CudaNode, tree: Worker
) -> None:
    other, third = node.worker(2), node.worker(3)
    cuda.lock_all([*tree.pids, *other.pids], BUSY_S)
    cuda.checkpoint_all(tree.pids[:1], BUSY_S, undo_s=BUSY_S)
    pids = [*tree.pids, *other.pids, *third.pids]
    assert cuda.let_go(pids, BUSY_S) == LetGo(pids, [], {})
    verbs = node.verbs()
    assert verbs[-4:] == ["restore", "unlock", "unlock", "unlock"]
    assert cuda.let_go(pids, BUSY_S) == LetGo(pids, [], {})
    assert node.verbs() == verbs
    assert all(runs(node, worker) for worker in (tree, other, third))


def test_a_process_that_ended_while_it_was_checkpointed_is_not_stuck(
    node: CudaNode, tree: Worker
) -> None:
    checkpointed(tree.pids)
    os.kill(tree.pids[1], signal.SIGKILL)
    assert cuda.let_go(tree.pids, BUSY_S) == LetGo(tree.pids[:1], tree.pids[1:], {})


def test_a_restore_that_ran_out_of_memory_is_reported_and_the_others_run(
    node: CudaNode, tree: Worker
) -> None:
    checkpointed(tree.pids)
    node.faults(f"restore {tree.pids[0]} oom")
    stuck = {tree.pids[0]: "checkpointed, restore: CUDA_ERROR_OUT_OF_MEMORY"}
    assert cuda.let_go(tree.pids, BUSY_S) == LetGo(tree.pids[1:], [], stuck)
    node.faults()
    assert "OPERATING_SYSTEM" in cuda.let_go(tree.pids, BUSY_S).stuck[tree.pids[0]]


def test_a_process_that_the_driver_gave_up_is_reported(node: CudaNode, tree: Worker) -> None:
    cuda.lock_all(tree.pids, BUSY_S)
    node.faults(f"checkpoint {tree.pids[0]} fail 719")
    with pytest.raises(CudaStuck, match=rf"process {tree.pids[0]} \(failed\)") as caught:
        cuda.checkpoint_all(tree.pids, BUSY_S, undo_s=BUSY_S)
    assert isinstance(caught.value.__cause__, CudaRefused)
    assert node.states(tree.pids) == [State.FAILED, State.RUNNING]


def test_an_unlock_that_fails_is_reported_and_the_others_run(node: CudaNode, tree: Worker) -> None:
    cuda.lock_all(tree.pids, BUSY_S)
    node.faults(f"unlock {tree.pids[1]} error 304")
    with pytest.raises(CudaRefused, match=f"unlock of process {tree.pids[1]}"):
        cuda.unlock_all(tree.pids, BUSY_S)
    stuck = {tree.pids[1]: "locked, unlock: CUDA_ERROR_OPERATING_SYSTEM"}
    assert cuda.let_go(tree.pids, BUSY_S) == LetGo(tree.pids[:1], [], stuck)
    node.faults()
    # The first runs already, which is no failure.
    cuda.unlock_all(tree.pids, BUSY_S)
    assert runs(node, tree)


def test_a_restore_that_hangs_keeps_the_others_locked_only_while_there_is_time(
    node: CudaNode, tree: Worker
) -> None:
    checkpointed(tree.pids)
    node.faults(f"restore {tree.pids[0]} hang")
    began = time.monotonic()
    found = cuda.let_go(tree.pids, ENDS_S)
    assert time.monotonic() - began < 2 * ENDS_S
    assert (found.running, list(found.stuck)) == (tree.pids[1:], tree.pids[:1])


def test_a_stopped_process_is_stuck_until_it_goes_on(node: CudaNode, tree: Worker) -> None:
    cuda.lock_all(tree.pids, BUSY_S)
    os.kill(tree.pids[1], signal.SIGSTOP)
    found = cuda.let_go(tree.pids, ENDS_S)
    assert (found.running, list(found.stuck)) == (tree.pids[:1], tree.pids[1:])
    os.kill(tree.pids[1], signal.SIGCONT)
    assert cuda.let_go(tree.pids, BUSY_S) == LetGo(tree.pids, [], {})


def test_a_restore_brings_processes_to_the_devices_of_its_map(node: CudaNode, tree: Worker) -> None:
    checkpointed(tree.pids)
    node.place(*UUIDS[2:])
    cuda.restore_all(tree.pids, {UUIDS[0]: UUIDS[3], UUIDS[1]: UUIDS[2]}, BUSY_S)
    cuda.unlock_all(tree.pids, BUSY_S)
    assert [node.device(pid) for pid in tree.pids] == [1, 0]
    assert runs(node, tree)


def test_a_process_that_came_back_under_another_pid_goes_on_on_devices_of_its_node(
    node: CudaNode,
) -> None:
    source, restored = node.worker(0), node.worker(0)
    checkpointed(source.pids)
    node.move(source.pids[0], restored.pids[0])
    source.process.kill()
    source.process.wait()
    node.place(*UUIDS[2:])
    assert cuda.processes(restored.pids) == restored.pids
    cuda.restore_all(restored.pids, {UUIDS[0]: UUIDS[2]}, BUSY_S)
    cuda.unlock_all(restored.pids, BUSY_S)
    assert node.device(restored.pids[0]) == 0
    assert runs(node, restored)


@pytest.mark.parametrize(
    ("mapping", "kind", "said", "is_asked"),
    [
        ({UUIDS[2]: UUIDS[3]}, CudaRefused, "INVALID_VALUE", True),
        ({UUIDS[0]: NOWHERE, UUIDS[1]: UUIDS[1]}, CudaRefused, "INVALID_VALUE", True),
        ({UUIDS[0]: UUIDS[2], UUIDS[1]: UUIDS[2]}, InvalidInput, "two devices go to one", False),
    ],
)
def test_a_map_that_does_not_fit_is_refused_and_processes_stay_checkpointed(
    node: CudaNode, mapping: dict[str, str], kind: type[Exception], said: str, is_asked: bool
) -> None:
    worker = node.worker(0)
    checkpointed(worker.pids)
    with pytest.raises(kind, match=said):
        cuda.restore_all(worker.pids, mapping, BUSY_S)
    assert node.states(worker.pids) == [State.CHECKPOINTED]
    assert ("restore" in {call.verb for call in node.calls()}) is is_asked


def test_a_verb_that_the_state_does_not_allow_is_refused_without_effect(
    node: CudaNode, tree: Worker
) -> None:
    with pytest.raises(CudaRefused, match="ILLEGAL_STATE"):
        cuda.restore_all(tree.pids, SAME, BUSY_S)
    assert runs(node, tree)


@pytest.mark.parametrize("has_driver", [False, True])
def test_without_a_driver_or_devices_it_is_said_in_one_line_what_is_missing(
    node: CudaNode, monkeypatch: pytest.MonkeyPatch, has_driver: bool
) -> None:
    said = "cuInit: CUDA_ERROR_NO_DEVICE" if has_driver else "the CUDA driver cannot be used: ."
    if has_driver:
        node.place()
    else:
        monkeypatch.delenv("LD_LIBRARY_PATH")
    with pytest.raises(CudaMissing, match=said) as caught:
        cuda.lock_all([os.getpid()], 1)
    assert "\n" not in str(caught.value)
