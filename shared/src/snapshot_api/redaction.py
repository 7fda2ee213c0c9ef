"""What is secret in an object, and the object without it.

Every value of an environment variable counts as secret, and so does the spec of a pod that is kept
as a text. Of arguments, annotations and other texts those do whose names say it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from snapshot_api.well_known import POD_SPEC

REDACTED = "<redacted>"

_NAME = r"token|secret|passw|credential|api[-_]?key|private[-_]?key|access[-_]?key|_key$|nkey|auth"
_SECRET_NAME = re.compile(_NAME, re.IGNORECASE)
_SECRET_IN_LINE = re.compile(rf"(?:{_NAME})[^=\s]*[=\s](.+)", re.IGNORECASE | re.DOTALL)
"""A word of a command line may be a command line itself, for a shell."""


def names_secret(name: str) -> bool:
    """Whether the name of a variable, an option or a field says that its value is secret."""
    return bool(_SECRET_NAME.search(name))


def redacted(value: Any) -> Any:
    """Return plain data without the values of environment variables and without secrets."""
    match value:
        case dict():
            return {key: _redacted_field(key, item) for key, item in value.items()}
        case list():
            return [redacted(item) for item in value]
        case _:
            return value


def _redacted_field(key: str, item: Any) -> Any:
    if key in ("env", "envs") and isinstance(item, list):
        return [v | {"value": REDACTED} if isinstance(v, dict) else REDACTED for v in item]
    if key in ("args", "command") and isinstance(item, list):
        return list(_redacted_arguments(item))
    if isinstance(item, str) and (key == POD_SPEC or names_secret(key)):
        return REDACTED
    return redacted(item)


def _redacted_arguments(words: Sequence[Any]) -> Iterator[Any]:
    """Take out what follows an option such as `--api-key`, or stands behind its `=`."""
    for word, secret in _marked(words):
        yield word if secret is None else str(word).removesuffix(secret) + REDACTED


def _marked(words: Sequence[Any]) -> Iterator[tuple[Any, str | None]]:
    """Return each word of a command line with the secret at its end, if it has one."""
    is_secret = False
    for word in words:
        text = str(word)
        behind = _SECRET_IN_LINE.search(text)
        yield word, (text if is_secret else behind[1] if behind else None) or None
        is_secret = text.startswith("-") and names_secret(text) and behind is None


def secrets_in(value: Any) -> Iterator[str]:
    """Return the values of variables, arguments and fields whose names say that they are secret."""
    match value:
        case {"name": str(name), "value": str(text), **_rest} if names_secret(name):
            yield text
        case dict():
            for key, item in value.items():
                if key in ("args", "command") and isinstance(item, list):
                    yield from (secret for _, secret in _marked(item) if secret)
                if isinstance(item, str) and names_secret(key):
                    yield item
                yield from secrets_in(item)
        case list():
            for item in value:
                yield from secrets_in(item)
        case _:
            return
