from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.model_executor.model_loader.base_loader import BaseModelLoader, DefaultModelLoader

_LOAD_FORMAT_TO_MODEL_LOADER: dict[str, type[BaseModelLoader]] = {"auto": DefaultModelLoader}


def register_model_loader(load_format: str) -> Callable[[Any], Any]:
    def _wrapper(model_loader_cls: Any) -> Any:
        _LOAD_FORMAT_TO_MODEL_LOADER[load_format] = model_loader_cls
        return model_loader_cls

    return _wrapper


def get_model_loader(load_config: Any) -> BaseModelLoader:
    return _LOAD_FORMAT_TO_MODEL_LOADER[load_config.load_format](load_config)
