"""What an agent asks of the helper of its node, and what it is answered: JSON on a unix socket.

A connection carries one request, with the descriptors that it needs beside it, then any number of
`Progress`, then one answer. When the agent closes it, the helper ends the work.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from snapshot_shared.errors import Failure
from snapshot_shared.orders import ProfileName, ShortText

MAX_MESSAGE_BYTES = 128 * 1024

RESTORED = "restored"
"""The file by which the first program of a placeholder learns of the restored process."""

WHOLE = b"1"
"""By which an agent says that all bytes of a restore are right; anything else refuses them."""

Pid = Annotated[int, Meta(ge=2, le=2**22)]
Start = Annotated[int, Meta(ge=0, le=2**62)]
Within = Annotated[float, Meta(gt=0, le=86_400)]
Path = Annotated[str, Meta(pattern=r"^/[^\x00]*\Z", max_length=4096)]
Gpus = Annotated[list[ShortText], Meta(max_length=64)] | None
"""The uuids of a container's GPUs in their order; None where the driver is not `criu+cuda`."""


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag="ping"):
    """Whether this node can dump and restore, and with `cuda` what uses CUDA.

    `Done` answers with the versions of CRIU and of NVIDIA's driver, empty where there is none, and
    in `unfit` with why it cannot.
    """

    cuda: bool = False


class Inspect(msgspec.Struct, frozen=True, kw_only=True, tag="inspect"):
    """Check that a worker can be dumped. `quiet`: it has answered `quiesce`.

    `ours` are mounts of the container that are neither captured nor missed, such as its control
    directory. `scratch`: the dump will be written into the scratch folder. A `plain` worker has the
    node's root and network: no file of the one is captured, and the other is not locked.
    `seccomp_profile` is the one that the pod's spec names, for the text of a refusal.
    """

    pid: Pid
    start: Start
    ours: list[Path] = []
    quiet: bool = False
    gpus: Gpus = None
    scratch: bool = False
    plain: bool = False
    seccomp_profile: ShortText = ""


class DumpRequest(msgspec.Struct, frozen=True, kw_only=True, tag="dump"):
    """Write the process and its files into the directory whose descriptor comes with this.

    `control` is where the worker has its control directory. With `scratch` the directory is in the
    scratch folder, in place of the artifact root. `plain` as of `Inspect`.
    """

    pid: Pid
    start: Start
    within_s: Within
    ours: list[Path] = []
    control: list[Path] = []
    gpus: Gpus = None
    scratch: bool = False
    plain: bool = False


class RestoreRequest(msgspec.Struct, frozen=True, kw_only=True, tag="restore"):
    """Restore a process below a placeholder, from a folder below the artifact root.

    With `scratch` it is below the scratch folder instead. `folder` has the names of that path.
    `init` is the folder of the placeholder's first program.
    `chosen` has devices of the source and the ones here that were given their weights, by uuid.

    The descriptor of a socket comes with this. The agent has checked all images but those of pages,
    and writes WHOLE into the socket if these are right, too. The process does not run before that.
    """

    pid: Pid
    start: Start
    within_s: Within
    folder: Annotated[list[str], Meta(min_length=1, max_length=8)]
    init: Path
    gpus: Gpus = None
    scratch: bool = False
    chosen: Annotated[dict[ShortText, ShortText], Meta(max_length=64)] = {}


class Settle(msgspec.Struct, frozen=True, kw_only=True, tag="settle"):
    """End a dump of this process, if one is under way; leave the process whole, or end it."""

    pid: Pid
    start: Start


Request = Ping | Inspect | DumpRequest | RestoreRequest | Settle


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """Bytes that are done, of about how many."""

    done: int
    total: int = 0


class Begun(msgspec.Struct, frozen=True, kw_only=True, tag="begun"):
    """A step of `CRIU_STEPS` begins, and the one before it is over."""

    step: ShortText


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """The work is done. `bytes` is the estimate of an inspection.

    `frozen_s` is for how many seconds a dump has stopped the worker, where CRIU says so. `pid` and
    `start` are those of the restored process, as the node has them. `ended`: the process that was
    settled was not whole, and was ended. `criu`, `cuda_driver`, `unfit` and `seccomp_profile` (that
    of this node for workers of CRIU) answer a `Ping`.
    """

    bytes: int = 0
    frozen_s: Annotated[float, Meta(ge=0)] | None = None
    pid: int = 0
    start: int = 0
    ended: bool = False
    criu: ShortText = ""
    cuda_driver: ShortText = ""
    unfit: Failure | None = None
    seccomp_profile: ProfileName = ""


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The work has failed, and what it did is undone."""

    failure: Failure


Reply = Progress | Begun | Done | Failed
