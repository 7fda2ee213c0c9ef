"""Images made of files of this host, as OCI archives that every container runtime imports."""

from __future__ import annotations

import hashlib
import io
import json
import platform
import re
import shutil
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ARCHITECTURES = {"aarch64": "arm64", "x86_64": "amd64"}
_LIBRARY = re.compile(r"(?:=> )?(/\S+) \(0x")


def write_image(
    archive: Path, name: str, files: Mapping[str, Path], entrypoint: Sequence[str]
) -> Path:
    """Write the archive of an image of one layer, with the files by their paths in the image."""
    layer = _layer(files)
    config = _json(
        architecture=ARCHITECTURES.get(platform.machine(), platform.machine()),
        os="linux",
        config={"Entrypoint": [*entrypoint], "Env": ["PATH=/usr/bin:/bin"]},
        rootfs={"type": "layers", "diff_ids": [_digest(layer)]},
    )
    image = "application/vnd.oci.image"
    manifest = _json(
        schemaVersion=2,
        mediaType=f"{image}.manifest.v1+json",
        config=_descriptor(f"{image}.config.v1+json", config),
        layers=[_descriptor(f"{image}.layer.v1.tar", layer)],
    )
    named = {
        "io.containerd.image.name": name,
        "org.opencontainers.image.ref.name": name.rpartition(":")[2],
    }
    entry = _descriptor(f"{image}.manifest.v1+json", manifest) | {"annotations": named}
    index = _json(schemaVersion=2, manifests=[entry])
    docker = json.dumps(
        [{"Config": _blob(config), "RepoTags": [name], "Layers": [_blob(layer)]}]
    ).encode()
    with tarfile.open(archive, "w") as tar:
        _add(tar, "oci-layout", _json(imageLayoutVersion="1.0.0"))
        _add(tar, "index.json", index)
        # For `docker load`, which may not take names from the index.
        _add(tar, "manifest.json", docker)
        for blob in (layer, config, manifest):
            _add(tar, _blob(blob), blob)
    return archive


def programs(*names: str) -> dict[str, Path]:
    """Return the files of programs of this host: themselves, and the libraries that they load."""
    found = {}
    for name in names:
        path = shutil.which(name)
        assert path, f"{name} is missing on this host"
        found[f"/usr/bin/{name}"] = Path(path)
        done = subprocess.run(["ldd", path], capture_output=True, text=True, check=True)
        found |= {library: Path(library) for library in _LIBRARY.findall(done.stdout)}
    return found


def _layer(files: Mapping[str, Path]) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for path, file in sorted(files.items()):
            # Of a link, what it leads to.
            entry = tar.gettarinfo(file.resolve(), path.lstrip("/"))
            entry.mtime = 0
            with file.open("rb") as source:
                tar.addfile(entry, source)
    return content.getvalue()


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    tar.addfile(entry, io.BytesIO(content))


def _descriptor(kind: str, content: bytes) -> dict[str, Any]:
    return {"mediaType": kind, "digest": _digest(content), "size": len(content)}


def _blob(content: bytes) -> str:
    return "blobs/" + _digest(content).replace(":", "/")


def _digest(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


def _json(**document: Any) -> bytes:
    return json.dumps(document).encode()
