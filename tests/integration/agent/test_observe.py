"""What is seen of real processes, before CRIU comes near them, and the names of their sockets."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshot_agent.adapters import procfs
from snapshot_agent.domain import criu_seen
from snapshot_agent.domain.criu_gates import Disk, Dumping, check_dump
from snapshot_agent.domain.criu_source import RenamedSocket
from snapshot_agent.helper import observe, socket_names
from snapshot_shared.errors import NotEligible, SnapbackError, SourceExited
from snapshot_shared.files import open_root, opened
from tests.support.agent_rig import stat_of
from tests.support.waiting import wait_until

MIB = 1024 * 1024
WORKER = """
    import ctypes, mmap, os, select, socket, sys, tempfile
    folder, outside = sys.argv[1:]
    heap = b"x" * (32 << 20)
    shared = mmap.mmap(-1, 8 << 20)
    shared.write(b"y" * (4 << 20))
    memory = os.memfd_create("arena")
    os.write(memory, b"z" * (2 << 20))
    kept = open(f"{folder}/kept", "w+")
    lost = open(f"{folder}/lost", "w+")
    lost.write("w" * 65536)
    lost.flush()
    os.unlink(lost.name)
    below = os.open(folder, os.O_RDONLY)
    read, write = os.pipe()
    watch = ctypes.CDLL(None).inotify_init()
    ctypes.CDLL(None).inotify_add_watch(watch, folder.encode(), 2)
    poll = select.epoll()
    pair = socket.socketpair()
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.connect(outside)
    view = mmap.mmap(kept.fileno(), 0) if kept.write("v" * 4096) and not kept.flush() else None
    if os.fork() == 0:
        os.setsid()
        os.chdir(folder)
        os.write(1, b"x")
        sys.stdin.read()
        os._exit(0)
    sys.stdin.read()
