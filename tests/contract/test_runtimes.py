"""What container runtimes show of a pod, and what is made of it: its containers, files, cgroups.

The facts are of the sources that are named beside them. A node has one runtime, and none is asked.
"""

from __future__ import annotations

import itertools
import os.path
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from snapshot_agent.domain import criu_seen, kubelet
from snapshot_agent.domain.criu_seen import Descriptor, Memory, SeenTree
from snapshot_agent.domain.mounts import Mount, mounts_in, upper_of
from snapshot_agent.helper import observe
from tests.unit.tables import each

MIB = 1024 * 1024
UID = "94598a35-ad1e-4a00-91b1-1db37e8f52f6"
OTHER = "22fd933a-ee61-46bd-93ae-ebace73c1160"
MAIN, SIDE, PAUSE, ELSEWHERE = (digit * 64 for digit in "abcd")
MAIN_PID = 100

# Folders of pods: pkg/kubelet/cm/pod_container_manager_linux.go and cgroup_manager_linux.go of
# kubernetes. Folders of containers: pkg/cri/server/helpers_linux.go of containerd 1.6 and 1.7,
# internal/cri/server/helpers_linux.go of 2.x, internal/config/cgmgr of CRI-O. libcontainer makes
# one folder of `<slice>:<prefix>:<id>` where it does not use systemd. crun runs what CRI-O
# starts in a cgroup of its own, and conmon may be in that of the pod (conmon_cgroup = "pod").
BURSTABLE = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{unit}.slice"
GUARANTEED = "/kubepods.slice/kubepods-pod{unit}.slice"
BELOW_A_ROOT = "/a.slice/a-kubepods.slice/a-kubepods-pod{unit}.slice"
CGROUPS = {
    "containerd, cgroupfs": "/kubepods/burstable/pod{uid}/{id}",
    "containerd, cgroupfs, guaranteed": "/kubepods/pod{uid}/{id}",
    "containerd, systemd": f"{BURSTABLE}/cri-containerd-{{id}}.scope",
    "containerd, systemd, guaranteed": f"{GUARANTEED}/cri-containerd-{{id}}.scope",
    "containerd, systemd, below a root": f"{BELOW_A_ROOT}/cri-containerd-{{id}}.scope",
    "containerd, cgroupfs with a kubelet that uses systemd": (
        "/system.slice/kubepods-burstable-pod{unit}.slice:cri-containerd:{id}"
    ),
    "CRI-O, cgroupfs": "/kubepods/burstable/pod{uid}/crio-{id}",
    "CRI-O, systemd": f"{BURSTABLE}/crio-{{id}}.scope",
    "CRI-O, systemd, crun": f"{BURSTABLE}/crio-{{id}}.scope/container",
}
CONTROLLERS = (
    *("name=systemd", "rdma", "pids", "hugetlb", "net_cls,net_prio", "perf_event", "memory"),
    *("blkio", "freezer", "devices", "cpuset", "cpu,cpuacct"),
)


def path_of(form: str, uid: str, container: str) -> str:
    return form.format(uid=uid, unit=uid.replace("-", "_"), id=container)


def version_2(path: str) -> str:
    return f"0::{path}\n"


def version_1(path: str) -> str:
    return "".join(f"{12 - n}:{name}:{path}\n" for n, name in enumerate(CONTROLLERS))


def hybrid(path: str) -> str:
    """Return what older versions of runc make: they leave version 2 as the runtime has it."""
    return version_1(path) + "0::/system.slice/containerd.service\n"


Hierarchy = Callable[[str], str]
HIERARCHIES: tuple[Hierarchy, ...] = (version_2, version_1, hybrid)


def seen_from(own: str, path: str) -> str:
    """Return a path as a process sees it that has a cgroup namespace with the root `own`."""
    return f"/{os.path.relpath(path, own)}" if own != "/" else path


