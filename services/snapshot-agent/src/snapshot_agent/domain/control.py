"""The files of a container: where they are, and the names and bodies of its control files.

Agent and worker communicate by control files alone. Each is put in place by a rename; its body is
JSON with the attempt that it belongs to. What a worker writes is hostile input.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from snapback_client.control import (
    ABORTED,
    COMPLETE,
    CONTEXT,
    CONTROL_DIR,
    MAX_BODY_BYTES,
    QUIESCE,
    QUIESCE_FAILED,
    QUIESCED,
    QUIESCING,
    READY,
    RESTORE_COMPLETE,
    RESTORE_FAILED,
    RESTORED,
    STATE,
    Signal,
)
from snapshot_shared.codec import decode_json, encode_json
from snapshot_shared.errors import Failure, InvalidMessage
from snapshot_shared.orders import PlaceOrder, RestoreOrder

__all__ = [
    "ABORTED",
    "COMPLETE",
    "CONTEXT",
    "CONTROL_DIR",
    "MAX_BODY_BYTES",
    "QUIESCE",
    "QUIESCED",
    "QUIESCE_FAILED",
    "QUIESCING",
    "READY",
    "RESTORED",
    "RESTORE_COMPLETE",
    "RESTORE_FAILED",
    "STATE",
    "Signal",
]

MAX_MESSAGE = 500
"""How many characters of the message of a worker a report has."""

OUTCOMES = {COMPLETE: "complete", ABORTED: "aborted"}
"""The outcome of a capture, by the file that reports it to the worker."""

CAPTURE_FILES = (QUIESCE, QUIESCING, QUIESCED, QUIESCE_FAILED, COMPLETE, ABORTED)
RESTORE_FILES = (RESTORE_COMPLETE, RESTORE_FAILED, RESTORED)


class Access(NamedTuple):
    """Owner of the control directory of a container, and modes of what is put there.

    `uid` and `gid` of -1 are those of the agent, as in chown(2).
    """

    uid: int = -1
    gid: int = -1
    folder_mode: int = 0o700
    file_mode: int = 0o600


class ContainerPaths(NamedTuple):
    """The paths of one container on this node, and the access to its control files.

    `volume` is the control directory of a container that has it in a volume of its pod, and
    `placeholder` the folder of the program that waits there for the process to be restored.
    """

    home: Path
    sockets: Path
    access: Access = Access()
    volume: Path | None = None
    placeholder: Path | None = None

    @property
    def control(self) -> Path:
        """The control directory."""
        return self.volume or self.home / "control"

    @property
    def log(self) -> Path:
        """Standard output and standard error."""
        return self.home / "log"

    @property
    def lock(self) -> Path:
        """The file that is locked while the container is captured."""
        return self.home / "lock"

    @property
    def marker(self) -> str:
        """The environment entry by which the processes of the container are found."""
        return f"{CONTROL_DIR}={self.control}"


def container_paths(
    state_dir: Path, socket_dir: Path, pod_uid: str, container: str
) -> ContainerPaths:
    """Return the paths of a container."""
    return ContainerPaths(state_dir / "pods" / pod_uid / container, socket_dir / pod_uid[:8])


def body(attempt: int, failure: Failure | None = None) -> bytes:
    """Return the body of a control file."""
    if failure is None:
        return encode_json(Signal(attempt=attempt))
    return encode_json(
        Signal(attempt=attempt, reason=failure.reason, message=failure.message[:4096])
    )


def restored(order: PlaceOrder | RestoreOrder, devices: Mapping[str, str]) -> bytes:
    """Return the body of `restore-complete`."""
    return encode_json(
        Signal(
            attempt=order.attempt,
            devices=dict(devices),
            node=order.node,
            pod=f"{order.pod.namespace}/{order.pod.name}",
            pod_uid=order.pod.uid,
            capture=order.artifact.content_uid,
            generation=order.artifact.generation,
        )
    )


def request(attempt: int, capture: str, previous: str) -> bytes:
    """Return the body of `quiesce`."""
    return encode_json(Signal(attempt=attempt, capture=capture, previous=previous))


def is_signal(data: bytes) -> bool:
    """Return whether a file has the body of a worker that answers by these files.

    A worker whose `ready-for-snapshot` has none is quiet from then on, and waits.
    """
    try:
        decode_json(data, Signal, limit=MAX_BODY_BYTES)
    except InvalidMessage:
        return False
    return True


def is_of(data: bytes, attempt: int) -> bool:
    """Whether a body belongs to this attempt; one that does not decode belongs to none."""
    try:
        return decode_json(data, Signal, limit=MAX_BODY_BYTES).attempt == attempt
    except InvalidMessage:
        return False


def message_of(data: bytes | None) -> str:
    """Return the message in a body, cut to a size that fits into a report; empty without one."""
    try:
        return decode_json(data or b"", Signal, limit=MAX_BODY_BYTES).message[:MAX_MESSAGE]
    except InvalidMessage:
        return ""
