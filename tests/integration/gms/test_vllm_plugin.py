"""The plug-in of vLLM, on a likeness of vLLM's interfaces and simulated devices.

Needs PyTorch: `make test-torch`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from snapback_client import engines
from snapback_client.errors import InvalidInput, NotEligible, UnsupportedVersion
from tests.support.gms_rig import RunningGms, committed
from tests.support.torch_site import LIKENESSES, likeness_of

MODEL = "example/model"


@pytest.fixture
def likeness(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from likeness_of("vllm", monkeypatch)


@pytest.fixture
def plugin(likeness: None, service: RunningGms) -> Any:
    importlib.import_module("vllm.plugins").load_general_plugins()
    return importlib.import_module("snapback_client.vllm")


def config(**changes: Any) -> Any:
    import torch
    from vllm.config import LoadConfig, ModelConfig, VllmConfig

    model = ModelConfig(
        changes.pop("model", MODEL),
        torch.bfloat16,
        enable_sleep_mode=True,
        sleep_mode_backend=changes.pop("sleep_mode_backend", "snapback"),
    )
    load = LoadConfig(changes.pop("load_format", "snapback"), changes.pop("extra", {}))
    return VllmConfig(model, load, **changes)


def started(plugin: Any, **changes: Any) -> Any:
    """Return a worker that vLLM has taken through its start."""
    worker = plugin.Worker(config(**changes), 0, 0, "tcp://127.0.0.1:1")
    worker.init_device()
    worker.load_model()
    worker.initialize_from_config(1 << 20)
    return worker


def answer(worker: Any) -> list[float]:
    from engine_model import answer

    return answer(worker.model_runner.model)


def own_allocator() -> Any:
    from vllm.device_allocator import get_mem_allocator_instance

    return get_mem_allocator_instance()


def loads_from_disk() -> int:
    from vllm.model_executor.model_loader.base_loader import DefaultModelLoader

    return len(DefaultModelLoader.loaded)


def test_the_entry_point_names_the_back_end_and_imports_neither_the_engine_nor_pytorch() -> None:
    """An image may hold the package and not use it."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from importlib.metadata import entry_points\n"
        "(found,) = entry_points(group='vllm.general_plugins', name='snapback')\n"
        "found.load()(); found.load()()\n"
        "from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory as factory\n"
        "print(sorted(factory._registry), 'snapback_client.vllm' in sys.modules,\n"
        "      'torch' in sys.modules, 'vllm.v1.worker.gpu_worker' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(LIKENESSES)], check=True, capture_output=True, text=True
    )
    assert done.stdout.split("\n")[0] == "['cumem', 'snapback'] False False False"


