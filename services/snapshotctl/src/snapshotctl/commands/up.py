"""The command up: start a local cluster."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from snapshotctl.adapters import machine
from snapshotctl.command import ClusterName, WorkerDriver, command, new_app
from snapshotctl.domain import criu_host, formats
from snapshotctl.domain.cluster import CONTEXT_PREFIX, NodeSpec, kept
from snapshotctl.domain.criu_host import DRIVERS
from snapshotctl.domain.exits import WrongArguments
from snapshotctl.domain.servers import DEFAULT_CLUSTER
from snapshotctl.tools import Tools

MAX_NODES = 16
MAX_GPUS = 16
MIN_GPU_MEMORY = 4 * 1024 * 1024
MAX_GPU_MEMORY = 2**50

app = new_app()


@command(app, "snapshotctl up", "snapshotctl up --nodes 3 --gpus 4 --gpu-memory 1GiB --cluster big")
async def up(
    tools: Tools,
    count: Annotated[
        int | None, typer.Option("--nodes", metavar="N", help="How many nodes (2).")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option("--gpus", metavar="N", help="Simulated GPUs a node (2).")
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option("--gpu-memory", metavar="SIZE", help="Memory a GPU (4GiB).")
    ] = None,
    device: Annotated[
        str,
        typer.Option("--device", metavar="DEVICE", help="simulated, or cuda: this machine's GPUs."),
    ] = "simulated",
    name: ClusterName = None,
    driver: WorkerDriver = DRIVERS[0],
) -> None:
    """Start a local cluster whose nodes have simulated GPUs.

    Its nats-server, its operator, and the agent and GPU memory service of each node are processes
    of their own; they go on when this command has ended. With --driver criu each node has a helper
    as well, which captures processes that do not save their own state; it needs root. With
    --device cuda there is one node, which has the GPUs of this machine.
    """
    if device == "cuda":
        nodes = _node_of_this_machine(count, gpus, gpu_memory)
    elif device == "simulated":
        memory = formats.parse_size(gpu_memory or "4GiB")
        nodes = _nodes(2 if count is None else count, 2 if gpus is None else gpus, memory)
    else:
        raise WrongArguments(f"--device {device} is not one of simulated, cuda")
    criu = None
    if criu_host.check_driver(driver):
        host = machine.look_for_criu()
        criu_host.require(criu_host.checks(host), "the driver criu")
        criu = host.tools
    cluster = tools.local_cluster(name, criu)
    await cluster.start(nodes)
    screen, record = tools.screen, cluster.record
    if not screen.wants_table:
        screen.value(msgspec.to_builtins(record))
        return
    option = "" if record.name == DEFAULT_CLUSTER else f" --cluster {record.name}"
    screen.line(f"Local cluster {record.name!r} is up.", strong=True)
    screen.line(f"  state and logs   {record.state_dir}")
    screen.line(f"  page             {record.page}")
    screen.line(f"  look around      snapshotctl{option} nodes")
    screen.line(f"  the same by nats nats --context {CONTEXT_PREFIX}{record.name} kv ls snap_nodes")
    screen.line(f"  first checkpoint snapshotctl{option} apply -f deploy/examples/checkpoint.yaml")
    screen.line(f"  end it           snapshotctl down --cluster {record.name}")
    if found := kept(await cluster.objects()):
        screen.line(f"  kept of before   {found}; down --purge removes it")


def _node_of_this_machine(
    count: int | None, gpus: int | None, gpu_memory: str | None
) -> list[NodeSpec]:
    """Return the one node. WrongArguments for what this machine says by itself."""
    if count not in (None, 1):
        raise WrongArguments(f"--nodes {count}: with --device cuda there is one")
    for option, value in (("--gpus", gpus), ("--gpu-memory", gpu_memory)):
        if value is not None:
            raise WrongArguments(f"{option} {value}: with --device cuda they are this machine's")
    return [NodeSpec(name="node-1", gpus=1, device="cuda")]


def _nodes(count: int, gpus: int, gpu_memory: int) -> list[NodeSpec]:
    """Return `node-1` to `node-<count>`. WrongArguments for numbers out of range."""
    if not 1 <= count <= MAX_NODES:
        raise WrongArguments(f"--nodes {count} is not between 1 and {MAX_NODES}")
    if not 1 <= gpus <= MAX_GPUS:
        raise WrongArguments(f"--gpus {gpus} is not between 1 and {MAX_GPUS}")
    if not MIN_GPU_MEMORY <= gpu_memory <= MAX_GPU_MEMORY:
        limits = f"{formats.size(MIN_GPU_MEMORY)} and {formats.size(MAX_GPU_MEMORY)}"
        raise WrongArguments(f"--gpu-memory {formats.size(gpu_memory)} is not between {limits}")
    return [
        NodeSpec(name=f"node-{number}", gpus=gpus, gpu_memory=gpu_memory)
        for number in range(1, count + 1)
    ]
