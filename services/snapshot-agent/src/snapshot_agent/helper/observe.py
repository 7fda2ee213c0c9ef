"""What a worker and its node are like, read once from /proc and by netlink (sock_diag(7))."""

# /proc is read by formatted names, thousands at a time; pathlib would take longer.
# ruff: noqa: PTH115, PTH116, PTH123, PTH208

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import re
import socket
import stat
import struct
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from snapshot_agent.adapters import procfs
from snapshot_agent.domain.criu_seen import (
    MEMORY_PATHS,
    Descriptor,
    MappedFile,
    Memory,
    SeenNode,
    SeenProcess,
    SeenTree,
    UnixSocket,
    Version,
    extensions,
)
from snapshot_agent.domain.mounts import Mount, mounts_in, unescaped, upper_of
from snapshot_shared.errors import SourceExited
from snapshot_shared.proc import cgroups_in, stat_words

_NAMESPACES = ("user", "pid", "mnt", "net", "uts", "ipc", "time", "cgroup")
_GONE = (FileNotFoundError, ProcessLookupError)
_DELETED = " (deleted)"
_PTMX = os.makedev(5, 2)
_TTY_MAJORS = {4, 5, *range(136, 144)}
_VERSION_WITHIN_S = 10.0

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_DUMP = 0x301  # With NLM_F_REQUEST.
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
# Names, their files, peers, and connections that are not accepted yet.
_UDIAG_SHOW = 0x1 | 0x2 | 0x4 | 0x8
_UNIX_DIAG_NAME, _UNIX_DIAG_VFS, _UNIX_DIAG_PEER, _UNIX_DIAG_ICONS = range(4)
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBHIIIII")
_ANSWER = struct.Struct("=BBBxIII")
_ATTRIBUTE = struct.Struct("=HH")

_libc = ctypes.CDLL(None, use_errno=True)


def node(criu: Path) -> SeenNode:
    """Return what this node has. `criu` is the program."""
    status = fields("/proc/self/status")
    return SeenNode(
        criu=_version_of(criu),
        kernel=_version(os.uname().release) or (0, 0),
        capabilities=int(status["CapEff"], 16),
        user=_user(),
        pid=_inode("/proc/self/ns/pid"),
        net=_net_of_node(),
        processor=extensions(Path("/proc/cpuinfo").read_text()),
        seccomp=int(status.get("Seccomp", "0")),
    )


