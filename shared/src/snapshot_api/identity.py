"""The identity hash: equal for checkpoints whose artifacts are interchangeable.

The formula is that of the operator of NVIDIA Dynamo, to the byte, so that a manifest has the same
hash in both: the SHA-256 of the identity as Go's `encoding/json` writes it, in 16 hex digits. The
GPU memory service, the pod template and the metadata are no part of it.
"""

from __future__ import annotations

import hashlib

import msgspec

from snapshot_api.v1alpha1.checkpoint import IdentitySpec

HASH_DIGITS = 16
# Go escapes what HTML or JavaScript would read, although JSON need not; only strings hold these.
_GO_ESCAPES = [(each.encode(), f"\\u{ord(each):04x}".encode()) for each in "<>&\u2028\u2029"]


def identity_hash(identity: IdentitySpec) -> str:
    """Return the hash of an identity: 16 lower-case hex digits. It is computed once."""
    kept: dict[str, str] = vars(identity)
    if "hash" not in kept:
        kept["hash"] = hashlib.sha256(canonical_json(identity)).hexdigest()[:HASH_DIGITS]
    return kept["hash"]


def canonical_json(identity: IdentitySpec) -> bytes:
    """Return the text that is hashed: compact JSON, parallel sizes written out, the rest if set."""
    fields = {
        "model": identity.model,
        "backendFramework": identity.backend_framework,
        "dynamoVersion": identity.dynamo_version,
        "tensorParallelSize": identity.tensor_parallel_size or 1,
        "pipelineParallelSize": identity.pipeline_parallel_size or 1,
        "dtype": identity.dtype,
        "maxModelLen": identity.max_model_len,
        "extraParameters": dict(sorted(identity.extra_parameters.items())),
    }
    text = msgspec.json.encode({name: value for name, value in fields.items() if value})
    for character, escape in _GO_ESCAPES:
        text = text.replace(character, escape)
    return text
