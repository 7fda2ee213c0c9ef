"""The fault switch of the simulation: crash, stall or fail a service at the step of one's choice.

A plan exists only in a service that was started with `SNAPBACK_SIM=1`. It is kept in memory alone,
so a service that was crashed by it starts again without faults.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Mapping

from snapshot_shared import steps
from snapshot_shared.api import Fault, SimReply, SimRequest
from snapshot_shared.codec import decode_json, encode_json
from snapshot_shared.errors import InjectedFault, SnapbackError

log = logging.getLogger(__name__)


class FaultPlan:
    """The faults that are armed in one service: at most one a step and verb, each used once.

    Fills the port `runner.Faults`.
    """

    def __init__(self, service: str, node: str) -> None:
        """Begin with nothing armed; `service` is `agent` or `gms`."""
        self._service = service
        self._node = node
        self._armed: dict[tuple[str, str], Fault] = {}

    @property
    def armed(self) -> list[Fault]:
        """What is armed now."""
        return list(self._armed.values())

    def arm(self, fault: Fault) -> None:
        """Arm a fault in place of another at the same step. InvalidInput lists the steps."""
        steps.find(fault.step, verb=fault.verb, service=self._service)
        self._armed[fault.verb, fault.step] = fault
        log.warning("armed: %s", _described(fault))

    def clear(self) -> None:
        """Disarm everything."""
        self._armed.clear()

    async def before(self, verb: str, step: str) -> None:
        """Carry out the fault of this step, if there is one, and forget it."""
        fault = self._armed.pop((verb, step), None) or self._armed.pop(("", step), None)
        if fault is None:
            return
        log.warning("the fault switch acts in %s: %s", verb, _described(fault))
        match fault.action:
            case "crash":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stall":
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(fault.stall_s or None):
                        await asyncio.Event().wait()
            case "fail":
                raise InjectedFault(
                    f"{verb}: step {step} failed because a fault was armed there",
                    next_step="nothing is broken; it was asked for with: snapshotctl sim fail "
                    f"{self._node} --at {step} --verb {verb} --service {self._service}",
                    verb=verb,
                    step=step,
                )

    async def answer(self, data: bytes, _headers: Mapping[str, str]) -> bytes:
        """Answer one `SimRequest`. Never raises for bad input."""
        try:
            request = decode_json(data, SimRequest)
            if request.clear:
                self.clear()
            if request.arm is not None:
                self.arm(request.arm)
        except SnapbackError as error:
            return encode_json(SimReply(failure=error.to_failure()))
        return encode_json(SimReply(armed=self.armed))


def _described(fault: Fault) -> str:
    return f"{fault.action} at {fault.verb or 'any verb'}/{fault.step}"
