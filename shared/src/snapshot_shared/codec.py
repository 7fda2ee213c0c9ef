"""How values are encoded: JSON on NATS and on disk (people read it), msgpack on unix sockets.

The codec is that of the client, which is used without the services. Manifests are added here.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

# These are imported from here by the services.
from snapback_client.codec import (
    MAX_FRAME_BYTES,
    MAX_MESSAGE_BYTES,
    decode_json,
    decode_msgpack,
    encode_json,
    encode_msgpack,
)

MAX_MANIFEST_BYTES = 16 * 1024 * 1024


def encode_pretty(value: Any) -> bytes:
    """Encode as indented JSON for files that people open. Sorted keys, final newline."""
    return msgspec.json.format(encode_json(value), indent=2) + b"\n"


def digest(data: bytes) -> str:
    """Name bytes by their SHA-256: `sha256:<64 hex>`. For manifests, never for bulk data."""
    return "sha256:" + hashlib.sha256(data).hexdigest()
