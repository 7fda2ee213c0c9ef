"""How far a driver has come with a worker, and which device takes the place of which."""

import msgspec
import pytest

from snapshot_agent.domain.driving import PHASE_NOTE, Phase, Release, device_map, phase_of
from snapshot_shared.artifact import RootManifest, RootPart
from snapshot_shared.ledger import Entry
from snapshot_shared.orders import DeviceRef, LayoutRef, PodRef
from tests.support import builders

UID = "00000000-0000-4000-8000-000000000001"


def dump(**notes: object) -> Entry:
    entry = Entry(builders.accepted(order=f"dump-{UID}", wall=0.0))
    entry.notes.update(notes)
    return entry


@pytest.mark.parametrize(
    ("entry", "phase"),
    [
        (None, Phase.SIGNAL),
        (dump(), Phase.SIGNAL),
        (dump(**{PHASE_NOTE: "begun"}), Phase.BEGUN),
    ],
)
def test_the_phase_of_a_dump_is_the_one_on_record(entry: Entry | None, phase: Phase) -> None:
    assert phase_of(entry) is phase


def test_a_phase_survives_the_journal() -> None:
    assert msgspec.json.decode(msgspec.json.encode(Phase.BEGUN)) == "begun"


def part(name: str, device: str) -> RootPart:
    layout = LayoutRef(
        device=device, incarnation="i", generation=1, layout_id="l", structure_hash="h", bytes=1
    )
    return RootPart(part=name, kind="gms", bytes=1, digest="0" * 64, layout=layout)


def test_a_device_takes_the_place_of_the_one_with_its_ordinal() -> None:
    root = RootManifest(
        namespace="default",
        content_uid=UID,
        generation=1,
        source=PodRef(namespace="default", name="llm", uid=UID),
        bytes=3,
        parts=[
            part("gpu-1", "old-b"),
            part("gpu-0", "old-a"),
            RootPart(part="process", kind="process", bytes=1, digest="0" * 64),
        ],
    )
    here = [DeviceRef(ordinal=0, uuid="new-a"), DeviceRef(ordinal=1, uuid="new-b")]
    assert device_map(root, here) == {"old-a": "new-a", "old-b": "new-b"}
    assert device_map(root, here[:1]) == {"old-a": "new-a"}


def test_a_release_that_says_nothing_sends_a_signal_and_is_over() -> None:
    release = Release()
    assert release.program == ()
    assert not release.ends
    assert not release.stays