"""


@contextlib.contextmanager
def running(*argv: str) -> Iterator[procfs.Stat]:
    """Start a program that writes a byte when its whole family is ready."""
    child = subprocess.Popen(
        argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    found = stat_of(child.pid)
    try:
        assert len(child.stdout.read(1)) == 1
        yield found
    finally:
        for each in procfs.family_of(child.pid, found.start):
            procfs.send(each, signal.SIGKILL)
        child.stdin.close()
        child.stdout.close()
        child.wait()


def python(script: str, *arguments: str) -> contextlib.AbstractContextManager[procfs.Stat]:
    return running(sys.executable, "-c", textwrap.dedent(script), *arguments)


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as made:
        made.bind(str(tmp_path / "lease"))
        made.listen()
        yield made


def seen_of(worker: procfs.Stat) -> criu_seen.SeenTree:
    return observe.tree(worker.pid, worker.start, cgroups=Path("/sys/fs/cgroup"))


@pytest.fixture
def found(tmp_path: Path, listener: socket.socket) -> Iterator[procfs.Stat]:
    with python(WORKER, str(tmp_path), listener.getsockname()) as begun:
        yield begun


@pytest.fixture
def worker(found: procfs.Stat) -> criu_seen.SeenTree:
    return seen_of(found)


def descriptor(seen: criu_seen.SeenTree, text: str) -> criu_seen.Descriptor:
    return next(each for each in seen.root.descriptors if text in each.link)


def test_a_tree_has_its_root_first_and_a_child_that_leads_a_session_of_its_own(
    worker: criu_seen.SeenTree, tmp_path: Path
) -> None:
    root, child = worker.processes
    assert child.session == child.pid != root.session == root.pid
    assert root.exe == child.exe == str(Path(sys.executable).resolve())
    assert (root.cwd, child.cwd) == (str(Path.cwd()), str(tmp_path))
    assert root.pids[0] == root.pid
    assert root.uids == (os.getuid(),) * 4
    assert root.tty == 0


def test_descriptors_are_seen_with_their_kinds_and_mounts(
    worker: criu_seen.SeenTree, tmp_path: Path
) -> None:
    kept = descriptor(worker, "/kept")
    assert (kept.kind, kept.writes, kept.deleted, kept.bytes) == ("file", True, False, 0)
    assert kept.inode == (tmp_path / "kept").stat().st_ino
    (mount,) = (each for each in worker.mounts if each.id == kept.mount)
    assert tmp_path.is_relative_to(mount.path)
    assert kept.device == mount.device
    lost = descriptor(worker, "/lost")
    assert (lost.link, lost.deleted, lost.bytes) == (f"{tmp_path}/lost", True, 65536)
    memory = descriptor(worker, "/memfd:arena")
    assert (memory.kind, memory.bytes) == ("memfd", 2 * MIB)
    folder = next(each for each in worker.root.descriptors if each.link == str(tmp_path))
    assert (folder.kind, folder.writes) == ("folder", False)
    assert descriptor(worker, "eventpoll").kind == "anon:[eventpoll]"
    # Its file system is named as that of a file there.
    assert descriptor(worker, "inotify").watched == (kept.device,)
    kinds = [each.kind for each in worker.root.descriptors]
    assert (kinds.count("socket"), kinds.count("pipe")) == (3, 4)


def test_memory_is_private_and_doubled_by_a_fork_or_shared_and_counted_once(
    worker: criu_seen.SeenTree,
) -> None:
    root, child = worker.processes
    assert min(root.private, child.private) > 32 * MIB
    assert root.resident > root.private
    # Six MiB are shared memory, which both processes have mapped or open.
    assert 70 * MIB < criu_seen.estimate(worker) < 110 * MIB
    assert 38 * MIB < criu_seen.resident(worker) < 65 * MIB
    assert criu_seen.MappedFile(path="/dev/zero", inode=0) not in root.mapped
    (shared,) = (each for each in root.mapped if each.path == "/dev/zero")
    assert (shared.deleted, shared.bytes) == (True, 4 * MIB)
    assert any(each.path.endswith("/kept") for each in root.mapped)


def test_sockets_are_seen_with_their_peers_before_and_after_they_are_accepted(
    found: procfs.Stat, listener: socket.socket
) -> None:
    assert outside(seen_of(found)).inode == os.fstat(listener.fileno()).st_ino
    accepted, _ = listener.accept()
    with accepted:
        peer = outside(seen_of(found))
        assert peer.inode == os.fstat(accepted.fileno()).st_ino
    assert (peer.path, peer.type) == (listener.getsockname(), socket.SOCK_SEQPACKET)


def outside(seen: criu_seen.SeenTree) -> criu_seen.UnixSocket:
    """Return the only socket outside to which a tree is connected."""
    by_inode = {each.inode: each for each in seen.sockets}
    own = {each.inode for each in seen.root.descriptors if each.kind == "socket"}
    (peer,) = {by_inode[inode].peer for inode in own} - own
    return by_inode[peer]


def test_a_terminal_and_devices_with_their_numbers_are_seen() -> None:
    shell = "exec 5</dev/urandom; echo; exec sleep 600"
    with python(f"import pty; pty.spawn(['sh', '-c', '{shell}'])") as found:
        seen = seen_of(found).processes[1]
    assert seen.tty != 0
    assert {each.kind for each in seen.descriptors if each.number < 3} == {"tty"}
    (device,) = (each for each in seen.descriptors if each.link == "/dev/urandom")
    assert (device.kind, device.number_of_device) == ("device", "1:9")


def test_a_process_that_leads_no_session_is_seen_alone_with_its_children() -> None:
    script = "sh -c 'sleep 600 & echo; wait' & sleep 600 & wait"
    with running("sh", "-c", script) as found:
        # A child of a shell is a shell until it is a sleep.
        shells = wait_until(lambda: two_shells_of(found), "both sleeps")
        (inner,) = (each for each in shells if each.pid != found.pid)
        seen = seen_of(inner)
    assert seen.root.pid == inner.pid
    assert [each.exe.rpartition("/")[2] for each in seen.processes[1:]] == [
        Path(shutil.which("sleep") or "").resolve().name
    ]


def two_shells_of(found: procfs.Stat) -> list[procfs.Stat]:
    """Return the shells of a family of four, once they are two."""
    family = procfs.family_of(found.pid, found.start)
    shells = [each for each in family if Path(f"/proc/{each.pid}/comm").read_text() == "sh\n"]
    return shells if (len(family), len(shells)) == (4, 2) else []


def test_a_process_that_has_ended_or_another_of_its_pid_is_an_error() -> None:
    with running("sh", "-c", "echo; exec sleep 600") as found, pytest.raises(SourceExited):
        observe.tree(found.pid, found.start + 1, cgroups=Path("/sys/fs/cgroup"))
    with pytest.raises(SourceExited):
        seen_of(found)


@pytest.fixture
def apart() -> Iterator[procfs.Stat]:
    """Give the first process of namespaces of its own, with an address and a socket in them."""
    script = textwrap.dedent("""
        import socket, subprocess, sys
        for words in ("link set lo up", "addr add 198.51.100.7/32 dev lo",
                      "addr add 2001:db8::7/128 dev lo"):
            subprocess.run(["ip", *words.split()], check=True)
        with socket.socket(socket.AF_UNIX) as made:
            made.bind("\\0apart")
            print(flush=True)
            sys.stdin.read()
    """)
    argv = ["unshare", "--pid", "--net", "--fork", "--mount-proc", sys.executable, "-c", script]
    with running(*argv) as found:
        yield next(
            each
            for each in procfs.family_of(found.pid, found.start)
            if not Path(f"/proc/{each.pid}/ns/pid").samefile("/proc/self/ns/pid")
        )


@pytest.mark.root
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and the program ip"
)
def test_another_network_namespace_is_looked_at_and_left(apart: procfs.Stat) -> None:
    before = Path("/proc/thread-self/ns/net").stat().st_ino
    seen, here = seen_of(apart)._replace(upper="/upper"), observe.node(Path("/nowhere"))
    assert Path("/proc/thread-self/ns/net").stat().st_ino == before
    assert seen.root.pids == (apart.pid, 1)
    assert list(seen.addresses) == ["198.51.100.7", "2001:db8::7"]
    assert [each.path for each in seen.sockets] == ["@apart"]
    assert here.pid == Path("/proc/self/ns/pid").stat().st_ino
    assert here.user == seen.root.namespaces["user"]
    assert seen.root.namespaces["pid"] != here.pid
    assert here.net is not None
    assert seen.root.namespaces["net"] != here.net
    paths = [each.path for each in seen.mounts]
    node = here._replace(criu=(4, 2))
    disk = Disk("/", criu_seen.estimate(seen) * 2)
    check_dump(Dumping(seen, node, captured=paths, quiet=True, disk=disk))
    with pytest.raises(NotEligible, match="process namespace"):
        check_dump(Dumping(seen_of(this_process()), node, captured=paths, quiet=True, disk=disk))


OVERLAY = """
    import os, subprocess, sys
    folder = sys.argv[1]
    mount = ("mount", "-t")
    subprocess.run([*mount, "tmpfs", "tmpfs", folder], check=True)
    for name in ("upper", "work", "root"):
        os.mkdir(f"{folder}/{name}")
    layers = f"userxattr,lowerdir=/usr,upperdir={folder}/upper,workdir={folder}/work"
    subprocess.run([*mount, "overlay", "-o", layers, "overlay", f"{folder}/root"], check=True)
    os.chroot(f"{folder}/root")
    print(flush=True)
    sys.stdin.read()
