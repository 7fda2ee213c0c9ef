from __future__ import annotations

from typing import Any, ClassVar

from engine_model import Model, fill

from sglang.srt.model_loader.utils import set_default_torch_dtype


def _get_quantization_config(model_config: Any, load_config: Any) -> Any:
    return None


def _initialize_model(model_config: Any, load_config: Any, quant_config: Any = None) -> Any:
    return Model()


class BaseModelLoader:
    preloaded_weights_bytes: int = 0

    def __init__(self, load_config: Any) -> None:
        self.load_config = load_config


class DefaultModelLoader(BaseModelLoader):
    loaded: ClassVar[list[Any]] = []

    def load_model(self, *, model_config: Any, device_config: Any) -> Any:
        with set_default_torch_dtype(model_config.dtype):
            model = _initialize_model(model_config, self.load_config)
            fill(model)
            model.projection.pack(is_packed=False)
        self.loaded.append(model)
        return model.eval()


def get_model_loader(load_config: Any, model_config: Any = None) -> BaseModelLoader:
    return DefaultModelLoader(load_config)
