"""vLLM: the weights and the key-value cache of a worker in GPU memory that Snapback serves.

    vllm serve MODEL --load-format snapback --worker-cls snapback_client.vllm.Worker
        --enable-sleep-mode --sleep-mode-backend snapback

The first worker on a device loads the model from disk and publishes it; later ones map what was
published. `/sleep` and `/wake_up` of vLLM act on both memories, by tag. What vLLM keeps in its own
allocator beside them (tags `workspace`, `runtime`) stays there, and sleeps with them.

`snapback_client.plugins.vllm`, which vLLM calls in each of its processes, only names the sleep-mode
back-end; the workers import this module, and with it register the load format. Read from vLLM
0.33.0 (the wheel of PyPI):

- `vllm/plugins/__init__.py`: `load_general_plugins`, `DEFAULT_PLUGINS_GROUP`
- `vllm/device_allocator/sleep_mode_backend.py`: `SleepModeBackendFactory.register_backend`,
  `CuMemBackend.suspend`, `.resume`, `.discard`
- `vllm/v1/worker/gpu_worker.py`: `Worker.init_device`, `._maybe_get_memory_pool_context`, `.sleep`,
  `.reload_weights`, `.reset_weights`
- `vllm/model_executor/model_loader/__init__.py`: `register_model_loader`, `get_model_loader`
- `vllm/model_executor/model_loader/base_loader.py`: `BaseModelLoader`
- `vllm/model_executor/model_loader/utils.py`: `initialize_model`, `process_weights_after_loading`
- `vllm/model_executor/model_loader/weight_cache/protocol.py`: `WeightCacheKey`,
  `check_ipc_quant_support`; its `ipc_loader.py` shows how a model takes weights that are there
- `vllm/model_executor/utils.py`: `weights_already_processed`
- `vllm/utils/torch_utils.py`: `set_default_torch_dtype`
- `vllm/distributed/parallel_state.py`: `get_dp_group`, `get_pp_group`,
  `get_tensor_model_parallel_rank`, `get_tensor_model_parallel_world_size`
- `vllm/config`: the fields of `VllmConfig` that are read below

Tested against likenesses of these files. It was not run with vLLM itself, nor on a GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from snapback_client import engines
from snapback_client.errors import InvalidInput, NotEligible, SnapbackError
from snapback_client.plugins import BACKEND
from snapback_client.torch_devices import import_torch

KNOWN = "0.33.0"
NAME = BACKEND
"""What the load format and the sleep-mode back-end are called."""

_LOADERS = "vllm.model_executor.model_loader"
_WORKER = "vllm.v1.worker.gpu_worker:Worker"
_SLEEP = "vllm.device_allocator.sleep_mode_backend"

_USED = engines.resolve(
    "vllm",
    KNOWN,
    {
        _WORKER: "-",
        f"{_WORKER}.init_device": "self",
        f"{_WORKER}._maybe_get_memory_pool_context": "self tag",
        f"{_WORKER}.sleep": "self level",
        f"{_WORKER}.reload_weights": "self",
        f"{_WORKER}.reset_weights": "self",
        f"{_SLEEP}:CuMemBackend": "-",
        f"{_SLEEP}:CuMemBackend.suspend": "self level",
        f"{_SLEEP}:CuMemBackend.resume": "self tags",
        f"{_SLEEP}:CuMemBackend.discard": "self tags",
        f"{_LOADERS}:register_model_loader": "load_format",
        f"{_LOADERS}:get_model_loader": "load_config",
        f"{_LOADERS}.base_loader:BaseModelLoader": "load_config",
        f"{_LOADERS}.base_loader:BaseModelLoader.get_external_weight_memory": "self vllm_config",
        f"{_LOADERS}.base_loader:BaseModelLoader.load_model": (
            "self vllm_config model_config prefix"
        ),
        f"{_LOADERS}.utils:initialize_model": "vllm_config model_config prefix",
        f"{_LOADERS}.utils:process_weights_after_loading": "model model_config target_device",
        f"{_LOADERS}.weight_cache.protocol:WeightCacheKey.from_model_config": (
            "model_config tp_size tp_rank cache_config pp_size pp_rank dp_size dp_rank "
            "enable_expert_parallel expert_placement_strategy kernel_config"
        ),
        f"{_LOADERS}.weight_cache.protocol:check_ipc_quant_support": "model",
        "vllm.model_executor.utils:weights_already_processed": "",
        "vllm.utils.torch_utils:set_default_torch_dtype": "dtype",
        "vllm.distributed:get_dp_group": "",
        "vllm.distributed:get_pp_group": "",
        "vllm.distributed:get_tensor_model_parallel_rank": "",
        "vllm.distributed:get_tensor_model_parallel_world_size": "",
    },
)


_Worker: Any = _USED["Worker"]
_Backend: Any = _USED["CuMemBackend"]
_Loader: Any = _USED["BaseModelLoader"]


class Worker(_Worker):  # type: ignore[misc]  # a class of vLLM, which is not there for mypy
    """The worker of one device (`--worker-cls snapback_client.vllm.Worker`)."""

    def init_device(self) -> None:
        """Look at the options first, for they belong together. InvalidInput."""
        check_options(self.vllm_config)
        super().init_device()

    def _maybe_get_memory_pool_context(self, tag: str) -> contextlib.AbstractContextManager[Any]:
        if tag == "weights":
            # The loader has a region of its own, which ends before it publishes.
            return contextlib.nullcontext()
        if tag == "kv_cache":
            return engines.region(tag)
        found: contextlib.AbstractContextManager[Any] = super()._maybe_get_memory_pool_context(tag)
        return found

    def sleep(self, level: int = 1) -> None:
        """Sleep. NotEligible for another level than 1, before anything is done."""
        check_level(level)
        super().sleep(level)

    def reload_weights(self, *_arguments: object, **_more: object) -> None:
        """NotEligible: what is published is read-only, and to write it would end the process."""
        raise _read_only()

    def reset_weights(self) -> None:
        """NotEligible, as `reload_weights`."""
        raise _read_only()


class SleepBackend(_Backend):  # type: ignore[misc]  # as above
    """What `/sleep` and `/wake_up` do (`--sleep-mode-backend snapback`)."""

    def suspend(self, level: int = 1) -> None:
        """Unmap the weights, which stay published, and drop the key-value cache."""
        check_level(level)
        engines.memory().suspend()
        super().suspend(level)

    def resume(self, tags: list[str] | None = None) -> None:
        """Map what these tags name, or all: the same weights, an empty cache, same addresses."""
        engines.memory().resume(engines.TAGS if tags is None else tags)
        super().resume(tags)

    def discard(self, tags: tuple[str, ...]) -> None:
        """Unmap what these tags name while the rest stays awake."""
        engines.memory().suspend(tags)
        super().discard(tags)


@_USED["register_model_loader"](NAME)
class Loader(_Loader):  # type: ignore[misc]  # as above
    """Writes a model into GPU memory of Snapback, or maps it (`--load-format snapback`).

    Of `--model-loader-extra-config` it takes `load_format`, how a writer reads the model (`auto`),
    `lock` (`RW_OR_RO`) and `deadline_s`, how long another worker may take to publish it (900). The
    rest is for the loader that reads the model.
    """

    def __init__(self, load_config: Any) -> None:
        """Use a `vllm.config.load.LoadConfig`."""
        super().__init__(load_config)
        extra = dict(load_config.model_loader_extra_config or {})
        self._lock = str(extra.pop("lock", "RW_OR_RO"))
        self._deadline_s = float(extra.pop("deadline_s", engines.LOAD_S))
        self._from_disk = dataclasses.replace(
            load_config,
            load_format=extra.pop("load_format", "auto"),
            model_loader_extra_config=extra,
        )

    def get_external_weight_memory(self, vllm_config: Any) -> int:
        """Return how many bytes of weights were on the device before: none for a writer."""
        memory = self._memory()
        return 0 if memory.is_writer else memory.torch.imported_bytes("weights")

    def download_model(self, model_config: Any) -> None:
        """Download what a writer would read."""
        self._reader().download_model(model_config)

    def load_weights(self, model: Any, model_config: Any) -> None:
        """NotEligible: weights of a model that was loaded are read-only."""
        raise _read_only()

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        """Return the model; a draft of speculative decoding is loaded as without Snapback.

        NotEligible for what writes weights later; InvalidInput where another model is published.
        """
        drafting = vllm_config.speculative_config
        if drafting is not None and model_config is drafting.draft_model_config:
            return self._load(vllm_config, model_config, prefix)
        check_read_only(vllm_config)
        memory, identity = self._memory(), _identity(vllm_config, model_config)
        if memory.is_writer:
            with memory.torch.region("weights"):
                model = self._load(vllm_config, model_config, prefix)
            memory.torch.publish(model, identity=identity)
            return model
        return self._map(memory, identity, vllm_config, model_config, prefix)

    def _map(
        self,
        memory: engines.EngineMemory,
        identity: str,
        vllm_config: Any,
        model_config: Any,
        prefix: str,
    ) -> Any:
        torch = import_torch()
        with _USED["set_default_torch_dtype"](model_config.dtype):
            with torch.device("meta"):
                model = _USED["initialize_model"](
                    vllm_config=vllm_config, model_config=model_config, prefix=prefix
                )
            # What vLLM itself asks of weights that another process has made ready.
            _USED["check_ipc_quant_support"](model)
            memory.torch.materialise(model, identity=identity, exact=False)
            with _USED["weights_already_processed"]():
                device = torch.device(memory.torch.device)
                _USED["process_weights_after_loading"](model, model_config, device)
        engines.check_complete(model)
        return model.eval()

    def _load(self, vllm_config: Any, model_config: Any, prefix: str) -> Any:
        return self._reader().load_model(
            vllm_config=vllm_config, model_config=model_config, prefix=prefix
        )

    def _reader(self) -> Any:
        return _USED["get_model_loader"](self._from_disk)

    def _memory(self) -> engines.EngineMemory:
        device = engines.current_device(import_torch())
        return engines.open_memory(
            device, name=f"vllm-{device}", lock=self._lock, deadline_s=self._deadline_s
        )


def check_options(vllm_config: Any) -> None:
    """Compare options that belong together. InvalidInput says which one is missing."""
    wanted = {"--load-format": vllm_config.load_config.load_format}
    if vllm_config.model_config.enable_sleep_mode:
        wanted["--sleep-mode-backend"] = vllm_config.model_config.sleep_mode_backend
    for option, found in wanted.items():
        if found != NAME:
            raise InvalidInput(
                f"{option} is {found!r}, with this worker class it has to be {NAME!r}",
                next_step=f"start vLLM with {option} {NAME}",
                found=found,
                expected=NAME,
            )


def check_read_only(vllm_config: Any) -> None:
    """NotEligible for features of vLLM that write weights after they are loaded."""
    writing = {
        "--enable-eplb": vllm_config.parallel_config.enable_eplb,
        "--weight-transfer-config": vllm_config.weight_transfer_config is not None,
    }
    for option, is_on in writing.items():
        if is_on:
            raise NotEligible(
                f"{option} writes weights, which are read-only once they are published",
                next_step=f"leave {option} out, or load the model without Snapback",
                option=option,
            )


def check_level(level: int) -> None:
    """NotEligible for a sleep that gives the weights up."""
    if level != 1:
        raise NotEligible(
            f"sleep level {level} gives the weights up, to be written anew",
            next_step="use level 1: the weights take nothing of this process while it sleeps",
            level=level,
        )


def _identity(vllm_config: Any, model_config: Any) -> str:
    """Return what vLLM takes for the same weights; as its `IpcModelLoader` does."""
    pipeline, data = _USED["get_pp_group"](), _USED["get_dp_group"]()
    key = _USED["from_model_config"](
        model_config,
        tp_size=_USED["get_tensor_model_parallel_world_size"](),
        tp_rank=_USED["get_tensor_model_parallel_rank"](),
        cache_config=vllm_config.cache_config,
        pp_size=pipeline.world_size,
        pp_rank=pipeline.rank_in_group,
        dp_size=data.world_size,
        dp_rank=data.rank_in_group,
        enable_expert_parallel=vllm_config.parallel_config.enable_expert_parallel,
        expert_placement_strategy=vllm_config.parallel_config.expert_placement_strategy,
        kernel_config=vllm_config.kernel_config,
    )
    return engines.identity_of("vllm", dataclasses.asdict(key))


def _read_only() -> SnapbackError:
    return NotEligible(
        "weights in GPU memory of Snapback are read-only",
        next_step="start the engine with the new weights; --load-format snapback publishes them",
    )