POD = f"/pods/{UID}"
EMPTY_DIRS = f"{POD}/volumes/kubernetes.io~empty-dir"
# Made from the sources of the runtimes; the paths are those of nodes with containerd 1.7 and 2.4.
KUBELETS = f"""
2101 2100 0:95 / /proc rw,nosuid,nodev,noexec,relatime - proc proc rw
2102 2100 0:96 / /dev rw,nosuid - tmpfs tmpfs rw,size=65536k,mode=755
2103 2102 0:97 / /dev/pts rw,nosuid,noexec,relatime - devpts devpts rw,gid=5,mode=620,ptmxmode=666
2104 2102 0:90 / /dev/mqueue rw,nosuid,nodev,noexec,relatime - mqueue mqueue rw
2105 2100 0:92 / /sys ro,nosuid,nodev,noexec,relatime - sysfs sysfs ro
2106 2105 0:29 /../../pod /sys/fs/cgroup ro,nosuid,nodev,noexec,relatime - cgroup2 cgroup rw
2107 2100 {{disk}}{EMPTY_DIRS}/data /data rw,relatime - ext4 /dev/a rw
2108 2100 {{disk}}{EMPTY_DIRS}/snapshot-control/main /control rw - ext4 /dev/a rw
2109 2100 {{disk}}{EMPTY_DIRS}/gms-sockets /gms rw - ext4 /dev/a rw
2110 2100 {{disk}}{POD}/etc-hosts /etc/hosts rw,relatime - ext4 /dev/a rw
2111 2102 {{disk}}{POD}/containers/main/1f0c8a2b /dev/termination-log rw,relatime - ext4 /dev/a rw
2112 2100 0:70 / /run/secrets/kubernetes.io/serviceaccount ro,relatime - tmpfs tmpfs rw,size=65536k
2113 2101 0:95 /bus /proc/bus ro,nosuid,nodev,noexec,relatime - proc proc rw
2114 2101 0:98 / /proc/acpi ro,relatime - tmpfs tmpfs ro
""".lstrip()
CRI = "/var/lib/containerd/io.containerd.grpc.v1.cri/sandboxes/s"
CONTAINERDS = f"""
2115 2100 259:1 {CRI}/hostname /etc/hostname rw,relatime - ext4 /dev/a rw
2116 2100 259:1 {CRI}/resolv.conf /etc/resolv.conf rw,relatime - ext4 /dev/a rw
2117 2102 0:80 / /dev/shm rw,nosuid,nodev,noexec,relatime - tmpfs shm rw,size=65536k
""".lstrip()
# server/container_create.go and internal/factory/container of CRI-O, pkg/subscriptions of
# containers/common. With SELinux, each file system of a container has a context.
USERDATA = "/containers/storage/overlay-containers/s/userdata"
CONTEXT = 'context="system_u:object_r:container_file_t:s0:c98,c684"'
CRIOS = f"""
2115 2100 0:25 {USERDATA}/hostname /etc/hostname rw,nosuid,nodev - tmpfs tmpfs rw,seclabel,mode=755
2116 2100 0:25 {USERDATA}/resolv.conf /etc/resolv.conf rw,nosuid,nodev - tmpfs tmpfs rw,seclabel
2117 2102 0:80 / /dev/shm rw,nosuid,nodev,noexec,relatime - tmpfs shm rw,{CONTEXT},size=65536k
2118 2100 0:25 {USERDATA}/.containerenv /run/.containerenv rw,nosuid,nodev - tmpfs tmpfs rw,seclabel
2119 2100 0:25 {USERDATA}/run/secrets /run/secrets rw,nosuid,nodev - tmpfs tmpfs rw,seclabel
""".lstrip()


class Root(NamedTuple):
    """The root of a container in mountinfo, what its runtime mounts besides, its upper folder."""

    line: str
    runtimes: str
    upper: str | None
    on_node: str = ""