"""
USER = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--net", "--fork"]


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_folder_of_the_node_that_a_worker_has_named_by_an_overlay_of_its_own_is_not_read(
    tmp_path: Path,
) -> None:
    if subprocess.run([*USER, "true"], check=False).returncode:
        pytest.skip("needs user namespaces")
    (tmp_path / "upper").mkdir()
    (tmp_path / "upper" / "secret").write_text("of another pod")
    argv = [*USER, sys.executable, "-c", textwrap.dedent(OVERLAY), str(tmp_path)]
    with running(*argv) as found:
        inside = procfs.child_of(found.pid)
        assert inside is not None
        seen, here = seen_of(inside), observe.node(Path("/nowhere"))
        # Where the node has the folder of another one.
        assert seen.upper == str(tmp_path / "upper")
        node = here._replace(criu=(4, 2), capabilities=2**63 - 1)
        disk = Disk("/", criu_seen.estimate(seen) * 2)
        with pytest.raises(NotEligible, match="user namespace"):
            check_dump(Dumping(seen, node, captured=(), quiet=True, disk=disk))


@pytest.mark.parametrize("is_confined", [False, True])
def test_what_keeps_a_process_from_privileges_is_seen(*, is_confined: bool) -> None:
    # The only instruction of the filter allows every call.
    script = textwrap.dedent("""
        import ctypes, sys
        code = ctypes.create_string_buffer(b"\\x06\\0\\0\\0\\0\\0\\xff\\x7f", 8)
        program = (ctypes.c_uint64 * 2)(1, ctypes.addressof(code))
        prctl = ctypes.CDLL(None).prctl
        assert prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
        assert prctl(22, 2, program, 0, 0) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
    """)
    end = "import sys; print(flush=True); sys.stdin.read()"
    with python(script * is_confined + end) as found:
        root = seen_of(found).root
    own = Path("/proc/self/status").read_text()
    if is_confined:
        assert (root.no_new_privs, root.seccomp) == (True, 2)
    else:
        assert f"NoNewPrivs:\t{root.no_new_privs:d}\n" in own
        assert f"Seccomp:\t{root.seccomp}\n" in own


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may have other groups")
def test_the_groups_of_a_process_and_its_user_for_files_are_seen() -> None:
    script = """
        import ctypes, os, sys
        os.setgroups([3000, 4000])
        ctypes.CDLL(None).setfsuid(1000)
        print(flush=True)
        sys.stdin.read()
    """
    with python(script) as found:
        root = seen_of(found).root
    assert (root.groups, root.uids) == ((3000, 4000), (0, 0, 0, 1000))


def this_process() -> procfs.Stat:
    return stat_of(os.getpid())


@pytest.mark.parametrize(
    ("answer", "version"),
    [
        ("Version: 4.2.1\nGitID: v4.2.1", (4, 2, 1)),
        ("Version: 4.2", (4, 2)),
        ("", None),
        (None, None),
    ],
)
def test_the_version_of_criu_is_read_if_a_node_has_it(
    tmp_path: Path, answer: str | None, version: tuple[int, ...] | None
) -> None:
    criu = tmp_path / "criu"
    if answer is not None:
        criu.write_text(f"#!/bin/sh\nprintf '{answer}'\n")
        criu.chmod(0o755)
    seen = observe.node(criu)
    assert seen.criu == version
    assert seen.kernel >= (4, 0)
    status = Path("/proc/self/status").read_text()
    assert f"CapEff:\t{seen.capabilities:016x}\n" in status


def put(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


V1 = ("memory__limit_in_bytes", "memory__usage_in_bytes", 0x7FFFFFFFFFFFF000)
V2 = ("memory__max", "memory__current", "max")


@pytest.mark.parametrize(
    ("files", "top", "listed"),
    [
        (V1, "memory", "5:cpu:/x\n4:hugetlb,memory:/kubepods/pod/main\n0::/\n"),
        (V2, ".", "0::/kubepods/pod/main\n"),
        (V2, ".", "0::/../../pod/main\n"),
        (V2, ".", "0::/..\n"),
    ],
)
def test_the_lowest_limit_of_a_cgroup_and_of_those_above_it_holds(
    tmp_path: Path, files: tuple[str, str, object], top: str, listed: str
) -> None:
    limit, used, none = files
    pods = tmp_path / top / "kubepods"
    put(pods / "other" / "main", **{limit: MIB, used: 7, "cgroup__procs": 71})
    put(pods / "pod", **{limit: 64 * MIB, "cgroup__procs": ""})
    put(pods / "pod" / "main", **{limit: 96 * MIB, used: 5, "cgroup__procs": "7\n17"})
    assert observe.memory(17, listed, tmp_path) == criu_seen.Memory(64 * MIB, 5)
    put(pods / "pod", **{limit: none})
    assert observe.memory(17, listed, tmp_path) == criu_seen.Memory(96 * MIB, 5)
    put(pods / "pod" / "main", **{limit: none})
    assert observe.memory(17, listed, tmp_path) == criu_seen.Memory(None, 5)
    assert observe.memory(18, listed, tmp_path) is None


@pytest.fixture
def bound(tmp_path: Path) -> Iterator[Path]:
    """The folder of a socket of this process, which was bound to the name `first`."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "first"))
        yield tmp_path


