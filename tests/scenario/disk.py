"""A disk in memory that knows what a crash may leave of it.

`SimDisk` holds the files; `disk.os` and `disk.fcntl` look like those modules and may stand in for
them inside product modules. What is done shows at once to everybody, as in a page cache. It is
safe from power loss only after an fsync:

- file data by an fsync of the file. Until then each write may be kept, lost, cut short, or have
  blocks of 4 KiB that read as zeros (or as before, where bytes were overwritten);
- the name of a file or directory by an fsync of the directory that holds it. Until then each
  creation, link, rename and removal may be kept or lost, whatever became of the others and of the
  data. A rename is one change.

An fsync secures all that it sees, whichever machine wrote it. A failed fsync leaves the data in
the cache, but a later fsync that succeeds does not bring it to the disk. Modes are secure at once.

Databases of SQLite are real, in memory, and survive everything: SQLite has proofs of its own.
"""

from __future__ import annotations

import bisect
import errno
import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from tests.scenario import effects
from tests.scenario.sim_os import SimFcntl, SimOs, SimSqlite

ROOT = 1
WINDOW = 3


class Owner(NamedTuple):
    """Who makes a call. `machine` decides what a power loss concerns, both whose files close."""

    machine: str
    process: str


@dataclass(slots=True)
class Node:
    """What is known of an inode beside its content."""

    machine: str
    mode: int
    links: int = 0
    opens: int = 0
    locks: dict[int, int] = field(default_factory=dict)
    unsynced: list[int] = field(default_factory=list)
    """The numbers of its effects."""
    doubts: list[tuple[int, int]] = field(default_factory=list)
    holes: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class _Fault:
    operation: str
    nth: int
    times: int
    error: int
    machine: str | None


def _nobody() -> Owner:
    return Owner("machine", "process")