def test_an_engine_that_is_not_there_or_cannot_sleep_starts_as_before(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (found,) = entry_points(group="vllm.general_plugins", name="snapback")
    found.load()()
    assert "this vLLM cannot sleep with Snapback" in caplog.text


def test_the_second_worker_maps_what_the_first_has_published(plugin: Any) -> None:
    first = started(plugin)
    expected = answer(first)
    engines.close_memory()
    second = started(plugin)
    assert answer(second) == expected
    assert loads_from_disk() == 1
    imported = engines.memory().torch.imported_bytes("weights")
    assert (first.external_weight_memory, second.external_weight_memory) == (0, imported)
    weights = sum(each.nbytes for each in second.model_runner.model.parameters())
    assert imported >= weights
    pool = engines.memory()._pools["weights"]
    ranges = [(pool.address(name), size) for name, size in pool.sizes().items()]
    for parameter in second.model_runner.model.parameters():
        assert any(at <= parameter.data_ptr() < at + size for at, size in ranges)
    assert second.model_runner.model.projection.scale.shape == (1,)


def test_sleep_and_wake_of_the_engine_act_on_the_pools_by_tag(plugin: Any) -> None:
    worker = started(plugin)
    expected = answer(worker)
    where = worker.kv_cache.data_ptr()
    worker.kv_cache.fill_(7)
    memory = engines.memory().torch
    kv_bytes = memory.imported_bytes("kv_cache")
    assert kv_bytes >= 1 << 20

    worker.sleep(1)
    assert memory.imported_bytes() == 0
    worker.wake_up(["weights"])
    assert memory.imported_bytes("kv_cache") == 0
    assert answer(worker) == expected
    worker.wake_up(["kv_cache"])
    assert memory.imported_bytes("kv_cache") == kv_bytes
    assert worker.kv_cache.data_ptr() == where
    assert not worker.kv_cache.any()

    worker.kv_cache.fill_(7)
    worker.discard(("kv_cache",))
    assert answer(worker) == expected
    worker.wake_up()
    assert not worker.kv_cache.any()


def test_what_is_not_ours_stays_in_the_allocator_of_the_engine_and_sleeps_with_it(
    plugin: Any,
) -> None:
    worker = started(plugin)
    worker.sleep()
    worker.wake_up(["weights"])
    assert own_allocator().used == ["runtime"]
    assert own_allocator().calls == [
        ("sleep", ("weights", "runtime", "cudagraph")),
        ("wake_up", ["weights"]),
    ]


@pytest.mark.parametrize("level", [2, 3])
def test_a_sleep_that_gives_the_weights_up_is_refused_before_anything_sleeps(
    plugin: Any, level: int
) -> None:
    worker = started(plugin)
    expected = answer(worker)
    with pytest.raises(NotEligible, match=f"sleep level {level}"):
        worker.sleep(level)
    with pytest.raises(NotEligible, match="gives the weights up"):
        worker.sleep_mode_backend.suspend(level)
    assert own_allocator().calls == []
    assert answer(worker) == expected


def test_what_would_write_weights_is_refused(plugin: Any) -> None:
    worker = started(plugin)
    expected = answer(worker)
    loader = plugin.Loader(config().load_config)
    for write in (
        worker.reload_weights,
        worker.reset_weights,
        lambda: loader.load_weights(worker.model_runner.model, None),
    ):
        with pytest.raises(NotEligible, match="read-only"):
            write()
    assert answer(worker) == expected


@pytest.mark.parametrize("option", ["--enable-eplb", "--weight-transfer-config"])
def test_features_that_write_weights_later_are_refused_at_the_start(
    plugin: Any, option: str
) -> None:
    from vllm.config import ParallelConfig

    wrong = {
        "--enable-eplb": {"parallel_config": ParallelConfig(enable_eplb=True)},
        "--weight-transfer-config": {"weight_transfer_config": object()},
    }[option]
    with pytest.raises(NotEligible, match=option):
        started(plugin, **wrong)
    assert loads_from_disk() == 0


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"load_format": "auto"}, "--load-format"),
        ({"sleep_mode_backend": "cumem"}, "--sleep-mode-backend"),
    ],
)
def test_options_that_belong_together_are_compared(
    plugin: Any, changes: dict[str, Any], option: str
) -> None:
    with pytest.raises(InvalidInput, match=f"{option} is"):
        started(plugin, **changes)


def test_the_back_end_without_the_worker_class_says_what_is_missing(plugin: Any) -> None:
    with pytest.raises(NotEligible, match="not in GPU memory that Snapback serves"):
        plugin.SleepBackend().suspend(1)


