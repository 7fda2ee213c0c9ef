from __future__ import annotations

from typing import Any

from engine_model import Model, Projection

from vllm.model_executor.utils import is_weights_pre_processed


def initialize_model(
    vllm_config: Any,
    *,
    prefix: str = "",
    model_class: Any = None,
    model_config: Any = None,
) -> Any:
    return Model()


def process_weights_after_loading(model: Any, model_config: Any, target_device: Any) -> None:
    for module in model.modules():
        if isinstance(module, Projection):
            module.pack(is_packed=is_weights_pre_processed())
