"""One tree of errors, and the value (`Failure`) that carries any of them over a wire.

SnapbackError
├── InvalidInput              what was entered is not acceptable
│   ├── InvalidManifest       a manifest: every problem at once, by path
│   ├── InvalidMessage        a frame or message that does not decode
│   │   └── TooManyOpenFiles  no descriptor was left for one that came with it
│   ├── InvalidName           a name, id or path outside its alphabet
│   └── UnsupportedVersion    a version that this program does not speak
├── NotFound
│   └── GmsUnavailable        no GPU memory service answers: it is down, or being started
├── AlreadyExists / Conflict / Forbidden
├── StoreBusy                 the object store takes no write now
│   └── Refused               the API server does not let this user do this, at least for now
├── RequestExpired            a request whose client has given up on it
├── Rejected                  an order that must not be carried out here
│   ├── WrongNode / StalePodReference / Superseded / NotEligible
├── DeadlineExceeded          time ran out: names the step and the budget in seconds
├── NodeBusy                  a node has as many captures under way as it may
├── SourceExited              the worker ended while it was needed
├── WorkerRefused             the worker says that it cannot be captured
├── CriuFailed                CRIU did not dump or restore a process
├── OutcomeUnknown            a step may or may not have happened; it is never run again
├── Aborted                   ended by an abort
│   ├── AgentSilent           the guard let the worker go, because its agent stood still
│   ├── ConnectionLost        the GPU memory service ended, or hung up
│   └── ServiceStopped        the service was stopped within an order, which was undone
├── DeviceError
│   ├── OutOfDeviceMemory / DeviceTooSmall / UnknownDevice
├── LayoutError
│   ├── StaleLayout / GenerationMismatch / LayoutConflict / LoadLost / Fenced
│   ├── InvalidTransition
├── ArtifactError
│   ├── ArtifactCorrupt / ArtifactMissing / ArtifactExists / Incompatible / NotTrusted
├── ArtifactRootEmpty         nothing at all lies below the artifact root of a node
├── KeyUnavailable            a key of an artifact is not on this node, or its KMS does not answer
├── TransferKilled            a process that moved bytes was killed from outside
├── NoSpace                   needed and free bytes
├── StorageFailed             the disk does not read or write any more
├── ProcMalformed             a line of /proc that is not as the kernel writes it
├── BusUnavailable            NATS does not answer
│   └── NotPermitted          NATS refuses this user: names the subject
├── InjectedFault             a step that fails on request, in the simulation
└── Internal                  a defect of ours

`reason` is CamelCase and stable; `retryable` says whether the same request may be tried again
before any side effect; `values` are the facts involved; `next_step` says what to do.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from snapback_client.codec import encode_json

# These are imported from here by the services.
from snapback_client.errors import (
    Aborted,
    ArtifactError,
    ConnectionLost,
    DeadlineExceeded,
    DeviceError,
    Failure,
    Fenced,
    Forbidden,
    GenerationMismatch,
    GmsUnavailable,
    Incompatible,
    Internal,
    InvalidInput,
    InvalidMessage,
    InvalidTransition,
    LayoutConflict,
    LayoutError,
    NotEligible,
    NotFound,
    OutOfDeviceMemory,
    Rejected,
    RemoteFailure,
    SnapbackError,
    StaleLayout,
    Superseded,
    UnknownDevice,
    UnsupportedVersion,
)


class InvalidManifest(InvalidInput):
    """A manifest is refused; `values['problems']` lists every `path: problem`."""


class AddressInUse(InvalidInput):
    """A service cannot listen on its address."""


class InvalidName(InvalidInput):
    """A name, id or relative path is outside its alphabet or too long."""


class AlreadyExists(SnapbackError):
    """The name is taken."""


class ServiceStopped(Aborted):
    """The service was stopped within an order, which was undone."""

    retryable = True


class Conflict(SnapbackError):
    """The object changed since it was read."""

    retryable = True
    default_next_step = "read it again and decide again"


class StoreBusy(SnapbackError):
    """The store takes no write now, and longer than a write takes."""

    retryable = True
    default_next_step = "try again; if it lasts, look for what else has the store open"


class Refused(StoreBusy):
    """The API server does not let this user do this, at least for now; nothing was done.

    Its own rights may be on their way to it still, a quota may be used up, a webhook may say no.
    """

    default_next_step = "compare the message with the ClusterRole of this user, quotas and webhooks"


class RequestExpired(SnapbackError):
    """A request came after its client had stopped waiting; nothing was done."""

    retryable = True
    default_next_step = "send it again; if it lasts, compare the clocks of the two machines"


class WrongNode(Rejected):
    """The order names another node."""


class StalePodReference(Rejected):
    """The pod on this node is not the one that the order names."""


class HoldDeadline(SnapbackError):
    """The next order of a capture did not come in time, and its worker goes on."""

    retryable = True
    default_next_step = "see whether the operator, NATS and the agent of that node run"


class AgentSilent(Aborted):
    """The guard has let the worker go, because its agent was silent for too long."""

    retryable = True


class NoGuard(SnapbackError):
    """No guard could be started for a worker, so nothing was done to it."""

    retryable = True


class NodeBusy(SnapbackError):
    """The captures under way fill the slots of the node, so no other capture was begun."""

    retryable = True


class SourceExited(SnapbackError):
    """The worker ended while it was needed; `values` has the exit code."""


class WorkerRefused(SnapbackError):
    """The worker says that it cannot be captured, and why."""

    default_next_step = "mend on_quiesce, or the hook --quiesce, and take a new capture"


class ControlFolderBroken(SnapbackError):
    """A worker's control directory is not as the agent made it; nothing is said of artifacts."""

    default_next_step = "the worker must not replace or remove its control directory"


