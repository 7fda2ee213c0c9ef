"""The limit of CPU time that every test has."""

import signal
import threading
import time

import pytest

from tests.support.limits import CPU_S, cpu_limit


def _compute_for_ever() -> None:
    while True:
        pass


def test_what_computes_too_long_fails_where_it_is() -> None:
    limited = cpu_limit(0.05)
    with pytest.raises(pytest.fail.Exception, match=r"than 0\.05 s of CPU") as caught, limited:
        _compute_for_ever()
    assert "_compute_for_ever" in [entry.name for entry in caught.traceback]


def test_what_waits_takes_no_cpu_time() -> None:
    with cpu_limit(0.1):
        threading.Event().wait(0.3)


def test_a_limit_ends_with_its_block() -> None:
    with cpu_limit(0.05):
        pass
    end = time.process_time() + 0.1
    while time.process_time() < end:
        pass


def test_every_test_is_limited() -> None:
    left_s, _ = signal.getitimer(signal.ITIMER_PROF)
    assert CPU_S / 2 < left_s <= CPU_S + 1


@pytest.mark.cpu(5)
def test_a_test_may_have_a_limit_of_its_own() -> None:
    left_s, _ = signal.getitimer(signal.ITIMER_PROF)
    assert 2.5 < left_s <= 6
