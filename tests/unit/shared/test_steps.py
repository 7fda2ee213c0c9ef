"""The steps of each verb, with each driver."""

import msgspec
import pytest

from snapshot_shared import orders, steps
from snapshot_shared.orders import Driver, driver_of
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
    stop = orders.StopOrder(
        order=f"stop-{UID}",
        attempt=1,
        node="n",
        owner=UID,
        deadline_s=1.0,
        pod=msgspec.convert(POD, orders.PodRef),
    )
    assert driver_of(stop) is None
