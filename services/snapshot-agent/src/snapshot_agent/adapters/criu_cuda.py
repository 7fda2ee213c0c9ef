"""The driver of workers that need not help and use CUDA: CRIU, once their devices are given back.

The helper locks the processes that use CUDA and has the driver bring what they have on devices
into their memory before it starts CRIU; afterwards it lets them go on their devices. A restore
brings them to the devices of their new container.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from snapshot_agent.adapters import settling
from snapshot_agent.adapters.criu import Criu, PlainCriu, Span
from snapshot_agent.adapters.scratch import Scratch
from snapshot_agent.ports import DriverState, PodDevices, Worker
from snapshot_shared.errors import SnapbackError
from snapshot_shared.orders import Driver

FIT_S = 8.0
"""How long the helper may take to say that the CUDA driver is there, in seconds."""

AGAIN_S = 60.0
"""How long that is believed, in seconds: to find it out takes a process that initialises CUDA."""


class GpusUnknown(SnapbackError):
    """The kubelet does not say which GPUs a container has, so nothing was done to it."""

    retryable = True
    default_next_step = "see why the kubelet's socket of pod-resources does not answer"


class _WithCuda(Criu):
    """A driver whose helper brings what workers have on devices into their memory."""

    name: Driver = "criu+cuda"
    settled_s = settling.CUDA_ANSWER_S
    _believed_until = 0.0

    async def state(self, *, quick: bool = False) -> DriverState:
        now = self._monotonic()
        if quick or now < self._believed_until:
            state = await super().state()
            if quick or state.failure is None:
                return state
        state = await self.ping(cuda=True, within_s=FIT_S)
        self._believed_until = now + AGAIN_S if state.failure is None else 0.0
        return state


class CriuCuda(_WithCuda):
    """The `ProcessDriver` port over the helper of a node, with its CUDA driver."""

    def __init__(
        self,
        helper: Path,
        monotonic: Callable[[], float],
        pod_devices: PodDevices,
        scratch: Scratch | None = None,
        span: Span = contextlib.nullcontext,
    ) -> None:
        """Ask the helper at the socket `helper`, and `pod_devices` for the GPUs of containers."""
        super().__init__(helper, monotonic, scratch, span)
        self._pod_devices = pod_devices

    async def gpus(self, worker: Worker) -> list[str] | None:
        found = await self._pod_devices.of(worker.pod)
        if found is None:
            raise GpusUnknown(
                f"which GPUs container {worker.pod.container} of pod {worker.pod.name} has is not "
                "known"
            )
        return [device.uuid for device in found]


class PlainCriuCuda(PlainCriu, _WithCuda):
    """The same for workers that the agent has started, each in its namespaces."""

    async def gpus(self, worker: Worker) -> list[str] | None:
        return list(worker.gpus)
