"""Notes of a save: what they say of which save, and where they are torn."""

from __future__ import annotations

import msgspec
import pytest

from gms.domain.resume import ChunksNote, KeyNote, SaveNote, read_notes
from snapshot_shared.artifact import Encryption
from snapshot_shared.codec import encode_json
from snapshot_shared.orders import LayoutRef
from tests.unit.tables import each

LAYOUT = LayoutRef(
    device="GPU-1", incarnation="i", generation=1, layout_id="l", structure_hash="h", bytes=9
)
SAVE = SaveNote(
    order="save-11111111-2222-3333-4444-555555555555-gpu-0",
    generation=1,
    fence_token="t",
    layout=LAYOUT,
    backend="posix-direct",
    shard_bytes=8192,
    chunk_bytes=4096,
)
D1, D2 = "a" * 32, "b" * 32
NOTED = (
    SAVE,
    ChunksNote(chunks=[("s0", 0, D1), ("s1", 3, D1)]),
    ChunksNote(chunks=[("s0", 1, D2)]),
)
LINES = [encode_json(note) + b"\n" for note in NOTED]
NOTES = b"".join(LINES)


def test_what_is_noted_is_read_again() -> None:
    assert read_notes(NOTES, SAVE)[:2] == ({"s0": {0: D1, 1: D2}, "s1": {3: D1}}, len(NOTES))


@pytest.mark.parametrize("cut", [1, 5, len(LINES[2]) - 1])
def test_a_torn_end_counts_for_nothing(cut: int) -> None:
    whole = len(LINES[0]) + len(LINES[1])
    assert read_notes(NOTES[: whole + cut], SAVE)[:2] == ({"s0": {0: D1}, "s1": {3: D1}}, whole)


@pytest.mark.parametrize("noise", [b"\0" * 40 + b"\n", b"\xff\n", b"{}\n", LINES[0]])
def test_nothing_after_a_line_that_is_no_note_counts(noise: bytes) -> None:
    data = LINES[0] + noise + LINES[1]
    assert read_notes(data, SAVE)[:2] == ({}, len(LINES[0]))


@each(
    "change",
    [
        {"fence_token": "u"},
        {"fence_token": None},
        {"generation": 2},
        {"backend": "posix-buffered"},
        {"chunk_bytes": 8192},
        {"layout": msgspec.structs.replace(LAYOUT, incarnation="j")},
        {"layout": msgspec.structs.replace(LAYOUT, generation=2)},
        {"layout": msgspec.structs.replace(LAYOUT, structure_hash="g")},
    ],
)
def test_notes_of_another_save_count_for_nothing(change: dict[str, object]) -> None:
    assert read_notes(NOTES, msgspec.structs.replace(SAVE, **change))[:2] == ({}, 0)


def test_no_notes_are_those_of_no_save() -> None:
    assert read_notes(b"", SAVE)[:2] == ({}, 0)
    assert read_notes(b"".join(LINES[1:]), SAVE)[:2] == ({}, 0)


def test_the_key_of_an_encrypted_save_and_what_its_chunks_have_is_noted_too() -> None:
    key = Encryption(key="k", data_key=b"wrapped")
    save = msgspec.structs.replace(SAVE, encrypted=True)
    notes = (
        save,
        KeyNote(encryption=key),
        ChunksNote(chunks=[("s0", 0, D1), ("s0", 1, D2)], tags=[b"1" * 28, b"2" * 28]),
    )
    data = b"".join(encode_json(note) + b"\n" for note in notes)
    found = read_notes(data, save)
    assert found == ({"s0": {0: D1, 1: D2}}, len(data), {"s0": {0: b"1" * 28, 1: b"2" * 28}}, key)
    assert read_notes(data, SAVE) == ({}, 0, {}, None), "it would go on with what is not encrypted"
