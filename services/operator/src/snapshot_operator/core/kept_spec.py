"""The spec of a captured pod, as it is kept with the Snapshot for later restores."""

from __future__ import annotations

from typing import Any

import msgspec

MAX_BYTES = 16384
"""The longest spec that is kept. Kubernetes allows 256 KiB for all annotations of an object."""


def kept(spec: dict[str, Any]) -> str:
    """Return the spec of a pod in JSON; empty if it is longer than MAX_BYTES.

    Each variable has its name and its `valueFrom`, but not its value: values may be secret, and
    people who read a Snapshot need no right to read pods.
    """
    changed = {**spec}
    for name in ("containers", "initContainers"):
        if name in spec:
            changed[name] = [_without_values(container) for container in spec[name]]
    text = msgspec.json.encode(changed)
    return text.decode() if len(text) <= MAX_BYTES else ""


def _without_values(container: dict[str, Any]) -> dict[str, Any]:
    rows = [
        {key: row[key] for key in ("name", "valueFrom") if key in row}
        for row in container.get("env") or ()
    ]
    return {**container, "env": rows} if rows else container
