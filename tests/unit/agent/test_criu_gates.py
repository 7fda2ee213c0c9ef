"""What keeps CRIU from a worker or a placeholder, with the values that decided it."""

import os
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from snapshot_agent.domain.criu_gates import (
    Disk,
    Dumping,
    OnDevices,
    check_dump,
    check_restore,
    read_source,
)
from snapshot_agent.domain.criu_seen import (
    Descriptor,
    MappedFile,
    Memory,
    SeenNode,
    SeenProcess,
    SeenTree,
    UnixSocket,
    estimate,
    extensions,
    resident,
    used_mounts,
    volumes_to_capture,
)
from snapshot_agent.domain.criu_source import (
    Archive,
    Credentials,
    SourceCuda,
    SourceFacts,
    SourceGpu,
    SourceMount,
    SourceThread,
    credentials_of,
)
from snapshot_agent.domain.mounts import Mount
from snapshot_agent.helper import dumping
from snapshot_shared.codec import encode_json
from snapshot_shared.errors import (
    ArtifactCorrupt,
    ArtifactMissing,
    Incompatible,
    NotEligible,
    SnapbackError,
)
from tests.unit.tables import each

MIB = 1024 * 1024
SYS_ADMIN, SYS_RESOURCE, NET_RAW = 1 << 21, 1 << 24, 1 << 13
DAC_OVERRIDE = 1 << 1
SETGID, SETUID = 1 << 6, 1 << 7
OWN = {"user": 3, "pid": 20, "net": 21}


def mount(number: int, path: str, fs_type: str = "ext4", **more: Any) -> Mount:
    options = {"root": f"/volumes/{number}", "options": ["rw"], "super_options": ["rw"], **more}
    return Mount(
        id=number, parent=1, device=f"0:{number}", path=path, fs_type=fs_type, source="x", **options
    )


MOUNTS = [
    mount(1, "/", "overlay", root="/"),
    mount(2, "/proc", "proc", root="/"),
    mount(3, "/dev", "tmpfs", root="/"),
    mount(4, "/dev/shm", "tmpfs", root="/"),
    mount(5, "/data"),
    mount(6, "/model", options=["ro", "relatime"]),
    mount(7, "/remote", "nfs4"),
    mount(8, "/etc/hosts"),
    mount(9, "/control"),
    mount(10, "/disk", root="/"),
    mount(11, "/scratch", "tmpfs", root="/"),
]
ROOT = SeenProcess(
    pid=100,
    start=7,
    pids=(100, 1),
    exe="/usr/bin/python3",
    bounding=NET_RAW,
    session=100,
    private=64 * MIB,
    share=64 * MIB,
    descriptors=(
        Descriptor(0, "/dev/null", "device", number_of_device="1:3", mount=3),
        Descriptor(1, "pipe:[31]", "pipe", inode=31),
    ),
    namespaces=OWN,
)
CHILD = ROOT._replace(pid=101, pids=(101, 5), share=MIB)
TREE = SeenTree(processes=(ROOT, CHILD), mounts=MOUNTS, upper="/upper")
NODE = SeenNode(
    criu=(4, 2, 1),
    kernel=(6, 18, 44),
    capabilities=SYS_ADMIN | SYS_RESOURCE | NET_RAW | SETGID | SETUID,
    user=3,
    pid=1,
    net=2,
)


def with_root(**fields: Any) -> SeenTree:
    return TREE._replace(processes=(ROOT._replace(**fields), CHILD))


def with_child(**fields: Any) -> SeenTree:
    return TREE._replace(processes=(ROOT, CHILD._replace(**fields)))


def opened(link: str, kind: str = "file", **fields: Any) -> SeenTree:
    return with_root(descriptors=(Descriptor(9, link, kind, **fields),))


def mapped(path: str) -> SeenTree:
    return with_root(mapped=(MappedFile(path),))


