"""How the files of a part are encrypted: by AES-256-GCM, and each piece bound to its place.

A part has a data key of its own, and its manifest holds that key encrypted by a key of the node.
Each file is encrypted by a key that is derived (HKDF) from the data key, the place of the part and
the name of the file. What the nonce is and where the tags are depends on the kind of the part.

A file of the process part consists of segments of SEGMENT_BYTES with their tags, the last one
shorter, and there even where the file is empty. The nonce of a segment is its number and whether it
is the last. So none can be moved, within its file or to another one, and none left out at the end.

The files of GPU memory are read and written past the page cache, in whole pages, and a killed save
goes on with them. So the tags are in the manifest, and each chunk has a nonce of its own there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NoReturn

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from msgspec.structs import replace

from snapshot_shared.artifact import Encryption, FileEncryption, FileEntry
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

    def chunks_of(self, name: str, size: int) -> ChunkCipher:
        """Return the cipher of the chunks of a file that is written into this part."""
        return ChunkCipher(self._data_key, self._part, name, size)

    def chunks_in(self, entry: FileEntry) -> ChunkCipher:
        """Return the cipher of a file of this part, also of one that is shared. ArtifactCorrupt."""
        key, part = self.origin_of(entry)
        return ChunkCipher(key, part, entry.name, entry.size)

    def shared_from(self, older: PartCipher, entry: FileEntry, nonce: bytes) -> FileEntry:
        """Return the entry that a file of an older part has in this part, with which it is shared.

        It keeps the key of the part in which it was written, which the key of this one encrypts.
        """
        key, part = older.origin_of(entry)
        found = entry.encryption
        assert found  # noqa: S101 - `origin_of` has refused any other
        wrapped = wrap(self._lending(entry.name), nonce, key, part)
        return replace(entry, encryption=FileEncryption(found.tags, part, wrapped))

    def origin_of(self, entry: FileEntry) -> tuple[bytes, str]:
        """Return the data key and the place of the part in which a file was written."""
        found = entry.encryption
        if not found:
            raise ArtifactCorrupt(
                f"{entry.name} is not encrypted, and its part is",
                next_step=_DAMAGED,
                file=entry.name,
            )
        if not found.part:
            return self._data_key, self._part
        return unwrap(self._lending(entry.name), found.data_key, found.part), found.part

    def _lending(self, name: str) -> bytes:
        """Return the key that encrypts those of other parts whose files are shared with this."""
        info = f"snapback.v1.shared\0{self._part}\0{name}".encode()
        derived = HKDF(algorithm=hashes.SHA256(), length=KEY_BYTES, salt=None, info=info)
        return derived.derive(self._data_key)


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


# The chunks of GPU memory.


class ChunkCipher:
    """Encrypts and decrypts the chunks of one file, none of which becomes longer by it.

    Their nonces and tags are in the manifest. Each is bound to its file, its place in it and the
    length of both. Chunks of zeros stay holes of the file and have a tag as well, which says so.
    """

    def __init__(self, data_key: bytes, part: str, name: str, size: int) -> None:
        """Use the data key of the part at `part`; the file has `size` bytes."""
        self._name = name
        self._bound = f"snapback.v1.chunk\0{part}\0{name}\0{size}".encode()
        derived = HKDF(algorithm=hashes.SHA256(), length=KEY_BYTES, salt=None, info=self._bound)
        self._key = derived.derive(data_key)

    def encrypt(
        self, index: int, pieces: Sequence[memoryview], into: memoryview, nonce: bytes
    ) -> bytes:
        """Encrypt the pieces of a chunk one after another into memory of their length.

        Return nonce and tag. A nonce must never be used for another content of the same file.
        """
        # The bytes of mapped memory have a byte order, which the casts below take off.
        encryptor = Cipher(algorithms.AES(self._key), modes.GCM(nonce)).encryptor()
        encryptor.authenticate_additional_data(self._place(index, len(into)))
        at = 0
        for piece in pieces:
            at += encryptor.update_into(piece.cast("B"), into[at : at + len(piece)])
        encryptor.finalize()
        return nonce + encryptor.tag

    def decrypt(
        self, index: int, data: memoryview, pieces: Sequence[memoryview], tag: bytes
    ) -> None:
        """Decrypt a chunk into its pieces, which hold nothing of use after ArtifactCorrupt."""
        nonce, proof = tag[:NONCE_BYTES], tag[NONCE_BYTES:]
        decryptor = Cipher(algorithms.AES(self._key), modes.GCM(nonce, proof)).decryptor()
        decryptor.authenticate_additional_data(self._place(index, len(data)))
        at = 0
        for piece in pieces:
            at += decryptor.update_into(data[at : at + len(piece)], piece.cast("B"))
        try:
            decryptor.finalize()
        except InvalidTag:
            self._refuse(index, len(data))

    def zeros(self, index: int, size: int, nonce: bytes) -> bytes:
        """Return nonce and tag of a chunk of zeros, which is not written."""
        return nonce + AESGCM(self._key).encrypt(nonce, b"", self._place(index, size, b"zeros"))

    def check_zeros(self, index: int, size: int, tag: bytes) -> None:
        """Raise ArtifactCorrupt unless a chunk was one of zeros when the part was written."""
        nonce, proof = tag[:NONCE_BYTES], tag[NONCE_BYTES:]
        try:
            AESGCM(self._key).decrypt(nonce, proof, self._place(index, size, b"zeros"))
        except InvalidTag:
            self._refuse(index, size)

    def _place(self, index: int, size: int, what: bytes = b"bytes") -> bytes:
        return self._bound + b"\0%d\0%d\0" % (index, size) + what

    def _refuse(self, index: int, size: int) -> NoReturn:
        raise ArtifactCorrupt(
            f"{self._name}: chunk {index} of {size} bytes is not what was encrypted there",
            next_step=_DAMAGED,
            file=self._name,
            chunk=index,
        ) from None
