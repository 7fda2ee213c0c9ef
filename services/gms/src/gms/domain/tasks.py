"""The task of a transfer process and its events, a line of JSON each.

The process is an ordinary client of the lease socket: its task has everything it needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from gms.domain.transfer import PAGE, SHARD_BYTES
from snapback_client.frames import MEMORY_S, DeviceUuid, GenerationRef, Token, Wait
from snapshot_shared.artifact import StripeName
from snapshot_shared.errors import Failure
from snapshot_shared.orders import (
    ArtifactRef,
    Attempt,
    Bytes,
    Digest,
    Label,
    LayoutRef,
    LoadOrder,
    OrderIdStr,
    PartStr,
    SaveOrder,
    Seconds,
    ShortText,
    Text,
    UidStr,
)

DEFAULT_BACKEND = "posix-direct"
OBJECT = "object"
"""The backend whose bytes are in object storage, and not in the folder of the part."""

GDS = "gds"
"""The backend that reads into the memory of a GPU, past the host."""

CONTAINER = "container"
"""What moved the bytes of a part where a saver or loader in the pod did."""

NOTE_BYTES = 1024 * 1024 * 1024
"""A killed save may have to write twice as much again. Each note waits for the disk with fsync; one
every 256 MiB took a tenth of a save at 3 GB/s."""

SAVE_THREADS = LOAD_THREADS = 16
"""While some digest and copy, the others keep the disk at work: 8 are too few for that."""

MAX_THREADS = 64

Threads = Annotated[int, Meta(ge=1, le=MAX_THREADS)]


class TransferOptions(NamedTuple):
    """How bytes are moved: by which backend, and the URL of the object storage that it may use.

    Each device has as many threads as are given here: so many requests are in flight.
    `stripe_roots` has folders by name over which files are spread; the artifact root has files too.
    `artifact_keys` is a folder with keys and `kms_command` a command that has some. What they have
    encrypted is decrypted in any case, and with `encrypt` what is saved is encrypted. With
    `require_signature` nothing is loaded that no key which is trusted has signed.
    """

    backend: str = DEFAULT_BACKEND
    object_storage: str = ""
    save_threads: int = SAVE_THREADS
    load_threads: int = LOAD_THREADS
    artifact_keys: str = ""
    kms_command: str = ""
    encrypt: bool = False
    require_signature: bool = False
    stripe_roots: Mapping[str, str] = MappingProxyType({})

    def of_save(self) -> dict[str, Any]:
        """Return the fields of a SaveTask."""
        return self._fields_of_task(self.save_threads)

    def of_load(self) -> dict[str, Any]:
        """Return the fields of a LoadTask."""
        return self._fields_of_task(self.load_threads)

    def _fields_of_task(self, threads: int) -> dict[str, Any]:
        fields = self._asdict()
        del fields["save_threads"], fields["load_threads"]
        return {**fields, "stripe_roots": dict(self.stripe_roots), "threads": threads}


DEFAULT_OPTIONS = TransferOptions()


class _Task(msgspec.Struct, frozen=True, kw_only=True, tag_field="verb"):
    socket_dir: Text
    root: Text
    device: DeviceUuid
    namespace: Label
    content_uid: UidStr
    generation: Attempt
    part: PartStr
    deadline_s: Seconds
    threads: Threads = SAVE_THREADS
    attempt: int = 0
    backend: ShortText = DEFAULT_BACKEND
    object_storage: Text = ""
    stripe_roots: dict[StripeName, Text] = {}
    artifact_keys: Text = ""
    kms_command: Text = ""
    encrypt: bool = False
    require_signature: bool = False
    traceparent: ShortText = ""
    staged: Text = ""


class SaveTask(_Task, frozen=True, kw_only=True, tag="save"):
    """Write the committed layout of a device as a part below the artifact root `root`.

    With `staged` the part is not read off the device: a saver has written it in that folder, in
    one that is called by the order (`order_folder`).

    A fence lets the save alone in; without one it reads beside the others. What has not changed
    since `parent`, or another artifact of its namespace, is shared. After each `note_bytes` it
    notes what is on the disk.
    """

    order: OrderIdStr
    fence_token: Token | None = None
    layout: LayoutRef
    parent: ArtifactRef | None = None
    product: ShortText = ""
    shard_bytes: Annotated[int, Meta(ge=PAGE, le=2**50)] = SHARD_BYTES
    note_bytes: Annotated[int, Meta(ge=1, le=2**50)] = NOTE_BYTES


class LoadTask(_Task, frozen=True, kw_only=True, tag="load"):
    """Read a part into a device and leave it hidden under the load token.

    With `staged` it is copied into that folder, for a loader. `memory_wait_s` is how long it waits
    for memory of the device that others hold.
    """

    threads: Threads = LOAD_THREADS
    memory_wait_s: Wait = MEMORY_S
    part_digest: Digest
    load_token: Token
    layout_id: ShortText
    structure_hash: ShortText
    if_match: GenerationRef | None = None
    order: ShortText = ""


def order_folder(order: str, attempt: int) -> str:
    """Return the name of the folder by which a saver or loader gets an order of its pod."""
    return f"{order}.{attempt}"


def save_task(order: SaveOrder, options: TransferOptions, /, **fields: Any) -> SaveTask:
    """Return the task of an order. `fields` are what the order does not say."""
    return SaveTask(
        **options.of_save(),
        device=order.layout.device,
        namespace=order.namespace,
        content_uid=order.content_uid,
        generation=order.attempt,
        part=order.part,
        order=order.order,
        layout=order.layout,
        parent=order.parent,
        **fields,
    )


def load_task(order: LoadOrder, options: TransferOptions, /, **fields: Any) -> LoadTask:
    """Return the task of an order. `fields` are what the order does not say."""
    return LoadTask(
        **options.of_load(),
        namespace=order.artifact.namespace,
        content_uid=order.artifact.content_uid,
        generation=order.artifact.generation,
        part=order.part,
        part_digest=order.part_digest,
        layout_id=order.layout_id,
        structure_hash=order.structure_hash,
        **fields,
    )


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    pass


class TransferLeased(_Event, frozen=True, kw_only=True, tag="leased"):
    """The lock is held: a save reads the fenced generation, a load may build."""


class TransferProgress(_Event, frozen=True, kw_only=True, tag="progress"):
    """Bytes of part files done, of all."""

    done: Bytes
    total: Bytes


class TransferDone(_Event, frozen=True, kw_only=True, tag="done"):
    """Everything is on disk, or in memory and verified. `digest` is that of the part manifest.

    `moved` of the bytes went to or came from the disk, by the backend that is named; 0 by none
    when an earlier process had saved everything.
    """

    bytes: Bytes
    digest: Digest
    layout: LayoutRef
    moved: Bytes = 0
    backend: ShortText = ""


class TransferFailed(_Event, frozen=True, kw_only=True, tag="failed"):
    """Nothing may be made of what was written."""

    reason: ShortText
    message: str
    retryable: bool = False
    values: dict[str, Any] = {}
    next_step: str = ""

    @classmethod
    def of(cls, failure: Failure) -> TransferFailed:
        """Return a failure as a message."""
        return cls(**msgspec.structs.asdict(failure))

    def to_failure(self) -> Failure:
        """Return the failure."""
        return Failure(**{name: getattr(self, name) for name in Failure.__struct_fields__})


TransferEvent = TransferLeased | TransferProgress | TransferDone | TransferFailed
