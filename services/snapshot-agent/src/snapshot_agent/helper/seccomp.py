"""The seccomp profile of this node for workers of CRIU: it refuses io_uring and allows all else.

The kubelet reads profiles of type Localhost below a folder of its own. A profile is written there
once and never removed: a pod that names it could not start again. A file that is there already is
left as it is, and serves if it refuses io_uring.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec

from snapshot_shared.codec import decode_json, encode_pretty
from snapshot_shared.errors import ArtifactExists, SnapbackError
from snapshot_shared.files import make_dir, open_root, opened, read_bounded, write_new

log = logging.getLogger(__name__)

REFUSED = ("io_uring_setup", "io_uring_enter", "io_uring_register")
_ALLOW, _ERRNO = "SCMP_ACT_ALLOW", "SCMP_ACT_ERRNO"
_EPERM = 1
PROFILE: dict[str, Any] = {
    "defaultAction": _ALLOW,
    "syscalls": [{"names": list(REFUSED), "action": _ERRNO, "errnoRet": _EPERM}],
}
"""As the OCI runtime specification has it."""

_MAX_BYTES = 1024 * 1024
_UNCONFINED = "Seccomp:\t0"


class _Rule(msgspec.Struct, frozen=True):
    names: list[str]
    action: str


class _Profile(msgspec.Struct, frozen=True, rename="camel"):
    default_action: str
    syscalls: list[_Rule] = []


def refuses_io_uring(profile: bytes) -> bool:
    """Whether a process with a profile gets an error for each call of io_uring.

    Raise InvalidMessage for a text that is no profile.
    """
    found = decode_json(profile, _Profile, limit=_MAX_BYTES)
    for call in REFUSED:
        actions = [rule.action for rule in found.syscalls if call in rule.names]
        if {*(actions or [found.default_action])} != {_ERRNO}:
            return False
    return True


def install(folder: Path, name: str, default: Path | None) -> str:
    """Return the name of the profile, if workers may be given it on this node; else nothing.

    `folder` is the kubelet's for profiles. `default` has /proc/self/status of a container that
    names no profile. If that has a filter, the kubelet gives pods the profile of the container
    runtime (seccompDefault), which refuses more than ours does.
    """
    try:
        if default is not None and _UNCONFINED not in default.read_text().splitlines():
            log.info("pods have the container runtime's seccomp profile here: %s is not used", name)
            return ""
        *parts, file = name.split("/")
        with opened(open_root(folder)) as root, opened(make_dir(root, parts)) as directory:
            try:
                write_new(directory, file, encode_pretty(PROFILE))
            except ArtifactExists:
                if not refuses_io_uring(read_bounded(directory, file, _MAX_BYTES)):
                    log.warning(
                        "%s/%s allows io_uring, so workers of CRIU get no seccomp profile here. "
                        "Next: remove it, or name another file in checkpoint.seccomp.profile",
                        folder,
                        name,
                    )
                    return ""
    except (OSError, SnapbackError) as error:
        log.warning("workers of CRIU get no seccomp profile here: %s/%s: %s", folder, name, error)
        return ""
    return name
