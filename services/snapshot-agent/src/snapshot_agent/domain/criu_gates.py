"""What must hold before CRIU is let near a worker, over what was seen of it and of its node.

A check returns an error or None, as in `gate`. Nothing is touched before all checks have passed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import reduce
from operator import or_
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from snapshot_agent.domain.gate import Check, refuse
from snapshot_agent.domain.mounts import Mount, visible
from snapshot_shared.artifact import FileName
from snapshot_shared.errors import Incompatible, NoSpace, NotEligible, SnapbackError
from snapshot_shared.orders import Bytes

INIT = "snapback-init"
"""The program of a container that waits for a restore."""

_SYS_RESOURCE = 24
_CAPABILITIES = (
    "CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID",
    "SETPCAP", "LINUX_IMMUTABLE", "NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW",
    "IPC_LOCK", "IPC_OWNER", "SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT", "SYS_PTRACE", "SYS_PACCT",
    "SYS_ADMIN", "SYS_BOOT", "SYS_NICE", "SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "MKNOD",
    "LEASE", "AUDIT_WRITE", "AUDIT_CONTROL", "SETFCAP", "MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG",
    "WAKE_ALARM", "BLOCK_SUSPEND", "AUDIT_READ", "PERFMON", "BPF", "CHECKPOINT_RESTORE",
)  # fmt: skip
"""The names of capabilities by number, without `CAP_`."""

_IO_URING = "[io_uring]"
_PTMX = "5:2"
_PLAIN_DEVICES = {"1:3", "1:5", "1:7", "1:8", "1:9", _PTMX, "10:200"}
"""Devices that CRIU opens anew: null, zero, full, random, urandom, ptmx, tun."""

_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - a mount of every container
MEMORY_PATHS = (_SHARED_MEMORY, "/memfd:", "/SYSV", "/dev/zero")
"""How paths of shared memory begin; a mapping that is anonymous has that of /dev/zero."""

_KERNEL_TYPES = {
    "binfmt_misc", "bpf", "cgroup", "cgroup2", "debugfs", "devpts", "devtmpfs", "fusectl",
    "mqueue", "proc", "securityfs", "sysfs", "tracefs",
}  # fmt: skip
_VOLUME_TYPES = {"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs"}
"""File systems of a node that a volume may be a folder of; those of a network are none."""

_RUNTIMES_FILES = {"/etc/hosts", "/etc/hostname", "/etc/resolv.conf"}
_SPARE = Fraction(11, 10)
"""What must be there for each byte of an estimate."""

Version = tuple[int, ...]

_EXTENSION = re.compile(
    r"3dnow|abm|adx|aes|amx|apx|avx|bmi|cldemote|clflush|clwb|clzero|cmov|cx16|cx8|enqcmd|erms|"
    r"f16c|fma|fpu|fsgsbase|fsrm|fxsr|gfni|kl\Z|lahf_lm|lwp|mmx|mov|pclmul|pku|pni|popcnt|prefetch|"
    r"rdpid|rdrand|rdseed|rdtscp|rtm|serialize|sha|sm[34]\Z|sse|ssse3|tbm|user_shstk|vaes|vpclmul|"
    r"waitpkg|xop|xsave"
)
"""How flags begin in /proc/cpuinfo that name instructions which a process may use."""


def extensions(cpuinfo: str) -> list[str]:
    """Return the instruction set extensions that a processor has, from the text of /proc/cpuinfo.

    Other flags of an x86 come and go with kernels and microcode. On arm64 all are extensions.
    """
    for line in cpuinfo.splitlines():
        name, _, words = line.partition(":")
        if name.strip() == "Features":
            return sorted(words.split())
        if name.strip() == "flags":
            return sorted(word for word in words.split() if _EXTENSION.match(word))
    return []


class Descriptor(NamedTuple):
    """An open descriptor: `link` is the text of its link in /proc.

    `kind` is file, folder, pipe, socket, tty, device, memfd or `anon:<name>`, such as
    `anon:[io_uring]`. `device` is that of the file system which has the inode, `number_of_device`
    that of an opened device; both as `major:minor`. `mount` is the id of the mount by which the
    file was opened. `bytes` are allocated, and given for shared memory and deleted files alone.
    """

    number: int
    link: str
    kind: str
    inode: int = 0
    device: str = ""
    number_of_device: str = ""
    mount: int = 0
    writes: bool = False
    deleted: bool = False
    bytes: int = 0


class MappedFile(NamedTuple):
    """A file that is mapped, in one piece or many. `bytes` and `device` as of a `Descriptor`."""

    path: str
    inode: int = 0
    device: str = ""
    deleted: bool = False
    bytes: int = 0


class SeenProcess(NamedTuple):
    """A process of a worker. `pids` are its pids from the outermost namespace to its own.

    `uids` and `gids` are the real, effective and saved ones. `bounding` and `permitted` are masks
    of capabilities, `seccomp` the mode, `tty` the number of the controlling terminal or 0.
    `private` is the memory that a dump writes, `share` that of it which is left when pages that
    processes share after a fork are counted once, `resident` with the pages of files; bytes.
    `namespaces` has their inodes by name: user, pid, mnt, net, uts, ipc, time, cgroup.
    """

    pid: int
    start: int
    pids: Sequence[int]
    exe: str = ""
    cwd: str = "/"
    uids: Sequence[int] = (0, 0, 0)
    gids: Sequence[int] = (0, 0, 0)
    bounding: int = 0
    permitted: int = 0
    seccomp: int = 0
    session: int = 0
    tty: int = 0
    private: int = 0
    share: int = 0
    resident: int = 0
    descriptors: Sequence[Descriptor] = ()
    mapped: Sequence[MappedFile] = ()
    namespaces: Mapping[str, int] = {}


class UnixSocket(NamedTuple):
    """A unix socket of a network namespace. `peer` is the inode of the connected one, or 0.

    It is that of the listener until the listener has accepted the connection.
    `path` is the name that it is bound to, with @ in front of an abstract one, or empty; `file` is
    the lower half of the inode of its file there, or 0.
    """

    inode: int
    type: int
    state: int
    peer: int
    path: str
    file: int = 0


class Memory(NamedTuple):
    """Bytes of a memory cgroup: the lowest limit on its way to the root, None without one."""

    limit: int | None
    used: int


class SeenTree(NamedTuple):
    """A worker, or a container that waits for one: its processes, its root process first.

    `memory` is None when its cgroup is not found. `addresses` are those of its network namespace,
    without those of loopback and of a link alone.
    """

    processes: Sequence[SeenProcess]
    mounts: Sequence[Mount] = ()
    sockets: Sequence[UnixSocket] = ()
    addresses: Sequence[str] = ()
    memory: Memory | None = None

    @property
    def root(self) -> SeenProcess:
        """The process from which all others descend."""
        return self.processes[0]


class SeenNode(NamedTuple):
    """The node and the program that looks at it.

    `criu` is None when CRIU cannot be started. `capabilities` is the program's own effective mask.
    `processor` has the extensions of its instruction set, `net` the inode of the node's network
    namespace, or None when no process in it can be looked at.
    """

    criu: Version | None
    kernel: Version
    capabilities: int
    pid: int = 0
    net: int | None = None
    processor: Sequence[str] = ()

    @property
    def has_sys_resource(self) -> bool:
        """Whether limits of processes of other users may be read."""
        return bool(self.capabilities >> _SYS_RESOURCE & 1)


def all_capabilities(seen: SeenTree) -> int:
    """Return the mask of what any process of a tree may ever have."""
    return reduce(or_, (each.bounding | each.permitted for each in seen.processes), 0)


def estimate(seen: SeenTree) -> int:
    """Return how many bytes CRIU will write: private pages of each process, shared memory once.

    Pages that processes share after a fork are written for each of them.
    """
    return sum(each.private for each in seen.processes) + _shared(seen)


def resident(seen: SeenTree) -> int:
    """Return how many bytes of memory a tree needs to live, without pages of files."""
    return sum(each.share for each in seen.processes) + _shared(seen)


def _shared(seen: SeenTree) -> int:
    by_file: dict[tuple[str, int], int] = {}
    for process in seen.processes:
        files: list[Descriptor | MappedFile] = [*process.descriptors, *process.mapped]
        for file in files:
            key = file.device, file.inode
            by_file[key] = max(by_file.get(key, 0), file.bytes)
    return sum(by_file.values())


class _Use(NamedTuple):
    """A file that a process needs. `mount` is None when it is not one of the container."""

    pid: int
    path: str
    mount: Mount | None
    writes: bool = False
    is_folder: bool = False


def _uses(seen: SeenTree) -> Iterator[_Use]:
    """Yield the files that processes have open or mapped, or are in."""
    by_id = {mount.id: mount for mount in seen.mounts}
    by_path = visible(seen.mounts)
    for process in seen.processes:
        for each in process.descriptors:
            if each.kind in ("file", "folder"):
                mount, is_folder = by_id.get(each.mount), each.kind == "folder"
                yield _Use(process.pid, each.link, mount, each.writes, is_folder)
        for file in process.mapped:
            if not _is_memory(file.path):
                yield _Use(process.pid, file.path, _mount_of(file.path, by_path))
        mount = _mount_of(process.cwd, by_path)
        yield _Use(process.pid, process.cwd, mount, is_folder=True)


def _is_memory(path: str) -> bool:
    return path.startswith(MEMORY_PATHS) or not path.startswith("/")


def _mount_of(path: str, by_path: Mapping[str, Mount]) -> Mount | None:
    while path not in by_path and path not in ("", "/"):
        path = path.rpartition("/")[0] or "/"
    return by_path.get(path)


def volumes_to_capture(seen: SeenTree, *, ours: Collection[str] = ()) -> list[Mount]:
    """Return the mounts whose files have to be archived with a dump, by path.

    They are folders of the node, such as an emptyDir, in which the tree has files open, and
    /dev/shm. `ours` are paths of mounts that belong to Snapback and are left out.
    """
    used = {use.mount.path for use in _uses(seen) if use.mount and use.path != use.mount.path}
    return [
        mount
        for path, mount in sorted(visible(seen.mounts).items())
        if path == _SHARED_MEMORY or (path in used and path not in ours and _is_volume(mount))
    ]


def _is_volume(mount: Mount) -> bool:
    return (
        mount.fs_type in _VOLUME_TYPES
        # A whole disk is a volume that outlives the pod, and too large to be copied.
        and (mount.root != "/" or mount.fs_type == "tmpfs")
        and not _is_read_only(mount)
        and mount.path not in ("/", *_RUNTIMES_FILES)
        and not _is_below(mount.path, "/dev")
    )


def _is_read_only(mount: Mount) -> bool:
    return "ro" in mount.options or "ro" in mount.super_options


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def names_of(capabilities: int) -> list[str]:
    """Return the names in a mask of capabilities, such as CAP_SYS_ADMIN."""
    return [
        f"CAP_{_CAPABILITIES[number] if number < len(_CAPABILITIES) else number}"
        for number in range(capabilities.bit_length())
        if capabilities >> number & 1
    ]


def _shown(version: Version) -> str:
    return ".".join(map(str, version))


class OnDevices(NamedTuple):
    """What the driver `criu+cuda` knows of a worker.

    `bytes` are on devices, and come into its memory for a dump. With `checkpointed` they have, and
    no device may be open any more.
    """

    bytes: int = 0
    checkpointed: bool = False


class _Dump(NamedTuple):
    seen: SeenTree
    node: SeenNode
    captured: Collection[str]
    quiet: bool
    room: int
    ours: Collection[str]
    cuda: OnDevices | None

    @property
    def bytes_on_devices(self) -> int:
        return self.cuda.bytes if self.cuda else 0


def check_dump(
    seen: SeenTree,
    node: SeenNode,
    *,
    captured: Collection[str],
    quiet: bool,
    room: int,
    ours: Collection[str] = (),
    cuda: OnDevices | None = None,
) -> None:
    """Raise the first reason for which CRIU cannot dump this worker, or nothing could restore it.

    `captured` are the paths of mounts whose files are archived with the dump, and `ours` those of
    Snapback's own. With `quiet` the worker has been quiesced and is connected to nothing outside.
    `room` is in bytes. With `cuda` the driver is `criu+cuda`, which takes care of NVIDIA's devices.

    Raise NotEligible, or NoSpace when the dump does not fit.
    """
    refuse(_DUMP_CHECKS, _Dump(seen, node, captured, quiet, room, ours, cuda))


def _has_criu(node: SeenNode) -> str:
    """Return why the CRIU of a node is not fit for its kernel, or nothing."""
    # Before 4.2, CRIU dumps no socket of the internet on these kernels (checkpoint-restore/criu
    # issue 2705).
    wanted = (4, 2) if node.kernel >= (6, 16) else (4, 0)
    if node.criu is None:
        return f"CRIU cannot be started on this node; {_shown(wanted)} or later is needed"
    if node.criu < wanted:
        return (
            f"this node has CRIU {_shown(node.criu)}; Linux {_shown(node.kernel)} needs "
            f"{_shown(wanted)} or later"
        )
    return ""


def _dumps_with_criu(dump: _Dump) -> SnapbackError | None:
    return _lacks_criu(dump.node)


def _lacks_criu(node: SeenNode) -> SnapbackError | None:
    if not (problem := _has_criu(node)):
        return None
    return NotEligible(
        problem,
        next_step="update the helper's image on this node",
        found=_shown(node.criu or ()),
        kernel=_shown(node.kernel),
    )


def check_node(node: SeenNode) -> None:
    """Raise NotEligible when no worker can be dumped on this node."""
    if error := _lacks_criu(node):
        raise error


def _is_of_its_own(dump: _Dump) -> SnapbackError | None:
    root = dump.seen.root
    found = root.namespaces.get("pid")
    if found == dump.node.pid:
        return NotEligible(
            f"process {root.pid} is in the process namespace {found}, which is the node's",
            next_step="run the pod without hostPID",
            expected="a process namespace of its own",
            found=found,
        )
    if root.pids[-1] != 1:
        return NotEligible(
            f"process {root.pid} has pid {root.pids[-1]} in its process namespace; only pid 1 can "
            "be restored with its namespace",
            next_step="run the pod without shareProcessNamespace",
            expected=1,
            found=root.pids[-1],
        )
    if root.namespaces.get("net") == dump.node.net:
        return NotEligible(
            f"process {root.pid} is in the network namespace {dump.node.net}, which is the node's "
            "and would be locked while CRIU dumps",
            next_step="run the pod without hostNetwork",
            expected="a network namespace of its own",
            found=dump.node.net,
        )
    return None


def _is_within_ours(dump: _Dump) -> SnapbackError | None:
    missing = names_of(all_capabilities(dump.seen) & ~dump.node.capabilities)
    if not missing:
        return None
    return NotEligible(
        f"the worker may have {', '.join(missing)}, which the helper of this node lacks",
        next_step=_take_away(missing),
        expected=names_of(dump.node.capabilities),
        found=missing,
    )


def _take_away(missing: Iterable[str]) -> str:
    names = ", ".join(name.removeprefix("CAP_") for name in missing)
    return f"drop {names} in the container's securityContext, or add it to the helper's"


def _is_of_a_user_that_we_may_read(dump: _Dump) -> SnapbackError | None:
    if dump.node.has_sys_resource:
        return None
    for process in dump.seen.processes:
        if any((*process.uids, *process.gids)):
            user, group = process.uids[0], process.gids[0]
            return NotEligible(
                f"process {process.pid} runs as user {user}, group {group}; without "
                "CAP_SYS_RESOURCE the helper of this node dumps processes of user 0, group 0 alone",
                next_step="add SYS_RESOURCE to the helper's capabilities, or run the worker as "
                "user and group 0",
                expected=(0, 0),
                found=(user, group),
            )
    return None


def _has_no_terminal(dump: _Dump) -> SnapbackError | None:
    processes = dump.seen.processes
    # A tree may make terminals for itself, and then has their other ends open.
    makes = any(each.number_of_device == _PTMX for one in processes for each in one.descriptors)
    for process in processes:
        if makes and process.session != dump.seen.root.session:
            continue
        links = [each.link for each in process.descriptors if each.kind == "tty" and not makes]
        if process.tty or links:
            found = links[0] if links else f"number {process.tty}"
            return NotEligible(
                f"process {process.pid} has the terminal {found}, whose other end is outside of "
                "the worker; a dump needs none",
                next_step="run the container without tty",
                expected="no terminal",
                found=found,
            )
    return None


def _has_no_io_uring(dump: _Dump) -> SnapbackError | None:
    for process in dump.seen.processes:
        held = [each.kind for each in process.descriptors if each.kind == f"anon:{_IO_URING}"]
        held += [each.path for each in process.mapped if each.path.endswith(_IO_URING)]
        if held:
            return NotEligible(
                f"process {process.pid} holds {len(held)} of anon_inode:[io_uring], of which CRIU "
                "can dump none",
                next_step="turn io_uring off in the worker, or forbid io_uring_setup by seccomp",
                expected=0,
                found=len(held),
            )
    return None


def _has_no_devices(dump: _Dump) -> SnapbackError | None:
    for process in dump.seen.processes:
        for path, how in _devices(process):
            is_nvidia = path.startswith("/dev/nvidia")
            if is_nvidia and dump.cuda and not dump.cuda.checkpointed:
                continue
            driver = "criu" if dump.cuda is None else "criu+cuda"
            return NotEligible(
                f"process {process.pid} has the device {path} {how}, and the driver {driver} "
                "cannot save a state of it",
                next_step="capture with the driver criu+cuda, or let the worker close its devices"
                if is_nvidia and dump.cuda is None
                else "let the worker close it before it is quiet",
                expected=driver,
                found=path,
            )
    return None


def _devices(process: SeenProcess) -> Iterator[tuple[str, str]]:
    for each in process.descriptors:
        if each.kind == "device" and each.number_of_device not in _PLAIN_DEVICES:
            yield each.link, "open"
    for file in process.mapped:
        if file.path.startswith(("/dev/", "/dmabuf:")) and not _is_memory(file.path):
            yield file.path, "mapped"


def _is_connected_to_itself(dump: _Dump) -> SnapbackError | None:
    if not dump.quiet:
        return None
    inside = {
        each.inode: process.pid
        for process in dump.seen.processes
        for each in process.descriptors
        if each.kind == "socket"
    }
    by_inode = {each.inode: each for each in dump.seen.sockets}
    for inode, pid in inside.items():
        one = by_inode.get(inode)
        if one is None or not one.peer or one.peer in inside:
            continue
        peer = by_inode.get(one.peer)
        path = (peer.path if peer else "") or one.path or "one without a name"
        return NotEligible(
            f"process {pid} is quiet and still connected by its unix socket {inode} to {path} "
            f"(socket {one.peer}), which is outside of the worker",
            next_step="let the worker close what it has imported before it is ready",
            expected="no unix socket to the outside",
            found=path,
            socket=inode,
            peer=one.peer,
        )
    return None


def _has_its_files_captured(dump: _Dump) -> SnapbackError | None:
    captured = sorted({"/", *dump.captured, *dump.ours})
    for use in _uses(dump.seen):
        if use.mount is None:
            return NotEligible(
                f"process {use.pid} uses {use.path}, which is on no mount of its container",
                next_step="let the worker close what it was given from outside of its container",
                expected=captured,
                found=use.path,
            )
        if _comes_again(use, use.mount) or use.mount.path in captured:
            continue
        return NotEligible(
            f"process {use.pid} uses {use.path} on the mount {use.mount.path} "
            f"({use.mount.fs_type}), which is not captured; captured are {', '.join(captured)}",
            next_step="close the file before the worker is quiet, put it on an emptyDir, or mount "
            "the volume read-only",
            expected=captured,
            found=use.mount.path,
        )
    return None


def _comes_again(use: _Use, mount: Mount) -> bool:
    """Whether another container has the file as well, in the same state."""
    return (
        mount.fs_type in _KERNEL_TYPES
        or _is_below(mount.path, "/dev")
        or (_is_read_only(mount) and not use.writes)
        or (use.is_folder and use.path == mount.path)
    )


def _fits_in_memory(dump: _Dump) -> SnapbackError | None:
    limit = dump.seen.memory.limit if dump.seen.memory else None
    if dump.cuda is None or not dump.cuda.bytes or limit is None:
        return None
    needed = int((resident(dump.seen) + dump.cuda.bytes) * _SPARE)
    if needed <= limit:
        return None
    return NotEligible(
        f"the worker needs {needed} bytes of memory with the {dump.cuda.bytes} that it has on "
        f"devices, the limit of its container is {limit}",
        next_step=f"give the container a memory limit of {needed} bytes or more",
        expected=needed,
        found=limit,
    )


def _fits(dump: _Dump) -> SnapbackError | None:
    needed = int((estimate(dump.seen) + dump.bytes_on_devices) * _SPARE)
    if needed <= dump.room:
        return None
    return NoSpace(
        f"a dump of {len(dump.seen.processes)} processes needs {needed} bytes, {dump.room} are "
        "free",
        needed=needed,
        free=dump.room,
    )


_DUMP_CHECKS: tuple[Check[_Dump], ...] = (
    _dumps_with_criu,
    _is_of_its_own,
    _is_within_ours,
    _is_of_a_user_that_we_may_read,
    _has_no_terminal,
    _has_no_io_uring,
    _has_no_devices,
    _is_connected_to_itself,
    _has_its_files_captured,
    _fits_in_memory,
    _fits,
)


_Path = Annotated[
    str, Meta(pattern=r"^(?:/|(?:/(?!\.{1,2}(?:/|\Z))[^/\x00-\x1f]+)+)\Z", max_length=4096)
]
"""An absolute path without `.`, `..` and what is not printed."""

_Number = Annotated[int, Meta(ge=0, le=65535)]
_Version = Annotated[tuple[_Number, ...], Meta(min_length=2, max_length=4)]
_Link = Annotated[str, Meta(pattern=r"^[^\x00-\x1f]*\Z", max_length=4096)]


class SourceMount(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A mount of the container that was dumped."""

    path: _Path
    fs_type: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}\Z")]


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


