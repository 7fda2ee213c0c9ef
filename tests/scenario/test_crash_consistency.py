"""Whatever a power loss leaves, an artifact is absent or whole and what was promised is kept."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from tests.scenario.crash_rig import Recording, Site, Story, recorded, violations
from tests.scenario.crash_stories import (
    Capture,
    Journaling,
    OlderJournal,
    ResumedSave,
    SecondCapture,
    SetAside,
    StripedCapture,
)

STORIES: tuple[type[Story], ...] = (
    Journaling,
    OlderJournal,
    Capture,
    SecondCapture,
    ResumedSave,
    StripedCapture,
    SetAside,
)
SYNCED_FILES = {
    "files.py",
    "journal.py",
    "artifacts.py",
    "library.py",
    "copying.py",
    "posix.py",
    "staging.py",
    "stripes.py",
}


# What is recorded once serves all of them.
pytestmark = pytest.mark.xdist_group("crash_consistency")


@functools.cache
def _plain(story: type[Story]) -> Recording:
    return recorded(story)


def _killed(story: type[Story], skipped: Site | None = None) -> Iterator[tuple[Story, Recording]]:
    """Run a story once for each call at which it may be killed."""
    seen: set[tuple[int, int]] = set()
    for call in range(_plain(story).operations):
        yield story(), recorded(story, skipped=skipped, dies_at=call, seen=seen)


@functools.cache
def _fsyncs() -> list[Site]:
    """Find every line of the product that calls fsync in any of the stories."""
    found = set().union(*(_plain(story).sites for story in STORIES))
    for story in (Journaling, Capture, ResumedSave):
        found.update(*(recording.sites for _, recording in _killed(story)))
    return sorted(found)


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_every_state_that_a_power_loss_may_leave_keeps_what_was_promised(
    story: type[Story],
) -> None:
    recording = recorded(story)
    assert len(recording.states) > 40
    assert list(violations(story(), recording)) == []


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_a_process_that_goes_on_after_a_kill_promises_only_what_a_power_loss_spares(
    story: type[Story],
) -> None:
    found = [text for again, left in _killed(story) for text in violations(again, left)]
    assert found == []


def test_the_stories_reach_every_module_that_makes_things_durable() -> None:
    assert {file for file, _, _ in _fsyncs()} >= SYNCED_FILES


@pytest.mark.cpu(180)
@pytest.mark.timeout(900)
def test_no_fsync_can_be_left_out_unnoticed() -> None:
    unnoticed = [site for site in _fsyncs() if _noticed(site) is None]
    assert unnoticed == []


def _noticed(site: Site) -> str | None:
    """Give the first broken promise of runs in which this one fsync does nothing."""
    for story in STORIES:
        if site in _plain(story).sites:
            recording = recorded(story, skipped=site)
            if found := next(violations(story(), recording), None):
                return found
    for story in STORIES:
        for again, recording in _killed(story, site):
            if site in recording.sites and (found := next(violations(again, recording), None)):
                return found
    return None