SNAPSHOTS = "/var/lib/containerd/io.containerd.snapshotter.v1.overlayfs/snapshots"
STORAGE = "/var/lib/containers/storage/overlay"
LAYER = "5d57db59db9567665efd0e17756445580b53be42396198b35a94f10ff30416be"
OVERLAY = "2100 1990 0:94 / / rw,relatime master:412 - overlay overlay rw,"
ROOTS = {
    # plugins/snapshots/overlay (2.x) and snapshots/overlay (1.x) of containerd.
    "containerd": Root(
        f"{OVERLAY}lowerdir={SNAPSHOTS}/12/fs:{SNAPSHOTS}/11/fs,upperdir={SNAPSHOTS}/27/fs,"
        f"workdir={SNAPSHOTS}/27/work,index=off,uuid=on,nouserxattr",
        CONTAINERDS,
        f"{SNAPSHOTS}/27/fs",
    ),
    # compactLowerdirOption of core/mount (2.x) and mount (1.x): only what is below is shortened.
    "containerd, many layers": Root(
        f"{OVERLAY}lowerdir=12/fs:11/fs,upperdir={SNAPSHOTS}/27/fs,workdir={SNAPSHOTS}/27/work",
        CONTAINERDS,
        f"{SNAPSHOTS}/27/fs",
    ),
    "containerd, user namespace": Root(
        f"{OVERLAY}lowerdir=/var/lib/containerd/tmpmounts/ovl-idmapped1/0,"
        f"upperdir={SNAPSHOTS}/27/fs,workdir={SNAPSHOTS}/27/work,index=off",
        CONTAINERDS,
        f"{SNAPSHOTS}/27/fs",
    ),
    "containerd, stargz": Root(
        f"{OVERLAY}lowerdir=/var/lib/containerd-stargz-grpc/snapshotter/snapshots/3/fs,"
        "upperdir=/var/lib/containerd-stargz-grpc/snapshotter/snapshots/4/fs,"
        "workdir=/var/lib/containerd-stargz-grpc/snapshotter/snapshots/4/work",
        CONTAINERDS,
        "/var/lib/containerd-stargz-grpc/snapshotter/snapshots/4/fs",
    ),
    "containerd, native": Root(
        "2100 1990 259:1 /var/lib/containerd/io.containerd.snapshotter.v1.native/snapshots/5 / "
        "rw,relatime master:412 - ext4 /dev/a rw",
        CONTAINERDS,
        None,
    ),
    # drivers/overlay/overlay.go and mount.go of containers/storage.
    "CRI-O": Root(
        f"{OVERLAY}{CONTEXT},lowerdir={STORAGE}/l/RGJRWXLMSBUBJF4VR3RDLGFXP2:{STORAGE}/l/3HBRITCB,"
        f"upperdir={STORAGE}/{LAYER}/diff,workdir={STORAGE}/{LAYER}/work,redirect_dir=on,metacopy=on",
        CRIOS,
        f"{STORAGE}/{LAYER}/diff",
    ),
    "CRI-O, many layers": Root(
        f"{OVERLAY}{CONTEXT},lowerdir=l/RGJRWXLMSBUBJF4VR3RDLGFXP2:l/3HBRITCB,"
        f"upperdir={LAYER}/diff,workdir={LAYER}/work,metacopy=on,volatile",
        CRIOS,
        f"{STORAGE}/{LAYER}/diff",
        on_node=f"""
31 1 259:1 / / rw,relatime shared:1 - ext4 /dev/a rw
412 31 0:93 / {STORAGE}/{LAYER[::-1]}/merged rw,nodev shared:411 - overlay overlay rw
413 31 0:94 / {STORAGE}/{LAYER}/merged rw,nodev shared:412 - overlay overlay rw
""".lstrip(),
    ),
    "CRI-O, many layers, mounted where it is not seen": Root(
        f"{OVERLAY}lowerdir=l/RGJRWXLMSBUBJF4VR3RDLGFXP2,upperdir={LAYER}/diff,workdir={LAYER}/work",
        CRIOS,
        None,
    ),
    "CRI-O, fuse-overlayfs": Root(
        "2100 1990 0:94 / / rw,nodev,noatime - fuse.fuse-overlayfs fuse-overlayfs rw,user_id=0",
        CRIOS,
        None,
    ),
}
# Where the folder of the kubelet is: on the root, or on a disk of its own.
DISKS = ("259:1 /var/lib/kubelet", "259:2 ")
HOST = """
31 1 259:1 / / rw,relatime shared:1 - ext4 /dev/a rw
44 31 0:25 / /run rw,nosuid,nodev shared:11 - tmpfs tmpfs rw
78 31 0:70 / /var/lib/kubelet/pods/u/volumes/kubernetes.io~projected/token rw - tmpfs tmpfs rw
""".lstrip()


def mountinfo(root: Root = ROOTS["containerd"], disk: str = DISKS[0]) -> str:
    return f"{root.line}\n{KUBELETS.format(disk=disk)}{root.runtimes}"


def nodes() -> Iterator[tuple[str, Hierarchy, str]]:
    """Yield each form of path, hierarchy and root of an agent's cgroups."""
    owns = ("/", "burstable", "besteffort")
    for form, hierarchy, own in itertools.product(CGROUPS.values(), HIERARCHIES, owns):
        agents = path_of(form.replace("burstable", own), OTHER, PAUSE) if own != "/" else own
        yield form, hierarchy, agents


@each(("form", "hierarchy", "agents"), nodes())
def test_the_containers_of_a_pod_are_found_without_its_pause_its_monitors_and_other_pods(
    form: str, hierarchy: Hierarchy, agents: str
) -> None:
    found = containers_seen(form, hierarchy, agents)
    pids = {name: (each.pid, MAIN in each.container) for name, each in found.items()}
    assert pids == {"main": (MAIN_PID, True), "side": (104, False)}


