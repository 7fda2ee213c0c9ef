"""Object storage (S3, GCS, Azure, or a folder), where the bytes of GPU memory may lie.

Each chunk is an object of its own, `<prefix>/<file>/<chunk>`, so that a request holds all of it,
none is ever half there, and what a killed save has left is listed and removed like all else. A
chunk of zeros has no object. Credentials come from the environment, as `obstore` reads them
(`AWS_…`, `GOOGLE_…`, `AZURE_…`), and are in no message; `obstore` (extra `object`) is imported
when a storage is opened.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import xxhash

from snapshot_shared.artifact import MAX_CHUNKS, FileEntry, PartManifest, SavedObjects
from snapshot_shared.codec import encode_pretty
from snapshot_shared.errors import (
    ArtifactCorrupt,
    ArtifactError,
    ArtifactMissing,
    InvalidInput,
    InvalidName,
    SnapbackError,
)
from snapshot_shared.files import (
    make_folder,
    names_in,
    open_dir,
    open_root,
    opened,
    remove_tree,
    secure,
    secure_tree,
    translated,
    write_new,
)

T = TypeVar("T")

VARIABLE = "SNAPBACK_OBJECT_STORAGE"
MARK = "objects.json"
"""The file in the folder of a part that says that it has objects; made before the first of them."""
SCHEMES = ("s3", "gs", "az", "file")

_PIECE_BYTES = 256 * 1024
_BATCH = 1000
_RETRIES = {"max_retries": 5, "retry_timeout": timedelta(seconds=60)}

_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
_DENIED = (401, 403)


class ObjectStorageUnset(SnapbackError):
    """An artifact is in object storage, and this program does not know which or lacks obstore."""


class BucketMissing(SnapbackError):
    """The bucket or container does not exist; `values`: storage."""


class ObjectStorageDenied(SnapbackError):
    """Object storage refuses these credentials; `values`: storage, code."""

    default_next_step = (
        "give this service credentials that may read, write, list and delete below the prefix"
    )


class ObjectStorageUnavailable(SnapbackError):
    """Object storage does not answer, or answers with an error; `values`: storage, code."""

    retryable = True
    default_next_step = f"check the endpoint, the network and {VARIABLE}; then try again"


def check_url(url: str) -> str:
    """Refuse what names no storage, or holds more than a place in one. InvalidInput."""
    try:
        found = urlsplit(url)
    except ValueError:
        found = urlsplit("")
    is_file = found.scheme == "file"
    # What else stands in it may be a secret, so that it is not shown.
    extra = bool(found.query or found.fragment or "@" in found.netloc)
    shown = f"{found.scheme}://…" if extra else url
    named = found.path.startswith("/") and not found.netloc if is_file else bool(found.netloc)
    if found.scheme not in SCHEMES or not named or extra or ".." in found.path.split("/"):
        raise InvalidInput(
            f"{VARIABLE}={shown!r} is no place in object storage",
            next_step="write s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or "
            "file:///folder; credentials belong in the environment",
            found=shown,
        )
    return url


class ObjectStorage:
    """One place in object storage. Keys are relative to it; calls may come from any thread.

    Whatever fails is ObjectStorageUnavailable, ObjectStorageDenied or BucketMissing unless said.
    """

    def __init__(self, url: str) -> None:
        """Open a place, without a request. ObjectStorageUnset, InvalidInput."""
        if not url:
            raise ObjectStorageUnset(
                f"{VARIABLE} is not set, and the bytes are in object storage",
                next_step=f"set {VARIABLE} for this program, to the value that it had at the save",
            )
        self.url = check_url(url).rstrip("/")
        self._api = _obstore()
        self._folder: str | None = None
        if url.startswith("file:"):
            self._folder = unquote(urlsplit(self.url).path)
            make_folder(self._folder)
        options = {"retry_config": _RETRIES} if self._folder is None else {}
        try:
            self._store: Any = self._api.store.from_url(self.url, **options)
        except (self._api.exceptions.BaseError, ValueError) as error:
            raise InvalidInput(
                f"{VARIABLE}={self.url!r} cannot be used: {_line(str(error))}",
                next_step="set what obstore needs for it: AWS_…, GOOGLE_… or AZURE_…",
                found=self.url,
            ) from None

    def put(self, key: str, data: memoryview) -> None:
        """Write an object, whole or not at all."""
        self._ask(lambda: self._api.put(self._store, key, data, use_multipart=False), key)

    def copy(self, key: str, new: str) -> None:
        """Have the storage copy an object; each may then be removed alone. ArtifactMissing."""
        self._ask(lambda: self._api.copy(self._store, key, new), key)

    def digest(self, key: str, size: int) -> str:
        """Read an object of exactly `size` bytes and give its digest. As `read`."""
        state = xxhash.xxh3_128()
        for piece in self.read(key, size):
            state.update(piece)
        return state.hexdigest()

    def read(self, key: str, size: int) -> Iterator[bytes]:
        """Return an object of exactly `size` bytes in pieces. ArtifactMissing, ArtifactCorrupt."""
        result = self._ask(lambda: self._api.get(self._store, key), key)
        if (found := result.meta["size"]) != size:
            raise ArtifactCorrupt(
                f"object {key} has {found} bytes, its manifest says {size}",
                object=key,
                found=found,
                expected=size,
            )
        pieces = iter(result.stream(min_chunk_size=_PIECE_BYTES))
        left = size
        while left > 0:
            piece: bytes | None = self._ask(lambda: next(pieces, None), key)
            if not piece or len(piece) > left:
                raise ArtifactCorrupt(f"object {key} is not as long as it says", object=key)
            left -= len(piece)
            yield piece

    def sizes(self, prefix: str) -> dict[str, int]:
        """List what is below a prefix: bytes by key. ArtifactCorrupt when it is too much."""
        found: dict[str, int] = {}
        for batch in self._batches(prefix):
            found.update((row["path"], row["size"]) for row in batch)
            if len(found) > MAX_CHUNKS:
                raise ArtifactCorrupt(f"there are more than {MAX_CHUNKS} objects below {prefix}")
        return found

    def remove(self, prefix: str) -> None:
        """Remove all that is below a prefix. Nothing there is success."""
        if self._folder is not None:
            self._remove_folder(self._folder, prefix)
            return
        for batch in self._batches(prefix):
            self._delete([row["path"] for row in batch], prefix)
        if left := self.sizes(prefix):
            raise ObjectStorageUnavailable(
                f"{len(left)} objects below {self.url}/{prefix} were not removed",
                next_step="look at the bucket's rules about retention and locks",
                storage=self.url,
            )

    def secure(self, prefix: str) -> None:
        """Make durable what was written below a prefix, if anything: a folder needs an fsync."""
        if self._folder is None or not self.sizes(prefix):
            return
        with opened(open_root(self._folder)) as root:
            path = prefix.split("/")
            for depth in range(len(path)):
                with opened(open_dir(root, path[:depth])) as folder:
                    secure(folder, prefix)
            with opened(open_dir(root, path)) as folder:
                secure_tree(folder)

    def _batches(self, prefix: str) -> Iterator[Sequence[Any]]:
        rows = iter(self._api.list(self._store, prefix, chunk_size=_BATCH))
        while (batch := self._ask(lambda: next(rows, None), prefix)) is not None:
            yield batch

    def _delete(self, keys: list[str], prefix: str) -> None:
        self._ask(lambda: self._api.delete(self._store, keys), prefix)

    def _remove_folder(self, folder: str, prefix: str) -> None:
        *above, name = prefix.split("/")
        try:
            with opened(open_root(folder)) as root, opened(open_dir(root, above)) as parent:
                remove_tree(parent, name)
        except ArtifactMissing:
            return
        except OSError as error:
            raise translated(error, prefix) from error

    def _ask(self, call: Callable[[], T], key: str) -> T:
        try:
            return call()
        except FileNotFoundError as error:
            raise self._named(str(error), key, missing=True) from None
        except self._api.exceptions.BaseError as error:
            raise self._named(str(error), key, missing=False) from None

    def _named(self, text: str, key: str, *, missing: bool) -> Exception:
        """Name a failure in the product's words. The text of the storage may hold secrets."""
        code = _found(r"<Code>(\w{1,64})</Code>", text)
        status = int(_found(r"status code: (\d{3})", text) or 0)
        number = int(_found(r"\(os error (\d+)\)", text) or 0)
        values: dict[str, Any] = {"storage": self.url, "code": code or status or number}
        if code in _NO_BUCKET:
            return BucketMissing(
                f"{self.url}: the bucket does not exist",
                next_step=f"make the bucket, or correct {VARIABLE}",
                **values,
            )
        if missing and not code.startswith("NoSuchUpload"):
            return ArtifactMissing(f"object {key} does not exist in {self.url}", object=key)
        if status in _DENIED or "Permission" in text.split(":", 1)[0]:
            return ObjectStorageDenied(f"{self.url}: {code or status or 'refused'}", **values)
        if number:
            return translated(OSError(number, os.strerror(number)), f"{self.url}/{key}")
        endpoint = _found(r"(https?://[^/\s?@]+)[/?\s]", text)
        at = f" at {endpoint}" if endpoint else ""
        return ObjectStorageUnavailable(f"{self.url}{at}: {code or _line(text)}", **values)


