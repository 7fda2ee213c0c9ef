"""Hostile artifacts, orders and frames are refused by name, and reach nothing beyond themselves.

`make hostile` tries 10,000 of each; EXAMPLES chooses how many.
"""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
import stat
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gms.domain.transfer import check_loadable, plan_files
from snapback_client.frames import decode_reply, decode_request
from snapshot_agent.domain.sealing import check_proven
from snapshot_shared import codec, errors
from snapshot_shared.artifact import RootManifest, generation_path
from snapshot_shared.files import check_component
from snapshot_shared.orders import AnyOrder, ArtifactRef
from tests.scenario.crash_rig import mounted, run
from tests.scenario.crash_stories import LAYOUT, UID, Capture, verify
from tests.scenario.disk import SimDisk

EXAMPLES = int(os.environ.get("EXAMPLES", "100"))

pytestmark = pytest.mark.cpu(60 + EXAMPLES / 20)
DATA = Path(__file__).parents[1] / "golden" / "data"
HOSTILE = [
    *(2**63, 2**64 - 1, -1, -(2**63), 0, 1, 4096, 2**50, 1e308, 0.5, True, None),
    *("", ".", "..", "../x", "a/b", "/etc/passwd", "x\0y", "\u00e9" * 300, "*", ">", "a\n"),
    *("part.json", "process", "gpu-99", "A" * 5000, "sha256:" + "0" * 64, [], {}, [[[[]]]], ["x"]),
]

many = settings(max_examples=EXAMPLES, deadline=None, database=None, derandomize=True)


@st.composite
def damaged(draw: st.DrawFn, documents: list[Any]) -> Any:
    """Change one to three places of a document: another value, one more, or one less."""
    document = copy.deepcopy(draw(st.sampled_from(documents)))
    for _ in range(draw(st.integers(1, 3))):
        holder, key = document, None
        while isinstance(holder, dict | list) and holder:
            keys = sorted(holder) if isinstance(holder, dict) else range(len(holder))
            key = draw(st.sampled_from(list(keys)[:50]))
            if not isinstance(holder[key], dict | list) or draw(st.integers(0, 3)) == 0:
                break
            holder = holder[key]
        if key is None or not holder:
            continue
        match draw(st.integers(0, 5)):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, list):
                holder.append(copy.deepcopy(holder[key]))
            case 1:
                holder["unknown"] = copy.deepcopy(draw(st.sampled_from(HOSTILE)))
            case _:
                holder[key] = copy.deepcopy(draw(st.sampled_from(HOSTILE)))
    return document


class _Saved(NamedTuple):
    """A sealed artifact on a simulated disk, and its manifests by their paths."""

    story: Capture
    disk: SimDisk
    manifests: dict[str, Any]

    def swap(self, name: str, data: bytes) -> bytes:
        """Put other bytes where a manifest is, and give those that were there."""
        found = self.disk.data(self.disk.os.find(f"{self.story.where()}/{name}"))
        before = bytes(found)
        found[:] = data
        return before


def _saved() -> _Saved:
    story, disk = Capture(), SimDisk()
    with mounted(disk):
        story.sealed()
    tree = disk.tree()
    below = str(story.where()).removeprefix("/sim")
    names = ("root.json", "process/part.json", "gpu-0/part.json")
    texts = {name: bytes(tree[f"{below}/{name}"]) for name in names}  # type: ignore[arg-type]
    return _Saved(story, disk, {name: msgspec.json.decode(t) for name, t in texts.items()})


SAVED = _saved()


def _is_named(error: errors.SnapbackError) -> bool:
    """Say whether a refusal tells what is wrong: a file, a part, a field, or a path in JSON."""
    known = {"file", "path", "part", "field", "missing", "value", "parts"}
    return bool(known & set(error.values)) or "`$" in error.message or "Object" in error.message


def _refusal(work: Callable[[], object]) -> errors.SnapbackError | None:
    try:
        work()
    except errors.SnapbackError as error:
        return error
    return None


def _read_everything(_: bytes) -> None:
    verify(SAVED.story.root, SAVED.story.place, SAVED.story.promises["sealed"])


def _load_then_read_everything(data: bytes) -> None:
    """Plan a load as if the digest of the manifest had been trusted, then read as `verify` does."""
    with contextlib.suppress(errors.SnapbackError):
        manifest, _ = run(SAVED.story.root.read_part(SAVED.story.place, "gpu-0"))
        layout = check_loadable(
            manifest, layout_id=LAYOUT.layout_id, wanted_hash=LAYOUT.structure_hash
        )
        plans = plan_files(layout.allocations, [entry.size for entry in manifest.files])
        assert sum(plan.size for plan in plans) == manifest.bytes
    _read_everything(data)


