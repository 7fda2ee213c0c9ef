"""What the operator costs on an API server, beside kopf and the typed client of Kubernetes.

`make bench-operator CLUSTER=1 PEERS=1` starts etcd and an API server and fills them. Each contender
lists, indexes and follows all objects in a process of its own, in turns. The status is 1 when a
goal is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec
import yaml

from snapshot_operator.core.plan import FINALIZER
from snapshot_operator.kube.controllers import INDEXES
from snapshot_operator.kube.events import EventRecorder
from snapshot_operator.kube.store import RESOURCES, KubeStore
from snapshot_operator.runtime.cluster import Cluster
from snapshot_shared.kube_client import MERGE_PATCH, KubeClient, load_configuration
from snapshot_shared.tasks import end_all
from tests.bench import common, operator
from tests.bench.common import Benchmark, Judged, Results, Rows
from tests.bench.operator import OURS, ROUNDS, check_whole, shown, table
from tests.bench.operator_watchers import CONTENDERS, deciding
from tests.cluster import cluster as machines
from tests.cluster import programs
from tests.cluster.lying_proxy import lying_proxy
from tests.cluster.target import define
from tests.support.objects import checkpoint_document
from tests.support.waiting import until

TITLE = "Operator on an API server"
PEER = "kopf"
CALLS = "calls: "
AT_ONCE = 32
"""How many requests of ours the API server gets at a time."""
EVENTS = 500
"""How many objects of a kind are changed in a turn, where there are as many."""
CAPTURES = 20
WAIT_S = 300.0
CHECKPOINTS = "/apis/nvidia.com/v1alpha1/namespaces/default/dynamocheckpoints"
PODS = "/api/v1/namespaces/default/pods"
MANIFEST = Path(__file__).with_name("worker.yaml")


class Objects(NamedTuple):
    """The names of what is in the API server."""

    checkpoints: list[str]
    pods: list[str]

    @property
    def all(self) -> int:
        return len(self.checkpoints) + len(self.pods)


async def measure(options: argparse.Namespace, folder: Path) -> Results:
    check_whole(options)
    cluster = machines.Cluster(f"bench-{os.getpid()}", common.say)
    with common.measuring(folder, count=options.count) as found:
        cluster.up(0, owned=True)
        try:
            prepare(cluster)
            await turns(str(cluster.kubectl.kubeconfig), options, found)
        finally:
            cluster.down()
    return found


def prepare(cluster: machines.Cluster) -> None:
    """Have an API server with our kinds, in which nobody else does anything."""
    cluster.kubectl.wait("serviceaccount/default", until="create")
    define(cluster.kubectl)
    # They would remove pods of nodes that are not there, and start those of Jobs.
    for component in ("kube-controller-manager", "kube-scheduler"):
        cluster.control.send(component, signal.SIGTERM)


async def turns(kubeconfig: str, options: argparse.Namespace, found: Results) -> None:
    contenders = common.present(CONTENDERS, PEER, options.peers)
    async with KubeClient(await load_configuration(kubeconfig)) as client:
        objects = await fill(client, options.count, max(options.count // 10, 1))
        for number in range(options.rounds):
            # To and fro, so that none always follows the one that uses the processors most.
            for name in contenders[:: -1 if number % 2 else 1]:
                common.say(f"round {number + 1} of {options.rounds}: {name}")
                words = ("operator_watchers", name, kubeconfig, objects.all)
                with common.contender(*words, peers=options.peers) as started:
                    one = Contender(name, started.process, json.loads(started.said))
                    async for what, value in turn(one, client, objects):
                        found.add(what, name, value)
        common.say("calls of the API server")
        captures, unchanged = await counted(kubeconfig, client)
    found.facts |= {f"{CALLS}{what}": count for what, count in sorted(captures.items())}
    found.facts["calls unchanged"] = unchanged.total()


# What is in the API server.


async def fill(client: KubeClient, count: int, pods: int) -> Objects:
    """Create checkpoints as an operator leaves them, and pods as a kubelet does."""
    common.say(f"creating {count:,} checkpoints and {pods:,} pods")
    world = await operator.captured_world()
    captured = (await world.get("DynamoCheckpoint", "llm")).status

    async def create_checkpoint(name: str) -> None:
        document = checkpoint_document(name, podTemplateSpec=worker(name))
        document["metadata"]["finalizers"] = [FINALIZER]
        await create(client, CHECKPOINTS, document, captured)

    async def create_pod(name: str) -> None:
        document = worker(name)
        document["metadata"]["name"] = name
        document["spec"]["nodeName"] = f"node-{name}"
        await create(client, PODS, document, running())

    made = Objects([f"llm-{n}" for n in range(count)], [f"worker-{n}" for n in range(pods)])
    await together(create_checkpoint, made.checkpoints)
    await together(create_pod, made.pods)
    return made


async def create(client: KubeClient, path: str, document: dict[str, Any], status: Any) -> None:
    """Create an object with its status, which a creation leaves out."""
    made = msgspec.json.decode(await client.request("POST", path, body=document))
    body = {**made, "status": status}
    await client.request("PUT", f"{path}/{document['metadata']['name']}/status", body=body)


async def together(do: Callable[[str], Awaitable[None]], names: Iterable[str]) -> None:
    """Do something for all names, for some at a time."""
    left = iter(names)

    async def work() -> None:
        for name in left:
            await do(name)

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(work())


def worker(name: str) -> dict[str, Any]:
    """Give the template of a worker, about as long as people write them."""
    return dict(yaml.safe_load(MANIFEST.read_text().replace("its-name", name))["template"])


def running() -> dict[str, Any]:
    """Give the status of a pod that its kubelet has started."""
    return dict(yaml.safe_load(MANIFEST.read_text())["status"])


# A turn of a contender.


class Contender(NamedTuple):
    """A contender that runs and has listed all objects."""

    name: str
    process: subprocess.Popen[str]
    listed: dict[str, float]

    async def ask(self, verb: str, number: int = 0) -> dict[str, float]:
        """Have it do something; give what it answers."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{verb} {number}\n")
        self.process.stdin.flush()
        return await self.answer()

    async def answer(self) -> dict[str, float]:
        assert self.process.stdout is not None
        reading = asyncio.to_thread(self.process.stdout.readline)
        found: dict[str, float] = json.loads(await asyncio.wait_for(reading, WAIT_S))
        return found