def _obstore() -> Any:
    try:
        for module in ("obstore.store", "obstore.exceptions"):
            importlib.import_module(module)
        return importlib.import_module("obstore")
    except ImportError as error:
        raise ObjectStorageUnset(
            f"the package obstore is missing: {error}",
            next_step="pip install 'snapback-shared[object]'",
        ) from error


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""


def _line(text: str) -> str:
    """Return what went wrong without addresses and bodies, in which secrets may be."""
    line = text.partition("\n")[0].rpartition(" - ")[2].partition("<")[0]
    return re.sub(r"https?://\S+", "…", line)[:200].rstrip(": ")


# The objects of a part.


def object_key(prefix: str, file: str, chunk: int) -> str:
    """Name the object of a chunk."""
    return f"{prefix}/{file}/{chunk:06d}"


@functools.cache
def zeros_digest(size: int) -> str:
    """Return the digest of a chunk of zeros, which is a hole in a file and has no object."""
    return xxhash.xxh3_128_hexdigest(bytes(size))


def stored_chunks(entry: FileEntry) -> Iterator[tuple[int, int, str]]:
    """Return (index, bytes, digest) of every chunk of a file that has an object, in order."""
    for index, digest in enumerate(entry.chunks):
        size = min(entry.chunk_bytes, entry.size - index * entry.chunk_bytes)
        if digest != zeros_digest(size):
            yield index, size, digest


