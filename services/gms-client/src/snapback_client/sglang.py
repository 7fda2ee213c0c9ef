"""SGLang: the weights and the key-value cache of a scheduler in GPU memory that Snapback serves.

    GMS_SOCKET_DIR=… sglang serve --model-path MODEL --enable-memory-saver

The first process on a device loads the model from disk and publishes it; later ones map what was
published. `/release_memory_occupation` and `/resume_memory_occupation` act on both memories, by
tag; that of CUDA graphs (`cuda_graph`) stays where it is, and mapped.

`sglang.srt.plugins` calls `register` in each process of the engine. Without GMS_SOCKET_DIR, or
without `--enable-memory-saver`, SGLang is as it was. Read from SGLang 0.5.23 (the wheel of PyPI):

- `sglang/srt/plugins/__init__.py`: `load_plugins`, `GENERAL_PLUGINS_GROUP`
- `sglang/srt/plugins/hook_registry.py`: `HookRegistry.register`, `HookType.AROUND`
- `sglang/srt/utils/torch_memory_saver_adapter.py`: `TorchMemorySaverAdapter`, its `create`
- `sglang/srt/model_executor/model_runner_components/load_model_utils.py`:
  `load_model_with_memory_saver`, `LoadedModel`
- `sglang/srt/model_loader/loader.py`: `get_model_loader`, `_initialize_model`,
  `_get_quantization_config`, `BaseModelLoader.preloaded_weights_bytes`
- `sglang/srt/model_loader/utils.py`: `set_default_torch_dtype`
- `sglang/srt/weight_cache/protocol.py`: `CacheConfig`, `check_ipc_quant_support`,
  `compute_env_stamp`, `get_quant_method_name`, `hash_quant_config`
- `sglang/srt/weight_cache/ipc_loader.py`: `IpcModelLoader._rebuild_stale_views`; its `load_model`
  shows how a model takes weights that are there
- `sglang/srt/runtime_context.py`: `get_exec`, `get_model`, `get_parallel`
- `sglang/srt/constants.py`: the tags

The memory saver that this stands in for is torch_memory_saver 0.0.10
(`torch_memory_saver/entrypoint.py`: `region`, `disable`, `cuda_graph`, `pause`, `resume`). Tested
against likenesses of these files. It was not run with SGLang itself, nor on a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from snapback_client import engines
from snapback_client.errors import NotEligible
from snapback_client.torch_devices import import_torch

KNOWN = "0.5.23"

_ADAPTER = "sglang.srt.utils.torch_memory_saver_adapter"
_LOADING = "sglang.srt.model_executor.model_runner_components.load_model_utils"
_CACHE = "sglang.srt.weight_cache"

_USED = engines.resolve(
    "sglang",
    KNOWN,
    {
        "sglang.srt.plugins.hook_registry:HookRegistry.register": "target hook hook_type",
        "sglang.srt.plugins.hook_registry:HookType.AROUND": "-",
        f"{_ADAPTER}:TorchMemorySaverAdapter": "-",
        f"{_ADAPTER}:TorchMemorySaverAdapter.create": "enable",
        f"{_ADAPTER}:TorchMemorySaverAdapter.region": "self tag enable_cpu_backup",
        f"{_ADAPTER}:TorchMemorySaverAdapter.pause": "self tag",
        f"{_ADAPTER}:TorchMemorySaverAdapter.resume": "self tag",
        f"{_LOADING}:load_model_with_memory_saver": (
            "model_config load_config device gpu_id memory_saver_adapter is_draft_worker"
        ),
        f"{_LOADING}:LoadedModel": "loader model remote_instance_weight_info startup_weight_load",
    },
)

_Adapter: Any = _USED["TorchMemorySaverAdapter"]


class Adapter(_Adapter):  # type: ignore[misc]  # a class of SGLang, which is not there for mypy
    """The memory saver of this process. Its memory is opened when the model is loaded."""

    def configure_subprocess(self) -> contextlib.AbstractContextManager[None]:
        """Do nothing: no library has to be loaded into the processes that are started."""
        return contextlib.nullcontext()

    def region(
        self,
        tag: str,
        enable_cpu_backup: bool = False,  # noqa: FBT001, FBT002 - as SGLang calls it
    ) -> contextlib.AbstractContextManager[None]:
        """Have what is allocated for a tag lie in its pool. No copy is kept on the host."""
        del enable_cpu_backup
        return engines.region(tag) if tag in engines.TAGS else contextlib.nullcontext()

    def cuda_graph(
        self,
        cuda_graph: Any,
        pool: Any = None,
        stream: Any = None,
        capture_error_mode: str = "global",
        **_of_the_memory: object,
    ) -> contextlib.AbstractContextManager[None]:
        """Capture a graph as PyTorch does; its memory cannot be paused."""
        found: contextlib.AbstractContextManager[None] = import_torch().cuda.graph(
            cuda_graph, pool=pool, stream=stream, capture_error_mode=capture_error_mode
        )
        return found

    def disable(self) -> contextlib.AbstractContextManager[None]:
        """Have what is allocated in a part of a region lie outside of the pool."""
        return engines.memory().torch.outside()

    def pause(self, tag: str) -> None:
        """Unmap a pool: weights stay published, a key-value cache is dropped."""
        engines.memory().suspend([tag])

    def resume(self, tag: str) -> None:
        """Map a pool at the same addresses."""
        engines.memory().resume([tag])

    @property
    def enabled(self) -> bool:
        """Whether it saves memory."""
        return True


def register() -> None:
    """Register the hooks; SGLang applies them after this."""
    around = _USED["AROUND"]
    hook = _USED["register"]
    hook(f"{_ADAPTER}.TorchMemorySaverAdapter.create", create_adapter, around)
    hook(f"{_LOADING}.load_model_with_memory_saver", load_model, around)


def create_adapter(
    original: Callable[..., Any],
    enable: bool,  # noqa: FBT001 - as above
) -> Any:
    """Return our adapter in the place of the memory saver, where one is asked for."""
    return Adapter() if enable else original(enable)


def load_model(
    original: Callable[..., Any],
    *,
    model_config: Any,
    load_config: Any,
    device: str,
    gpu_id: int,
    memory_saver_adapter: Any,
    is_draft_worker: bool,
) -> Any:
    """Load the model and publish it, or map the one that is published.

    A draft model is loaded as without Snapback. NotEligible for what writes weights later;
    InvalidInput where another model is published.
    """
    arguments: dict[str, Any] = {
        "model_config": model_config,
        "load_config": load_config,
        "device": device,
        "gpu_id": gpu_id,
        "is_draft_worker": is_draft_worker,
    }
    if not isinstance(memory_saver_adapter, Adapter):
        return original(**arguments, memory_saver_adapter=memory_saver_adapter)
    if is_draft_worker:
        # The adapter of a process without a memory saver, whose regions do nothing.
        plain = _Adapter.create(enable=False)
        return original(**arguments, memory_saver_adapter=plain)
    used = _of_readers()
    _check_read_only(used)
    memory = engines.open_memory(gpu_id, name=f"sglang-{gpu_id}")
    identity = _identity(used, model_config)
    if memory.is_writer:
        loaded = original(**arguments, memory_saver_adapter=memory_saver_adapter)
        memory.torch.publish(loaded.model, identity=identity)
        return loaded
    loader = used["get_model_loader"](load_config=load_config, model_config=model_config)
    model = _mapped(used, memory, identity, model_config, load_config)
    loader.preloaded_weights_bytes = memory.torch.imported_bytes("weights")
    return _USED["LoadedModel"](
        loader=loader, model=model, remote_instance_weight_info=None, startup_weight_load=None
    )


def _mapped(
    used: dict[str, Any],
    memory: engines.EngineMemory,
    identity: str,
    model_config: Any,
    load_config: Any,
) -> Any:
    torch = import_torch()
    # What SGLang itself asks of weights that another process has made ready.
    used["check_ipc_quant_support"](*_quantisation(used, model_config), where="client")
    with used["set_default_torch_dtype"](model_config.dtype), torch.device("meta"):
        quantisation = used["_get_quantization_config"](model_config, load_config)
        model = used["_initialize_model"](model_config, load_config, quantisation)
    memory.torch.materialise(model, identity=identity, exact=False)
    used["_rebuild_stale_views"](model)
    engines.check_complete(model)
    return model.eval()


def _of_readers() -> dict[str, Any]:
    """Return what is called in a process that has a model; too much to import in the others."""
    return engines.resolve(
        "sglang",
        KNOWN,
        {
            "sglang.srt.model_loader.loader:get_model_loader": "load_config model_config",
            "sglang.srt.model_loader.loader:_initialize_model": (
                "model_config load_config quant_config"
            ),
            "sglang.srt.model_loader.loader:_get_quantization_config": "model_config load_config",
            "sglang.srt.model_loader.loader:BaseModelLoader.preloaded_weights_bytes": "-",
            "sglang.srt.model_loader.utils:set_default_torch_dtype": "dtype",
            f"{_CACHE}.protocol:CacheConfig": (
                "model_path model_arch tp_size tp_rank pp_size pp_rank dp_size ep_size "
                "moe_dp_size moe_dp_rank moe_ep_rank attn_dp_size enable_dp_lm_head attn_cp_size "
                "moe_dense_tp_size moe_a2a_backend quant_method quant_config_hash dtype revision "
                "device_capability torch_version"
            ),
            f"{_CACHE}.protocol:check_ipc_quant_support": "quant_method quant_config where",
            f"{_CACHE}.protocol:compute_env_stamp": "",
            f"{_CACHE}.protocol:get_quant_method_name": "quant_config",
            f"{_CACHE}.protocol:hash_quant_config": "quant_config",
            f"{_CACHE}.ipc_loader:IpcModelLoader._rebuild_stale_views": "model",
            "sglang.srt.runtime_context:get_exec": "",
            "sglang.srt.runtime_context:get_model": "",
            "sglang.srt.runtime_context:get_parallel": "",
        },
    )


def _check_read_only(used: dict[str, Any]) -> None:
    """NotEligible for features of SGLang that write weights later, or have them elsewhere."""
    model = used["get_model"]()
    wrong = {
        "--enable-eplb": used["get_exec"]().moe.enable_eplb,
        "--weight-cache-mode": model.weight_cache_mode != "off",
        "the overlap of weight loading and start": model.is_startup_weight_load_overlap,
    }
    for option, is_on in wrong.items():
        if is_on:
            raise NotEligible(
                f"{option} does not go with weights that are published, which are read-only",
                next_step="leave it out, or load the model without Snapback",
                option=option,
            )


def _identity(used: dict[str, Any], model_config: Any) -> str:
    """Return what SGLang takes for the same weights; as its `IpcModelLoader` does."""
    parallel, hf_config = used["get_parallel"](), model_config.hf_config
    method, config = _quantisation(used, model_config)
    same = used["CacheConfig"](
        model_path=model_config.model_path,
        model_arch=(hf_config.architectures or [""])[0],
        tp_size=parallel.tp_size,
        tp_rank=parallel.tp_rank,
        pp_size=parallel.pp_size,
        pp_rank=parallel.pp_rank,
        dp_size=parallel.dp_size,
        ep_size=parallel.moe_ep_size,
        moe_dp_size=parallel.moe_dp_size,
        moe_dp_rank=parallel.moe_dp_rank,
        moe_ep_rank=parallel.moe_ep_rank,
        attn_dp_size=parallel.attn_dp_size,
        enable_dp_lm_head=parallel.enable_dp_lm_head,
        attn_cp_size=parallel.attn_cp_size,
        moe_dense_tp_size=parallel.moe_dense_tp_size,
        moe_a2a_backend=used["get_exec"]().moe.moe_a2a_backend,
        quant_method=method,
        quant_config_hash=used["hash_quant_config"](config),
        dtype=str(model_config.dtype),
        revision=model_config.revision or "",
        **used["compute_env_stamp"](),
    )
    return engines.identity_of("sglang", {"config": same})


def _quantisation(used: dict[str, Any], model_config: Any) -> tuple[str, Any]:
    config = getattr(model_config.hf_config, "quantization_config", None)
    method = used["get_quant_method_name"](model_config.quantization)
    if not method and config is not None:
        method = used["get_quant_method_name"](config)
    return method, config
