"""Who may connect to the lease socket, and how many at once: as the kernel names the other end."""

from __future__ import annotations

import array
import os
import re
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from gms.domain.sessions import Peer
from gms.domain.shares import Shares
from snapback_client.frames import PROTOCOL_VERSIONS, Versions
from snapshot_shared.errors import Forbidden
from snapshot_shared.proc import stat_words

_SO_PEERGROUPS = 59
_UCRED = struct.Struct("3i")
_GROUPS_BYTES = 1024
"""The most that Python reads of an option: 256 groups. Of who has more only the primary counts."""

_POD = re.compile(r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12})\b")


@dataclass(frozen=True, kw_only=True)
class LeasePolicy:
    """Who may connect, and how many at once. Root and the server's own user always may.

    Besides those: members of `group`, also by a supplementary group.
    A session counts for its process, pod and user until the process has ended or has said that
    nothing is mapped.
    `handshake_s` is how long a client may take to send Attach, `send_s` to read an answer. In one
    turn of the event loop all of them together are answered for `turn_s`. `versions` are the lowest
    and the highest of the protocol that it speaks. The children of this process, and of `parents`,
    are transfers and have no share.
    """

    group: int | None = None
    max_connections: int = 1024
    max_of_user: int = 512
    max_of_pod: int = 256
    max_of_process: int = 128
    handshake_s: float = 2.0
    send_s: float = 10.0
    turn_s: float = 0.001
    versions: Versions = PROTOCOL_VERSIONS
    parents: tuple[int, ...] = ()


class Admission:
    """Admits clients and counts them. Each `enter` that returns needs one `leave`."""

    def __init__(self, policy: LeasePolicy) -> None:
        """Admit clients by a policy."""
        self.policy = policy
        limits = {
            "all": policy.max_connections,
            "user": policy.max_of_user,
            "pod": policy.max_of_pod,
            "process": policy.max_of_process,
        }
        self._shares = Shares(limits, "clients")

    def enter(self, sock: socket.socket, peer: Peer) -> None:
        """Count a client in. Forbidden, TooManySessions; then it does not count."""
        if peer.uid not in (0, os.geteuid()) and not self._in_group(sock):
            raise Forbidden(f"user {peer.uid} may not use this GPU memory service", uid=peer.uid)
        self._shares.check(peer)
        self._shares.add(peer)

    def leave(self, peer: Peer) -> None:
        """Count a client out."""
        self._shares.remove(peer)

    def _in_group(self, sock: socket.socket) -> bool:
        group = self.policy.group
        return group is not None and group in (credentials(sock)[2], *_groups(sock))


def peer_of(sock: socket.socket, policy: LeasePolicy) -> Peer:
    """Return who is at the other end; no pidfd is open yet."""
    pid, uid, _ = credentials(sock)
    is_ours = parent_of(pid) in (os.getpid(), *policy.parents)
    return Peer(pid=pid, uid=uid, has_pidfd=False, pod=pod_of(pid), is_ours=is_ours)


def credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Return pid, uid and primary gid of the peer."""
    pid, uid, gid = _UCRED.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    )
    return pid, uid, gid


def pod_of(pid: int) -> str:
    """Return the uid of the pod of a process, "" when it has none or cannot be seen."""
    return pod_in(_proc(pid, "cgroup"))


def pod_in(cgroup: str) -> str:
    """Return the uid of the pod that a control group belongs to, however it writes that."""
    found = _POD.search(cgroup)
    return found[1].replace("_", "-") if found else ""


def parent_of(pid: int) -> int:
    """Return the parent of a process, 0 when it cannot be seen."""
    line = _proc(pid, "stat").encode()
    return int(stat_words(line, f"/proc/{pid}/stat")[1]) if line else 0


def _proc(pid: int, what: str) -> str:
    """Return a file of /proc about a process; such a read waits for no disk."""
    try:
        return Path(f"/proc/{pid}/{what}").read_text(errors="replace")
    except OSError:
        return ""


def _groups(sock: socket.socket) -> list[int]:
    """Return the supplementary groups of the peer; none where the kernel does not say."""
    found = array.array("I")
    try:
        found.frombytes(sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES))
    except OSError:
        return []
    return found.tolist()