def renamed() -> list[RenamedSocket]:
    """Return what is found of the sockets of this process."""
    return socket_names.renamed(os.getpid(), seen_of(this_process()))


def test_a_socket_that_was_renamed_is_found_by_its_file_while_that_is_there(bound: Path) -> None:
    assert renamed() == []
    (bound / "first").rename(bound / "second")
    (bound / "first").touch()
    assert renamed() == [RenamedSocket(path=str(bound / "first"), name="second")]
    (bound / "second").unlink()
    assert renamed() == []


def test_a_restored_socket_gets_the_name_that_it_had_and_no_other_file_does(bound: Path) -> None:
    (bound / "file").touch()
    names = [("/first", "second"), ("/file", "another")]
    with opened(open_root(bound)) as root:
        socket_names.rename(root, [RenamedSocket(path=path, name=name) for path, name in names])
    assert stat.S_ISSOCK((bound / "second").stat().st_mode)
    assert {each.name for each in bound.iterdir()} == {"second", "file"}


def test_no_link_leads_out_of_a_container(
    bound: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root_folder = tmp_path_factory.mktemp("root")
    (root_folder / "tmp").symlink_to(bound)
    with opened(open_root(root_folder)) as root, pytest.raises(SnapbackError, match="tmp"):
        socket_names.rename(root, [RenamedSocket(path="/tmp/first", name="second")])
    assert (bound / "first").exists()
