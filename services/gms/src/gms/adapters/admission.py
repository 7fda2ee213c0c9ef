"""Who may connect to the lease socket, and how many at once: as the kernel names the other end."""

from __future__ import annotations

import array
import os
import socket
import struct
from collections import Counter
from dataclasses import dataclass, field

from snapshot_shared.errors import Forbidden, SnapbackError

_SO_PEERGROUPS = 59
_UCRED = struct.Struct("3i")
_GROUPS_BYTES = 1024
"""The most that Python reads of an option: 256 groups. Of who has more only the primary counts."""


@dataclass(frozen=True, kw_only=True)
class LeasePolicy:
    """Who may connect, and how many at once. Root and the server's own user always may.

    Besides those: members of `group`, also by a supplementary group.
    A session counts for its user until its process has ended or has said that nothing is mapped.
    `handshake_s` is how long a client may take to send Attach, `send_s` to read an answer.
    """

    group: int | None = None
    max_connections: int = 1024
    max_of_user: int = 512
    handshake_s: float = 2.0
    send_s: float = 10.0


class TooManySessions(SnapbackError):
    """The server serves as many clients as it may, in all or of this user."""

    retryable = True


@dataclass
class Admission:
    """Lets clients in and counts them. Each `enter` that returns needs one `leave`."""

    policy: LeasePolicy
    _of_user: Counter[int] = field(default_factory=Counter)

    def enter(self, sock: socket.socket, uid: int) -> None:
        """Count a client in. Forbidden, TooManySessions; then it does not count."""
        policy = self.policy
        if uid not in (0, os.geteuid()) and not self._in_group(sock):
            raise Forbidden(f"user {uid} may not use this GPU memory service", uid=uid)
        if self._of_user.total() >= policy.max_connections:
            raise TooManySessions(
                f"{policy.max_connections} clients are connected already",
                limit=policy.max_connections,
            )
        if self._of_user[uid] >= policy.max_of_user:
            raise TooManySessions(
                f"user {uid} has {policy.max_of_user} clients here already",
                limit=policy.max_of_user,
                uid=uid,
            )
        self._of_user[uid] += 1

    def leave(self, uid: int) -> None:
        """Count a client out."""
        self._of_user[uid] -= 1
        if not self._of_user[uid]:
            del self._of_user[uid]

    def _in_group(self, sock: socket.socket) -> bool:
        group = self.policy.group
        return group is not None and group in (credentials(sock)[2], *_groups(sock))


def credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Give pid, uid and primary gid of whoever connected."""
    pid, uid, gid = _UCRED.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    )
    return pid, uid, gid


def _groups(sock: socket.socket) -> list[int]:
    """Give the supplementary groups of whoever connected; none when they cannot be told."""
    found = array.array("I")
    try:
        found.frombytes(sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES))
    except OSError:
        return []
    return found.tolist()
