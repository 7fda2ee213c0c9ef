"""The keys of a node for artifacts, from a folder of files and from the command of a KMS.

The folder has `encryption.key`, which encrypts what is captured, and all `*.key` decrypt;
`signing.pem`, which signs; and `*.pub`, whose signatures are trusted. The former have 32 bytes,
which are in the file as they are, in hex or in base64; the others are PEM.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import shlex
import signal
import stat
import string
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key

from snapshot_shared.artifact import MAX_WRAPPED_BYTES, Encryption, PartManifest, part_path
from snapshot_shared.encrypting import (
    KEY_BYTES,
    NONCE_BYTES,
    PartCipher,
    check_data_key,
    key_id,
    unwrap,
    wrap,
)
from snapshot_shared.errors import InvalidInput, KeyUnavailable
from snapshot_shared.files import opened
from snapshot_shared.signing import Signing, name_of

T = TypeVar("T")

KMS = "kms"
"""The name of the key of a KMS."""

KMS_S = 10.0
"""How long the command of a KMS may take, in seconds."""

MAX_FILE_BYTES = 4096

_WRITING = "encryption.key"
_SIGNING = "signing.pem"
_HEX = frozenset(string.hexdigits.encode())
_MAKE = "see docs/how-to/encrypt-and-sign.md for how to make keys"
_SEE_LOG = "see what it says in the log of this service"
_ENCRYPT = "have `wrap` encrypt its input, and `unwrap` return it from that"

log = logging.getLogger(__name__)


class ArtifactKeys:
    """The keys of a node, as they were when this was made.

    An agent makes it at its start, a transfer process of GMS for each task.
    """

    def __init__(
        self, folder: Path | None, kms_command: str = "", *, require_signature: bool = False
    ) -> None:
        """Read the keys of a folder. InvalidInput names the file that is not as it should be.

        `kms_command` encrypts data keys where there is no `encryption.key`. It is called with
        `wrap` or `unwrap` as its last word, and turns its input into its output.
        """
        try:
            self._kms = shlex.split(kms_command)
        except ValueError as error:
            raise InvalidInput(
                # Not its value, which may have a token in it.
                f"SNAPBACK_KMS_COMMAND is no command line: {error}",
                next_step="quote its words as a shell has them",
            ) from error
        # A wrong path must not have everything written as it is.
        if folder is not None and not folder.is_dir():
            raise InvalidInput(
                f"SNAPBACK_ARTIFACT_KEYS={folder} is no folder",
                next_step="name the folder with the keys of artifacts, or unset it",
            )
        keys = dict(_read(folder, "*.key", _symmetric, private=True))
        self._by_id = {key_id(key): key for key in keys.values()}
        self._writing = keys.get(_WRITING)
        signing = dict(_read(folder, _SIGNING, _private, private=True)).get(_SIGNING)
        public = [key for _, key in _read(folder, "*.pub", _public, private=False)]
        if signing is not None:
            public.append(signing.public_key())
        self.signing = Signing(signing, {name_of(key): key for key in public}, require_signature)
        if folder is not None and not keys and not public:
            raise InvalidInput(
                f"SNAPBACK_ARTIFACT_KEYS={folder} has no key: no {_WRITING} or other *.key, no "
                f"{_SIGNING} and no *.pub",
                next_step=_MAKE,
            )
        if require_signature and not public:
            raise InvalidInput(
                "SNAPBACK_REQUIRE_SIGNATURE=1, and no signature would be trusted: there is no "
                f"{_SIGNING} and no *.pub in SNAPBACK_ARTIFACT_KEYS={folder or ''}",
                next_step="put the public key of each node that signs into that folder",
            )
        log.info(
            "artifacts are encrypted by key %s and signed by key %s; trusted are %s",
            key_id(self._writing) if self._writing else KMS if self._kms else "none",
            name_of(signing.public_key()) if signing else "none",
            ", ".join(self.signing.trusted) or "none",
        )

    @property
    def encrypts(self) -> bool:
        """Whether what is captured will be encrypted."""
        return self._writing is not None or bool(self._kms)

    def require_encryption(self, setting: str) -> None:
        """Raise InvalidInput when `setting` asks for encryption, and there is no key for it."""
        if not self.encrypts:
            raise InvalidInput(
                f"{setting}=1, and there is no {_WRITING} in the folder of SNAPBACK_ARTIFACT_KEYS "
                "and no SNAPBACK_KMS_COMMAND",
                next_step=f"{_MAKE}, or unset {setting}",
            )

    async def new_cipher(self, place: tuple[str, str, int], part: str) -> PartCipher | None:
        """Return a cipher for a new part; None where parts are not encrypted. KeyUnavailable."""
        data_key, path = os.urandom(KEY_BYTES), "/".join(part_path(*place, part))
        if self._writing is not None:
            name = key_id(self._writing)
            wrapped = wrap(self._writing, os.urandom(NONCE_BYTES), data_key, path)
        elif self._kms:
            name, wrapped = KMS, await self._wrapped_by_kms(data_key)
        else:
            return None
        return PartCipher(data_key, path, Encryption(key=name, data_key=wrapped))

    async def cipher_of(self, manifest: PartManifest) -> PartCipher | None:
        """Return the cipher of a part, None where it is not encrypted. KeyUnavailable."""
        if not manifest.encryption:
            return None
        place = (manifest.namespace, manifest.content_uid, manifest.generation)
        return await self.cipher_at(place, manifest.part, manifest.encryption)

    async def cipher_at(
        self, place: tuple[str, str, int], part: str, encryption: Encryption
    ) -> PartCipher:
        """Return the cipher of the part in a place. KeyUnavailable, ArtifactCorrupt."""
        path = "/".join(part_path(*place, part))
        if encryption.key == KMS and self._kms:
            found = await self._ask_kms("unwrap", encryption.data_key)
            return PartCipher(check_data_key(found, KMS), path, encryption)
        key = self._by_id.get(encryption.key)
        if key is None:
            known = [*self._by_id, *([KMS] if self._kms else [])]
            raise KeyUnavailable(
                f"part {part} is encrypted by key {encryption.key}; this node has "
                f"{', '.join(known) or 'no key'}",
                next_step="set SNAPBACK_KMS_COMMAND of this service"
                if encryption.key == KMS
                else "put that key as NAME.key into the folder of SNAPBACK_ARTIFACT_KEYS, and "
                "start this service again",
                expected=encryption.key,
                found=known,
            )
        return PartCipher(unwrap(key, encryption.data_key, path), path, encryption)

    async def _wrapped_by_kms(self, data_key: bytes) -> bytes:
        """Return a data key as the KMS wraps it. KeyUnavailable when it does not encrypt it.

        What cannot be unwrapped is found here, and not when the artifact is needed.
        """
        wrapped = await self._ask_kms("wrap", data_key)
        if data_key in wrapped:
            raise self._failed("wrap", "answered with the key itself", next_step=_ENCRYPT)
        if await self._ask_kms("unwrap", wrapped) != data_key:
            why = "answered with another key than it has wrapped"
            raise self._failed("unwrap", why, next_step=_ENCRYPT)
        return wrapped

    async def _ask_kms(self, verb: str, data: bytes) -> bytes:
        """Return what the command answers. KeyUnavailable when it fails, or takes too long."""
        try:
            process = await asyncio.create_subprocess_exec(
                *self._kms,
                verb,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                process_group=0,
            )
        except OSError as error:
            raise self._failed(verb, f"could not be started: {error}") from error
        try:
            async with asyncio.timeout(KMS_S):
                answer = await _exchanged(process, data)
                status = await process.wait()
        except TimeoutError as error:
            raise self._failed(verb, f"took longer than {KMS_S:g} s") from error
        except asyncio.LimitOverrunError as error:
            said = f"answered more than {MAX_WRAPPED_BYTES} bytes"
            raise self._failed(verb, said) from error
        finally:
            # With all that it has started: the wait ends when no process has its output open.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if status:
            raise self._failed(verb, f"ended with {status}")
        if not answer:
            raise self._failed(verb, "answered nothing")
        return answer

    def _failed(self, verb: str, why: str, *, next_step: str = _SEE_LOG) -> KeyUnavailable:
        return KeyUnavailable(
            f"the command of SNAPBACK_KMS_COMMAND, {self._kms[0]} … {verb}, {why}",
            next_step=next_step,
        )


async def _exchanged(process: asyncio.subprocess.Process, data: bytes) -> bytes:
    """Give a process its input and return its output. LimitOverrunError when that is too long."""
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None and stdout is not None  # noqa: S101, PT018 - both are pipes
    stdin.write(data)
    stdin.close()
    try:
        await stdout.readexactly(MAX_WRAPPED_BYTES + 1)
    except asyncio.IncompleteReadError as error:
        return error.partial
    raise asyncio.LimitOverrunError("too long", MAX_WRAPPED_BYTES)


def _private(data: bytes) -> Ed25519PrivateKey:
    key = load_pem_private_key(data, password=None)
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError("it is no private key of Ed25519")  # noqa: TRY004 - as other contents
    return key


def _public(data: bytes) -> Ed25519PublicKey:
    key = load_pem_public_key(data)
    if not isinstance(key, Ed25519PublicKey):
        raise ValueError("it is no public key of Ed25519")  # noqa: TRY004 - as other contents
    return key


def _read(
    folder: Path | None, pattern: str, decode: Callable[[bytes], T], *, private: bool
) -> Iterator[tuple[str, T]]:
    """Yield the keys of a folder by the names of their files."""
    for path in sorted(folder.glob(pattern)) if folder else ():
        try:
            yield path.name, decode(_contents(path, private=private))
        except (ValueError, TypeError, OSError, UnsupportedAlgorithm) as error:
            raise InvalidInput(
                f"{path}, in the folder of SNAPBACK_ARTIFACT_KEYS: {error}",
                next_step=_MAKE,
            ) from error


def _contents(path: Path, *, private: bool) -> bytes:
    """Return a file that others cannot change, nor read where it is `private`. ValueError."""
    # A link is followed, as the files of a Secret's volume are some.
    with opened(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)) as fd:
        found = os.fstat(fd)
        mode = stat.S_IMODE(found.st_mode)
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_FILE_BYTES:
            raise ValueError(f"it is no plain file of at most {MAX_FILE_BYTES} bytes")
        if found.st_uid not in (0, os.geteuid()):
            raise ValueError(f"it belongs to user {found.st_uid}, not {os.geteuid()} or 0")
        if mode & (0o077 if private else 0o022):
            wanted = "0600" if private else "0644"
            raise ValueError(f"it has mode {mode:04o}, which is wider than {wanted}")
        return os.read(fd, MAX_FILE_BYTES)


def _symmetric(data: bytes) -> bytes:
    if len(data) == KEY_BYTES:
        if _HEX.issuperset(data):
            raise ValueError(
                f"its {KEY_BYTES} bytes are {KEY_BYTES} digits in hex, half a key: a key has "
                f"{2 * KEY_BYTES} of them, or {KEY_BYTES} random bytes"
            )
        return data
    for decode in (bytes.fromhex, base64.b64decode):
        with suppress(ValueError):
            if len(key := decode(data.decode("ascii").strip())) == KEY_BYTES:
                return key
    raise ValueError(f"it holds no key of {KEY_BYTES} bytes, as they are, in hex or in base64")
