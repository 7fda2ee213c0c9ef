"""What stands on disk: the part manifest (`part.json`) and the root manifest (`root.json`).

Layout below an artifact root: `<namespace>/<content uid>/gen-<attempt>/<part>/…` with
`gen-<attempt>/root.json` written last. Manifests are hostile input: decode them with
`codec.decode_json(..., limit=MAX_MANIFEST_BYTES)` and then `check_part_manifest`.
"""

from __future__ import annotations

import itertools
import re
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from snapshot_shared.errors import ArtifactCorrupt, InvalidName
from snapshot_shared.ids import check_label, check_part, check_uid
from snapshot_shared.model import Message
from snapshot_shared.orders import (
    MAX_ATTEMPT,
    Attempt,
    Bytes,
    Digest,
    Label,
    LayoutRef,
    OrderIdStr,
    PartStr,
    PodRef,
    ShortText,
    UidStr,
    VectorEntry,
)

FORMAT_VERSION = 1
PART_MANIFEST = "part.json"
ROOT_MANIFEST = "root.json"
SIGNATURE = "root.sig"
"""The signature of the root manifest, beside it, where the node that sealed it has a key."""
PROCESS = "process"
"""The part that an agent writes; GMS writes one for each device."""
QUARANTINE = ".quarantine"
"""Where an artifact root keeps what was found in it and has no owner."""
MAX_FILES = 10_000
MAX_ALLOCATIONS = 100_000
MAX_CHUNKS = 1_000_000
MAX_WRAPPED_BYTES = 8192
"""The longest data key, as it was encrypted by whatever a KMS is."""
MAX_SIGNATURE_BYTES = 4096
MAX_STRIPES = 64
MAX_CHUNK_BYTES = 64 * 1024 * 1024
"""The longest chunk that is read: a few of them are in memory at once."""

_FILE_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")

