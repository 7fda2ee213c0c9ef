"""JSON Patch (RFC 6902), as far as admission makes it: `add` and `remove`."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any


def applied(document: Any, patch: Iterable[Mapping[str, Any]]) -> Any:
    """Return a document with a patch applied; the one that is given stays as it is."""
    changed = copy.deepcopy(document)
    for change in patch:
        *path, last = change["path"].strip("/").split("/")
        place = changed
        for name in path:
            place = place[int(name) if isinstance(place, list) else name]
        if change["op"] == "remove":
            del place[last]
        else:
            assert change["op"] == "add"
            place[last] = change["value"]
    return changed
