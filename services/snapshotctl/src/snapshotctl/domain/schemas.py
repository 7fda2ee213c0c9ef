"""Which schema is meant by what people type."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from snapshotctl.domain.exits import WrongArguments


def named(text: str, known: Iterable[str]) -> str:
    """Find a type: `report.v1`, `report`, `snapback.v1.report` or a kind. WrongArguments."""
    names = sorted(known)
    wanted = text.lower()
    if wanted.startswith("snapback.v1."):
        wanted = wanted.removeprefix("snapback.v1.") + ".v1"
    found = [name for name in names if wanted in (name, name.partition(".")[0])]
    if found:
        return found[0]
    close = difflib.get_close_matches(
        wanted.partition(".")[0], [n.partition(".")[0] for n in names]
    )
    meant = f"did you mean {' or '.join(close)}? " if close else ""
    raise WrongArguments(
        f"no message or object is of type {text[:80]!r}",
        next_step=f"{meant}list all of them: snapshotctl schema",
    )
