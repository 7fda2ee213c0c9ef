"""Which revision of a name is the newest, which go, and what the next one is called."""

from __future__ import annotations

from snapshot_api import revisions
from snapshot_api.v1alpha1.snapshot import Snapshot
from tests.support import builders
from tests.support.builders import with_meta, with_spec, with_status
from tests.unit.tables import each

AT = "2027-01-15T08:00:0{}Z"


def revision(word: str) -> Snapshot:
    """Return the revision of `1 ready 5`: its number, how it stands, and the second of its age."""
    number, state, second = word.split()
    row = {"ready": "Ready", "failed": "Failed"}.get(state)
    rows = [builders.row(row, "True", "r")] if row else []
    found = with_spec(builders.snapshot(f"llm-{number}"), revision_of="llm")
    gone = AT.format(9) if state == "deleted" else None
    meta = {"creation_timestamp": AT.format(second), "deletion_timestamp": gone}
    return with_status(with_meta(found, **meta), conditions=rows)


def numbers(found: list[Snapshot]) -> list[str]:
    return [each.metadata.name.removeprefix("llm-") for each in found]


@each(
    ("there", "expected"),
    [
        ([], None),
        (["1 going 0"], "1"),
        (["1 ready 0", "2 ready 1"], "2"),
        (["2 ready 1", "1 ready 0"], "2"),
        (["1 ready 0", "2 going 1"], "1"),
        (["1 ready 0", "2 failed 1"], "1"),
        (["1 failed 0", "2 failed 1"], "2"),
        (["1 ready 0", "2 deleted 1"], "1"),
        # A timestamp has whole seconds.
        (["9 ready 0", "10 ready 0"], "10"),
    ],
)
def test_the_newest_revision_is_the_last_that_was_captured(
    there: list[str], expected: str | None
) -> None:
    others = [with_spec(builders.snapshot("llm-7"), revision_of="other"), builders.snapshot("llm")]
    found = revisions.newest([*others, *map(revision, there)], "llm")
    assert numbers([found] if found else []) == ([expected] if expected else [])


@each(
    ("there", "keep", "expected"),
    [
        (["1 ready 0", "2 ready 1", "3 ready 2"], 1, ["1", "2"]),
        (["1 ready 0", "2 ready 1", "3 ready 2"], 2, ["1"]),
        (["1 ready 0", "2 ready 1", "3 ready 2"], 3, []),
        (["1 ready 0", "2 ready 1", "3 ready 2"], 4, []),
        (["1 failed 0", "2 ready 1", "3 ready 2"], 2, ["1"]),
        (["1 failed 0", "2 ready 1"], 2, []),
        (["1 ready 0", "2 failed 1", "3 ready 2", "4 failed 3"], 1, ["1", "2"]),
        (["1 going 0", "2 ready 1"], 1, []),
        (["1 deleted 0", "2 ready 1"], 1, []),
    ],
)
def test_what_is_older_than_the_newest_captured_ones_and_over_is_let_go(
    there: list[str], keep: int, expected: list[str]
) -> None:
    assert numbers(revisions.surplus(map(revision, there), "llm", keep)) == expected


@each(
    ("names", "expected"),
    [
        ([], "llm-1"),
        (["llm-1", "llm-3"], "llm-4"),
        (["llm-9", "llm-10"], "llm-11"),
        (["llm", "llm-", "llm-x", "other-5", "llm-v2", "llm-³"], "llm-1"),
    ],
)
def test_the_next_revision_has_the_next_number(names: list[str], expected: str) -> None:
    assert revisions.next_name(map(builders.snapshot, names), "llm") == expected
