"""Captured artifacts as tables: all of them, one in detail, and how two differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from snapshot_api.facts import Node
from snapshot_api.meta import condition
from snapshot_api.v1alpha1.checkpoint import DynamoCheckpoint
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_shared.artifact import Facts, FileEntry, PartManifest, RootManifest
from snapshot_shared.compatibility import Verdict
from snapshot_shared.orders import ArtifactRef, Presence
from snapshotctl.domain import formats
from snapshotctl.views.state import artifact_state
from snapshotctl.views.tables import Table

MAX_WORDS = 8
"""How many words of a fact are shown in a line."""


class CapturedArtifact(NamedTuple):
    """A captured artifact, the checkpoint that owns it, and the artifact root of its node."""

    content: SnapshotContent
    checkpoint: DynamoCheckpoint | None
    root: str

    @property
    def name(self) -> str:
        """The snapshot's name, which is the checkpoint's where there is one."""
        return self.content.spec.snapshot_ref.name

    @property
    def namespace(self) -> str:
        """The snapshot's namespace."""
        return self.content.spec.snapshot_ref.namespace

    @property
    def bytes(self) -> int:
        """What is committed."""
        committed = self.content.status.committed
        return committed.bytes if committed is not None else 0

    @property
    def state(self) -> str:
        """As `snapshotctl.views.state.artifact_state`."""
        return artifact_state(self.content)

    @property
    def identity(self) -> str:
        """The model of its checkpoint, or its source where it has none."""
        if self.checkpoint is None:
            pod = self.content.spec.source.pod_ref
            return f"pod {pod.name}" if pod else "imported"
        return self.checkpoint.spec.identity.model

    @property
    def folder(self) -> str:
        """Its folder below the artifact root of its node."""
        committed = self.content.status.committed
        generation = committed.generation if committed else 0
        space, uid = self.content.spec.snapshot_ref.namespace, self.content.artifact_uid
        return f"{self.root}/{space}/{uid}/gen-{generation}"

    @property
    def reference(self) -> ArtifactRef:
        """What orders call it by."""
        committed = self.content.status.committed
        return ArtifactRef(
            namespace=self.namespace,
            content_uid=self.content.artifact_uid,
            generation=committed.generation if committed else 0,
            root_digest=committed.root_digest if committed else "",
        )

    @property
    def node(self) -> str:
        """The node on which it was captured, or the one that has read it for an import."""
        return node_of(self.content)

    def value(self) -> dict[str, Any]:
        """Return what `-o json` prints."""
        committed, status = self.content.status.committed, self.content.status
        verified = condition(status.conditions, "Verified")
        return {
            "name": self.name,
            "namespace": self.content.spec.snapshot_ref.namespace,
            "content": self.content.metadata.name,
            "bytes": committed.bytes if committed else 0,
            "generation": committed.generation if committed else 0,
            "rootDigest": committed.root_digest if committed else "",
            "node": self.node,
            "folder": self.folder,
            "identity": self.identity,
            "created": self.content.metadata.creation_timestamp,
            "readers": list(status.readers),
            "state": self.state,
            "verified": verified.last_transition_time if verified else "",
            "parts": msgspec.to_builtins(committed.parts) if committed else [],
        }


class Manifests(NamedTuple):
    """The manifests on disk: that of the root and those of the parts."""

    root: RootManifest
    parts: Sequence[PartManifest]


def node_of(content: SnapshotContent) -> str:
    """Return the node on which an artifact was captured, or that has read it for an import."""
    reads = (item.node for item in content.status.orders if item.verb == "verify")
    return content.spec.source.node_name or next(reads, "")


def artifacts(
    contents: Iterable[SnapshotContent],
    checkpoints: Iterable[DynamoCheckpoint],
    nodes: Iterable[Node],
) -> list[CapturedArtifact]:
    """Return the artifacts that are captured, the newest first."""
    owners = {(c.metadata.namespace, c.metadata.name): c for c in checkpoints}
    roots = {node.metadata.name: node.status.artifact_root for node in nodes}
    found = []
    for content in contents:
        if content.status.committed is None:
            continue
        reference = content.spec.snapshot_ref
        owner = owners.get((reference.namespace, reference.name))
        is_ours = owner is not None and owner.status.content_name == content.metadata.name
        root = roots.get(node_of(content), "")
        found.append(CapturedArtifact(content, owner if is_ours else None, root))
    return sorted(found, key=lambda a: a.content.metadata.creation_timestamp, reverse=True)


