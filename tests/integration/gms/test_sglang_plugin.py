"""The plug-in of SGLang, on a likeness of SGLang's interfaces and simulated devices.

Needs PyTorch: `make test-torch`.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from snapback_client import engines
from snapback_client.errors import InvalidInput, NotEligible, UnsupportedVersion
from tests.support.gms_rig import RunningGms
from tests.support.torch_site import LIKENESSES, likeness_of


@pytest.fixture
def likeness(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    yield from likeness_of("sglang", monkeypatch)


@pytest.fixture
def torch(likeness: Any, service: RunningGms) -> Any:
    """PyTorch, in a process of SGLang that has loaded its plug-ins."""
    importlib.import_module("sglang.srt.plugins").load_plugins()
    return likeness


def adapter(*, enable: bool = True) -> Any:
    from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

    return TorchMemorySaverAdapter.create(enable=enable)


def load(torch: Any, *, saver: Any = None, draft: bool = False, **changes: Any) -> Any:
    from sglang.srt.model_executor.model_runner_components import load_model_utils

    config = {
        "model_path": "example/model",
        "dtype": torch.bfloat16,
        "revision": None,
        "quantization": None,
        "hf_config": SimpleNamespace(architectures=["Model"]),
    }
    return load_model_utils.load_model_with_memory_saver(
        model_config=SimpleNamespace(**config | changes),
        load_config=None,
        device="cuda",
        gpu_id=0,
        memory_saver_adapter=saver or adapter(),
        is_draft_worker=draft,
    )


def answer(loaded: Any) -> list[float]:
    from engine_model import answer

    return answer(loaded.model)


def loads_from_disk() -> int:
    from sglang.srt.model_loader.loader import DefaultModelLoader

    return len(DefaultModelLoader.loaded)


def test_the_second_process_maps_what_the_first_has_published(torch: Any) -> None:
    first = load(torch)
    expected = answer(first)
    engines.close_memory()
    second = load(torch)
    assert answer(second) == expected
    assert loads_from_disk() == 1
    imported = engines.memory().torch.imported_bytes("weights")
    found = [each.loader.preloaded_weights_bytes for each in (first, second)]
    assert found == [0, imported]
    assert imported >= sum(each.nbytes for each in second.model.parameters())
    assert (second.remote_instance_weight_info, second.startup_weight_load) == (None, None)


def test_pause_and_resume_act_on_the_pools_by_tag(torch: Any) -> None:
    loaded, saver = load(torch), adapter()
    expected = answer(loaded)
    with saver.region("kv_cache"):
        cache = torch.zeros(1 << 20, dtype=torch.uint8)
        with saver.disable():
            beside = torch.zeros(1 << 20, dtype=torch.uint8)
    cache.fill_(7)
    where, memory = cache.data_ptr(), engines.memory().torch

    saver.pause("kv_cache")
    assert memory.imported_bytes("kv_cache") == 0
    assert answer(loaded) == expected
    saver.pause("weights")
    saver.pause("cuda_graph")
    assert memory.imported_bytes() == 0
    assert not beside.any()
    saver.resume("cuda_graph")
    saver.resume("weights")
    assert answer(loaded) == expected
    saver.resume("kv_cache")
    assert cache.data_ptr() == where
    assert not cache.any()


def test_a_tag_of_no_pool_is_allocated_as_before(torch: Any) -> None:
    saver = adapter()
    assert saver.enabled
    load(torch, saver=saver)
    before = engines.memory().torch.imported_bytes()
    with saver.configure_subprocess(), saver.region("cuda_graph"):
        torch.zeros(1 << 20, dtype=torch.uint8)
    assert engines.memory().torch.imported_bytes() == before


def test_a_graph_is_captured_by_pytorch_itself(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "graph", lambda *given, **more: asked.append((given, more)))
    adapter().cuda_graph(
        cuda_graph="graph", pool="pool", stream="stream", tag="cuda_graph", enable_cpu_backup=True
    )
    named = {"pool": "pool", "stream": "stream", "capture_error_mode": "global"}
    assert asked == [(("graph",), named)]


def test_without_a_memory_saver_the_engine_loads_as_before(torch: Any) -> None:
    plain = adapter(enable=False)
    assert not plain.enabled
    load(torch, saver=plain)
    assert loads_from_disk() == 1
    with pytest.raises(NotEligible, match="not in GPU memory that Snapback serves"):
        adapter().pause("weights")


def test_a_draft_model_is_loaded_beside_the_one_that_is_shared(torch: Any) -> None:
    loaded = load(torch)
    draft = load(torch, draft=True, model_path="example/draft")
    assert answer(draft) == answer(loaded)
    assert loads_from_disk() == 2


@pytest.mark.parametrize("changes", [{"model_path": "example/other"}, {"revision": "2"}])
def test_weights_of_another_model_are_not_taken(torch: Any, changes: dict[str, Any]) -> None:
    load(torch)
    engines.close_memory()
    with pytest.raises(InvalidInput, match="the pool holds sglang-"):
        load(torch, **changes)


def test_weights_of_another_rank_are_not_taken(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks have the same names and shapes, and other values."""
    from sglang.srt.runtime_context import get_parallel

    load(torch)
    engines.close_memory()
    monkeypatch.setattr(get_parallel(), "tp_rank", 1)
    with pytest.raises(InvalidInput, match="the pool holds sglang-"):
        load(torch)


