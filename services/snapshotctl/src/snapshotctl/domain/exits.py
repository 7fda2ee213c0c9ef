"""Exit codes, and the errors of the command line."""

from __future__ import annotations

from enum import IntEnum

from snapshot_shared.errors import Failure, InvalidInput, SnapbackError


class Exit(IntEnum):
    """How a command ended."""

    OK = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    REFUSED = 4
    UNREACHABLE = 5
    TIMEOUT = 6
    INTERRUPTED = 130


MEANINGS: dict[Exit, str] = {
    Exit.OK: "done",
    Exit.FAILED: "failed, or the condition that was waited for cannot come true",
    Exit.USAGE: "wrong arguments",
    Exit.NOT_FOUND: "the named object does not exist",
    Exit.REFUSED: "a manifest or a request was refused; nothing was changed",
    Exit.UNREACHABLE: "no server, or no operator behind it, answers",
    Exit.TIMEOUT: "time ran out",
    Exit.INTERRUPTED: "interrupted",
}

REASONS: dict[str, Exit] = {
    "AlreadyExists": Exit.REFUSED,
    "Ambiguous": Exit.USAGE,
    "BusUnavailable": Exit.UNREACHABLE,
    "Conflict": Exit.REFUSED,
    "DeadlineExceeded": Exit.TIMEOUT,
    "Forbidden": Exit.REFUSED,
    "InvalidInput": Exit.REFUSED,
    "InvalidManifest": Exit.REFUSED,
    "InvalidMessage": Exit.REFUSED,
    "InvalidName": Exit.REFUSED,
    "NotEligible": Exit.REFUSED,
    "NotFound": Exit.NOT_FOUND,
    "NotPermitted": Exit.REFUSED,
    "Rejected": Exit.REFUSED,
    "RequestExpired": Exit.REFUSED,
    "UnsupportedVersion": Exit.REFUSED,
    "WrongArguments": Exit.USAGE,
}
"""Reasons that do not end with FAILED."""


class WrongArguments(InvalidInput):
    """A command line that no command accepts."""


class Ambiguous(WrongArguments):
    """A bare name that several objects have; `values['candidates']` lists them."""


class NeverTrue(SnapbackError):
    """The condition that was waited for cannot come true any more."""


class NotDrained(SnapbackError):
    """Pods are left on a node that was to be drained; `values['lines']` says which, and why."""


class Unsound(SnapbackError):
    """An artifact is damaged; `values` has the content and the reason."""


class Unverified(SnapbackError):
    """Not all of an artifact could be read; whether it is damaged is not known."""


class AlreadyRunning(SnapbackError):
    """The local cluster runs already."""


class StartFailed(SnapbackError):
    """A program of the local cluster did not come up; `values` has its log."""


class Unready(SnapbackError):
    """This machine lacks something; `values['problems']` lists what, each with its fix."""


class DemoFailed(SnapbackError):
    """A step of the demo failed, or an answer differs."""


def exit_of(failure: Failure) -> Exit:
    """Return the exit code of a failure: by its reason, FAILED where the table has none."""
    return REASONS.get(failure.reason, Exit.FAILED)


def help_text() -> str:
    """Return every exit code with its meaning, one a line."""
    return "\n".join(f"{code.value:>5}  {text}" for code, text in MEANINGS.items())
