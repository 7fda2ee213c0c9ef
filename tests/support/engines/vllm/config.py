"""The fields of vLLM's configuration that are read, with their defaults there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class LoadConfig:
    load_format: str = "auto"
    model_loader_extra_config: dict[str, Any] = field(default_factory=dict)


@dataclass
class ModelConfig:
    model: str
    dtype: Any
    revision: str | None = None
    enable_sleep_mode: bool = False
    sleep_mode_backend: str = "cumem"


@dataclass
class ParallelConfig:
    enable_eplb: bool = False
    enable_expert_parallel: bool = False
    expert_placement_strategy: str = "linear"


@dataclass
class SpeculativeConfig:
    draft_model_config: ModelConfig | None = None


@dataclass
class VllmConfig:
    model_config: ModelConfig
    load_config: LoadConfig = field(default_factory=LoadConfig)
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    speculative_config: SpeculativeConfig | None = None
    weight_transfer_config: Any = None
    cache_config: Any = None
    kernel_config: Any = None
