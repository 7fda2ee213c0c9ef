"""Wires the handlers of the agent, one for each verb."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from snapshot_agent.domain.spec import NodeEnvironment
from snapshot_agent.handlers.artifacts import Artifacts
from snapshot_agent.handlers.background import Background, Slots
from snapshot_agent.handlers.captures import Captures
from snapshot_agent.handlers.holds import Holds
from snapshot_agent.handlers.pods import Pods
from snapshot_agent.handlers.recovery import Recoverer
from snapshot_agent.handlers.restores import Restores
from snapshot_agent.ports import Machine, Orders, Workers
from snapshot_shared import instruments
from snapshot_shared.courier import Handler, OrderContext, Result
from snapshot_shared.orders import (
    AbortOrder,
    DeleteOrder,
    DumpOrder,
    Order,
    PlaceOrder,
    PrepareOrder,
    ReleaseOrder,
    RestoreOrder,
    RunOrder,
    SealOrder,
    StopOrder,
    VerifyOrder,
)


class Agent:
    """All handlers of one node."""

    def __init__(
        self,
        machine: Machine,
        orders: Orders,
        environment: NodeEnvironment,
        state_dir: Path,
        slots: int,
        kubelets: Workers | None = None,
    ) -> None:
        """Make the handlers; at most `slots` workers are captured, and artifacts read, at a time.

        Without `kubelets`, which are the workers of a kubelet, the agent itself starts pods.
        """
        # A quiet worker waits for no artifact to be read, which may take an hour.
        writing, reading = Slots(slots), Slots(slots)
        self._clocks = machine.clocks
        self.background = Background()
        pods = Pods(machine, orders, self.background, environment, state_dir)
        self.pods = pods if kubelets is None else None
        workers: Workers = kubelets or pods
        self.holds = Holds(machine, orders, workers, self.background)
        self.captures = Captures(machine, orders, workers, self.holds, writing)
        self.artifacts = Artifacts(machine, orders, reading)
        self.restores = Restores(machine, orders, workers)
        self._recoverer = Recoverer(machine, orders, workers, self.pods, self.holds)
        observe = machine.metrics.observe
        observe(instruments.SLOTS_USED, lambda: {(): writing.used})
        observe(instruments.SLOTS_LIMIT, lambda: {(): writing.limit})
        if self.pods is not None:
            observe(instruments.PODS, lambda: {(): len(pods.known)})

    async def recover(self) -> None:
        """Recover what an earlier agent left behind. Call it before orders are accepted."""
        await self._recoverer.run()

    async def abort(self, order: AbortOrder, ctx: OrderContext) -> Result:
        """Abort a capture, or where no content is named the restore of a pod."""
        orders = self.restores if order.content_uid is None else self.captures
        return await orders.abort(order, ctx)

    async def close(self) -> None:
        """Stop watching. Containers run on, and guards wait for the next agent."""
        await self.background.close()
        self.holds.close()

    def status(self) -> dict[str, Any]:
        """Return the pods, and the captures with the seconds until their deadlines."""
        now = self._clocks.monotonic()
        return {
            "pods": [
                {
                    "uid": uid,
                    "namespace": pod.order.pod.namespace,
                    "name": pod.order.pod.name,
                    "containers": {name: w.process.pid for name, w in pod.workers.items()},
                    "ended": pod.codes,
                }
                for uid, pod in (self.pods.known.items() if self.pods else ())
            ],
            "captures": [
                {
                    "content": content,
                    "attempt": hold.attempt,
                    "pod": hold.order.pod.uid,
                    "ends_in_s": round(max(0.0, hold.deadline - now), 3),
                }
                for content, hold in self.holds.by_content.items()
            ],
        }


def routes(agent: Agent) -> dict[type[Order], Handler]:
    """Return the handler of each type of order."""
    starts: dict[type[Order], Handler] = {}
    if agent.pods is not None:
        starts = {RunOrder: agent.pods.run, StopOrder: agent.pods.stop}
    return starts | {
        PrepareOrder: agent.captures.prepare,
        DumpOrder: agent.captures.dump,
        ReleaseOrder: agent.captures.release,
        AbortOrder: agent.abort,
        SealOrder: agent.artifacts.seal,
        DeleteOrder: agent.artifacts.delete,
        VerifyOrder: agent.artifacts.verify,
        PlaceOrder: agent.restores.place,
        RestoreOrder: agent.restores.restore,
    }
