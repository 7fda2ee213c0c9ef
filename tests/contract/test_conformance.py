"""The conformance rules: every device keeps them, and one that breaks a rule is found."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from gms.adapters.simulated import SimulatedDevice
from gms.conformance.rig import CAPACITY, CudaRig, Rig, SimulatedRig, Skipped
from gms.conformance.run import RULES, check
from snapback_client.frames import Access
from tests.bench.machine import huge_bytes_free
from tests.support.claimed_rig import ClaimedRig

# The tests of each rule start processes, which `make test-fast` has no time for.
pytestmark = [pytest.mark.turns, pytest.mark.waits]


class Leaking(SimulatedDevice):
    """Gives old bytes to the next who asks."""

    def create(self, size: int) -> int:
        handle = super().create(size)
        os.pwrite(handle, b"secret", 0)
        return handle


class Writable(SimulatedDevice):
    """Exports for writing, whatever was asked for, and never seals."""

    def export(self, handle: int, access: Access) -> int:
        return super().export(handle, Access.RW)

    def seal(self, handle: int) -> None:
        pass


class Forgetful(SimulatedDevice):
    """Says that nothing is taken."""

    @property
    def used(self) -> int:
        return 0


class Apart(SimulatedDevice):
    """Exports another memory each time."""

    def export(self, handle: int, access: Access) -> int:
        mode = os.O_RDWR if access is Access.RW else os.O_RDONLY
        other = self.create(os.fstat(handle).st_size)
        return os.open(f"/proc/self/fd/{other}", mode | os.O_CLOEXEC)


CANNOT = {
    "gives_zeroes",
    "exports_for_reading_only",
    "exports_a_fixed_size",
    "seals",
    "hands_over_many",
}
"""What the fake GPU has to skip; it is too small for the last."""


@pytest.fixture
def rig() -> Iterator[SimulatedRig]:
    rig = SimulatedRig()
    yield rig
    rig.close()


RIGS = ("simulated", "simulated in huge pages", "claimed", "fake of cuda")
LONG = {("claimed", "hands_over_many")}
"""What takes seconds, and is proven by the other rigs as well."""
CASES = [
    pytest.param(
        *(rig, rule),
        id=f"{rig}-{rule.__name__}",
        marks=[pytest.mark.slow] * ((rig, rule.__name__) in LONG),
    )
    for rig in RIGS
    for rule in RULES
]


@pytest.fixture
def any_rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    if request.param == "claimed":
        with contextlib.closing(ClaimedRig()) as claimed:
            yield claimed
        return
    if request.param == "fake of cuda":
        request.getfixturevalue("cuda_node")
        with contextlib.closing(CudaRig(0)) as cuda:
            yield cuda
        return
    is_huge = request.param != "simulated"
    if is_huge and huge_bytes_free() < CAPACITY:
        pytest.skip("this host has set no huge pages aside (vm.nr_hugepages)")
    with contextlib.closing(SimulatedRig(huge_pages=is_huge)) as simulated:
        yield simulated


@pytest.mark.parametrize(("any_rig", "rule"), CASES, indirect=["any_rig"])
def test_a_device_keeps_the_rule(any_rig: Rig, rule: Callable[[Rig], object]) -> None:
    if any_rig.device.info.kind == "cuda" and rule.__name__ in CANNOT:
        with pytest.raises(Skipped):
            rule(any_rig)
    else:
        rule(any_rig)


@pytest.mark.parametrize(
    ("kind", "broken"),
    [
        (Leaking, {"gives_zeroes", "clears_what_is_new", "saves_and_loads"}),
        (Writable, {"exports_for_reading_only", "refuses_released_handles", "seals"}),
        (Forgetful, {"counts_what_is_taken", "charges_who_holds"}),
        (
            Apart,
            {
                "refuses_released_handles",
                "shares_bytes",
                "seals",
                "shares_between_processes",
                "sleeps_and_wakes",
                "charges_who_holds",
                "saves_and_loads",
            },
        ),
    ],
)
def test_a_device_that_breaks_a_rule_is_found(
    rig: SimulatedRig, kind: type[SimulatedDevice], broken: set[str]
) -> None:
    rig.close()
    # The last kind loses what it makes.
    rig.device = kind(node="n1", index=0, capacity=2 * CAPACITY)
    said: list[str] = []
    assert not check(rig, said.append)
    found = {
        rule.__name__ for rule, line in zip(RULES, said, strict=True) if line.startswith("BROKEN")
    }
    assert found == broken


def commanded(device: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gms.cli", "conformance", "--device", device]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)


def test_the_command_reports_every_rule() -> None:
    done = commanded("simulated")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("holds") == len(RULES)


def test_without_cuda_it_says_what_is_missing() -> None:
    done = commanded("cuda")
    if done.returncode == 0:
        pytest.skip("this machine has a GPU")
    assert done.returncode == 2
    assert "CudaUnavailable" in done.stderr
    assert "Traceback" not in done.stderr