class CriuFailed(SnapbackError):
    """CRIU did not dump or restore a process, and says why in its log."""


class OutcomeUnknown(SnapbackError):
    """A step that must not run twice was interrupted; how it ended is not known."""


class DeviceTooSmall(DeviceError):
    """An artifact can never fit on this device; `values`: needed, capacity (bytes)."""

    default_next_step = "restore on a node whose GPUs have at least the memory of the source"


class LoadLost(LayoutError):
    """What a load left hidden is not there any more; it may be loaded again."""

    retryable = True
    default_next_step = "load it again"


class ArtifactCorrupt(ArtifactError):
    """Bytes, sizes, names or digests differ from the manifest; file and chunk in `values`."""


class ArtifactMissing(ArtifactError):
    """A part, file or manifest is not there."""


class ArtifactRootEmpty(SnapbackError):
    """Nothing at all lies below the artifact root: it says something of the node alone."""

    default_next_step = "mount the storage of artifacts on that node, or cordon the node"


class ArtifactExists(ArtifactError):
    """Something else already stands where this artifact has to go."""


class NotTrusted(ArtifactError):
    """An artifact is not signed as this node wants it; `values`: expected, found."""


class KeyUnavailable(SnapbackError):
    """A key of an artifact is not on this node, or its KMS does not answer; nothing was done."""


class TransferKilled(SnapbackError):
    """The process that moved bytes was killed; `values` has the signal."""


class ContainerFailed(SnapbackError):
    """A container of a pod says that it failed, in words of its own, or its files are not sound."""


class NoSpace(SnapbackError):
    """The disk has too little room; `values`: needed, free (bytes), path."""

    default_next_step = "free space where the message says, or delete old snapshots"


class StorageFailed(SnapbackError):
    """The disk does not read or write any more; `values`: errno, and path where it is known."""

    default_next_step = "look at the kernel's log of this node, and at its disk"


class ProcMalformed(SnapbackError):
    """A line of a file of /proc is not as the kernel writes it; `values`: path, line."""

    default_next_step = "look at the file; what is mounted at /proc may be no procfs"


class BusUnavailable(SnapbackError):
    """NATS does not answer."""

    retryable = True
    default_next_step = "check that nats-server runs with JetStream at the address given"


class NotPermitted(BusUnavailable):
    """NATS refuses this user, or this subject to it; `values`: subject, user."""

    retryable = False
    default_next_step = "use the nkey of a user who may; docs/architecture.md lists the users"


class InjectedFault(SnapbackError):
    """A step failed because the fault switch of the simulation is set so."""


DAMAGE = frozenset({"ArtifactCorrupt", "ArtifactMissing", "ArtifactError"})
"""Reasons that speak about the artifact itself; `Incompatible` speaks about the target."""


@contextlib.contextmanager
def pods_own() -> Iterator[None]:
    """Raise ContainerFailed for damage within a block on the files or programs of a pod.

    A pod could otherwise have a sound artifact quarantined.
    """
    try:
        yield
    except SnapbackError as error:
        failure = error.to_failure()
        if failure.reason not in DAMAGE:
            raise
        found = ContainerFailed(
            f"a container of the pod: {failure.message} ({failure.reason})",
            next_step="look at the containers of the pod; the artifact is not in doubt",
        )
        found.values = failure.values
        raise found from error


_FULL = (errno.ENOSPC, errno.EDQUOT)

_BROKEN = (errno.EIO, errno.EROFS, errno.ENODEV, errno.ENXIO, errno.ESTALE)


def failure_of(error: BaseException) -> Failure:
    """Describe any exception as a `Failure`; unknown ones become `Internal`, a timeout its own."""
    if isinstance(error, SnapbackError):
        return error.to_failure()
    if isinstance(error, TimeoutError):
        return DeadlineExceeded("time ran out").to_failure()
    if isinstance(error, OSError) and error.errno in _FULL:
        return NoSpace(f"no space left on device: {error.filename or 'unknown file'}").to_failure()
    if isinstance(error, OSError) and error.errno in _BROKEN:
        path = str(error.filename or "")
        return StorageFailed(f"{error}", path=path, errno=error.errno).to_failure()
    return Internal(f"{type(error).__name__}: {error}").to_failure()


MAX_TEXT = 4096
"""How long the message and the next step of a reported failure may be, in characters."""

MAX_VALUES_BYTES = 4096
"""How long all values of a reported failure may be, in bytes of JSON."""


def bounded(failure: Failure) -> Failure:
    """Return a failure as a report may carry it: its longest values are cut, not its reason.

    A value becomes a scalar or a list of scalars.
    """
    values = {key: _plain(value) for key, value in failure.values.items()}
    while len(encode_json(values)) > MAX_VALUES_BYTES:
        longest = max(values, key=lambda key: len(encode_json(values[key])))
        half = len(values[longest]) // 2 if isinstance(values[longest], str | list) else 0
        if half:
            values[longest] = values[longest][:half]
        else:
            del values[longest]
    message, next_step = failure.message[:MAX_TEXT], failure.next_step[:MAX_TEXT]
    return replace(failure, message=message, next_step=next_step, values=values)


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [str(item) if isinstance(item, dict | list | tuple) else item for item in value]
    return str(value) if isinstance(value, dict) else value
