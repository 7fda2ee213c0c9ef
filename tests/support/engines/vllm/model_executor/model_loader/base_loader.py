from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from engine_model import fill

from vllm.model_executor.model_loader.utils import (
    initialize_model,
    process_weights_after_loading,
)
from vllm.utils.torch_utils import set_default_torch_dtype


class BaseModelLoader(ABC):
    def __init__(self, load_config: Any) -> None:
        self.load_config = load_config

    def get_external_weight_memory(self, vllm_config: Any) -> int:
        return 0

    @abstractmethod
    def download_model(self, model_config: Any) -> None: ...

    @abstractmethod
    def load_weights(self, model: Any, model_config: Any) -> None: ...

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        with set_default_torch_dtype(model_config.dtype):
            model = initialize_model(
                vllm_config=vllm_config, model_config=model_config, prefix=prefix
            )
            self.load_weights(model, model_config)
            process_weights_after_loading(model, model_config, torch.device("cpu"))
        return model.eval()


class DefaultModelLoader(BaseModelLoader):
    """It stands in `default_loader.py` there."""

    downloaded: ClassVar[list[str]] = []
    loaded: ClassVar[list[Any]] = []

    def download_model(self, model_config: Any) -> None:
        self.downloaded.append(model_config.model)

    def load_weights(self, model: Any, model_config: Any) -> None:
        fill(model)
        self.loaded.append(model)
