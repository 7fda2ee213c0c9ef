"""Why CRIU has failed, from the log of a dump or of a restore, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

Verb = Literal["dump", "restore"]

MAX_LINES = 3
MAX_LINE_CHARS = 200

# `(00.012345)     22: Error (criu/cr-dump.c:389): what is wrong`: the time, the process of a
# restore, and the line of CRIU. What is wrong before CRIU has opened its log has no time, and what
# runs within the process itself says `pie: 22: `.
_ERROR = re.compile(r"(?:\([\d.]+\))?\s*(?:pie: )?(?:\d+: )?Error \([^)]*\): \s*(.*)$")

# They are in logs of dumps and restores that succeed, too: of a capability or device that was not
# needed, and of the helper of CRIU for cgroups, which ends after the failure.
_HARMLESS = (
    "Can't setup RLIMIT_NOFILE for self",
    "tun: Unable to create tun",
    "cg: cgroupd: recv req error",
)
# They close a log and say what its reader knows.
_CLOSING = ("Dumping FAILED.", "Restoring FAILED.")

_EXTERNAL_SOCKET = (
    "have the worker close its unix sockets to processes outside of the container before it is "
    "captured"
)
_INOTIFY = (
    "have the worker end its inotify watches before it is captured, or watch folders of volumes "
    "alone"
)
_CHANGED_FILE = (
    "capture the worker again: this file has changed since the dump, or lies on a volume that is "
    "not part of it"
)
_ADDRESS = (
    "the worker is bound to an address that the new pod lacks: have it listen on 0.0.0.0 or on "
    "the address of its pod"
)
_GHOST = "delete this pod and restore into a new one: an earlier restore was ended in its midst"
_UNKNOWN = "look for this error in the issues of CRIU, or capture the worker with another driver"
_SILENT = "try again; if it lasts, look at the kernel's log of this node"
FULL = "No space left"

_ROOM = "free room where the artifact or the files of the container are written, and try again"

# CRIU itself kills what it has restored after an error, so this is a cause only as the first one.
_KILLED = "killed by signal 9"

# What to do when the log has a text. A log is read from its first line on, as later errors follow
# from that. Of two texts in one line the first one here counts.
NEXT_STEPS: dict[str, str] = {
    "Can't get 1:16 opt": "use CRIU 4.2 or later, which Linux 6.16 and later need",
    "Can't get rlimit": "give the helper the capability SYS_RESOURCE",
    "External socket is used": _EXTERNAL_SOCKET,
    "Can't dump half of stream unix connection": _EXTERNAL_SOCKET,
    "Can't dump name-less external socket": _EXTERNAL_SOCKET,
    "In-flight connection": "try again: a connection was waiting to be accepted",
    "Can't dump that handle": _INOTIFY,
    "send_fds failed": (
        "have the worker close its io_uring, or forbid io_uring_setup by its seccomp profile"
    ),
    "has bad size": _CHANGED_FILE,
    "Can't open file": _CHANGED_FILE,
    "Cannot assign requested address": _ADDRESS,
    "Address already in use": (
        "another process listens on this address: end it, or restore into a pod with a network of "
        "its own"
    ),
    "Unsupported proto 262": (
        "have the worker use TCP instead of MPTCP: start a program in Go with "
        "GODEBUG=multipathtcp=0"
    ),
    "Unsupported proto": "have the worker close its sockets that are neither TCP nor UDP",
    "Can't create ghost regfile": _GHOST,
    "kerndat_tcp_repair failed": "bring the loopback interface up: ip link set lo up",
    "Unable to set a monotonic clock offset": "give the helper the capability SYS_TIME",
    "Unable to set a boottime clock offset": "give the helper the capability SYS_TIME",
    "SO_SNDBUFFORCE/SO_RCVBUFFORCE": "give the helper the capability NET_ADMIN",
    "pivot_root": "run the helper with the seccomp profile Unconfined",
    "copy sharing": (
        "the mounts of the new pod are shared in another way than those of the source: give both "
        "the same volumes with the same mountPropagation"
    ),
    _KILLED: "raise the memory limit of the container to that of the source or more",
    FULL: _ROOM,
    "File too large": "the dump was ended at its deadline: give it more time, and try again",
}


class Cause(NamedTuple):
    """What went wrong in the words of CRIU, and the step that helps."""

    message: str
    next_step: str


def failure(log: str, verb: Verb) -> Cause:
    """Return why a dump or a restore has failed.

    `log` is the text of `dump.log` or `restore.log`, or its end. The message has its last errors,
    at most MAX_LINES with at most MAX_LINE_CHARS characters each, and among them the first that is
    known, from which the next step is taken.
    """
    errors = list(_errors(log))
    if not errors:
        return Cause(f"CRIU did not {verb}, and its log has no error", _SILENT)
    known, next_step = _known(errors)
    shown = errors[-MAX_LINES:]
    if known is not None and known not in shown:
        shown = [known, *shown[1:]]
    said = "; ".join(_shortened(line) for line in shown)
    return Cause(f"CRIU did not {verb}: {said}", next_step)


def _errors(log: str) -> Iterator[str]:
    """Yield the errors that matter, without their time and place; one that recurs, once."""
    seen: set[str] = {*_CLOSING}
    for line in log.splitlines():
        if (match := _ERROR.match(line)) is None:
            continue
        error = "".join(char if char.isprintable() else "?" for char in " ".join(match[1].split()))
        if error and error not in seen and not any(text in error for text in _HARMLESS):
            seen.add(error)
            yield error


def _known(errors: list[str]) -> tuple[str | None, str]:
    for number, error in enumerate(errors):
        for text, next_step in NEXT_STEPS.items():
            if text in error and not (text == _KILLED and number):
                return error, next_step
    return None, _UNKNOWN


def _shortened(line: str) -> str:
    return line if len(line) <= MAX_LINE_CHARS else f"{line[: MAX_LINE_CHARS - 3]}..."