class SourceFacts(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The worker as it was dumped, for its restore. Hostile when it is read, as all of a part.

    `resident` is in bytes, `capabilities` a mask, `stdio` has the texts of the links of
    descriptors 0, 1 and 2 (empty for a closed one), `net` is the inode of the network namespace.
    `processor` are the extensions of its instruction set. `cuda` is there where the driver was
    `criu+cuda`.
    """

    criu: _Version
    kernel: _Version
    host: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}\Z")]
    addresses: Annotated[
        list[Annotated[str, Meta(pattern=r"^[0-9A-Fa-f.:]{2,45}\Z")]], Meta(max_length=256)
    ] = []
    mounts: Annotated[list[SourceMount], Meta(min_length=1, max_length=4096)]
    resident: Bytes
    capabilities: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    stdio: Annotated[list[_Link], Meta(min_length=3, max_length=3)]
    net: Annotated[int, Meta(ge=1, le=2**63 - 1)]
    processor: Annotated[
        list[Annotated[str, Meta(pattern=r"^[a-z0-9_]{1,32}\Z")]], Meta(max_length=512)
    ] = []
    archives: Annotated[list[Archive], Meta(max_length=256)] = []
    sockets: Annotated[list[RenamedSocket], Meta(max_length=4096)] = []
    cuda: SourceCuda | None = None


class _Restore(NamedTuple):
    source: SourceFacts
    target: SeenTree
    node: SeenNode


def check_restore(source: SourceFacts, target: SeenTree, node: SeenNode) -> None:
    """Raise the first reason for which a dump cannot be restored into a container that waits.

    Raise NotEligible when it does not wait, else Incompatible.
    """
    refuse(_RESTORE_CHECKS, _Restore(source, target, node))


def _waits(restore: _Restore) -> SnapbackError | None:
    root, count = restore.target.root, len(restore.target.processes)
    name = root.exe.rpartition("/")[2]
    if name == INIT and count == 1:
        return None
    return NotEligible(
        f"process {root.pid} is {root.exe} with {count - 1} others; a container that waits for a "
        f"restore has {INIT} alone",
        next_step="delete the pod, so that its restore begins with a new one",
        expected=INIT,
        found=root.exe,
        processes=count,
    )


def _restores_with_criu(restore: _Restore) -> SnapbackError | None:
    here, there = restore.node.criu, restore.source.criu
    problem = _has_criu(restore.node)
    if not problem and here is not None and here[:2] < there[:2]:
        problem = f"the dump was made by CRIU {_shown(there)}, here is {_shown(here)}"
    if not problem:
        return None
    return Incompatible(
        problem,
        next_step="update the helper's image on this node",
        expected=_shown(there),
        found=_shown(here or ()),
    )


def _has_a_kernel_as_new(restore: _Restore) -> SnapbackError | None:
    here, there = restore.node.kernel, restore.source.kernel
    if here[:2] >= there[:2]:
        return None
    return Incompatible(
        f"the source ran on Linux {_shown(there)}, here is {_shown(here)}",
        next_step=f"restore on a node with Linux {_shown(there[:2])} or later",
        expected=_shown(there),
        found=_shown(here),
    )


def _has_the_instructions(restore: _Restore) -> SnapbackError | None:
    missing = sorted({*restore.source.processor} - {*restore.node.processor})
    if not missing:
        return None
    # The libraries of a process choose among them once, when it starts.
    return Incompatible(
        f"the source ran on a processor with {', '.join(missing)}, which this node's lacks",
        next_step="restore on a node with a processor of the source's kind or a later one",
        expected=missing,
        found=sorted(restore.node.processor),
    )


def _may_give_capabilities(restore: _Restore) -> SnapbackError | None:
    allowed = all_capabilities(restore.target)
    lacking = names_of((restore.source.capabilities | allowed) & ~restore.node.capabilities)
    if lacking:
        return Incompatible(
            f"the worker may have {', '.join(lacking)}, which the helper of this node lacks",
            next_step=_take_away(lacking),
            expected=lacking,
            found=names_of(restore.node.capabilities),
        )
    # What the pod's owner was not granted must not come out of an artifact.
    denied = names_of(restore.source.capabilities & ~allowed)
    if denied:
        return Incompatible(
            f"the source may have {', '.join(denied)}, the container of this pod may not",
            next_step="give the container the capabilities of the source",
            expected=denied,
            found=names_of(allowed),
        )
    return None


def _has_the_same_mounts(restore: _Restore) -> SnapbackError | None:
    here = {mount.path for mount in restore.target.mounts}
    there = {
        mount.path
        for mount in restore.source.mounts
        if mount.path != "/" and mount.fs_type != "proc"
    }
    missing, more = sorted(there - here), sorted(here - there - {"/", "/proc"})
    if not missing:
        return None
    return Incompatible(
        f"the source had mounts that this container lacks: {', '.join(missing)}; only this "
        f"container has {', '.join(more) or 'none'}",
        next_step="give the pod the volumeMounts of the source, at the same paths",
        expected=missing,
        found=more,
    )


def _has_the_memory(restore: _Restore) -> SnapbackError | None:
    needed = int(restore.source.resident * _SPARE)
    limit = restore.target.memory.limit if restore.target.memory else None
    if limit is None or needed <= limit:
        return None
    return Incompatible(
        f"the source needs {needed} bytes of memory, the limit of this container is {limit}",
        next_step=f"give the container a memory limit of {needed} bytes or more",
        expected=needed,
        found=limit,
    )


_RESTORE_CHECKS: tuple[Check[_Restore], ...] = (
    _waits,
    _restores_with_criu,
    _has_a_kernel_as_new,
    _has_the_instructions,
    _may_give_capabilities,
    _has_the_same_mounts,
    _has_the_memory,
)
