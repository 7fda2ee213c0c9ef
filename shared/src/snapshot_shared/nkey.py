"""Nkeys (Ed25519) of users of NATS: a seed is a secret; its public key goes to the server.

As a program it makes the seeds of the services of a node, which never leave it, and prints their
public keys: `python -m snapshot_shared.nkey FOLDER SERVICE...`.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import sys
from pathlib import Path

import nkeys

from snapshot_shared.codec import encode_json
from snapshot_shared.errors import InvalidInput, SnapbackError
from snapshot_shared.files import make_folder, open_root, opened, write_replacing

SEED = "seed.nk"

_PUBLIC = re.compile(r"U[A-Z2-7]{55}")


def new_seed() -> bytes:
    """Return a new seed."""
    return bytes(nkeys.encode_seed(secrets.token_bytes(32), prefix=nkeys.PREFIX_BYTE_USER))


def public_half(seed: bytes) -> str:
    """Return the public key of a seed (`U...`). ValueError for what is no seed of a user."""
    try:
        pair = nkeys.from_seed(bytearray(seed))
    except (nkeys.NkeysError, ValueError) as error:
        raise ValueError("no nkey seed") from error
    try:
        found = str(pair.public_key.decode())
    finally:
        pair.wipe()
    if not is_public(found):
        raise ValueError("the nkey seed of something else than a user")
    return found


def is_public(key: str) -> bool:
    """Whether a text has the form of the public key of a user."""
    return _PUBLIC.fullmatch(key) is not None


def public_key(seed: Path) -> str:
    """Return the public key of the user whose seed is in a file, and is made when there is none.

    The seed is made readable for its owner alone. InvalidInput when the file holds something else.
    """
    with contextlib.suppress(FileNotFoundError):
        # Before it is read: a seed that was copied may be readable for all.
        seed.chmod(0o600)
        try:
            return public_half(seed.read_bytes().strip())
        except ValueError as error:
            raise InvalidInput(
                f"{seed} holds no nkey seed of a user",
                next_step="remove it, and another one is made",
                path=str(seed),
            ) from error
    if not seed.parent.is_dir():
        make_folder(seed.parent)
    made = new_seed()
    with opened(open_root(seed.parent)) as folder:
        write_replacing(folder, seed.name, made + b"\n")
    return public_half(made)


def main(words: list[str]) -> int:
    """Make FOLDER/SERVICE/seed.nk of each service, and print their public keys as JSON."""
    folder, *services = words
    try:
        keys = {service: public_key(Path(folder, service, SEED)) for service in services}
    except SnapbackError as error:
        sys.stderr.write(f"{error.to_failure()}\n")
        return 1
    sys.stdout.write(encode_json(keys).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