def _version_of(criu: Path) -> Version | None:
    try:
        answer = subprocess.run(
            [criu, "--version"],
            capture_output=True,
            check=True,
            timeout=_VERSION_WITHIN_S,
            text=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return _version(answer.stdout.removeprefix("Version:").strip())


def _version(text: str) -> Version | None:
    found = re.match(r"\d+(?:\.\d+)+", text)
    return tuple(map(int, found[0].split("."))) if found else None


def _user() -> int | None:
    with contextlib.suppress(FileNotFoundError):
        return _inode("/proc/self/ns/user")
    return None


def _net_of_node() -> int | None:
    with contextlib.suppress(PermissionError):
        return _inode("/proc/1/ns/net")
    # A first process may be guarded against being looked at. Each network namespace has files in
    # /proc with inodes of their own, which are free to see.
    wanted = _inode("/proc/1/net/dev")
    for process in procfs.running():
        with contextlib.suppress(*_GONE, PermissionError):
            if _inode(f"/proc/{process.pid}/net/dev") == wanted:
                return _inode(f"/proc/{process.pid}/ns/net")
    return None


def tree(pid: int, start: int, *, cgroups: Path) -> SeenTree:
    """Return a process, what descends from it, and the rest of the session that it leads.

    `cgroups` is where the cgroup file system of the node is mounted. Processes that end meanwhile
    are left out. Raise SourceExited when `pid` is not the running process with this start time.
    """
    try:
        # Before its namespaces, for it may leave them meanwhile, and never comes back: what is seen
        # in a namespace of ours afterwards had the mounts of its runtime until then.
        mounts = mounts_in(procfs.contents(pid, "mountinfo").decode(errors="surrogateescape"))
    except _GONE:
        raise _ended(pid) from None
    seen = [_process(each) for each in procfs.family_of(pid, start)]
    processes = sorted(
        (each for each in seen if each is not None),
        key=lambda each: (each.pid != pid, each.pid),
    )
    try:
        found = SeenTree(
            processes=processes,
            mounts=mounts,
            sockets=unix_sockets(pid),
            addresses=_addresses(pid),
            memory=memory(pid, _text(f"/proc/{pid}/cgroup"), cgroups),
            upper=upper_of(mounts, _mounts_of_node()),
        )
    except _GONE:
        raise _ended(pid) from None
    if not processes or processes[0].pid != pid or not procfs.is_alive(pid, start):
        raise _ended(pid)
    return found


def _mounts_of_node() -> Iterator[Mount]:
    # Read only where they are asked for: a node may have thousands.
    with contextlib.suppress(PermissionError):
        yield from mounts_in(_text("/proc/1/mountinfo"))


def _ended(pid: int) -> SourceExited:
    return SourceExited(
        f"process {pid} has ended", next_step="look at the container's log on its node", pid=pid
    )


def _process(found: procfs.Stat) -> SeenProcess | None:
    here = f"/proc/{found.pid}"
    try:
        status = fields(f"{here}/status")
        private, share, resident = _memory_of(here, status)
        seen = SeenProcess(
            pid=found.pid,
            start=found.start,
            pids=tuple(map(int, status["NSpid"].split())),
            exe=os.readlink(f"{here}/exe"),
            cwd=os.readlink(f"{here}/cwd"),
            uids=tuple(map(int, status["Uid"].split())),
            gids=tuple(map(int, status["Gid"].split())),
            groups=tuple(map(int, status["Groups"].split())),
            bounding=int(status["CapBnd"], 16),
            permitted=int(status["CapPrm"], 16),
            seccomp=int(status.get("Seccomp", "0")),
            no_new_privs=status["NoNewPrivs"] == "1",
            session=found.session,
            tty=_tty(here),
            private=private,
            share=share,
            resident=resident,
            descriptors=_descriptors(here),
            mapped=_mapped(here),
            namespaces={
                name: _inode(f"{here}/ns/{name}")
                for name in os.listdir(f"{here}/ns")
                if name in _NAMESPACES
            },
        )
    except _GONE:
        return None
    # Its pid may be another one's by now, and what was read be of both.
    return seen if procfs.is_alive(found.pid, found.start) else None


def _tty(here: str) -> int:
    path = f"{here}/stat"
    return int(stat_words(_text(path).encode(errors="surrogateescape"), path)[4])


def _memory_of(here: str, status: Mapping[str, str]) -> tuple[int, int, int]:
    """Return the bytes of private memory, of this process's share of it, and of what is resident.

    Memory that was swapped out counts as well.
    """
    try:
        rows = fields(f"{here}/smaps_rollup")
    except OSError:
        private = _bytes(status, "RssAnon", "VmSwap", "HugetlbPages")
        return private, private, _bytes(status, "VmRSS")
    private = _bytes(rows, "Anonymous", "Swap", "Private_Hugetlb")
    share = _bytes(rows, "Pss_Anon", "SwapPss", "Private_Hugetlb")
    return private, share, _bytes(rows, "Rss")


def _bytes(rows: Mapping[str, str], *names: str) -> int:
    return sum(int(rows.get(name, "0 kB").split()[0]) * 1024 for name in names)


def _descriptors(here: str) -> list[Descriptor]:
    found = []
    for name in os.listdir(f"{here}/fd"):
        # It may be closed by now.
        with contextlib.suppress(*_GONE):
            found.append(_descriptor(here, name))
    return sorted(found)


def _descriptor(here: str, name: str) -> Descriptor:
    path = f"{here}/fd/{name}"
    link, status, shown = os.readlink(path), os.stat(path), _text(f"{here}/fdinfo/{name}")
    info = fields_of(shown)
    is_device = stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode)
    # Only a file has links, so that a name which ends so is not taken for a deleted file.
    deleted = link.endswith(_DELETED) and status.st_nlink == 0
    text = link.removesuffix(_DELETED) if deleted else link
    is_kept = deleted or text.startswith(MEMORY_PATHS)
    return Descriptor(
        number=int(name),
        link=text,
        kind=_kind(text, status),
        inode=status.st_ino,
        device=_device(status.st_dev),
        number_of_device=_device(status.st_rdev) if is_device else "",
        mount=int(info["mnt_id"]),
        writes=int(info["flags"], 8) & os.O_ACCMODE != os.O_RDONLY,
        deleted=deleted,
        bytes=status.st_blocks * 512 if is_kept and stat.S_ISREG(status.st_mode) else 0,
        watched=_watched(shown),
    )


def _watched(fdinfo: str) -> tuple[str, ...]:
    """Return the file systems of the files that an inotify watches, as proc_pid_fdinfo(5) says."""
    numbers = (
        int(each, 16) for each in re.findall(r"^inotify .*\bsdev:([0-9a-f]+)", fdinfo, re.MULTILINE)
    )
    # The kernel shows its own number here, whose lower 20 bits are the minor.
    return tuple(sorted({f"{number >> 20}:{number & 0xFFFFF}" for number in numbers}))


