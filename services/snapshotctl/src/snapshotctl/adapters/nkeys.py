"""The seeds of users of NATS: each in a file of its owner; only its public key goes elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from snapshot_shared import nkey
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
    made = nkey.new_seed()
    replace_file(seed, made + b"\n")
    return nkey.public_key(made)


def _known(seed: Path) -> str:
    try:
        return nkey.public_key(seed.read_bytes().strip())
    except ValueError as error:
        raise InvalidInput(
            f"{seed} holds no nkey seed of a user",
            next_step="remove it, and another one is made",
            path=str(seed),
        ) from error
