"""The fields of SGLang's configuration that are read, with their defaults there."""

from __future__ import annotations

from types import SimpleNamespace

_EXEC = SimpleNamespace(moe=SimpleNamespace(enable_eplb=False, moe_a2a_backend="none"))
_MODEL = SimpleNamespace(weight_cache_mode="off", is_startup_weight_load_overlap=False)
_PARALLEL = SimpleNamespace(
    tp_size=2,
    tp_rank=0,
    pp_size=1,
    pp_rank=0,
    dp_size=1,
    moe_ep_size=1,
    moe_dp_size=1,
    moe_dp_rank=0,
    moe_ep_rank=0,
    attn_dp_size=1,
    enable_dp_lm_head=False,
    attn_cp_size=1,
    moe_dense_tp_size=None,
)


def get_parallel() -> SimpleNamespace:
    return _PARALLEL


def get_model() -> SimpleNamespace:
    return _MODEL


def get_exec() -> SimpleNamespace:
    return _EXEC
