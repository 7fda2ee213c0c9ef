"""Prints manifests as admission would have them stored: lists of documents in JSON, in and out.

It is for clusters without the webhooks, and for pods that have to start while these are away. Pods
are changed, and pod templates, such as that of a Deployment. With the word `immediate`, pods of
that policy start cold. Without it they wait: only admission knows whether their source is there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from snapshot_api.validate import restore_problems
from snapshot_operator.kube.restoring import Images, complete, placeholder_problems
from snapshot_operator.kube.shaping import AGENT_IMAGE, GMS_IMAGE
from snapshot_shared.errors import InvalidManifest

Document = dict[str, Any]


def main() -> int:
    """Read documents from standard input. Return 1, with the reasons, if a pod cannot wait."""
    documents = msgspec.json.decode(sys.stdin.buffer.read())
    starts_cold = "immediate" in sys.argv[1:]
    images = Images(
        os.environ.get("SNAPBACK_GMS_IMAGE", GMS_IMAGE),
        os.environ.get("SNAPBACK_AGENT_IMAGE", AGENT_IMAGE),
    )
    try:
        found = [_rendered(each, images, starts_cold=starts_cold) for each in documents]
    except InvalidManifest as error:
        sys.stderr.write(f"{error.message}\n")
        return 1
    sys.stdout.buffer.write(msgspec.json.encode(found))
    return 0


def _rendered(document: Any, images: Images, *, starts_cold: bool) -> Any:
    """Return a document with its pod, or its pod template, complete. InvalidManifest."""
    if not isinstance(document, dict):
        return document
    if document.get("kind") == "Pod":
        return _complete(document, images, "", starts_cold=starts_cold)
    spec = document.get("spec")
    template = spec.get("template") if isinstance(spec, dict) else None
    if not isinstance(template, dict) or not isinstance(template.get("spec"), dict):
        return document
    changed = _complete(template, images, "spec.template.", starts_cold=starts_cold)
    return {**document, "spec": {**document["spec"], "template": changed}}


def _complete(pod: Document, images: Images, path: str, *, starts_cold: bool) -> Document:
    try:
        if wrong := [f"{path}{each}" for each in _problems(pod)]:
            raise InvalidManifest("; ".join(wrong))
        return complete(pod, images, starts_cold=starts_cold)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise InvalidManifest(f"{path}spec: it is none of a pod: {error!r}") from error


def _problems(pod: Document) -> Iterator[str]:
    yield from map(str, restore_problems(pod))
    yield from map(str, placeholder_problems(pod))


if __name__ == "__main__":
    sys.exit(main())
