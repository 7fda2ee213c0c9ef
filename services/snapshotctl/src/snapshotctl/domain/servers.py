"""The NATS server of a command, decided from its options and the environment.

Flags beat the environment. Then, in this order: NATS_URL, SNAPBACK_CLUSTER, NATS_CONTEXT, the
selected nats context, the local cluster `default`. A server that is named by its address is reached
with NATS_NKEY and NATS_CA, which the nats CLI reads as well, and NATS_INBOX_PREFIX, for which it
has the flag --inbox-prefix.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urlsplit

import msgspec

from snapshot_shared.errors import InvalidName
from snapshot_shared.ids import check_label
from snapshot_shared.permissions import User
from snapshotctl.domain.exits import WrongArguments

DEFAULT_CLUSTER = "default"
_LOOPBACK, _PORT = "127.0.0.1", 4222
MAX_CONTEXT_BYTES = 64 * 1024


class Server(NamedTuple):
    """Where to connect, and which option or variable named it.

    `credentials` is the path of an nkey seed, if one is needed, `inbox` the prefix of the subjects
    on which its user may receive answers, and `ca` a file with the certificates by which the server
    is known over TLS, if the system's are not enough. `cluster` is the local cluster that it is of.
    """

    url: str
    source: str
    credentials: str | None = None
    inbox: str = User("snapshotctl").inbox
    ca: Path | None = None
    cluster: str = ""


class ContextNamed(NamedTuple):
    """The server of a nats context."""

    name: str
    source: str


class ClusterNamed(NamedTuple):
    """The server of a local cluster."""

    name: str
    source: str


Choice = Server | ContextNamed | ClusterNamed


def choose(
    server: str | None, cluster: str | None, environment: Mapping[str, str], selected: str | None
) -> Choice:
    """Return the server, or where it is looked up. `selected` is the selected nats context."""
    if server:
        return _server(server, "--server", environment)
    if cluster:
        return ClusterNamed(cluster_name(cluster), "--cluster")
    if url := environment.get("NATS_URL"):
        return _server(url, "NATS_URL", environment)
    if name := environment.get("SNAPBACK_CLUSTER"):
        return ClusterNamed(cluster_name(name), "SNAPBACK_CLUSTER")
    if name := environment.get("NATS_CONTEXT"):
        return ContextNamed(name, "NATS_CONTEXT")
    if selected:
        return ContextNamed(selected, "the selected nats context")
    return ClusterNamed(DEFAULT_CLUSTER, "the default")


def _server(url: str, source: str, environment: Mapping[str, str]) -> Server:
    nkey = environment.get("NATS_NKEY") or None
    inbox = environment.get("NATS_INBOX_PREFIX") or User("snapshotctl").inbox
    return Server(address(url, source), source, nkey, inbox, _path(environment.get("NATS_CA")))


def address(text: str, source: str) -> str:
    """Return one address, or several with commas, as URLs. WrongArguments."""
    return ",".join(_one_address(part.strip(), source) for part in text.split(","))


def _one_address(text: str, source: str) -> str:
    url = text if "://" in text else f"nats://{text}"
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("nats", "tls", "ws", "wss") and bool(parts.hostname)
        _ = parts.port
    except ValueError:
        usable = False
    if not usable:
        raise WrongArguments(
            f"{source} {shown(text)!r} is not the address of a NATS server",
            next_step="write it as nats://127.0.0.1:4222, several with commas between them",
        )
    return url


def endpoints(url: str) -> set[tuple[str, int]]:
    """Return the hosts and ports of a URL of NATS, the same for each way to write them."""
    found = set()
    for one in url.split(","):
        parts = urlsplit(one)
        host = parts.hostname or ""
        found.add((_LOOPBACK if host == "localhost" else host, parts.port or _PORT))
    return found


def cluster_name(text: str) -> str:
    """Return the name of a local cluster, which is also that of its folder. WrongArguments."""
    try:
        return check_label(text)
    except InvalidName as error:
        raise WrongArguments(f"cluster: {error.message}", next_step=error.next_step) from error


class ContextFile(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a context file of the nats CLI that count here."""

    url: str = ""
    user: str = ""
    password: str = ""
    token: str = ""
    nkey: str = ""
    creds: str = ""
    inbox_prefix: str = ""
    ca: str = ""


def server_of_context(data: bytes, choice: ContextNamed) -> Server:
    """Return the server of a context file. WrongArguments when it cannot be used."""
    source = f"nats context {choice.name} ({choice.source})"
    try:
        found = msgspec.json.decode(data, type=ContextFile)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise WrongArguments(f"{source} cannot be read: {error}") from error
    if found.creds:
        raise WrongArguments(
            f"{source} uses a creds file, which is not supported",
            next_step="use a context with an nkey seed, or --server",
        )
    # A context may name several servers; any of them leads to the others.
    url = address(found.url.split(",")[0].strip() or "nats://127.0.0.1:4222", source)
    login = quote(found.token, safe="") or quote(found.user, safe="")
    if found.user and found.password:
        login += ":" + quote(found.password, safe="")
    if login and "@" not in url:
        scheme, _, rest = url.partition("://")
        url = f"{scheme}://{login}@{rest}"
    inbox = found.inbox_prefix or User("snapshotctl").inbox
    return Server(url, source, found.nkey or None, inbox, _path(found.ca))


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None


def shown(url: str) -> str:
    """Return a URL, or several with commas, without a password or token in it."""
    return ",".join(map(_one_shown, url.split(",")))


def _one_shown(url: str) -> str:
    scheme, mark, rest = url.rpartition("://")
    return f"{scheme}{mark}{rest.rpartition('@')[2]}"
