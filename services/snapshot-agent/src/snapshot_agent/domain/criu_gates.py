"""What must hold before CRIU is let near a worker, over what was seen of it and of its node.

A check returns an error or None, as in `gate`. Nothing is touched before all checks have passed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from fractions import Fraction
from typing import NamedTuple

from snapshot_agent.domain.criu_seen import (
    SeenNode,
    SeenProcess,
    SeenTree,
    Use,
    all_capabilities,
    estimate,
    is_below,
    is_memory,
    is_read_only,
    names_of,
    resident,
    shown,
    uses,
)
from snapshot_agent.domain.criu_source import MAX_SOURCE_BYTES, SOURCE, SourceFacts
from snapshot_agent.domain.gate import Check, refuse
from snapshot_agent.domain.mounts import Mount, visible
from snapshot_shared import compatibility, units
from snapshot_shared.artifact import Facts
from snapshot_shared.codec import decode_json
from snapshot_shared.errors import (
    ArtifactCorrupt,
    Incompatible,
    InvalidMessage,
    NoSpace,
    NotEligible,
    SnapbackError,
)

INIT = "snapback-init"
"""The program of a container that waits for a restore."""

UPDATE_HELPER = "update the helper's image on this node"

_SETGID, _SETUID = 1 << 6, 1 << 7
_FILTER = 2
"""The mode of seccomp in which a process has a filter."""

_SYS_ADMIN = 1 << 21
_IO_URING = "[io_uring]"
SECCOMP_PROFILE = "profiles/block-iouring.json"
"""The file of the profile that nodes have for workers of CRIU, unless settings name another one."""
_PTMX = "5:2"
_PLAIN_DEVICES = {"1:3", "1:5", "1:7", "1:8", "1:9", _PTMX, "10:200"}
"""Devices that CRIU opens anew: null, zero, full, random, urandom, ptmx, tun."""

_KERNEL_TYPES = {
    "binfmt_misc", "bpf", "cgroup", "cgroup2", "debugfs", "devpts", "devtmpfs", "fusectl",
    "mqueue", "proc", "securityfs", "sysfs", "tracefs",
}  # fmt: skip
_SPARE = Fraction(11, 10)
"""What must be there for each byte of an estimate."""


class OnDevices(NamedTuple):
    """What the driver `criu+cuda` knows of a worker.

    `bytes` are on devices, and come into its memory for a dump. With `checkpointed` they have, and
    no device may be open any more.
    """

    bytes: int = 0
    checkpointed: bool = False


class Disk(NamedTuple):
    """Where a dump is written, and how many bytes are free there."""

    path: str
    free: int


class Dumping(NamedTuple):
    """A worker that is to be dumped, and what is known of it.

    `captured` are the paths of mounts whose files are archived with the dump, and `ours` those of
    Snapback's own. With `quiet` the worker has been quiesced and is connected to nothing outside.
    With `cuda` the driver is `criu+cuda`, which takes care of NVIDIA's devices. A `plain` worker
    has the node's root and network. `seccomp_profile` is the one that its pod names.
    """

    seen: SeenTree
    node: SeenNode
    captured: Collection[str]
    quiet: bool
    disk: Disk
    ours: Collection[str] = ()
    cuda: OnDevices | None = None
    plain: bool = False
    seccomp_profile: str = ""

    @property
    def bytes_on_devices(self) -> int:
        """The bytes on devices that come into its memory."""
        return self.cuda.bytes if self.cuda else 0


def check_dump(dump: Dumping) -> None:
    """Raise the first reason for which CRIU cannot dump this worker, or nothing could restore it.

    Raise NotEligible, or NoSpace when the dump does not fit.
    """
    refuse(_DUMP_CHECKS, dump)


def _has_criu(node: SeenNode) -> str:
    """Return why the CRIU of a node is not fit for its kernel, or nothing."""
    # Before 4.2, CRIU dumps no socket of the internet on these kernels (checkpoint-restore/criu
    # issue 2705).
    wanted = (4, 2) if node.kernel >= (6, 16) else (4, 0)
    if node.criu is None:
        return f"CRIU cannot be started on this node; {shown(wanted)} or later is needed"
    if node.criu < wanted:
        return (
            f"this node has CRIU {shown(node.criu)}; Linux {shown(node.kernel)} needs "
            f"{shown(wanted)} or later"
        )
    return ""


def _dumps_with_criu(dump: Dumping) -> SnapbackError | None:
    return _lacks_criu(dump.node)


def _lacks_criu(node: SeenNode) -> SnapbackError | None:
    if not (problem := _has_criu(node)):
        return None
    return NotEligible(
        problem,
        next_step=UPDATE_HELPER,
        found=shown(node.criu or ()),
        kernel=shown(node.kernel),
    )


def check_node(node: SeenNode) -> None:
    """Raise NotEligible when no worker can be dumped on this node."""
    if error := _lacks_criu(node):
        raise error


def _is_of_our_users(dump: Dumping) -> SnapbackError | None:
    return _is_apart(dump.seen.root, dump.node, NotEligible)


def _is_apart(
    root: SeenProcess, node: SeenNode, refusal: type[Incompatible | NotEligible]
) -> SnapbackError | None:
    # There a process without privileges may mount an overlay, whose options name any folder as
    # that with its files; and user 0 of CRIU's images is not its user 0.
    found = root.namespaces.get("user")
    if found == node.user:
        return None
    return refusal(
        f"process {root.pid} is in the user namespace {found}, the helper of this node in "
        f"{node.user}",
        next_step="run the pod without `hostUsers: false`; its first process may not enter another "
        "user namespace",
        expected=node.user,
        found=found,
    )


def _is_of_its_own(dump: Dumping) -> SnapbackError | None:
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
    if root.namespaces.get("net") == dump.node.net and not dump.plain:
        return NotEligible(
            f"process {root.pid} is in the network namespace {dump.node.net}, which is the node's "
            "and would be locked while CRIU dumps",
            next_step="run the pod without hostNetwork",
            expected="a network namespace of its own",
            found=dump.node.net,
        )
    return None


def _is_within_ours(dump: Dumping) -> SnapbackError | None:
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


def _is_of_a_user_that_we_may_read(dump: Dumping) -> SnapbackError | None:
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


def _has_no_terminal(dump: Dumping) -> SnapbackError | None:
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


def _has_no_io_uring(dump: Dumping) -> SnapbackError | None:
    for process in dump.seen.processes:
        held = [each.kind for each in process.descriptors if each.kind == f"anon:{_IO_URING}"]
        held += [each.path for each in process.mapped if each.path.endswith(_IO_URING)]
        if held:
            named = dump.seccomp_profile
            allows = f"; seccompProfile {named} of the pod allows io_uring_setup" if named else ""
            return NotEligible(
                f"process {process.pid} holds {len(held)} of anon_inode:[io_uring], of which CRIU "
                f"can dump none{allows}",
                next_step="leave seccompProfile out of the pod, or name one that refuses "
                "io_uring_setup, such as type: Localhost with localhostProfile: "
                f"{SECCOMP_PROFILE} on nodes that have it"
                if named
                else "turn io_uring off in the worker, or forbid io_uring_setup by seccomp",
                expected=0,
                found=len(held),
            )
    return None


def _may_suspend_filters(dump: Dumping) -> SnapbackError | None:
    node = dump.node
    if node.capabilities & _SYS_ADMIN and not node.seccomp:
        return None
    for process in dump.seen.processes:
        if process.seccomp == _FILTER:
            lacks = "has a filter of its own" if node.seccomp else "lacks CAP_SYS_ADMIN"
            return NotEligible(
                f"process {process.pid} has a filter of seccomp, which CRIU has to suspend, and "
                f"the helper of this node {lacks}",
                next_step="run the helper with CAP_SYS_ADMIN and seccompProfile Unconfined",
                expected=(True, 0),
                found=(bool(node.capabilities & _SYS_ADMIN), node.seccomp),
            )
    return None


def _has_no_devices(dump: Dumping) -> SnapbackError | None:
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
        if file.path.startswith(("/dev/", "/dmabuf:")) and not is_memory(file.path):
            yield file.path, "mapped"


def _is_connected_to_itself(dump: Dumping) -> SnapbackError | None:
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


def _has_its_files_captured(dump: Dumping) -> SnapbackError | None:
    captured = sorted({"/", *dump.captured, *dump.ours})
    for use in uses(dump.seen):
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


def _has_its_names(dump: Dumping) -> SnapbackError | None:
    """Refuse a file that was removed while another name of it exists.

    CRIU gives such a file a name for the dump alone. The files of a plain worker are not captured,
    so its restore does not find that name.
    """
    for process in dump.seen.processes if dump.plain else ():
        for each in process.descriptors:
            if each.kind == "file" and not each.deleted and each.link.endswith(" (deleted)"):
                path = each.link.removesuffix(" (deleted)")
                return NotEligible(
                    f"process {process.pid} has the file {path} open, which was removed while "
                    "another name of it exists, so a restore would not find it",
                    next_step="open the file by the name that is left, or close it",
                    path=path,
                )
    return None


def _has_its_root_captured(dump: Dumping) -> SnapbackError | None:
    root = visible(dump.seen.mounts).get("/")
    # A plain worker has the root of its node, as it has where it is restored.
    if dump.plain or root is None or is_read_only(root) or dump.seen.upper is not None:
        return None
    return NotEligible(
        f"the root of the container is of the type {root.fs_type} ({root.source}), where what it "
        "has written is in no folder of its own, and could not be captured",
        next_step="have the container runtime use overlays (the snapshotter overlayfs), or set "
        "readOnlyRootFilesystem",
        expected="an overlay with an upper folder",
        found=root.fs_type,
    )


def _comes_again(use: Use, mount: Mount) -> bool:
    """Whether another container has the file as well, in the same state."""
    return (
        mount.fs_type in _KERNEL_TYPES
        or is_below(mount.path, "/dev")
        or (is_read_only(mount) and not use.writes)
        or (use.is_folder and use.path == mount.path)
    )


def _fits_in_memory(dump: Dumping) -> SnapbackError | None:
    limit = dump.seen.memory.limit if dump.seen.memory else None
    if dump.cuda is None or not dump.cuda.bytes or limit is None:
        return None
    needed = int((resident(dump.seen) + dump.cuda.bytes) * _SPARE)
    if needed <= limit:
        return None
    wanted, there = units.sizes(needed, limit)
    return NotEligible(
        f"the worker needs {wanted} of memory with the {units.size(dump.cuda.bytes)} that it has "
        f"on devices, the limit of its container is {there}",
        next_step=f"give the container a memory limit of {needed} bytes or more",
        expected=needed,
        found=limit,
    )


def _fits(dump: Dumping) -> SnapbackError | None:
    needed = int((estimate(dump.seen) + dump.bytes_on_devices) * _SPARE)
    if needed <= dump.disk.free:
        return None
    wanted, there = units.sizes(needed, dump.disk.free)
    return NoSpace(
        f"a dump of {len(dump.seen.processes)} processes needs {wanted}, {there} are free in "
        f"{dump.disk.path}",
        needed=needed,
        free=dump.disk.free,
    )


_DUMP_CHECKS: tuple[Check[Dumping], ...] = (
    _dumps_with_criu,
    _is_of_our_users,
    _is_of_its_own,
    _is_within_ours,
    _is_of_a_user_that_we_may_read,
    _has_no_terminal,
    _has_no_io_uring,
    _may_suspend_filters,
    _has_no_devices,
    _is_connected_to_itself,
    _has_its_files_captured,
    _has_its_names,
    _has_its_root_captured,
    _fits_in_memory,
    _fits,
)


def read_source(data: bytes) -> SourceFacts:
    """Return the record of a worker that was dumped, from its file.

    Raise Incompatible when it has a field of a later version, which may forbid a restore, else
    ArtifactCorrupt when it is no such record.
    """
    try:
        return decode_json(data, SourceFacts, limit=MAX_SOURCE_BYTES)
    except InvalidMessage as error:
        if "Object contains unknown field" in error.message:
            raise Incompatible(
                f"{SOURCE} is of a later version: {error.message}",
                next_step=UPDATE_HELPER,
                file=SOURCE,
            ) from error
        raise ArtifactCorrupt(f"{SOURCE}: {error.message}", file=SOURCE) from error


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


def _waits_among_our_users(restore: _Restore) -> SnapbackError | None:
    return _is_apart(restore.target.root, restore.node, Incompatible)


def _restores_with_criu(restore: _Restore) -> SnapbackError | None:
    if not (problem := _has_criu(restore.node)):
        return None
    return Incompatible(
        problem,
        next_step=UPDATE_HELPER,
        expected=shown(restore.source.criu),
        found=shown(restore.node.criu or ()),
    )


def _has_its_facts(restore: _Restore) -> SnapbackError | None:
    source, node = restore.source, restore.node
    there = Facts(
        driver="criu",
        kernel=shown(source.kernel),
        criu=shown(source.criu),
        cpu=sorted(source.processor),
    )
    here = Facts(kernel=shown(node.kernel), criu=shown(node.criu or ()), cpu=sorted(node.processor))
    return compatibility.refusal(there, here)


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


def _has_the_same_users(restore: _Restore) -> SnapbackError | None:
    source, root = restore.source.credentials, restore.target.root
    if source is None:
        return None
    groups = "runAsGroup, fsGroup and supplementalGroups"
    for name, fields, there, here, capability in (
        ("user", "runAsUser", source.uids, root.uids, _SETUID),
        ("group", groups, source.gids, (*root.gids, *root.groups), _SETGID),
    ):
        more = sorted(set(there) - set(here))
        # A process with the capability may become any of them by itself.
        if more and not root.permitted & capability:
            return Incompatible(
                f"the source ran as {name} {_distinct(more)}, the container of this pod runs as "
                f"{name} {_distinct(here)}",
                next_step=f"give the container the {fields} of the source, or capture a worker "
                "that has those of this pod",
                expected=more,
                found=sorted(set(here)),
            )
    return None


def _distinct(ids: Iterable[int]) -> str:
    return ", ".join(map(str, dict.fromkeys(ids)))


def _is_confined_as_much(restore: _Restore) -> SnapbackError | None:
    source, root = restore.source.credentials, restore.target.root
    if source is None:
        return None
    if root.seccomp == _FILTER and source.seccomp < _FILTER:
        return Incompatible(
            f"the source ran in seccomp mode {source.seccomp}, without a filter, the container of "
            f"this pod is in mode {root.seccomp}",
            next_step="capture a worker with a seccompProfile, or give this container that of the "
            "source",
            expected=source.seccomp,
            found=root.seccomp,
        )
    if root.no_new_privs and not source.no_new_privs:
        return Incompatible(
            "the source ran with NoNewPrivs 0, the container of this pod has NoNewPrivs 1",
            next_step="capture a worker with `allowPrivilegeEscalation: false`, or give this "
            "container that of the source",
            expected=0,
            found=1,
        )
    more = names_of(source.permitted & ~root.permitted)
    # Without NoNewPrivs it may gain them by a program of root that has the bit for that.
    if root.no_new_privs and more:
        return Incompatible(
            f"the source had {', '.join(more)}, which the container of this pod has not and may "
            "not gain with NoNewPrivs 1",
            next_step="capture a worker without them, or give this container the "
            "securityContext of the source",
            expected=more,
            found=names_of(root.permitted),
        )
    return None


def spared_mounts(source: SourceFacts, target: SeenTree) -> set[str]:
    """Return the paths of the mounts that the target lacks and the source did not need.

    A mount below one of these would have no parent in the images of CRIU. So it is spared too, and
    what a mount is above that the source needed is not.
    """
    here = {mount.path for mount in target.mounts}
    needed = [mount.path for mount in source.mounts if mount.is_needed]
    others = [mount.path for mount in source.mounts if not mount.is_needed]
    gone = {
        path
        for path in others
        if path not in here and not any(is_below(each, path) for each in needed)
    }
    return gone | {path for path in others if any(is_below(path, each) for each in gone)}


def _has_the_same_mounts(restore: _Restore) -> SnapbackError | None:
    here = {mount.path for mount in restore.target.mounts}
    there = {
        mount.path
        for mount in restore.source.mounts
        if mount.path != "/" and mount.fs_type != "proc"
    }
    spared = spared_mounts(restore.source, restore.target)
    missing, more = sorted(there - here - spared), sorted(here - there - {"/", "/proc"})
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
    _waits_among_our_users,
    _restores_with_criu,
    _has_its_facts,
    _may_give_capabilities,
    _has_the_same_users,
    _is_confined_as_much,
    _has_the_same_mounts,
    _has_the_memory,
)
