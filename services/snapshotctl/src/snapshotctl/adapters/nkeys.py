"""The configuration of a nats-server, from the seeds of its users in their files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from snapshot_shared.nkey import public_key
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
