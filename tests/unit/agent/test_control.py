"""Bodies of control files: ours are read back, a worker's hostile ones belong to no attempt."""

import json

from snapshot_agent.domain import control
from snapshot_shared.errors import Failure
from snapshot_shared.orders import ArtifactRef, PodRef, RestoreOrder
from tests.support import builders
from tests.unit.tables import each

UID = "11111111-2222-3333-4444-555555555555"
CONTENT = "99999999-2222-3333-4444-555555555555"


@each(
    ("data", "attempts"),
    [
        (control.body(3), [3]),
        # Of a later version.
        (b'{"attempt": 2, "pid": 7}', [2]),
        (control.request(2, "c-1", "complete"), [2]),
        (b"", []),
        (b"{}", []),
        (b"1", []),
        (b"[1]", []),
        (b'{"attempt": "1"}', []),
        (b'{"attempt": 1.5}', []),
        (b"\xff", []),
        (b"[" * 50_000, []),
        (b'{"attempt": 1, "x": "' + b"y" * control.MAX_BODY_BYTES + b'"}', []),
    ],
)
def test_a_body_belongs_to_its_attempt_alone(data: bytes, attempts: list[int]) -> None:
    assert [attempt for attempt in range(1, 5) if control.is_of(data, attempt)] == attempts


def test_a_restored_worker_is_told_what_and_where_it_is() -> None:
    digest = "xxh3-128:" + "0" * 32
    order = builders.work_order(
        RestoreOrder,
        attempt=3,
        node="n2",
        artifact=ArtifactRef(
            namespace="default", content_uid=CONTENT, generation=2, root_digest=digest
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


def test_a_request_names_its_capture_and_how_the_one_before_it_ended_if_there_was_one() -> None:
    named = {"attempt": 2, "capture": "c-1", "previous": "complete"}
    assert json.loads(control.request(2, "c-1", "complete")) == named
    assert "previous" not in json.loads(control.request(1, "c-1", ""))