def table(found: Sequence[CapturedArtifact], now: float) -> Table:
    """Return artifacts as a table. `now` is seconds since the epoch."""
    head = (
        "NAMESPACE",
        "NAME",
        "SIZE",
        "GENERATION",
        "NODE",
        "IDENTITY",
        "AGE",
        "READERS",
        "STATE",
        "ROOT",
    )
    rows = []
    for artifact in found:
        content = artifact.content
        committed = content.status.committed
        cells = (
            content.spec.snapshot_ref.namespace,
            artifact.name,
            formats.size(committed.bytes) if committed else "-",
            f"gen-{committed.generation}" if committed else "-",
            artifact.node,
            artifact.identity,
            formats.age_of(content.metadata.creation_timestamp, now),
            str(len(content.status.readers)),
            artifact.state,
            artifact.root or "unknown",
        )
        rows.append(tuple(map(formats.plain, cells)))
    return Table(head, rows, ("ROOT", "GENERATION", "READERS", "NAMESPACE"))


def parts_table(artifact: CapturedArtifact, manifests: Manifests | None) -> Table:
    """Return the parts of an artifact as a table, with files and chunks where those are known."""
    committed = artifact.content.status.committed
    known = {part.part: part for part in manifests.parts} if manifests else {}
    layouts = {entry.part: entry.layout for entry in (committed.vector if committed else [])}
    rows = []
    for part in committed.parts if committed else []:
        layout, manifest = layouts.get(part.part), known.get(part.part)
        rows.append(
            (
                part.part,
                formats.size(part.bytes),
                str(len(manifest.files)) if manifest else "?",
                str(sum(len(file.chunks) for file in manifest.files)) if manifest else "?",
                part.digest,
                layout.structure_hash[:16] if layout else "-",
            )
        )
    return Table(("PART", "SIZE", "FILES", "CHUNKS", "DIGEST", "STRUCTURE"), list(rows))


def files_table(manifests: Manifests) -> Table:
    """Return every file of every part as a table, with the name of its stripe root before it."""
    rows = [
        (
            part.part,
            f"{file.stripe}:{file.name}" if file.stripe else file.name,
            str(file.size),
            f"{len(file.chunks)} x {formats.size(file.chunk_bytes)}",
            file.chunks[0] if file.chunks else "-",
        )
        for part in manifests.parts
        for file in part.files
    ]
    return Table(("PART", "FILE", "BYTES", "CHUNKS", "FIRST DIGEST"), list(rows))


def facts(manifests: Manifests) -> dict[str, str]:
    """Return the facts of the source that are known, as text."""
    found = msgspec.to_builtins(manifests.root.facts)
    return {
        name: " ".join(value) if isinstance(value, list) else str(value)
        for name, value in found.items()
        if value
    }


def shortened(fact: str, text: str) -> str:
    """Return a fact as it fits into a line."""
    words = text.split()
    return f"{len(words)} of them" if fact == "cpu" and len(words) > MAX_WORDS else text


def facts_of_node(facts: Facts, presence: Presence, source: Facts) -> Facts:
    """Return the facts of a node, with its drivers and devices, as a restore of `source` has them.

    Of several kinds of devices, or drivers, the one of the source counts.
    """
    drivers, devices = presence.drivers, presence.devices
    products = [device.product for device in devices]
    same = [product for product in products if product == source.device_product]
    return msgspec.structs.replace(
        facts,
        driver=source.driver if source.driver in drivers else ", ".join(drivers),
        device_product=(same or products or ["none"])[0],
        devices=len(same or products),
    )


def verdicts_table(found: Sequence[Verdict], node: str) -> Table:
    """Return what the facts of an artifact mean for a node as a table."""
    rows = []
    for fact, source, here, outcome, needed in found:
        if outcome == "refused" and fact.rule == "all of":
            source = needed  # noqa: PLW2901 - what is missing, of many
        texts = (shortened(fact.name, text) or "-" for text in (source, here))
        rows.append(tuple(map(formats.plain, (fact.title, *texts, outcome))))
    return Table(("FACT", "SOURCE", node, "VERDICT"), rows)


