"""What a restore changes in images of CRIU: names, addresses, connections, files and mounts.

Of a dump, how long its worker was stopped.

An image is a magic number of all images and one of its kind, then entries: a size and a message of
protocol buffers. Only the fields that are named here are read or changed; all others keep their
bytes, so that an image of a later CRIU goes through. The fields are named as in CRIU's images/.
"""

from __future__ import annotations

import stat
import struct
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import NamedTuple

from snapshot_shared.errors import ArtifactCorrupt, InvalidInput

FILES = "files.img"
"""The image of the open files of a worker."""

REMAPS = "remap-fpath.img"
"""The image that says what open files are unlinked."""

MAX_IMAGE_BYTES = 16 << 20
# Of `files.img`: the open files of a worker. Those of 100,000 sockets fill it.
MAX_ENTRIES = 1 << 17
# A message of the kinds below has half as many.
MAX_FIELDS = 64
MAX_HOST_BYTES = 64
KEPT_NAME_BYTES = 128
"""How much stays of the name of an unlinked file, of the 255 bytes that a name may have."""

# criu/include/magic.h
_COMMON_MAGIC = 0x54564319
_FILES_MAGIC = 0x56303138
_MOUNTS_MAGIC = 0x55563928
_REMAPS_MAGIC = 0x59133954
_UTSNS_MAGIC = 0x54473203
_SERVICE_MAGIC = 0x55105940
_STATS_MAGIC = 0x57093306

# The message utsns_entry of utsns.proto.
_NODENAME = 1

# The message file_entry of fdinfo.proto, and its enum fd_types.
_FILE_TYPE = 1
_FILE_REG = 3
_FILE_ISK = 4
_REG = 1
_INETSK = 4

# The message mnt_entry of mnt.proto.
_MOUNTPOINT = 7

# The message reg_file_entry of regfile.proto. Folders have it, too; their mode says so.
_REG_ID = 1
_REG_NAME = 6
_REG_MODE = 10

# The message remap_file_path_entry of remap-file-path.proto, and its enum remap_type.
_ORIGINAL_ID = 1
_REMAP_TYPE = 3
_GHOST = 1

# The message inet_sk_entry of sk-inet.proto.
_FAMILY = 3
_TYPE = 4
_PROTO = 5
_STATE = 6
_SRC_PORT = 7
_DST_PORT = 8
_SRC_ADDR = 11
_DST_ADDR = 12

# The messages stats_entry and dump_stats_entry of stats.proto; times in microseconds.
_DUMP_STATS = 1
_FREEZING_TIME = 1
_FROZEN_TIME = 2

# What the kernel calls them.
_AF_INET, _AF_INET6 = 2, 10
_SOCK_STREAM = 1
_IPPROTO_TCP = 6
_TCP_CLOSE, _TCP_LISTEN = 7, 10

# Wire types of protocol buffers, and the bytes of those that have a fixed size.
_VARINT, _BYTES = 0, 2
_FIXED = {1: 8, 5: 4}

_HEAD = struct.Struct("<II")
_SIZE = struct.Struct("<I")

# An address as CRIU keeps it: words of four bytes in the order of the network, read as this
# machine reads numbers.
_Words = tuple[int, ...]
# The words before an IPv4 address in the IPv6 address that stands for it (RFC 4291, 2.5.5.2).
_MAPPED: _Words = (0, 0, 0xFFFF0000)


class Readdressed(NamedTuple):
    """An image `files.img` for another pod.

    `moved` addresses were the source's, and `closed` connections had an end outside of the tree.
    """

    image: bytes
    moved: int
    closed: int


class _Field(NamedTuple):
    """One field of a message; `raw` is the whole of it, with its key."""

    number: int
    value: int | bytes
    raw: bytes


class _Socket(NamedTuple):
    """What is read of an `inet_sk_entry`."""

    is_tcp: bool
    state: int
    source: _Words
    source_port: int
    destination: _Words
    destination_port: int

    @property
    def connected(self) -> bool:
        # CRIU restores each TCP socket with a destination as a connection, half closed ones too.
        return self.is_tcp and self.state != _TCP_LISTEN and self.destination_port != 0

    @property
    def ends(self) -> tuple[_Words, int, _Words, int]:
        # An IPv6 socket may be the other end of an IPv4 socket.
        return (
            _unmapped(self.source),
            self.source_port,
            _unmapped(self.destination),
            self.destination_port,
        )

    @property
    def mirrored(self) -> tuple[_Words, int, _Words, int]:
        source, source_port, destination, destination_port = self.ends
        return destination, destination_port, source, source_port


