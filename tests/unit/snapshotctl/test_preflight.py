"""What the demo needs of a machine."""

import pytest

from snapshotctl.domain.preflight import MIB, Machine, checks

GOOD = Machine(
    system="Linux",
    kernel="6.1",
    python=(3, 11),
    has_venv=True,
    has_pidfd=True,
    memory=8 * 1024 * MIB,
    state_dir="/home",
    disk=8 * 1024 * MIB,
    shared_memory=64 * MIB,
    has_examples=True,
    examples="deploy/examples",
    has_nats=True,
)


def _missing(machine: Machine, size_mib: int = 512) -> list[str]:
    return [f"{check.what}: {check.fix}" for check in checks(machine, size_mib) if not check.ok]


def test_a_machine_that_has_everything_passes() -> None:
    assert _missing(GOOD) == []


@pytest.mark.parametrize(
    ("change", "fix"),
    [
        ({"system": "Darwin"}, "Linux"),
        ({"has_pidfd": False}, "Linux 5.3"),
        ({"has_venv": False}, "apt install python3.11-venv"),
        ({"python": (3, 10)}, "Python 3.11"),
        ({"has_nats": False}, "make setup"),
        ({"memory": 900 * MIB}, "SIZE_MIB=300"),
        ({"disk": 0}, "XDG_STATE_HOME"),
        ({"shared_memory": 0}, "mount -t tmpfs"),
        ({"has_examples": False}, "deploy/examples"),
    ],
)
def test_what_is_missing_is_named_with_its_fix(change: dict[str, object], fix: str) -> None:
    [line] = _missing(GOOD._replace(**change))  # type: ignore[arg-type]
    assert fix in line


def test_three_times_the_weights_fit_into_memory() -> None:
    assert _missing(GOOD._replace(memory=3 * 2048 * MIB), 2048) == []
    assert len(_missing(GOOD._replace(memory=3 * 2048 * MIB - 1), 2048)) == 1


def test_everything_missing_is_listed_at_once() -> None:
    bare = GOOD._replace(has_venv=False, memory=0, disk=0, shared_memory=0, has_nats=False)
    assert len(_missing(bare)) == 5
