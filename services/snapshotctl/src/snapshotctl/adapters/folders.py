"""The folders of local clusters and of nats contexts, and what is in them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from snapback_client.folders import check_folder
from snapshot_shared.errors import BusUnavailable, Conflict
from snapshotctl.adapters import processes
from snapshotctl.domain import cluster as plans
from snapshotctl.domain.cluster import ClusterPaths, ClusterRecord, Inventory
from snapshotctl.domain.exits import WrongArguments
from snapshotctl.domain.servers import (
    MAX_CONTEXT_BYTES,
    Choice,
    ClusterNamed,
    ContextNamed,
    Server,
    choose,
    endpoints,
    server_of_context,
)

_LOG_TAIL_BYTES = 8192
_LOG_TAIL_LINES = 12


class Folders:
    """The folders that the environment names."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Use XDG_STATE_HOME, XDG_CONFIG_HOME and XDG_RUNTIME_DIR of the environment."""
        self._environment = environment
        self.states = self._base("XDG_STATE_HOME", ".local/state") / "snapback"
        self.nats = self._base("XDG_CONFIG_HOME", ".config") / "nats"

    def _base(self, variable: str, below_home: str) -> Path:
        return self._given(variable) or Path.home() / below_home

    def _given(self, variable: str) -> Path | None:
        """Return the folder that a variable names. InvalidInput when services would refuse it."""
        value = self._environment.get(variable) or ""
        # The specification has relative values ignored.
        return Path(check_folder(variable, value)) if value.startswith("/") else None

    # Servers.

    def find_server(self, server: str | None, cluster: str | None) -> Server:
        """Return the server of a command. WrongArguments, BusUnavailable."""
        choice = choose(server, cluster, self._environment, self._selected_context())
        return self._resolve(choice)

    def _resolve(self, choice: Choice) -> Server:
        match choice:
            case Server():
                return choice if choice.credentials else self._with_key(choice)
            case ContextNamed(name, source):
                return server_of_context(self._context(name, source), choice)
            case ClusterNamed(name, source):
                record = self.record(name)
                if record is None or not record.url:
                    option = "" if name == "default" else f" --cluster {name}"
                    raise BusUnavailable(
                        f"no server was named, and there is no local cluster {name!r} ({source})",
                        next_step=plans.instead(self.names(only_running=True), "--cluster", option)
                        + "; or name a server with --server, NATS_URL or a nats context",
                    )
                return plans.server_of(record)

    def _with_key(self, server: Server) -> Server:
        """Return the server, with our key when it is that of a local cluster of this user."""
        record = self.record_at(server)
        if record is None:
            return server
        return server._replace(credentials=plans.server_of(record).credentials)

    def find_record(self, server: str | None, cluster: str | None) -> ClusterRecord | None:
        """Return the local cluster of a command, also when it is down; None for another server.

        WrongArguments, BusUnavailable where there is none.
        """
        choice = choose(server, cluster, self._environment, self._selected_context())
        if isinstance(choice, ClusterNamed) and (record := self.record(choice.name)) is not None:
            return record
        return self.record_at(self._resolve(choice))

    def record_at(self, server: Server) -> ClusterRecord | None:
        """Return the local cluster of this user whose bus has that address."""
        for state in self.states.iterdir() if self.states.is_dir() else ():
            record = read_record(state)
            if record and record.url and endpoints(record.url) & endpoints(server.url):
                return record
        return None

    def _selected_context(self) -> str | None:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            # The nats CLI keeps the name on one line.
            return (self.nats / "context.txt").read_text("utf-8").strip()[:128] or None
        return None

    def _context_file(self, name: str) -> Path:
        if not name or "/" in name or name in (".", "..") or "\0" in name:
            raise WrongArguments(f"{name!r} is not the name of a nats context")
        return self.nats / "context" / f"{name}.json"

    def _context(self, name: str, source: str) -> bytes:
        path = self._context_file(name)
        try:
            with path.open("rb") as file:
                return file.read(MAX_CONTEXT_BYTES)
        except OSError as error:
            raise WrongArguments(
                f"nats context {name!r} ({source}) cannot be read: {error.strerror}: {path}",
                next_step="list the contexts with: nats context ls",
            ) from error

    def write_context(self, record: ClusterRecord) -> str:
        """Write the context of a cluster for the nats CLI and return its name."""
        name = plans.CONTEXT_PREFIX + record.name
        server = plans.server_of(record)
        path = self._context_file(name)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        body = {
            "description": f"Snapback local cluster {record.name}",
            "url": server.url,
            "nkey": server.credentials,
            "inbox_prefix": server.inbox,
        }
        replace_file(path, msgspec.json.format(msgspec.json.encode(body), indent=2))
        return name

    def remove_context(self, cluster: str) -> None:
        """Remove the context of a cluster."""
        self._context_file(plans.CONTEXT_PREFIX + cluster).unlink(missing_ok=True)

    # Clusters.

    def state(self, name: str) -> Path:
        """Return the state folder of a cluster."""
        return self.states / name

    def record(self, name: str) -> ClusterRecord | None:
        """Return the record of a cluster; None when there is none."""
        return read_record(self.state(name))

    def names(self, *, only_running: bool = False) -> list[str]:
        """Return the names of the local clusters of this user, or of those that run."""
        states = sorted(self.states.iterdir()) if self.states.is_dir() else []
        records = [record for state in states if (record := read_record(state)) is not None]
        return [r.name for r in records if alive(r) or not only_running]

    def new_sockets(self) -> Path:
        """Create a private folder for sockets, with a short path, and return it."""
        runtime = self._given("XDG_RUNTIME_DIR")
        is_usable = (
            runtime is not None
            # mkdtemp adds a prefix and 8 random characters.
            and len(str(runtime)) < plans.MAX_SOCKET_FOLDER - 20
            and os.access(runtime, os.W_OK)
        )
        # mkdtemp makes it private.
        folder = runtime if runtime and is_usable else Path("/tmp")  # noqa: S108
        return Path(tempfile.mkdtemp(prefix=plans.SOCKETS_PREFIX, dir=folder))

    def inventory(self) -> Inventory:
        """Return everything that local clusters of this user have or left behind.

        Clusters of another XDG_STATE_HOME are known by their folders of sockets and by their
        processes.
        """
        sockets, members = list(self._socket_folders()), processes.members()
        states = set(self.states.iterdir() if self.states.is_dir() else [])
        elsewhere = {state for _, _, state in sockets if state is not None}
        elsewhere |= processes.state_folders(members)
        clusters: list[tuple[ClusterRecord, frozenset[int]]] = []
        broken: list[Path] = []
        owners: set[str] = set()
        for folder in sorted(states | elsewhere):
            record = read_record(folder)
            if record is None:
                # Without a record only a demo's folder is a leftover: `up` leaves logs behind.
                is_demo = folder in states and folder.name.startswith(plans.DEMO_PREFIX)
                broken += [folder] if is_demo else []
                continue
            clusters.append((record, alive(record)))
            if record.owner is not None and is_this_boot(record):
                owners.update({record.run} if processes.is_alive(record.owner) else ())
        marked = [(folder, run) for folder, run, _ in sockets]
        supervised = processes.supervised(members)
        return Inventory(clusters, frozenset(owners), members, marked, broken, supervised)

    def _socket_folders(self) -> Iterator[tuple[Path, str, Path | None]]:
        runtime = self._given("XDG_RUNTIME_DIR")
        bases = {Path("/tmp"), *([runtime] if runtime else [])}  # noqa: S108 - as above
        for base in sorted(bases):
            for folder in sorted(base.glob(f"{plans.SOCKETS_PREFIX}*")):
                marker = folder / plans.MARKER
                with contextlib.suppress(OSError, UnicodeDecodeError):
                    # /tmp is shared: a folder of another user may claim anything.
                    if marker.stat().st_uid == os.getuid():
                        run, _, state = marker.read_text("utf-8")[:4096].strip().partition("\n")
                        yield folder, run, Path(state) if state.startswith("/") else None


