from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class UnsupportedQuantForIPCError(RuntimeError):
    pass


def check_ipc_quant_support(model: Any) -> None:
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None and not method.supports_pre_processed_weights:
            raise UnsupportedQuantForIPCError(name)


@dataclass
class WeightCacheKey:
    checkpoint: str
    tp_size: int
    tp_rank: int
    dtype: str
    revision: str | None
    pp_rank: int = 0
    dp_rank: int = 0

    @classmethod
    def from_model_config(
        cls,
        model_config: Any,
        tp_size: int,
        tp_rank: int,
        *,
        cache_config: Any,
        pp_size: int = 1,
        pp_rank: int = 0,
        is_draft: bool = False,
        dp_size: int = 1,
        dp_rank: int = 0,
        enable_expert_parallel: bool = False,
        expert_placement_strategy: str = "linear",
        kernel_config: Any = None,
    ) -> WeightCacheKey:
        return cls(
            checkpoint=model_config.model,
            tp_size=tp_size,
            tp_rank=tp_rank,
            dtype=str(model_config.dtype),
            revision=model_config.revision,
            pp_rank=pp_rank,
            dp_rank=dp_rank,
        )
