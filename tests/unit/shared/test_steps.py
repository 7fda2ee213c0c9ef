"""The steps of each verb, with each driver, and what can be read of any order."""

import msgspec
import pytest

from snapshot_shared import orders, steps
from snapshot_shared.orders import Driver, Envelope, driver_of, envelope_of, order_in
from snapshot_shared.steps import OWN_STEPS, STEPS, Place, find, names, table
from tests.unit.tables import each

UID = "00000000-0000-4000-8000-000000000001"
COMMON = {"attempt": 1, "node": "node-1", "owner": UID, "deadline_s": 1.0}
POD = {"namespace": "default", "name": "llm", "uid": UID}


def test_a_driver_has_the_steps_of_all_but_where_it_has_its_own() -> None:
    assert table("dump", "cooperative") == table("dump") == STEPS["dump"]
    assert table("dump", "respawn") == OWN_STEPS["dump", "respawn"] != STEPS["dump"]
    assert table("prepare", "respawn") == STEPS["prepare"]


@each(("verb", "driver"), OWN_STEPS)
def test_the_steps_of_every_driver_have_names_that_spans_and_faults_know(
    verb: str, driver: Driver
) -> None:
    assert set(table(verb, driver)) <= set(names(verb)) <= steps.all_names()
    for step in table(verb, driver):
        assert Place("agent", verb, step) in find(step, verb=verb)


def test_a_verb_names_each_step_once() -> None:
    assert names("dump") == ("freeze", "copy-state", "thaw", "stage", "replace", "dump-process")


@pytest.mark.parametrize("verb", ["prepare", "dump", "release", "restore", "abort"])
def test_an_order_of_an_older_operator_means_the_driver_that_was_the_only_one(verb: str) -> None:
    document = {
        "type": f"snapback.v1.{verb}_order",
        "order": f"{verb}-{UID}",
        "pod": POD,
        "content_uid": UID,
        "fence_token": "t",
        "vector": [],
        "artifact": {
            "namespace": "default",
            "content_uid": UID,
            "generation": 1,
            "root_digest": "sha256:" + "0" * 64,
        },
        **COMMON,
    }
    order = msgspec.convert(document, orders.AnyOrder)
    assert driver_of(order) == "cooperative"


def test_an_order_about_no_process_names_no_driver() -> None:
    stop = {"type": "snapback.v1.stop_order", "order": f"stop-{UID}", "pod": POD, **COMMON}
    assert driver_of(msgspec.convert(stop, orders.StopOrder)) is None


@pytest.mark.parametrize(
    "payload", [b"", b"\xff", b"[]", b"3", b'{"type": "snapback.v9.stop_order"}']
)
def test_what_is_no_order_of_ours_is_none(payload: bytes) -> None:
    assert order_in(payload) is None
    assert envelope_of(payload).attempt == 0


@pytest.mark.parametrize("read", [order_in, envelope_of])
def test_a_payload_that_is_nested_without_end_is_no_order(read: object) -> None:
    assert read(b'{"x":' + b"[" * 100_000) in (None, Envelope())  # type: ignore[operator]


def test_of_an_order_of_an_unknown_version_the_envelope_can_be_read() -> None:
    payload = b'{"type": "snapback.v9.stop_order", "attempt": 4, "schema": 9, "new": {}}'
    assert envelope_of(payload) == Envelope(attempt=4, schema=9)
