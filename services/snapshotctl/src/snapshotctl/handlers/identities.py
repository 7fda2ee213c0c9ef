"""The command identity."""

from __future__ import annotations

from collections.abc import Sequence

from snapshotctl.domain import formats
from snapshotctl.domain.documents import Document
from snapshotctl.domain.identities import identified
from snapshotctl.ports import Screen


def show(screen: Screen, documents: Sequence[Document]) -> None:
    """Print hash and name of each checkpoint. Raise InvalidManifest."""
    found = identified(documents)
    if not screen.wants_table:
        screen.value([checkpoint.value() for checkpoint in found])
        return
    for checkpoint in found:
        screen.line(f"{checkpoint.hash}  {formats.plain(checkpoint.name)}")