def _kind(link: str, status: os.stat_result) -> str:
    mode = status.st_mode
    for kind, is_kind in (("socket", stat.S_ISSOCK), ("pipe", stat.S_ISFIFO)):
        if is_kind(mode):
            return kind
    if link.startswith("anon_inode:"):
        return f"anon:{link.partition(':')[2]}"
    if not link.startswith("/"):
        return f"anon:{link.partition(':')[0]}"
    if stat.S_ISCHR(mode):
        is_tty = os.major(status.st_rdev) in _TTY_MAJORS and status.st_rdev != _PTMX
        return "tty" if is_tty else "device"
    if stat.S_ISBLK(mode) or link.startswith("/dmabuf:"):
        return "device"
    if link.startswith("/memfd:"):
        return "memfd"
    return "folder" if stat.S_ISDIR(mode) else "file"


def _mapped(here: str) -> list[MappedFile]:
    found: dict[tuple[str, str, int], MappedFile] = {}
    for line in _text(f"{here}/maps").splitlines():
        where, _, _, device, inode, *rest = line.split(maxsplit=5)
        if inode == "0" or not rest:
            continue
        major, minor = (int(each, 16) for each in device.split(":"))
        path = unescaped(rest[0])
        deleted = path.endswith(_DELETED)
        file = MappedFile(
            path.removesuffix(_DELETED), int(inode), f"{major}:{minor}", deleted=deleted
        )
        key = path, file.device, file.inode
        if not deleted and not file.path.startswith(MEMORY_PATHS):
            found[key] = file
        elif key not in found or found[key].bytes == 0:
            found[key] = file._replace(bytes=_allocated(here, where))
    return list(found.values())


def _allocated(here: str, where: str) -> int:
    begin, end = (int(each, 16) for each in where.split("-"))
    try:
        return os.stat(f"{here}/map_files/{begin:x}-{end:x}").st_blocks * 512
    except _GONE:
        return 0
    except PermissionError:
        return end - begin


def unix_sockets(pid: int) -> list[UnixSocket]:
    """Return the unix sockets of the network namespace of a process.

    The calling thread is in that namespace meanwhile. Raise OSError.
    """
    with _socket_in_net_of(pid) as diag:
        body = _REQUEST.pack(socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, _UDIAG_SHOW, 0, 0)
        size = _HEADER.size + len(body)
        diag.send(_HEADER.pack(size, _SOCK_DIAG_BY_FAMILY, _NLM_F_DUMP, 1, 0) + body)
        found = [_unix_socket(answer) for answer in _answers(diag)]
    # The other end of a connection that is not accepted yet has no inode.
    listeners = {client: each.inode for each, clients in found for client in clients}
    return [each._replace(peer=each.peer or listeners.get(each.inode, 0)) for each, _ in found]


def _answers(diag: socket.socket) -> Iterator[bytes]:
    while True:
        data = diag.recv(1 << 20)
        while data:
            size, kind, *_ = _HEADER.unpack_from(data)
            body, data = data[_HEADER.size : size], data[_aligned(size) :]
            if kind == _NLMSG_DONE:
                return
            if kind == _NLMSG_ERROR:
                code = -struct.unpack_from("=i", body)[0]
                raise OSError(code, f"sock_diag: {os.strerror(code)}")
            yield body


def _unix_socket(answer: bytes) -> tuple[UnixSocket, tuple[int, ...]]:
    """Return a socket, and the sockets whose connections it has still to accept."""
    _, kind, state, inode, *_ = _ANSWER.unpack_from(answer)
    peer, path, file, clients, rest = 0, "", 0, (), answer[_ANSWER.size :]
    while len(rest) >= _ATTRIBUTE.size:
        size, name = _ATTRIBUTE.unpack_from(rest)
        value, rest = rest[_ATTRIBUTE.size : size], rest[_aligned(size) :]
        if name == _UNIX_DIAG_PEER:
            (peer,) = struct.unpack("=I", value)
        elif name == _UNIX_DIAG_VFS:
            file, _device = struct.unpack("=II", value)
        elif name == _UNIX_DIAG_ICONS:
            clients = struct.unpack(f"={len(value) // 4}I", value)
        elif name == _UNIX_DIAG_NAME:
            # An abstract name begins with a zero; the one of a file may end with it.
            path = os.fsdecode(b"@" + value[1:] if value[:1] == b"\0" else value.rstrip(b"\0"))
    return UnixSocket(inode, kind, state, peer, path, file), clients


def _aligned(size: int) -> int:
    return size + 3 & ~3


