from __future__ import annotations

from typing import Any

import msgspec

from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.model_loader.loader import get_model_loader


class LoadedModel(msgspec.Struct, frozen=True, kw_only=True):
    loader: Any
    model: Any
    remote_instance_weight_info: Any | None
    startup_weight_load: Any | None = None


def load_model_with_memory_saver(
    *,
    model_config: Any,
    load_config: Any,
    device: str,
    gpu_id: int,
    memory_saver_adapter: Any,
    is_draft_worker: bool,
) -> LoadedModel:
    with memory_saver_adapter.region(GPU_MEMORY_TYPE_WEIGHTS, enable_cpu_backup=False):
        loader: Any = get_model_loader(load_config=load_config, model_config=model_config)
        model = loader.load_model(model_config=model_config, device_config=(device, gpu_id))
    return LoadedModel(loader=loader, model=model, remote_instance_weight_info=None)
