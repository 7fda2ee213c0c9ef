"""Manifests of artifacts, read from a folder of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from snapshot_shared.artifact import FileEntry, PartManifest, RootManifest
from snapshot_shared.codec import digest, encode_json
from snapshot_shared.errors import ArtifactCorrupt
from snapshot_shared.orders import PartResult, PodRef
from snapshotctl.adapters.artifact_files import manifests_of
from snapshotctl.views.artifact_tables import CapturedArtifact
from tests.support import builders


def _artifact(root: Path) -> CapturedArtifact:
    """Write an artifact of one part, and return its content."""
    uid = builders.content().metadata.uid
    file = FileEntry(name="state", size=10, chunk_bytes=4096, chunks=["a" * 32])
    part = encode_json(
        PartManifest(
            kind="process",
            part="process",
            namespace="default",
            content_uid=uid,
            generation=1,
            order=f"dump-{uid}",
            bytes=10,
            files=[file],
        )
    )
    source = PodRef(namespace="default", name="w", uid=uid)
    whole = encode_json(
        RootManifest(
            namespace="default", content_uid=uid, generation=1, source=source, bytes=10, parts=[]
        )
    )
    folder = root / "default" / uid / "gen-1"
    (folder / "process").mkdir(parents=True)
    (folder / "root.json").write_bytes(whole)
    (folder / "process" / "part.json").write_bytes(part)
    parts = [PartResult(part="process", bytes=10, digest=digest(part))]
    committed = builders.committed(root_digest=digest(whole), parts=parts)
    return CapturedArtifact(builders.content(committed=committed), None, str(root))


def test_the_manifests_that_were_committed_are_read(tmp_path: Path) -> None:
    found = manifests_of(_artifact(tmp_path))
    assert found is not None
    assert [file.name for part in found.parts for file in part.files] == ["state"]


@pytest.mark.parametrize("name", ["root.json", "process/part.json"])
def test_a_manifest_that_was_changed_or_removed_is_no_artifact(tmp_path: Path, name: str) -> None:
    artifact = _artifact(tmp_path)
    [path] = tmp_path.rglob(name)
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(ArtifactCorrupt, match="is not the manifest"):
        manifests_of(artifact)
    path.unlink()
    with pytest.raises(ArtifactCorrupt, match="is gone"):
        manifests_of(artifact)


def test_an_artifact_of_another_machine_cannot_be_read_here(tmp_path: Path) -> None:
    artifact = _artifact(tmp_path / "there")
    assert manifests_of(artifact._replace(root=str(tmp_path / "missing"))) is None
    assert manifests_of(artifact._replace(root=str(tmp_path))) is None
    assert manifests_of(artifact._replace(root="")) is None
