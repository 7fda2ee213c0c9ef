"""One tree of errors, and the value (`Failure`) that carries any of them over a wire.

SnapbackError
├── InvalidInput              what somebody wrote is not acceptable
│   ├── InvalidManifest       a manifest: every problem at once, by path
│   ├── InvalidMessage        a frame or message that does not decode
│   ├── InvalidName           a name, id or path outside its alphabet
│   └── UnsupportedVersion    a version that this program does not speak
├── NotFound / AlreadyExists / Conflict / Forbidden
├── StoreBusy                 the object store takes no write now
├── RequestExpired            a request whose client has given up on it
├── Rejected                  an order that must not be carried out here
│   ├── WrongNode / StalePodReference / Superseded / NotEligible
├── DeadlineExceeded          time ran out: names the step and the budget in seconds
├── SourceExited              the worker ended while it was needed
├── OutcomeUnknown            a step may or may not have happened; it is never run again
├── Aborted                   ended by an abort
├── DeviceError
│   ├── OutOfDeviceMemory / DeviceTooSmall / UnknownDevice
├── LayoutError
│   ├── StaleLayout / GenerationMismatch / LayoutConflict / LoadLost / Fenced
│   ├── InvalidTransition
├── ArtifactError
│   ├── ArtifactCorrupt / ArtifactMissing / ArtifactExists / Incompatible
├── ArtifactRootEmpty         nothing at all lies below the artifact root of a node
├── TransferKilled            a process that moved bytes was killed from outside
├── NoSpace                   needed and free bytes
├── StorageFailed             the disk does not read or write any more
├── BusUnavailable            NATS does not answer
│   └── NotPermitted          NATS refuses this user: names the subject
├── InjectedFault             a step that was told to fail, in the simulation
└── Internal                  a defect of ours

`reason` is CamelCase and stable; `retryable` says whether the same request may be tried again
before any side effect; `values` are the facts involved; `next_step` tells the reader what to do.
"""

from __future__ import annotations

import errno
from typing import Any, ClassVar

import msgspec


class Failure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error as a value: what reports, frames and status fields carry."""

    reason: str
    message: str
    retryable: bool = False
    values: dict[str, Any] = {}
    next_step: str = ""

    def __str__(self) -> str:
        """Give the line that a person reads: what is wrong, then what to do."""
        tail = f" Next: {self.next_step}" if self.next_step else ""
        return f"{self.reason}: {self.message}{tail}"


class SnapbackError(Exception):
    """The root. Raise a subclass with a message that names the fact and the values."""

    reason: ClassVar[str] = "Internal"
    retryable: ClassVar[bool] = False
    default_next_step: ClassVar[str] = ""

    def __init__(self, message: str, *, next_step: str | None = None, **values: Any) -> None:
        """Keep the message, the values involved and the step that helps."""
        super().__init__(message)
        self.message = message
        self.values = values
        self.next_step = self.default_next_step if next_step is None else next_step

    def __init_subclass__(cls) -> None:
        """Name the reason after the class unless the class gives its own."""
        if "reason" not in cls.__dict__:
            cls.reason = cls.__name__

    def to_failure(self) -> Failure:
        """Turn the error into the value that crosses a wire."""
        return Failure(
            reason=self.reason,
            message=self.message,
            retryable=self.retryable,
            values=self.values,
            next_step=self.next_step,
        )


class RemoteFailure(SnapbackError):
    """An error that another program answered with; its reason is the one received."""

    def __init__(self, failure: Failure) -> None:
        """Wrap the failure as it was received."""
        super().__init__(failure.message, next_step=failure.next_step, **failure.values)
        self.failure = failure

    def to_failure(self) -> Failure:
        """Give back what was received, unchanged."""
        return self.failure


class InvalidInput(SnapbackError):
    """What somebody wrote is not acceptable."""


class InvalidManifest(InvalidInput):
    """A manifest is refused; `values['problems']` lists every `path: problem`."""


class InvalidMessage(InvalidInput):
    """A message, frame or file does not decode as the type it claims to be."""


class AddressInUse(InvalidInput):
    """A service cannot listen where it was told to."""


class InvalidName(InvalidInput):
    """A name, id or relative path is outside its alphabet or too long."""


class UnsupportedVersion(InvalidInput):
    """A required version is unknown here."""

    retryable = True
    default_next_step = "upgrade the older of the two programs"


class NotFound(SnapbackError):
    """The named object does not exist."""


class AlreadyExists(SnapbackError):
    """The name is taken."""


class Conflict(SnapbackError):
    """The object changed since it was read."""

    retryable = True
    default_next_step = "read it again and decide again"


class StoreBusy(SnapbackError):
    """The store takes no write now, and longer than a write takes."""

    retryable = True
    default_next_step = "try again; if it lasts, look for what else has the store open"


class Forbidden(SnapbackError):
    """The caller may not do this."""


class RequestExpired(SnapbackError):
    """A request came after its client had stopped waiting; nothing was done."""

    retryable = True
    default_next_step = "send it again; if it lasts, compare the clocks of the two machines"


class Rejected(SnapbackError):
    """An order that must not be carried out here; nothing was touched."""


class WrongNode(Rejected):
    """The order names another node."""


class StalePodReference(Rejected):
    """The pod on this node is not the one that the order names."""


class Superseded(Rejected):
    """A higher attempt of the same order, or an abort, is known here."""


class NotEligible(Rejected):
    """The worker is not in a state in which this can be done."""


class DeadlineExceeded(SnapbackError):
    """Time ran out; `values` has the step and the budget in seconds."""

    retryable = True


class SourceExited(SnapbackError):
    """The worker ended while it was needed; `values` has the exit code."""


class ControlFolderBroken(SnapbackError):
    """A worker's control directory is not as the agent made it; nothing is said of artifacts."""

    default_next_step = "the worker must not replace or remove its control directory"


