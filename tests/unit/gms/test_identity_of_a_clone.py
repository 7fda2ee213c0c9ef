"""Who a process is after a restore."""

from __future__ import annotations

import importlib
import random
import socket
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace

from snapback_client import identity
from snapback_client.control import Signal
from snapback_client.identity import identity_of

SAID = Signal(
    attempt=1,
    node="n1",
    pod="default/a",
    pod_uid="11111111-2222-3333-4444-555555555555",
    capture="99999999-2222-3333-4444-555555555555",
    generation=1,
)


@pytest.mark.parametrize(
    "changes",
    [
        {"pod_uid": "22222222-2222-3333-4444-555555555555"},
        {"attempt": 2},
        {"generation": 2},
        {"node": "n2"},
        {"capture": "88888888-2222-3333-4444-555555555555"},
    ],
)
def test_each_restore_has_another_seed(changes: dict[str, object]) -> None:
    assert identity_of(replace(SAID, **changes)).seed != identity_of(SAID).seed


def test_clones_differ_though_an_older_agent_does_not_say_where_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = identity_of(Signal(attempt=1))
    monkeypatch.setattr(socket, "gethostname", lambda: "another-pod")
    assert identity_of(Signal(attempt=1)).seed != here.seed


def test_the_address_is_one_of_this_machine() -> None:
    found = identity_of(SAID).address
    if not found:
        pytest.skip("this machine has no route to other networks")
    with socket.socket(socket.AF_INET6 if ":" in found else socket.AF_INET) as bound:
        bound.bind((found, 0))


def test_without_a_route_there_is_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    # 255.255.255.255 needs a permission that no socket has by default.
    monkeypatch.setattr(identity, "_FAR_AWAY", ((socket.AF_INET, "255.255.255.255"),))
    assert identity_of(SAID).address == ""


def test_reseeding_makes_clones_draw_other_numbers_and_ranks_the_same() -> None:
    def drawn(said: Signal) -> tuple[float, float]:
        identity_of(said).reseed()
        return random.random(), float(np.random.random())  # noqa: NPY002 - the global one is what is seeded

    before = random.getstate(), np.random.get_state()  # noqa: NPY002 - as above
    try:
        assert drawn(SAID) == drawn(SAID)
        assert set(drawn(SAID)).isdisjoint(drawn(replace(SAID, attempt=2)))
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002 - as above


def test_pytorch_is_seeded_where_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(manual_seed=seeds.append))
    for module, name in (("random", "seed"), ("numpy.random", "seed")):
        monkeypatch.setattr(importlib.import_module(module), name, print)
    found = identity_of(SAID)
    found.reseed()
    assert seeds == [found.seed]


def test_programs_find_it_as_variables() -> None:
    found = identity_of(SAID).environment()
    assert found["SNAPBACK_POD"] == "default/a"
    fields = {name.removeprefix("SNAPBACK_").lower() for name in found}
    assert fields | {"context"} == {*identity_of(SAID)._fields}


def test_variables_of_the_new_container_are_part_of_it_and_change_no_seed() -> None:
    context = {"POD_NAME": "b", "DYN_SYSTEM_PORT": None, "SNAPBACK_POD": "forged"}
    found = identity_of(SAID, context)
    assert (found.context, found.seed) == (context, identity_of(SAID).seed)
    variables = found.environment()
    assert (variables["POD_NAME"], variables["DYN_SYSTEM_PORT"]) == ("b", None)
    assert variables["SNAPBACK_POD"] == "default/a"
