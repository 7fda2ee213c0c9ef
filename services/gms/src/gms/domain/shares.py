"""How much of what all share one may hold: a process, a pod, a user, and all together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from gms.domain.sessions import Peer
from snapshot_shared.errors import SnapbackError


class TooManySessions(SnapbackError):
    """The server serves as many clients as it may, in all or of one process, pod or user."""

    retryable = True


class Shares:
    """Counts what peers hold, one each. What the service itself has started always has room."""

    def __init__(self, limits: Mapping[str, int], what: str, peers: Iterable[Peer] = ()) -> None:
        """Limit what `all`, a `user`, a `pod` or a `process` holds; `peers` hold one already."""
        self._limits = limits
        self._what = what
        self._held: Counter[tuple[str, int | str]] = Counter()
        for peer in peers:
            self.add(peer)

    def check(self, peer: Peer) -> None:
        """Raise TooManySessions when a peer may not hold one more."""
        for kind, name in _counts_for(peer):
            limit = self._limits.get(kind)
            if limit is None or self._held[kind, name] < limit:
                continue
            of_all = kind == "all"
            raise TooManySessions(
                f"{limit} {self._what} are here already" + ("" if of_all else f" of {kind} {name}"),
                next_step="end some of them, then try again",
                limit=limit,
                **({} if of_all else {kind: name}),
            )

    def add(self, peer: Peer) -> None:
        """Count one more."""
        self._held.update(_counts_for(peer))

    def remove(self, peer: Peer) -> None:
        """Count one less."""
        for holder in _counts_for(peer):
            self._held[holder] -= 1
            if not self._held[holder]:
                del self._held[holder]


def _counts_for(peer: Peer) -> list[tuple[str, int | str]]:
    """Return everybody whose share a peer takes; pid 0 is any process that we cannot see."""
    if peer.is_ours:
        return []
    found: list[tuple[str, int | str]] = [("all", ""), ("user", peer.uid)]
    if peer.pod:
        found.append(("pod", peer.pod))
    if peer.pid:
        found.append(("process", peer.pid))
    return found