def dump_error(seen: SeenTree, node: SeenNode = NODE, **more: Any) -> SnapbackError | None:
    given = {
        "captured": (),
        "quiet": False,
        "disk": Disk("/artifacts", 1 << 40),
        "ours": ("/control",),
        **more,
    }
    return raised(check_dump, Dumping(seen, node, **given))


def raised(check: Callable[..., None], *seen: Any) -> SnapbackError | None:
    try:
        check(*seen)
    except SnapbackError as error:
        return error
    return None


def test_a_plain_process_may_be_on_the_network_of_its_node() -> None:
    seen = with_root(namespaces={**OWN, "net": NODE.net})
    assert dump_error(seen) is not None
    assert dump_error(seen, plain=True) is None


@each(
    ("node", "words"),
    [
        (NODE._replace(criu=None), ("cannot be started", "4.2")),
        (NODE._replace(criu=(4, 1, 1)), ("4.1.1", "6.18.44", "4.2")),
        (NODE._replace(criu=(3, 19), kernel=(6, 1, 0)), ("3.19", "6.1.0", "4.0")),
        (NODE._replace(criu=(4, 1, 1), kernel=(6, 15, 9)), ()),
        (NODE._replace(criu=(4, 0), kernel=(6, 1, 0)), ()),
        (NODE._replace(criu=(10, 0)), ()),
        (NODE._replace(capabilities=SYS_RESOURCE), ("CAP_NET_RAW",)),
    ],
)
def test_a_dump_needs_a_node_with_criu_for_its_kernel_and_the_workers_capabilities(
    node: SeenNode, words: tuple[str, ...]
) -> None:
    refused(dump_error(TREE, node), words)


def refused(
    error: SnapbackError | None, words: tuple[str, ...], reason: str = "NotEligible"
) -> None:
    """Require the error that has all words, or none without words."""
    if not words:
        assert error is None, error
        return
    assert error is not None
    assert (error.reason, [word for word in words if word not in error.message]) == (reason, [])
    assert error.next_step


@each(
    ("seen", "words"),
    [
        (with_root(namespaces={**OWN, "pid": 1}), ("100", "node's")),
        (with_root(namespaces={**OWN, "user": 4}), ("100", "user namespace 4", "3")),
        (with_root(pids=(100, 7)), ("pid 7", "pid 1")),
        (with_root(pids=(100, 22, 1)), ()),
        (with_root(namespaces={**OWN, "net": 2}), ("100", "network namespace 2")),
        (with_child(bounding=SYS_ADMIN | 1 << 45), ("CAP_45",)),
        (with_child(permitted=1), ("CAP_CHOWN",)),
        (with_root(tty=34816), ("100", "34816")),
        (opened("/dev/pts/0", "tty"), ("/dev/pts/0",)),
        (opened("anon_inode:[io_uring]", "anon:[io_uring]"), ("100", "[io_uring]")),
        (opened("anon_inode:[eventpoll]", "anon:[eventpoll]"), ()),
        (mapped("anon_inode:[io_uring]"), ("[io_uring]",)),
        (opened("/dev/nvidia0", "device", number_of_device="195:0"), ("/dev/nvidia0", "open")),
        (opened("/dev/dri/card0", "device", number_of_device="226:0"), ("/dev/dri/card0",)),
        (opened("/dev/urandom", "device", number_of_device="1:9"), ()),
        (opened("/other/name", "device", number_of_device="10:229"), ("/other/name",)),
        (mapped("/dev/nvidiactl"), ("/dev/nvidiactl", "mapped")),
        (mapped("/dmabuf:x"), ("/dmabuf:x",)),
        (mapped("/dev/zero"), ()),
        (mapped("/dev/shm/ring"), ()),
    ],
)
def test_a_dump_is_refused_for_what_criu_cannot_dump_or_give_back(
    seen: SeenTree, words: tuple[str, ...]
) -> None:
    refused(dump_error(seen), words)