def renamed(image: bytes, host: str) -> bytes:
    """Return an image `utsns-*.img` with the host name `host`.

    Raise InvalidInput if no host can have that name, ArtifactCorrupt if it is no such image.
    """
    name = host.encode(errors="surrogateescape")
    if not 0 < len(name) <= MAX_HOST_BYTES or b"\0" in name:
        raise InvalidInput(
            f"{host!r} is no host name of 1 to {MAX_HOST_BYTES} bytes", field="host", value=host
        )
    entries = list(_entries(image, "utsns", _UTSNS_MAGIC))
    if len(entries) != 1:
        raise _corrupt("utsns", f"it has {len(entries)} entries instead of one")
    fields = _fields(entries[0], "utsns")
    _bytes(fields, _NODENAME, "utsns")
    return _image(_UTSNS_MAGIC, [_rewritten(fields, {_NODENAME: [name]})])


def frozen_s(image: bytes) -> float:
    """Return for how many seconds a dump has stopped its processes, of its image `stats-dump`.

    Raise ArtifactCorrupt if it is no such image.
    """
    entries = list(_entries(image, "stats", _STATS_MAGIC, _SERVICE_MAGIC))
    if len(entries) != 1:
        raise _corrupt("stats", f"it has {len(entries)} entries instead of one")
    stats = _fields(_bytes(_fields(entries[0], "stats"), _DUMP_STATS, "stats"), "stats")
    return sum(_number(stats, each, "stats") for each in (_FREEZING_TIME, _FROZEN_TIME)) / 1e6


def readdressed(image: bytes, addresses: Mapping[str, str]) -> Readdressed:
    """Return an image `files.img` for a pod with other addresses, and what was changed.

    `addresses` are those of the target by those of the source, as text. An address of the source
    is replaced at either end of each IPv4 and IPv6 socket, also where it is an IPv4 address in an
    IPv6 one. Then each TCP connection whose other end is not in the image becomes a closed socket:
    the worker gets ENOTCONN when it uses it.

    Raise InvalidInput if a text is no address or a pair is of two families, ArtifactCorrupt if it
    is no such image.
    """
    changes = _changes(addresses)
    entries: list[bytes] = []
    connections: dict[int, _Socket] = {}
    moved = 0
    for number, entry in enumerate(_entries(image, "files", _FILES_MAGIC)):
        entries.append(entry)
        if (found := _socket(entry)) is None:
            continue
        new = {
            field: changes[words]
            for field, words in ((_SRC_ADDR, found.source), (_DST_ADDR, found.destination))
            if words in changes
        }
        if new:
            moved += len(new)
            entries[number] = _with_socket(entry, new)
            found = found._replace(
                source=new.get(_SRC_ADDR, found.source),
                destination=new.get(_DST_ADDR, found.destination),
            )
        if found.connected:
            connections[number] = found
    ends = {found.ends for found in connections.values()}
    closed = 0
    for number, found in connections.items():
        if found.mirrored not in ends:
            entries[number] = _closed(entries[number], found)
            closed += 1
    return Readdressed(_image(_FILES_MAGIC, entries), moved, closed)


def unlinked(image: bytes, remaps: bytes, suffix: str) -> bytes:
    """Return an image `files.img` in which the names of unlinked files end with `suffix`.

    CRIU makes such a file anew, in its folder and by its name, and unlinks it. Restores that share
    the folder and run at the same time would take each other's files. `remaps` is the image
    `remap-fpath.img`, which says what files are unlinked. Raise ArtifactCorrupt.
    """
    ghosts = set(_ghosts(remaps))
    entries = _entries(image, "files", _FILES_MAGIC)
    return _image(_FILES_MAGIC, [_marked(entry, ghosts, suffix) for entry in entries])


def open_below(image: bytes, remaps: bytes, folders: Collection[str]) -> list[str]:
    """Return the paths of open files below folders, without unlinked ones. ArtifactCorrupt.

    `image` is `files.img`; `remaps` is `remap-fpath.img`, or empty if nothing is unlinked.
    """
    heads = tuple(f"{folder.rstrip('/')}/".encode(errors="surrogateescape") for folder in folders)
    ghosts = set(_ghosts(remaps)) if remaps else set()
    found = []
    for entry in _entries(image, "files", _FILES_MAGIC):
        fields = _fields(entry, "files")
        if _number(fields, _FILE_TYPE, "files") != _REG:
            continue
        file = _fields(_bytes(fields, _FILE_REG, "files"), "files")
        is_folder = any(stat.S_ISDIR(mode) for mode in _numbers(file, _REG_MODE))
        if is_folder or _number(file, _REG_ID, "files") in ghosts:
            continue
        if (name := _bytes(file, _REG_NAME, "files")).startswith(heads):
            found.append(name.decode(errors="surrogateescape"))
    return found