def containers_seen(
    form: str, hierarchy: Hierarchy, agents: str
) -> dict[str | None, kubelet.SeenProcess]:
    side = mountinfo().replace("/containers/main/", "/containers/side/")
    monitor = form.replace("crio-", "crio-conmon-").removesuffix("/container")
    processes = {
        # Processes by pid, in the order of their starts: what pods of the runtime begin with.
        90: (path_of(form, UID, PAUSE), ROOTS["containerd"].line),
        **({95: (path_of(monitor, UID, MAIN), HOST)} if monitor != form else {}),
        MAIN_PID: (path_of(form, UID, MAIN), mountinfo()),
        103: (path_of(form, UID, MAIN) + "/nested.slice", mountinfo()),
        104: (path_of(form, UID, SIDE), side),
        105: (path_of(form, OTHER, ELSEWHERE), mountinfo().replace(UID, OTHER)),
        106: ("/system.slice/kubelet.service", HOST),
    }
    seen = []
    for pid, (path, _) in processes.items():
        if container := kubelet.container_in(hierarchy(seen_from(agents, path)), UID):
            seen.append(kubelet.SeenProcess(pid, pid * 10, container))
    found = {
        kubelet.name_in(processes[each.pid][1], UID): each for each in kubelet.first_processes(seen)
    }
    found.pop(None)
    return found


@each(("root", "disk"), itertools.product(ROOTS.values(), DISKS))
def test_the_files_of_a_container_are_those_of_its_upper_folder_and_its_volumes(
    root: Root, disk: str
) -> None:
    text = mountinfo(root, disk)
    mounts = mounts_in(text)
    assert upper_of(mounts, mounts_in(root.on_node)) == root.upper
    ours = kubelet.own_mounts(mounts, UID)
    assert (kubelet.name_in(text, UID), ours) == ("main", ["/control", "/gms"])
    volumes = criu_seen.volumes_to_capture(tree_seen(mounts), ours=ours)
    assert [mount.path for mount in volumes] == ["/data", "/dev/shm"]


def tree_seen(mounts: list[Mount]) -> SeenTree:
    by_path = {mount.path: mount.id for mount in mounts}
    opened = ("/data/kept", "/control/lock", "/etc/hosts", "/dev/termination-log", "/etc/hostname")
    descriptors = []
    for number, path in enumerate(opened):
        mount = by_path.get(path) or by_path[f"/{path.split('/')[1]}"]
        descriptors.append(Descriptor(number, path, "file", mount=mount, writes=True))
    process = criu_seen.SeenProcess(
        pid=MAIN_PID, start=1, pids=(MAIN_PID, 1), descriptors=descriptors
    )
    return SeenTree([process], mounts)


@each(("form", "hierarchy", "agents"), nodes())
def test_the_memory_and_the_cgroups_of_a_container_are_found_below_those_of_the_node(
    tmp_path: Path, form: str, hierarchy: Hierarchy, agents: str
) -> None:
    top = tmp_path / str(len([*tmp_path.iterdir()]))
    path, is_2 = path_of(form, UID, MAIN), hierarchy is version_2
    tops = [top] if is_2 else [top / each.removeprefix("name=") for each in CONTROLLERS]
    make_cgroups(form, tops)
    limit, used = ("max", "current") if is_2 else ("limit_in_bytes", "usage_in_bytes")
    leaf = top / ("" if is_2 else "memory") / path.strip("/")
    (leaf / f"memory.{used}").write_text(f"{5 * MIB}\n")
    # crun leaves the limit where the runtime has set it, above the cgroup of the process.
    container = leaf.parent if leaf.name == "container" else leaf
    (container / f"memory.{limit}").write_text(f"{64 * MIB}\n")
    listed = hierarchy(seen_from(agents, path))
    assert observe.memory(MAIN_PID, listed, top) == Memory(64 * MIB, 5 * MIB)
    folders = sorted(observe.cgroup_folders(MAIN_PID, listed, top))
    assert folders == sorted(each / path[1:] for each in tops)


def make_cgroups(form: str, tops: list[Path]) -> None:
    """Make the cgroups of three containers in each hierarchy; a process is in the first."""
    path = path_of(form, UID, MAIN)
    for top in tops:
        for own in (path, path_of(form, UID, SIDE), path_of(form, OTHER, ELSEWHERE)):
            folder = top / own.strip("/")
            folder.mkdir(parents=True)
            (folder / "cgroup.procs").write_text(f"{MAIN_PID}\n" if own == path else "7\n")
