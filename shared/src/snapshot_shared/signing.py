"""Signatures of artifacts: Ed25519 over the digest of the root manifest.

The root manifest has the place of the artifact and the digests of all its parts, so a signature
holds for these bytes in this place, and for no other artifact.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from snapshot_shared.artifact import SIGNATURE, Signature
from snapshot_shared.errors import NotTrusted

_RESTORE_ANOTHER = "restore a snapshot that was taken with a trusted key"


class Signing(NamedTuple):
    """What a node signs with, whom it trusts, and whether it restores what is signed alone.

    `trusted` has public keys by their names, as `name_of` returns them.
    """

    key: Ed25519PrivateKey | None = None
    trusted: Mapping[str, Ed25519PublicKey] = {}
    required: bool = False

    def sign(self, root_digest: str) -> Signature | None:
        """Return the signature of this node over an artifact; None where it has no key."""
        if self.key is None:
            return None
        signed = self.key.sign(_message(root_digest))
        return Signature(key=name_of(self.key.public_key()), signature=signed)

    def check(self, found: Signature | None, root_digest: str) -> None:
        """Raise NotTrusted unless an artifact with this signature may be restored.

        One by a trusted key has to be right, whether it is required or not.
        """
        names = ", ".join(self.trusted) or "none"
        if found is None:
            if self.required:
                raise NotTrusted(
                    f"the artifact {root_digest} has no signature ({SIGNATURE}); this node wants "
                    f"one by a key that it trusts: {names}",
                    next_step=_RESTORE_ANOTHER,
                    expected=list(self.trusted),
                    found="",
                )
            return
        key = self.trusted.get(found.key)
        if key is None:
            if self.required:
                raise NotTrusted(
                    f"the artifact {root_digest} is signed by key {found.key}; this node trusts: "
                    f"{names}",
                    next_step=f"{_RESTORE_ANOTHER}, or add that key to the keys of this node",
                    expected=list(self.trusted),
                    found=found.key,
                )
            return
        try:
            key.verify(found.signature, _message(root_digest))
        except InvalidSignature:
            raise NotTrusted(
                f"the signature by key {found.key} is not of the artifact {root_digest}",
                next_step=_RESTORE_ANOTHER,
                expected=root_digest,
                found=found.key,
            ) from None


NO_SIGNATURES = Signing()
"""Of a node that signs nothing and restores everything."""


def name_of(key: Ed25519PublicKey) -> str:
    """Return the name of a public key: the beginning of its SHA-256."""
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()[:16]


def _message(root_digest: str) -> bytes:
    return f"snapback.v1.root_manifest\0{root_digest}".encode()