def _ghosts(remaps: bytes) -> Iterator[int]:
    """Yield the ids of the unlinked files of an image `remap-fpath.img`."""
    for entry in _entries(remaps, "remap-fpath", _REMAPS_MAGIC):
        fields = _fields(entry, "remap-fpath")
        if _number(fields, _REMAP_TYPE, "remap-fpath") == _GHOST:
            yield _number(fields, _ORIGINAL_ID, "remap-fpath")


def _marked(entry: bytes, ghosts: set[int], suffix: str) -> bytes:
    fields = _fields(entry, "files")
    if _number(fields, _FILE_TYPE, "files") != _REG:
        return entry
    file = _fields(_bytes(fields, _FILE_REG, "files"), "files")
    if _number(file, _REG_ID, "files") not in ghosts:
        return entry
    folder, slash, name = _bytes(file, _REG_NAME, "files").rpartition(b"/")
    new = folder + slash + name[:KEPT_NAME_BYTES] + suffix.encode()
    return _rewritten(fields, {_FILE_REG: [_rewritten(file, {_REG_NAME: [new]})]})


def without_mounts(image: bytes, paths: Collection[str]) -> bytes:
    """Return an image `mountpoints-*.img` without the mounts at these paths. ArtifactCorrupt."""
    left_out = {path.encode(errors="surrogateescape") for path in paths}
    return _image(
        _MOUNTS_MAGIC,
        (
            entry
            for entry in _entries(image, "mountpoints", _MOUNTS_MAGIC)
            if _bytes(_fields(entry, "mountpoints"), _MOUNTPOINT, "mountpoints") not in left_out
        ),
    )


def mark_of(pid: int, start: int) -> str:
    """Return the suffix of the unlinked files that are made for a placeholder.

    `pid` and `start` are of no other process until the node starts again.
    """
    return f".{pid}-{start}"


def _changes(addresses: Mapping[str, str]) -> dict[_Words, _Words]:
    """Return what replaces which words."""
    changes: dict[_Words, _Words] = {}
    for source, target in addresses.items():
        old, new = _address(source), _address(target)
        if old.version != new.version:
            raise InvalidInput(
                f"{target} cannot stand for {source}: they are of two families",
                source=source,
                target=target,
            )
        changes[_words(old)] = _words(new)
        if old.version == 4:
            changes[_MAPPED + _words(old)] = _MAPPED + _words(new)
    return changes


def _address(text: str) -> IPv4Address | IPv6Address:
    try:
        return ip_address(text)
    except ValueError:
        raise InvalidInput(f"{text!r} is no IP address", value=text) from None


def _words(address: IPv4Address | IPv6Address) -> _Words:
    packed = address.packed
    return struct.unpack(f"<{len(packed) // 4}I", packed)


def _unmapped(words: _Words) -> _Words:
    return words[3:] if words[:3] == _MAPPED else words


def _closed(entry: bytes, found: _Socket) -> bytes:
    """Return the entry of a connection as one of a socket that was never connected.

    CRIU makes a bare socket of it and sets its options; it reads no tcp-stream-*.img, as those
    are of sockets with a destination port.
    """
    return _with_socket(
        entry,
        {
            _STATE: [_TCP_CLOSE],
            _SRC_PORT: [0],
            _DST_PORT: [0],
            _SRC_ADDR: [0] * len(found.source),
            _DST_ADDR: [0] * len(found.destination),
        },
    )


def _with_socket(entry: bytes, values: Mapping[int, Sequence[int]]) -> bytes:
    fields = _fields(entry, "files")
    socket = _rewritten(_fields(_bytes(fields, _FILE_ISK, "files"), "files"), values)
    return _rewritten(fields, {_FILE_ISK: [socket]})


def _socket(entry: bytes) -> _Socket | None:
    """Return the socket of an entry of `files.img`, None when it is another file."""
    fields = _fields(entry, "files")
    if _number(fields, _FILE_TYPE, "files") != _INETSK:
        return None
    socket = _fields(_bytes(fields, _FILE_ISK, "files"), "files")
    size = {_AF_INET: 1, _AF_INET6: 4}.get(_number(socket, _FAMILY, "files"))
    source, destination = _numbers(socket, _SRC_ADDR), _numbers(socket, _DST_ADDR)
    if size is None or len(source) != size or len(destination) != size:
        raise _corrupt("files", "the addresses of a socket do not fit its family")
    kind, protocol = _number(socket, _TYPE, "files"), _number(socket, _PROTO, "files")
    return _Socket(
        kind == _SOCK_STREAM and protocol == _IPPROTO_TCP,
        _number(socket, _STATE, "files"),
        source,
        _number(socket, _SRC_PORT, "files"),
        destination,
        _number(socket, _DST_PORT, "files"),
    )


