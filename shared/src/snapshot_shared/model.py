"""The base of every struct that is a value on the wire or in an object.

The text of a field is the string below it. `make docs` packs the texts for pages and definitions
(docs/generate/_texts.py); no program parses sources for them at run time.
"""

from __future__ import annotations

from typing import Any, dataclass_transform

import msgspec
from msgspec import StructMeta, field


class _KeywordOnly(StructMeta):
    """The metaclass by which all fields are keyword-only: msgspec does not inherit that setting."""

    def __new__(
        cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **config: Any
    ) -> Any:
        return super().__new__(cls, name, bases, namespace, **{"kw_only": True, **config})


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
class Message(msgspec.Struct, frozen=True, metaclass=_KeywordOnly):
    """A value that never changes. Its fields are named as they are in Python."""


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
class Model(Message, rename="camel", omit_defaults=True):
    """A part of an object of the Kubernetes API. What has its default is not encoded."""
