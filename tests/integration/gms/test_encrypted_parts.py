"""GPU memory that is encrypted on the disk: real files, keys and forgers."""

from __future__ import annotations

import os
import re
import shutil
import stat
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import xxhash
from msgspec.structs import replace

import snapback_client as client
from gms.adapters.part_files import read_part, verify_part
from gms.domain.resume import note_of, read_notes
from gms.domain.tasks import LoadTask, SaveTask, TransferDone, TransferOptions
from gms.main import GmsSettings, transfer_options
from snapshot_shared import artifact, errors
from snapshot_shared.codec import digest, encode_pretty
from snapshot_shared.encrypting import key_id
from snapshot_shared.keys import ArtifactKeys
from snapshot_shared.object_storage import zeros_digest
from snapshot_shared.orders import PodRef
from tests.support.artifact_keys import put_encryption, put_signing
from tests.support.gms_rig import MIB
from tests.support.weights import UID, Weights

pytestmark = pytest.mark.turns

CHUNK = 8 * MIB
ARRAYS = {"large": (32 * MIB, "u1"), "zeros": (2 * CHUNK, "u1"), "odd": (2 * MIB + 5, "u1")}


class Encrypted(Weights):
    """Weights whose part is encrypted, and a fence of its own for each save."""

    def __init__(self, service: Any, folder: Path) -> None:
        self.keys = folder / "keys"
        self.key = put_encryption(self.keys).read_bytes()
        keys: dict[str, Any] = {"artifact_keys": str(self.keys)}
        super().__init__(service, folder / "artifacts", ARRAYS, is_fenced=False, **keys, threads=2)
        self.storage = ""

    def change(self, place: int) -> None:
        """Commit the same layout with another byte at this place of the large array."""
        with client.restore(self.state) as pool:
            kept = {name: array.copy() for name, array in pool.arrays().items()}
        kept["large"][place] ^= 1
        self.service.drop(0)
        self.commit(kept)

    def path_of(self, generation: int = 1) -> Path:
        return self.root / "default" / UID / f"gen-{generation}" / "gpu-0"

    def save_task(self, generation: int = 1, **changes: Any) -> SaveTask:
        token = f"f{generation}"
        fields: dict[str, Any] = {
            "generation": generation,
            "fence_token": token,
            "layout": self.fence(token),
            "note_bytes": 1,
            "encrypt": True,
            "object_storage": self.storage,
            "backend": "object" if self.storage else "posix-direct",
        }
        return super().save_task(**fields | changes)

    def load_task(self, generation: int = 1, **changes: Any) -> LoadTask:
        self.path = self.path_of(generation)
        layout = self.manifest().layout
        assert layout is not None
        self.layout = layout.source
        fields: dict[str, Any] = {"generation": generation, "object_storage": self.storage}
        return super().load_task(**fields | changes)

    def save(self, generation: int = 1, **changes: Any) -> TransferDone:
        """Save a generation and seal it, so that later ones may share its files."""
        done = self.run(self.save_task(generation, **changes))
        (self.path_of(generation).parent / artifact.ROOT_MANIFEST).write_text("{}")
        return done

    def loaded(self, generation: int = 1, **changes: Any) -> dict[str, str]:
        """Load a part into the second device; return what a worker finds there."""
        found = self.load(generation=generation, load_token=f"load-{generation}", **changes)
        self.service.drop(1)
        return found

    def part(self, generation: int = 1) -> artifact.PartManifest:
        return read_part(self.path_of(generation))[0]

    def rewrite(self, *files: artifact.FileEntry) -> None:
        """Forge the manifest of the first generation."""
        self.path = self.path_of()
        self.forge(lambda manifest: replace(manifest, files=list(files)))


@pytest.fixture
def weights(launch: Callable[..., Any], tmp_path: Path) -> Encrypted:
    return Encrypted(launch(capacities=(128 * MIB, 64 * MIB)), tmp_path)


def tags(entry: artifact.FileEntry) -> list[bytes]:
    assert entry.encryption
    return entry.encryption.tags


def inode(path: Path) -> int:
    return path.stat().st_ino


