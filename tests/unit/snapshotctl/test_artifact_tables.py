"""Captured artifacts as lists, how two of them differ, and their manifests in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from snapshot_shared.artifact import Facts, FileEntry, PartManifest, RootManifest, SavedLayout
from snapshot_shared.codec import digest, encode_json
from snapshot_shared.compatibility import verdicts
from snapshot_shared.errors import ArtifactCorrupt
from snapshot_shared.ids import derived_uid
from snapshot_shared.orders import PartResult, PodRef
from snapshotctl.adapters.artifact_files import manifests_of
from snapshotctl.views import artifact_tables
from snapshotctl.views.artifact_tables import CapturedArtifact, Manifests
from tests.support import builders, objects
from tests.support.builders import NOW, row
from tests.unit.tables import each

UID = derived_uid("content", "snap")
CHUNK = 4096


def _file(*chunks: str, size: int | None = None, name: str = "shard", chunk: int = CHUNK) -> Any:
    digests = [digit * 32 for digit in chunks]
    total = size if size is not None else chunk * len(chunks)
    return FileEntry(name=name, size=total, chunk_bytes=chunk, chunks=digests)


def _part(*files: FileEntry, part: str = "gpu-0", structure: str = "s") -> PartManifest:
    layout = SavedLayout(source=builders.layout(structure_hash=structure), allocations=[])
    of_part = {"part": part, "content_uid": UID, "order": f"save-{UID}-{part}"}
    return builders.part_manifest(*files, layout=layout, **of_part)


def _root(**facts: Any) -> RootManifest:
    source = PodRef(namespace="default", name="w", uid=UID)
    of_content: dict[str, Any] = {"namespace": "default", "content_uid": UID, "generation": 1}
    return RootManifest(source=source, bytes=1, parts=[], facts=Facts(**facts), **of_content)


def _manifests(*parts: PartManifest, **facts: Any) -> Manifests:
    return Manifests(_root(**facts), parts)


@each(
    ("left", "right", "differing"),
    [
        (_file("a", "b"), _file("a", "b"), 0),
        (_file("a", "b"), _file("a", "c"), CHUNK),
        (_file("a", "b", size=CHUNK + 10), _file("a", "c", size=CHUNK + 10), 10),
        (_file("a", "b", size=CHUNK + 10), _file("a", "c"), CHUNK),
        (_file("a"), _file("a", "b", "c"), 2 * CHUNK),
        (_file("a"), _file("a", name="other"), 2 * CHUNK),
        (_file("a"), _file("a", chunk=2 * CHUNK), None),
    ],
)
def test_the_bytes_that_differ_are_those_of_the_chunks_that_differ(
    left: FileEntry, right: FileEntry, differing: int | None
) -> None:
    [part] = artifact_tables.difference(_manifests(_part(left)), _manifests(_part(right))).parts
    assert part.differing == differing
    [back] = artifact_tables.difference(_manifests(_part(right)), _manifests(_part(left))).parts
    assert back.differing == differing


def test_a_file_in_a_stripe_root_is_shown_with_its_name() -> None:
    files = (_file("1", name="a"), replace(_file("2", name="b"), stripe="disk1"))
    table = artifact_tables.files_table(_manifests(_part(*files)))
    assert [row[1] for row in table.rows] == ["a", "disk1:b"]


@each(
    ("fact", "left", "right", "shown"),
    [
        ("arch", "x86_64", "aarch64", ("x86_64", "aarch64")),
        # Of instructions, those that one processor alone has.
        ("cpu", ["avx2", "fma", "sse2"], ["sse2", "vaes"], ("avx2 fma", "vaes")),
        ("cpu", ["avx2", "fma", "sse2"], ["fma", "sse2"], ("avx2", "-")),
    ],
)
def test_a_fact_that_differs_has_both_values(
    fact: str, left: Any, right: Any, shown: tuple[str, str]
) -> None:
    one, other = (_manifests(devices=2, **{fact: value}) for value in (left, right))
    assert artifact_tables.difference(one, other).facts == {fact: shown}


def test_a_node_is_compared_by_the_devices_and_the_driver_of_the_source_where_it_has_them() -> None:
    devices = [
        builders.device(index=n, product=product) for n, product in enumerate(["L4", *["H100"] * 2])
    ]
    seen = replace(objects.presence("n"), devices=devices, drivers=["cooperative", "criu"])
    of = artifact_tables.facts_of_node
    source = Facts(driver="criu", device_product="H100", devices=2)
    found = of(Facts(arch="x86_64"), seen, source)
    assert found == Facts(arch="x86_64", driver="criu", device_product="H100", devices=2)
    other = of(Facts(), seen, Facts(driver="respawn", device_product="A100", devices=1))
    assert (other.driver, other.device_product) == ("cooperative, criu", "L4")
    bare = replace(seen, devices=[])
    assert of(Facts(), bare, source).device_product == "none"


def test_a_verdict_shows_both_values_and_of_many_words_those_that_are_missing() -> None:
    many = [f"x{number}" for number in range(10)]
    source = Facts(driver="criu", kernel="6.12.1", cpu=["avx512f", *many])
    here = Facts(driver="criu", kernel="6.18.0", cpu=many)
    table = artifact_tables.verdicts_table(verdicts(source, here), "node-2")
    assert table.columns == ("FACT", "SOURCE", "node-2", "VERDICT")
    assert ("Linux", "6.12.1", "6.18.0", "fits") in table.rows
    assert ("instructions of the processor", "avx512f", "10 of them", "refused") in table.rows
    assert ("architecture", "-", "-", "unknown") in table.rows


def test_another_structure_is_a_difference_and_a_part_that_only_one_has_differs_as_a_whole() -> (
    None
):
    one = _manifests(_part(_file("a")))
    assert artifact_tables.difference(one, one).is_none
    other = _manifests(_part(_file("a"), structure="t"))
    found = artifact_tables.difference(one, other)
    assert not found.is_none
    assert found.parts[0].structure == "differs: 0 and 0 allocations"
    left = _manifests(_part(_file("a")), _part(_file("b"), part="gpu-1"))
    right = _manifests(_part(_file("a")))
    found = artifact_tables.difference(left, right).parts[1]
    assert (found.part, found.differing, found.structure) == ("gpu-1", CHUNK, "only in the first")
    assert artifact_tables.difference(right, left).parts[1].structure == "only in the second"


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ({}, "not verified"),
        ({"conditions": [row("Verified", "True", "DigestsMatch")]}, "verified"),
        ({"verifications": 1}, "verifying"),
        ({"conditions": [row("Quarantined", "True", "ArtifactCorrupt")]}, "quarantined"),
    ],
)
def test_the_list_says_whether_an_artifact_was_verified(status: dict[str, Any], state: str) -> None:
    held = builders.content("held", committed=builders.committed(), **status)
    node = builders.node(artifact_root="/data")
    found = artifact_tables.artifacts([held, builders.content("pending")], [], [node])
    [(space, name, size, generation, where, identity, *_, shown, root)] = artifact_tables.table(
        found, NOW
    ).rows
    assert (space, name, size, generation) == ("default", "held", "10 B", "gen-1")
    assert (where, identity, shown, root) == ("node-1", "pod worker", state, "/data")
    assert found[0].folder == f"/data/default/{held.metadata.uid}/gen-1"


def _artifact(folder: Path) -> CapturedArtifact:
    """Write an artifact of one part, and return its content."""
    part, root = encode_json(_part(_file("a", name="state"))), encode_json(_root())
    place = folder / "default" / UID / "gen-1"
    (place / "gpu-0").mkdir(parents=True)
    (place / "root.json").write_bytes(root)
    (place / "gpu-0" / "part.json").write_bytes(part)
    parts = [PartResult(part="gpu-0", bytes=10, digest=digest(part))]
    committed = builders.committed(root_digest=digest(root), parts=parts)
    return CapturedArtifact(builders.content(committed=committed), None, str(folder))


def test_the_committed_manifests_are_read_if_they_are_on_this_machine(tmp_path: Path) -> None:
    artifact = _artifact(tmp_path / "there")
    found = manifests_of(artifact)
    assert found is not None
    assert [file.name for part in found.parts for file in part.files] == ["state"]
    assert manifests_of(artifact._replace(root=str(tmp_path / "missing"))) is None
    assert manifests_of(artifact._replace(root=str(tmp_path))) is None
    assert manifests_of(artifact._replace(root="")) is None


@pytest.mark.parametrize("name", ["root.json", "gpu-0/part.json"])
def test_a_manifest_that_was_changed_or_removed_is_no_artifact(tmp_path: Path, name: str) -> None:
    artifact = _artifact(tmp_path)
    [path] = tmp_path.rglob(name)
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(ArtifactCorrupt, match="is not the manifest"):
        manifests_of(artifact)
    path.unlink()
    with pytest.raises(ArtifactCorrupt, match="is gone"):
        manifests_of(artifact)
