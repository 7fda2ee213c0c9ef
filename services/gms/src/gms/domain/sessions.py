"""Sessions, clients that wait for one, and the effects that the memory table returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from gms.domain.layout import Allocation, Layout
from gms.domain.locks import LOCKS, Lock, LockEvent, LockRequest, Use, lock_request_of
from snapback_client.frames import Access, Attach, GenerationRef, MemoryDomain
from snapshot_shared.errors import SnapbackError
from snapshot_shared.orders import LayoutRef


class Role(StrEnum):
    """What a session is for. SAVE reads under a fence, LOAD builds a hidden layout."""

    ENGINE = "engine"
    SAVE = "save"
    LOAD = "load"


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """The process at the other end of a socket, as the kernel names it.

    `has_pidfd`: its end can be seen. Without, the end of its socket has to do. `pod` is the uid of
    its pod, "" where it has none. `is_ours`: the service itself has started it, for a transfer.
    """

    pid: int
    uid: int
    has_pidfd: bool = True
    pod: str = ""
    is_ours: bool = False

    @property
    def owner(self) -> tuple[str | int, ...]:
        """Whose turn it takes: that of its pod, where it has one."""
        return (self.pod,) if self.pod else (self.uid, self.pid)

    def is_same(self, other: Peer) -> bool:
        """Whether both are one living process. Pid 0 is a process of another pid namespace."""
        return self.pid == other.pid != 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Waiter:
    """A client that asked for a lock. Its ticket becomes the number of its session."""

    ticket: int
    request: Attach
    peer: Peer

    @property
    def lock_request(self) -> LockRequest:
        """What it wants of the lock."""
        return lock_request_of(self.request.lock, replace=self.request.replace)


@dataclass(eq=False, kw_only=True, slots=True)
class Session:
    """A granted lock. `base` is what was committed when it was granted.

    `layout` is the one being written or read, None once it waits hidden.
    """

    id: int
    request: Attach
    peer: Peer
    use: Use
    role: Role
    layout: Layout | None
    base: LayoutRef | None
    imports: set[Allocation] = field(default_factory=set)

    @property
    def access(self) -> Access:
        """RW while it writes, RO once it reads."""
        return Access.RO if self.use is Use.READING else Access.RW

    @property
    def charged(self) -> int:
        """Bytes of what it writes: memory that no other session gives up."""
        return self.layout.charged if self.layout and self.use is not Use.READING else 0

    @property
    def name(self) -> str:
        """How a message names it."""
        return f"{self.request.client or 'unnamed client'} (pid {self.peer.pid})"


@dataclass(eq=False, slots=True)
class Room:
    """The lock, the sessions, the queue and the committed layout of one (device, domain).

    `vanished` writers linger: they ended without Detach, and their process may still write.
    """

    domain: MemoryDomain
    lock: Lock = Lock.EMPTY
    committed: Layout | None = None
    writer: Session | None = None
    readers: dict[int, Session] = field(default_factory=dict)
    queue: dict[int, Waiter] = field(default_factory=dict)
    replacers: set[int] = field(default_factory=set)
    vanished: dict[int, Session] = field(default_factory=dict)

    def move(self, event: LockEvent) -> None:
        """Take one step of the lock. InvalidTransition when the table has none."""
        self.lock = LOCKS.next(self.lock, event)

    @property
    def sessions(self) -> list[Session]:
        """Every session, the writer first."""
        return [*([self.writer] if self.writer else []), *self.readers.values()]

    @property
    def generation(self) -> GenerationRef | None:
        """The committed generation, None when there is none."""
        return self.committed.generation if self.committed else None

    def enqueue(self, waiter: Waiter) -> None:
        """Let a client wait."""
        self.queue[waiter.ticket] = waiter
        if waiter.lock_request is LockRequest.REPLACE:
            self.replacers.add(waiter.ticket)

    def dequeue(self, ticket: int) -> None:
        """Let a client wait no longer, if it does."""
        self.queue.pop(ticket, None)
        self.replacers.discard(ticket)

    @property
    def replacer_waits(self) -> bool:
        """Whether a writer waits for the readers to leave."""
        return bool(self.replacers)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hidden:
    """A loaded layout that waits to be published over `base`."""

    layout: Layout
    layout_id: str
    structure_hash: str
    base: GenerationRef | None


@dataclass(frozen=True, slots=True)
class Granted:
    """The client with this ticket holds its lock."""

    ticket: int
    session: Session


@dataclass(frozen=True, slots=True)
class Refused:
    """The client with this ticket will never get its lock."""

    ticket: int
    error: SnapbackError


@dataclass(frozen=True, slots=True)
class Freed:
    """Release these handles: no process can reach the memory any more."""

    device: str
    handles: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FenceHeld:
    """The fence is held: answer the request for it."""

    token: str
    vector: tuple[LayoutRef, ...]


@dataclass(frozen=True, slots=True)
class FenceEnded:
    """Forget the deadline of this fence."""

    token: str


Effect = Granted | Refused | Freed | FenceHeld | FenceEnded
