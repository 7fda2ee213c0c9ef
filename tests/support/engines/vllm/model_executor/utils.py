from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_pre_processed: ContextVar[bool] = ContextVar("_pre_processed", default=False)


@contextlib.contextmanager
def weights_already_processed() -> Iterator[None]:
    token = _pre_processed.set(True)
    try:
        yield
    finally:
        _pre_processed.reset(token)


def is_weights_pre_processed() -> bool:
    return _pre_processed.get()
