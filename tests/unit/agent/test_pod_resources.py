"""Which GPUs a container holds, by what its kubelet says."""

from __future__ import annotations

import pytest

from snapshot_agent.domain.pod_resources import HeldGpu, held_gpus, on_this_node
from snapshot_shared.errors import InvalidMessage
from snapshot_shared.orders import PodRef
from tests.support import builders
from tests.support.pod_resources import claim, container, field, limit, number, pod
from tests.unit.tables import each

WORKER = PodRef(uid="u", name="worker", namespace="default", container="main")
NVIDIA = "gpu.nvidia.com"


@each(
    ("rows", "held"),
    [
        ([], []),
        ([limit("nvidia.com/gpu", ["GPU-a", "GPU-b"])], [HeldGpu("GPU-a"), HeldGpu("GPU-b")]),
        ([limit("nvidia.com/gpu.shared", ["GPU-a::3"])], [HeldGpu("GPU-a")]),
        ([limit("nvidia.com/gpu.shared", ["GPU-a::0", "GPU-a::1"])], [HeldGpu("GPU-a")]),
        ([limit("nvidia.com/mig-1g.10gb", ["MIG-a"])], [HeldGpu("MIG-a")]),
        ([limit("example.com/nic", ["eth0"])], []),
        ([claim(NVIDIA, "gpu-1", "gpu-0")], [HeldGpu("gpu-1", 1), HeldGpu("gpu-0", 0)]),
        ([claim(NVIDIA, "gpu-0-mig-9-4-4")], [HeldGpu("gpu-0-mig-9-4-4")]),
        ([claim("gpu.sim.snapback.nvidia.com", "gpu-1")], [HeldGpu("gpu-1", 1)]),
        ([claim("nic.example.com", "gpu-1")], []),
        ([limit("nvidia.com/gpu", ["GPU-a"]), claim(NVIDIA, "gpu-1")], [HeldGpu("gpu-1", 1)]),
    ],
)
def test_the_gpus_of_a_container_are_those_of_its_claims_or_else_of_its_limits(
    rows: list[bytes], held: list[HeldGpu]
) -> None:
    others = [
        pod("worker", container("main", claim(NVIDIA, "gpu-7")), namespace="other"),
        pod("other", container("main", claim(NVIDIA, "gpu-7"))),
    ]
    beside = container("beside", claim(NVIDIA, "gpu-7"))
    mine = pod("worker", beside, container("main", *rows))
    answer = b"".join([*others, mine, number(9, 1), field(10, "of a later version")])
    assert held_gpus(answer, WORKER) == held
    assert held_gpus(b"".join(others), WORKER) == []


@pytest.mark.parametrize(
    "answer", [b"\x0a", b"\x0a\x05ab", b"\x0b", b"\xff" * 12, pod("worker")[:-2]]
)
def test_an_answer_that_is_no_message_is_refused(answer: bytes) -> None:
    with pytest.raises(InvalidMessage):
        held_gpus(answer, WORKER)


def test_gpus_are_known_by_their_number_or_their_uuid_and_others_by_their_name_alone() -> None:
    listed = [builders.device(index=n, uuid=uuid) for n, uuid in enumerate(("GPU-a", "GPU-b"))]
    held = [HeldGpu("gpu-1", 1), HeldGpu("GPU-a"), HeldGpu("MIG-x"), HeldGpu("gpu-4", 4)]
    found = on_this_node(held, listed)
    assert found[:2] == [listed[1], listed[0]]
    assert [(each.uuid, each.product) for each in found[2:]] == [("MIG-x", ""), ("gpu-4", "")]