@pytest.mark.parametrize("other", ["rank", "model"])
def test_weights_of_another_model_or_rank_are_not_taken(
    plugin: Any, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    """Ranks have the same names and shapes, and other values."""
    started(plugin)
    engines.close_memory()
    if other == "rank":
        monkeypatch.setitem(plugin._USED, "get_tensor_model_parallel_rank", lambda: 1)
    with pytest.raises(InvalidInput, match="the pool holds vllm-"):
        started(plugin, model=MODEL if other == "rank" else "example/other")


def test_a_draft_model_is_loaded_beside_the_one_that_is_shared(plugin: Any) -> None:
    import torch
    from vllm.config import ModelConfig, SpeculativeConfig

    def drafting() -> Any:
        return SpeculativeConfig(ModelConfig("example/draft", torch.bfloat16))

    started(plugin, speculative_config=drafting())
    engines.close_memory()
    second = started(plugin, speculative_config=drafting())
    from engine_model import answer

    assert answer(second.model_runner.draft) == answer(second.model_runner.model)
    assert loads_from_disk() == 3


def test_a_quantisation_that_the_engine_cannot_map_is_refused(
    plugin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine_model import PackedMethod

    started(plugin)
    engines.close_memory()
    monkeypatch.setattr(PackedMethod, "supports_pre_processed_weights", False)
    with pytest.raises(RuntimeError, match="projection"):
        started(plugin)


def test_tensors_that_were_not_published_are_named(
    plugin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from engine_model import Projection

    started(plugin)
    engines.close_memory()
    built = Projection.__init__

    def more(projection: Any) -> None:
        built(projection)
        projection.bias = torch.nn.Parameter(torch.empty(4), requires_grad=False)

    monkeypatch.setattr(Projection, "__init__", more)
    with pytest.raises(NotEligible, match=r"not published: projection\.bias"):
        started(plugin)


def test_a_writer_reads_the_model_as_the_extra_options_say(plugin: Any) -> None:
    from vllm.config import LoadConfig

    extra = {"load_format": "auto", "lock": "RW", "deadline_s": 5, "threads": 4}
    loader = plugin.Loader(LoadConfig("snapback", extra))
    assert loader._reader().load_config == LoadConfig("auto", {"threads": 4})
    loader.download_model(config().model_config)
    assert type(loader._reader()).downloaded == [MODEL]


def devices_of_cache(service: RunningGms) -> list[int]:
    return [index for index in (0, 1) if service.device(index).domains[1].sessions]


def test_a_map_of_devices_is_applied_once_for_each_restore(
    plugin: Any, service: RunningGms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def restored(attempt: int, generation: int) -> None:
        swapped = dict(zip(service.uuids, reversed(service.uuids), strict=True))
        body = {"attempt": attempt, "generation": generation, "devices": swapped}
        (tmp_path / "restore-complete").write_text(json.dumps(body))

    def slept_and_woken() -> list[int]:
        worker.sleep()
        worker.wake_up(["kv_cache"])
        return devices_of_cache(service)

    worker = started(plugin)
    monkeypatch.setenv("SNAPSHOT_CONTROL_DIR", str(tmp_path))
    worker.sleep()
    restored(1, 1)
    worker.wake_up(["kv_cache"])
    assert devices_of_cache(service) == [1]
    worker.kv_cache.fill_(7)
    assert slept_and_woken() == [1]
    restored(2, 1)
    assert slept_and_woken() == [0]
    assert slept_and_woken() == [0]
    restored(2, 2)
    assert slept_and_woken() == [1]


def test_a_map_of_devices_from_before_the_process_has_its_memory_is_not_applied(
    plugin: Any, service: RunningGms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was started after a restore has connected to the devices of this node."""
    first, second = service.uuids[:2]
    body = {"attempt": 1, "devices": {first: second, second: first}}
    (tmp_path / "restore-complete").write_text(json.dumps(body))
    monkeypatch.setenv("SNAPSHOT_CONTROL_DIR", str(tmp_path))
    worker = started(plugin)
    worker.sleep()
    worker.wake_up()
    assert devices_of_cache(service) == [0]


def test_what_no_agent_has_written_is_no_restore(tmp_path: Path) -> None:
    environment = {"SNAPSHOT_CONTROL_DIR": str(tmp_path)}
    assert engines.last_restore({}) is None
    assert engines.last_restore(environment) is None
    (tmp_path / "restore-complete").write_text("{")
    assert engines.last_restore(environment) is None


def test_a_worker_that_takes_the_lock_to_write_publishes_anew(
    plugin: Any, service: RunningGms
) -> None:
    for generation in (1, 2):
        worker = started(plugin, extra={"lock": "RW", "deadline_s": 5})
        assert answer(worker)
        assert service.layout().generation == generation
        assert loads_from_disk() == generation
        engines.close_memory()


def test_a_writer_gives_up_what_is_published_where_there_is_no_room_for_both(
    likeness: None, service: RunningGms
) -> None:
    for _ in range(2):
        memory = engines.EngineMemory(0, lock="RW", deadline_s=5, name="test")
        pool = memory._pools["weights"]
        assert memory.is_writer
        pool.allocate("w", 40 << 20, "uint8")
        pool.commit()
        memory.close()
    assert pool.generation is not None
    assert pool.generation.generation == 2


def test_a_writer_beside_readers_leaves_them_what_they_read(
    likeness: None, service: RunningGms
) -> None:
    with committed(1, 5) as pool:
        # The addresses in this process belong to the pool that is open.
        code = (
            "from snapback_client.engines import EngineMemory\n"
            "memory = EngineMemory(1, lock='RW', deadline_s=5, name='test')\n"
            "print(memory.is_writer)\n"
        )
        found = subprocess.run(
            [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{code}"],
            capture_output=True,
            check=False,
            text=True,
        )
        assert found.stdout == "True\n", found.stderr
        assert list(pool["w"]) == [5] * 10


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_plug_in_without_its_engine_is_no_module(engine: str) -> None:
    if importlib.util.find_spec(engine) is not None:
        pytest.skip(f"{engine} is installed")
    with pytest.raises(ModuleNotFoundError, match=f"{engine} is not installed"):
        importlib.import_module(f"snapback_client.{engine}")


@pytest.mark.parametrize("lack", ["name", "argument"])
def test_a_version_that_lacks_a_name_is_refused_by_it(
    likeness: None, monkeypatch: pytest.MonkeyPatch, lack: str
) -> None:
    worker = importlib.import_module("vllm.v1.worker.gpu_worker").Worker
    if lack == "name":
        monkeypatch.delattr(worker, "reset_weights")
        said = "gpu_worker:Worker.reset_weights"
    else:
        monkeypatch.setattr(worker, "_maybe_get_memory_pool_context", worker.init_device)
        said = "_maybe_get_memory_pool_context, which takes no tag"
    with pytest.raises(UnsupportedVersion) as raised:
        importlib.import_module("snapback_client.vllm")
    assert said in raised.value.message
    assert raised.value.next_step == ("install vllm 0.33.0, from which the plug-in was written")
    assert len(raised.value.values["missing"]) == 1