def _trust_then_read_everything(data: bytes) -> None:
    """Read what a root manifest with a digest of its own names, then read as `verify` does."""
    ref = ArtifactRef(**SAVED.story.place._asdict(), root_digest=codec.digest(data))
    root = run(SAVED.story.root.read_root(ref))
    for row in root.parts:
        manifest, found = run(SAVED.story.root.read_part(SAVED.story.place, row.part))
        check_proven(root, row, manifest, found)
    # What is left to differ says nothing about the bytes; the digest of the store refuses it.
    _read_everything(data)


READERS = {
    "process/part.json": _read_everything,
    "gpu-0/part.json": _load_then_read_everything,
    "root.json": _trust_then_read_everything,
}


@pytest.mark.parametrize("name", READERS)
@many
@given(draw=st.data())
def test_a_hostile_manifest_is_refused(name: str, draw: st.DataObject) -> None:
    document = draw.draw(damaged([SAVED.manifests[name]]))
    if document == SAVED.manifests[name]:
        return
    data = msgspec.json.encode(document)
    before = SAVED.swap(name, data)
    tree, used = SAVED.disk.tree(), SAVED.disk.operations
    try:
        with mounted(SAVED.disk):
            error = _refusal(lambda: READERS[name](data))
    finally:
        assert SAVED.disk.tree() == tree
        SAVED.swap(name, before)
    assert SAVED.disk.operations - used < 200
    assert SAVED.disk.os.open_descriptors() == []
    assert error is not None
    assert _is_named(error), (error.message, error.values)


ORDERS = [msgspec.json.decode(f.read_bytes()) for f in sorted(DATA.glob("messages/*_order.json"))]
ORDER_TEXTS = [msgspec.json.encode(order) for order in ORDERS]
FRAMES = [f.read_bytes() for f in sorted(DATA.glob("frames/*.msgpack")) if "grpc" not in f.name]


def _order(data: bytes) -> Any:
    return codec.decode_json(data, AnyOrder)  # type: ignore[arg-type]


def _root(data: bytes) -> RootManifest:
    return codec.decode_json(data, RootManifest, limit=codec.MAX_MANIFEST_BYTES)


@many
@given(document=damaged(ORDERS))
def test_a_hostile_order_is_refused_or_names_nothing_outside_the_root(document: Any) -> None:
    found: list[Any] = []
    data = msgspec.json.encode(document)
    error = _refusal(lambda: found.append(_order(data)))
    if error is not None:
        assert isinstance(error, errors.InvalidMessage)
        assert _is_named(error), error.message
        return
    order = found[0]
    namespace = getattr(order, "namespace", None) or getattr(order, "pod", order)
    name = namespace if isinstance(namespace, str) else getattr(namespace, "namespace", "default")
    for component in generation_path(name, getattr(order, "content_uid", None) or UID, 1):
        assert check_component(component) == component


@many
@given(document=damaged([msgspec.msgpack.decode(data) for data in FRAMES]))
def test_a_hostile_frame_is_refused_or_is_a_frame(document: Any) -> None:
    data = msgspec.msgpack.encode(document)
    for decode in (decode_request, decode_reply):
        found: list[Any] = []
        error = _refusal(lambda decode=decode, found=found: found.append(decode(data)))  # type: ignore[misc]
        if error is None:
            again = msgspec.msgpack.decode(msgspec.msgpack.encode(found[0]))
            assert again["type"] == document["type"]
        else:
            assert isinstance(error, errors.InvalidMessage | errors.UnsupportedVersion)


@pytest.mark.parametrize(
    ("texts", "decode"), [(ORDER_TEXTS, _order), (FRAMES, decode_request)], ids=["order", "frame"]
)
@many
@given(draw=st.data())
def test_bytes_that_are_no_message_are_refused(
    texts: list[bytes], decode: Callable[[bytes], object], draw: st.DataObject
) -> None:
    data = draw.draw(st.binary(max_size=400) | st.sampled_from(texts))
    if data in texts:
        data = data[: draw.draw(st.integers(0, min(len(data) - 1, 2000)))]
    with pytest.raises((errors.InvalidMessage, errors.UnsupportedVersion)):
        decode(data)


DEEP_JSON = b"[" * 100_000
WIDE = b'{"type":"snapback.v1.part_manifest","files":[' + b"{}," * 1_000_000 + b"{}]}"
LARGE: dict[str, tuple[Callable[[bytes], object], bytes]] = {
    "deep order": (_order, DEEP_JSON),
    "deep order of objects": (_order, b'{"a":' * 50_000),
    "long order": (_order, b" " * (codec.MAX_MESSAGE_BYTES + 1)),
    "deep manifest": (_root, DEEP_JSON),
    "wide manifest": (_root, WIDE),
    "deep frame": (decode_request, b"\x91" * codec.MAX_FRAME_BYTES),
    "frame that claims 2^32 items": (decode_request, b"\xdd\xff\xff\xff\xff"),
    "frame that claims 2^32 bytes": (decode_request, b"\x81\xa4type\xdb\xff\xff\xff\xff"),
    "long frame": (decode_request, b"\0" * (codec.MAX_FRAME_BYTES + 1)),
}


