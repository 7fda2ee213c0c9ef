"""When CUDA processes may be checkpointed, where they may be restored, and their way back."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from snapshot_agent.domain import cuda
from snapshot_agent.domain.gate import refuse
from snapshot_shared.codec import decode_json, encode_json
from snapshot_shared.errors import Failure, Incompatible, InvalidInput, NotEligible
from tests.unit.tables import each

A, B, C = (f"GPU-{n}0000000-0000-4000-8000-000000000000" for n in "abc")
FIRST, MOVING, SHARING = (575, 57, 8), (580, 65, 6), (610, 10)


def gpu(uuid: str = A, **changes: Any) -> cuda.Gpu:
    return cuda.Gpu(uuid, "H100", mig=False)._replace(**changes)


def capture(**changes: Any) -> cuda.Capture:
    process = cuda.CudaProcess(10, is_cuda=True, has_device=True, uvm_mappings=1)
    return cuda.Capture(FIRST, [gpu()], [process, cuda.CudaProcess(11, is_cuda=False)])._replace(
        **changes
    )


def of_one(**process: Any) -> cuda.Capture:
    return capture(processes=[cuda.CudaProcess(10, **process)])


TWO = {0: gpu(), 1: gpu(B)}


def placement(**changes: Any) -> cuda.Placement:
    return cuda.Placement(MOVING, MOVING, {0: gpu()}, {0: gpu(B)})._replace(**changes)


def test_every_way_back_ends_in_running_from_each_state_that_the_driver_leads_out_of() -> None:
    for state in (cuda.State.LOCKED, cuda.State.CHECKPOINTED):
        seen = state
        for _ in cuda.MOVES:
            verb = cuda.WAY_BACK[seen]
            if verb is not None:
                before, seen = cuda.MOVES[verb]
                assert before in (cuda.State.LOCKED, cuda.State.CHECKPOINTED)
        assert seen is cuda.State.RUNNING
    assert set(cuda.WAY_BACK) == set(cuda.State)


def test_nothing_is_unlocked_before_all_are_restored_or_time_runs_out() -> None:
    for states in itertools.product([*cuda.State, None], repeat=3):
        seen = dict(enumerate(states))
        steps = cuda.next_steps(seen, hurry=False)
        if cuda.Verb.UNLOCK in steps.values():
            assert cuda.State.CHECKPOINTED not in states
            assert None not in states
        hurried = cuda.next_steps(seen, hurry=True)
        assert steps.items() <= hurried.items()
        assert hurried == {pid: verb for pid, s in seen.items() if s and (verb := cuda.WAY_BACK[s])}


@each(
    ("answer", "alive", "expected"),
    [
        (cuda.Answer(0, "CUDA_SUCCESS", 0), True, cuda.State.RUNNING),
        (cuda.Answer(0, "CUDA_SUCCESS", 3), True, cuda.State.FAILED),
        (cuda.Answer(0, "CUDA_SUCCESS", 4), True, cuda.State.UNKNOWN),
        (cuda.Answer(3, "CUDA_ERROR_NOT_INITIALIZED"), True, cuda.State.NONE),
        (cuda.Answer(304, "CUDA_ERROR_OPERATING_SYSTEM"), False, cuda.State.NONE),
        (cuda.Answer(304, "CUDA_ERROR_OPERATING_SYSTEM"), True, cuda.State.UNKNOWN),
    ],
)
def test_a_state_is_told_by_the_drivers_answer_and_whether_the_process_runs(
    answer: cuda.Answer, alive: bool, expected: cuda.State
) -> None:
    assert cuda.state_in(answer, alive=alive) is expected


@each(
    ("status", "alive", "expected"),
    [(0, True, True), (1, True, False), (3, True, False), (304, False, False), (304, True, None)],
)
def test_a_process_is_taken_for_none_of_cuda_only_when_the_driver_says_so(
    status: int, alive: bool, expected: bool | None
) -> None:
    assert cuda.is_cuda(cuda.Answer(status, "?"), alive=alive) is expected


def test_an_error_names_the_verb_the_process_and_every_refused_one() -> None:
    answer = cuda.Answer(600, "CUDA_ERROR_NOT_READY")
    error = cuda.refusal("lock", {7: answer, 8: None}, 2)
    assert isinstance(error, cuda.CudaRefused)
    assert error.message == "lock of process 7: CUDA_ERROR_NOT_READY"
    assert error.values["refused"] == {"7": "CUDA_ERROR_NOT_READY", "8": "no answer"}
    # An agent gets it from its helper.
    assert decode_json(encode_json(error.to_failure()), Failure).values == error.values
    late = cuda.refusal("lock", {8: None}, 2)
    assert isinstance(late, cuda.CudaTimedOut)
    assert late.values["budget_s"] == 2


def test_stuck_processes_are_an_error_with_their_states() -> None:
    assert cuda.stuck(cuda.LetGo([1], [2], {})) is None
    error = cuda.stuck(cuda.LetGo([], [], {3: "failed"}))
    assert error is not None
    assert "process 3 (failed)" in error.message
    assert error.values["stuck"] == {"3": "failed"}


def test_a_worker_that_can_be_checkpointed_passes() -> None:
    refuse(cuda.CAPTURE_CHECKS, capture())
    refuse(cuda.CAPTURE_CHECKS, capture(driver=SHARING, gpus=[gpu(), gpu(B)]))
    # What could not be read refuses nothing.
    refuse(cuda.CAPTURE_CHECKS, capture(gpus=[cuda.Gpu(A)]))
    refuse(cuda.CAPTURE_CHECKS, capture(gpus=[], processes=[cuda.CudaProcess(11, is_cuda=False)]))


@each(
    ("seen", "expected", "found"),
    [
        (capture(driver=None), "575.57.08", "none"),
        (capture(driver=(575, 57, 7)), "575.57.08", "575.57.07"),
        (capture(driver=(570, 133, 20)), "575.57.08", "570.133.20"),
        (capture(driver=MOVING, gpus=[gpu(), gpu(B)]), "610", "580.65.06"),
        (capture(gpus=[gpu(mig=True)]), "disabled", "enabled"),
        (of_one(is_cuda=False, has_device=True), "CUDA process", "devices without CUDA"),
        (capture(gpus=[]), "1 GPU or more", "no GPU"),
        (of_one(is_cuda=True, uvm_mappings=5), 1, 5),
        (of_one(is_cuda=True, stopped=True), "running", "stopped"),
    ],
)
def test_a_worker_that_cannot_be_checkpointed_is_refused_by_both_values(
    seen: cuda.Capture, expected: object, found: object
) -> None:
    with pytest.raises(NotEligible) as caught:
        refuse(cuda.CAPTURE_CHECKS, seen)
    assert (caught.value.values["expected"], caught.value.values["found"]) == (expected, found)
    assert str(expected) in caught.value.message
    assert str(found) in caught.value.message
    assert caught.value.next_step


def test_a_place_that_a_process_can_be_restored_at_passes() -> None:
    refuse(cuda.RESTORE_CHECKS, placement())
    refuse(cuda.RESTORE_CHECKS, placement(source_driver=FIRST, driver=FIRST, here={0: gpu()}))
    refuse(cuda.RESTORE_CHECKS, placement(source_driver=None, source={0: cuda.Gpu(A)}))


@each(
    ("seen", "kind", "expected", "found"),
    [
        (placement(driver=None), NotEligible, "575.57.08", "none"),
        (placement(driver=SHARING), Incompatible, "580.65.06", "610.10"),
        (placement(source_driver=FIRST, driver=FIRST), NotEligible, "580", "575.57.08"),
        (placement(here={0: gpu(B, product="H200")}), Incompatible, "H100", "H200"),
        (placement(here={0: gpu(B, mig=True)}), NotEligible, "disabled", "enabled"),
        (placement(source=TWO, here=TWO), NotEligible, "610", "580.65.06"),
    ],
)
def test_a_place_that_does_not_fit_is_refused_by_both_values(
    seen: cuda.Placement, kind: type[Exception], expected: str, found: str
) -> None:
    with pytest.raises(kind) as caught:
        refuse(cuda.RESTORE_CHECKS, seen)
    values = caught.value.values  # type: ignore[attr-defined]
    assert (values["expected"], values["found"]) == (expected, found)
    assert expected in str(caught.value)
    assert found in str(caught.value)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("NVIDIA UNIX x86_64 Kernel Module  575.57.08  Sat May 24 07:25:34 UTC 2025", FIRST),
        ("NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (me)", MOVING),
        ("something else", None),
    ],
)
def test_the_version_of_the_driver_is_read_from_its_file(
    line: str, expected: tuple[int, ...] | None
) -> None:
    text = f"NVRM version: {line}\nGCC version:  gcc version 12.3.0 (Ubuntu 12.3.0)\n"
    assert cuda.driver_version(text) == expected


def test_devices_are_read_from_the_table_of_nvidia_smi() -> None:
    assert cuda.GPU_QUERY.count(",") == 2
    text = f"{A}, NVIDIA H100 80GB HBM3, Disabled\n{B}, NVIDIA T4, [N/A]\n"
    assert cuda.gpus_in(text) == [
        cuda.Gpu(A, "NVIDIA H100 80GB HBM3", mig=False),
        cuda.Gpu(B, "NVIDIA T4", mig=None),
    ]
    with pytest.raises(InvalidInput, match="No devices were found"):
        cuda.gpus_in("No devices were found\n")


def test_the_bytes_of_a_uuid_are_in_the_order_of_its_digits() -> None:
    assert cuda.uuid_bytes("GPU-00010203-0405-0607-0809-0a0b0c0d0e0f") == bytes(range(16))
    for wrong in ("", A[4:], "MIG-" + A[4:], A + "0", A.upper(), "GPU-0", "gpu-0"):
        with pytest.raises(InvalidInput, match="no uuid of a whole GPU"):
            cuda.uuid_bytes(wrong)


@each(
    ("source", "here", "expected"),
    [
        ({0: A, 1: B}, {1: C, 0: B}, {A: B, B: C}),
        ({}, {}, {}),
        ({0: A, 1: B}, {0: C, 1: C}, "twice"),
        ({0: A, 1: A}, {0: B, 1: C}, "twice"),
        ({0: A}, {0: "gpu-0"}, "gpu-0"),
    ],
)
def test_each_device_of_the_source_goes_to_the_one_with_its_ordinal(
    source: dict[int, str], here: dict[int, str], expected: dict[str, str] | str
) -> None:
    if isinstance(expected, dict):
        assert cuda.uuid_map(source, here) == expected
    else:
        with pytest.raises(InvalidInput, match=expected):
            cuda.uuid_map(source, here)


@each("here", [{0: A}, {0: A, 2: B}, {0: A, 1: B, 2: C}, {}])
def test_a_map_is_total_or_refused(here: dict[int, str]) -> None:
    with pytest.raises(Incompatible) as caught:
        cuda.uuid_map({0: A, 1: B}, here)
    assert caught.value.values == {"expected": [0, 1], "found": sorted(here)}


def test_devices_that_were_given_weights_are_chosen_and_the_others_follow_in_order() -> None:
    assert cuda.placed([A, B], [C, A], {}) == {A: C, B: A}
    assert cuda.placed([A, B], [C, A], {A: A}) == {A: A, B: C}
    assert cuda.placed([A, B], [C, A], {B: C, "of another pod": A}) == {A: A, B: C}
    # What is chosen is not here: the memory server has other devices than the container.
    assert cuda.placed([A], [B], {A: C}) == {A: B}
    assert cuda.placed([], [], {A: B}) == {}
    with pytest.raises(Incompatible):
        cuda.placed([A, B], [C], {A: C})


def test_a_pod_has_devices_that_its_node_lists() -> None:
    assert cuda.gpus_of([B, A], [gpu(), gpu(B), gpu(C)]) == [gpu(B), gpu()]
    with pytest.raises(NotEligible, match="was given gpu-0, and the devices of this node are"):
        cuda.gpus_of(["gpu-0"], [gpu()])


def test_memory_of_devices_is_summed_over_the_processes_of_a_worker() -> None:
    text = "10, 512\n10, 100\n11, 1\n 99, 4096\n98, [N/A]\n"
    assert cuda.device_bytes(text, [10, 11]) == 613 * 1024 * 1024
    assert cuda.device_bytes("", [10]) == 0
    with pytest.raises(NotEligible, match=r"process 98 has is not known: \[N/A\]"):
        cuda.device_bytes(text, [98])
    with pytest.raises(InvalidInput):
        cuda.device_bytes("No devices were found", [10])


def test_the_driver_gets_pairs_only_where_a_device_changes() -> None:
    assert cuda.pairs_of({A: A, B: B}) == {}
    assert cuda.pairs_of({A: A, B: C}) == {A: A, B: C}
    assert cuda.pairs_of({A: B, B: A}) == {A: B, B: A}
    for wrong in ({A: C, B: C}, {A: "C"}, {"A": "A"}):
        with pytest.raises(InvalidInput):
            cuda.pairs_of(wrong)
