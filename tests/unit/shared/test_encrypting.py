"""Encrypted and signed files: nothing comes back of what was changed, moved or is not trusted."""

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET
from msgspec.structs import replace

from snapshot_shared.artifact import Encryption, FileEncryption, Signature
from snapshot_shared.encrypting import (
    KEY_BYTES,
    NONCE_BYTES,
    PLAIN_BYTES,
    SEGMENT_BYTES,
    TAG_BYTES,
    ChunkCipher,
    FileCipher,
    PartCipher,
    key_id,
    unwrap,
    wrap,
)
from snapshot_shared.errors import ArtifactCorrupt, NotTrusted
from snapshot_shared.signing import NO_SIGNATURES, Signing, name_of
from tests.support import builders
from tests.unit.tables import each

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


@each("size", SIZES)
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


# The chunks of GPU memory.

SIZE = 3 * 4096
CHUNKS = ChunkCipher(KEY, PART, "shard-0000.bin", SIZE)
NONCE = bytes(NONCE_BYTES)


def sealed_chunk(
    data: bytes, index: int = 0, cipher: ChunkCipher = CHUNKS, nonce: bytes = NONCE
) -> tuple[bytes, bytes]:
    """Return what is on the disk, and nonce and tag."""
    into = bytearray(len(data))
    tag = cipher.encrypt(index, [memoryview(data)], memoryview(into), nonce)
    return bytes(into), tag


def opened_chunk(data: bytes, tag: bytes, index: int = 0, cipher: ChunkCipher = CHUNKS) -> bytes:
    into = bytearray(len(data))
    cipher.decrypt(index, memoryview(data), [memoryview(into)], tag)
    return bytes(into)


@given(data=st.binary(min_size=1, max_size=300), cut=st.integers(0, 300))
@settings(max_examples=60)
def test_a_chunk_comes_back_with_no_byte_more_whatever_its_pieces_are(
    data: bytes, cut: int
) -> None:
    pieces = [memoryview(each) for each in (data[:cut], data[cut:]) if each]
    into = bytearray(len(data))
    tag = CHUNKS.encrypt(2, pieces, memoryview(into), NONCE)
    assert (bytes(into), tag) == sealed_chunk(data, 2)
    assert len(tag) == NONCE_BYTES + TAG_BYTES
    back = [memoryview(bytearray(len(piece))) for piece in pieces]
    CHUNKS.decrypt(2, memoryview(into), back, tag)
    assert b"".join(back) == data


def test_a_chunk_opens_in_its_place_alone() -> None:
    data, tag = sealed_chunk(b"x" * 4096, 1)
    assert opened_chunk(data, tag, 1) == b"x" * 4096
    others = {
        "another chunk": (data, tag, 0, CHUNKS),
        "a shorter chunk": (data[:-1], tag, 1, CHUNKS),
        "another file": (data, tag, 1, ChunkCipher(KEY, PART, "shard-0001.bin", SIZE)),
        "a shorter file": (data, tag, 1, ChunkCipher(KEY, PART, "shard-0000.bin", SIZE - 1)),
        "another part": (data, tag, 1, ChunkCipher(KEY, PART + "x", "shard-0000.bin", SIZE)),
        "another key": (data, tag, 1, ChunkCipher(OTHER, PART, "shard-0000.bin", SIZE)),
        "another nonce": (data, b"\1" + tag[1:], 1, CHUNKS),
        "another tag": (data, tag[:-1] + bytes([tag[-1] ^ 1]), 1, CHUNKS),
        "other bytes": (b"\1" + data[1:], tag, 1, CHUNKS),
    }
    for arguments in others.values():
        with pytest.raises(ArtifactCorrupt, match="is not what was encrypted there"):
            opened_chunk(*arguments)


def test_what_is_not_written_because_it_is_zeros_is_proven_as_well() -> None:
    tag = CHUNKS.zeros(0, 4096, NONCE)
    CHUNKS.check_zeros(0, 4096, tag)
    _, of_bytes = sealed_chunk(bytes(4096))
    for index, size, found in ((1, 4096, tag), (0, 4095, tag), (0, 4096, of_bytes)):
        with pytest.raises(ArtifactCorrupt, match="chunk"):
            CHUNKS.check_zeros(index, size, found)
    with pytest.raises(ArtifactCorrupt, match="chunk 0"):
        opened_chunk(b"", tag)


def part_cipher(key: bytes, part: str) -> PartCipher:
    return PartCipher(key, part, Encryption(key="k", data_key=b""))


def test_a_file_that_is_shared_keeps_its_key_in_every_later_part() -> None:
    first, second, third = (part_cipher(bytes([n]) * 32, f"part-{n}") for n in (1, 2, 3))
    data, tag = sealed_chunk(b"x" * 4096, 0, first.chunks_of("shard", 4096))
    entry = builders.file_entry(name="shard", encryption=FileEncryption([tag]))
    in_second = second.shared_from(first, entry, NONCE)
    in_third = third.shared_from(second, in_second, NONCE)
    for part, found in ((first, entry), (second, in_second), (third, in_third)):
        assert opened_chunk(data, tag, 0, part.chunks_in(found)) == b"x" * 4096
    for other in (in_second, replace(in_third, name="another")):
        with pytest.raises(ArtifactCorrupt):
            third.chunks_in(other)
    with pytest.raises(ArtifactCorrupt, match="not encrypted"):
        third.chunks_in(replace(entry, encryption=UNSET))


OURS, THEIRS = (Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32) for n in (1, 2))
DIGEST, OTHER_DIGEST = (f"sha256:{digit * 64}" for digit in "12")
TRUSTED = {name_of(OURS.public_key()): OURS.public_key()}
STRICT = Signing(OURS, TRUSTED, required=True)
LENIENT = STRICT._replace(required=False)
STRANGER = Signing(THEIRS)


def signed(by: Signing, digest: str = DIGEST) -> Signature:
    found = by.sign(digest)
    assert found is not None
    return found


def test_a_node_without_keys_signs_nothing_and_restores_everything() -> None:
    assert NO_SIGNATURES.sign(DIGEST) is None
    NO_SIGNATURES.check(None, DIGEST)
    NO_SIGNATURES.check(signed(STRANGER), DIGEST)


@pytest.mark.parametrize("found", [None, signed(STRANGER)])
def test_what_no_trusted_key_has_signed_is_refused_with_both_names_where_one_is_required(
    found: Signature | None,
) -> None:
    LENIENT.check(found, DIGEST)
    with pytest.raises(NotTrusted) as refused:
        STRICT.check(found, DIGEST)
    assert refused.value.values["expected"] == list(TRUSTED)
    assert refused.value.values["found"] == (found.key if found else "")
    for name in (*TRUSTED, found.key if found else "no signature"):
        assert name in str(refused.value)


@each("node", [STRICT, LENIENT])
@each(
    "forged",
    [
        signed(STRICT, OTHER_DIGEST),
        replace(signed(STRICT), signature=bytes(64)),
        replace(signed(STRANGER), key=name_of(OURS.public_key())),
    ],
)
def test_a_signature_of_a_trusted_key_has_to_be_right(node: Signing, forged: Signature) -> None:
    node.check(signed(STRICT), DIGEST)
    with pytest.raises(NotTrusted, match=DIGEST):
        node.check(forged, DIGEST)