def _entries(image: bytes, kind: str, magic: int, common: int = _COMMON_MAGIC) -> Iterator[bytes]:
    """Yield the messages of an image."""
    if len(image) > MAX_IMAGE_BYTES:
        raise _corrupt(kind, f"it has {len(image)} bytes, more than {MAX_IMAGE_BYTES}")
    if image[: _HEAD.size] != _HEAD.pack(common, magic):
        raise _corrupt(kind, "it does not begin as one")
    at = _HEAD.size
    count = 0
    while at < len(image):
        count += 1
        if count > MAX_ENTRIES:
            raise _corrupt(kind, f"it has more than {MAX_ENTRIES} entries")
        start = at + _SIZE.size
        if start > len(image):
            raise _corrupt(kind, "it ends within an entry")
        (size,) = _SIZE.unpack_from(image, at)
        at = start + size
        if at > len(image):
            raise _corrupt(kind, "it ends within an entry")
        yield image[start:at]


def _image(magic: int, entries: Iterable[bytes]) -> bytes:
    parts = [_HEAD.pack(_COMMON_MAGIC, magic)]
    for entry in entries:
        parts += [_SIZE.pack(len(entry)), entry]
    return b"".join(parts)


def _fields(message: bytes, kind: str) -> list[_Field]:
    """Return the fields of a message in their order; those of its own messages are bytes."""
    fields: list[_Field] = []
    at = 0
    while at < len(message):
        if len(fields) == MAX_FIELDS:
            raise _corrupt(kind, f"a message has more than {MAX_FIELDS} fields")
        start = at
        key, at = _varint(message, at, kind)
        number, wire = key >> 3, key & 7
        value: int | bytes
        if wire == _VARINT:
            value, at = _varint(message, at, kind)
        else:
            if wire == _BYTES:
                size, at = _varint(message, at, kind)
            elif (fixed := _FIXED.get(wire)) is not None:
                size = fixed
            else:
                raise _corrupt(kind, f"a field is of the unknown wire type {wire}")
            value = message[at : at + size]
            at += size
        if number == 0 or at > len(message):
            raise _corrupt(kind, "a message ends within a field")
        fields.append(_Field(number, value, message[start:at]))
    return fields


def _varint(message: bytes, at: int, kind: str) -> tuple[int, int]:
    """Return a number of up to 64 bits, and where it ends."""
    value = 0
    for place, byte in enumerate(message[at : at + 10]):
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            if value >> 64:
                break
            return value, at + place + 1
    raise _corrupt(kind, "a message has a number without an end")


def _only(fields: Sequence[_Field], number: int, kind: str) -> int | bytes:
    found = [field.value for field in fields if field.number == number]
    if len(found) != 1:
        raise _corrupt(kind, f"a message has field {number} {len(found)} times instead of once")
    return found[0]


def _number(fields: Sequence[_Field], number: int, kind: str) -> int:
    value = _only(fields, number, kind)
    if not isinstance(value, int) or value >> 32:
        raise _corrupt(kind, f"field {number} of a message is no number of 32 bits")
    return value


def _bytes(fields: Sequence[_Field], number: int, kind: str) -> bytes:
    value = _only(fields, number, kind)
    if not isinstance(value, bytes):
        raise _corrupt(kind, f"field {number} of a message is no string of bytes")
    return value


def _numbers(fields: Sequence[_Field], number: int) -> _Words:
    """Return the words of a repeated field, which CRIU does not pack."""
    values: list[int] = []
    for field in fields:
        if field.number == number:
            if not isinstance(field.value, int) or field.value >> 32:
                raise _corrupt("files", f"field {number} of a message is no number of 32 bits")
            values.append(field.value)
    return tuple(values)


def _rewritten(fields: Iterable[_Field], values: Mapping[int, Sequence[int | bytes]]) -> bytes:
    """Return a message in which the fields of a number have other values, as many as there were."""
    left = {number: iter(new) for number, new in values.items()}
    return b"".join(
        _encoded(field.number, next(left[field.number])) if field.number in left else field.raw
        for field in fields
    )


def _encoded(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return _encoded_varint(number << 3 | _VARINT) + _encoded_varint(value)
    return _encoded_varint(number << 3 | _BYTES) + _encoded_varint(len(value)) + value


def _encoded_varint(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _corrupt(kind: str, why: str) -> ArtifactCorrupt:
    return ArtifactCorrupt(f"the image {kind!r} of CRIU cannot be read: {why}", file=kind)