@pytest.mark.parametrize(
    ("link", "fields", "words"),
    [
        ("/tmp/a (deleted)", {}, ("100", "/tmp/a ", "another name")),
        ("/tmp/a", {"deleted": True}, ()),
        ("/tmp/a", {}, ()),
    ],
)
def test_a_plain_worker_has_no_file_that_was_removed_and_has_another_name(
    link: str, fields: dict[str, Any], words: tuple[str, ...]
) -> None:
    seen = opened(link, mount=1, **fields)
    refused(dump_error(seen, plain=True), words)


def test_the_refusal_of_io_uring_names_the_profile_of_the_pod_and_the_fix() -> None:
    seen = opened("anon_inode:[io_uring]", "anon:[io_uring]")
    found = dump_error(seen, seccomp_profile="Localhost/profiles/own.json")
    refused(found, ("process 100", "Localhost/profiles/own.json", "allows io_uring_setup"))
    assert found is not None
    assert "localhostProfile: profiles/block-iouring.json" in found.next_step


@pytest.mark.parametrize(
    ("node", "words"),
    [
        (NODE, ()),
        (NODE._replace(capabilities=NODE.capabilities & ~SYS_ADMIN), ("lacks CAP_SYS_ADMIN",)),
        (NODE._replace(seccomp=2), ("process 101", "filter of its own")),
    ],
)
def test_a_worker_with_a_filter_needs_a_helper_that_may_suspend_it(
    node: SeenNode, words: tuple[str, ...]
) -> None:
    refused(dump_error(with_child(seccomp=2, permitted=0), node), words)
    assert dump_error(TREE, node) is None


@pytest.mark.parametrize("ids", [{"uids": (0, 1000, 0)}, {"gids": (0, 0, 5)}])
def test_a_worker_of_another_user_needs_sys_resource(ids: dict[str, Any]) -> None:
    assert dump_error(with_child(**ids)) is None
    without = NODE._replace(capabilities=NODE.capabilities & ~SYS_RESOURCE)
    refused(dump_error(with_child(**ids), without), ("process 101", "CAP_SYS_RESOURCE"))
    assert dump_error(TREE, without) is None


def test_a_terminal_that_the_worker_has_made_itself_is_no_hindrance() -> None:
    makes = ROOT._replace(
        descriptors=(Descriptor(3, "/dev/ptmx", "device", number_of_device="5:2", mount=3),)
    )
    shell = CHILD._replace(
        tty=34816, session=101, descriptors=(Descriptor(0, "/dev/pts/0", "tty"),)
    )
    assert dump_error(TREE._replace(processes=(makes, shell))) is None
    refused(dump_error(TREE._replace(processes=(makes._replace(tty=34816), shell))), ("terminal",))


def test_the_driver_with_cuda_takes_nvidias_devices_and_no_others() -> None:
    for nvidia in (
        opened("/dev/nvidia0", "device", number_of_device="195:0"),
        mapped("/dev/nvidia-uvm"),
    ):
        assert dump_error(nvidia, cuda=OnDevices()) is None
        # A process that is checkpointed has given its devices back.
        refused(dump_error(nvidia, cuda=OnDevices(checkpointed=True)), ("nvidia", "criu+cuda"))
    card = opened("/dev/dri/card0", "device", number_of_device="226:0")
    refused(dump_error(card, cuda=OnDevices()), ("/dev/dri/card0", "criu+cuda"))


def test_what_is_on_devices_has_to_fit_into_the_memory_of_the_container() -> None:
    needed = int((resident(TREE) + 2048 * MIB) * 1.1)
    for limit, fits in ((None, True), (needed, True), (needed - 1, False)):
        seen = TREE._replace(memory=Memory(limit, 64 * MIB))
        error = dump_error(seen, cuda=OnDevices(2048 * MIB))
        if fits:
            assert error is None
        else:
            refused(error, (str(needed), str(limit)))
        # None of it comes into a worker that CRIU dumps alone, nor once more.
        assert dump_error(seen) is None
        assert dump_error(seen, cuda=OnDevices(checkpointed=True)) is None


