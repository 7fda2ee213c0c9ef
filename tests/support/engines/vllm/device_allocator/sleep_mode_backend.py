from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from vllm.device_allocator import get_mem_allocator_instance


class SleepModeBackend(ABC):
    def __init__(self) -> None:
        self._state = "RUNNING"

    @abstractmethod
    def suspend(self, level: int = 1) -> None: ...

    @abstractmethod
    def resume(self, tags: list[str] | None = None) -> None: ...

    def state(self) -> str:
        return self._state

    def discard(self, tags: tuple[str, ...]) -> None:
        raise RuntimeError(tags)

    @classmethod
    def is_supported(cls) -> bool:
        return True


class CuMemBackend(SleepModeBackend):
    def suspend(self, level: int = 1) -> None:
        self._state = "SUSPENDED"
        kept = ("runtime", "cudagraph")
        get_mem_allocator_instance().sleep(("weights", *kept) if level == 1 else kept)

    def resume(self, tags: list[str] | None = None) -> None:
        get_mem_allocator_instance().wake_up(tags)
        self._state = "RUNNING"

    def discard(self, tags: tuple[str, ...]) -> None:
        get_mem_allocator_instance().discard(tags)


class SleepModeBackendFactory:
    _registry: dict[str, Callable[[], type[SleepModeBackend]]] = {}

    @classmethod
    def register_backend(cls, name: str, module_path: str, class_name: str) -> None:
        if name in cls._registry:
            raise ValueError(name)
        cls._registry[name] = lambda: getattr(importlib.import_module(module_path), class_name)

    @classmethod
    def create_backend(cls, model_config: Any) -> SleepModeBackend:
        return cls._registry[model_config.sleep_mode_backend]()()


SleepModeBackendFactory.register_backend(
    "cumem", "vllm.device_allocator.sleep_mode_backend", "CuMemBackend"
)
