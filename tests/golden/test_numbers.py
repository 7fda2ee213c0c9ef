"""The limits and defaults of messages, frames, manifests and files on disk stay what they are.

Two builds meet on one bus and on one disk, so each of these is part of what was released. Whoever
means to change one runs `python tests/golden/test_numbers.py`, which writes the file again.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from gms.domain import tasks, transfer
from snapback_client import codec as client_codec
from snapback_client import control as client_control
from snapback_client import frames as client_frames
from snapshot_agent.domain import control
from snapshot_api import identity, manifests
from snapshot_api import validate as validation
from snapshot_shared import artifact, codec, frames, ledger, orders

FILE = Path(__file__).parent / "data" / "numbers.json"
MODULES = (
    *(artifact, codec, frames, identity, ledger, manifests, orders, validation),
    *(client_codec, client_control, client_frames),
    *(control, tasks, transfer),
)


def numbers_of(module: ModuleType) -> dict[str, Any]:
    """Every constant number of a module, and the defaults of each of its messages, by name."""
    # The frames of the client and those of the services are one set of messages.
    prefix = module.__name__.rpartition(".")[2]
    found: dict[str, Any] = {}
    for name, value in vars(module).items():
        if isinstance(value, int | float):
            found[f"{prefix}.{name}"] = value
        if not isinstance(value, type) or not issubclass(value, msgspec.Struct):
            continue
        if value.__module__ == module.__name__:
            defaults = {
                field.name: field.default
                for field in msgspec.structs.fields(value)
                if isinstance(field.default, bool | int | float | str | None)
            }
            found |= {f"{prefix}.{name}": defaults} if defaults else {}
    return found


def numbers() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for module in MODULES:
        found |= numbers_of(module)
    return dict(sorted(found.items()))


def test_no_limit_and_no_default_is_another_than_was_released() -> None:
    assert numbers() == json.loads(FILE.read_text("utf-8"))


if __name__ == "__main__":
    rows = (
        f"  {json.dumps(name)}: {json.dumps(value, sort_keys=True)}"
        for name, value in numbers().items()
    )
    FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n", "utf-8")