def socket(inode: int) -> Descriptor:
    return Descriptor(7, f"socket:[{inode}]", "socket", inode=inode)


@each(
    ("sockets", "words"),
    [
        ([UnixSocket(50, 1, 1, 51, ""), UnixSocket(51, 1, 1, 50, "")], ()),
        ([UnixSocket(50, 1, 10, 0, "/listens")], ()),
        ([UnixSocket(50, 5, 1, 60, ""), UnixSocket(60, 5, 1, 50, "/gms/lease")], ("/gms/lease",)),
        ([UnixSocket(50, 1, 1, 60, "/mine")], ("/mine", "50", "60")),
        ([UnixSocket(50, 1, 1, 60, "")], ("without a name",)),
    ],
)
def test_a_quiet_worker_is_connected_to_nothing_outside(
    sockets: list[UnixSocket], words: tuple[str, ...]
) -> None:
    processes = (
        ROOT._replace(descriptors=(socket(50),)),
        CHILD._replace(descriptors=(socket(51),)),
    )
    seen = TREE._replace(processes=processes, sockets=sockets)
    refused(dump_error(seen, quiet=True), words)
    assert dump_error(seen, quiet=False) is None


@each(
    ("seen", "words", "volume"),
    [
        (TREE, (), ""),
        (opened("/var/log/x", mount=1, writes=True), (), ""),
        (opened("/data/x", mount=5), ("/data/x", "mount /data", "ext4"), "/data"),
        (opened("/data/x", mount=5, writes=True), ("/data/x",), "/data"),
        (opened("/data", "folder", mount=5), (), ""),
        (opened("/data/below", "folder", mount=5), ("/data/below",), "/data"),
        (opened("/model/x", mount=6), (), ""),
        (opened("/remote/x", mount=7), ("/remote/x", "nfs4"), ""),
        (opened("/etc/hosts", mount=8), ("/etc/hosts",), ""),
        (opened("/control/x", mount=9), (), ""),
        (opened("/disk/x", mount=10), ("/disk/x",), ""),
        (opened("/proc/self/maps", mount=2), (), ""),
        (opened("/dev/other/x", mount=3), (), ""),
        (opened("/dev/shm/x", mount=4, writes=True), (), ""),
        (opened("/from/outside", mount=77), ("/from/outside", "no mount"), ""),
        (opened("/memfd:x", "memfd", mount=78), (), ""),
        (mapped("/data/weights"), ("/data/weights",), "/data"),
        (mapped("/model/weights"), (), ""),
        (with_root(cwd="/data"), (), ""),
        (with_root(cwd="/data/below"), ("/data/below",), "/data"),
        (with_child(cwd="/scratch/a/b"), ("/scratch/a/b",), "/scratch"),
    ],
)
def test_open_files_are_on_mounts_that_are_there_again_or_in_volumes_that_are_captured(
    seen: SeenTree, words: tuple[str, ...], volume: str
) -> None:
    """Shared memory is always captured."""
    refused(dump_error(seen), words)
    found = volumes_to_capture(seen, ours=["/control"])
    assert {each.path for each in found} == {"/dev/shm", volume} - {""}
    if volume:
        assert dump_error(seen, captured=[volume]) is None


@each(
    ("root", "words"),
    [
        (mount(1, "/", "overlay", root="/"), ("type overlay", "no folder of its own")),
        (mount(1, "/", root="/snapshots/5"), ("type ext4", "no folder of its own")),
        (mount(1, "/", root="/snapshots/5", options=["ro", "relatime"]), ()),
    ],
)
def test_a_root_that_is_written_to_needs_an_upper_folder(
    root: Mount, words: tuple[str, ...]
) -> None:
    seen = TREE._replace(mounts=[root, *MOUNTS[1:]], upper=None)
    refused(dump_error(seen), words)
    assert dump_error(seen, plain=True) is None


