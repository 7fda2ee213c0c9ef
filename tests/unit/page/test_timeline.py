"""Captures and restores as bars on one axis of time."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import snapshot_page
from snapshot_api.kinds import AnyObject
from snapshot_api.meta import OrderStatus, time_of
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.v1alpha1.snapshot import ArtifactSource
from snapshot_page.domain.timeline import PHASES, run_of, started_at
from snapshot_shared.errors import Failure
from snapshot_shared.ids import derived_uid
from snapshot_shared.transitions import Capture, Restore
from tests.support import builders
from tests.support.builders import NOW

RULE = re.compile(r"\.lane > \.(\w+)[, ][^{]*{ background: var\(--(\w+)\)")
"""The colour of a phase in the page."""

UID = derived_uid("content", "snap")


def ended(
    verb: str, kind: str, start: float, end: float, failure: Failure | None = None, **fields: Any
) -> OrderStatus:
    """An order from `start` to `end` seconds after the first one."""
    item = builders.order(verb, UID, at=NOW + start, **fields)
    return replace(builders.ended(item, kind, failure), ended_at=time_of(NOW + end))


def content(*orders: OrderStatus, **more: Any) -> SnapshotContent:
    return builders.content(attempt=1, started_at=time_of(NOW), orders=list(orders), **more)


def run(value: AnyObject) -> dict[str, Any]:
    found = run_of(value)
    assert found is not None
    return found


def bars(value: SnapshotContent) -> list[tuple[str, float, float | None, str]]:
    phases = run(value)["phases"]
    return [(bar["phase"], bar["start"], bar["length"], bar["state"]) for bar in phases]


def test_a_phase_reaches_from_its_first_order_to_the_last_end() -> None:
    found = content(
        ended("prepare", "prepared", 0.0, 1.0),
        ended("dump", "staged", 1.0, 1.5),
        ended("save", "staged", 1.25, 4.0, part="gpu-0"),
        ended("seal", "sealed", 4.0, 4.5),
    )
    assert bars(found) == [
        ("prepare", 0.0, 1.0, "ok"),
        ("write", 1.0, 3.0, "ok"),
        ("seal", 4.0, 0.5, "ok"),
    ]


def test_a_phase_with_an_order_under_way_has_no_end() -> None:
    saves = builders.order("save", UID, part="gpu-1", at=NOW + 1.0)
    found = content(
        ended("save", "staged", 1.0, 2.0, part="gpu-0"), replace(saves, state="accepted")
    )
    assert bars(found) == [("write", 1.0, None, "busy")]
    assert run(found)["length"] is None
    assert [(step["label"], step["length"]) for step in run(found)["steps"]] == [
        ("save gpu-0", 1.0),
        ("save gpu-1", None),
    ]


def test_a_phase_in_which_an_order_failed_is_bad() -> None:
    failed = ended("prepare", "failed", 0.0, 1.0, Failure(reason="NotEligible", message="x"))
    assert bars(content(failed)) == [("prepare", 0.0, 1.0, "bad")]


def test_orders_of_an_earlier_attempt_and_those_that_clean_up_are_no_part_of_it() -> None:
    found = content(
        ended("prepare", "prepared", 0.0, 1.0),
        ended("abort", "aborted", 1.0, 2.0),
        ended("release", "released", 1.0, 2.0),
    )
    assert [phase for phase, *_ in bars(found)] == ["prepare"]
    assert bars(builders.with_status(found, attempt=2)) == []


def test_a_capture_whose_orders_are_forgotten_is_one_bar() -> None:
    found = content(committed=builders.committed(), captured_seconds=4.0)
    assert bars(found) == [("all", 0.0, 4.0, "ok")]


def test_a_run_ends_with_its_orders_or_when_its_object_is_deleted_if_they_are_known() -> None:
    found = content(ended("prepare", "prepared", 0.0, 1.0))
    deleted = builders.with_meta(found, deletion_timestamp="1970-01-12T13:46:40Z")
    assert (run(found)["over"], run(found)["length"]) == (False, None)
    assert run(deleted)["length"] == 1.0
    over = run(content(capture=Capture.READY))
    assert (over["over"], over["length"], over["phases"]) == (True, None, [])


def test_what_has_not_begun_and_an_artifact_that_was_imported_have_no_run() -> None:
    assert run_of(builders.content()) is None
    assert run_of(builders.restore()) is None
    found = content(ended("verify", "verified", 0.0, 1.0), committed=builders.committed())
    assert started_at(found) is not None
    artifact = ArtifactSource(content_uid=UID, generation=1, root_digest=builders.DIGEST)
    imported = builders.with_spec(found, source=replace(found.spec.source, artifact=artifact))
    assert started_at(imported) is None
    assert run_of(imported) is None


@pytest.mark.parametrize(
    ("state", "length"), [(Restore.RESTORED, 2.5), (Restore.FAILED, 2.5), (Restore.RESTORING, None)]
)
def test_a_restore_has_a_length_once_it_is_over(state: Restore, length: float | None) -> None:
    how: dict[str, Any] = {"attempt": 1, "started_at": time_of(NOW)}
    if state is Restore.FAILED:
        how["failure"] = Failure(reason="X", message="x")
        how["conditions"] = [builders.row("Failed", "True", "X")]
    value = builders.restore(state=state, orders=[ended("restore", "restored", 2.0, 2.5)], **how)
    assert run(value)["length"] == length


def test_each_phase_has_a_colour_of_its_own() -> None:
    page = (Path(snapshot_page.__file__).parent / "page.html").read_text("utf-8")
    # A phase without a rule has the colour of all bars.
    colours = dict.fromkeys(PHASES.values(), "busy")
    colours |= {phase: colour for phase, colour in RULE.findall(page) if phase in colours}
    assert len(set(colours.values())) == len(colours)