class OutcomeUnknown(SnapbackError):
    """A step that must not run twice was interrupted; nobody can tell how it ended."""


class Aborted(SnapbackError):
    """The work was ended by an abort order or a shutdown."""


class DeviceError(SnapbackError):
    """A GPU, real or simulated, refused."""


class OutOfDeviceMemory(DeviceError):
    """An allocation does not fit; `values`: needed, free, capacity (bytes)."""

    retryable = True


class DeviceTooSmall(DeviceError):
    """An artifact can never fit on this device; `values`: needed, capacity (bytes)."""

    default_next_step = "restore on a node whose GPUs have at least the memory of the source"


class UnknownDevice(DeviceError):
    """No such device is served here."""


class LayoutError(SnapbackError):
    """A GPU memory layout is not in the state that the request needs."""


class StaleLayout(LayoutError):
    """The committed layout is not the one that the client knew; both hashes in `values`."""


class GenerationMismatch(LayoutError):
    """`if_match` names another generation than the committed one; both in `values`."""


class LayoutConflict(LayoutError):
    """An allocation id or a load token is already in use for something else."""


class LoadLost(LayoutError):
    """What a load left hidden is not there any more; it may be loaded again."""

    retryable = True
    default_next_step = "load it again"


class Fenced(LayoutError):
    """A capture holds the device; `values` has the token's owner and the seconds left."""

    retryable = True


class InvalidTransition(LayoutError):
    """The table has no such step; `values`: state and event."""


class ArtifactError(SnapbackError):
    """An artifact on disk is not usable."""


class ArtifactCorrupt(ArtifactError):
    """Bytes, sizes, names or digests differ from the manifest; file and chunk in `values`."""


class ArtifactMissing(ArtifactError):
    """A part, file or manifest is not there."""


class ArtifactRootEmpty(SnapbackError):
    """Nothing at all lies below the artifact root: it says something of the node alone."""

    default_next_step = "mount the storage of artifacts on that node, or cordon the node"


class ArtifactExists(ArtifactError):
    """Something else already stands where this artifact has to go."""


class Incompatible(ArtifactError):
    """The target cannot take the artifact; both values in `values`."""


class TransferKilled(SnapbackError):
    """Somebody killed the process that moved bytes; `values` has the signal."""


class NoSpace(SnapbackError):
    """The disk has too little room; `values`: needed, free (bytes), path."""

    default_next_step = "free space below the artifact root or delete old snapshots"


class StorageFailed(SnapbackError):
    """The disk does not read or write any more; `values`: errno, and path where it is known."""

    default_next_step = "look at the kernel's log of this node, and at its disk"


class BusUnavailable(SnapbackError):
    """NATS does not answer."""

    retryable = True
    default_next_step = "check that nats-server runs with JetStream at the address given"


class NotPermitted(BusUnavailable):
    """NATS refuses this user, or this subject to it; `values`: subject, user."""

    retryable = False
    default_next_step = "use the nkey of a user who may; docs/architecture.md lists the users"


class InjectedFault(SnapbackError):
    """A step failed because the fault switch of the simulation was told so."""


class Internal(SnapbackError):
    """A defect of ours; the log of the service has the traceback."""

    default_next_step = "read the service's log and report a bug"


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