def test_a_dump_needs_room_for_forked_heaps_shared_memory_once_and_what_is_on_devices() -> None:
    ring = MappedFile("/dev/zero", inode=4, device="0:1", deleted=True, bytes=10 * MIB)
    memory = Descriptor(5, "/memfd:x", "memfd", inode=4, device="0:1", bytes=10 * MIB)
    processes = (
        ROOT._replace(mapped=(ring,), descriptors=(memory,)),
        CHILD._replace(mapped=(ring,)),
    )
    seen = TREE._replace(processes=processes)
    assert estimate(seen) == (64 + 64 + 10) * MIB
    assert resident(seen) == (64 + 1 + 10) * MIB
    for more in (0, 1024 * MIB):
        needed, cuda = int((estimate(seen) + more) * 1.1), OnDevices(more) if more else None
        assert dump_error(seen, cuda=cuda, disk=Disk("/artifacts", needed)) is None
        error = dump_error(seen, cuda=cuda, disk=Disk("/artifacts", needed - 1))
        refused(error, (str(needed), str(needed - 1)), "NoSpace")


LISTENING = [
    UnixSocket(8, 1, 10, 0, path="/data/own"),
    UnixSocket(9, 1, 10, 0, path="/scratch/of-others"),
]


@pytest.mark.parametrize(
    ("seen", "used"),
    [
        (TREE, set()),
        (opened("/data/a", mount=5), {"/data"}),
        (opened("/dev/full", "device", mount=10), {"/disk"}),
        (mapped("/model/weights"), {"/model"}),
        (with_child(cwd="/scratch/deep"), {"/scratch"}),
        (opened("socket:[8]", "socket", inode=8)._replace(sockets=LISTENING), {"/data"}),
        (opened("anon_inode:inotify", "anon:inotify"), set()),
        (opened("anon_inode:inotify", "anon:inotify", watched=("0:5",)), {"/data"}),
        (opened("anon_inode:[fanotify]", "anon:[fanotify]"), {each.path for each in MOUNTS}),
    ],
)
def test_a_process_uses_the_mounts_of_its_files_folders_and_sockets(
    seen: SeenTree, used: set[str]
) -> None:
    always = {"/", "/dev", "/dev/shm"}
    assert used_mounts(seen) | always == used | always


def source_mount(path: str, fs_type: str = "ext4", *, is_needed: bool = True) -> SourceMount:
    return SourceMount(path=path, fs_type=fs_type, is_needed=is_needed)


SOURCE = SourceFacts(
    criu=(4, 2, 1),
    kernel=(6, 16, 3),
    host="llm-0",
    addresses=["10.1.2.3", "fd00::2"],
    mounts=[
        source_mount("/", "overlay"),
        source_mount("/proc", "proc"),
        source_mount("/proc/bus", "proc"),
        source_mount("/data"),
    ],
    resident=100 * MIB,
    capabilities=NET_RAW,
    stdio=["/dev/null", "pipe:[31]", "pipe:[32]"],
    net=4026532254,
    archives=[Archive(name="upper.tar", path="/", is_upper=True)],
)
PLACEHOLDER = SeenTree(
    processes=(ROOT._replace(exe="/snapback/snapback-init"),),
    mounts=[*MOUNTS, mount(12, "/snapback")],
    memory=Memory(limit=128 * MIB, used=MIB),
)


def waiting(**fields: Any) -> dict[str, Any]:
    return {"processes": (PLACEHOLDER.root._replace(**fields),)}