async def turn(
    contender: Contender, client: KubeClient, objects: Objects
) -> AsyncIterator[tuple[str, float]]:
    """Measure one contender: what it has listed, and what events cost it as they come."""
    for what, value in contender.listed.items():
        yield what, value
    # The watches begin before anything is counted.
    await followed(contender, client, CHECKPOINTS, objects.checkpoints[:10])
    await followed(contender, client, PODS, objects.pods[:10])
    for kind, path, names in (
        ("checkpoint", CHECKPOINTS, objects.checkpoints[:EVENTS]),
        ("pod", PODS, objects.pods[:EVENTS]),
    ):
        cpu_s = await followed(contender, client, path, names)
        yield f"event_{kind}_s", cpu_s / len(names)
    if contender.name == OURS:
        names = objects.checkpoints[:EVENTS]
        await contender.ask("leave")
        await change(client, CHECKPOINTS, names)
        found = await contender.ask("catch-up", len(names))
        yield "events_a_s", found["events"] / found["cpu_s"]
        found = await contender.ask("decide")
        yield "reconciles_a_s", found["reconciles"] / found["cpu_s"]


async def followed(contender: Contender, client: KubeClient, path: str, names: list[str]) -> float:
    """Change objects, and give the processor-seconds until the contender has seen that."""
    await contender.ask("expect", len(names))
    await change(client, path, names)
    return (await contender.answer())["cpu_s"]


async def change(client: KubeClient, path: str, names: list[str]) -> None:
    """Change an annotation of objects."""
    body = {"metadata": {"annotations": {"nvidia.com/bench": str(time.monotonic())}}}

    async def one(name: str) -> None:
        await client.request("PATCH", f"{path}/{name}", body=body, content_type=MERGE_PATCH)

    await together(one, names)


# The calls of the API server.


