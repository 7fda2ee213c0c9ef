from __future__ import annotations

from typing import Any

import msgspec


class CacheConfig(msgspec.Struct):
    model_path: str
    model_arch: str
    tp_size: int
    tp_rank: int
    pp_size: int
    pp_rank: int
    dp_size: int
    ep_size: int
    moe_dp_size: int
    moe_dp_rank: int
    moe_ep_rank: int
    attn_dp_size: int
    enable_dp_lm_head: bool
    attn_cp_size: int
    moe_dense_tp_size: int | None
    moe_a2a_backend: str
    quant_method: str
    quant_config_hash: str
    dtype: str
    revision: str
    device_capability: str
    torch_version: str


def hash_quant_config(quant_config: Any) -> str:
    return "" if quant_config is None else str(quant_config)


def get_quant_method_name(quant_config: Any) -> str:
    return quant_config or ""


def check_ipc_quant_support(quant_method: str, quant_config: Any, *, where: str) -> None:
    if quant_method not in ("", "fp8"):
        raise RuntimeError(f"{where}: {quant_method}")


def compute_env_stamp() -> dict[str, str]:
    return {"device_capability": "", "torch_version": "0"}
