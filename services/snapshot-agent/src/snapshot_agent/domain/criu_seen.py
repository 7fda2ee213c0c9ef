"""What is seen of a worker, or of a container that waits for one, and of its node.

Values alone: `helper.observe` reads them from a node, `criu_gates` decides by them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import NamedTuple

from snapshot_agent.domain.mounts import Mount, visible

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

_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - a mount of every container
MEMORY_PATHS = (_SHARED_MEMORY, "/memfd:", "/SYSV", "/dev/zero")
"""How paths of shared memory begin; a mapping that is anonymous has that of /dev/zero."""

_VOLUME_TYPES = {"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs"}
"""File systems of a node that a volume may be a folder of; those of a network are none."""

_WATCHES_ALL = "anon:[fanotify]"
"""It may watch whole mounts and file systems."""

_RUNTIMES_FILES = {"/etc/hosts", "/etc/hostname", "/etc/resolv.conf"}

Version = tuple[int, ...]


def shown(version: Version) -> str:
    """Return a version as text, such as `4.2.1`; empty for none."""
    return ".".join(map(str, version))


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
    `watched` are the file systems of what an inotify watches.
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
    watched: tuple[str, ...] = ()


class MappedFile(NamedTuple):
    """A file that is mapped, in one piece or many. `bytes` and `device` as of a `Descriptor`."""

    path: str
    inode: int = 0
    device: str = ""
    deleted: bool = False
    bytes: int = 0


class SeenProcess(NamedTuple):
    """A process of a worker. `pids` are its pids from the outermost namespace to its own.

    `uids` and `gids` are the real, effective and saved ones and those for files, `groups` the
    supplementary ones. `bounding` and `permitted` are masks of capabilities, `seccomp` the mode (2
    with a filter), `tty` the number of the controlling terminal or 0.
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
    groups: Sequence[int] = ()
    bounding: int = 0
    permitted: int = 0
    seccomp: int = 0
    no_new_privs: bool = False
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
    without those of loopback and of a link alone. `upper` is the folder of the node with what was
    written in the root of the container, or None where it has none or it is not found.
    """

    processes: Sequence[SeenProcess]
    mounts: Sequence[Mount] = ()
    sockets: Sequence[UnixSocket] = ()
    addresses: Sequence[str] = ()
    memory: Memory | None = None
    upper: str | None = None

    @property
    def root(self) -> SeenProcess:
        """The process from which all others descend."""
        return self.processes[0]


class SeenNode(NamedTuple):
    """The node and the program that looks at it.

    `criu` is None when CRIU cannot be started. `capabilities` is the program's own effective mask,
    `user` the inode of its user namespace, or None where the kernel has none.
    `processor` has the extensions of its instruction set, `net` the inode of the node's network
    namespace, or None when no process in it can be looked at. `seccomp` is the program's own mode.
    """

    criu: Version | None
    kernel: Version
    capabilities: int
    user: int | None = None
    pid: int = 0
    net: int | None = None
    processor: Sequence[str] = ()
    seccomp: int = 0

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


class Use(NamedTuple):
    """A file that a process needs. `mount` is None when it is not one of the container."""

    pid: int
    path: str
    mount: Mount | None
    writes: bool = False
    is_folder: bool = False


def uses(seen: SeenTree) -> Iterator[Use]:
    """Yield the files that processes have open or mapped, or are in."""
    by_id = {mount.id: mount for mount in seen.mounts}
    by_path = visible(seen.mounts)
    for process in seen.processes:
        for each in process.descriptors:
            if each.kind in ("file", "folder"):
                mount, is_folder = by_id.get(each.mount), each.kind == "folder"
                yield Use(process.pid, each.link, mount, each.writes, is_folder)
        for file in process.mapped:
            if not is_memory(file.path):
                yield Use(process.pid, file.path, _mount_of(file.path, by_path))
        mount = _mount_of(process.cwd, by_path)
        yield Use(process.pid, process.cwd, mount, is_folder=True)


def used_mounts(seen: SeenTree) -> set[str]:
    """Return the paths of the mounts that the processes of a tree need to go on.

    The mounts of shared memory and of named sockets are needed, and those of file systems of which
    a process watches a file: the kernel does not say by which mount.
    """
    by_path = visible(seen.mounts)
    descriptors = [each for process in seen.processes for each in process.descriptors]
    if any(each.kind == _WATCHES_ALL for each in descriptors):
        return set(by_path)
    opened = {each.mount for each in descriptors}
    watched = {device for each in descriptors for device in each.watched}
    found = {each.path for each in seen.mounts if each.id in opened or each.device in watched}
    found |= {use.mount.path for use in uses(seen) if use.mount is not None}
    inodes = {each.inode for each in descriptors if each.kind == "socket"}
    own = [socket.path for socket in seen.sockets if socket.inode in inodes]
    for path in (_SHARED_MEMORY, *(path for path in own if path.startswith("/"))):
        mount = _mount_of(path, by_path)
        found |= {mount.path} if mount is not None else set()
    return found


def is_memory(path: str) -> bool:
    """Whether what is mapped is memory rather than a file."""
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
    used = {use.mount.path for use in uses(seen) if use.mount and use.path != use.mount.path}
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
        and not is_read_only(mount)
        and mount.path not in ("/", *_RUNTIMES_FILES)
        and not is_below(mount.path, "/dev")
    )


def is_read_only(mount: Mount) -> bool:
    """Whether nothing can be written there."""
    return "ro" in mount.options or "ro" in mount.super_options


def is_below(path: str, folder: str) -> bool:
    """Whether a path is that of a folder, or of something in it."""
    return path == folder or path.startswith(f"{folder}/")


def names_of(capabilities: int) -> list[str]:
    """Return the names in a mask of capabilities, such as CAP_SYS_ADMIN."""
    return [
        f"CAP_{_CAPABILITIES[number] if number < len(_CAPABILITIES) else number}"
        for number in range(capabilities.bit_length())
        if capabilities >> number & 1
    ]
