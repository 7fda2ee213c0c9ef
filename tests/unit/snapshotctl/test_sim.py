"""Which service has a step, and what is said once a fault is armed there."""

import pytest

from snapshot_shared.steps import Place
from snapshotctl.commands import sim
from snapshotctl.domain.exits import WrongArguments
from tests.unit.tables import each


@each(
    ("step", "verb", "service", "found"),
    [
        ("write", None, None, Place("gms", "save", "write")),
        ("read", None, None, Place("gms", "load", "read")),
        ("publish", None, None, Place("gms", "commit", "publish")),
        ("forget", None, None, Place("gms", "drop", "forget")),
        ("copy-state", None, None, Place("agent", "dump", "copy-state")),
        ("write-root", None, None, Place("agent", "seal", "write-root")),
        ("check", "load", None, Place("gms", "load", "check")),
        ("check", "restore", "agent", Place("agent", "restore", "check")),
        ("tombstone", "delete", None, Place("agent", "delete", "tombstone")),
        ("compensate", None, None, Place("agent", "abort", "compensate")),
        ("compensate", None, "gms", Place("gms", "abort", "compensate")),
    ],
)
def test_a_step_is_found_in_the_service_that_carries_it_out(
    step: str, verb: str | None, service: str | None, found: Place
) -> None:
    assert sim.place(step, verb, service) == found


@pytest.mark.parametrize(("step", "verbs"), [("check", 3), ("tombstone", 2), ("signal", 2)])
def test_a_name_that_several_verbs_have_asks_for_the_verb(step: str, verbs: int) -> None:
    with pytest.raises(WrongArguments) as raised:
        sim.place(step, None, None)
    assert raised.value.next_step.count("--verb") == verbs


def test_only_a_crash_is_followed_by_a_restart() -> None:
    place = Place("gms", "load", "read")
    assert "restart node-2 --service gms" in "\n".join(sim.looks("node-2", place, "crash"))
    assert "restart" not in "\n".join(sim.looks("node-2", place, "fail"))


@pytest.mark.parametrize(
    ("verb", "step", "hint"),
    [
        ("save", "write", "checkpoint.yaml"),
        ("load", "read", "restore.yaml"),
        ("delete", "remove", "delete dynamocheckpoint"),
    ],
)
def test_the_command_that_leads_to_the_step_is_named(verb: str, step: str, hint: str) -> None:
    lines = sim.looks("node-1", sim.place(step, verb, None), "fail")
    assert hint in lines[0]


def test_without_a_service_both_are_meant() -> None:
    assert list(sim.services(None)) == ["agent", "gms"]
    assert list(sim.services("gms")) == ["gms"]
