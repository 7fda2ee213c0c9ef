from __future__ import annotations

import contextlib
from abc import ABC
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any


class TorchMemorySaverAdapter(ABC):
    @staticmethod
    def create(enable: bool) -> TorchMemorySaverAdapter:
        return _TorchMemorySaverAdapterReal() if enable else _TorchMemorySaverAdapterNoop()

    def configure_subprocess(self) -> AbstractContextManager:
        raise NotImplementedError

    def region(self, tag: str, enable_cpu_backup: bool = False) -> AbstractContextManager:
        raise NotImplementedError

    def cuda_graph(self, **kwargs: Any) -> AbstractContextManager:
        raise NotImplementedError

    def disable(self) -> AbstractContextManager:
        raise NotImplementedError

    def pause(self, tag: str) -> None:
        raise NotImplementedError

    def resume(self, tag: str) -> None:
        raise NotImplementedError

    @property
    def enabled(self) -> bool:
        raise NotImplementedError


class _TorchMemorySaverAdapterReal(TorchMemorySaverAdapter):
    pass


class _TorchMemorySaverAdapterNoop(TorchMemorySaverAdapter):
    @contextlib.contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False) -> Iterator[None]:
        yield

    @property
    def enabled(self) -> bool:
        return False
