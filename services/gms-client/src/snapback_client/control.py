"""The files of a control directory, by which a worker and the snapshot agent communicate.

Each is put in place by a rename; its body is JSON with the attempt that it belongs to.
"""

from __future__ import annotations

import msgspec

CONTROL_DIR = "SNAPSHOT_CONTROL_DIR"
"""The variable of a container that names its control directory."""
STANDBY = "SNAPSHOT_RESTORE_STANDBY"
"""The variable that is 1 in a container that is started to be restored."""

READY = "ready-for-snapshot"
QUIESCE = "quiesce"
QUIESCING = "quiescing"
"""What a worker still waits for before it is quiet, in `message`."""
QUIESCED = "quiesced"
QUIESCE_FAILED = "quiesce-failed"
"""Why a worker cannot become quiet, in `message`. Its capture ends at once."""
COMPLETE = "snapshot-complete"
ABORTED = "snapshot-aborted"
RESTORE_COMPLETE = "restore-complete"
RESTORE_FAILED = "restore-failed"
RESTORED = "restored"

CONTEXT = "restore-context.json"
"""Variables of the container in which a process is restored, written by its placeholder."""

OWNER = ".worker"
"""Which process follows the directory. Only the client reads it."""

STATE = "state"
"""The folder in which a worker saves its own state, and finds it again after a restore."""

MAX_BODY_BYTES = 64 * 1024


class RestoreContext(msgspec.Struct, frozen=True):
    """The body of `restore-context.json`: variables by name, None if a variable is not set."""

    env: dict[str, str | None]


class Owner(msgspec.Struct, frozen=True):
    """The body of `.worker`: a process by its pid and its start, in clock ticks since the boot."""

    pid: int
    start: int


class Signal(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of a control file; `reason` and `message` are those of a failure.

    In `quiesce`, `capture` is the uid of the content, and `previous` the outcome of the capture
    before (`complete`, `aborted`, or empty), for a worker that has missed its end. In
    `restore-complete`, `devices` has the uuid of the device here for each of the source, `capture`
    and `generation` say which artifact was restored, and `node`, `pod` (`namespace/name`) and
    `pod_uid` where.
    """

    attempt: int
    reason: str = ""
    message: str = ""
    capture: str = ""
    previous: str = ""
    devices: dict[str, str] = {}
    node: str = ""
    pod: str = ""
    pod_uid: str = ""
    generation: int = 0
