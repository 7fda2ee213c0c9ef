"""`python -m tests.bench.objects`: a save and a load through a real S3 server on loopback.

It prints MB/s, the peak of private memory above what there was before against its limit, and how
many digests were compared. The status is 1 when the memory was more, when the bytes that came back
are others, or when a flipped bit is not found.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import xxhash

from gms.adapters.backends import find_backend
from gms.domain.tasks import OBJECT
from gms.domain.transfer import CHUNK_BYTES
from gms.transfer_child.save import write_part
from snapshot_shared.artifact import PartManifest, part_path
from snapshot_shared.errors import ArtifactCorrupt
from snapshot_shared.files import open_root, opened
from snapshot_shared.object_storage import ObjectStorage, object_key, stored_chunks
from tests.bench import common
from tests.bench.common import MIB
from tests.bench.gms import THREADS, manifest_of, plans_of
from tests.bench.machine import highest_bytes
from tests.bench.regions import Memory, Region
from tests.support.builders import UID, layout, save_task
from tests.support.s3_server import s3_server

PLACE = part_path("default", UID, 1, "gpu-0")
LIMIT = THREADS * CHUNK_BYTES + 32 * MIB


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.objects", description=__doc__)
    parser.add_argument("--size-mib", type=int, default=2048, help="of the weights (2048)")
    size_mib = parser.parse_args().size_mib
    if size_mib < 16:
        parser.error(f"--size-mib is {size_mib}: 16 is the least that is measured")
    with s3_server() as server, tempfile.TemporaryDirectory(prefix="bench-") as folder:
        os.environ.update(server.environment)
        return _measure(Path(folder), "s3://bucket/bench", size_mib * MIB)


def _measure(folder: Path, url: str, size: int) -> int:
    # What is loaded once is no memory of a transfer.
    storage = ObjectStorage(url)
    storage.sizes("nothing")
    memory = Memory(size)
    memory.fill()
    # A part of it is zeros, as in real weights.
    memory.array[: max(size // 16, CHUNK_BYTES)] = 0
    wanted = xxhash.xxh3_128_hexdigest(memory.array)
    region = Region(memory, 1)
    problems: list[str] = []

    with _watched("save", size, problems):
        manifest = _save(folder, url, region)
    stored = sum(storage.sizes("/".join(PLACE)).values())
    chunks = sum(len(entry.chunks) for entry in manifest.files)
    compared = sum(len(list(stored_chunks(entry))) for entry in manifest.files)
    memory.array[:] = 0
    with _watched("load", size, problems):
        _load(url, manifest, region)
    same = xxhash.xxh3_128_hexdigest(memory.array) == wanted
    print(
        f"digests  {compared} of {chunks} chunks compared, the others are zeros and not stored "
        f"({stored / MIB:.0f} of {size / MIB:.0f} MiB are); the bytes are "
        f"{'the same' if same else 'OTHERS'}"
    )
    if not same:
        problems.append("other bytes came back than were saved")
    problems += _flipped(storage, url, manifest, region)
    for problem in problems:
        print(f"failed: {problem}")
    return 1 if problems else 0


def _save(folder: Path, url: str, region: Region) -> PartManifest:
    saved = layout(bytes=len(region.memory.map))
    task = save_task(root=str(folder), layout=saved, backend=OBJECT, object_storage=url)
    with opened(open_root(folder)) as root:
        write_part(root, task, region.infos, [], region.views, lambda _: None)
    return manifest_of(folder.joinpath(*PLACE))


def _load(url: str, manifest: PartManifest, region: Region) -> None:
    backend = find_backend(OBJECT, storage=url, prefix="/".join(PLACE))
    plans, files = plans_of(manifest), manifest.files
    backend.read_files(-1, plans, files, region.views, threads=THREADS, advance=lambda _: None)


def _flipped(
    storage: ObjectStorage, url: str, manifest: PartManifest, region: Region
) -> Iterator[str]:
    """Flip one bit in the last object that there is, and say so when a load does not find it."""
    entry = manifest.files[-1]
    *_, (index, size, _) = stored_chunks(entry)
    key = object_key("/".join(PLACE), entry.name, index)
    data = bytearray(b"".join(storage.read(key, size)))
    data[size // 2] ^= 1
    storage.put(key, memoryview(data))
    try:
        _load(url, manifest, region)
    except ArtifactCorrupt as error:
        print(f"damage   one bit was flipped, and found: {error.message}")
        if error.values.get("chunk") != index:
            yield f"the flipped bit is in chunk {index}, {error.values.get('chunk')} was named"
    else:
        yield "a flipped bit was not found"


@contextlib.contextmanager
def _watched(what: str, size: int, problems: list[str]) -> Iterator[None]:
    begin = time.perf_counter()
    with highest_bytes() as highest:
        yield
    seconds, extra = time.perf_counter() - begin, highest[0]
    print(
        f"{what:8} {size / 1e6 / seconds:7.0f} MB/s ({seconds:.1f} s), "
        f"{extra / MIB:.1f} MiB of memory at most, {LIMIT / MIB:.0f} MiB are allowed",
        flush=True,
    )
    if extra > LIMIT:
        problems.append(f"{what} took {extra} bytes of memory, the limit is {LIMIT}")


if __name__ == "__main__":
    common.run(main)
