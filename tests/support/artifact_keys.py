"""Keys for artifacts, as a node has them in a folder, and artifacts that were forged."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import xxhash
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from snapshot_shared.artifact import PART_MANIFEST, ROOT_MANIFEST
from snapshot_shared.codec import digest
from snapshot_shared.orders import ArtifactRef


def put(path: Path, data: bytes, mode: int = 0o600) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(mode)
    return path


def put_encryption(folder: Path) -> Path:
    return put(folder / "encryption.key", os.urandom(32))


def put_signing(folder: Path, *, trusted: Path | None = None) -> Ed25519PrivateKey:
    """Put a private key into a folder, and its public key into that of another node."""
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    put(folder / "signing.pem", pem)
    if trusted is not None:
        public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        put(trusted / "other.pub", public, 0o644)
    return key


def forged(artifact: ArtifactRef, folder: Path) -> ArtifactRef:
    """Return the artifact with all digests made to fit the files of its process part."""
    path, top = folder / "process" / PART_MANIFEST, folder / ROOT_MANIFEST
    manifest, root = json.loads(path.read_bytes()), json.loads(top.read_bytes())
    for entry in manifest["files"]:
        data, step = (path.parent / entry["name"]).read_bytes(), entry["chunk_bytes"]
        chunks = [data[at : at + step] for at in range(0, len(data), step)]
        entry["chunks"] = [xxhash.xxh3_128_hexdigest(chunk) for chunk in chunks]
    path.write_text(json.dumps(manifest))
    root["parts"][0]["digest"] = digest(path.read_bytes())
    top.write_text(json.dumps(root))
    return msgspec.structs.replace(artifact, root_digest=digest(top.read_bytes()))
