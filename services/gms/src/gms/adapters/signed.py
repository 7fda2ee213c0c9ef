"""Whether the part of a load belongs to an artifact that a trusted key has signed."""

from __future__ import annotations

from pathlib import Path

from gms.domain.tasks import LoadTask
from snapshot_shared.artifact import (
    MAX_SIGNATURE_BYTES,
    ROOT_MANIFEST,
    SIGNATURE,
    RootManifest,
    Signature,
    generation_path,
)
from snapshot_shared.codec import MAX_MANIFEST_BYTES, decode_json, digest
from snapshot_shared.errors import ArtifactCorrupt, ArtifactMissing, NotTrusted
from snapshot_shared.files import open_dir, opened, read_bounded
from snapshot_shared.keys import ArtifactKeys


def check_signed(root: int, task: LoadTask) -> None:
    """Raise NotTrusted unless a root manifest that is signed names the part, ArtifactCorrupt.

    `root` is a descriptor of the artifact root.
    """
    folder = Path(task.artifact_keys) if task.artifact_keys else None
    signing = ArtifactKeys(folder, task.kms_command, require_signature=True).signing
    place = (task.namespace, task.content_uid, task.generation)
    with opened(open_dir(root, generation_path(*place))) as directory:
        data = _read(directory, ROOT_MANIFEST, MAX_MANIFEST_BYTES)
        signature = _read(directory, SIGNATURE, MAX_SIGNATURE_BYTES)
    if data is None:
        raise NotTrusted(
            f"{task.part} belongs to no artifact: there is no {ROOT_MANIFEST} above it, which "
            "could be signed; this node wants a signature",
            next_step="load a part of an artifact that was captured, or unset "
            "SNAPBACK_REQUIRE_SIGNATURE",
            expected=list(signing.trusted),
            found="",
        )
    signing.check(decode_json(signature, Signature) if signature else None, digest(data))
    manifest = decode_json(data, RootManifest, limit=MAX_MANIFEST_BYTES)
    named = {row.part: row.digest for row in manifest.parts}.get(task.part)
    found = (manifest.namespace, manifest.content_uid, manifest.generation, named)
    if found != (*place, task.part_digest):
        raise ArtifactCorrupt(
            f"the root manifest that is signed is not about this {task.part}",
            next_step="restore another snapshot; this one is damaged",
            expected=task.part_digest,
            found=named or "",
        )


def _read(directory: int, name: str, limit: int) -> bytes | None:
    try:
        return read_bounded(directory, name, limit)
    except ArtifactMissing:
        return None