class SimDisk:
    """One file system, mounted at `mount`, which several machines may share."""

    def __init__(
        self,
        owner: Callable[[], Owner] = _nobody,
        *,
        mount: str = "/sim",
        image: effects.Image | None = None,
    ) -> None:
        self.owner = owner
        self.mount = mount
        self.image: effects.Image = {ROOT: {}} if image is None else image
        self.nodes: dict[int, Node] = {}
        self.capacity: int | None = None
        """Bytes of file data that fit, for everybody."""
        self.limits: dict[str, int] = {}
        """Bytes that a machine can still write, where that is less."""
        self.claimed: int | None = None
        """What the file system says is free, where that is not true for long."""
        self.refused: list[str] = []
        """The names of the files for which there was no room."""
        self.written = 0
        """The inode that was written last."""
        self.used = 0
        self.operations = 0
        """How many calls there have been."""
        self.gate: Callable[[str], None] | None = None
        """Is told each call before it takes effect, and may raise instead."""
        self.after: Callable[[str], None] | None = None
        """Is told each call that changed something or made it durable."""
        self.on_fsync: Callable[[], bool] | None = None
        """Says whether an fsync is to do anything."""
        self.on_misuse: Callable[[int], None] | None = None
        """Is told each descriptor that is used after its owner has closed it."""
        self._unsynced: dict[int, effects.Effect] = {}
        self._faults: list[_Fault] = []
        self._numbers = itertools.count(max(self.image) + 1)
        self._effects = itertools.count(1)
        self._take_stock()
        self.os = SimOs(self)
        self.fcntl = SimFcntl(self.os)
        self.modules = {"os": self.os, "fcntl": self.fcntl, "sqlite3": SimSqlite()}

    def _take_stock(self) -> None:
        """Count links and bytes, and forget what no name and no descriptor leads to."""
        links: dict[int, int] = {ROOT: 1}
        todo = [ROOT]
        while todo:
            content = self.image[todo.pop()]
            if isinstance(content, dict):
                for child in content.values():
                    if child not in links:
                        todo.append(child)
                    links[child] = links.get(child, 0) + 1
        held = {number for number, node in self.nodes.items() if node.opens}
        # What is still in doubt may bring it back.
        todo += [n for effect in self._unsynced.values() for n in effect.inodes() if n not in links]
        while todo:
            number = todo.pop()
            content = self.image.get(number)
            if number not in held and isinstance(content, dict):
                todo += content.values()
            held.add(number)
        self.image = {n: c for n, c in self.image.items() if n in links or n in held}
        old = self.nodes
        self.nodes = {}
        for number, content in self.image.items():
            node = old.get(number) or Node("", 0o700 if isinstance(content, dict) else 0o600)
            node.links = links.get(number, 0)
            self.nodes[number] = node
        self.used = sum(len(c) for c in self.image.values() if isinstance(c, bytearray))

    # Faults.

    def fail(
        self,
        operation: str,
        nth: int = 1,
        error: int = errno.EIO,
        *,
        machine: str | None = None,
        times: int = 1,
    ) -> None:
        """Let the `nth` call from now, and `times` in all, fail. 0 as error: half is transferred.

        `read`, `write` and `fsync` stand for all their kinds, else it is the name of the function.
        """
        self._faults.append(_Fault(operation, nth, times, error, machine))

    def heal(self) -> None:
        self._faults.clear()
        self.limits.clear()
        self.capacity = self.claimed = None

    def flip(self, path: str, bit: int) -> None:
        """Turn one bit of a file around, on the disk and in the cache."""
        content = self.image[self.os.find(path)]
        assert isinstance(content, bytearray)
        content[bit // 8] ^= 1 << bit % 8

    def begin(self, operation: str) -> int | None:
        """Count a call and let it fail if it is to. Gives a divisor where half is to be done."""
        self.operations += 1
        if self.gate:
            self.gate(operation)
        for fault in self._faults:
            if fault.operation != operation or fault.machine not in (None, self.owner()[0]):
                continue
            fault.nth -= 1
            if fault.nth > 0:
                continue
            fault.times -= 1
            if fault.times <= 0:
                self._faults.remove(fault)
            if fault.error:
                raise OSError(fault.error, os.strerror(fault.error))
            return 2
        return None

    # What the calls of an operating system come down to.

    def add(self, content: effects.Content, mode: int) -> int:
        """Make an inode that no name leads to yet."""
        number = next(self._numbers)
        self.image[number] = content
        self.nodes[number] = Node(self.owner()[0], mode)
        return number

    def enter(self, operation: str, *wanted: tuple[int, str, int | None]) -> None:
        """Change names together: (directory, name, inode or None)."""
        changes = tuple(
            effects.Change(directory, name, self.names(directory).get(name), inode)
            for directory, name, inode in wanted
        )
        self._record(effects.Entries(self.owner()[0], changes))
        for directory, name, before, after in changes:
            if after is None:
                del self.names(directory)[name]
            else:
                self.names(directory)[name] = after
                self.nodes[after].links += 1
            if before is not None:
                self.nodes[before].links -= 1
        for change in changes:
            if change.before is not None:
                self.release(change.before)
        self.tell(operation)

    def write(self, number: int, offset: int, new: bytes) -> int:
        """Write as much as there is room for, at least one byte. ENOSPC, EFBIG."""
        data, node = self.data(number), self.nodes[number]
        new = new[: self._room(number, offset, len(new))]
        stop = offset + len(new)
        self._record(effects.Write(self.owner()[0], number, offset, data, new))
        holes, filled = effects.minus(node.holes, offset, stop)
        node.holes, node.doubts = holes, effects.minus(node.doubts, offset, stop)[0]
        if offset > len(data):
            node.holes.append((len(data), offset))
            data.extend(bytes(offset - len(data)))
        self._take(filled + max(0, stop - len(data)))
        data[offset:stop] = new
        self.written = number
        self.tell("write")
        return len(new)

    def resize(self, number: int, size: int) -> None:
        """Cut a file, or add a hole to it."""
        data, node = self.data(number), self.nodes[number]
        if size == len(data):
            return
        self._record(effects.Resize(self.owner()[0], number, data, size))
        if size > len(data):
            node.holes.append((len(data), size))
            data.extend(bytes(size - len(data)))
        else:
            node.holes, empty = effects.minus(node.holes, size, len(data))
            node.doubts = effects.minus(node.doubts, size, len(data))[0]
            self._give_back(node, len(data) - size - empty)
            del data[size:]
        self.tell("ftruncate")

    def sync(self, number: int) -> None:
        """Secure an inode. EIO if that is to fail: what was written is then in doubt for good."""
        if self.on_fsync and not self.on_fsync():
            return
        node = self.nodes[number]
        try:
            self.begin("fsync")
        except OSError:
            self._spoil(node)
            raise
        for effect in node.unsynced:
            self._unsynced.pop(effect, None)
        node.unsynced.clear()
        self.tell("fsync")

    def sync_all(self) -> None:
        """Secure everything, as an operating system does when it has been idle for a while."""
        self._unsynced.clear()
        for node in self.nodes.values():
            node.unsynced.clear()
            node.doubts.clear()

    def _spoil(self, node: Node) -> None:
        for effect in node.unsynced:
            if isinstance(found := self._unsynced.get(effect), effects.Write):
                node.doubts.append((found.offset, found.offset + len(found.new)))
                del self._unsynced[effect]
        node.unsynced = [effect for effect in node.unsynced if effect in self._unsynced]

    def release(self, number: int) -> None:
        """Free the bytes of an inode that no name and no descriptor leads to any more."""
        node = self.nodes[number]
        if node.links or node.opens:
            return
        content = self.image[number]
        if isinstance(content, bytearray):
            self._give_back(node, len(content) - sum(b - a for a, b in node.holes))
            node.holes = [(0, len(content))]

    def names(self, number: int) -> dict[str, int]:
        content = self.image[number]
        if not isinstance(content, dict):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        return content

    def parent(self, number: int) -> int:
        """Give the directory that holds a directory; the root holds itself."""
        holders = (n for n, c in self.image.items() if isinstance(c, dict) and number in c.values())
        return next(holders, ROOT)

    def data(self, number: int) -> bytearray:
        content = self.image[number]
        if isinstance(content, bytearray):
            return content
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))

    def names_of(self, number: int) -> list[str]:
        folders = (content for content in self.image.values() if isinstance(content, dict))
        return [name for names in folders for name, child in names.items() if child == number]

    def free(self) -> int:
        """Give the bytes that the caller can still write."""
        if self.claimed is not None:
            return self.claimed
        return self._left()

    def _left(self) -> int:
        room = 2**40 if self.capacity is None else max(0, self.capacity - self.used)
        return min(room, self.limits.get(self.owner()[0], room))

    def tell_of_misuse(self, fd: int) -> None:
        if self.on_misuse:
            self.on_misuse(fd)

    def tell(self, operation: str) -> None:
        if self.after:
            self.after(operation)

    def _record(self, effect: effects.Effect) -> None:
        number = next(self._effects)
        self._unsynced[number] = effect
        for inode in effect.holders():
            self.nodes[inode].unsynced.append(number)

    def _room(self, number: int, offset: int, count: int) -> int:
        if self.capacity is None and not self.limits:
            return count
        node, size = self.nodes[number], len(self.data(number))

        def needed(length: int) -> int:
            return effects.minus(node.holes, offset, offset + length)[1] + max(
                0, offset + length - max(size, offset)
            )

        fits = bisect.bisect_right(range(count + 1), self._left(), key=needed) - 1
        if fits <= 0:
            self.refused += self.names_of(number)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return fits

    def _take(self, count: int) -> None:
        self.used += count
        if (machine := self.owner()[0]) in self.limits:
            self.limits[machine] -= count

    def _give_back(self, node: Node, count: int) -> None:
        self.used -= count
        if node.machine in self.limits:
            self.limits[node.machine] += count

    # Crashes.

    def process_died(self, owner: Owner) -> None:
        """Close the descriptors of a process and free its locks; what it wrote stays."""
        self.os.close_all(lambda found: found == owner)

    def power_lost(self, machine: str, rng: Random) -> None:
        """Replace what this machine did and nobody secured by one of the states it may leave."""
        self.os.close_all(lambda found: found[0] == machine)
        pending = self._in_doubt()
        image = self._base(pending)
        for effect in pending:
            if effect.machine == machine:
                effect.redo(image, _chosen(effect, rng))
            else:
                effect.rebase(image)
                effect.redo(image, effects.WHOLE)
        self._adopt(image, [effect for effect in pending if effect.machine != machine])

    def legal_states(self, seen: set[int] | None = None) -> Iterator[SimDisk]:
        """Give what a power loss of all machines may leave now, each different state once.

        The last `WINDOW` unsecured effects in every combination, with damage to one at a time;
        older ones all kept, all lost, cut off at one point, or one alone lost or kept. A state
        whose key is in `seen` is left out; the keys of the others are added.
        """
        pending = self._in_doubt()
        base = self._base(pending)
        seen = set() if seen is None else seen
        for choice in _choices(pending):
            image = dict(base)
            for effect, kept in zip(pending, choice, strict=True):
                effect.redo(image, kept)
            if (key := _key(image)) not in seen:
                seen.add(key)
                yield SimDisk(self.owner, mount=self.mount, image=_copied(image))

    def clone(self) -> SimDisk:
        """Give a disk with the same files, all of them secured."""
        return SimDisk(self.owner, mount=self.mount, image=_copied(self.image))

    def tree(self) -> dict[str, effects.Content]:
        """Give every path with its content; a directory's is empty."""
        found = effects.reachable(self.image, ROOT)
        return {path: {} if isinstance(c, dict) else c for path, c in found if path}

    def key(self) -> int:
        """Give a number that equal trees share."""
        return _key(self.image)

    def _in_doubt(self) -> list[effects.Effect]:
        """Give the effects in order; an unsecured write that a failed fsync spoilt comes first."""
        doubts = [
            effects.Doubt(node.machine, number, start, stop)
            for number, node in self.nodes.items()
            for start, stop in node.doubts
        ]
        return [*doubts, *self._unsynced.values()]

    def _base(self, pending: list[effects.Effect]) -> effects.Image:
        image = dict(self.image)
        for effect in reversed(pending):
            effect.undo(image)
        return image

    def _adopt(self, image: effects.Image, left: list[effects.Effect]) -> None:
        self.image = image
        self.sync_all()
        for effect in left:
            if isinstance(effect, effects.Doubt):
                self.nodes[effect.inode].doubts.append((effect.start, effect.stop))
            else:
                self._record(effect)
        self._take_stock()


