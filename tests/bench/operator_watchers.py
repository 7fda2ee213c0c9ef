"""`python -m tests.bench.operator_watchers CONTENDER KUBECONFIG COUNT`: one who knows all objects.

It lists `COUNT` checkpoints and pods of an API server, indexes and follows them, and says on
standard output what that took. A line on standard input asks for one thing more; it ends with that.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from kubernetes_asyncio.client import ApiClient, CoreV1Api, CustomObjectsApi
from kubernetes_asyncio.watch import Watch

from snapshot_operator.kube.controllers import CONTROLLERS, INDEXES
from snapshot_operator.kube.shaping import JobShape
from snapshot_operator.kube.store import RESOURCES, KubeStore
from snapshot_operator.runtime.cluster import Cluster
from snapshot_operator.runtime.interpreter import Interpreter
from snapshot_operator.runtime.manager import Manager
from snapshot_operator.runtime.spans import Spans
from snapshot_operator.runtime.world import Changed, unsaid
from snapshot_shared.kube_client import KubeClient, load_configuration
from snapshot_shared.tasks import end_all
from snapshot_shared.telemetry import Telemetry
from tests.bench.common import use_peers
from tests.bench.machine import memory_mb
from tests.support.operator_world import MemoryOrders

CUSTOM: dict[str, Any] = {
    "group": "nvidia.com",
    "version": "v1alpha1",
    "plural": "dynamocheckpoints",
}
LIMIT = 500
"""How many objects a page has. That of kopf is its own."""
ROUNDS = 3

More = Mapping[str, Callable[[int], Awaitable[dict[str, float]]]]
"""What else a contender can be asked for, with a number."""


class Seen:
    """Counts what a contender gets, and the processor-seconds that it takes."""

    def __init__(self) -> None:
        self.count = 0
        self._wanted = 0
        self._reached = asyncio.Event()
        self._began = 0.0

    def begin(self) -> None:
        """Count what is spent from here on."""
        gc.collect()
        self._began = time.process_time()

    def spent(self) -> float:
        return time.process_time() - self._began

    def one(self) -> None:
        self.count += 1
        if self.count == self._wanted:
            self._reached.set()

    async def more(self, number: int) -> None:
        """Wait until so many more have come than had by now."""
        await self.until(self.count + number)

    async def until(self, count: int) -> None:
        self._wanted = count
        self._reached.clear()
        if self.count < count:
            await self._reached.wait()


@asynccontextmanager
async def snapback(kubeconfig: str, _count: int, seen: Seen) -> AsyncIterator[More]:
    """The informers of the operator, and its decisions without what they lead to."""
    async with KubeClient(await load_configuration(kubeconfig)) as client:
        store = KubeStore(client, random.random)
        cluster = Cluster(store, INDEXES)
        seen.begin()
        await cluster.sync()
        manager = deciding(cluster)
        cluster.subscribe(lambda _old, _new: seen.one())
        following = asyncio.ensure_future(store.run())

        async def leave(_number: int) -> dict[str, float]:
            await end_all(following)
            return {}

        async def catch_up(number: int) -> dict[str, float]:
            nonlocal following
            last = seen.count + number
            following = asyncio.ensure_future(store._follow(RESOURCES["DynamoCheckpoint"]))
            # What it takes to begin is no part of an event; the other kinds would begin meanwhile.
            await seen.more(1)
            seen.begin()
            left = last - seen.count
            await seen.until(last)
            return {"events": left, "cpu_s": seen.spent()}

        async def decide(_number: int) -> dict[str, float]:
            manager.resync()
            await manager.drain()
            seen.begin()
            before = manager.reconciles
            for _ in range(ROUNDS):
                manager.resync()
                await manager.drain()
            return {"reconciles": manager.reconciles - before, "cpu_s": seen.spent()}

        yield {"leave": leave, "catch-up": catch_up, "decide": decide}
        await end_all(following)


def deciding(cluster: Cluster, changed: Changed = unsaid) -> Manager:
    """Give what decides about the objects of a cluster, without a bus."""
    spans = Spans(Telemetry("snap-operator", "operator", "0"), time.time)
    shapes = {"Job": JobShape()}
    interpreter = Interpreter(cluster, MemoryOrders(), spans, changed=changed, shapes=shapes)
    return Manager(cluster, CONTROLLERS, interpreter, time.time, random.random)


@asynccontextmanager
async def kopf(kubeconfig: str, count: int, seen: Seen) -> AsyncIterator[More]:
    """An operator of kopf whose handler of events keeps all objects.

    Not with its own indexes: each object that comes wakes all that came before it until the last is
    there, so that 10,000 take many minutes.
    """
    import kopf

    registry, stop = kopf.OperatorRegistry(), asyncio.Event()
    by_name: dict[tuple[str, str], Any] = {}
    by_uid: dict[str, Any] = {}

    @kopf.on.login(registry=registry)  # type: ignore[untyped-decorator]
    async def login(**given: Any) -> Any:
        return kopf.login_with_kubeconfig(**given)

    @kopf.on.event(**CUSTOM, registry=registry)  # type: ignore[untyped-decorator]
    @kopf.on.event("", "v1", "pods", registry=registry)  # type: ignore[untyped-decorator]
    async def keep(body: Any, namespace: str, name: str, uid: str, **_: Any) -> None:
        by_name[namespace, name] = by_uid[uid] = body
        seen.one()

    seen.begin()
    os.environ["KUBECONFIG"] = kubeconfig
    serving = asyncio.ensure_future(
        kopf.operator(registry=registry, clusterwide=True, standalone=True, stop_flag=stop)
    )
    await seen.until(count)
    yield {}
    stop.set()
    await serving


@asynccontextmanager
async def typed(kubeconfig: str, _count: int, seen: Seen) -> AsyncIterator[More]:
    """What the client of kubernetes_asyncio gives: models of pods, and dicts of the others."""
    async with ApiClient(await load_configuration(kubeconfig)) as client:
        pods, others = CoreV1Api(client), CustomObjectsApi(client)
        by_name: dict[tuple[str, str], Any] = {}
        by_uid: dict[str, Any] = {}

        def keep(value: Any) -> None:
            meta = value["metadata"] if isinstance(value, dict) else value.metadata.to_dict()
            by_name[meta["namespace"], meta["name"]] = by_uid[meta["uid"]] = value

        async def follow(list_: Any, since: str, which: dict[str, Any]) -> None:
            async with Watch() as watch:
                async for event in watch.stream(list_, resource_version=since, **which):
                    keep(event["object"])
                    seen.one()

        seen.begin()
        token: str | None = ""
        version = ""
        while token is not None:
            page = await pods.list_pod_for_all_namespaces(limit=LIMIT, _continue=token)
            for pod in page.items:
                keep(pod)
            token, version = page.metadata._continue or None, page.metadata.resource_version
        watches = [follow(pods.list_pod_for_all_namespaces, version, {})]
        token = ""
        while token is not None:
            custom = await others.list_cluster_custom_object(**CUSTOM, limit=LIMIT, _continue=token)
            for each in custom["items"]:
                keep(each)
            token = custom["metadata"].get("continue") or None
            version = custom["metadata"]["resourceVersion"]
        watches.append(follow(others.list_cluster_custom_object, version, CUSTOM))
        following = [asyncio.ensure_future(watch) for watch in watches]
        yield {}
        await end_all(*following)


CONTENDERS: dict[str, Callable[[str, int, Seen], AbstractAsyncContextManager[More]]] = {
    "snapback": snapback,
    "kopf": kopf,
    "kubernetes_asyncio": typed,
}


async def main(contender: str, kubeconfig: str, count: int) -> None:
    seen = Seen()
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    async with CONTENDERS[contender](kubeconfig, count, seen) as more:
        say(cpu_s=seen.spent(), mb=memory_mb("VmRSS"), most_mb=memory_mb("VmHWM"))
        async for line in reader:
            verb, number = line.decode().split()
            if verb in more:
                say(**await more[verb](int(number)))
                continue
            seen.begin()
            waiting = asyncio.ensure_future(seen.more(int(number)))
            # It counts from the first turn of the loop on.
            await asyncio.sleep(0)
            say()
            await waiting
            say(cpu_s=seen.spent())


def say(**found: float) -> None:
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    use_peers()
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
