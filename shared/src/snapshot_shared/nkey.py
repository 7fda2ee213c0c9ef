"""Nkeys (Ed25519) of users of NATS: a seed is a secret; its public key goes to the server."""

from __future__ import annotations

import secrets

import nkeys


def new_seed() -> bytes:
    """Return a new seed."""
    return bytes(nkeys.encode_seed(secrets.token_bytes(32), prefix=nkeys.PREFIX_BYTE_USER))


def public_key(seed: bytes) -> str:
    """Return the public key of a user (`U...`). ValueError for what is no seed of a user."""
    try:
        pair = nkeys.from_seed(bytearray(seed))
    except (nkeys.NkeysError, ValueError) as error:
        raise ValueError("no nkey seed") from error
    try:
        found = str(pair.public_key.decode())
    finally:
        pair.wipe()
    if not found.startswith("U"):
        raise ValueError("the nkey seed of something else than a user")
    return found
