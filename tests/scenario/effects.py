"""What a file operation changed and a crash may still take back.

An image maps inode numbers to contents: a bytearray is a file, a dict of names to inode numbers is
a directory. `undo` and `redo` put changed copies into the image and leave the objects that were
there as they are, so that images may share them.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import NamedTuple

BLOCK = 4096

Content = bytearray | dict[str, int]
Image = dict[int, Content]


class Kept(NamedTuple):
    """How much of an effect survives: the first `upto` bytes, without the `missing` blocks.

    What is missing of a range that was new reads as zeros, else as before. Effects that are no
    writes survive as a whole (`upto` above 0) or not at all.
    """

    upto: int
    missing: frozenset[int] = frozenset()


LOST = Kept(0)
WHOLE = Kept(2**63)


class Effect:
    """What a machine did to a file, or to the names of a directory."""

    __slots__ = ("inode", "machine")

    def __init__(self, machine: str, inode: int) -> None:
        self.machine, self.inode = machine, inode

    def holders(self) -> set[int]:
        """Give the inodes whose fsync makes it durable."""
        return {self.inode}

    def inodes(self) -> set[int]:
        return {self.inode}

    def note(self, data: bytearray) -> None:
        """Remember what of a file it replaces."""

    def rebase(self, image: Image) -> None:
        """Take what is in the image for what was there before."""
        self.note(_file(image, self.inode))

    def undo(self, image: Image) -> None:
        """Take it back."""

    def redo(self, image: Image, kept: Kept) -> None:
        raise NotImplementedError

    def damages(self) -> list[Kept]:
        """Give the ways to keep a part that an exhaustive search tries."""
        return []

    def any_damage(self, rng: Random) -> Kept:
        return rng.choice((LOST, WHOLE))


class Write(Effect):
    """`new` went to `offset` of a file that had `old_size` bytes, over the bytes `old`."""

    __slots__ = ("new", "offset", "old", "old_size")

    def __init__(self, machine: str, inode: int, offset: int, data: bytearray, new: bytes) -> None:
        super().__init__(machine, inode)
        self.offset, self.new = offset, new
        self.note(data)

    def note(self, data: bytearray) -> None:
        self.old_size = len(data)
        self.old = bytes(data[self.offset : self.offset + len(self.new)])

    def undo(self, image: Image) -> None:
        data = bytearray(_file(image, self.inode))
        data[self.offset : self.offset + len(self.old)] = self.old
        del data[self.old_size :]
        image[self.inode] = data

    def redo(self, image: Image, kept: Kept) -> None:
        if not kept.upto:
            return
        data = bytearray(_file(image, self.inode))
        end = self.offset + min(kept.upto, len(self.new))
        data.extend(bytes(max(0, end - len(data))))
        for start, stop in _runs(self.offset, end, kept.missing):
            data[start:stop] = self.new[start - self.offset : stop - self.offset]
        image[self.inode] = data

    def damages(self) -> list[Kept]:
        size, first = len(self.new), self.offset // BLOCK
        blocks = range(first, -(-(self.offset + size) // BLOCK))
        cuts = {1, size // 2, size - 1, (first + 1) * BLOCK - self.offset}
        found = [Kept(cut) for cut in sorted(cuts) if 0 < cut < size]
        found.append(Kept(size, frozenset(blocks)))
        if len(blocks) > 1:
            found += [Kept(size, frozenset({blocks[0]})), Kept(size, frozenset({blocks[-1]}))]
        return found

    def any_damage(self, rng: Random) -> Kept:
        size = len(self.new)
        if not size or rng.random() < 0.5:
            return Kept(rng.randint(0, size))
        blocks = range(self.offset // BLOCK, -(-(self.offset + size) // BLOCK))
        return Kept(size, frozenset(block for block in blocks if rng.random() < 0.5))


class Resize(Effect):
    """A file of `old_size` bytes was given `size`; `tail` is what that cut off."""

    __slots__ = ("old_size", "size", "tail")

    def __init__(self, machine: str, inode: int, data: bytearray, size: int) -> None:
        super().__init__(machine, inode)
        self.size = size
        self.note(data)

    def note(self, data: bytearray) -> None:
        self.old_size, self.tail = len(data), bytes(data[self.size :])

    def undo(self, image: Image) -> None:
        image[self.inode] = bytearray(_file(image, self.inode)[: self.old_size]) + self.tail

    def redo(self, image: Image, kept: Kept) -> None:
        if kept.upto:
            data = bytearray(_file(image, self.inode)[: self.size])
            image[self.inode] = data + bytes(self.size - len(data))


class Doubt(Effect):
    """Bytes of a file whose fsync failed: the cache shows them, the disk may hold zeros."""

    __slots__ = ("start", "stop")

    def __init__(self, machine: str, inode: int, start: int, stop: int) -> None:
        super().__init__(machine, inode)
        self.start, self.stop = start, stop

    def redo(self, image: Image, kept: Kept) -> None:
        if not kept.upto:
            data = bytearray(_file(image, self.inode))
            stop = min(self.stop, len(data))
            data[self.start : stop] = bytes(max(0, stop - self.start))
            image[self.inode] = data


class Change(NamedTuple):
    """In a directory a name went from one inode to another; None is no entry."""

    directory: int
    name: str
    before: int | None
    after: int | None


class Entries(Effect):
    """Names that changed together: one for a creation or removal, two for a rename."""

    __slots__ = ("changes",)

    def __init__(self, machine: str, changes: tuple[Change, ...]) -> None:
        super().__init__(machine, changes[0].directory)
        self.changes = changes

    def holders(self) -> set[int]:
        return {change.directory for change in self.changes}

    def inodes(self) -> set[int]:
        return {n for change in self.changes for n in (change.before, change.after) if n} | (
            self.holders()
        )

    def rebase(self, image: Image) -> None:
        self.changes = tuple(
            change._replace(before=_names(image, change.directory).get(change.name))
            for change in self.changes
        )

    def undo(self, image: Image) -> None:
        for change in reversed(self.changes):
            _enter(image, change.directory, change.name, change.before)

    def redo(self, image: Image, kept: Kept) -> None:
        if kept.upto:
            for change in self.changes:
                _enter(image, change.directory, change.name, change.after)


def minus(
    ranges: list[tuple[int, int]], start: int, stop: int
) -> tuple[list[tuple[int, int]], int]:
    """Take [start, stop) out of disjoint ranges; also give how many bytes went."""
    left: list[tuple[int, int]] = []
    gone = 0
    for first, last in ranges:
        inside = max(0, min(last, stop) - max(first, start))
        gone += inside
        if not inside:
            left.append((first, last))
            continue
        left += [(a, b) for a, b in ((first, start), (stop, last)) if a < b]
    return left, gone


def reachable(image: Image, root: int) -> Iterator[tuple[str, Content]]:
    """Walk an image from its root directory: every path with what stands there."""
    todo = [("", root)]
    while todo:
        path, number = todo.pop()
        content = image[number]
        yield path, content
        if isinstance(content, dict):
            todo += [(f"{path}/{name}", child) for name, child in content.items()]


def _file(image: Image, inode: int) -> bytearray:
    content = image[inode]
    assert isinstance(content, bytearray)
    return content


def _names(image: Image, inode: int) -> dict[str, int]:
    content = image[inode]
    assert isinstance(content, dict)
    return content


def _enter(image: Image, directory: int, name: str, inode: int | None) -> None:
    names = dict(_names(image, directory))
    if inode is None:
        names.pop(name, None)
    elif inode in image:
        names[name] = inode
    image[directory] = names


def _runs(start: int, end: int, missing: frozenset[int]) -> Iterator[tuple[int, int]]:
    if not missing:
        yield start, end
        return
    for block in range(start // BLOCK, -(-end // BLOCK)):
        if block not in missing:
            yield max(start, block * BLOCK), min(end, (block + 1) * BLOCK)