@pytest.mark.parametrize("backend", ["posix-direct", "posix-buffered", "pinned-host"])
def test_what_is_saved_is_not_readable_on_the_disk_and_is_loaded_again(
    weights: Encrypted, backend: str
) -> None:
    done = weights.save(backend=backend)
    assert done.backend == backend
    manifest = weights.part()
    assert manifest.encryption
    assert manifest.encryption.key == key_id(weights.key)
    on_disk = b"".join(path.read_bytes() for path in sorted(weights.path_of().glob("*.bin")))
    with client.restore(weights.state) as pool:
        for data in (pool["large"].tobytes(), pool["odd"].tobytes()):
            assert not any(data[at : at + 64] in on_disk for at in range(0, 2 * MIB, 256 * 1024))
    verify_part(weights.path_of(), manifest, lambda _: None)
    assert weights.loaded(backend=backend) == weights.digests


def test_chunks_of_zeros_are_holes_of_the_files(weights: Encrypted) -> None:
    weights.save()
    holes = [
        (entry.name, index)
        for entry in weights.part().files
        for index, found in enumerate(entry.chunks)
        if found == zeros_digest(CHUNK)
    ]
    assert len(holes) == 2
    blocks = sum(path.stat().st_blocks * 512 for path in weights.path_of().glob("*.bin"))
    assert blocks <= weights.part().bytes - 2 * CHUNK + MIB


def test_no_nonce_is_used_twice(weights: Encrypted) -> None:
    weights.save(1)
    weights.change(0)
    weights.save(2)
    found = [
        tag[:12]
        for generation in (1, 2)
        for entry in weights.part(generation).files
        if entry.encryption and not entry.encryption.part
        for tag in tags(entry)
    ]
    assert len(found) == len(set(found)) > 5


def test_without_its_key_a_part_is_not_loaded_and_the_key_is_named(
    weights: Encrypted, tmp_path: Path
) -> None:
    weights.save()
    wanted = key_id(weights.key)
    with pytest.raises(errors.KeyUnavailable, match=f"{wanted}; this node has no key"):
        weights.run(weights.load_task(artifact_keys=""))
    other = put_encryption(tmp_path / "other").read_bytes()
    with pytest.raises(errors.KeyUnavailable, match=f"{wanted}; this node has {key_id(other)}"):
        weights.run(weights.load_task(artifact_keys=str(tmp_path / "other")))
    assert weights.loaded() == weights.digests


def test_a_save_that_is_to_be_encrypted_needs_a_key(weights: Encrypted) -> None:
    with pytest.raises(errors.InvalidInput, match="SNAPBACK_ENCRYPT_MEMORY"):
        weights.run(weights.save_task(artifact_keys=""))
    assert not weights.path_of().exists()


def test_a_key_that_was_replaced_still_decrypts(weights: Encrypted) -> None:
    weights.save()
    (weights.keys / "encryption.key").rename(weights.keys / "old.key")
    put_encryption(weights.keys)
    assert weights.loaded() == weights.digests


def swapped_chunks(weights: Encrypted, *, with_tags: bool) -> None:
    first, *others = weights.part().files
    path = weights.path_of() / first.name
    data = bytearray(path.read_bytes())
    data[:CHUNK], data[CHUNK : 2 * CHUNK] = data[CHUNK : 2 * CHUNK], data[:CHUNK]
    path.write_bytes(data)
    one, other, *more = first.chunks
    marks = tags(first)
    if with_tags:
        marks = [marks[1], marks[0], *marks[2:]]
    assert first.encryption
    weights.rewrite(
        replace(
            first,
            chunks=[other, one, *more],
            encryption=replace(first.encryption, tags=marks),
        ),
        *others,
    )


def a_hole_in_place_of_a_chunk(weights: Encrypted) -> None:
    first, *others = weights.part().files
    with (weights.path_of() / first.name).open("r+b") as file:
        file.write(bytes(CHUNK))
    weights.rewrite(replace(first, chunks=[zeros_digest(CHUNK), *first.chunks[1:]]), *others)


def other_bytes_in_place_of_a_hole(weights: Encrypted) -> None:
    files = weights.part().files
    at, index = next(
        (at, index)
        for at, entry in enumerate(files)
        for index, found in enumerate(entry.chunks)
        if found == zeros_digest(CHUNK)
    )
    data = b"\1" * CHUNK
    with (weights.path_of() / files[at].name).open("r+b") as file:
        file.seek(index * CHUNK)
        file.write(data)
    chunks = list(files[at].chunks)
    chunks[index] = xxhash.xxh3_128_hexdigest(data)
    files[at] = replace(files[at], chunks=chunks)
    weights.rewrite(*files)


