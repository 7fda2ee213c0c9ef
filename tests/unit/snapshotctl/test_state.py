"""The phases and parts of a capture or a restore, from orders and messages that may be lost."""

from __future__ import annotations

import re
from typing import Any

from msgspec.structs import replace

from snapshot_api.kinds import AnyObject
from snapshot_api.meta import OrderStatus, time_of
from snapshot_operator.core import ordering
from snapshot_shared.errors import Failure
from snapshot_shared.ids import derived_uid
from snapshot_shared.orders import DeviceRef, PartResult, Progress, VectorEntry
from snapshot_shared.transitions import Restore
from snapshotctl.domain.formats import parse_size
from snapshotctl.views import state
from snapshotctl.views.progress import Board
from snapshotctl.views.related import RelatedObjects
from tests.support import builders
from tests.support.builders import NOW, order, row

UID = derived_uid("content", "snap")
POD = derived_uid("pod", "worker")


RUN = builders.ended(order("run", POD, at=NOW - 20), "started")
LOST: dict[str, Any] = {
    "conditions": [row("Ready", "False", "NodeLost", "node node-1 was deleted")],
    "phase": "Failed",
    "reason": "NodeLost",
}


def _phases(*members: AnyObject) -> list[state.TimedPhase]:
    return state.phases(RelatedObjects(members[0], members))


def test_an_order_begins_a_phase_and_its_report_ends_it() -> None:
    done = builders.ended(order("prepare", UID), "prepared")
    open_ = order("save", UID, part="gpu-0", at=NOW)
    first, second = _phases(builders.content(orders=[open_, done]))
    assert (first.name, first.ended - first.began) == ("prepare: quiet and fenced", 2.0)
    assert first.line().endswith("2.00 s  done")
    assert (second.name, second.where, second.ended) == ("save gpu-0", "gms@node-1", 0.0)
    assert second.line().split()[1:] == ["save", "gpu-0", "gms@node-1"]


def test_a_phase_that_failed_says_why_and_a_later_attempt_says_which() -> None:
    failure = Failure(reason="NoSpace", message="full")
    failed = builders.ended(replace(order("seal", UID), attempt=2), "failed", failure)
    lost = replace(order("dump", UID, at=NOW), state="lost", ended_at=time_of(NOW + 1))
    first, second = _phases(builders.content(orders=[failed, lost]))
    assert first.line().endswith("seal (attempt 2)               2.00 s  failed: NoSpace: full")
    assert second.failure == "NodeLost"


def test_a_worker_warms_up_until_it_is_ready_or_ends() -> None:
    starting = _phases(builders.pod(orders=[RUN]))
    assert [phase.ended for phase in starting] == [NOW - 18, 0.0]
    rows = [row("Ready", "True", "WorkerReady")]
    _, warm = _phases(builders.pod(orders=[RUN], conditions=rows))
    assert (warm.name, warm.ended) == (state.WARM, NOW - 10)
    assert len(_phases(builders.pod(source="snap", orders=[RUN]))) == 1
    rows = [row("Ready", "False", "ContainerExited", "exit 1")]
    _, warm = _phases(builders.pod(orders=[RUN], conditions=rows, phase="Failed", message="exit 1"))
    assert (warm.name, warm.failure) == (state.WARM, "exit 1")


def test_a_worker_that_was_lost_or_stopped_once_it_was_warm_did_not_fail_to_start() -> None:
    prepare = builders.ended(order("prepare", UID, at=NOW - 14), "prepared")
    captured, lost = builders.content(orders=[prepare]), builders.pod(orders=[RUN], **LOST)
    warm_ups = [phase for phase in _phases(captured, lost) if phase.name == state.WARM]
    assert [(phase.ended - phase.began, phase.failure) for phase in warm_ups] == [(4.0, "")]
    warm = builders.pod(orders=[replace(RUN, state="ready")], **LOST)
    assert [phase.failure for phase in _phases(warm)] == [""]
    run = builders.ended(order("run", POD, at=NOW - 20), "exited", exit_code=143, message="143")
    # A restore had failed before it was stopped.
    stopped = builders.pod(source="snap", orders=[run], phase="Failed", reason="InjectedFault")
    [phase] = _phases(stopped)
    assert phase.line().endswith("2.00 s  done")


def test_the_parts_of_a_capture_are_those_of_its_plan_until_they_are_staged() -> None:
    part = PartResult(part="process", bytes=7, digest=builders.DIGEST)
    dump = builders.ended(order("dump", UID), "staged", part=part)
    save = order("save", UID, part="gpu-0")
    vector = [VectorEntry(part="process"), VectorEntry(part="gpu-0", ordinal=0)]
    value = builders.content(orders=[dump, save], vector=vector)
    assert state.planned_parts(RelatedObjects(value, [value])) == (UID, {"process": 0, "gpu-0": 0})
    assert state.complete_parts(RelatedObjects(value, [value])) == {"process": 7}


