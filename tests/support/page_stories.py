"""The three states in which the page is tested and of which the documents have pictures."""

from __future__ import annotations

import asyncio
import time

from snapshot_shared.errors import Failure
from tests.support.page_world import GIB, PAUSED_S, PageWorld, checkpoint, restored

DAMAGED = Failure(
    reason="ArtifactCorrupt",
    message="file shard-00003, chunk 17: the digest differs",
    next_step="capture the worker again, or verify the artifact when its disk is repaired",
)
NOT_ELIGIBLE = Failure(
    reason="NotEligible",
    message="the worker was not ready within 60 s: ready-for-snapshot is missing",
    next_step="read the worker's log; give it more time with spec.job.activeDeadlineSeconds",
)
POISON = Failure(
    reason="InvalidMessage",
    message="not a valid DumpOrder: object missing required field `pod`",
    next_step="find out who published it: the operator alone may order",
)


async def begin(world: PageWorld) -> None:
    """Two nodes, one artifact and a pod that was restored from it."""
    for name in ("node-1", "node-2"):
        await world.join(name)
    await world.apply(checkpoint("mistral-7b", model="mistralai/Mistral-7B-Instruct"))
    await world.capture(14 * GIB)
    await world.apply(restored("mistral-7b-1", "mistral-7b"))
    await world.restore()
    for node in world.nodes.values():
        node.used, node.sessions = [15 * GIB, 15 * GIB], [1, 1]
        await node.appear()


async def be_busy(world: PageWorld) -> None:
    """A capture with its process part staged and its weights half written."""
    await begin(world)
    await world.join("node-3", gpus=4)
    world.nodes["node-3"].used = [68 * GIB, 68 * GIB, 0, 0]
    world.nodes["node-3"].sessions = [2, 2, 0, 0]
    await world.nodes["node-3"].appear()
    model = "meta-llama/Llama-3.1-70B-Instruct"
    await world.apply(
        checkpoint("llama-70b", node="node-3", model=model, labels={"team": "serving"})
    )
    await world.run_worker()
    saves = await world.prepare(66 * GIB)
    await world.done(await world.order("release"), paused_s=PAUSED_S)
    await asyncio.sleep(3 * world.pace_s)
    now = time.time()
    for save, share in zip(saves, (0.62, 0.48), strict=True):
        await world.span(save, "lease", now - 0.02, 0.02)
        await world.progress(save, "write", int(66 * GIB * share), 66 * GIB)


async def break_things(world: PageWorld) -> None:
    """A failed checkpoint, a damaged artifact and a dead letter; a lost node was there before."""
    await begin(world)
    await world.join("node-3", gpus=4)
    await world.apply(restored("mistral-7b-2", "mistral-7b", "node-3"))
    await world.restore(DAMAGED)
    for _ in range(2):
        await world.done(await world.order("drop"))
    await world.done(await world.order("stop"))
    for _ in range(2):
        await world.done(await world.order("drop"))
    await world.apply(checkpoint("qwen-32b", node="node-3", model="Qwen/Qwen2.5-32B"))
    await world.run_worker()
    order = await world.order("prepare")
    await world.fail(order, NOT_ELIGIBLE)
    for _ in range(2):
        await world.done(await world.order("abort"))
    await world.dead_message("node-2", "snap.order.node-2.agent.dump-x", POISON)
