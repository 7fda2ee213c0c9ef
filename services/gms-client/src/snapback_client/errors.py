"""The root of all errors of Snapback, and those that a client of GPU memory raises or receives.

`reason` is CamelCase and stable; `retryable` says whether the same request may be tried again
before any side effect; `values` are the facts involved; `next_step` says what to do. The errors of
the services derive from the same root (`snapshot_shared.errors`).
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec


class Failure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An error as a value: what reports, frames and status fields carry."""

    reason: str
    """What went wrong, in CamelCase; stable."""
    message: str
    """What happened, for people."""
    retryable: bool = False
    """Whether the same may be tried again before any side effect."""
    values: dict[str, Any] = {}
    """The facts involved."""
    next_step: str = ""
    """What to do about it."""

    def __str__(self) -> str:
        """Return one line for people: what is wrong, then what to do."""
        text = f"{self.reason}: {self.message}"
        if not self.next_step:
            return text
        return f"{text}{'' if text.endswith('.') else '.'} Next: {self.next_step}"


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
        if self.next_step:
            # Python shows it below the message of a traceback.
            self.add_note(f"Next: {self.next_step}")

    def __init_subclass__(cls) -> None:
        """Name the reason after the class unless the class gives its own."""
        if "reason" not in cls.__dict__:
            cls.reason = cls.__name__

    def to_failure(self) -> Failure:
        """Return the error as a value, which can be sent."""
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
        """Return the failure as it was received."""
        return self.failure


class InvalidInput(SnapbackError):
    """An input is not acceptable."""


class InvalidMessage(InvalidInput):
    """A message, frame or file does not decode as the type it claims to be."""


class TooManyOpenFiles(InvalidMessage):
    """A process has no descriptor left for memory that it is handed; `values`: the limit."""

    default_next_step = (
        "let the process open more files, as by `ulimit -n 65536`, or close some: up to 128 are "
        "open while memory is mapped"
    )


class UnsupportedVersion(InvalidInput):
    """A required version is unknown here."""

    retryable = True
    default_next_step = "upgrade the older of the two programs"


class NotFound(SnapbackError):
    """The named object does not exist."""


class GmsUnavailable(NotFound):
    """No GPU memory service answers at a socket: it does not run, or is being started."""

    retryable = True


class Forbidden(SnapbackError):
    """The caller may not do this."""


class Rejected(SnapbackError):
    """An order that must not be carried out here; nothing was touched."""


class Superseded(Rejected):
    """A higher attempt of the same order, or an abort, is known here."""


class NotEligible(Rejected):
    """The worker is not in a state in which this can be done."""


class DeadlineExceeded(SnapbackError):
    """Time ran out; `values` has the step and the budget in seconds."""

    retryable = True


class Aborted(SnapbackError):
    """The work was ended by an abort order."""


class ConnectionLost(Aborted):
    """The GPU memory service ended, or closed the connection; what was committed may be there."""

    retryable = True
    default_next_step = "memory that was not committed is lost; attach again"


class DeviceError(SnapbackError):
    """A GPU, real or simulated, refused."""


class OutOfDeviceMemory(DeviceError):
    """An allocation does not fit; `values`: needed, free, capacity (bytes)."""

    retryable = True


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


class Fenced(LayoutError):
    """A capture holds the device; `values` has the token's owner and the seconds left."""

    retryable = True


class InvalidTransition(LayoutError):
    """The table has no such step; `values`: state and event."""


class ArtifactError(SnapbackError):
    """An artifact on disk is not usable."""


class Incompatible(ArtifactError):
    """The target cannot take the artifact; both values in `values`."""


class Internal(SnapbackError):
    """A defect of ours; the log of the service has the traceback."""

    default_next_step = "read the service's log and report a bug"


# What a client raises is also the error of Python of the same meaning, so that code that knows
# nothing of Snapback handles it. Services raise the classes above: there a `TimeoutError`, which is
# an OSError, would be taken for one of the system.


class InvalidValue(InvalidInput, ValueError):
    """An argument is not acceptable."""

    reason = "InvalidInput"


class NoSuchArray(NotFound, KeyError):
    """The pool has no array of this name."""

    reason = "NotFound"

    def __str__(self) -> str:
        """Return the message as it is; a KeyError would show it in quotes."""
        return self.message


class TimedOut(DeadlineExceeded, TimeoutError):
    """A lock, or the service, was waited for as long as was asked."""

    reason = "DeadlineExceeded"


class NoDeviceMemory(OutOfDeviceMemory, MemoryError):
    """An allocation does not fit into the memory of the device."""

    reason = "OutOfDeviceMemory"


_OF_PYTHON: dict[type[SnapbackError], type[SnapbackError]] = {
    DeadlineExceeded: TimedOut,
    InvalidInput: InvalidValue,
    OutOfDeviceMemory: NoDeviceMemory,
}


def for_python(error: SnapbackError) -> SnapbackError:
    """Return an error that was received as one that Python knows, where there is one."""
    kind = _OF_PYTHON.get(type(error))
    if kind is None:
        return error
    found = kind(error.message, next_step=error.next_step)
    found.values = error.values
    return found