def files_in_another_order(weights: Encrypted) -> None:
    first, second, *others = weights.part().files
    one, other = (weights.path_of() / entry.name for entry in (first, second))
    aside = one.rename(one.with_name("aside"))
    other.rename(one)
    aside.rename(other)
    # Both have the same size, so that the manifest stays consistent.
    assert first.size == second.size
    weights.rewrite(replace(second, name=first.name), replace(first, name=second.name), *others)


def the_key_of_another_part(weights: Encrypted) -> None:
    weights.change(0)
    weights.save(2)
    data = encode_pretty(replace(weights.part(), encryption=weights.part(2).encryption))
    (weights.path_of() / "part.json").write_bytes(data)


def files_of_another_part(weights: Encrypted) -> None:
    weights.change(0)
    weights.save(2)
    shutil.copy(weights.path_of(2) / "shard-0000.bin", weights.path_of() / "shard-0000.bin")
    weights.rewrite(weights.part(2).files[0], *weights.part().files[1:])


@pytest.mark.parametrize(
    "forge",
    [
        pytest.param(partial(swapped_chunks, with_tags=False), id="swapped chunks"),
        pytest.param(partial(swapped_chunks, with_tags=True), id="swapped chunks and tags"),
        a_hole_in_place_of_a_chunk,
        other_bytes_in_place_of_a_hole,
        files_in_another_order,
        the_key_of_another_part,
        files_of_another_part,
    ],
)
def test_what_was_moved_replaced_or_left_out_is_not_loaded_though_every_digest_fits(
    weights: Encrypted, forge: Callable[[Encrypted], None]
) -> None:
    weights.save()
    forge(weights)
    verify_part(weights.path_of(), weights.part(), lambda _: None)
    with pytest.raises(
        errors.ArtifactCorrupt, match=r"is not what was encrypted there|no data key"
    ):
        weights.run(weights.load_task())
    assert weights.service.device(1).domains[0].layout is None
    assert weights.service.device(1).loads == []


def test_a_save_shares_the_files_that_have_not_changed_and_writes_the_others_anew(
    weights: Encrypted,
) -> None:
    weights.save(1)
    weights.change(0)
    changed = weights.save(2)
    first, second = weights.path_of(1), weights.path_of(2)
    names = sorted(path.name for path in first.glob("*.bin"))
    assert [inode(first / name) == inode(second / name) for name in names] == [
        False,
        True,
        True,
        True,
    ]
    assert 0 < changed.moved < changed.bytes
    weights.save(3)
    assert all(inode(second / name) == inode(weights.path_of(3) / name) for name in names)
    verify_part(weights.path_of(3), weights.part(3), lambda _: None)
    for generation in (1, 2):
        shutil.rmtree(weights.path_of(generation).parent)
    assert weights.loaded(3) == weights.digests
    (weights.keys / "encryption.key").unlink()
    put_encryption(weights.keys)
    assert weights.save(4).moved > 0, "nothing is shared with a part whose key is lost"
    assert weights.loaded(4) == weights.digests


def test_a_damaged_key_of_an_older_part_costs_no_save(weights: Encrypted) -> None:
    weights.save(1)
    weights.save(2)
    shared = weights.part(2).files
    assert all(entry.encryption and entry.encryption.part for entry in shared)
    broken = [
        replace(entry, encryption=replace(entry.encryption, data_key=b"?"))
        if entry.encryption
        else entry
        for entry in shared
    ]
    data = encode_pretty(replace(weights.part(2), files=broken))
    (weights.path_of(2) / "part.json").write_bytes(data)
    done = weights.save(3)
    assert done.moved > 0
    assert weights.loaded(3) == weights.digests
    with pytest.raises(errors.ArtifactCorrupt, match="no data key"):
        weights.run(weights.load_task(2))


def test_nothing_is_shared_between_what_is_encrypted_and_what_is_not(weights: Encrypted) -> None:
    weights.save(1, encrypt=False)
    weights.save(2)
    weights.save(3, encrypt=False)
    assert not weights.part(1).encryption
    names = sorted(path.name for path in weights.path_of(1).glob("*.bin"))
    first = weights.path_of(1)
    assert not any(
        (weights.path_of(2) / n).samefile(first / n) for n in names if (first / n).exists()
    )
    assert all((weights.path_of(3) / name).samefile(first / name) for name in names)
    assert weights.loaded(3) == weights.digests


