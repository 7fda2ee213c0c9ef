"""The record of a worker that was dumped, which its restore needs: `criu.json` of its part."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Annotated

import msgspec
from msgspec import Meta

from snapshot_agent.domain.criu_seen import SeenTree
from snapshot_shared.artifact import FileName
from snapshot_shared.orders import Bytes

SOURCE = "criu.json"
"""The file of a part with what was observed of its source."""

MAX_SOURCE_BYTES = 4 * 1024 * 1024
"""An engine with 2,000 threads that each have every second of 224 CPUs takes 800 KiB."""
MAX_THREADS = 4096

_Path = Annotated[
    str, Meta(pattern=r"^(?:/|(?:/(?!\.{1,2}(?:/|\Z))[^/\x00-\x1f]+)+)\Z", max_length=4096)
]
"""An absolute path without `.`, `..` and what is not printed."""

_Number = Annotated[int, Meta(ge=0, le=65535)]
_Version = Annotated[tuple[_Number, ...], Meta(min_length=2, max_length=4)]
_Ids = Annotated[
    tuple[Annotated[int, Meta(ge=0, le=2**32 - 1)], ...], Meta(min_length=1, max_length=65536)
]
_Mask = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Link = Annotated[str, Meta(pattern=r"^[^\x00-\x1f]*\Z", max_length=4096)]


class SourceMount(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A mount of the container that was dumped, and whether a restore needs it.

    A plain worker has all mounts of its node, and needs those that it used.
    """

    path: _Path
    fs_type: Annotated[str, Meta(pattern=r"^[^\x00-\x1f]{1,255}\Z")]
    is_needed: bool = True


class RenamedSocket(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A socket that was bound to `path` and has the name `name` in the same folder."""

    path: _Path
    name: Annotated[str, Meta(pattern=r"^(?!\.{1,2}\Z)[^/\x00-\x1f]{1,255}\Z")]


class Archive(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of the part with the files below `path`, or those written in the container's root."""

    name: FileName
    path: _Path
    is_upper: bool = False


class SourceGpu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A device of the worker."""

    uuid: Annotated[str, Meta(pattern=r"^[A-Za-z0-9-]{1,64}\Z")]
    product: Annotated[str, Meta(max_length=256)] = ""


class SourceCuda(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker on devices: how many of its processes use CUDA, the driver, the devices in order."""

    processes: Annotated[int, Meta(ge=0, le=65536)]
    driver: _Version
    gpus: Annotated[list[SourceGpu], Meta(max_length=64)] = []


class Credentials(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What CRIU gives to the processes again, whatever the container is that they come into.

    `uids` and `gids`, which include supplementary groups, and the mask `permitted` are what any of
    them has; artifacts that were made before may lack the last. `seccomp` is the lowest mode of
    any, as in /proc/<pid>/status, and `no_new_privs` is whether all have that.
    """

    uids: _Ids
    gids: _Ids
    seccomp: Annotated[int, Meta(ge=0, le=2)]
    no_new_privs: bool
    permitted: _Mask = 0


def credentials_of(seen: SeenTree) -> Credentials:
    """Return what CRIU will give to the processes of a tree again."""
    return Credentials(
        uids=tuple(sorted({uid for each in seen.processes for uid in each.uids})),
        gids=tuple(sorted({gid for each in seen.processes for gid in (*each.gids, *each.groups)})),
        seccomp=min(each.seccomp for each in seen.processes),
        no_new_privs=all(each.no_new_privs for each in seen.processes),
        permitted=reduce(or_, (each.permitted for each in seen.processes), 0),
    )


class SourceThread(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """Settings of a thread that CRIU leaves behind. `tid` is that of its own pid namespace.

    `cpus` is a list of the kernel, such as `0-3,8`, empty if the thread had all CPUs of its
    container. `timer_slack_ns` is 0 for the default of 50 µs, and `io_priority` is a value of
    ioprio_set(2), 0 for none.
    """

    tid: Annotated[int, Meta(ge=1, le=2**22)]
    cpus: Annotated[
        str, Meta(pattern=r"^(?:\d{1,4}(?:-\d{1,4})?(?:,|(?=\Z)))*\Z", max_length=4096)
    ] = ""
    timer_slack_ns: Annotated[int, Meta(ge=0, le=2**62)] = 0
    io_priority: Annotated[int, Meta(ge=0, le=2**16 - 1)] = 0


class SourceFacts(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The worker as it was dumped, for its restore. Hostile when it is read, as all of a part.

    `resident` is in bytes, `capabilities` a mask, `stdio` has the texts of the links of
    descriptors 0, 1 and 2 (empty for a closed one), `net` is the inode of the network namespace.
    `processor` are the extensions of its instruction set. `cuda` is there where the driver was
    `criu+cuda`. Artifacts that were made before have no `credentials`.
    """

    criu: _Version
    kernel: _Version
    host: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}\Z")]
    addresses: Annotated[
        list[Annotated[str, Meta(pattern=r"^[0-9A-Fa-f.:]{2,45}\Z")]], Meta(max_length=4096)
    ] = []
    mounts: Annotated[list[SourceMount], Meta(min_length=1, max_length=4096)]
    resident: Bytes
    capabilities: _Mask
    credentials: Credentials | None = None
    stdio: Annotated[list[_Link], Meta(min_length=3, max_length=3)]
    net: Annotated[int, Meta(ge=1, le=2**63 - 1)]
    processor: Annotated[
        list[Annotated[str, Meta(pattern=r"^[a-z0-9_]{1,32}\Z")]], Meta(max_length=512)
    ] = []
    archives: Annotated[list[Archive], Meta(max_length=256)] = []
    sockets: Annotated[list[RenamedSocket], Meta(max_length=4096)] = []
    threads: Annotated[list[SourceThread], Meta(max_length=MAX_THREADS)] = []
    cuda: SourceCuda | None = None