@contextlib.contextmanager
def _socket_in_net_of(pid: int) -> Iterator[socket.socket]:
    with open("/proc/thread-self/ns/net", "rb") as own, open(f"/proc/{pid}/ns/net", "rb") as other:
        is_own = os.path.sameopenfile(own.fileno(), other.fileno())
        if not is_own:
            _enter(other.fileno())
        try:
            diag = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG)
        finally:
            if not is_own:
                _enter(own.fileno())
    with diag:
        yield diag


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, 0) < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"setns: {os.strerror(code)}")


def _addresses(pid: int) -> list[str]:
    found = {
        ipaddress.ip_address(each)
        for each in re.findall(r"\|-- (\S+)\n\s+/32 host LOCAL", _text(f"/proc/{pid}/net/fib_trie"))
    }
    with contextlib.suppress(FileNotFoundError):  # Where IPv6 is turned off.
        lines = _text(f"/proc/{pid}/net/if_inet6").splitlines()
        found |= {ipaddress.ip_address(bytes.fromhex(line.split()[0])) for line in lines}
    return sorted(str(each) for each in found if not (each.is_loopback or each.is_link_local))


def memory(pid: int, listed: str, cgroups: Path) -> Memory | None:
    """Return the memory of the cgroup of a process, of which /proc/<pid>/cgroup is `listed`.

    `cgroups` is where the cgroup file system of the node is mounted, of version 1 or 2. None when
    the cgroup is not found there.
    """
    rows = cgroups_in(listed, f"/proc/{pid}/cgroup")
    paths = {name: path for names, path in rows for name in names.split(",")}
    if "memory" in paths:
        top, path = cgroups / "memory", paths["memory"]
        limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
    else:
        top, path = cgroups, paths.get("", "/")
        limit, used = "memory.max", "memory.current"
    folder = _cgroup(pid, top, path)
    if folder is None:
        return None
    levels = [folder, *(each for each in folder.parents if each.is_relative_to(top))]
    found = [value for each in levels if (value := _limit(each / limit)) is not None]
    usage = _limit(folder / used)
    if usage is None:
        return None
    return Memory(min(found, default=None), usage)


def allowed_cpus(pid: int, listed: str, cgroups: Path) -> set[int]:
    """Return the CPUs of the cgroup of a process; arguments as of `memory`."""
    for folder in cgroup_folders(pid, listed, cgroups):
        for level in (folder, *folder.parents):
            for name in ("cpuset.cpus.effective", "cpuset.effective_cpus"):
                with contextlib.suppress(FileNotFoundError):
                    return numbers((level / name).read_text())
            if level == cgroups:
                break
    return numbers(_text("/sys/devices/system/cpu/online"))


def numbers(text: str) -> set[int]:
    """Return the numbers of a list of the kernel, such as `0-3,8`."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def cgroup_folders(pid: int, listed: str, cgroups: Path) -> list[Path]:
    """Return the folders of the cgroups of a process, one a hierarchy; arguments as of `memory`."""
    found = []
    for names, path in cgroups_in(listed, f"/proc/{pid}/cgroup"):
        # Version 2 has no name; beside those of version 1 it is in a folder of its own.
        top = cgroups / (names.removeprefix("name=") or "unified")
        folder = _cgroup(pid, top if top.is_dir() else cgroups, path)
        if folder is not None:
            found.append(folder)
    return found


def _cgroup(pid: int, top: Path, path: str) -> Path | None:
    # A path is relative to our own root of cgroups. Where that is not the node's, it begins with
    # `..` for each level above which it has, and their names are not to be seen from here.
    parts = [part for part in path.split("/") if part not in ("", "..")]
    exact = top.joinpath(*parts)
    if _has(exact, pid):
        return exact
    for folder, _, _ in os.walk(top):
        found = Path(folder)
        if list(found.parts[len(found.parts) - len(parts) :]) == parts and _has(found, pid):
            return found
    return None


def _has(folder: Path, pid: int) -> bool:
    try:
        return str(pid) in (folder / "cgroup.procs").read_text().split()
    except OSError:
        # Not there, or one of threads, which lists none.
        return False


_NO_LIMIT = 2**62
"""A limit of cgroup v1 from here on is none: the largest number of pages."""


def _limit(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except FileNotFoundError:
        return None
    return int(text) if text.isdigit() and int(text) < _NO_LIMIT else None


def fields(path: str) -> dict[str, str]:
    """Return the rows of a file such as /proc/<pid>/status."""
    return fields_of(_text(path))


def fields_of(text: str) -> dict[str, str]:
    """Return the rows of such a text."""
    rows = (line.partition(":") for line in text.splitlines())
    return {name: value.strip() for name, _, value in rows}


def _text(path: str) -> str:
    with open(path, encoding="utf-8", errors="surrogateescape") as file:
        return file.read()


def _inode(path: str) -> int:
    return os.stat(path).st_ino


def _device(number: int) -> str:
    return f"{os.major(number)}:{os.minor(number)}"
