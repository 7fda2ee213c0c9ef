"""CUDA processes around a dump: their states, the way back, and what must hold before a lock.

The driver locks a process (its calls of CUDA block), checkpoints it (what is on the devices goes
into its own memory), restores it to devices, and unlocks it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from snapshot_agent.domain.gate import Check
from snapshot_shared.errors import (
    DeadlineExceeded,
    DeviceError,
    Incompatible,
    InvalidInput,
    NotEligible,
    SnapbackError,
)

Version = tuple[int, ...]

DRIVER: Version = (575, 57, 8)
"""The first driver by which a process is checkpointed."""
DRIVER_MOVES: Version = (580,)
"""The first one that restores a process to other devices than it was on."""
DRIVER_SEVERAL: Version = (610,)
"""The first one for a process on several devices.

It is the first, too, for memory that one process imports from another. Nothing shows that a
process has such memory: 580.159.04 makes a checkpoint of it, and refuses to restore that.
"""

UVM_MAPPINGS = 1
"""How often a process maps the device of unified memory when it has allocated none.

Seen with the driver 580.159.04, of PyTorch as of a process that has memory of its own alone.
"""


class State(StrEnum):
    """What a process is to the driver.

    NONE: no CUDA process, or one that has ended. UNKNOWN: the driver does not answer for it.
    """

    RUNNING = "running"
    LOCKED = "locked"
    CHECKPOINTED = "checkpointed"
    FAILED = "failed"
    NONE = "none"
    UNKNOWN = "unknown"


class Verb(StrEnum):
    """What the driver is asked to do with a process."""

    LOCK = "lock"
    CHECKPOINT = "checkpoint"
    RESTORE = "restore"
    UNLOCK = "unlock"


MOVES: dict[Verb, tuple[State, State]] = {
    Verb.LOCK: (State.RUNNING, State.LOCKED),
    Verb.CHECKPOINT: (State.LOCKED, State.CHECKPOINTED),
    Verb.RESTORE: (State.CHECKPOINTED, State.LOCKED),
    Verb.UNLOCK: (State.LOCKED, State.RUNNING),
}
"""From which state to which one a verb brings a process; from any other the driver refuses it."""

WAY_BACK: dict[State, Verb | None] = {
    State.RUNNING: None,
    State.LOCKED: Verb.UNLOCK,
    State.CHECKPOINTED: Verb.RESTORE,
    # Nothing helps but the end of the process.
    State.FAILED: None,
    State.NONE: None,
    State.UNKNOWN: None,
}
"""What brings a process nearer to running."""

_BY_NUMBER = (State.RUNNING, State.LOCKED, State.CHECKPOINTED, State.FAILED)


class Answer(NamedTuple):
    """What the driver answered to a call: its status, by number and name, and a value."""

    status: int
    name: str
    value: int = 0

    @property
    def ok(self) -> bool:
        """Whether the call has succeeded."""
        return self.status == 0


class Status:
    """Statuses of the driver that are no failures everywhere."""

    INVALID_VALUE = 1
    NOT_INITIALIZED = 3
    OPERATING_SYSTEM = 304


_NO_PROCESS = {Status.INVALID_VALUE, Status.NOT_INITIALIZED}


def is_cuda(answer: Answer, *, alive: bool) -> bool | None:
    """Whether a process is one of CUDA, from the answer for its restore thread; None: not said."""
    if answer.ok:
        return True
    return False if answer.status in _NO_PROCESS or not alive else None


def state_in(answer: Answer, *, alive: bool) -> State:
    """Return the state in the answer to a query; `alive` is whether the process still runs."""
    if answer.ok:
        # Newer drivers know states in the midst of a verb.
        return _BY_NUMBER[answer.value] if 0 <= answer.value < len(_BY_NUMBER) else State.UNKNOWN
    return State.NONE if answer.status in _NO_PROCESS or not alive else State.UNKNOWN


def next_steps(seen: Mapping[int, State | None], *, hurry: bool) -> dict[int, Verb]:
    """Return what to do next with processes to let them run; None is a state not seen yet.

    None is unlocked before all are restored, for they may share memory; unless time runs out.
    """
    steps = {pid: verb for pid, state in seen.items() if state and (verb := WAY_BACK[state])}
    waits = not hurry and (None in seen.values() or Verb.RESTORE in steps.values())
    return {pid: verb for pid, verb in steps.items() if verb is Verb.RESTORE or not waits}


class LetGo(NamedTuple):
    """What has become of processes: running, no CUDA processes any more, or stuck, and in what."""

    running: Sequence[int]
    none: Sequence[int]
    stuck: Mapping[int, str]


class CudaMissing(DeviceError):
    """The driver or its bindings are missing where the helper runs."""


class CudaRefused(DeviceError):
    """The driver refused a call for a process; `values`: verb, pid, status, all refused ones."""


class CudaTimedOut(DeadlineExceeded):
    """The driver did not answer for a process in time, and the call was killed."""


class CudaStuck(DeviceError):
    """Processes that the driver does not let run again; `values.stuck` says in which state."""


def refusal(verb: str, answers: Mapping[int, Answer | None], within_s: float) -> SnapbackError:
    """Return the error of a verb; `answers` are those of the processes with which it failed."""
    refused = {
        str(pid): "no answer" if answer is None else answer.name for pid, answer in answers.items()
    }
    pid, found = next(iter(answers.items()))
    if found is None:
        return CudaTimedOut(
            f"{verb} of process {pid}: the CUDA driver did not answer within {within_s:g} s",
            next_step="look at `nvidia-smi` and the kernel's log; a stopped process never answers",
            step=f"cuda-{verb}",
            budget_s=within_s,
            pid=pid,
            refused=refused,
        )
    return CudaRefused(
        f"{verb} of process {pid}: {found.name}",
        next_step="let the device's work end, and look for memory that cannot be checkpointed",
        verb=verb,
        pid=pid,
        status=found.status,
        refused=refused,
    )


def stuck(found: LetGo) -> CudaStuck | None:
    """Return the error that processes do not run again; None when all do."""
    if not found.stuck:
        return None
    shown = ", ".join(f"process {pid} ({why})" for pid, why in found.stuck.items())
    return CudaStuck(
        f"the CUDA driver does not let go: {shown}",
        next_step="end the worker: nothing else frees its memory on the device",
        stuck={str(pid): why for pid, why in found.stuck.items()},
    )


class Gpu(NamedTuple):
    """A device of a node. What could not be read is None, or empty."""

    uuid: str
    product: str = ""
    mig: bool | None = None


class CudaProcess(NamedTuple):
    """A process of a worker's tree as its driver, and /proc, show it.

    `has_device` is whether it has a device file of NVIDIA open, `uvm_mappings` how often it maps
    that of unified memory. `stopped` is whether a signal has stopped it.
    """

    pid: int
    is_cuda: bool
    has_device: bool = False
    uvm_mappings: int = 0
    stopped: bool = False


class Capture(NamedTuple):
    """A worker to be captured: the node's driver, the worker's devices and processes."""

    driver: Version | None
    gpus: Sequence[Gpu]
    processes: Sequence[CudaProcess] = ()


class Placement(NamedTuple):
    """A worker to be restored: drivers and devices of its source and of here, by ordinal."""

    source_driver: Version | None
    driver: Version | None
    source: Mapping[int, Gpu]
    here: Mapping[int, Gpu]


def driver_version(text: str) -> Version | None:
    """Return the version in the text of /proc/driver/nvidia/version; None when it has none."""
    found = re.search(r"^NVRM version:.*?\s(\d+(?:\.\d+)+)\s", text, re.MULTILINE)
    return None if found is None else tuple(int(part) for part in found[1].split("."))


GPU_QUERY = "uuid,name,mig.mode.current"
"""The fields that `gpus_in` reads."""


def gpus_in(text: str) -> list[Gpu]:
    """Read `nvidia-smi --query-gpu=<GPU_QUERY> --format=csv,noheader`. InvalidInput."""
    gpus = []
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) != len(GPU_QUERY.split(",")):
            raise InvalidInput(f"nvidia-smi says {line!r}, wanted {GPU_QUERY}", found=line)
        uuid, product, mig = words
        # What a device does not have is [N/A], or [Not Supported].
        gpus.append(Gpu(uuid, product, {"Enabled": True, "Disabled": False}.get(mig)))
    return gpus


def gpus_of(uuids: Sequence[str], listed: Iterable[Gpu]) -> list[Gpu]:
    """Return the devices of a worker among those of its node. NotEligible: one is not listed."""
    known = {gpu.uuid: gpu for gpu in listed}
    for uuid in uuids:
        if uuid not in known:
            raise NotEligible(
                f"the pod was given {uuid}, and the devices of this node are "
                f"{', '.join(known) or 'none'}",
                next_step="give the pod whole GPUs, and see that `nvidia-smi -L` lists them",
                expected=uuid,
                found=list(known),
            )
    return [known[uuid] for uuid in uuids]


APPS_QUERY = "pid,used_gpu_memory"
"""The fields that `device_bytes` reads."""


def device_bytes(text: str, pids: Collection[int]) -> int:
    """Return how much memory of devices some processes have, in bytes.

    `text` is what `nvidia-smi --query-compute-apps=<APPS_QUERY> --format=csv,noheader,nounits`
    says. InvalidInput. NotEligible: it does not say it of one that it lists.
    """
    total = 0
    for line in text.splitlines():
        found = re.fullmatch(r"\s*(\d+)\s*,\s*(\d+|\[.*\])\s*", line)
        if found is None:
            raise InvalidInput(f"nvidia-smi says {line!r}, wanted {APPS_QUERY}", found=line)
        if int(found[1]) not in pids:
            continue
        if not found[2].isdecimal():
            raise NotEligible(
                f"how much device memory process {found[1]} has is not known: {found[2]}",
                next_step="see what `nvidia-smi --query-compute-apps=pid,used_gpu_memory` says",
                found=found[2],
            )
        total += int(found[2]) * 1024 * 1024
    return total


def _at_least(version: Version | None, needed: Version, what: str) -> SnapbackError | None:
    if version is None or version >= needed:
        return None
    expected, found = shown(needed), shown(version)
    return NotEligible(
        f"{what} needs the NVIDIA driver {expected} or later, here it is {found}",
        next_step=f"install the NVIDIA driver {expected} or later on this node",
        expected=expected,
        found=found,
    )


def _has_driver(seen: Capture | Placement) -> SnapbackError | None:
    if seen.driver is None:
        return NotEligible(
            f"a checkpoint of CUDA needs the NVIDIA driver {shown(DRIVER)} or later, here none "
            "is loaded",
            next_step="install the NVIDIA driver on this node, or capture with the driver criu",
            expected=shown(DRIVER),
            found="none",
        )
    return _at_least(seen.driver, DRIVER, "a checkpoint of CUDA")


def _of_several(driver: Version | None, gpus: int) -> SnapbackError | None:
    return _at_least(driver, DRIVER_SEVERAL, f"a worker on {gpus} devices") if gpus > 1 else None


def _has_driver_for_several(seen: Capture) -> SnapbackError | None:
    return _of_several(seen.driver, len(seen.gpus))


def _fits_drivers(gpus: Iterable[Gpu]) -> SnapbackError | None:
    for gpu in gpus:
        if gpu.mig:
            return NotEligible(
                f"MIG of {gpu.uuid} is enabled; it has to be disabled for a checkpoint",
                next_step="give the worker whole devices",
                expected="disabled",
                found="enabled",
                device=gpu.uuid,
            )
    return None


def _has_its_devices_known(seen: Capture) -> SnapbackError | None:
    found = [process.pid for process in seen.processes if process.is_cuda]
    if seen.gpus or not found:
        return None
    return NotEligible(
        f"process {found[0]} uses CUDA, for which its container needs 1 GPU or more, and the "
        "kubelet gave it no GPU",
        next_step="give the container GPUs by a limit of nvidia.com/gpu, or by a claim",
        expected="1 GPU or more",
        found="no GPU",
        pid=found[0],
    )


def _has_devices_for_it(seen: Capture) -> SnapbackError | None:
    return _fits_drivers(seen.gpus)


def _is_answered_for(seen: Capture) -> SnapbackError | None:
    for process in seen.processes:
        if process.has_device and not process.is_cuda:
            return NotEligible(
                f"process {process.pid} has devices without CUDA: it opened files of NVIDIA, which "
                "can be dumped of a CUDA process alone",
                next_step="use CUDA in it, or close them (NVML, unified memory) before a capture",
                expected="CUDA process",
                found="devices without CUDA",
                pid=process.pid,
            )
    return None


def _has_no_unified_memory(seen: Capture) -> SnapbackError | None:
    for process in seen.processes:
        if process.is_cuda and process.uvm_mappings > UVM_MAPPINGS:
            return NotEligible(
                f"process {process.pid} maps /dev/nvidia-uvm {process.uvm_mappings} times, where "
                f"{UVM_MAPPINGS} is usual: unified memory cannot be checkpointed",
                next_step="allocate no managed memory, also not by paged optimizers",
                expected=UVM_MAPPINGS,
                found=process.uvm_mappings,
                pid=process.pid,
            )
    return None


def _goes_on(seen: Capture) -> SnapbackError | None:
    for process in seen.processes:
        if process.is_cuda and process.stopped:
            return NotEligible(
                f"process {process.pid} is stopped, and has to be running: the driver would wait "
                "for it without an end",
                next_step="continue it: kill -CONT",
                expected="running",
                found="stopped",
                pid=process.pid,
            )
    return None


CAPTURE_CHECKS: tuple[Check[Capture], ...] = (
    _has_driver,
    _has_driver_for_several,
    _has_its_devices_known,
    _has_devices_for_it,
    _is_answered_for,
    _has_no_unified_memory,
    _goes_on,
)


def _has_its_driver(seen: Placement) -> SnapbackError | None:
    if None in (seen.source_driver, seen.driver) or seen.source_driver == seen.driver:
        return None
    expected, found = shown(seen.source_driver or ()), shown(seen.driver or ())
    # The process has the library of its driver mapped, which speaks to that one module only.
    return Incompatible(
        f"the NVIDIA driver of the source was {expected}, here it is {found}",
        next_step=f"restore on a node with the NVIDIA driver {expected}",
        expected=expected,
        found=found,
    )


def _has_its_devices(seen: Placement) -> SnapbackError | None:
    if error := _fits_drivers(seen.here.values()):
        return error
    for ordinal in sorted(seen.source.keys() & seen.here.keys()):
        expected, found = seen.source[ordinal].product, seen.here[ordinal].product
        if expected and found and expected != found:
            return Incompatible(
                f"device {ordinal} of the source was {expected}, here it is {found}",
                next_step=f"restore on a node with {expected}",
                expected=expected,
                found=found,
            )
    return None


def _may_move(seen: Placement) -> SnapbackError | None:
    if error := _of_several(seen.driver, len(seen.here)):
        return error
    places = {n: gpu.uuid for n, gpu in seen.source.items()}
    if places == {n: gpu.uuid for n, gpu in seen.here.items()}:
        return None
    return _at_least(seen.driver, DRIVER_MOVES, "a restore to other devices")


RESTORE_CHECKS: tuple[Check[Placement], ...] = (
    _has_driver,
    _has_its_driver,
    _has_its_devices,
    _may_move,
)

_UUID = re.compile(r"GPU-([0-9a-f]{8})-([0-9a-f]{4})-([0-9a-f]{4})-([0-9a-f]{4})-([0-9a-f]{12})")


def uuid_bytes(uuid: str) -> bytes:
    """Return the 16 bytes of a device's uuid, as `GPU-<uuid>`. InvalidInput."""
    found = _UUID.fullmatch(uuid)
    if found is None:
        raise InvalidInput(f"{uuid!r} is no uuid of a whole GPU (GPU-<uuid>)", found=uuid)
    return bytes.fromhex("".join(found.groups()))


