"""Nkeys (Ed25519): a seed in a file of its owner; only its public key goes elsewhere."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping
from pathlib import Path

import nkeys

from snapshot_shared.errors import InvalidInput
from snapshot_shared.permissions import User
from snapshotctl.adapters.folders import make_private, replace_file
from snapshotctl.domain.cluster import NatsServer, nats_configuration


def admit(configuration: Path, server: NatsServer, seeds: Mapping[User, Path]) -> None:
    """Write the configuration of a nats-server, with these users and no others.

    Seeds that are missing are made. InvalidInput when a file holds something else.
    """
    keys = [(user, public_key(seed)) for user, seed in seeds.items()]
    make_private(configuration.parent)
    replace_file(configuration, nats_configuration(server, keys).encode())


def public_key(seed: Path) -> str:
    """Return the public key of a user (`U...`), whose seed is made when there is none.

    The seed is made readable for its owner alone. InvalidInput when the file holds something else.
    """
    with contextlib.suppress(FileNotFoundError):
        # Before it is read: a seed that was copied may be readable for all.
        seed.chmod(0o600)
        return _known(seed)
    make_private(seed.parent)
    made = nkeys.encode_seed(secrets.token_bytes(32), prefix=nkeys.PREFIX_BYTE_USER)
    replace_file(seed, made + b"\n")
    return _public(made)


def _known(seed: Path) -> str:
    try:
        found = _public(seed.read_bytes().strip())
    except (nkeys.NkeysError, ValueError):
        found = ""
    if not found.startswith("U"):
        raise InvalidInput(
            f"{seed} holds no nkey seed of a user",
            next_step="remove it, and another one is made",
            path=str(seed),
        )
    return found


def _public(seed: bytes) -> str:
    pair = nkeys.from_seed(bytearray(seed))
    try:
        return str(pair.public_key.decode())
    finally:
        pair.wipe()
