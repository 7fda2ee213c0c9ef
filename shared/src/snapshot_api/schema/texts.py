"""What the fields of structs mean: for each the string below it in the source.

`make docs` reads the sources and packs the texts into texts.json, for the operator writes
definitions with them and an installed package need not have its sources.
"""

from __future__ import annotations

from functools import cache
from importlib import resources

import msgspec

PACKED = "texts.json"


def key(struct: type, field: str) -> str:
    """Return the name of a field in texts.json: two versions of a kind have structs of one name."""
    return f"{struct.__module__}.{struct.__qualname__}.{field}"


@cache
def packed() -> dict[str, str]:
    """Return all texts by the names of their fields."""
    found = resources.files("snapshot_api.schema").joinpath(PACKED).read_bytes()
    return msgspec.json.decode(found, type=dict[str, str])


def text_of(struct: type, field: str) -> str:
    """Return what a field means. LookupError if neither the struct nor a base of it says so."""
    for base in struct.__mro__:
        if found := packed().get(key(base, field)):
            return found
    raise LookupError(f"write below {struct.__name__}.{field} what it means, and run make docs")
