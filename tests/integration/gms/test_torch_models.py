"""Models of PyTorch in pools: published, asleep, awake, in a second process, restored elsewhere.

Needs PyTorch: `make test-torch`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import snapback_client as client
from gms.adapters.cuda import open_devices
from snapback_client import dlpack
from snapback_client.cuda import CudaUnavailable
from snapback_client.errors import InvalidInput, NotEligible, NotFound, OutOfDeviceMemory
from snapback_client.torch import TorchMemory, tensor_of
from snapshot_shared.frames import FenceRequest
from snapshot_shared.orders import LayoutRef
from tests.support.gms_rig import MIB, RunningGms, committed, events_of
from tests.support.torch_site import path_with_torch, torch_for
from tests.support.weights import loading, saving

pytestmark = [pytest.mark.slow, pytest.mark.cpu(240)]

ROOT = Path(__file__).parents[3]


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    return torch_for(monkeypatch)


@pytest.fixture(params=["simulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def service(request: pytest.FixtureRequest, torch: Any, launch: Any) -> Any:
    if request.param == "simulated":
        return launch(capacities=(128 * MIB, 128 * MIB))
    try:
        return launch(devices=open_devices())
    except CudaUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def weights(service: Any) -> Iterator[client.MemoryPool]:
    with client.connect(lock="RW") as pool:
        yield pool


@pytest.fixture
def memory(weights: client.MemoryPool) -> TorchMemory:
    return TorchMemory({"weights": weights})


@pytest.fixture
def models(torch: Any) -> Any:
    from tests.support import torch_model

    return torch_model


def in_another_process(tmp_path: Path, state: str, device: str, socket_dir: Path) -> Any:
    found = tmp_path / "found.json"
    worker = [sys.executable, "-m", "tests.support.torch_worker", state, device, str(found)]
    environment = {**os.environ, "GMS_SOCKET_DIR": str(socket_dir)}
    subprocess.run(worker, check=True, timeout=120, cwd=ROOT, env=environment)
    return json.loads(found.read_text())


def save(service: RunningGms, root: Path) -> LayoutRef:
    """Save the first device, and return what was committed on it."""
    fence = FenceRequest(token="f1", devices=service.uuids[:1], wait_s=5.0, deadline_s=60.0)
    (layout,) = service.run(service.control.fence(fence)).vector
    task = saving(service.folder, root, layout, fence_token="f1", deadline_s=30.0)
    service.run(events_of(task))
    return layout


def load(service: RunningGms, root: Path, layout: LayoutRef) -> None:
    """Load it on the first device of a service, and publish it."""
    task = loading(service.folder, root, layout, device=service.uuids[0], deadline_s=30.0)
    service.run(events_of(task))
    service.publish("l1", 0)


def test_a_published_model_answers_the_same_and_the_pool_holds_little_but_its_parameters(
    memory: TorchMemory, service: Any, weights: client.MemoryPool, models: Any, torch: Any
) -> None:
    model = models.build().to(memory.device)
    expected = models.answer(model)
    memory.publish(model)
    assert torch.equal(models.answer(model), expected)
    wanted = sum(each.nbytes for each in model.parameters())
    assert 20 * MIB < wanted <= service.layout().bytes <= 1.02 * wanted
    assert int(model.calls) == 2, "forward writes a buffer, which is no part of the pool"
    addresses = [weights.address(name) for name in weights.arrays()]
    ends = [at + size for at, size in zip(addresses, weights.sizes().values(), strict=True)]
    for parameter in model.parameters():
        assert min(addresses) <= parameter.data_ptr() < max(ends)


def test_a_model_that_sleeps_and_wakes_has_the_same_tensors_at_the_same_addresses(
    memory: TorchMemory, models: Any, torch: Any
) -> None:
    model = models.build().to(memory.device)
    memory.publish(model)
    expected = models.answer(model)
    places = {name: each.data_ptr() for name, each in model.named_parameters()}
    for _ in range(3):
        memory.sleep()
        assert memory.imported_bytes() == 0
        memory.wake()
        assert {name: each.data_ptr() for name, each in model.named_parameters()} == places
        assert torch.equal(models.answer(model), expected)


def test_a_second_process_has_the_model_from_its_names_alone(
    memory: TorchMemory, service: Any, weights: client.MemoryPool, models: Any, tmp_path: Path
) -> None:
    model = models.build().to(memory.device)
    memory.publish(model)
    expected = models.answer(model)
    found = in_another_process(tmp_path, "attach", service.uuids[0], service.folder)
    assert found["answer"] == expected.flatten().tolist()
    assert found["tied"]
    assert found["dtypes"] == ["torch.bfloat16"]
    assert (found["calls"], found["calls_after"]) == (0, 1), "buffers are its own"
    assert found["shared"] == model.embedding.weight.data_ptr()
    assert found["imported"] == weights.imported_bytes
    assert service.device().used == weights.imported_bytes, "both have it, it is there once"


def test_a_model_is_restored_on_another_service(
    memory: TorchMemory, service: Any, weights: client.MemoryPool, models: Any, tmp_path: Path
) -> None:
    if weights.device_kind == "cuda":
        pytest.skip("the other service has simulated devices")
    model = models.build()
    memory.publish(model)
    expected = models.answer(model)
    state = tmp_path / "state"
    state.write_bytes(weights.save_state())
    memory.sleep()
    layout = save(service, tmp_path / "artifacts")
    with tempfile.TemporaryDirectory(prefix="gms-") as folder:
        other = RunningGms(Path(folder), capacities=(128 * MIB,))
        other.start()
        try:
            load(other, tmp_path / "artifacts", layout)
            found = in_another_process(tmp_path, str(state), other.uuids[0], other.folder)
        finally:
            other.stop()
    assert found["answer"] == expected.flatten().tolist()
    assert found["tied"]


def test_what_is_made_in_a_region_lies_in_the_pool_and_what_is_dropped_is_not_committed(
    memory: TorchMemory, service: Any, weights: client.MemoryPool, torch: Any
) -> None:
    with memory.region("weights", reserve=8 * MIB):
        kept = torch.nn.Linear(1024, 1024, bias=False, device=memory.device)
        rubbish = [torch.zeros(4 * MIB, dtype=torch.uint8, device=memory.device) for _ in range(4)]
        kept.register_buffer("scratch", torch.ones(16, device=memory.device))
    kept.all = [kept.weight]
    place = kept.weight.data_ptr()
    assert place in range(
        weights.address("segment-000000"), weights.address("segment-000000") + 8 * MIB
    )
    assert service.device().used >= 20 * MIB
    del rubbish
    memory.publish(kept)
    assert kept.weight.data_ptr() == place, "it was there already"
    # The values of the buffer take a granule of their own.
    assert service.device().used <= 4 * MIB + 2 * weights.granularity
    kept.scratch += 1
    assert kept.scratch.tolist() == [2.0] * 16


def test_two_regions_of_a_process_lie_in_pools_that_wake_apart(
    service: Any, weights: client.MemoryPool, torch: Any
) -> None:
    with client.connect(lock="RW", domain="kv") as cache:
        memory = TorchMemory({"weights": weights, "kv_cache": cache})
        with memory.region("weights"):
            model = torch.nn.Linear(512, 512, device=memory.device)
        memory.publish(model)
        with memory.region("kv_cache", reserve=6 * MIB):
            keys = torch.zeros(6 * MIB, dtype=torch.uint8, device=memory.device)
        keys += 3
        values, place = model.weight.clone(), keys.data_ptr()
        both = memory.imported_bytes()
        assert both == memory.imported_bytes("weights") + memory.imported_bytes("kv_cache")
        assert memory.imported_bytes("kv_cache") >= 6 * MIB
        memory.sleep("kv_cache")
        assert torch.equal(model.weight, values)
        memory.sleep()
        assert memory.imported_bytes() == 0
        assert 0 < service.device().used < both, "what is published stays, and a cache does not"
        memory.wake("weights")
        assert torch.equal(model.weight, values)
        assert memory.imported_bytes("kv_cache") == 0
        memory.wake()
        assert memory.imported_bytes() == both
        assert keys.data_ptr() == place
        assert not keys.any(), "a cache is empty after a sleep"
        keys += 1


def test_a_part_of_a_region_can_be_outside_of_the_pool(
    memory: TorchMemory, weights: client.MemoryPool, torch: Any
) -> None:

    def is_inside(tensor: Any) -> bool:
        first, size = weights.address("segment-000000"), 4 * MIB
        return first <= tensor.data_ptr() < first + size

    def made() -> Any:
        return torch.zeros(10, device=memory.device)

    with memory.outside():
        assert memory.imported_bytes() == 0
        kept = [made()]
    with memory.region("weights", reserve=4 * MIB):
        kept.append(made())
        with memory.outside():
            kept.append(made())
            with memory.outside():
                kept.append(made())
        kept.append(made())
        with pytest.raises(ValueError, match="wrong"), memory.outside():
            raise ValueError("wrong")
        kept.append(made())
    kept.append(made())
    assert list(map(is_inside, kept)) == [False, True, False, False, True, True, False]


@pytest.mark.parametrize(
    "dtype",
    ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "bool", "complex64", "int64"],
)
def test_every_type_of_pytorch_comes_back_bit_by_bit(
    memory: TorchMemory, torch: Any, dtype: str
) -> None:
    kind = getattr(torch, dtype)
    raw = torch.arange(96, dtype=torch.uint8) % 2
    model = torch.nn.Module()
    values = raw.view(kind).to(memory.device)
    model.weight = torch.nn.Parameter(values, requires_grad=False)
    memory.publish(model)
    found = memory.tensors()["weight"]
    assert found.dtype is kind
    assert torch.equal(found.cpu().view(torch.uint8), raw)


def test_views_of_one_memory_are_views_of_one_memory_in_the_pool(
    memory: TorchMemory, service: Any, torch: Any
) -> None:
    model = torch.nn.Module()
    fused = torch.arange(4096.0, device=memory.device).reshape(64, 64)
    for name, part in {"q": fused[:32], "k": fused[32:], "turned": fused.T}.items():
        model.register_parameter(name, torch.nn.Parameter(part, requires_grad=False))
    model.register_parameter("none", torch.nn.Parameter(torch.empty(0, 3, device=memory.device)))
    model.register_buffer("row", fused[5])
    wanted = {name: each.clone() for name, each in model.named_parameters()}
    memory.publish(model)
    assert service.layout().bytes < 2 * fused.nbytes, "once, and the row of the buffer"
    for name, each in model.named_parameters():
        assert torch.equal(each, wanted[name])
    assert model.turned.data_ptr() == model.q.data_ptr()
    assert model.k.data_ptr() == model.q.data_ptr() + fused.nbytes // 2
    assert model.turned.stride() == (1, 64)
    assert not model.row.is_set_to(model.q[5])
    model.row += 1


def test_a_buffer_keeps_its_identity_when_it_is_moved_out_of_the_pool(
    memory: TorchMemory, torch: Any
) -> None:
    model = torch.nn.Module()
    with memory.region("weights"):
        model.weight = torch.nn.Parameter(torch.ones(8, device=memory.device))
        table = torch.zeros(100, device=memory.device)
        cache = torch.zeros(3, device=memory.device)
        scale = torch.ones(2, device=memory.device)
    model.register_buffer("table", table)
    model.register_buffer("first", table[:10])
    model.caches = {"layers": [(cache,)]}
    model.scale = scale
    memory.publish(model)
    table += 1
    cache += 1
    scale += 1
    assert model.first.tolist() == [1.0] * 10, "still a view of the table"
    assert model.caches["layers"][0][0].tolist() == [1.0] * 3
    assert model.scale.tolist() == [2.0, 2.0]
    again = torch.nn.Module()
    again.weight = torch.nn.Parameter(torch.empty(8, device="meta"))
    again.register_buffer("table", torch.empty(100, device="meta"))
    memory.materialise(again)
    assert again.table.tolist() == [0.0] * 100, "as it was when it was published"
    assert again.first.tolist() == [0.0] * 10, "a buffer that the model did not have yet"
    assert again.scale.tolist() == [1.0, 1.0]


def test_parameters_keep_their_class_and_what_an_engine_has_put_on_them(
    memory: TorchMemory, torch: Any
) -> None:
    class Sharded(torch.nn.Parameter):  # type: ignore[misc,name-defined]
        pass

    model = torch.nn.Module()
    model.weight = Sharded(torch.ones(4, device=memory.device))
    memory.publish(model)
    again = torch.nn.Module()
    again.weight = Sharded(torch.empty(4, device="meta"))
    again.weight.rank = 3
    memory.materialise(again)
    assert isinstance(again.weight, Sharded)
    assert again.weight.rank == 3
    assert not again.weight.requires_grad
    assert again.weight.tolist() == [1.0] * 4


@pytest.mark.parametrize("change", ["shape", "missing", "unknown", "module", "buffer"])
def test_another_model_is_refused_by_name_and_left_as_it_is(
    memory: TorchMemory, torch: Any, change: str
) -> None:
    def build(device: str) -> Any:
        model = torch.nn.Module()
        model.layer = torch.nn.Linear(4, 4, bias=False, device=device)
        return model

    published, wrong = build(memory.device), build("meta")
    match change:
        case "shape":
            wrong.layer = torch.nn.Linear(4, 5, bias=False, device="meta")
        case "missing":
            wrong.more = torch.nn.Parameter(torch.empty(2, device="meta"))
        case "unknown":
            published.more = torch.nn.Parameter(torch.empty(2, device=memory.device))
        case "module":
            published.other = torch.nn.Module()
            published.other.register_buffer("more", torch.ones(2, device=memory.device))
        case "buffer":
            wrong.register_buffer("more", torch.empty(2, device="meta"))
    memory.publish(published)
    before = dict(wrong.named_parameters())
    with pytest.raises(InvalidInput, match=r"layer\.weight" if change == "shape" else "more"):
        memory.materialise(wrong)
    after = dict(wrong.named_parameters())
    assert all(after[name] is before[name] for name in before)


def test_a_model_that_is_elsewhere_is_refused_with_the_name_of_a_tensor(
    memory: TorchMemory, torch: Any
) -> None:
    model = torch.nn.Linear(4, 4, device="meta")
    with pytest.raises(InvalidInput, match=r"weight is torch\.strided on meta"):
        memory.publish(model)


def test_buffers_that_are_elsewhere_stay_what_they_are(memory: TorchMemory, torch: Any) -> None:
    model = torch.nn.Linear(4, 4, device=memory.device)
    sparse = torch.eye(3, device=memory.device).to_sparse()
    model.register_buffer("sparse", sparse)
    model.shapes = torch.empty(2, device="meta")
    memory.publish(model)
    assert model.sparse is sparse
    again = torch.nn.Linear(4, 4, device="meta")
    again.register_buffer("sparse", sparse)
    memory.materialise(again)
    assert again.sparse is sparse
    assert torch.equal(again.weight, model.weight)


@pytest.mark.parametrize(("built", "published"), [(True, False), (False, True), (True, True)])
def test_tensors_made_in_inference_mode_are_published_like_others(
    memory: TorchMemory, torch: Any, built: bool, published: bool
) -> None:
    with torch.inference_mode(built), memory.region("weights"):
        model = torch.nn.Linear(8, 8, device=memory.device)
        model.register_buffer("table", torch.zeros(8, device=memory.device))
        model.scale = torch.ones(8, device=memory.device) * 2
    values = model.weight.clone()
    with torch.inference_mode(published):
        memory.publish(model)
    with torch.inference_mode():
        model.table += 1
        model.scale += 1
        assert model.table.tolist() == [1.0] * 8
        assert torch.allclose(model(model.table), model.weight.sum(1) + model.bias)
    assert torch.equal(model.weight, values)
    assert model.weight.is_inference() == model.table.is_inference() == built


def test_regions_and_publications_come_in_their_order(memory: TorchMemory, torch: Any) -> None:
    model = torch.nn.Linear(4, 4, device=memory.device)
    with pytest.raises(NotFound, match="kv_cache"), memory.region("kv_cache"):
        pass
    with memory.region("weights"):
        with pytest.raises(NotEligible, match="'weights'"), memory.region("weights"):
            pass
        with pytest.raises(NotEligible, match="leave the region"):
            memory.publish(model)
    memory.publish(model)
    with pytest.raises(NotEligible, match="published"), memory.region("weights"):
        pass
    with pytest.raises(NotEligible, match="published"):
        memory.publish(model)
    memory.sleep()
    with pytest.raises(NotEligible, match="asleep"):
        memory.materialise(model)


def test_a_model_that_does_not_fit_is_refused_and_works_on(
    torch: Any, launch: Any, models: Any
) -> None:
    launch(capacities=(16 * MIB,))
    with client.connect(lock="RW") as pool:
        memory = TorchMemory({"weights": pool})
        model = models.build()
        expected = models.answer(model)
        with pytest.raises(OutOfDeviceMemory), memory.region("weights"):
            torch.zeros(20 * MIB)
        with pytest.raises(OutOfDeviceMemory):
            memory.publish(model)
        assert torch.equal(models.answer(model), expected)


def test_a_publication_that_loses_to_another_is_made_again(
    service: Any, torch: Any, models: Any
) -> None:
    with committed() as first:
        known = first.generation
    assert known is not None
    with client.connect(lock="RW", if_match=known) as pool:
        memory = TorchMemory({"weights": pool})
        model = torch.nn.Linear(64, 64, device=memory.device)
        pool.generation = client.GenerationRef(incarnation=known.incarnation, generation=9)
        with pytest.raises(client.GenerationMismatch):
            memory.publish(model)
        values = model.weight.clone()
        pool.generation = known
        memory.publish(model)
        assert torch.equal(model.weight, values)


def test_pools_of_two_devices_make_no_memory_of_a_model(torch: Any, launch: Any) -> None:
    launch()
    with (
        client.connect(0, lock="RW") as one,
        client.connect(1, lock="RW", domain="kv") as other,
        pytest.raises(InvalidInput, match="2 devices"),
    ):
        TorchMemory({"weights": one, "kv_cache": other})


def test_an_array_is_a_tensor_in_place_of_any_type_of_its_width(
    service: Any, weights: client.MemoryPool, torch: Any
) -> None:
    array = weights.allocate("a", (3, 4), "uint16")
    tensor = tensor_of(array, torch.bfloat16)
    assert (tensor.dtype, tuple(tensor.shape)) == (torch.bfloat16, (3, 4))
    tensor.fill_(1.0)
    raw = array.get() if hasattr(array, "get") else array
    assert (raw == 0x3F80).all()
    assert tensor_of(array).dtype is torch.uint16
    with pytest.raises(InvalidInput, match="have 4 bytes"):
        tensor_of(array, torch.float32)
    assert tuple(tensor_of(weights.allocate("none", (0, 2), "f4")).shape) == (0, 2)


def test_pytorch_takes_an_array_by_dlpack(weights: client.MemoryPool, torch: Any) -> None:
    array = weights.allocate("a", (3, 4), "f4")
    tensor = torch.from_dlpack(array)
    tensor.fill_(2.5)
    raw = array.get() if hasattr(array, "get") else array
    assert (raw == 2.5).all()


@pytest.mark.parametrize("versioned", [True, False])
def test_pytorch_takes_a_capsule_of_ours_and_frees_it(torch: Any, versioned: bool) -> None:
    array = np.arange(12, dtype="f4").reshape(3, 4)

    class Shared:
        def __dlpack_device__(self) -> tuple[int, int]:
            return dlpack.CPU, 0

        def __dlpack__(self, **_: Any) -> Any:
            return dlpack.to_dlpack(
                array.ctypes.data,
                array.shape,
                array.dtype,
                device=(dlpack.CPU, 0),
                writable=True,
                max_version=(1, 0) if versioned else None,
            )

    tensor = torch.from_dlpack(Shared())
    assert tensor.data_ptr() == array.ctypes.data
    tensor += 1
    assert array.tolist() == tensor.tolist() == (np.arange(12).reshape(3, 4) + 1.0).tolist()
    for _ in range(1000):
        torch.from_dlpack(Shared())


def test_the_roles_of_the_acceptance_on_a_gpu_answer_alike_on_a_simulated_device(
    service: Any, torch: Any
) -> None:
    def role(name: str, *words: str) -> subprocess.Popen[str]:
        program = [sys.executable, "tests/gpu/accept.py", "--role", name, str(os.getpid())]
        path = os.pathsep.join(path_with_torch())
        return subprocess.Popen(
            [*program, str(service.folder), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
        )

    with role("torch_writer", service.uuids[0], str(8 * MIB)) as writer:
        assert writer.stdout is not None
        first = json.loads(writer.stdout.readline())
        said, _ = role("torch_reader", first["state"]).communicate(timeout=100)
        writer.communicate("")
    second = json.loads(said)
    assert second["sums"] == first["sums"]
    assert second["answer"] == pytest.approx(first["answer"], rel=0.02)
    assert first["committed_of_parameters"] == 1.0
