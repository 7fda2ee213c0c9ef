"""The command identity: the identity hashes of the checkpoints of a file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from snapshot_api.identity import canonical_json, identity_hash
from snapshot_api.manifests import parse_identity
from snapshot_shared.errors import InvalidManifest
from snapshotctl.command import Files, command, new_app
from snapshotctl.domain import formats
from snapshotctl.domain.documents import Document
from snapshotctl.tools import Tools

KIND = "DynamoCheckpoint"

app = new_app()


@command(
    app,
    "snapshotctl identity -f deploy/examples/checkpoint.yaml",
    "snapshotctl identity -f checkpoint.yaml -o json | jq -r '.[].identityHash'",
)
async def identity(tools: Tools, files: Files) -> None:
    """Print the identity hash of each DynamoCheckpoint of a file, without a server.

    It is what status.checkpointID will be. Artifacts of equal hashes are interchangeable. Only
    spec.identity is read; manifests of other kinds are passed over.
    """
    found = identified(tools.documents(*files))
    if not tools.screen.wants_table:
        tools.screen.value([checkpoint.value() for checkpoint in found])
        return
    for checkpoint in found:
        tools.screen.line(f"{checkpoint.hash}  {formats.plain(checkpoint.name)}")


class Identified(NamedTuple):
    """A checkpoint: its name, its hash, and the text that was hashed."""

    name: str
    namespace: str | None
    hash: str
    hashed: str

    def value(self) -> dict[str, Any]:
        """Return what `-o json` prints."""
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
            found_here = error.values.get("problems", [error.message])
            problems += [document.placed(problem) for problem in found_here]
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
    spec = parse_identity(value)
    meta = value.get("metadata")
    named = meta if isinstance(meta, dict) else {}
    name, namespace = named.get("name"), named.get("namespace")
    return Identified(
        name if isinstance(name, str) and name else document.where,
        namespace if isinstance(namespace, str) else None,
        identity_hash(spec),
        canonical_json(spec).decode(),
    )
