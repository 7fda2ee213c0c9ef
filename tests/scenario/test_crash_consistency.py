"""Whatever a power loss leaves, an artifact is absent or whole and what was promised is kept."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from tests.scenario import crash_stories as stories
from tests.scenario.crash_rig import Recording, Site, Sound, Story, recorded, violations

STORIES: tuple[type[Story], ...] = (
    *(stories.Journaling, stories.OlderJournal, stories.Capture, stories.SecondCapture),
    *(stories.ResumedSave, stories.StripedCapture, stories.SetAside),
)
SYNCED_FILES = {
    *("files.py", "journal.py", "artifacts.py", "library.py"),
    *("copying.py", "posix.py", "staging.py", "stripes.py"),
}


def each(slow: set[type[Story]]) -> pytest.MarkDecorator:
    """Run a test for each story, for some of them where slow tests run."""
    marks = {story: [pytest.mark.slow] * (story in slow) for story in STORIES}
    stories = [pytest.param(story, marks=marks[story], id=story.name) for story in STORIES]
    return pytest.mark.parametrize("story", stories)


# What is recorded once serves all of them.
pytestmark = pytest.mark.xdist_group("crash_consistency")


@functools.cache
def _plain(story: type[Story]) -> Recording:
    return recorded(story)


@functools.cache
def _sound(_: type[Story]) -> Sound:
    """What has been found sound, of which no other run of the story has to be checked."""
    return Sound(set)


def _broken(story: type[Story], recording: Recording) -> Iterator[str]:
    return violations(story(), recording, _sound(story))


def _killed(story: type[Story], skipped: Site | None = None) -> Iterator[Recording]:
    """Run a story once for each moment at which a kill leaves something else."""
    plain = recorded(story, skipped=skipped) if skipped else _plain(story)
    for call in plain.deaths:
        yield recorded(story, skipped=skipped, dies_at=call, sound=_sound(story))


@functools.cache
def _fsyncs() -> list[Site]:
    """Find every line of the product that calls fsync in any of the stories."""
    found = set().union(*(_plain(story).sites for story in STORIES))
    for story in (stories.Journaling, stories.Capture, stories.ResumedSave):
        found.update(*(recording.sites for recording in _killed(story)))
    return sorted(found)


@each(slow={stories.SecondCapture, stories.StripedCapture})
def test_every_state_that_a_power_loss_may_leave_keeps_what_was_promised(
    story: type[Story],
) -> None:
    assert len(_plain(story).states) > 40
    assert list(_broken(story, _plain(story))) == []


@each(slow={stories.SecondCapture, stories.StripedCapture})
def test_a_process_that_goes_on_after_a_kill_promises_only_what_a_power_loss_spares(
    story: type[Story],
) -> None:
    found = [text for left in _killed(story) for text in _broken(story, left)]
    assert found == []


def test_the_stories_reach_every_module_that_makes_things_durable() -> None:
    assert {file for file, _, _ in _fsyncs()} >= SYNCED_FILES


@pytest.mark.slow
@pytest.mark.cpu(180)
@pytest.mark.timeout(900)
def test_no_fsync_can_be_left_out_unnoticed() -> None:
    unnoticed = [site for site in _fsyncs() if _noticed(site) is None]
    assert unnoticed == []


def _noticed(site: Site) -> str | None:
    """Give the first broken promise of runs in which this one fsync does nothing."""
    for story in STORIES:
        if site in _plain(story).sites:
            recording = recorded(story, skipped=site, sound=_sound(story))
            # A promise that is broken stays so for a while: look here and there first.
            recording.states = [left for nth in range(10) for left in recording.states[nth::10]]
            if found := next(_broken(story, recording), None):
                return found
    for story in STORIES:
        for recording in _killed(story, site):
            if site in recording.sites and (found := next(_broken(story, recording), None)):
                return found
    return None