def uuid_map(source: Mapping[int, str], here: Mapping[int, str]) -> dict[str, str]:
    """Return for each device of the source the one here that has its ordinal, by uuid.

    The memory server gives weights to the same ordinals. Incompatible: other ordinals.
    InvalidInput: a uuid that is none, or a device that is there twice.
    """
    if source.keys() != here.keys():
        raise Incompatible(
            f"the source had the devices {sorted(source)}, here are {sorted(here)}",
            next_step=f"give the pod {len(source)} devices",
            expected=sorted(source),
            found=sorted(here),
        )
    for devices in (source, here):
        for uuid in devices.values():
            uuid_bytes(uuid)
        if len(set(devices.values())) < len(devices):
            shown = [devices[ordinal] for ordinal in sorted(devices)]
            raise InvalidInput(f"a device is there twice: {', '.join(shown)}", devices=shown)
    return {source[ordinal]: here[ordinal] for ordinal in sorted(source)}


def placed(source: Sequence[str], here: Sequence[str], chosen: Mapping[str, str]) -> dict[str, str]:
    """Return for each device of the source one here, by uuid: the chosen one, else by order.

    `chosen` has the pairs by which weights were loaded, and may name other devices as well.
    Incompatible, InvalidInput.
    """
    by_order = uuid_map(dict(enumerate(source)), dict(enumerate(here)))
    found = {old: new for old, new in chosen.items() if old in by_order and new in here}
    rest = (uuid for uuid in here if uuid not in found.values())
    return {old: found.get(old) or next(rest) for old in source}


def pairs_of(mapping: Mapping[str, str]) -> dict[str, str]:
    """Return the pairs that the driver needs of a map: none, where every device stays the same.

    Drivers before 580 refuse pairs. Later ones want all devices in them, or none. InvalidInput.
    """
    for uuid in (*mapping, *mapping.values()):
        uuid_bytes(uuid)
    if len(set(mapping.values())) < len(mapping):
        raise InvalidInput(f"two devices go to one: {dict(mapping)}", devices=dict(mapping))
    return {} if all(old == new for old, new in mapping.items()) else dict(mapping)


def shown(version: Version) -> str:
    """Return a version as NVIDIA writes it, such as `575.57.08`; empty for none."""
    return ".".join([*map(str, version[:1]), *(f"{part:02}" for part in version[1:])])
