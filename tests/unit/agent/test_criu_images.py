"""Images of CRIU are changed in the fields that a new pod needs, and in no other byte.

`data/criu` has images of a real dump, of the worker of tests/process/socket_worker.py. What they
should become is told by another reader and writer of protocol buffers, with all fields of CRIU.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given, settings
from hypothesis import strategies as st

from snapshot_agent.domain.criu_images import (
    MAX_ENTRIES,
    MAX_IMAGE_BYTES,
    Readdressed,
    frozen_s,
    open_below,
    readdressed,
    renamed,
    unlinked,
    without_mounts,
)
from snapshot_shared.errors import ArtifactCorrupt, InvalidInput
from tests.unit.tables import each

DATA = Path(__file__).parent / "data" / "criu"
FILES = (DATA / "files.img").read_bytes()
UTSNS = (DATA / "utsns.img").read_bytes()
STATS = (DATA / "stats-dump").read_bytes()
MOVED = {"10.77.0.1": "10.77.0.2", "fd77::1": "fd77::2"}

TCP, UDP = 6, 17
STREAM, DGRAM, RAW = 1, 2, 3
ESTABLISHED, CLOSE_WAIT, CLOSE, LISTEN = 1, 8, 7, 10

Field = descriptor_pb2.FieldDescriptorProto
INET_SK_ENTRY = (
    *("id", "ino", "family", "type", "proto", "state", "src_port", "dst_port", "flags", "backlog"),
    *("src_addr", "dst_addr", "fown", "opts", "v6only", "ip_opts", "ifname", "ns_id", "shutdown"),
    "tcp_opts",
)
OPAQUE = {"fown", "opts", "ip_opts", "ifname", "tcp_opts"}


def _classes() -> Mapping[str, Any]:
    """Return the messages of CRIU, of which those that nothing looks into are bytes."""
    file = descriptor_pb2.FileDescriptorProto(name="criu.proto", package="criu", syntax="proto2")
    entry = file.message_type.add(name="file_entry")
    for number in range(1, 23):
        kind = Field.TYPE_UINT32 if number < 3 else Field.TYPE_BYTES
        field = entry.field.add(name=f"field_{number}", number=number, type=kind, label=1)
        if number == 4:
            field.name, field.type, field.type_name = "isk", Field.TYPE_MESSAGE, ".criu.isk"
    regular = file.message_type.add(name="reg")
    regular.field.add(name="id", number=1, type=Field.TYPE_UINT32, label=1)
    regular.field.add(name="name", number=6, type=Field.TYPE_STRING, label=1)
    socket = file.message_type.add(name="isk")
    for number, name in enumerate(INET_SK_ENTRY, 1):
        kind = Field.TYPE_BYTES if name in OPAQUE else Field.TYPE_UINT32
        label = 3 if name.endswith("_addr") else 1
        socket.field.add(name=name, number=number, type=kind, label=label)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    names = ("file_entry", "isk", "reg")
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"criu.{name}"))
        for name in names
    }


CLASSES = _classes()


def entries_of(image: bytes) -> list[Any]:
    found, at = [], 8
    while at < len(image):
        (size,) = struct.unpack_from("<I", image, at)
        found.append(CLASSES["file_entry"].FromString(image[at + 4 : at + 4 + size]))
        at += 4 + size
    return found


def image_of(entries: Iterable[Any]) -> bytes:
    texts = [entry if isinstance(entry, bytes) else entry.SerializeToString() for entry in entries]
    return FILES[:8] + b"".join(struct.pack("<I", len(text)) + text for text in texts)


def words(address: str) -> list[int]:
    packed = ip_address(address).packed
    return list(struct.unpack(f"<{len(packed) // 4}I", packed))


def socket(
    source: str, destination: str, state: int = ESTABLISHED, proto: int = TCP, kind: int = STREAM
) -> Any:
    """Return the entry of a socket between two ends, such as `10.0.0.1 80` or `::1 80`."""
    (here, port), (there, other) = source.split(), destination.split()
    entry = CLASSES["file_entry"](field_1=4, field_2=1)
    values = {"family": 10 if ":" in here else 2, "type": kind, "proto": proto, "state": state}
    values |= {"id": 1, "ino": 2, "flags": 2, "backlog": 0}
    for name, value in values.items():
        setattr(entry.isk, name, value)
    entry.isk.src_port, entry.isk.dst_port = int(port), int(other)
    entry.isk.src_addr.extend(words(here))
    entry.isk.dst_addr.extend(words(there))
    entry.isk.fown, entry.isk.opts = b"\x08\x00", b"\x08\x80\x80\x01"
    return entry


def address_of(found: Sequence[int]) -> IPv4Address | IPv6Address:
    return ip_address(struct.pack(f"<{len(found)}I", *found))


def ends(entry: Any) -> str:
    """Return a socket as `10.0.0.1 80 > 10.0.0.2 4000 in state 1`."""
    isk = entry.isk
    source = f"{address_of(isk.src_addr)} {isk.src_port}"
    target = f"{address_of(isk.dst_addr)} {isk.dst_port}"
    return f"{source} > {target} in state {isk.state}"


def after(addresses: Mapping[str, str], *sockets: Any) -> list[str]:
    return [ends(entry) for entry in entries_of(readdressed(image_of(sockets), addresses).image)]


def test_only_the_host_name_of_a_real_image_is_another() -> None:
    assert b"\x0bsource-host" in UTSNS
    expected = UTSNS.replace(b"\x0bsource-host", b"\x06target")
    expected = expected[:8] + struct.pack("<I", len(expected) - 12) + expected[12:]
    assert renamed(UTSNS, "target") == expected
    assert renamed(expected, "source-host") == UTSNS


def remaps_of(*rows: tuple[int, int]) -> bytes:
    """Return an image of files that are found elsewhere: the id of each, and the type of remap."""
    head = struct.pack("<II", 0x54564319, 0x59133954)
    return head + b"".join(bytes([6, 0, 0, 0, 8, id_, 16, 1, 24, kind]) for id_, kind in rows)


def regular_file(entry: Any) -> Any:
    return CLASSES["reg"].FromString(entry.field_3)


def test_only_the_name_of_an_unlinked_file_of_a_real_image_is_another() -> None:
    before = entries_of(FILES)
    first, second = [entry for entry in before if entry.field_1 == 1][:2]
    gone, linked = regular_file(first), regular_file(second)
    after = entries_of(unlinked(FILES, remaps_of((gone.id, 1), (linked.id, 0)), ".12-34"))
    [(old, new)] = [pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]]
    gone.name += ".12-34"
    assert (old, regular_file(new)) == (first, gone)


def test_the_name_of_an_unlinked_file_stays_short_enough_for_a_folder() -> None:
    file = CLASSES["reg"](id=7, name=f"/data/{'x' * 255}")
    entry = CLASSES["file_entry"](field_1=1, field_2=7, field_3=file.SerializeToString())
    (found,) = entries_of(unlinked(image_of([entry]), remaps_of((7, 1)), ".12-34"))
    assert regular_file(found).name == f"/data/{'x' * 128}.12-34"


@pytest.mark.parametrize(
    ("folders", "found"),
    [
        (["/usr/lib/locale", "/dev/"], ["/usr/lib/locale/C.utf8/LC_CTYPE", "/dev/null"]),
        (["/usr/lib/loc", "/dev/null"], []),
        ([], []),
    ],
)
def test_open_files_below_a_folder_are_found_in_a_real_image(
    folders: list[str], found: list[str]
) -> None:
    assert open_below(FILES, b"", folders) == found


def test_neither_folders_nor_unlinked_files_are_found_below_a_folder() -> None:
    files = [regular_file(entry) for entry in entries_of(FILES) if entry.field_1 == 1]
    assert "/" in {file.name for file in files}
    linked, *unlinked = [file for file in files if file.name != "/"]
    remaps = remaps_of(*((file.id, 1) for file in unlinked), (linked.id, 0))
    assert open_below(FILES, remaps, ["/"]) == [linked.name]


def mounts_of(*paths: bytes) -> bytes:
    head = struct.pack("<II", 0x54564319, 0x55563928)
    texts = [bytes([16, 5, 58, len(path)]) + path for path in paths]
    return head + b"".join(struct.pack("<I", len(text)) + text for text in texts)


def test_mounts_are_left_out_by_their_paths() -> None:
    image = mounts_of(b"/", b"/data", b"/data/deep", b"/data")
    assert without_mounts(image, {"/data", "/nowhere"}) == mounts_of(b"/", b"/data/deep")
    with pytest.raises(ArtifactCorrupt, match="mountpoints"):
        without_mounts(FILES, {"/data"})


@pytest.mark.parametrize("remaps", [b"", FILES, remaps_of((7, 1))[:-1]])
def test_an_image_of_other_than_remaps_is_refused(remaps: bytes) -> None:
    with pytest.raises(ArtifactCorrupt, match="remap-fpath"):
        unlinked(FILES, remaps, ".12-34")


@pytest.mark.parametrize("host", ["", "x" * 65, "\u00e9" * 33, "a\0b"])
def test_a_name_that_no_host_can_have_is_refused(host: str) -> None:
    with pytest.raises(InvalidInput):
        renamed(UTSNS, host)


def test_a_real_image_is_moved_and_closed_in_the_fields_of_its_sockets_alone() -> None:
    closed = 0
    expected = entries_of(FILES)
    for entry in expected:
        if not entry.HasField("isk"):
            continue
        isk = entry.isk
        if words("10.77.0.9") in (list(isk.src_addr), list(isk.dst_addr)):
            isk.state, isk.src_port, isk.dst_port = CLOSE, 0, 0
            isk.src_addr[:], isk.dst_addr[:] = [0], [0]
            closed += 1
        for address in (isk.src_addr, isk.dst_addr):
            for old, new in MOVED.items():
                if words(old) == address[-len(words(old)) :]:
                    address[-len(words(old)) :] = words(new)
    assert readdressed(FILES, MOVED) == Readdressed(image_of(expected), 21, closed)
    assert closed == 3


def test_a_connection_is_kept_when_its_other_end_is_in_the_image() -> None:
    there, back = socket("10.0.0.1 80", "10.0.0.1 4000"), socket("10.0.0.1 4000", "10.0.0.1 80")
    itself = socket("127.0.0.1 80", "127.0.0.1 80")
    assert after({"10.0.0.1": "10.0.0.2"}, there, back, itself) == [
        "10.0.0.2 80 > 10.0.0.2 4000 in state 1",
        "10.0.0.2 4000 > 10.0.0.2 80 in state 1",
        "127.0.0.1 80 > 127.0.0.1 80 in state 1",
    ]


def test_an_ipv4_end_is_the_other_end_of_an_ipv6_socket() -> None:
    there = socket("::ffff:10.0.0.1 80", "::ffff:10.0.0.1 4000")
    back = socket("10.0.0.1 4000", "10.0.0.1 80")
    assert after({"10.0.0.1": "10.0.0.2"}, there, back) == [
        f"{ip_address('::ffff:10.0.0.2')} 80 > {ip_address('::ffff:10.0.0.2')} 4000 in state 1",
        "10.0.0.2 4000 > 10.0.0.2 80 in state 1",
    ]


def test_connections_that_leave_the_tree_are_closed_the_half_closed_too() -> None:
    assert after(
        {"10.0.0.1": "10.0.0.2"},
        socket("10.0.0.1 80", "10.0.0.3 4000"),
        socket("10.0.0.1 80", "10.0.0.3 4001", CLOSE_WAIT),
        socket("fd00::1 80", "fd00::3 4000"),
    ) == [
        "0.0.0.0 0 > 0.0.0.0 0 in state 7",
        "0.0.0.0 0 > 0.0.0.0 0 in state 7",
        ":: 0 > :: 0 in state 7",
    ]


def test_listeners_datagram_sockets_and_raw_ones_are_moved_and_not_closed() -> None:
    assert after(
        {"10.0.0.1": "10.0.0.2", "fd00::1": "fd00::2"},
        socket("10.0.0.1 80", "0.0.0.0 0", LISTEN),
        socket("fd00::1 80", ":: 0", LISTEN),
        socket("0.0.0.0 81", "0.0.0.0 0", LISTEN),
        socket("10.0.0.1 53", "10.0.0.3 53", ESTABLISHED, UDP, DGRAM),
        socket("10.0.0.3 6", "10.0.0.1 6", ESTABLISHED, TCP, RAW),
        socket("10.0.0.1 9", "0.0.0.0 0", CLOSE),
    ) == [
        "10.0.0.2 80 > 0.0.0.0 0 in state 10",
        "fd00::2 80 > :: 0 in state 10",
        "0.0.0.0 81 > 0.0.0.0 0 in state 10",
        "10.0.0.2 53 > 10.0.0.3 53 in state 1",
        "10.0.0.3 6 > 10.0.0.2 6 in state 1",
        "10.0.0.2 9 > 0.0.0.0 0 in state 7",
    ]


def test_addresses_that_change_places_do_so_once() -> None:
    swapped = {"10.0.0.1": "10.0.0.2", "10.0.0.2": "10.0.0.1"}
    listeners = [socket(f"10.0.0.{last} 80", "0.0.0.0 0", LISTEN) for last in (1, 2)]
    assert after(swapped, *listeners) == [
        "10.0.0.2 80 > 0.0.0.0 0 in state 10",
        "10.0.0.1 80 > 0.0.0.0 0 in state 10",
    ]


@pytest.mark.parametrize(
    "addresses", [{"10.0.0.1": "fd00::1"}, {"10.0.0.1": "pod"}, {"": "10.0.0.1"}]
)
def test_what_is_no_pair_of_addresses_is_refused(addresses: dict[str, str]) -> None:
    with pytest.raises(InvalidInput):
        readdressed(FILES, addresses)


def bare(**values: int | list[int]) -> bytes:
    """Return the entry of a socket of which some fields are others."""
    entry = socket("10.0.0.1 80", "10.0.0.3 4000")
    for name, value in values.items():
        entry.isk.ClearField(name)
        if isinstance(value, list):
            getattr(entry.isk, name).extend(value)
        elif value >= 0:
            setattr(entry.isk, name, value)
    text: bytes = entry.SerializeToString()
    return text


def packed() -> bytes:
    """Return the entry of a socket with packed addresses, which CRIU never writes."""
    text: bytes = CLASSES["file_entry"].FromString(bare(src_addr=[])).isk.SerializeToString()
    text = text.replace(b"\x60", b"\x5a\x01\x01\x60", 1)
    return b"\x08\x04\x10\x01\x22" + bytes([len(text)]) + text


@each(
    ("image", "why"),
    [
        (b"", "does not begin"),
        (UTSNS, "does not begin"),
        (FILES[:7], "does not begin"),
        (FILES[:-1], "ends within an entry"),
        (FILES + b"\1\0\0", "ends within an entry"),
        (FILES + b"\xff\xff\xff\xff", "ends within an entry"),
        (image_of([b""]), "field 1 0 times"),
        (image_of([b"\x08\x04"]), "field 4 0 times"),
        (image_of([b"\x08\x04\x08\x04"]), "field 1 2 times"),
        (image_of([b"\x08\x04\x20\x01"]), "no string of bytes"),
        (image_of([b"\x0a\x01x"]), "no number of 32 bits"),
        (image_of([b"\x08\xff\xff\xff\xff\x7f"]), "no number of 32 bits"),
        (image_of([b"\x08" + b"\xff" * 20]), "without an end"),
        (image_of([b"\x08" + b"\xff" * 9 + b"\x7f"]), "without an end"),
        (image_of([b"\x08\x01\x80"]), "without an end"),
        (image_of([b"\x08\x01\x1a\xff\xff\xff\xff\x0f"]), "within a field"),
        (image_of([b"\x08\x01\x05\x01"]), "within a field"),
        (image_of([b"\x08\x01\x00\x01"]), "within a field"),
        (image_of([b"\x08\x01\x0b\x0c"]), "wire type 3"),
        (image_of([b"\x10\x01" * 65]), "more than 64 fields"),
        (image_of([bare(family=10)]), "do not fit"),
        (image_of([bare(family=1)]), "do not fit"),
        (image_of([bare(src_addr=[])]), "do not fit"),
        (image_of([bare(dst_addr=[1, 2])]), "do not fit"),
        (image_of([bare(state=-1)]), "field 6 0 times"),
        (image_of([bare(proto=-1)]), "field 5 0 times"),
        (image_of([packed()]), "field 11"),
    ],
)
def test_a_malformed_image_is_named_corrupt(image: bytes, why: str) -> None:
    with pytest.raises(ArtifactCorrupt, match=why) as caught:
        readdressed(image, MOVED)
    assert caught.value.values["file"] == "files"


def test_an_image_that_is_too_large_or_has_too_many_files_is_refused() -> None:
    for image, why in (
        (FILES + bytes(MAX_IMAGE_BYTES), "more than"),
        (image_of([b"\x08\x01"] * (MAX_ENTRIES + 1)), "entries"),
    ):
        with pytest.raises(ArtifactCorrupt, match=why):
            readdressed(image, MOVED)


@each("image", [b"", FILES, UTSNS[:8], UTSNS[:-1], UTSNS + UTSNS[8:]])
def test_a_malformed_image_of_a_host_name_is_named_corrupt(image: bytes) -> None:
    with pytest.raises(ArtifactCorrupt) as caught:
        renamed(image, "target")
    assert caught.value.values["file"] == "utsns"


def test_how_long_a_worker_was_stopped_is_read_of_a_real_image() -> None:
    # 170 µs until all processes were stopped, and 43,026 µs from then on.
    assert frozen_s(STATS) == pytest.approx(0.043196)


RESTORE_STATS = bytes.fromhex("405910550633095704000000" + "12020800")


@each("image", [b"", STATS[:-1], STATS[:8], 2 * STATS, UTSNS, RESTORE_STATS])
def test_a_malformed_image_of_figures_is_named_corrupt(image: bytes) -> None:
    with pytest.raises(ArtifactCorrupt) as caught:
        frozen_s(image)
    assert caught.value.values["file"] == "stats"


@st.composite
def damaged(draw: st.DrawFn, image: bytes) -> bytes:
    """Change, drop or repeat a few bytes of an image, mostly behind its head."""
    found = bytearray(image)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(min(8, len(found)), len(found)))
        end = min(len(found), start + draw(st.integers(0, 8)))
        found[start:end] = draw(
            st.one_of(st.binary(max_size=8), st.just(bytes(found[start:end] * 2)))
        )
    return bytes(found)


def refused(image: bytes) -> None:
    for work in (lambda: readdressed(image, MOVED), lambda: renamed(image, "target")):
        try:
            work()
        except ArtifactCorrupt as error:
            assert error.values["file"] in ("files", "utsns")  # noqa: PT017


@settings(max_examples=300, deadline=None)
@given(st.one_of(damaged(FILES), damaged(UTSNS), st.binary(max_size=200)))
def test_a_damaged_image_is_read_or_named_corrupt(image: bytes) -> None:
    refused(image)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([FILES[:8], UTSNS[:8]]),
    st.lists(st.one_of(st.binary(max_size=80), st.just(bare())), max_size=3),
)
def test_whatever_the_entries_are_an_image_is_read_or_named_corrupt(
    head: bytes, entries: list[bytes]
) -> None:
    refused(head + image_of(entries)[8:])


ADDRESSES = st.sampled_from(["10.0.0.1", "10.0.0.2", "127.0.0.1", "fd00::1", "::ffff:10.0.0.1"])
PORTS = st.sampled_from([0, 1, 80, 65535])


@st.composite
def sockets(draw: st.DrawFn) -> Any:
    source = draw(ADDRESSES)
    family = ip_address(source).version
    destination = draw(ADDRESSES.filter(lambda text: ip_address(text).version == family))
    found = socket(
        f"{source} {draw(PORTS)}",
        f"{destination} {draw(PORTS)}",
        draw(st.integers(1, 11)),
        draw(st.sampled_from([TCP, UDP])),
        draw(st.sampled_from([STREAM, DGRAM, RAW])),
    )
    found.isk.opts = draw(st.binary(max_size=300))
    return found


@settings(max_examples=200, deadline=None)
@given(st.lists(sockets(), max_size=6))
def test_no_connection_without_its_other_end_is_left_and_nothing_else_changes(
    before: list[Any],
) -> None:
    found = readdressed(image_of(before), {"10.0.0.1": "10.0.0.9"})
    entries = entries_of(found.image)
    assert len(entries) == len(before)
    open_ends = {_ends(entry): entry for entry in entries if _is_connection(entry)}
    assert all((there, here) in open_ends for here, there in open_ends)
    changed = ("state", "src_port", "dst_port", "src_addr", "dst_addr")
    for old, new in zip(before, entries, strict=True):
        if new.isk.state != old.isk.state or new.isk.dst_port != old.isk.dst_port:
            assert _is_connection(old)
        for name in changed:
            old.isk.ClearField(name)
            new.isk.ClearField(name)
        assert old == new
    assert readdressed(found.image, {}) == Readdressed(found.image, 0, 0)


def _is_connection(entry: Any) -> bool:
    isk = entry.isk
    return bool(isk.type == STREAM and isk.proto == TCP and isk.state != LISTEN and isk.dst_port)


def _ends(entry: Any) -> tuple[tuple[str, int], tuple[str, int]]:
    def end(address: Sequence[int], port: int) -> tuple[str, int]:
        found = address_of(address)
        mapped = getattr(found, "ipv4_mapped", None)
        return str(mapped or found), port

    isk = entry.isk
    return end(isk.src_addr, isk.src_port), end(isk.dst_addr, isk.dst_port)
