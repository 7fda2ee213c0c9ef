"""Bodies of control files: ours are read back, a worker's hostile ones belong to no attempt."""

import json

from snapshot_agent.domain import control
from snapshot_shared.errors import Failure
from snapshot_shared.orders import ArtifactRef, PodRef, RestoreOrder
from tests.unit.tables import each

UID = "11111111-2222-3333-4444-555555555555"
CONTENT = "99999999-2222-3333-4444-555555555555"


def test_a_body_belongs_to_its_attempt_alone() -> None:
    assert control.is_of(control.body(3), 3)
    assert not control.is_of(control.body(3), 2)
    assert not control.is_of(control.body(3), 4)


def test_a_restored_worker_is_told_what_and_where_it_is() -> None:
    order = RestoreOrder(
        order=f"restore-{UID}",
        attempt=3,
        node="n2",
        owner=UID,
        deadline_s=60.0,
        artifact=ArtifactRef(
            namespace="default",
            content_uid=CONTENT,
            generation=2,
            root_digest="xxh3-128:" + "0" * 32,
        ),
        pod=PodRef(namespace="default", name="clone", uid=UID),
    )
    assert json.loads(control.restored(order, {"GPU-a": "GPU-b"})) == {
        "attempt": 3,
        "devices": {"GPU-a": "GPU-b"},
        "node": "n2",
        "pod": "default/clone",
        "pod_uid": UID,
        "capture": CONTENT,
        "generation": 2,
    }


def test_a_failure_is_written_with_reason_and_message() -> None:
    data = control.body(1, Failure(reason="Aborted", message="x" * 10_000))
    read = json.loads(data)
    assert read["reason"] == "Aborted"
    assert len(read["message"]) == 4096


@each(
    "data",
    [
        b"",
        b"{}",
        b"1",
        b"[1]",
        b'{"attempt": "1"}',
        b'{"attempt": 1.5}',
        b"\xff",
        b"[" * 50_000,
        b'{"attempt": 1, "x": "' + b"y" * control.MAX_BODY_BYTES + b'"}',
    ],
)
def test_what_does_not_decode_belongs_to_no_attempt(data: bytes) -> None:
    assert not control.is_of(data, 1)


def test_a_body_of_a_later_version_with_more_fields_is_understood() -> None:
    assert control.is_of(b'{"attempt": 2, "pid": 7}', 2)


def test_a_request_names_its_capture_and_how_the_one_before_it_ended() -> None:
    data = control.request(2, "c-1", "complete")
    assert control.is_of(data, 2)
    assert json.loads(data) == {"attempt": 2, "capture": "c-1", "previous": "complete"}


def test_a_request_of_a_worker_that_was_never_captured_names_no_outcome() -> None:
    assert "previous" not in json.loads(control.request(1, "c-1", ""))