FileName = Annotated[str, Meta(pattern=_FILE_NAME.pattern, max_length=128)]
ChunkTag = Annotated[bytes, Meta(min_length=28, max_length=28)]
ChunkDigest = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
StripeName = Annotated[str, Meta(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\Z")]
StripeId = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]


class FileEncryption(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the chunks of a file are encrypted: `tags` has nonce and tag of each, in order.

    A file that is shared with an older part keeps the key of the part at `part`, where it was
    written; `data_key` is that key, encrypted by the one of this part.
    """

    tags: Annotated[list[ChunkTag], Meta(max_length=MAX_CHUNKS)]
    part: Annotated[str, Meta(max_length=512)] = ""
    data_key: Annotated[bytes, Meta(max_length=MAX_WRAPPED_BYTES)] = b""


class FileEntry(Message, forbid_unknown_fields=True):
    """One regular file of a part: its size and an xxh3-128 digest for every chunk in order.

    The last chunk is shorter when `size` is no multiple of `chunk_bytes`. `stripe` is the name of
    the stripe root that has the file; unset, it is in the folder of the part.
    """

    name: FileName
    size: Bytes
    chunk_bytes: Annotated[int, Meta(ge=4096, le=2**30)]
    chunks: Annotated[list[ChunkDigest], Meta(max_length=MAX_CHUNKS)]
    encryption: FileEncryption | UnsetType = UNSET
    stripe: StripeName | UnsetType = UNSET


class Extent(Message, forbid_unknown_fields=True, array_like=True):
    """`size` bytes of an allocation at `offset` stand in `file` at `file_offset`."""

    file: Annotated[int, Meta(ge=0, le=MAX_FILES)]
    file_offset: Bytes
    offset: Bytes
    size: Annotated[int, Meta(ge=1, le=2**50)]


class AllocationEntry(Message, forbid_unknown_fields=True):
    """One allocation of a GPU memory layout. `slot` is its place in the layout."""

    id: ShortText
    slot: Annotated[int, Meta(ge=0, le=MAX_ALLOCATIONS)]
    size: Annotated[int, Meta(ge=1, le=2**50)]
    tag: ShortText = ""
    extents: list[Extent]


class MetadataEntry(Message, forbid_unknown_fields=True):
    """One entry of a layout's metadata store: opaque bytes about a place in an allocation."""

    key: ShortText
    allocation: ShortText
    offset: Bytes
    value: Annotated[bytes, Meta(max_length=65536)]


class SavedLayout(Message, forbid_unknown_fields=True):
    """A GPU memory layout as saved; `source` is the generation that was read."""

    source: LayoutRef
    allocations: Annotated[list[AllocationEntry], Meta(max_length=MAX_ALLOCATIONS)]
    metadata: Annotated[list[MetadataEntry], Meta(max_length=MAX_ALLOCATIONS)] = []


class Facts(Message):
    """What the source was, as `compatibility.FACTS` has it. Unknown facts are empty."""

    driver: ShortText = ""
    arch: ShortText = ""
    kernel: ShortText = ""
    python: ShortText = ""
    criu: ShortText = ""
    cpu: Annotated[list[ShortText], Meta(max_length=512)] = []
    cuda_driver: ShortText = ""
    device_product: ShortText = ""
    devices: int = 0
    image: ShortText = ""
    image_digest: ShortText = ""
    command: list[str] = []
    protocol: ShortText = ""


class SavedObjects(Message, forbid_unknown_fields=True):
    """The bytes of a part are in object storage, each chunk in `<prefix>/<file>/<chunk>`.

    The prefix is that of the part, relative to the storage of the service's settings.
    """

    backend: Literal["object"] = "object"
    prefix: Annotated[str, Meta(max_length=512)]


class SavedStripes(Message, forbid_unknown_fields=True):
    """Files of a part are below these stripe roots: the id that each has, by its name."""

    roots: Annotated[dict[StripeName, StripeId], Meta(min_length=1, max_length=MAX_STRIPES)]


class StripeRoot(Message, forbid_unknown_fields=True):
    """Which stripe root a folder is, whatever name and path a node has for it."""

    id: StripeId


class Encryption(Message, forbid_unknown_fields=True):
    """The files of a part are encrypted; sizes and digests are those of what is on disk.

    `key` is the name of the key that has encrypted `data_key`, the one of this part.
    """

    algorithm: Literal["AES-256-GCM"] = "AES-256-GCM"
    key: ShortText
    data_key: Annotated[bytes, Meta(max_length=MAX_WRAPPED_BYTES)]


class Signature(Message, tag_field="type", tag="snapback.v1.signature"):
    """An Ed25519 signature over the digest of a root manifest, and the name of the public key."""

    key: ShortText
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]


class PartManifest(
    Message, forbid_unknown_fields=True, tag_field="type", tag="snapback.v1.part_manifest"
):
    """Makes a directory a part. Written last in it; its digest is what `staged` reports."""

    version: int = FORMAT_VERSION
    kind: Literal["process", "gms"]
    part: PartStr
    namespace: Label
    content_uid: UidStr
    generation: Attempt
    order: OrderIdStr
    bytes: Bytes
    files: Annotated[list[FileEntry], Meta(max_length=MAX_FILES)]
    vector: list[VectorEntry] = []
    layout: SavedLayout | None = None
    facts: Facts | None = None
    objects: SavedObjects | UnsetType = UNSET
    encryption: Encryption | UnsetType = UNSET


class RootPart(Message, forbid_unknown_fields=True):
    """One part as the root manifest proves it."""

    part: PartStr
    kind: Literal["process", "gms"]
    bytes: Bytes
    digest: Digest
    layout: LayoutRef | None = None


class RootManifest(
    Message, forbid_unknown_fields=True, tag_field="type", tag="snapback.v1.root_manifest"
):
    """Makes a generation an artifact. Written last of all, never replaced."""

    version: int = FORMAT_VERSION
    namespace: Label
    content_uid: UidStr
    generation: Attempt
    source: PodRef
    bytes: Bytes
    parts: Annotated[list[RootPart], Meta(max_length=64)]
    facts: Facts = Facts()


def generation_path(namespace: str, content_uid: str, generation: int) -> tuple[str, ...]:
    """Return the path components of a generation below the artifact root. InvalidName."""
    if type(generation) is not int or not 1 <= generation <= MAX_ATTEMPT:
        raise InvalidName(
            f"generation {generation!r} is none: they are numbered 1 to {MAX_ATTEMPT}",
            next_step="name a generation by the attempt that wrote it",
            value=generation,
        )
    return (check_label(namespace), check_uid(content_uid), f"gen-{generation}")


def generation_of(namespace: str, content_uid: str, folder: str) -> int | None:
    """Return the number of a generation by its path; None when these are no names of one."""
    # Numbers have one spelling, and those of attempts an end.
    found = re.fullmatch("gen-([1-9][0-9]{0,6})", folder)
    if found is None or int(found[1]) > MAX_ATTEMPT:
        return None
    try:
        generation_path(namespace, content_uid, int(found[1]))
    except InvalidName:
        return None
    return int(found[1])


def part_path(namespace: str, content_uid: str, generation: int, part: str) -> tuple[str, ...]:
    """Return the path components of a part below the artifact root, each checked."""
    return (*generation_path(namespace, content_uid, generation), check_part(part))


def check_part_manifest(manifest: PartManifest) -> PartManifest:
    """Refuse a part manifest whose numbers cannot be true. ArtifactCorrupt names the entry.

    Checks: version, unique file names, chunk counts and lengths, the sum of sizes, that only files
    of GPU memory are in stripe roots, and that the extents of each allocation cover it exactly once
    and lie inside their files without overlap.
    """
    _require(manifest.version == FORMAT_VERSION, "version", manifest.version)
    names = [entry.name for entry in manifest.files]
    _require(len(set(names)) == len(names), "files: a name appears twice", names[:3])
    _require(PART_MANIFEST not in names, "files: a file has the manifest's name", PART_MANIFEST)
    for entry in manifest.files:
        is_short = entry.chunk_bytes <= MAX_CHUNK_BYTES
        _require(is_short, f"files.{entry.name}: chunk_bytes", entry.chunk_bytes)
        wanted = -(-entry.size // entry.chunk_bytes)
        _require(len(entry.chunks) == wanted, f"files.{entry.name}: chunks", len(entry.chunks))
        _check_encryption(manifest, entry)
        may_stripe = manifest.kind == "gms" and not manifest.objects
        _require(may_stripe or not entry.stripe, f"files.{entry.name}: stripe", entry.stripe)
    _require(sum(e.size for e in manifest.files) == manifest.bytes, "bytes", manifest.bytes)
    if manifest.objects:
        place = (manifest.namespace, manifest.content_uid, manifest.generation, manifest.part)
        own = "/".join(part_path(*place))
        _require(manifest.objects.prefix == own, "objects: prefix", manifest.objects.prefix)
    if manifest.layout is not None:
        _check_layout(manifest.layout, manifest.files)
    return manifest


def _check_encryption(manifest: PartManifest, entry: FileEntry) -> None:
    # The files of a process part have their tags in them.
    wanted = bool(manifest.encryption) and manifest.kind == "gms"
    found = len(entry.encryption.tags) if entry.encryption else None
    _require(found == (len(entry.chunks) if wanted else None), f"files.{entry.name}: tags", found)


def _check_layout(layout: SavedLayout, files: list[FileEntry]) -> None:
    ids = {entry.id for entry in layout.allocations}
    _require(len(ids) == len(layout.allocations), "layout: an allocation id appears twice", "")
    used: list[tuple[int, int, int]] = []
    for allocation in layout.allocations:
        covered = 0
        for extent in allocation.extents:
            where = f"layout.{allocation.id}"
            _require(extent.offset == covered, f"{where}: extents leave a gap", extent.offset)
            _require(extent.file < len(files), f"{where}: file index", extent.file)
            inside = extent.file_offset + extent.size <= files[extent.file].size
            _require(inside, f"{where}: extent past the end of its file", extent.file_offset)
            used.append((extent.file, extent.file_offset, extent.size))
            covered += extent.size
        _require(covered == allocation.size, f"layout.{allocation.id}: size", allocation.size)
    used.sort()
    for before, after in itertools.pairwise(used):
        overlap = before[0] == after[0] and before[1] + before[2] > after[1]
        _require(not overlap, "layout: two extents overlap", after[1])
    for item in layout.metadata:
        _require(item.allocation in ids, f"metadata.{item.key}: allocation", item.allocation)


def _require(holds: bool, what: str, found: object) -> None:  # noqa: FBT001 - reads as a sentence
    if not holds:
        raise ArtifactCorrupt(f"part manifest: {what} (found {found!r})", field=what)
