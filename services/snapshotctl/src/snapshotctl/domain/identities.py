"""The identity hashes of the checkpoints of a file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from snapshot_shared.errors import InvalidManifest
from snapshot_shared.identity import canonical_json, identity_hash
from snapshot_shared.manifests import parse_identity
from snapshotctl.domain.documents import Document

KIND = "DynamoCheckpoint"


class Identified(NamedTuple):
    """A checkpoint as it is called, its hash, and the text that was hashed."""

    name: str
    namespace: str | None
    hash: str
    hashed: str

    def value(self) -> dict[str, Any]:
        """Return what a program reads."""
        return {
            "kind": KIND,
            "name": self.name,
            "namespace": self.namespace,
            "identityHash": self.hash,
            "hashed": self.hashed,
        }


def identified(documents: Iterable[Document]) -> list[Identified]:
    """Return the checkpoints among some documents, in their order.

    Raise InvalidManifest with every problem, and when no document is a DynamoCheckpoint.
    """
    found: list[Identified] = []
    problems: list[str] = []
    for document in documents:
        if isinstance(document.value, dict) and document.value.get("kind") not in (KIND, None):
            continue
        try:
            found.append(_identified(document))
        except InvalidManifest as error:
            problems += error.values.get("problems", [error.message])
    if not found and not problems:
        problems = [f"no {KIND} is in this file, and only a {KIND} has an identity"]
    if problems:
        raise InvalidManifest(
            f"{len(problems)} problem{'' if len(problems) == 1 else 's'}",
            next_step="correct the fields and run it again",
            problems=problems,
        )
    return found


def _identified(document: Document) -> Identified:
    value = msgspec.json.decode(document.encode())
    identity = parse_identity(value, where=f"{document.where}: ")
    meta = value.get("metadata")
    named = meta if isinstance(meta, dict) else {}
    name, namespace = named.get("name"), named.get("namespace")
    return Identified(
        name if isinstance(name, str) and name else document.where,
        namespace if isinstance(namespace, str) else None,
        identity_hash(identity),
        canonical_json(identity).decode(),
    )