@each(
    ("source", "target", "node", "words"),
    [
        ({}, {}, {}, ()),
        ({}, {"memory": None}, {}, ()),
        ({}, {"memory": Memory(None, 0)}, {}, ()),
        ({"criu": (4, 3)}, {}, {}, ("4.3", "4.2.1")),
        ({"criu": (4, 2, 9)}, {}, {}, ()),
        ({}, {}, {"criu": None}, ("cannot be started",)),
        ({}, {}, {"criu": (4, 1)}, ("4.1", "6.18.44")),
        ({"kernel": (6, 19)}, {}, {}, ("6.19", "6.18.44")),
        ({"kernel": (6, 18, 99)}, {}, {}, ()),
        ({"processor": ["avx2", "sse2"]}, {}, {"processor": ("avx2", "fma", "sse2")}, ()),
        ({"processor": ["avx512f"]}, {}, {"processor": ("avx2",)}, ("avx512f", "processor")),
        ({}, {}, {"capabilities": SYS_ADMIN}, ("CAP_NET_RAW", "helper")),
        ({"capabilities": SYS_ADMIN}, {}, {}, ("CAP_SYS_ADMIN", "container")),
        ({"mounts": [source_mount("/lost")]}, {}, {}, ("/lost", "/snapback")),
        ({"mounts": [source_mount("/lost", is_needed=False)]}, {}, {}, ()),
        (
            {"mounts": [source_mount("/etc", is_needed=False), source_mount("/etc/hosts")]},
            {},
            {},
            ("lacks: /etc;",),
        ),
        # What the target has below a mount that is gone was no more needed than that.
        (
            {
                "mounts": [
                    source_mount("/etc", is_needed=False),
                    source_mount("/etc/hosts", is_needed=False),
                    source_mount("/"),
                ]
            },
            {},
            {},
            (),
        ),
        ({"mounts": [source_mount("/x+", "fuse.Foo+1.App Image", is_needed=False)]}, {}, {}, ()),
        ({"processor": ["sse2", "user_shstk", "xsaves"]}, {}, {"processor": ("sse2",)}, ()),
        ({}, {"memory": Memory(100 * MIB, 0)}, {}, (str(110 * MIB), str(100 * MIB))),
        ({}, waiting(namespaces={**OWN, "user": 4}), {}, ("100", "user namespace 4", "3")),
    ],
)
def test_a_restore_is_refused_where_the_worker_could_not_go_on(
    source: dict[str, Any], target: dict[str, Any], node: dict[str, Any], words: tuple[str, ...]
) -> None:
    seen = replace(SOURCE, **source), PLACEHOLDER._replace(**target), NODE._replace(**node)
    refused(raised(check_restore, *seen), words, "Incompatible")


UNCONFINED = Credentials(uids=(0, 0, 0), gids=(0, 0, 0), seccomp=0, no_new_privs=False)
OF_A_USER: dict[str, Any] = {"uids": (1000, 1000, 1000), "gids": (2000, 2000, 2000)}
CONFINED = Credentials(**OF_A_USER, seccomp=2, no_new_privs=True)
IN_TWO_GROUPS = replace(CONFINED, gids=(2000, 3000))
WITH_NET_RAW = replace(CONFINED, permitted=NET_RAW)
LIMITED_TO_NET_RAW = {**OF_A_USER, "no_new_privs": True, "permitted": NET_RAW}


