from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from vllm.device_allocator import get_mem_allocator_instance
from vllm.device_allocator.sleep_mode_backend import SleepModeBackend, SleepModeBackendFactory
from vllm.model_executor.model_loader import get_model_loader


class ModelRunner:
    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.model: Any = None
        self.draft: Any = None

    def load_model(self, load_dummy_weights: bool = False) -> None:
        loader = get_model_loader(self.vllm_config.load_config)
        model_config = self.vllm_config.model_config
        self.model = loader.load_model(vllm_config=self.vllm_config, model_config=model_config)
        drafting = self.vllm_config.speculative_config
        if drafting is not None:
            self.draft = loader.load_model(
                vllm_config=self.vllm_config, model_config=drafting.draft_model_config
            )


class Worker:
    def __init__(
        self,
        vllm_config: Any,
        local_rank: int,
        rank: int,
        distributed_init_method: str,
        is_driver_worker: bool = False,
    ) -> None:
        self.vllm_config = vllm_config
        self.model_runner = ModelRunner(vllm_config)
        self.external_weight_memory = -1
        self.kv_cache: Any = None
        self._sleep_mode_backend: SleepModeBackend | None = None

    @property
    def sleep_mode_backend(self) -> SleepModeBackend:
        if self._sleep_mode_backend is None:
            self._sleep_mode_backend = SleepModeBackendFactory.create_backend(
                self.vllm_config.model_config
            )
        return self._sleep_mode_backend

    def init_device(self) -> None:
        loader = get_model_loader(self.vllm_config.load_config)
        self.external_weight_memory = loader.get_external_weight_memory(self.vllm_config)

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager:
        return get_mem_allocator_instance().use_memory_pool(tag=tag)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        with self._maybe_get_memory_pool_context(tag="weights"):
            self.model_runner.load_model(load_dummy_weights=load_dummy_weights)

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        for parameter in self.model_runner.model.parameters():
            parameter.zero_()

    def reset_weights(self) -> None:
        self.reload_weights()

    def initialize_from_config(self, kv_cache_config: int) -> None:
        inner = self._maybe_get_memory_pool_context(tag="kv_cache")
        with self._maybe_get_memory_pool_context(tag="runtime"), inner:
            self.kv_cache = torch.zeros(kv_cache_config, dtype=torch.uint8)

    def sleep(self, level: int = 1) -> None:
        self.sleep_mode_backend.suspend(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.sleep_mode_backend.resume(tags)

    def discard(self, tags: tuple[str, ...]) -> None:
        self.sleep_mode_backend.discard(tags)