async def counted(kubeconfig: str, client: KubeClient) -> tuple[Counter[str], Counter[str]]:
    """Count the calls from new checkpoints to their Jobs, and those for what has not changed."""
    configuration = await load_configuration(kubeconfig)
    async with lying_proxy(configuration) as proxy, KubeClient(proxy.configuration) as counted_:
        store, events = KubeStore(counted_, random.random), EventRecorder(counted_, time.time)
        cluster = Cluster(store, INDEXES)
        await cluster.sync()
        manager = deciding(cluster, events.changed)
        serving = [
            asyncio.ensure_future(each) for each in (store.run(), events.run(), manager.run())
        ]
        followed = {("WATCH", resource.plural) for resource in RESOURCES.values()}

        def is_idle() -> bool:
            return not (manager._queue or manager._tasks or events._waiting.qsize())

        def calls() -> Counter[str]:
            found = {f"{verb} {kind}": n for (verb, kind), n in proxy.requests.items()}
            proxy.requests.clear()
            return Counter(found)

        await until(lambda: followed <= proxy.requests.keys(), "the watches", within_s=WAIT_S)
        await until(is_idle, "the start", within_s=WAIT_S)
        calls()
        names = [f"new-{number}" for number in range(CAPTURES)]
        for name in names:
            document = checkpoint_document(name, podTemplateSpec=worker(name))
            await client.request("POST", CHECKPOINTS, body=document)

        def has_begun() -> bool:
            found: list[Any] = [cluster.get("DynamoCheckpoint", "default", name) for name in names]
            return all(each and each.status.job_name for each in found) and is_idle()

        await until(has_begun, "the Jobs", within_s=WAIT_S)
        captures = calls()
        before = manager.reconciles
        manager.resync()
        await until(is_idle, "the second look", within_s=WAIT_S)
        assert manager.reconciles >= before + cluster.count("DynamoCheckpoint")
        unchanged = calls()
        await end_all(*serving)
    return captures, unchanged


# What was wanted of it.


def calls_of(found: Results) -> dict[str, int]:
    """Return how many calls there were from new checkpoints to their Jobs, by verb and kind."""
    return {
        name.removeprefix(CALLS): n for name, n in found.facts.items() if name.startswith(CALLS)
    }


def judged(found: Results) -> Iterator[Judged]:
    what = {name: median(each[OURS]) for name, each in found.samples.items()}
    yield from operator.list_goals(what["mb"], what["cpu_s"], found.facts["count"])
    yield operator.events_goal("watch events, many at once", what["events_a_s"])
    yield operator.noop_goal(what["reconciles_a_s"])
    each, unchanged = sum(calls_of(found).values()) / CAPTURES, found.facts["calls unchanged"]
    yield shown("calls from a new checkpoint to its Job", f"{each:g}")
    nothing = shown("calls for what has not changed", f"{unchanged}")
    yield nothing._replace(wanted="0", verdict="missed" if unchanged else "met")


def lines(found: Results) -> Iterator[str]:
    count, pods = found.facts["count"], max(found.facts["count"] // 10, 1)
    yield (
        f"`make bench-operator CLUSTER=1 PEERS=1 COUNT={count}`: {count:,} DynamoCheckpoints and\n"
        f"{pods:,} pods in an API server of this machine, over TLS. {found.rounds} rounds,\n"
        "contenders in turn, each in a process of its own, medians of its processor-seconds;\n"
        "memory is resident. `snapback` is the informers and the queue of the operator, without a\n"
        "bus; it lists and watches its seven kinds, the others the two that there are. `kopf` is\n"
        "one handler of events, `kubernetes_asyncio` its typed client and its watch. Both keep\n"
        "all objects by name and by uid. An event is that of a changed annotation; many come at\n"
        "once when a watch begins again. Others, the API server and what changes objects among\n"
        f"them, took {found.others:.0%} of the processors."
    )
    yield from table(judged(found))
    head = ("contender", "list and index, CPU-s", "memory, MB", "most memory, MB")
    of_events = ("event of a checkpoint, µs CPU", "of a pod")
    yield from common.table((*head, *of_events), map(partial(_cells, found.samples), CONTENDERS))
    head = (f"calls for {CAPTURES} checkpoints, to their Jobs", "")
    yield from common.table(head, calls_of(found).items())


def _cells(samples: Rows, name: str) -> Sequence[str]:
    if name not in samples["cpu_s"]:
        return (name, "not installed", "", "", "", "")
    shapes = {"cpu_s": "{:.2f}", "mb": "{:.0f}", "most_mb": "{:.0f}"}
    own = (common.middle(samples[what][name], shape) for what, shape in shapes.items())
    events = (samples[f"event_{kind}_s"][name] for kind in ("checkpoint", "pod"))
    return (name, *own, *(common.middle(each, scale=1e6) for each in events))


NUMBERS = {**operator.NUMBERS, "rounds": (ROUNDS, 1, "")}
BENCH = Benchmark(
    "operator_cluster", TITLE, __doc__, NUMBERS, measure, lines, judged, programs.lacking, PEER
)

if __name__ == "__main__":
    common.run(BENCH.main)
