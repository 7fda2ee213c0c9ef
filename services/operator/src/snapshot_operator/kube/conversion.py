"""The conversion webhook: objects of one version of a kind as objects of another.

An API server asks for each read and write in a version that is not stored. An answer changes no
metadata but annotations and labels, or the API server refuses it.

A review of a list has all its objects. Each is decoded by itself, so that no decoder holds the
interpreter for longer than one object takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from snapshot_api.kind import Kind, converted
from snapshot_api.kinds import KINDS
from snapshot_shared.errors import InvalidManifest


class Request(msgspec.Struct, frozen=True, rename="camel"):
    """The request of a ConversionReview. Its objects may be of any version of their kinds."""

    uid: str
    desired_api_version: str = msgspec.field(name="desiredAPIVersion")
    objects: list[msgspec.Raw] = []


class _Review(msgspec.Struct, frozen=True):
    request: Request


MAX_BYTES = 16 * 1024 * 1024
"""The largest review: a page of 500 objects of 32 KiB, which `kubectl get` asks for."""

_REVIEW = msgspec.json.Decoder(_Review)
_DOCUMENT = msgspec.json.Decoder(dict[str, Any])


def answer(body: bytes, kinds: Mapping[str, Kind] = KINDS) -> bytes:
    """Return the answer to a ConversionReview. Raise msgspec.DecodeError for any other body."""
    request = _REVIEW.decode(body).request
    response: dict[str, Any] = {"uid": request.uid}
    try:
        found = [
            msgspec.Raw(
                msgspec.json.encode(
                    _converted(_DOCUMENT.decode(each), request.desired_api_version, kinds)
                )
            )
            for each in request.objects
        ]
        response |= {"convertedObjects": found, "result": {"status": "Success"}}
    except InvalidManifest as error:
        response["result"] = {"status": "Failed", "message": str(error)}
    return msgspec.json.encode(
        {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "ConversionReview",
            "response": response,
        }
    )


def _converted(
    document: dict[str, Any], api_version: str, kinds: Mapping[str, Kind]
) -> dict[str, Any]:
    kind = kinds.get(str(document.get("kind")))
    version = kind.version_of(api_version) if kind is not None else None
    if kind is None or version is None:
        raise InvalidManifest(f"no {document.get('kind')} of {api_version} is known")
    return converted(kind, document, version)
