"""The keys of a node, as they are in files and behind the command of a KMS."""

import asyncio
import base64
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from snapshot_agent.ports import GenerationRef
from snapshot_shared import keys as snapshot_keys
from snapshot_shared.artifact import MAX_WRAPPED_BYTES, PartManifest
from snapshot_shared.encrypting import key_id
from snapshot_shared.errors import ArtifactCorrupt, InvalidInput, KeyUnavailable
from snapshot_shared.keys import KMS, ArtifactKeys
from tests.support.artifact_keys import put, put_encryption, put_signing
from tests.support.builders import UID

PLACE = GenerationRef("default", UID, 1)
FILE = "pages-1.img"


async def written_by(keys: ArtifactKeys) -> tuple[PartManifest, bytes]:
    """Return the manifest of a part with an encrypted file, and that file."""
    cipher = await keys.new_cipher(PLACE, "process")
    assert cipher is not None
    manifest = PartManifest(
        kind="process",
        part="process",
        **PLACE._asdict(),
        order=f"dump-{PLACE.content_uid}",
        bytes=0,
        files=[],
        encryption=cipher.encryption,
    )
    return manifest, cipher.of(FILE).encrypt(0, memoryview(b"secret"), is_end=True)


async def read_by(keys: ArtifactKeys, manifest: PartManifest, data: bytes) -> bytes:
    cipher = await keys.cipher_of(manifest)
    assert cipher is not None
    return cipher.of(FILE).decrypt(0, memoryview(data), is_end=True)


def key_of(manifest: PartManifest) -> str:
    assert manifest.encryption
    return manifest.encryption.key


async def test_without_keys_nothing_is_encrypted() -> None:
    keys = ArtifactKeys(None)
    assert (keys.encrypts, await keys.new_cipher(PLACE, "process")) == (False, None)


@pytest.mark.parametrize(
    "written",
    [bytes, lambda key: key.hex().encode() + b"\n", lambda key: base64.b64encode(key) + b"\n"],
)
async def test_a_key_is_read_as_it_is_in_hex_and_in_base64(
    tmp_path: Path, written: Callable[[bytes], bytes]
) -> None:
    key = os.urandom(32)
    put(tmp_path / "encryption.key", written(key))
    manifest, data = await written_by(ArtifactKeys(tmp_path))
    assert key_of(manifest) == key_id(key)
    assert manifest.encryption
    assert key not in manifest.encryption.data_key
    assert await read_by(ArtifactKeys(tmp_path), manifest, data) == b"secret"


async def test_after_a_rotation_the_old_key_still_decrypts_or_is_named_with_those_that_are_there(
    tmp_path: Path,
) -> None:
    old = put_encryption(tmp_path)
    key, name = old.read_bytes(), key_id(old.read_bytes())
    manifest, data = await written_by(ArtifactKeys(tmp_path))
    new = put_encryption(tmp_path)
    with pytest.raises(KeyUnavailable, match=f"{name}.*{key_id(new.read_bytes())}"):
        await ArtifactKeys(tmp_path).cipher_of(manifest)
    with pytest.raises(KeyUnavailable, match=f"{name}; this node has no key"):
        await ArtifactKeys(None).cipher_of(manifest)
    put(tmp_path / "2025.key", key)
    keys = ArtifactKeys(tmp_path)
    assert await read_by(keys, manifest, data) == b"secret"
    again, _ = await written_by(keys)
    assert key_of(again) != key_of(manifest) == name


async def test_the_data_key_of_another_part_is_refused(tmp_path: Path) -> None:
    put_encryption(tmp_path)
    manifest, _ = await written_by(ArtifactKeys(tmp_path))
    with pytest.raises(ArtifactCorrupt):
        await ArtifactKeys(tmp_path).cipher_of(replace(manifest, generation=2))