class PartDifference(NamedTuple):
    """How one part differs: its bytes in both, and how many of them differ.

    `differing` is None where the chunks cannot be compared.
    """

    part: str
    left: int | None
    right: int | None
    differing: int | None
    structure: str

    def value(self) -> dict[str, Any]:
        """Return what `-o json` prints."""
        return self._asdict()


class Difference(NamedTuple):
    """How two artifacts differ: facts with both values, and the parts."""

    facts: Mapping[str, tuple[str, str]]
    parts: Sequence[PartDifference]

    @property
    def is_none(self) -> bool:
        """Whether both hold the same."""
        return not self.facts and all(
            part.differing == 0 and part.structure == "same" for part in self.parts
        )


def difference(left: Manifests, right: Manifests) -> Difference:
    """Return how two artifacts differ: facts, structure, and chunks by their digests."""
    ours, theirs = facts(left), facts(right)
    changed = {
        name: _unlike_facts(name, ours.get(name, ""), theirs.get(name, ""))
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    }
    mine = {part.part: part for part in left.parts}
    other = {part.part: part for part in right.parts}
    names = sorted(mine.keys() | other.keys(), key=lambda name: (name != "process", name))
    return Difference(changed, [_part(name, mine.get(name), other.get(name)) for name in names])


def _unlike_facts(name: str, left: str, right: str) -> tuple[str, str]:
    if name == "cpu" and left and right:
        # They have most of a hundred words in common.
        ours, theirs = left.split(), right.split()
        left = " ".join(word for word in ours if word not in theirs)
        right = " ".join(word for word in theirs if word not in ours)
    return left or "-", right or "-"


def _part(name: str, left: PartManifest | None, right: PartManifest | None) -> PartDifference:
    if left is None or right is None:
        only = left or right
        size = only.bytes if only else 0
        where = "only in the first" if left else "only in the second"
        ours, theirs = left.bytes if left else None, right.bytes if right else None
        return PartDifference(name, ours, theirs, size, where)
    return PartDifference(
        name, left.bytes, right.bytes, _differing(left, right), _structure(left, right)
    )


def _structure(left: PartManifest, right: PartManifest) -> str:
    if left.layout is None or right.layout is None:
        same = [file.name for file in left.files] == [file.name for file in right.files]
        return "same" if same else "other files"
    hashes = (left.layout.source.structure_hash, right.layout.source.structure_hash)
    if hashes[0] == hashes[1]:
        return "same"
    counts = (len(left.layout.allocations), len(right.layout.allocations))
    return f"differs: {counts[0]} and {counts[1]} allocations"


def _differing(left: PartManifest, right: PartManifest) -> int | None:
    ours = {file.name: file for file in left.files}
    theirs = {file.name: file for file in right.files}
    total = 0
    for name in ours.keys() | theirs.keys():
        one, other = ours.get(name), theirs.get(name)
        if one is None or other is None:
            total += (one or other).size  # type: ignore[union-attr]  # the name is from one of them
        elif one.chunk_bytes != other.chunk_bytes:
            return None
        else:
            total += sum(_unlike(one, other))
    return total


def _unlike(one: FileEntry, other: FileEntry) -> Iterator[int]:
    """Yield the bytes of each chunk that differs, as many as the larger one has."""
    for index in range(max(len(one.chunks), len(other.chunks))):
        sizes = [_chunk(file, index) for file in (one, other)]
        digests = [
            file.chunks[index] if size else ""
            for file, size in zip((one, other), sizes, strict=True)
        ]
        if digests[0] != digests[1]:
            yield max(sizes)


def _chunk(file: FileEntry, index: int) -> int:
    return max(0, min(file.chunk_bytes, file.size - index * file.chunk_bytes))


def difference_table(found: Difference) -> Table:
    """Return how the parts differ as a table."""
    rows = [
        (
            part.part,
            "-" if part.left is None else formats.size(part.left),
            "-" if part.right is None else formats.size(part.right),
            "unknown" if part.differing is None else formats.size(part.differing),
            part.structure,
        )
        for part in found.parts
    ]
    return Table(("PART", "FIRST", "SECOND", "DIFFERING", "STRUCTURE"), list(rows))
