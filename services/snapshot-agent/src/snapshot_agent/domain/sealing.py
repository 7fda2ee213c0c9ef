"""The checks that make staged parts an artifact, and the root manifest over them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from snapshot_shared.artifact import Facts, PartManifest, RootManifest, RootPart
from snapshot_shared.errors import ArtifactCorrupt, ArtifactMissing
from snapshot_shared.orders import PartResult, SealOrder, VectorEntry


def check_plan(order: SealOrder, on_disk: Iterable[str]) -> None:
    """Raise ArtifactCorrupt or ArtifactMissing unless plan, staged parts and disk are the same."""
    planned = sorted(entry.part for entry in order.vector)
    staged = sorted(result.part for result in order.parts)
    if planned != staged:
        raise ArtifactCorrupt(
            f"the plan has parts {planned}, {staged} were staged", expected=planned, found=staged
        )
    present = sorted(on_disk)
    if missing := [part for part in planned if part not in present]:
        raise ArtifactMissing(f"these parts are not on disk: {missing}", missing=missing)
    if present != planned:
        raise ArtifactCorrupt(
            f"the generation holds parts {present}, the plan has {planned}",
            expected=planned,
            found=present,
        )


def check_part(
    order: SealOrder, result: PartResult, manifest: PartManifest, digest: str
) -> PartManifest:
    """Return the manifest. ArtifactCorrupt unless its part was staged for this plan."""
    entry = next(found for found in order.vector if found.part == result.part)
    kind = "process" if result.part == "process" else "gms"
    for what, found, expected in (
        ("digest", digest, result.digest),
        ("bytes", manifest.bytes, result.bytes),
        ("kind", manifest.kind, kind),
        ("part", manifest.part, result.part),
        ("namespace", manifest.namespace, order.namespace),
        ("content", manifest.content_uid, order.content_uid),
        ("generation", manifest.generation, order.attempt),
    ):
        _check(result.part, what, found, expected)
    _check_vector(order.vector, entry, manifest)
    return manifest


def check_proven(root: RootManifest, row: RootPart, manifest: PartManifest, digest: str) -> None:
    """Raise ArtifactCorrupt unless a part on disk is the one of the root manifest."""
    for what, found, expected in (
        ("digest", digest, row.digest),
        ("part", manifest.part, row.part),
        ("kind", manifest.kind, row.kind),
        ("bytes", manifest.bytes, row.bytes),
        ("namespace", manifest.namespace, root.namespace),
        ("content", manifest.content_uid, root.content_uid),
        ("generation", manifest.generation, root.generation),
    ):
        _check(row.part, what, found, expected)


def _check(part: str, what: str, found: object, expected: object) -> None:
    if found != expected:
        raise ArtifactCorrupt(
            f"part {part}: {what} is {found}, expected {expected}",
            part=part,
            found=found,
            expected=expected,
        )


def _check_vector(
    vector: Sequence[VectorEntry], entry: VectorEntry, manifest: PartManifest
) -> None:
    saved = manifest.layout.source if manifest.layout else None
    if saved != entry.layout:
        raise ArtifactCorrupt(
            f"part {entry.part} holds another layout than the plan",
            part=entry.part,
            found=saved and saved.generation,
            expected=entry.layout and entry.layout.generation,
        )
    carries = manifest.kind == "process" or manifest.vector
    if carries and _by_part(manifest.vector) != _by_part(vector):
        raise ArtifactCorrupt(
            f"part {entry.part} was staged for another vector", part=entry.part, field="vector"
        )


def _by_part(vector: Sequence[VectorEntry]) -> list[VectorEntry]:
    return sorted(vector, key=lambda entry: entry.part)


def root_manifest(order: SealOrder, parts: Sequence[tuple[PartManifest, str]]) -> RootManifest:
    """Return the root manifest over checked parts, each with its digest. It is deterministic."""
    rows = [
        RootPart(
            part=manifest.part,
            kind=manifest.kind,
            bytes=manifest.bytes,
            digest=digest,
            layout=manifest.layout.source if manifest.layout else None,
        )
        for manifest, digest in sorted(parts, key=lambda row: row[0].part)
    ]
    facts = next((m.facts for m, _ in parts if m.kind == "process" and m.facts), Facts())
    return RootManifest(
        namespace=order.namespace,
        content_uid=order.content_uid,
        generation=order.attempt,
        source=order.pod,
        bytes=sum(row.bytes for row in rows),
        parts=rows,
        facts=facts,
    )
