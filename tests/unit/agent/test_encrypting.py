"""Encrypted files: what comes back, and that nothing comes back of what was changed or moved."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapshot_agent.domain.encrypting import (
    KEY_BYTES,
    NONCE_BYTES,
    PLAIN_BYTES,
    SEGMENT_BYTES,
    TAG_BYTES,
    FileCipher,
    key_id,
    unwrap,
    wrap,
)
from snapshot_shared.errors import ArtifactCorrupt

KEY = bytes(range(KEY_BYTES))
OTHER = bytes(KEY_BYTES)
PART = "default/00000000-0000-4000-8000-000000000001/gen-1/process"
CIPHER = FileCipher(KEY, PART, "pages-1.img")
SIZES = (0, 1, PLAIN_BYTES - 1, PLAIN_BYTES, PLAIN_BYTES + 1, 3 * PLAIN_BYTES)
LONG = bytes(range(251)) * (2 * PLAIN_BYTES // 251 + 9)
"""Of three segments."""


def sealed(data: bytes, cipher: FileCipher = CIPHER) -> bytes:
    return cipher.encrypt(0, memoryview(data), is_end=True)


def opened(data: bytes, cipher: FileCipher = CIPHER) -> bytes:
    return cipher.decrypt(0, memoryview(data), is_end=True)


def segments(data: bytes) -> list[bytes]:
    return [data[at : at + SEGMENT_BYTES] for at in range(0, len(data), SEGMENT_BYTES)]


@pytest.mark.parametrize("size", SIZES)
def test_a_file_of_any_size_comes_back_and_takes_a_tag_for_each_segment(size: int) -> None:
    data = LONG[:size] if size <= len(LONG) else bytes(size)
    found = sealed(data)
    assert opened(found) == data
    assert len(found) == size + TAG_BYTES * max(1, -(-size // PLAIN_BYTES))


@given(data=st.binary(max_size=300), other=st.binary(min_size=1, max_size=20))
@settings(max_examples=60)
def test_no_other_name_part_or_key_opens_a_file(data: bytes, other: bytes) -> None:
    found = sealed(data)
    assert opened(found) == data
    for cipher in (
        FileCipher(KEY, PART, f"pages-1.img{other.hex()}"),
        FileCipher(KEY, PART.replace("gen-1", "gen-2"), "pages-1.img"),
        FileCipher(OTHER, PART, "pages-1.img"),
    ):
        with pytest.raises(ArtifactCorrupt):
            opened(found, cipher)


@given(data=st.binary(max_size=300), where=st.integers(0, 10_000), bit=st.integers(0, 7))
@settings(max_examples=60)
def test_no_bit_can_be_changed(data: bytes, where: int, bit: int) -> None:
    found = bytearray(sealed(data))
    found[where % len(found)] ^= 1 << bit
    with pytest.raises(ArtifactCorrupt, match=r"pages-1\.img: segment 0"):
        opened(bytes(found))


def test_a_chunk_is_encrypted_and_decrypted_by_itself() -> None:
    first, rest = memoryview(LONG)[:PLAIN_BYTES], memoryview(LONG)[PLAIN_BYTES:]
    both = CIPHER.encrypt(0, first, is_end=False) + CIPHER.encrypt(1, rest, is_end=True)
    assert both == sealed(LONG)
    assert CIPHER.decrypt(1, memoryview(both)[SEGMENT_BYTES:], is_end=True) == rest


def test_no_segment_can_be_left_out_repeated_or_moved() -> None:
    one, two, end = segments(sealed(LONG))
    assert opened(one + two + end) == LONG
    for forged in (
        one + two,
        one,
        b"",
        two + end,
        one + end,
        two + one + end,
        one + one + end,
        one + two + end + end,
        one + two + end[:-1],
        one + two + b"",
    ):
        with pytest.raises(ArtifactCorrupt):
            opened(forged)


def test_a_file_that_goes_on_cannot_be_taken_for_one_that_ends() -> None:
    part = CIPHER.encrypt(0, memoryview(LONG)[:PLAIN_BYTES], is_end=False)
    with pytest.raises(ArtifactCorrupt):
        opened(part)


def test_a_data_key_is_opened_by_its_key_for_its_part_alone() -> None:
    wrapped = wrap(KEY, bytes(NONCE_BYTES), OTHER, PART)
    assert unwrap(KEY, wrapped, PART) == OTHER
    changed = bytes([*wrapped[:-1], wrapped[-1] ^ 1])
    for key, data, part in (
        (OTHER, wrapped, PART),
        (KEY, wrapped, PART.replace("gen-1", "gen-2")),
        (KEY, changed, PART),
        (KEY, wrapped[:20], PART),
        (KEY, b"", PART),
    ):
        with pytest.raises(ArtifactCorrupt, match=key_id(key)):
            unwrap(key, data, part)
