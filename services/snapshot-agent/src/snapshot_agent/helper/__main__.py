"""The program of the container `helper`: one child for each request of the node's agent.

It serves a unix socket that only the agent's pod has, for root and its own user alone. It has no
key of NATS and no token of the Kubernetes API.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
from pathlib import Path
from typing import NoReturn

from snapshot_agent.adapters.guard import let_in
from snapshot_agent.domain import criu_gates
from snapshot_agent.domain import cuda as rules
from snapshot_agent.domain.criu_seen import SeenNode, shown
from snapshot_agent.domain.helping import (
    Done,
    DumpRequest,
    Failed,
    Inspect,
    Ping,
    Reply,
    RestoreRequest,
    Settle,
)
from snapshot_agent.helper import cuda_facts, cuda_worker, observe, seccomp
from snapshot_agent.helper.beneath import check_kernel
from snapshot_agent.helper.caller import Caller
from snapshot_agent.helper.children import remove_work_folders
from snapshot_agent.helper.dumping import Node, dump, inspect
from snapshot_agent.helper.restoring import restore
from snapshot_agent.helper.self_test import self_test
from snapshot_agent.helper.settling import Records
from snapshot_shared.errors import (
    Failure,
    Internal,
    InvalidMessage,
    NotEligible,
    SnapbackError,
)
from snapshot_shared.orders import ProfileName
from snapshot_shared.settings import Common, Folder, load
from snapshot_shared.telemetry import log_to_stderr

log = logging.getLogger(__name__)

SERVICE = "snap-helper"
_STOPS = (signal.SIGTERM, signal.SIGINT)


class HelperSettings(Common, frozen=True, kw_only=True):
    """The settings of a helper. `helper` is its socket.

    `criu` is the program, with `nft` beside it. `cgroup_dir` is where the cgroups of the node are.
    `scratch_dir` is the scratch folder of the node's agent, where it has one. `seccomp_dir` is the
    kubelet's folder of seccomp profiles, `seccomp_profile` the file there for workers of CRIU, and
    `seccomp_default` has /proc/self/status of a container that names no profile.
    """

    node: str
    helper: Path
    artifact_root: Folder
    criu: Path = Path("/opt/snapback/criu/criu")
    cgroup_dir: Path = Path("/sys/fs/cgroup")
    scratch_dir: Path | None = None
    seccomp_dir: Path | None = None
    seccomp_profile: ProfileName = criu_gates.SECCOMP_PROFILE
    seccomp_default: Path | None = None


class Helper:
    """The socket, and the children that carry out requests."""

    def __init__(self, settings: HelperSettings) -> None:
        """Settle what an earlier helper has left, and listen."""
        nft = settings.criu.with_name("nft")
        records = Records(settings.state_dir / "dumps", nft)
        self._node = Node(
            settings.criu,
            settings.artifact_root,
            settings.cgroup_dir,
            records,
            settings.scratch_dir,
        )
        self._name = settings.helper
        self._seccomp_profile = ""
        if settings.seccomp_dir is not None and settings.seccomp_profile:
            self._seccomp_profile = seccomp.install(
                settings.seccomp_dir, settings.seccomp_profile, settings.seccomp_default
            )
        self._settling = self._settle()
        settings.helper.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # It gets its name when it can be connected to.
        temporary = self._temporary()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(temporary))
        self._listener.listen(16)
        temporary.rename(settings.helper)
        # Guards that ask meanwhile are connected, and answered within the time that they wait.
        self._seen = observe.node(settings.criu)
        self._unfit = _unfit(self._seen, settings.criu, nft)

    def _temporary(self) -> Path:
        """Return a name beside that of the socket, which nothing has."""
        path = self._name.with_name(f".{self._name.name}")
        path.unlink(missing_ok=True)
        return path

    def serve(self) -> None:
        """Serve until SIGTERM; then end what is under way, for a killed CRIU breaks its worker."""
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        children: dict[int, int] = {}
        pid: int | None = self._settling
        try:
            while True:
                if pid is not None:
                    pidfd = os.pidfd_open(pid)
                    children[pidfd] = pid
                    poll.register(pidfd, select.POLLIN)
                # One at a time: another may have ended when this one is dealt with.
                fd = _first_ready(poll)
                if fd == self._listener.fileno():
                    pid = self._welcome()
                else:
                    poll.unregister(fd)
                    os.close(fd)
                    pid = self._reap(children.pop(fd))
        except KeyboardInterrupt:
            for child in children.values():
                os.kill(child, signal.SIGTERM)
            for child in children.values():
                os.waitpid(child, 0)
            self._leave()

    def _leave(self) -> None:
        """Settle what is left, and say so in the place of the socket.

        Agents and guards that would have it settled may ask later, and end a worker that no one
        answers for.
        """
        os.waitpid(self._settle(), 0)
        if self._node.records.is_empty():
            temporary = self._temporary()
            temporary.touch()
            temporary.rename(self._name)

    def _welcome(self) -> int | None:
        """Return the pid of a child that carries out a request."""
        caller = let_in(self._listener)
        if caller is None:
            return None
        with caller:
            child = os.fork()
            if child == 0:
                self._child(caller)
        return child

    def _reap(self, pid: int) -> int | None:
        """Wait for a child that has ended; return that of another one if it was killed."""
        _, status = os.waitpid(pid, 0)
        return self._settle(pid) if status else None

    def _settle(self, of: int | None = None) -> int:
        """Settle what an earlier helper has left, or a child that was killed.

        In a child: to let a worker go may take long.
        """
        child = os.fork()
        if child == 0:
            try:
                _heed_stops()
                self._node.records.settle_all(of)
                remove_work_folders()
            except Exception:
                log.exception("what was left could not be settled")
            finally:
                os._exit(0)
        return child

    def _child(self, sock: socket.socket) -> NoReturn:
        try:
            self._listener.close()
            caller = Caller(sock)
            _heed_stops()
            caller.send(self._answer(caller))
        finally:
            os._exit(0)

    def _answer(self, caller: Caller) -> Reply:
        try:
            return self._done(caller)
        except SnapbackError as error:
            return Failed(failure=error.to_failure())
        except Exception as error:
            log.exception("a request failed")
            return Failed(failure=Internal(f"{type(error).__name__}: {error}").to_failure())

    def _why_unfit(self, *, cuda: bool) -> Failure | None:
        try:
            if self._unfit is not None:
                raise self._unfit
            if cuda:
                cuda_worker.check_node()
        except SnapbackError as error:
            return error.to_failure()
        return None

    def _done(self, caller: Caller) -> Done:
        request, fds = caller.receive()
        match request:
            case Ping(cuda=cuda):
                return Done(
                    criu=shown(self._seen.criu or ()),
                    cuda_driver=rules.shown(cuda_facts.driver() or ()),
                    unfit=self._why_unfit(cuda=cuda),
                    seccomp_profile=self._seccomp_profile,
                )
            case Inspect():
                here = observe.node(self._node.criu)
                return Done(bytes=inspect(request, self._node, here, quiet=request.quiet).bytes)
            case DumpRequest():
                if len(fds) != 1:
                    raise InvalidMessage("a dump has one descriptor, of the part's directory")
                return Done(frozen_s=dump(request, fds[0], self._node, caller))
            case RestoreRequest():
                if len(fds) != 1:
                    raise InvalidMessage(
                        "a restore has one descriptor, of the socket of its verdict"
                    )
                # A restore that is cut costs the placeholder, and its agent waits for its end.
                caller.heed_no_stop()
                pid, start = restore(request, fds[0], self._node, caller)
                return Done(pid=pid, start=start)
            case Settle():
                return Done(ended=self._node.records.settle(request.pid, request.start))


def _first_ready(poll: select.poll) -> int:
    """Return the first descriptor that is readable. SIGTERM is heeded meanwhile alone.

    At another time it could come between the start of a child and the record of its pid.
    """
    try:
        _heed_stops()
        return poll.poll()[0][0]
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)


def _heed_stops() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)


def _unfit(seen: SeenNode, criu: Path, nft: Path) -> SnapbackError | None:
    """Return why nothing can be dumped or restored on this node, or None."""
    try:
        criu_gates.check_node(seen)
        if not os.access(nft, os.X_OK):
            # It opens the networks of workers whose dump was killed.
            raise NotEligible(
                f"{nft} is missing or no program",
                next_step=criu_gates.UPDATE_HELPER,
                expected=str(nft),
            )
        check_kernel()
        self_test(criu)
    except SnapbackError as error:
        log.warning("no worker of this node is dumped or restored: %s; %s", error, error.next_step)
        return error
    return None


def main() -> None:
    """Run the helper."""
    os.umask(0o077)
    settings = load(HelperSettings)
    log_to_stderr(SERVICE, settings.node, settings.log_level)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    helper = Helper(settings)
    log.info("the helper serves at %s", settings.helper)
    helper.serve()


if __name__ == "__main__":
    main()