def _chosen(effect: effects.Effect, rng: Random) -> effects.Kept:
    return rng.choice((effects.LOST, effects.WHOLE, None)) or effect.any_damage(rng)


def _choices(pending: list[effects.Effect]) -> Iterator[list[effects.Kept]]:
    count = len(pending)
    older = max(0, count - WINDOW)
    for rest in (effects.LOST, effects.WHOLE) if older else (effects.WHOLE,):
        for window in itertools.product((effects.WHOLE, effects.LOST), repeat=count - older):
            choice = [rest] * older + list(window)
            yield choice
            for index in range(older, count):
                for damage in pending[index].damages():
                    yield [*choice[:index], damage, *choice[index + 1 :]]
    for index in range(count):
        yield [effects.WHOLE] * index + [effects.LOST] * (count - index)
        yield [effects.WHOLE] * index + [effects.LOST] + [effects.WHOLE] * (count - index - 1)
        yield [effects.LOST] * index + [effects.WHOLE] + [effects.LOST] * (count - index - 1)
        for damage in pending[index].damages():
            yield [effects.WHOLE] * index + [damage] + [effects.WHOLE] * (count - index - 1)


def _key(image: effects.Image) -> int:
    return hash(
        frozenset(
            (path, bytes(content) if isinstance(content, bytearray) else None)
            for path, content in effects.reachable(image, ROOT)
        )
    )


def _copied(image: effects.Image) -> effects.Image:
    return {number: content.copy() for number, content in image.items()}
