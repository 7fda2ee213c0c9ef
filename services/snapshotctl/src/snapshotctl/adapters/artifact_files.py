"""The manifests of an artifact, where its root can be read from this machine."""

from __future__ import annotations

from pathlib import Path

from snapshot_api.v1alpha1.content import Committed
from snapshot_shared import files
from snapshot_shared.artifact import (
    PART_MANIFEST,
    ROOT_MANIFEST,
    PartManifest,
    RootManifest,
    check_part_manifest,
    generation_path,
)
from snapshot_shared.codec import MAX_MANIFEST_BYTES, decode_json, digest
from snapshot_shared.errors import ArtifactCorrupt, ArtifactMissing
from snapshotctl.views.artifact_tables import CapturedArtifact, Manifests

_NEXT = "have all of it read, which brings it into quarantine: snapshotctl verify NAME"


def manifests_of(artifact: CapturedArtifact) -> Manifests | None:
    """Read the manifests of an artifact; None when they cannot be read here.

    ArtifactCorrupt when they are not those that were committed. Manifests are hostile input.
    """
    committed = artifact.content.status.committed
    if committed is None or not artifact.root or not Path(artifact.root).is_dir():
        return None
    space, uid = artifact.content.spec.snapshot_ref.namespace, artifact.content.metadata.uid
    where = generation_path(space, uid, committed.generation)
    try:
        with (
            files.opened(files.open_root(artifact.root)) as root,
            files.opened(files.open_dir(root, where)) as folder,
        ):
            return _read(folder, committed)
    # A root of the same name on another machine is no artifact that went missing.
    except (PermissionError, ArtifactMissing):
        return None


def _read(folder: int, committed: Committed) -> Manifests:
    root = _checked(folder, (), ROOT_MANIFEST, committed.root_digest)
    parts = []
    for part in committed.parts:
        data = _checked(folder, (part.part,), PART_MANIFEST, part.digest)
        manifest = decode_json(data, PartManifest, limit=MAX_MANIFEST_BYTES)
        parts.append(check_part_manifest(manifest))
    return Manifests(decode_json(root, RootManifest, limit=MAX_MANIFEST_BYTES), parts)


def _checked(folder: int, where: tuple[str, ...], name: str, wanted: str) -> bytes:
    try:
        with files.opened(files.open_dir(folder, where)) as place:
            data = files.read_bounded(place, name, MAX_MANIFEST_BYTES)
    except ArtifactMissing as error:
        raise ArtifactCorrupt(f"{'/'.join((*where, name))} is gone", next_step=_NEXT) from error
    if digest(data) != wanted:
        raise ArtifactCorrupt(
            f"{'/'.join((*where, name))} is not the manifest that was committed",
            next_step=_NEXT,
            expected=wanted,
            found=digest(data),
        )
    return data