def test_a_killed_save_goes_on_with_the_same_key_and_what_it_has_noted(weights: Encrypted) -> None:
    whole = weights.save_task(1)
    calls = weights.doomed(whole).calls
    middle = 0
    for number, last in enumerate(range(2, calls, max(1, calls // 3)), 2):
        task = weights.save_task(number)
        weights.doomed(task, last)
        notes = weights.path_of(number) / ".notes"
        found = read_notes(notes.read_bytes() if notes.exists() else b"", note_of(task))
        kept = sum(map(len, found.written.values()))
        middle += 0 < kept < sum(len(entry.chunks) for entry in weights.part(1).files)
        done = weights.run(task)
        assert done.moved <= done.bytes - 2 * CHUNK
        if found.encryption:
            assert weights.part(number).encryption == found.encryption
        if kept:
            written = {e.name: tags(e) for e in weights.part(number).files}
            for name, noted in found.tags.items():
                holes = [zeros_digest(CHUNK) == d for d in found.written[name].values()]
                same = [written[name][index] == tag for index, tag in noted.items()]
                assert all(is_same or hole for is_same, hole in zip(same, holes, strict=True))
        verify_part(weights.path_of(number), weights.part(number), lambda _: None)
        assert weights.loaded(number) == weights.digests
    assert middle, "no save was killed in the middle"


def test_a_save_that_was_not_encrypted_is_not_gone_on_with_when_keys_have_come(
    weights: Encrypted,
) -> None:
    calls = weights.doomed(weights.save_task(1, encrypt=False)).calls
    task = weights.save_task(2, encrypt=False)
    weights.doomed(task, 2 * calls // 3)
    weights.run(replace(task, encrypt=True))
    assert weights.part(2).encryption
    assert weights.loaded(2) == weights.digests


def test_parts_in_object_storage_are_encrypted_and_whole_files_of_them_copied(
    weights: Encrypted, tmp_path: Path
) -> None:
    weights.storage = (tmp_path / "store").as_uri()
    weights.save(1)
    stored = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert stored
    with client.restore(weights.state) as pool:
        first = pool["large"][:64].tobytes()
    assert not any(first in path.read_bytes() for path in stored)
    weights.change(0)
    changed = weights.save(2)
    assert 0 < changed.moved < 24 * MIB
    assert weights.loaded(2) == weights.digests


def test_an_encrypted_part_is_spread_over_stripe_roots_and_shared_within_them(
    weights: Encrypted, tmp_path: Path
) -> None:
    stripes = {"one": str(tmp_path / "one"), "two": str(tmp_path / "two")}
    for path in stripes.values():
        Path(path).mkdir()
    weights.save(1, stripe_roots=stripes, threads=6)
    assert {entry.stripe or "" for entry in weights.part(1).files} == {"", "one", "two"}
    with pytest.raises(errors.SnapbackError, match="stripe root 'one'"):
        weights.run(weights.load_task(1))
    assert weights.loaded(1, stripe_roots=stripes, threads=6) == weights.digests
    assert weights.save(2, stripe_roots=stripes).moved == 0
    assert weights.loaded(2, stripe_roots=stripes) == weights.digests


@pytest.mark.parametrize("last", [70, 90, 110])
def test_a_killed_save_goes_on_in_its_stripe_roots_with_the_same_key(
    weights: Encrypted, tmp_path: Path, last: int
) -> None:
    stripes = {"one": str(tmp_path / "one")}
    Path(stripes["one"]).mkdir()
    task = weights.save_task(stripe_roots=stripes)
    assert weights.doomed(task, last).calls != 0
    weights.run(task)
    assert weights.loaded(1, stripe_roots=stripes) == weights.digests


def test_a_kms_command_has_the_key_in_place_of_a_file(weights: Encrypted, tmp_path: Path) -> None:
    kms = tmp_path / "kms"
    turning = "import sys; sys.stdout.buffer.write(bytes(b ^ 7 for b in sys.stdin.buffer.read()))"
    kms.write_text(f"#!{sys.executable}\n{turning}\n")
    kms.chmod(kms.stat().st_mode | stat.S_IXUSR)
    weights.save(1, artifact_keys="", kms_command=str(kms))
    with pytest.raises(errors.KeyUnavailable, match="key kms"):
        weights.run(weights.load_task())
    assert weights.loaded(artifact_keys="", kms_command=str(kms)) == weights.digests


def test_a_saver_of_a_pod_that_does_not_encrypt_is_refused(weights: Encrypted) -> None:
    with pytest.raises(errors.InvalidInput, match="saver of the pod does not encrypt"):
        weights.run(weights.save_task(staged=os.fspath(weights.root)))
    weights.save()
    with pytest.raises(errors.InvalidInput, match="no loader in a pod has keys"):
        weights.run(weights.load_task(staged=os.fspath(weights.root)))


# What is signed.


def sealed(weights: Encrypted, keys: Path) -> None:
    """Save a generation, and seal and sign it as an agent with these keys does."""
    done = weights.run(weights.save_task(1))
    part = artifact.RootPart(part="gpu-0", kind="gms", bytes=done.bytes, digest=done.digest)
    root = encode_pretty(
        artifact.RootManifest(
            namespace="default",
            content_uid=UID,
            generation=1,
            source=PodRef(namespace="default", name="p", uid=UID, container="main"),
            bytes=done.bytes,
            parts=[part],
        )
    )
    (weights.path_of().parent / artifact.ROOT_MANIFEST).write_bytes(root)
    sign(weights, keys)


def sign(weights: Encrypted, keys: Path) -> None:
    folder = weights.path_of().parent
    signature = ArtifactKeys(keys).signing.sign(
        digest((folder / artifact.ROOT_MANIFEST).read_bytes())
    )
    (folder / artifact.SIGNATURE).write_bytes(encode_pretty(signature))


def test_only_what_a_trusted_key_has_signed_is_loaded_where_that_is_asked_for(
    weights: Encrypted, tmp_path: Path
) -> None:
    signer, other = tmp_path / "signer", tmp_path / "other"
    put_signing(signer, trusted=weights.keys)
    put_signing(other)
    sealed(weights, other)
    task = weights.load_task(require_signature=True)
    with pytest.raises(errors.NotTrusted, match="this node trusts"):
        weights.run(task)
    (weights.path_of().parent / artifact.SIGNATURE).unlink()
    with pytest.raises(errors.NotTrusted, match="has no signature"):
        weights.run(task)
    sign(weights, signer)
    assert weights.loaded(require_signature=True) == weights.digests


def test_a_part_is_not_loaded_beside_the_signed_manifest_of_another(
    weights: Encrypted, tmp_path: Path
) -> None:
    put_signing(tmp_path / "signer", trusted=weights.keys)
    sealed(weights, tmp_path / "signer")
    weights.rewrite(*weights.part().files)
    path = weights.path_of() / "part.json"
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(errors.ArtifactCorrupt, match="not about this gpu-0"):
        weights.run(weights.load_task(require_signature=True))
    (weights.path_of().parent / artifact.ROOT_MANIFEST).unlink()
    with pytest.raises(errors.NotTrusted, match=r"no root\.json above it"):
        weights.run(weights.load_task(require_signature=True))


def options_with(**keys: Any) -> TransferOptions:
    """What a service with these settings gives to those who move bytes."""
    folders = dict.fromkeys(("state_dir", "artifact_root", "socket_dir"), Path("/tmp"))
    return transfer_options(GmsSettings(node="n1", **folders, **keys))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"encrypt_memory": True}, "SNAPBACK_ENCRYPT_MEMORY=1, and there is no encryption.key"),
        ({"require_signature": True}, "SNAPBACK_REQUIRE_SIGNATURE=1, and no signature would be"),
        ({"artifact_keys": Path("/nowhere")}, "SNAPBACK_ARTIFACT_KEYS=/nowhere is no folder"),
    ],
)
def test_a_service_whose_keys_are_not_as_they_should_be_does_not_start(
    settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(errors.InvalidInput, match=re.escape(said)):
        options_with(**settings)


def test_a_service_gives_its_keys_to_those_who_move_bytes(weights: Encrypted) -> None:
    options = options_with(artifact_keys=weights.keys, encrypt_memory=True)
    assert (options.artifact_keys, options.encrypt) == (str(weights.keys), True)
    assert replace(weights.save_task(), **options.of_save()).encrypt