@pytest.mark.parametrize(
    ("bag", "name", "value", "said"),
    [
        ("get_exec", "moe.enable_eplb", True, "--enable-eplb"),
        ("get_model", "weight_cache_mode", "client", "--weight-cache-mode"),
        ("get_model", "is_startup_weight_load_overlap", True, "the overlap"),
    ],
)
def test_features_that_write_weights_later_are_refused(
    torch: Any, monkeypatch: pytest.MonkeyPatch, bag: str, name: str, value: object, said: str
) -> None:
    context = importlib.import_module("sglang.srt.runtime_context")
    owner = getattr(context, bag)()
    *path, last = name.split(".")
    for each in path:
        owner = getattr(owner, each)
    monkeypatch.setattr(owner, last, value)
    with pytest.raises(NotEligible, match=said):
        load(torch)
    assert loads_from_disk() == 0


def test_a_quantisation_that_the_engine_cannot_map_is_refused(torch: Any) -> None:
    load(torch, quantization="awq")
    engines.close_memory()
    with pytest.raises(RuntimeError, match="client: awq"):
        load(torch, quantization="awq")


def run_plugins(code: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.path.insert(0, {str(LIKENESSES)!r})\n{code}"
    program = [sys.executable, "-c", code]
    return subprocess.run(program, capture_output=True, text=True, env=environment, check=False)


def test_without_gpu_memory_to_serve_the_engine_is_left_alone() -> None:
    done = run_plugins(
        "from sglang.srt.plugins import load_plugins\n"
        "load_plugins()\n"
        "print('snapback_client.sglang' in sys.modules, 'torch' in sys.modules)",
        {},
    )
    assert (done.stdout, done.stderr) == ("False False\n", "")


def test_a_version_that_lacks_a_name_ends_the_process_with_it() -> None:
    """SGLang would log the error, and load the weights into memory that nobody serves."""
    done = run_plugins(
        "from sglang.srt.plugins import hook_registry, load_plugins\n"
        "del hook_registry.HookRegistry.register\n"
        "load_plugins()",
        {"GMS_SOCKET_DIR": "/nowhere"},
    )
    assert done.returncode == 1
    assert "UnsupportedVersion: sglang of an unknown version has no" in done.stderr
    assert "hook_registry:HookRegistry.register" in done.stderr
    assert "install sglang 0.5.23" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_a_reader_needs_is_looked_for_before_it_loads(
    torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    protocol = importlib.import_module("sglang.srt.weight_cache.protocol")
    monkeypatch.delattr(protocol, "compute_env_stamp")
    with pytest.raises(UnsupportedVersion, match="protocol:compute_env_stamp"):
        load(torch)
    assert loads_from_disk() == 0
