"""The commands on local clusters: up, down, leftovers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from snapshot_shared.errors import InvalidName
from snapshot_shared.ids import NodeName, check_node
from snapshotctl.domain.cluster import CONTEXT_PREFIX, Found, NodeSpec, leftovers
from snapshotctl.domain.exits import Exit, WrongArguments
from snapshotctl.domain.servers import DEFAULT_CLUSTER
from snapshotctl.ports import Cluster, Screen

MAX_NODES = 16
MAX_GPUS = 16
MIN_GPU_MEMORY = 4 * 1024 * 1024
MAX_GPU_MEMORY = 2**50


def specs(count: int, gpus: int, gpu_memory: int) -> list[NodeSpec]:
    """Describe `node-1` to `node-<count>`. WrongArguments for numbers that make no sense."""
    if not 1 <= count <= MAX_NODES:
        raise WrongArguments(f"--nodes {count} is not between 1 and {MAX_NODES}")
    if not 1 <= gpus <= MAX_GPUS:
        raise WrongArguments(f"--gpus {gpus} is not between 1 and {MAX_GPUS}")
    if not MIN_GPU_MEMORY <= gpu_memory <= MAX_GPU_MEMORY:
        limits = f"{MIN_GPU_MEMORY} and {MAX_GPU_MEMORY} bytes"
        raise WrongArguments(f"--gpu-memory {gpu_memory} is not between {limits}")
    return [
        NodeSpec(name=f"node-{number}", gpus=gpus, gpu_memory=gpu_memory)
        for number in range(1, count + 1)
    ]


def node_names(given: Sequence[str]) -> list[NodeName]:
    """Check the names of nodes, each once. WrongArguments names the one that cannot be."""
    try:
        return [check_node(name) for name in dict.fromkeys(given)]
    except InvalidName as error:
        raise WrongArguments(f"--node: {error.message}", next_step=error.next_step) from error


async def up(cluster: Cluster, screen: Screen, nodes: list[NodeSpec]) -> None:
    """Start a local cluster and say how to use it."""
    await cluster.start(nodes)
    record = cluster.record
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
    screen.line(f"  end it           snapshotctl down --name {record.name}")


async def down(cluster: Cluster, screen: Screen, *, purge: bool) -> None:
    """End a local cluster."""
    record = cluster.record
    await cluster.stop(purge=purge)
    if not screen.wants_table:
        screen.value({"name": record.name, "purged": purge})
    elif purge:
        screen.line(f"Local cluster {record.name!r} is down and its state is removed.")
    else:
        screen.line(
            f"Local cluster {record.name!r} is down; its state stays in {record.state_dir}."
        )


def show_leftovers(screen: Screen, found: Found) -> Exit:
    """Say what local clusters have left behind on this machine."""
    lines = leftovers(found)
    if not screen.wants_table:
        screen.value(lines)
    elif lines:
        for line in lines:
            screen.line(line)
    else:
        screen.line("nothing left")
    return Exit.FAILED if lines else Exit.OK
