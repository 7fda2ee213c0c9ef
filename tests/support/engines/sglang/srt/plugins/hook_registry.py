from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from enum import Enum
from typing import Any


class HookType(Enum):
    BEFORE = "before"
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"


class HookRegistry:
    _hooks: dict[str, Callable[..., Any]] = {}

    @classmethod
    def register(
        cls,
        target: str,
        hook: Callable,
        hook_type: HookType = HookType.AFTER,
        *,
        source: Any = None,
    ) -> None:
        assert hook_type is HookType.AROUND
        cls._hooks[target] = hook

    @classmethod
    def apply_hooks(cls) -> None:
        for target, hook in cls._hooks.items():
            path, _, name = target.rpartition(".")
            owner: Any = pkgutil.resolve_name(path)
            wrapped: Any = functools.partial(hook, getattr(owner, name))
            setattr(owner, name, staticmethod(wrapped) if isinstance(owner, type) else wrapped)
