"""What is refused before a worker is touched, with the values that decided it."""

import pytest
from msgspec.structs import replace

from snapshot_agent.domain import gate
from snapshot_shared.artifact import Facts
from snapshot_shared.errors import HoldDeadline, SnapbackError
from snapshot_shared.orders import ArtifactRef, DeviceRef, DumpOrder, PodRef, VectorEntry
from tests.support import builders
from tests.support.builders import DIGEST, UID
from tests.unit.tables import each

OTHER = "00000000-0000-4000-8000-000000000002"
POD = PodRef(namespace="default", name="llm", uid=UID)
SEEN = gate.ObservedPod(POD, POD, containers=("main",), alive=True)


def reason_of(checks: object, seen: object) -> str:
    try:
        gate.refuse(checks, seen)  # type: ignore[arg-type]
    except SnapbackError as error:
        return error.reason
    return ""


@each(
    ("seen", "reason"),
    [
        (SEEN, ""),
        (SEEN._replace(known=None), "StalePodReference"),
        (SEEN._replace(known=replace(POD, name="other")), "StalePodReference"),
        (SEEN._replace(known=replace(POD, namespace="other")), "StalePodReference"),
        (SEEN._replace(wanted=replace(POD, container="sidecar")), "NotEligible"),
        (SEEN._replace(alive=False, exit_code=3), "SourceExited"),
        (SEEN._replace(captured_by=OTHER), "NotEligible"),
    ],
)
def test_a_capture_is_opened_only_on_the_live_free_container_of_the_named_pod(
    seen: gate.ObservedPod, reason: str
) -> None:
    assert reason_of(gate.CAPTURE_CHECKS, seen) == reason


def test_an_exit_is_reported_with_its_code() -> None:
    with pytest.raises(SnapbackError, match="exit code 3") as caught:
        gate.refuse(gate.CAPTURE_CHECKS, SEEN._replace(alive=False, exit_code=3))
    assert caught.value.values == {"exit_code": 3}


def test_a_restore_needs_a_pod_that_waits_for_one() -> None:
    assert reason_of(gate.RESTORE_CHECKS, SEEN) == "NotEligible"
    assert reason_of(gate.RESTORE_CHECKS, SEEN._replace(standby=True)) == ""


FACTS = Facts(driver="cooperative", arch="x86_64", device_product="Simulated GPU", devices=2)
PARTS = [builders.root_part(part) for part in ("process", "gpu-0", "gpu-1")]
ROOT = builders.root_manifest(*PARTS, generation=3, source=POD, facts=FACTS)
BOTH = ["gpu-0", "gpu-1"]
TARGET = gate.Target(
    artifact=ArtifactRef(namespace="default", content_uid=UID, generation=3, root_digest=DIGEST),
    root=ROOT,
    source=FACTS,
    here=Facts(driver="cooperative", arch="x86_64", device_product="Simulated GPU"),
    devices=[DeviceRef(ordinal=0, uuid="a"), DeviceRef(ordinal=1, uuid="b")],
)


BROUGHT = TARGET._replace(
    root=replace(ROOT, parts=[PARTS[0], PARTS[2]]),
    source=replace(FACTS, driver="criu+cuda"),
    here=replace(TARGET.here, driver="criu+cuda"),
    given=2,
)
"""Its process brings what it has on device 0."""


def here(**facts: str) -> gate.Target:
    return TARGET._replace(here=replace(TARGET.here, **facts))


@each(
    ("target", "reason", "values"),
    [
        (TARGET, "", None),
        (TARGET._replace(root=replace(ROOT, generation=4)), "ArtifactCorrupt", None),
        (TARGET._replace(source=replace(FACTS, devices=2), given=2), "", None),
        (TARGET._replace(source=replace(FACTS, devices=2), given=None), "", None),
        (TARGET._replace(source=replace(FACTS, devices=0), given=1), "", None),
        (TARGET._replace(source=replace(FACTS, devices=2), given=0), "Incompatible", (2, 0)),
        (TARGET._replace(root=replace(ROOT, content_uid=OTHER)), "ArtifactCorrupt", None),
        (TARGET._replace(root=replace(ROOT, namespace="other")), "ArtifactCorrupt", None),
        (TARGET._replace(root=replace(ROOT, parts=PARTS[1:])), "ArtifactCorrupt", None),
        (TARGET._replace(devices=TARGET.devices[:1]), "Incompatible", (BOTH, ["gpu-0"])),
        (
            TARGET._replace(devices=[TARGET.devices[0], DeviceRef(ordinal=2, uuid="c")]),
            "Incompatible",
            (BOTH, ["gpu-0", "gpu-2"]),
        ),
        (BROUGHT, "", None),
        (BROUGHT._replace(given=1), "Incompatible", (2, 1)),
        (BROUGHT._replace(devices=TARGET.devices[:0]), "Incompatible", (["gpu-1"], [])),
        (here(driver="criu"), "Incompatible", ("cooperative", "criu")),
        (here(arch="aarch64"), "Incompatible", ("x86_64", "aarch64")),
        (here(device_product="Other"), "Incompatible", ("Simulated GPU", "Other")),
        (TARGET._replace(here=Facts()), "", None),
        (TARGET._replace(source=Facts(driver="cooperative")), "", None),
    ],
)
def test_an_artifact_is_restored_only_where_it_fits_and_both_values_are_named(
    target: gate.Target, reason: str, values: tuple[object, object] | None
) -> None:
    assert reason_of(gate.COMPATIBILITY_CHECKS, target) == reason
    if values is not None:
        with pytest.raises(SnapbackError) as caught:
            gate.refuse(gate.COMPATIBILITY_CHECKS, target)
        assert (caught.value.values["expected"], caught.value.values["found"]) == values


def dump_request(
    vector: list[VectorEntry], *, held: int | None = 1, driver: str = "cooperative"
) -> gate.DumpRequest:
    order = builders.work_order(DumpOrder, pod=POD, content_uid=UID, vector=vector)
    return gate.DumpRequest(order, held, driver, PLAN)


LAYOUT = builders.layout(device="a")
PLAN = [VectorEntry(part="process"), VectorEntry(part="gpu-0", ordinal=0, layout=LAYOUT)]
LATER = replace(PLAN[1], layout=replace(LAYOUT, generation=2))


def test_a_dump_works_on_the_plan_that_was_prepared_in_any_order() -> None:
    assert reason_of(gate.DUMP_CHECKS, dump_request(PLAN)) == ""
    assert reason_of(gate.DUMP_CHECKS, dump_request(PLAN[::-1])) == ""


@each(
    "request_",
    [
        dump_request(PLAN[:1]),
        dump_request([PLAN[0], LATER]),
        dump_request([*PLAN, PLAN[0]]),
        dump_request(PLAN, held=2),
        dump_request(PLAN, driver="respawn"),
        dump_request(PLAN)._replace(prepared=None),
    ],
)
def test_a_dump_of_anything_but_the_capture_that_is_held_is_refused(
    request_: gate.DumpRequest,
) -> None:
    assert reason_of(gate.DUMP_CHECKS, request_) == "NotEligible"


def test_a_dump_of_a_worker_that_was_let_go_meanwhile_may_be_tried_again() -> None:
    assert reason_of(gate.DUMP_CHECKS, dump_request(PLAN, held=None)) == "HoldDeadline"
    assert HoldDeadline.retryable