@contextlib.contextmanager
def _in_little_memory(most: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("decode", "data"), LARGE.values(), ids=LARGE)
def test_what_is_deep_wide_or_long_is_refused_in_little_memory(
    decode: Callable[[bytes], object], data: bytes
) -> None:
    refused = pytest.raises((errors.InvalidMessage, errors.UnsupportedVersion))
    with _in_little_memory(32 * 2**20), refused:
        decode(data)


@pytest.mark.parametrize("name", ["root.json", "process/part.json"])
def test_a_manifest_that_is_too_long_is_not_read(name: str, real: Capture) -> None:
    os.truncate(real.where() / name, 2**40)
    with _in_little_memory(2**20), pytest.raises(errors.ArtifactCorrupt, match="limit is"):
        verify(real.root, real.place, real.promises["sealed"])


@pytest.fixture
def real(tmp_path: Path) -> Capture:
    """Seal an artifact on the real file system, with something precious beside it."""
    story = Capture(tmp_path / "node").sealed()
    (tmp_path / "precious").write_bytes(story.where().joinpath("process/weights").read_bytes())
    return story


def _swap(where: Path) -> None:
    names = [where / "gpu-0/shard-0000.bin", where / "gpu-0/shard-0001.bin"]
    data = [name.read_bytes() for name in names]
    for name, other in zip(names, reversed(data), strict=True):
        name.write_bytes(other)


def _instead(name: str, make: Callable[[Path, Path], None]) -> Callable[[Path], None]:
    """Replace a file or folder of the artifact by something that is made in its place."""

    def replace(where: Path) -> None:
        target = where / name
        moved = where.parents[4] / "moved"
        target.rename(moved)
        make(target, moved)

    return replace


def _device(path: Path, _: Path) -> None:
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))
    except PermissionError as error:
        pytest.skip(f"making a device needs root: {error}")


KINDS: dict[str, Callable[[Path, Path], None]] = {
    "a symbolic link": lambda path, moved: path.symlink_to(moved),
    "a hard link": lambda path, moved: path.hardlink_to(moved),
    "a FIFO": lambda path, _: os.mkfifo(path),
    "a device": _device,
    "a folder": lambda path, _: path.mkdir(),
    "nothing": lambda _path, _moved: None,
}
ATTACKS: dict[str, Callable[[Path], None]] = {
    **{
        f"{name} is {kind}": _instead(name, make)
        for name in ("root.json", "process/part.json", "process/weights", "gpu-0/shard-0000.bin")
        for kind, make in KINDS.items()
        # A shard may have other names: artifacts share what did not change.
        if (name[:5], kind) != ("gpu-0", "a hard link")
    },
    "a part is a symbolic link": _instead("process", KINDS["a symbolic link"]),
    "a part is missing": lambda where: shutil.rmtree(where / "gpu-0"),
    "a file was cut": lambda where: os.truncate(where / "process/weights", 100),
    "a file was made longer": lambda where: os.truncate(where / "process/weights", 2**40),
    "two files were swapped": _swap,
    "two parts were swapped": lambda where: shutil.copy(
        where / "process/part.json", where / "gpu-0/part.json"
    ),
    "a file was added": lambda where: (where / "process/extra").write_bytes(b"x"),
    "a link was added": lambda where: (where / "process/extra").symlink_to("/etc/passwd"),
    "a folder was added": lambda where: (where / "process/extra").mkdir(),
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_an_artifact_that_was_tampered_with_is_refused_and_removed_without_a_trace_outside(
    attack: Callable[[Path], None], real: Capture, tmp_path: Path
) -> None:
    attack(real.where())
    precious = (tmp_path / "precious").read_bytes()
    with pytest.raises(
        (errors.ArtifactCorrupt, errors.ArtifactMissing, errors.InvalidName)
    ) as caught:
        verify(real.root, real.place, real.promises["sealed"])
    assert _is_named(caught.value), (caught.value.message, caught.value.values)
    moved = tmp_path / "moved"
    before = sorted(moved.iterdir()) if moved.is_dir() else moved.exists() and moved.read_bytes()
    run(real.root.remove(real.place))
    assert not real.where().exists()
    after = sorted(moved.iterdir()) if moved.is_dir() else moved.exists() and moved.read_bytes()
    assert before == after
    assert (tmp_path / "precious").read_bytes() == precious


def test_chunks_that_would_fill_the_memory_are_refused(real: Capture) -> None:
    path = real.where() / "process" / "part.json"
    manifest = msgspec.json.decode(path.read_bytes())
    row = next(row for row in manifest["files"] if row["name"] == "weights")
    size = 2**30
    os.truncate(real.where() / "process" / "weights", size)
    manifest["bytes"] += size - row["size"]
    row.update(size=size, chunk_bytes=2**30, chunks=["0" * 32])
    path.write_bytes(msgspec.json.encode(manifest))
    with pytest.raises(errors.ArtifactCorrupt, match="chunk") as caught:
        run(real.root.read_part(real.place, "process"))
    assert _is_named(caught.value)
