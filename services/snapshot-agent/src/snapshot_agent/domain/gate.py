"""What must hold before a worker is touched: chains of checks on what handlers have observed.

A check returns an error or None; the first error of a chain is the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from snapshot_shared import compatibility
from snapshot_shared.artifact import Facts, RootManifest
from snapshot_shared.errors import (
    ArtifactCorrupt,
    HoldDeadline,
    Incompatible,
    NotEligible,
    SnapbackError,
    SourceExited,
    StalePodReference,
)
from snapshot_shared.orders import (
    DEVICE_DRIVERS,
    ArtifactRef,
    DeviceRef,
    DumpOrder,
    PodRef,
    VectorEntry,
)

T = TypeVar("T")
Check = Callable[[T], SnapbackError | None]


class ObservedPod(NamedTuple):
    """A pod of this node as an order finds it.

    `known` is None when no such pod was started here. `exit_code` is that of a container that is
    not `alive`, None when it is unknown. `captured_by` is the uid of the content whose capture
    holds the container.
    """

    wanted: PodRef
    known: PodRef | None
    containers: Sequence[str] = ()
    alive: bool = False
    exit_code: int | None = None
    standby: bool = False
    captured_by: str | None = None


class Target(NamedTuple):
    """An artifact, the facts of the node with the driver of the order, and the devices.

    `given` is how many devices the pod has, with or without a memory server; None: not known.
    """

    artifact: ArtifactRef
    root: RootManifest
    source: Facts
    here: Facts
    devices: Sequence[DeviceRef]
    given: int | None = None


def refuse(checks: Sequence[Check[T]], seen: T) -> None:
    """Raise the first error that a check returns."""
    for check in checks:
        if error := check(seen):
            raise error


def _is_this_pod(seen: ObservedPod) -> SnapbackError | None:
    if seen.known is None:
        return StalePodReference(
            f"pod {seen.wanted.namespace}/{seen.wanted.name} with uid {seen.wanted.uid} was not "
            "started on this node",
            expected=seen.wanted.uid,
        )
    expected = (seen.wanted.namespace, seen.wanted.name)
    if expected == (seen.known.namespace, seen.known.name):
        return None
    # The other pod is not named, because the author of the order may read the report.
    return StalePodReference(
        f"uid {seen.wanted.uid} is not that of pod {'/'.join(expected)}",
        expected="/".join(expected),
    )


def _has_container(seen: ObservedPod) -> SnapbackError | None:
    if seen.wanted.container in seen.containers:
        return None
    return NotEligible(
        f"pod {seen.wanted.name} has no container {seen.wanted.container}; it has "
        f"{', '.join(seen.containers)}",
        next_step="name one of the pod's containers",
        expected=seen.wanted.container,
        found=list(seen.containers),
    )


def _is_alive(seen: ObservedPod) -> SnapbackError | None:
    return None if seen.alive else source_exited(seen.wanted, seen.exit_code)


def _is_free(seen: ObservedPod) -> SnapbackError | None:
    if seen.captured_by is None:
        return None
    return NotEligible(
        f"container {seen.wanted.container} of pod {seen.wanted.name} is being captured for "
        f"{seen.captured_by}",
        next_step="wait until that capture is released, or abort it",
        captured_by=seen.captured_by,
    )


def _is_standby(seen: ObservedPod) -> SnapbackError | None:
    if seen.standby:
        return None
    return NotEligible(
        f"pod {seen.wanted.name} was started on its own and does not wait for a restore",
        next_step="create the pod with the annotation nvidia.com/restore-from",
    )


CAPTURE_CHECKS: tuple[Check[ObservedPod], ...] = (_is_this_pod, _has_container, _is_alive, _is_free)
RESTORE_CHECKS: tuple[Check[ObservedPod], ...] = (
    _is_this_pod,
    _has_container,
    _is_alive,
    _is_standby,
)


def _is_that_artifact(target: Target) -> SnapbackError | None:
    root, ref = target.root, target.artifact
    found = (root.namespace, root.content_uid, root.generation)
    expected = (ref.namespace, ref.content_uid, ref.generation)
    if found == expected:
        return None
    return ArtifactCorrupt(
        f"the root manifest is of {found}, wanted {expected}", found=found, expected=expected
    )


def _has_process_part(target: Target) -> SnapbackError | None:
    if [part.part for part in target.root.parts if part.kind == "process"] == ["process"]:
        return None
    return ArtifactCorrupt("the artifact has no process part", field="parts")


def _same_devices(target: Target) -> SnapbackError | None:
    saved = sorted(part.part for part in target.root.parts if part.kind == "gms")
    given = sorted(f"gpu-{device.ordinal}" for device in target.devices)
    if target.source.driver in DEVICE_DRIVERS:
        # What no memory service had on a device comes with the process.
        given = [part for part in given if part in saved]
    if saved == given:
        return None
    return Incompatible(
        f"the artifact was taken on {len(saved)} devices, the pod has {len(given)}",
        next_step=f"give the pod {len(saved)} devices",
        expected=saved,
        found=given,
    )


def _as_many_devices(target: Target) -> SnapbackError | None:
    expected, found = target.source.devices, target.given
    # What was captured before the number was known has none.
    if not expected or found is None or expected == found:
        return None
    return Incompatible(
        f"the source had {expected} GPUs, the pod has {found}",
        next_step=f"give the container {expected} GPUs",
        expected=expected,
        found=found,
    )


def _has_its_facts(target: Target) -> SnapbackError | None:
    return compatibility.refusal(target.source, target.here)


COMPATIBILITY_CHECKS: tuple[Check[Target], ...] = (
    _is_that_artifact,
    _has_process_part,
    _same_devices,
    _as_many_devices,
    _has_its_facts,
)


class DumpRequest(NamedTuple):
    """A dump order, and the capture that is held for its content.

    `held` is its attempt, None when there is none. `prepared` is the vector that `prepare` reported
    for the attempt of the order, None when it has not.
    """

    order: DumpOrder
    held: int | None
    driver: str
    prepared: Sequence[VectorEntry] | None


def _is_held(dump: DumpRequest) -> SnapbackError | None:
    if dump.held == dump.order.attempt and dump.prepared is not None:
        return None
    if dump.held is None and dump.prepared is not None:
        return HoldDeadline(
            f"the worker of attempt {dump.order.attempt} was let go before the dump was ordered"
        )
    return NotEligible(
        f"attempt {dump.order.attempt} of content {dump.order.content_uid} is not held here",
        next_step="prepare the capture again",
    )


def _has_prepared_vector(dump: DumpRequest) -> SnapbackError | None:
    prepared, ordered = dump.prepared or (), dump.order.vector
    if sorted(prepared, key=_part) == sorted(ordered, key=_part):
        return None
    return NotEligible(
        "the order's vector is not the one that was prepared",
        expected=[entry.part for entry in prepared],
        found=[entry.part for entry in ordered],
    )


def _has_prepared_driver(dump: DumpRequest) -> SnapbackError | None:
    if dump.order.driver == dump.driver:
        return None
    return NotEligible(
        f"the capture was opened with driver {dump.driver}, not {dump.order.driver}",
        next_step="prepare the capture again with the driver that is wanted",
        expected=dump.driver,
        found=dump.order.driver,
    )


DUMP_CHECKS: tuple[Check[DumpRequest], ...] = (_is_held, _has_prepared_vector, _has_prepared_driver)


def _part(entry: VectorEntry) -> str:
    return entry.part


def source_exited(pod: PodRef, exit_code: int | None) -> SourceExited:
    """Return the error that the process of a container has ended."""
    shown = "an unknown exit code" if exit_code is None else f"exit code {exit_code}"
    return SourceExited(
        f"container {pod.container} of pod {pod.name} has ended with {shown}",
        next_step=f"read what it printed: snapshotctl logs {pod.name}",
        exit_code=exit_code,
    )