@each(
    ("source", "target", "words"),
    [
        (UNCONFINED, {}, ()),
        (CONFINED, {**OF_A_USER, "seccomp": 2, "no_new_privs": True}, ()),
        # It has less than the container allows.
        (CONFINED, OF_A_USER, ()),
        (UNCONFINED, {"seccomp": 1}, ()),
        (UNCONFINED, {"seccomp": 2}, ("seccomp", "mode 0", "mode 2")),
        (replace(UNCONFINED, seccomp=1), {"seccomp": 2}, ("seccomp", "mode 1", "mode 2")),
        (UNCONFINED, {"no_new_privs": True}, ("NoNewPrivs 0", "NoNewPrivs 1")),
        (UNCONFINED, {"uids": (1000, 1000, 1000)}, ("user 0", "user 1000")),
        (UNCONFINED, {"gids": (2000, 2000, 2000)}, ("group 0", "group 2000")),
        (replace(UNCONFINED, uids=(7, 7, 0)), {"uids": (7, 7, 7)}, ("user 0", "user 7")),
        (IN_TWO_GROUPS, {**OF_A_USER, "groups": (3000, 4000)}, ()),
        (IN_TWO_GROUPS, {**OF_A_USER, "groups": (4000,)}, ("group 3000", "group 2000, 4000")),
        (IN_TWO_GROUPS, {**OF_A_USER, "permitted": SETGID}, ()),
        (
            replace(CONFINED, permitted=NET_RAW | DAC_OVERRIDE),
            LIMITED_TO_NET_RAW,
            ("CAP_DAC_OVERRIDE", "NoNewPrivs"),
        ),
        (WITH_NET_RAW, LIMITED_TO_NET_RAW, ()),
        # It could gain them by a program of root that has the bit for that.
        (WITH_NET_RAW, OF_A_USER, ()),
        # Such as one of root whose program has become another user.
        (CONFINED, {"permitted": SETUID | SETGID}, ()),
        (CONFINED, {"permitted": SETGID}, ("user 1000", "user 0")),
        (CONFINED, {"permitted": SETUID}, ("group 2000", "group 0")),
        # An artifact of before.
        (None, {**OF_A_USER, "seccomp": 2, "no_new_privs": True}, ()),
    ],
)
def test_a_restore_gives_no_process_more_than_its_container_has(
    source: Credentials | None, target: dict[str, Any], words: tuple[str, ...]
) -> None:
    container = PLACEHOLDER._replace(**waiting(**target))
    error = raised(check_restore, replace(SOURCE, credentials=source), container, NODE)
    refused(error, words, "Incompatible")


def test_the_credentials_of_a_worker_are_those_of_all_its_processes() -> None:
    root = {"uids": (0, 0, 0, 1), "gids": (0, 0, 0, 2), "groups": (0, 10), "permitted": NET_RAW}
    child = {"uids": (7, 7, 8, 7), "gids": (9, 9, 9, 9), "groups": (3000,), "permitted": SETUID}
    confined = {"seccomp": 2, "no_new_privs": True}
    seen = TREE._replace(
        processes=(ROOT._replace(**root, **confined), CHILD._replace(**child, seccomp=1))
    )
    assert credentials_of(seen) == Credentials(
        uids=(0, 1, 7, 8),
        gids=(0, 2, 9, 10, 3000),
        seccomp=1,
        no_new_privs=False,
        permitted=NET_RAW | SETUID,
    )


@pytest.mark.parametrize(
    "processes", [(ROOT,), (*PLACEHOLDER.processes, CHILD)], ids=["another program", "restored"]
)
def test_a_restore_needs_an_init_that_waits_alone(processes: tuple[SeenProcess, ...]) -> None:
    error = raised(check_restore, SOURCE, PLACEHOLDER._replace(processes=processes), NODE)
    refused(error, ("snapback-init",))


def test_the_facts_of_a_source_can_be_read_again() -> None:
    gpus = [SourceGpu(uuid="GPU-10000000-0000-4000-8000-000000000001", product="NVIDIA H100")]
    on_cuda = replace(SOURCE, cuda=SourceCuda(processes=2, driver=(575, 57, 8), gpus=gpus))
    for source in (SOURCE, on_cuda, replace(SOURCE, credentials=CONFINED)):
        assert read_source(encode_json(source)) == source
    # Nor has what was dumped before the record had them.
    assert b"credentials" not in encode_json(SOURCE)
    # Helpers that know nothing of CUDA read what was dumped without.
    assert b"cuda" not in encode_json(SOURCE)


def source_with(**fields: Any) -> bytes:
    return encode_json({**msgspec.to_builtins(SOURCE), **fields})


def credentials(**fields: Any) -> dict[str, Any]:
    return {"credentials": {**msgspec.to_builtins(CONFINED), **fields}}


