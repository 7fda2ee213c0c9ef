"""What a capture and a restore have cost, and quantities as people read them."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from snapshot_api import figures
from snapshot_api.meta import time_of
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.v1alpha1.snapshot import ArtifactSource
from snapshot_api.views import with_columns
from snapshot_shared.ids import derived_uid
from snapshot_shared.transitions import Restore
from snapshot_shared.units import counted, size, sizes
from tests.support import builders
from tests.support.builders import NOW, with_spec, with_status
from tests.unit.tables import each

UID = derived_uid("content", "snap")


def captured(*, paused_s: float = 0.139, size: int = 2**30, **more: Any) -> SnapshotContent:
    """A content whose capture began at NOW - 10 and was sealed 4 s later."""
    orders = [
        builders.ended(builders.order("release", UID, at=NOW - 9), "released", paused_s=paused_s),
        builders.ended(builders.order("seal", UID, at=NOW - 8), "sealed"),
    ]
    fields: dict[str, Any] = {
        "attempt": 1,
        "started_at": time_of(NOW - 10),
        "orders": orders,
        "committed": builders.committed(bytes=size),
    }
    return builders.content(**{**fields, **more})


def test_the_size_is_that_of_the_artifact_and_no_sum_of_what_was_written() -> None:
    moved = [
        builders.ended(builders.order("save", UID, part=f"gpu-{n}"), "staged", bytes=2**40)
        for n in range(2)
    ]
    content = captured()
    content = with_status(content, orders=[*content.status.orders, *moved])
    assert figures.capture_text(content).startswith("captured 1 GiB in ")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({}, "captured 1 GiB in 4.00 s (268 MB/s); worker paused for 139 ms"),
        ({"paused_s": 0.0}, "captured 1 GiB in 4.00 s (268 MB/s)"),
        ({"committed": None}, ""),
        ({"orders": []}, "captured 1 GiB"),
        ({"started_at": None}, "captured 1 GiB; worker paused for 139 ms"),
        ({"started_at": time_of(NOW)}, "captured 1 GiB; worker paused for 139 ms"),
    ],
)
def test_a_capture_says_what_is_known_of_its_size_speed_and_pause(
    change: dict[str, Any], text: str
) -> None:
    assert figures.capture_text(captured(**change)) == text


def test_an_import_has_captured_nothing() -> None:
    content = captured()
    artifact = ArtifactSource(content_uid=UID, generation=1, root_digest=builders.DIGEST)
    source = replace(content.spec.source, pod_ref=None, artifact=artifact)
    assert figures.capture_text(with_spec(content, source=source)) == ""


def test_the_status_keeps_the_times_when_the_orders_are_forgotten() -> None:
    shown: Any = with_columns(captured())
    assert (shown.status.paused_seconds, shown.status.captured_seconds) == (0.139, 4.0)
    later: Any = with_columns(with_status(shown, orders=[]))
    assert later.status == replace(shown.status, orders=[], progress=later.status.progress)
    assert figures.capture_text(later) == figures.capture_text(captured())


def test_the_pause_of_an_earlier_attempt_is_not_that_of_the_next() -> None:
    shown: Any = with_columns(captured(committed=None))
    assert shown.status.paused_seconds == 0.139
    again: Any = with_columns(with_status(shown, attempt=2))
    assert (again.status.paused_seconds, again.status.captured_seconds) == (0.0, 0.0)


def test_a_restore_says_how_long_it_took_once_the_worker_serves() -> None:
    order = builders.ended(builders.order("restore", UID, at=NOW - 3.26), "restored")
    restore = builders.restore(
        state=Restore.RESTORED, attempt=1, started_at=time_of(NOW - 2.5), orders=[order]
    )
    assert figures.restore_text(restore.status) == "restored in 1.24 s"
    loading = replace(restore.status, state=Restore.LOADING)
    assert figures.restore_text(loading) == ""
    forgotten = replace(restore.status, orders=[], restored_seconds=1.24)
    assert figures.restore_text(forgotten) == "restored in 1.24 s"


@each(
    ("done", "total", "seconds", "text"),
    [
        (0, 100, 1.0, ""),
        (100, 0, 0.0, ""),
        (100, 0, 2.0, "50 B/s"),
        (2_000_000_000, 8_000_000_000, 1.0, "2 GB/s, 3 s left"),
        (10**9, 10**12, 1.0, "1 GB/s, 16m 39s left"),
        (90, 100, 1.0, "90 B/s"),
        (8_000_000_000, 8_000_000_000, 4.0, "2 GB/s"),
    ],
)
def test_what_moves_says_its_rate_and_what_is_left(
    done: int, total: int, seconds: float, text: str
) -> None:
    assert figures.speed(done, total, seconds) == text


@each(
    ("cold_s", "restored_s", "text"),
    [
        (18.4, 2.0, "9.2 times as fast as the cold start"),
        (2.0, 2.0, "as fast as the cold start"),
        (2.1, 2.0, "as fast as the cold start"),
        (1.9, 2.0, "as fast as the cold start"),
        (3.0, 5.0, "slower than the cold start: it took 1.7 times as long"),
        (3.0, 0.0, "not measured"),
    ],
)
def test_a_restore_that_was_slower_is_not_worded_as_a_success(
    cold_s: float, restored_s: float, text: str
) -> None:
    assert figures.comparison(cold_s, restored_s) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (536885240, "512 MiB"), (3 * 2**29, "1.5 GiB")],
)
def test_a_size_has_the_unit_that_fits_it(count: int, text: str) -> None:
    assert size(count) == text


def test_two_sizes_that_would_read_the_same_are_shown_in_bytes() -> None:
    assert sizes(2**30, 2**29) == ("1 GiB", "512 MiB")
    assert sizes(2**30, 2**30 + 1) == ("1073741824 bytes", "1073741825 bytes")


@pytest.mark.parametrize(("count", "text"), [(0, "0 orders"), (1, "1 order"), (2, "2 orders")])
def test_only_one_thing_is_counted_in_the_singular(count: int, text: str) -> None:
    assert counted(count, "order") == text