def test_the_parts_of_a_restore_are_those_that_are_loaded() -> None:
    [load] = _loads()
    pod, value = builders.pod(source="snap"), builders.restore(state=Restore.LOADING, orders=[load])
    uid = value.metadata.uid
    for members in ([pod, value], [value, pod]):
        related = RelatedObjects(members[0], members)
        assert state.planned_parts(related) == (uid, {"gpu-0": 1024})
        assert state.complete_parts(related) == {}
        assert [phase.name for phase in state.phases(related)] == ["load gpu-0"]
    ended = builders.ended(load, "loaded", bytes=1024)
    whole = builders.ended(order("restore", uid), "restored", bytes=7)
    done = builders.restore(state=Restore.RESTORED, orders=[ended, whole])
    assert state.complete_parts(RelatedObjects(pod, [pod, done])) == {"gpu-0": 1024, "process": 7}


def _loads() -> list[OrderStatus]:
    """Return the orders of a load of one device, as the operator gives them."""
    device = DeviceRef(ordinal=0, uuid="GPU-0")
    layout = builders.layout(
        device="GPU-0", incarnation="one", layout_id="layout", structure_hash="hash", bytes=1024
    )
    whole = builders.committed(
        vector=[VectorEntry(part="gpu-0", ordinal=0, layout=layout)],
        parts=[PartResult(part="gpu-0", bytes=1024, digest=builders.DIGEST)],
    )
    artifact = ordering.artifact_ref(builders.content(), whole)
    pending = builders.restore(attempt=1, artifact=artifact, node_name="node-1", devices=[device])
    return ordering.load(pending, artifact, whole, "", NOW)


def test_the_capture_of_a_pod_that_was_restored_shows_nothing_of_that_restore() -> None:
    run = builders.ended(order("run", POD), "started")
    source = builders.pod(source="other", orders=[run])
    value = builders.content(orders=[order("prepare", UID)], vector=[VectorEntry(part="process")])
    root = builders.snapshot()
    related = RelatedObjects(root, [root, source, value])
    assert [phase.name for phase in state.phases(related)] == ["prepare: quiet and fenced"]
    assert state.planned_parts(related) == (UID, {"process": 0})
    assert state.complete_parts(related) == {}


OTHER = "99999999-2222-3333-4444-555555555555"


def _progress(order: str, part: str, done: int, total: int = 100) -> Progress:
    return builders.progress(order=order, part=part, done=done, total=total)


def _save(done: int, uid: str = UID) -> Progress:
    return _progress(f"save-{uid}-gpu-0", "gpu-0", done)


def _board() -> Board:
    return Board("capture", frozenset({UID}))


def _first_size(line: str) -> int:
    found = re.search(r"[\d.]+ \w*B", line.partition(":")[2])
    assert found is not None
    return parse_size(found[0])


def test_a_part_rises_from_the_plan_to_the_manifest() -> None:
    board = _board()
    seen = [
        board.plan("gpu-0", 100, 0.0),
        board.update(_save(40), 0.5),
        board.update(_save(100), 1.0),
        board.complete("gpu-0", 104, 1.1),
    ]
    assert [_first_size(part.line()) for part in seen if part] == [0, 40, 100, 104]
    assert board.parts["gpu-0"].is_final


def test_a_late_or_repeated_message_moves_nothing_and_the_manifest_has_the_last_word() -> None:
    board = _board()
    board.update(_save(40), 0.0)
    assert board.update(_save(40), 1.0) is None
    assert board.update(_save(10), 1.0) is None
    assert board.complete("gpu-0", 30, 1.0)[1:3] == (30, 30)
    assert board.update(_save(60), 2.0) is None


def test_messages_of_other_objects_and_phases_are_ignored_and_a_part_needs_no_plan() -> None:
    board = _board()
    assert board.update(_save(1, OTHER), 0.0) is None
    assert board.update(_progress(f"load-{UID}-gpu-0", "gpu-0", 1), 0.0) is None
    assert board.parts == {}
    assert board.update(_progress(f"dump-{UID}", "process", 0), 0.0) is not None


def test_the_line_says_how_fast_it_goes_or_that_the_size_is_unknown() -> None:
    board = _board()
    board.update(_progress(f"save-{UID}-gpu-0", "gpu-0", 0, 4_000_000_000), 1.0)
    moved = board.update(_progress(f"save-{UID}-gpu-0", "gpu-0", 2_000_000_000, 4_000_000_000), 2.0)
    assert moved is not None
    assert moved.line() == "gpu-0: 1.86 GiB of 3.73 GiB, 2 GB/s, 1 s left"
    planned = _board().plan("process", 0, 0.0)
    assert planned is not None
    assert planned.line() == "process: 0 B, size not known yet"


def test_a_verification_is_one_part_whose_messages_count_all_parts_together() -> None:
    board = Board("verify", frozenset({UID}))
    board.plan("artifact", 300, 0.0)
    seen = [
        board.update(_progress(f"verify-{UID}", "gpu-0", 100, 300), 1.0),
        board.update(_progress(f"verify-{UID}", "gpu-1", 300, 300), 2.0),
        board.update(_progress(f"save-{UID}-gpu-0", "gpu-0", 50), 3.0),
    ]
    assert [part.line() if part else None for part in seen] == [
        "artifact: 100 B of 300 B, 100 B/s, 2 s left",
        "artifact: 300 B of 300 B, 150 B/s",
        None,
    ]