@each(
    "field",
    [
        {"mounts": [{"path": "/a/../b", "fs_type": "ext4"}]},
        {"mounts": [{"path": "/..", "fs_type": "ext4"}]},
        {"mounts": [{"path": "data", "fs_type": "ext4"}]},
        {"mounts": [{"path": "/a\n", "fs_type": "ext4"}]},
        {"mounts": [{"path": "/" + "a" * 4096, "fs_type": "ext4"}]},
        {"mounts": [{"path": "/a", "fs_type": "a\nb"}]},
        {"mounts": []},
        {"archives": [{"name": "../x", "path": "/"}]},
        {"archives": [{"name": "x", "path": "/data/.."}]},
        {"host": "a/b"},
        {"host": ""},
        {"addresses": ["10.0.0.1; x"]},
        {"criu": [4]},
        {"kernel": [6, -1]},
        {"resident": -1},
        {"capabilities": 2**64},
        credentials(uids=[]),
        credentials(gids=[0, 0, -1]),
        credentials(seccomp=3),
        credentials(permitted=-1),
        {"stdio": ["/dev/null"]},
        {"stdio": ["a", "b", "c\x00"]},
        {"net": 0},
        {"processor": ["a b"]},
        *(b"", b"{", b"[]", b'"unknown field"', b"{}"),
    ],
)
def test_facts_that_no_dump_has_written_are_refused(field: dict[str, Any] | bytes) -> None:
    data = field if isinstance(field, bytes) else source_with(**field)
    with pytest.raises(ArtifactCorrupt, match=r"criu\.json"):
        read_source(data)


@each(
    "field",
    [{"other": 1}, {"archives": [{"name": "x", "path": "/", "mode": 1}]}, credentials(label="x")],
)
def test_facts_of_a_later_version_need_a_later_helper(field: dict[str, Any]) -> None:
    with pytest.raises(Incompatible, match="unknown field") as caught:
        read_source(source_with(**field))
    assert "update the helper" in caught.value.next_step


def test_credentials_without_what_was_added_to_them_can_be_read() -> None:
    found = msgspec.to_builtins(CONFINED)
    del found["permitted"]
    assert read_source(source_with(credentials=found)).credentials == CONFINED


@pytest.mark.parametrize(
    ("cpuinfo", "found"),
    [
        (
            "flags\t\t: fpu vme lahf_lm avx512f sha_ni md_clear ibrs xsaves\n\nflags\t: fpu\n",
            ["avx512f", "fpu", "lahf_lm", "sha_ni", "xsaves"],
        ),
        ("processor : 0\nFeatures : fp asimd sve2\n", ["asimd", "fp", "sve2"]),
        ("processor : 0\n", []),
    ],
    ids=["x86-64", "arm64", "unknown"],
)
def test_a_processor_has_the_instructions_that_a_process_may_use(
    cpuinfo: str, found: list[str]
) -> None:
    assert extensions(cpuinfo) == found


def test_a_record_that_no_restore_would_read_fails_its_dump() -> None:
    # An interleaved half of 224 CPUs, as numactl gives it to the threads of an engine.
    cpus = ",".join(map(str, range(0, 224, 2)))
    threads = [SourceThread(tid=number + 1, cpus=cpus) for number in range(2000)]
    assert read_source(dumping.recorded(replace(SOURCE, threads=threads))).threads == threads
    with pytest.raises(NotEligible, match=r"cannot be recorded: criu\.json: .*4096"):
        dumping.recorded(replace(SOURCE, mounts=[source_mount("/a")] * 4097))


def test_a_plain_worker_of_a_host_without_a_file_of_its_name_has_that_of_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(*_: object) -> bytes:
        raise ArtifactMissing("hostname does not exist")

    assert dumping.host_name(os.getpid())
    monkeypatch.setattr(dumping, "read_bounded", missing)
    assert dumping.host_name(os.getpid()) == os.uname().nodename