def make_private(folder: Path) -> None:
    """Create a folder and those that are missing above it, for its owner alone."""
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def mark(sockets: Path, run: str, state: Path) -> None:
    """Write the run and the state folder of a cluster into its folder of sockets."""
    (sockets / plans.MARKER).write_text(f"{run}\n{state}\n", "utf-8")


def read_record(state: Path) -> ClusterRecord | None:
    """Return `cluster.json` of a state folder; None when there is none that can be read."""
    try:
        with ClusterPaths(state, state).record.open("rb") as file:
            return msgspec.json.decode(file.read(plans.MAX_RECORD_BYTES), type=ClusterRecord)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def write_record(record: ClusterRecord) -> None:
    """Write `cluster.json` whole or not at all."""
    path = Path(record.state_dir) / plans.RECORD
    replace_file(path, msgspec.json.format(msgspec.json.encode(record), indent=2))


def is_this_boot(record: ClusterRecord) -> bool:
    """Whether a record is of this boot; pids of another one mean nothing."""
    return record.boot_id == processes.boot_id()


def alive(record: ClusterRecord) -> frozenset[int]:
    """Return the pids of a record's processes that run."""
    if not is_this_boot(record):
        return frozenset()
    return frozenset(found.pid for found in record.processes if processes.is_alive(found))


def remove(folder: Path) -> None:
    """Remove a folder; one that is gone already is no error."""
    shutil.rmtree(folder, ignore_errors=True)


def remove_sockets(folder: Path) -> None:
    """Remove a folder of sockets if it still has our marker."""
    if (folder / plans.MARKER).is_file():
        remove(folder)


def remove_half_made(state: Path, *, keep_logs: bool) -> None:
    """Remove the state of a first start that failed, but for its logs with `keep_logs`."""
    for entry in state.iterdir():
        if entry.is_dir():
            if entry.name != "logs" or not keep_logs:
                remove(entry)
        else:
            entry.unlink(missing_ok=True)
    if not keep_logs:
        remove(state)


@contextlib.contextmanager
def locked(state: Path) -> Iterator[None]:
    """Keep other commands from starting or stopping the same cluster for the block. Conflict."""
    # Not inherited, or the services that are started would hold the lock on.
    fd = os.open(state / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(
                f"another snapshotctl starts or stops the cluster in {state}",
                next_step="wait until it is done",
            ) from None
        yield
    finally:
        os.close(fd)


def log_tail(log: Path) -> list[str]:
    """Return the last lines of a log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
            return file.read().decode("utf-8", "replace").splitlines()[-_LOG_TAIL_LINES:]
    except OSError:
        return []


def replace_file(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, for its owner alone."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            # Before the rename, or a crash could leave the name on an empty file.
            os.fsync(fd)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
