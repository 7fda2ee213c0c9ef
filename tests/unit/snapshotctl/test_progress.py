"""How far each part is, from messages that may be lost, repeated or late."""

import re

from snapshot_shared.orders import Progress
from snapshotctl.domain.formats import parse_size
from snapshotctl.views.progress import Board

UID = "11111111-2222-3333-4444-555555555555"
OTHER = "99999999-2222-3333-4444-555555555555"


def _progress(order: str, part: str, done: int, total: int = 100) -> Progress:
    return Progress(
        order=order, attempt=1, node="n", part=part, step="write", done=done, total=total, at=0.0
    )


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


def test_a_late_or_repeated_message_moves_nothing() -> None:
    board = _board()
    board.update(_save(40), 0.0)
    assert board.update(_save(40), 1.0) is None
    assert board.update(_save(10), 1.0) is None


def test_nothing_moves_after_the_manifest() -> None:
    board = _board()
    board.complete("gpu-0", 50, 0.0)
    assert board.update(_save(60), 1.0) is None


def test_the_manifest_has_the_last_word_on_the_size() -> None:
    board = _board()
    board.update(_save(100), 0.0)
    assert board.complete("gpu-0", 90, 1.0)[1:3] == (90, 90)


def test_a_part_of_unknown_size_says_so() -> None:
    planned = _board().plan("process", 0, 0.0)
    assert planned is not None
    assert planned.line() == "process: 0 B, size not known yet"


def test_messages_of_other_objects_and_phases_are_ignored() -> None:
    board = _board()
    assert board.update(_save(1, OTHER), 0.0) is None
    assert board.update(_progress(f"load-{UID}-gpu-0", "gpu-0", 1), 0.0) is None
    assert board.parts == {}


def test_a_part_that_no_plan_named_is_shown_from_its_first_message() -> None:
    assert _board().update(_progress(f"dump-{UID}", "process", 0), 0.0) is not None


def test_the_line_says_how_fast_it_goes() -> None:
    board = _board()
    board.update(_progress(f"save-{UID}-gpu-0", "gpu-0", 0, 4_000_000_000), 1.0)
    moved = board.update(_progress(f"save-{UID}-gpu-0", "gpu-0", 2_000_000_000, 4_000_000_000), 2.0)
    assert moved is not None
    assert moved.line() == "gpu-0: 1.86 GiB of 3.73 GiB, 2 GB/s, 1 s left"


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