def mark_objects(directory: int, prefix: str) -> None:
    """Note in the folder of a part that it has objects, durably, before there is any."""
    write_new(directory, MARK, encode_pretty(SavedObjects(prefix=prefix)))


def check_objects(storage: ObjectStorage, manifest: PartManifest) -> None:
    """Compare names and sizes of all objects of a part, without reading any.

    ArtifactMissing and ArtifactCorrupt name file and chunk.
    """
    if not manifest.objects:
        return
    prefix = manifest.objects.prefix
    found = storage.sizes(prefix)
    for entry in manifest.files:
        for index, size, _ in stored_chunks(entry):
            key = object_key(prefix, entry.name, index)
            if key not in found:
                raise ArtifactMissing(
                    f"chunk {index} of {entry.name}: object {key} does not exist",
                    file=entry.name,
                    chunk=index,
                )
            if (length := found.pop(key)) != size:
                raise ArtifactCorrupt(
                    f"chunk {index} of {entry.name} has {length} bytes, its manifest says {size}",
                    file=entry.name,
                    chunk=index,
                    found=length,
                    expected=size,
                )
    if found:
        extra = min(found)
        raise ArtifactCorrupt(
            f"part {manifest.part} has object {extra}, which its manifest does not name",
            object=extra,
            found=len(found),
        )


def read_object(
    storage: ObjectStorage, prefix: str, file: str, index: int, into: memoryview, wanted: str
) -> None:
    """Read a chunk whole and compare its digest. What fails names file and chunk."""
    state, at = xxhash.xxh3_128(), 0
    try:
        for piece in storage.read(object_key(prefix, file, index), len(into)):
            state.update(piece)
            into[at : at + len(piece)] = piece
            at += len(piece)
    except (ArtifactCorrupt, ArtifactMissing) as error:
        error.values |= {"file": file, "chunk": index}
        raise
    if (found := state.hexdigest()) != wanted:
        raise ArtifactCorrupt(
            f"chunk {index} of {file} is damaged",
            next_step="do not load this part; capture the worker again",
            file=file,
            chunk=index,
            expected=wanted,
            found=found,
        )


def verify_objects(storage: ObjectStorage, manifest: PartManifest) -> Iterator[int]:
    """Read every object of a part; give the bytes of each file's chunk as it is found sound.

    Chunks of zeros are included. ArtifactMissing, ArtifactCorrupt.
    """
    if not manifest.objects:
        return
    buffer = memoryview(bytearray(max((e.chunk_bytes for e in manifest.files), default=0)))
    for entry in manifest.files:
        stored = {index: (size, digest) for index, size, digest in stored_chunks(entry)}
        for index in range(len(entry.chunks)):
            size = min(entry.chunk_bytes, entry.size - index * entry.chunk_bytes)
            if index in stored:
                view, wanted = buffer[:size], stored[index][1]
                read_object(storage, manifest.objects.prefix, entry.name, index, view, wanted)
            yield size


def remove_with_objects(
    parent: int, path: Sequence[str], storage: Callable[[], ObjectStorage]
) -> None:
    """Remove a part or a generation, the last of `path`, beneath its folder `parent`.

    Its objects go first: as long as there are any, its folder says so.
    """
    if _is_marked(parent, path[-1]):
        storage().remove("/".join(path))
    remove_tree(parent, path[-1])


def _is_marked(parent: int, name: str) -> bool:
    """Whether a folder, or one right below it, says that it has objects."""
    try:
        with opened(open_dir(parent, (name,))) as folder:
            below = names_in(folder)
            return MARK in below or any(_holds_mark(folder, each) for each in below)
    except ArtifactError:
        return False


def _holds_mark(folder: int, name: str) -> bool:
    try:
        with opened(open_dir(folder, (name,))) as part:
            return MARK in names_in(part)
    except (ArtifactError, InvalidName):
        return False
