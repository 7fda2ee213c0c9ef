"""What people who may not read specs see of an object."""

from __future__ import annotations

from typing import Any

import msgspec

from snapshot_shared.codec import encode_json
from snapshot_shared.objects import AnyObject


def mirrored(value: AnyObject) -> dict[str, Any]:
    """Return identity and status of an object, never a spec with its environment."""
    shown: dict[str, Any] = msgspec.json.decode(encode_json(value))
    identity = shown.get("spec", {}).get("identity")
    shown.pop("spec", None)
    if identity:
        shown["identity"] = identity
    return shown
