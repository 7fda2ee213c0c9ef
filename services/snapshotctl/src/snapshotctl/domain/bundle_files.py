"""The files of a bundle for a bug report, without secrets.

Values of environment variables never go in. What looks like a key is taken out of every text,
logs included, and so is every secret of the environment of a pod.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from snapshot_api import redaction
from snapshot_api.redaction import REDACTED, names_secret
from snapshotctl.domain.exits import WrongArguments

LOG_BYTES = 2 * 1024 * 1024
"""How much of the end of each log is taken."""
MIN_SECRET = 6
"""A shorter value may be an ordinary word of a log."""
SUFFIXES = (".tar.gz", ".tgz")

_SEED = re.compile(rb"S[ACNOUX][A-Z2-7]{56}")
_PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*-----", re.DOTALL)
_LOGIN = re.compile(rb"(?<=://)[^/@\s\"']+(?=@)")
_BEARER = re.compile(rb"(?i)(?<=bearer )[\w.~+/-]{8,}=*")
_SETTINGS = ("SNAPBACK_", "NATS_", "XDG_", "OTEL_")


class BundleFile(NamedTuple):
    """One file of the bundle."""

    name: str
    data: bytes


class Missing(NamedTuple):
    """What could not be read, and why."""

    what: str
    why: str


def file_name(text: str | None, stamp: str) -> str:
    """Return the path of the bundle. WrongArguments unless it is that of a compressed archive."""
    if text is None:
        return f"snapback-bundle-{stamp}.tar.gz"
    if not text.endswith(SUFFIXES):
        raise WrongArguments(
            f"--file {text!r} is not the name of a bundle",
            next_step="name a file that ends with .tar.gz",
        )
    return text


def secrets_in(value: Any) -> frozenset[str]:
    """Return the secrets of an object that are long enough to be found in a text."""
    return frozenset(found for found in redaction.secrets_in(value) if len(found) >= MIN_SECRET)


def scrubbed(data: bytes, secrets: Iterable[str]) -> bytes:
    """Return a text without keys, logins of addresses and known secrets."""
    replacement = REDACTED.encode()
    for pattern in (_PRIVATE_KEY, _SEED, _LOGIN, _BEARER):
        data = pattern.sub(replacement, data)
    # A secret that holds another one goes first, or a piece of it would stay.
    for secret in sorted(secrets, key=len, reverse=True):
        for written in (secret.encode(), msgspec.json.encode(secret)[1:-1]):
            data = data.replace(written, replacement)
    return data


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return our settings of an environment, without secrets."""
    return {
        name: REDACTED if names_secret(name) else value
        for name, value in sorted(environment.items())
        if name.startswith(_SETTINGS)
    }


def as_json(name: str, value: Any) -> BundleFile:
    """Return a value as an indented JSON file."""
    return BundleFile(name, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


def contents(members: Sequence[BundleFile], missing: Sequence[Missing], version: str) -> BundleFile:
    """Return the file that lists what the bundle holds, and what it lacks."""
    lines = [f"A bundle of snapshotctl {version}, for a bug report.", "", "It holds:"]
    lines += [f"  {member.name}  {len(member.data)} bytes" for member in members]
    if missing:
        lines += ["", "It lacks:", *(f"  {what}: {why}" for what, why in missing)]
    lines += ["", "Values of environment variables, keys and passwords were taken out.", ""]
    return BundleFile("README.txt", "\n".join(lines).encode())