@pytest.mark.parametrize(
    ("name", "data", "mode", "said"),
    [
        ("encryption.key", bytes(31), 0o600, "32 bytes"),
        ("old.key", b"\xff" * 33, 0o600, "32 bytes"),
        ("encryption.key", b"0123456789abcdefABCDEF0123456789", 0o600, "32 digits in hex"),
        ("encryption.key", bytes(32), 0o640, "0640"),
        ("signing.pem", b"-----BEGIN", 0o600, "PEM"),
        ("a.pub", b"no key", 0o644, "PEM"),
        ("a.pub", b"", 0o666, "0666"),
    ],
)
def test_a_file_that_is_no_key_or_that_others_can_reach_is_refused_by_its_path(
    tmp_path: Path, name: str, data: bytes, mode: int, said: str
) -> None:
    put(tmp_path / name, data, mode)
    with pytest.raises(InvalidInput, match=said) as refused:
        ArtifactKeys(tmp_path)
    assert str(tmp_path / name) in str(refused.value)


@pytest.mark.parametrize("folder", ["nowhere", "."])
def test_a_folder_that_is_missing_or_has_no_key_is_refused_and_encryption_not_left_out(
    tmp_path: Path, folder: str
) -> None:
    (tmp_path / "encryption.keys").touch()
    with pytest.raises(InvalidInput, match="SNAPBACK_ARTIFACT_KEYS"):
        ArtifactKeys(tmp_path / folder)


def test_a_signature_is_required_only_where_one_is_trusted(tmp_path: Path) -> None:
    put_encryption(tmp_path)
    with pytest.raises(InvalidInput, match="SNAPBACK_REQUIRE_SIGNATURE"):
        ArtifactKeys(tmp_path, require_signature=True)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    put_signing(theirs, trusted=ours)
    signature = ArtifactKeys(theirs).signing.sign("sha256:1")
    ArtifactKeys(ours, require_signature=True).signing.check(signature, "sha256:1")
    ArtifactKeys(theirs, require_signature=True).signing.check(signature, "sha256:1")


# Turns the key around, which is no encryption and can be undone.
TURNING = "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read()[::-1])"


def kms(program: str) -> str:
    return f"{sys.executable} -c '{program}'"


async def test_a_kms_wraps_and_unwraps_data_keys(tmp_path: Path) -> None:
    keys = ArtifactKeys(None, kms(TURNING))
    manifest, data = await written_by(keys)
    assert key_of(manifest) == KMS
    assert await read_by(keys, manifest, data) == b"secret"
    with pytest.raises(KeyUnavailable, match="key kms; this node has no key"):
        await ArtifactKeys(None).cipher_of(manifest)
    with pytest.raises(ArtifactCorrupt, match="kms"):
        await ArtifactKeys(None, "echo").cipher_of(manifest)
    put_encryption(tmp_path)
    both = ArtifactKeys(tmp_path, kms(TURNING))
    assert await read_by(both, manifest, data) == b"secret"
    again, _ = await written_by(both)
    assert key_of(again) != KMS


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (kms("raise SystemExit(3)"), "ended with 3"),
        (kms("pass"), "answered nothing"),
        ("sh -c cat", "answered with the key itself"),
        ("sh -c 'echo key:; cat'", "answered with the key itself"),
        ("sh -c 'cat >/dev/null; echo done'", "answered with another key"),
        (kms(f"print(8 * {MAX_WRAPPED_BYTES} * chr(65))"), "more than"),
        ("/nonexistent/kms", "could not be started"),
    ],
)
async def test_a_kms_that_fails_is_named_with_what_it_did(command: str, said: str) -> None:
    with pytest.raises(KeyUnavailable, match=said):
        await ArtifactKeys(None, command).new_cipher(PLACE, "process")


async def test_all_that_a_kms_has_started_ends_when_it_takes_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(snapshot_keys, "KMS_S", 0.2)
    keys = ArtifactKeys(None, "sh -c 'sleep 60 | cat'")
    async with asyncio.timeout(20):
        with pytest.raises(KeyUnavailable, match="took longer"):
            await keys.new_cipher(PLACE, "process")


def test_a_command_that_is_no_command_line_is_refused_and_not_shown() -> None:
    with pytest.raises(InvalidInput, match="SNAPBACK_KMS_COMMAND") as refused:
        ArtifactKeys(None, "kms --token s3cret 'wrap")
    assert "s3cret" not in str(refused.value)
