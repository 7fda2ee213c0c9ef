"""How the files of a part are encrypted: segments of AES-256-GCM, each bound to its place.

A part has a data key of its own, and its manifest holds that key encrypted by a key of the node.
Each file is encrypted by a key that is derived (HKDF) from the data key, the place of the part and
the name of the file. It consists of segments of SEGMENT_BYTES with their tags, the last one
shorter, and there even where the file is empty. The nonce of a segment is its number and whether it
is the last. So none can be moved, within its file or to another one, and none left out at the end.
"""

from __future__ import annotations

import hashlib

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from snapshot_shared.artifact import Encryption
from snapshot_shared.errors import ArtifactCorrupt

KEY_BYTES = 32
NONCE_BYTES = 12
TAG_BYTES = 16
SEGMENT_BYTES = 1024 * 1024
"""The length of a segment with its tag."""

PLAIN_BYTES = SEGMENT_BYTES - TAG_BYTES
"""How many bytes of a file a segment holds."""

_DAMAGED = "restore another snapshot; this one is damaged"


class FileCipher:
    """Encrypts and decrypts one file of a part."""

    def __init__(self, data_key: bytes, part: str, name: str) -> None:
        """Use the data key of the part whose path below the artifact root is `part`."""
        self._name = name
        self._bound = f"snapback.v1.file\0{part}\0{name}".encode()
        derived = HKDF(algorithm=hashes.SHA256(), length=KEY_BYTES, salt=None, info=self._bound)
        self._cipher = AESGCM(derived.derive(data_key))

    def encrypt(self, number: int, data: memoryview, *, is_end: bool) -> bytes:
        """Return the segments from `number` on of some bytes of the file.

        With `is_end` they are its last ones; otherwise they are a multiple of PLAIN_BYTES.
        """
        starts = range(0, len(data), PLAIN_BYTES) or range(1)
        return b"".join(
            self._cipher.encrypt(
                _nonce(number + index, is_last=is_end and index == len(starts) - 1),
                data[start : start + PLAIN_BYTES],
                self._bound,
            )
            for index, start in enumerate(starts)
        )

    def decrypt(self, number: int, data: memoryview, *, is_end: bool) -> bytes:
        """Return what segments hold, of which the first is `number`.

        With `is_end` they end the file. ArtifactCorrupt names the first that is not as it was.
        """
        starts = range(0, len(data), SEGMENT_BYTES) or range(1)
        return b"".join(
            self._decrypted(
                number + index,
                data[start : start + SEGMENT_BYTES],
                is_last=is_end and index == len(starts) - 1,
            )
            for index, start in enumerate(starts)
        )

    def _decrypted(self, number: int, data: memoryview, *, is_last: bool) -> bytes:
        try:
            return self._cipher.decrypt(_nonce(number, is_last=is_last), data, self._bound)
        except InvalidTag:
            raise ArtifactCorrupt(
                f"{self._name}: segment {number} of {len(data)} bytes is not what was encrypted "
                "there",
                next_step=_DAMAGED,
                file=self._name,
                segment=number,
            ) from None


class PartCipher:
    """Encrypts and decrypts the files of one part. `encryption` is what its manifest says of it."""

    def __init__(self, data_key: bytes, part: str, encryption: Encryption) -> None:
        """Use the data key of the part whose path below the artifact root is `part`."""
        self.encryption = encryption
        self._data_key = data_key
        self._part = part

    def of(self, name: str) -> FileCipher:
        """Return the cipher of one file."""
        return FileCipher(self._data_key, self._part, name)


def _nonce(number: int, *, is_last: bool) -> bytes:
    return number.to_bytes(NONCE_BYTES - 1, "big") + bytes([is_last])


def key_id(key: bytes) -> str:
    """Return the name of a key, which says nothing of it."""
    return hashlib.sha256(b"snapback.v1.key-id\0" + key).hexdigest()[:16]


def wrap(key: bytes, nonce: bytes, data_key: bytes, part: str) -> bytes:
    """Return a data key as a manifest holds it. No nonce is used twice with one `key`."""
    return nonce + AESGCM(key).encrypt(nonce, data_key, _of_part(part))


def unwrap(key: bytes, wrapped: bytes, part: str) -> bytes:
    """Return the data key of a part. ArtifactCorrupt when it was not encrypted by `key` for it."""
    nonce, sealed = wrapped[:NONCE_BYTES], wrapped[NONCE_BYTES:]
    try:
        found = AESGCM(key).decrypt(nonce, sealed, _of_part(part))
    except (InvalidTag, ValueError):
        found = b""
    return check_data_key(found, key_id(key))


def check_data_key(found: bytes, key: str) -> bytes:
    """Return what the key of this name has decrypted. ArtifactCorrupt unless it is a data key."""
    if len(found) != KEY_BYTES:
        raise ArtifactCorrupt(
            f"the part manifest has no data key that key {key} has encrypted for this part",
            next_step=_DAMAGED,
            field="encryption",
            key=key,
        )
    return found


def _of_part(part: str) -> bytes:
    return f"snapback.v1.data-key\0{part}".encode()
