"""Restores a process below a placeholder by CRIU.

CRIU runs in a mount namespace of its own, over a copy of the placeholder's mounts: no program and
no library of a user's image is run with the rights of the helper. What it restores is in the
placeholder's cgroups and network, in a process namespace within that of the placeholder.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import select
import signal
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath

from snapshot_agent.adapters import procfs
from snapshot_agent.domain import criu_gates, criu_images
from snapshot_agent.domain.criu_plan import (
    RestorePlan,
    external_mounts,
    inherited,
    restore_arguments,
)
from snapshot_agent.domain.criu_seen import SeenTree
from snapshot_agent.domain.criu_source import MAX_SOURCE_BYTES, SOURCE, SourceFacts
from snapshot_agent.domain.helping import RESTORED, WHOLE, RestoreRequest
from snapshot_agent.helper import archive, cuda_worker, observe, socket_names, syscalls, threads
from snapshot_agent.helper.action_script import ActionScript
from snapshot_agent.helper.caller import Caller
from snapshot_agent.helper.children import Watch, in_child, work_folder
from snapshot_agent.helper.dumping import Node, below, criu_failed, host_name
from snapshot_shared.artifact import MAX_FILES
from snapshot_shared.errors import (
    ArtifactCorrupt,
    ArtifactMissing,
    ControlFolderBroken,
    CriuFailed,
    Incompatible,
    OutcomeUnknown,
    SourceExited,
)
from snapshot_shared.files import (
    create_file,
    open_artifact,
    open_dir,
    open_own,
    open_regular,
    open_root,
    opened,
    read_bounded,
)
from snapshot_shared.volumes import INIT_VOLUME


def restore(request: RestoreRequest, verdict: int, node: Node, caller: Caller) -> tuple[int, int]:
    """Restore a process; return its pid and start time on the node.

    It runs after WHOLE has come at the descriptor `verdict`.

    What is half restored when it is given up is ended together with the placeholder. A process that
    cannot have its devices is ended, and the placeholder waits on.
    """
    watch = Watch(caller, "restore-process", request.within_s)
    with (
        opened(open_root(node.disk(request))) as top,
        opened(open_artifact(top, request.folder)) as part,
        _opened_init(request) as init,
        work_folder() as work,
    ):
        caller.begin("read-images")
        source = criu_gates.read_source(read_bounded(part, SOURCE, MAX_SOURCE_BYTES))
        target = observe.tree(request.pid, request.start, cgroups=node.cgroups)
        criu_gates.check_restore(source, target, observe.node(node.criu))
        devices = _devices(request, source)
        spared = criu_gates.spared_mounts(source, target)
        changed = _changed_images(part, request, source, target, spared, work)
        caller.begin("unpack-files")
        in_child(partial(_unpack, request, source, target, part), watch)
        images = Path(node.disk(request), *request.folder)
        doing = _Restore(request, source, spared, images, work, changed, verdict, caller)
        volumes = [row.path for row in source.archives if not row.is_upper]
        with node.records.restoring(request.pid, request.start, volumes) as undone:
            try:
                caller.begin("restore-memory")
                in_child(partial(doing.run, node), watch)
            except CriuFailed:
                undone()
                raise
            inside = int((work / "pid").read_text())
            found = _restored(request, inside)
            if source.cuda is not None and source.cuda.processes:
                caller.begin("restore-devices")
                try:
                    cuda_worker.bring_back(found, source.cuda.processes, devices, watch)
                except BaseException:
                    undone()
                    raise
            threads.give_back(found, source.threads)
            _hand_over(request, init, inside)
            return found.key


@contextlib.contextmanager
def _opened_init(request: RestoreRequest) -> Iterator[int]:
    """Open the folder of the placeholder's first program, into which its whole pod may write."""
    try:
        found = open_own(request.init)
    except (ArtifactCorrupt, ArtifactMissing, FileNotFoundError) as error:
        raise ControlFolderBroken(
            f"{request.init}, where the placeholder has {criu_gates.INIT}, is a link or no folder",
            next_step=f"mount the volume {INIT_VOLUME} in no other container of the pod, and "
            "delete the pod, so that its restore begins with a new one",
            expected="a folder",
            path=request.init,
        ) from error
    with opened(found):
        yield found


def _hand_over(request: RestoreRequest, init: int, inside: int) -> None:
    """Announce to the placeholder its process, which has the pid `inside` in its namespace."""
    _announce(init, inside)
    with procfs.opened(request.pid, request.start) as pidfd:
        if pidfd is None:
            raise SourceExited("the placeholder has ended")
        signal.pidfd_send_signal(pidfd, signal.SIGUSR1)


def _devices(request: RestoreRequest, source: SourceFacts) -> dict[str, str]:
    """Return the device here of each of the source. NotEligible or Incompatible: it does not go."""
    if source.cuda is None and request.gpus is None:
        return {}
    if source.cuda is None or request.gpus is None:
        with_cuda, without = "with its devices by criu+cuda", "by criu alone"
        raise Incompatible(
            f"the process was dumped {with_cuda if source.cuda else without}, the order wants it "
            f"restored {without if source.cuda else with_cuda}",
            next_step="restore with the driver of the artifact",
            expected="criu+cuda" if source.cuda else "criu",
            found="criu" if source.cuda else "criu+cuda",
        )
    return cuda_worker.placed(source.cuda, request.gpus, request.chosen)


def _announce(folder: int, inside: int) -> None:
    """Put the file in place by which the placeholder, of whichever user, learns of its process."""
    temporary = f".{RESTORED}"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary, dir_fd=folder)
    with opened(create_file(folder, temporary)) as file:
        os.write(file, f"{inside}\n".encode())
        os.fchmod(file, 0o644)
    os.rename(temporary, RESTORED, src_dir_fd=folder, dst_dir_fd=folder)


def _changed_images(
    part: int,
    request: RestoreRequest,
    source: SourceFacts,
    target: SeenTree,
    spared: Collection[str],
    work: Path,
) -> list[str]:
    """Write copies of the images that say where the source was; return their names."""
    folder = work / "images"
    folder.mkdir()
    names = os.listdir(part)
    if len(names) > MAX_FILES:
        raise ArtifactCorrupt(f"the part holds {len(names)} files, the limit is {MAX_FILES}")
    changed = []
    for name in names:
        if name.startswith("utsns-"):
            host = host_name(request.pid)
            new = criu_images.renamed(read_bounded(part, name, criu_images.MAX_IMAGE_BYTES), host)
        elif name == criu_images.FILES:
            moved = _moved(source.addresses, target.addresses)
            new = criu_images.readdressed(
                read_bounded(part, name, criu_images.MAX_IMAGE_BYTES), moved
            ).image
            if criu_images.REMAPS in names:
                remaps = read_bounded(part, criu_images.REMAPS, criu_images.MAX_IMAGE_BYTES)
                mark = criu_images.mark_of(request.pid, request.start)
                new = criu_images.unlinked(new, remaps, mark)
        elif name.startswith("mountpoints-") and spared:
            image = read_bounded(part, name, criu_images.MAX_IMAGE_BYTES)
            new = criu_images.without_mounts(image, spared)
        else:
            continue
        (folder / name).write_bytes(new)
        changed.append(name)
    return changed


def _moved(before: Sequence[str], after: Sequence[str]) -> Mapping[str, str]:
    """Return the address of the target for each of the source, of the same family."""
    found: dict[str, str] = {}
    try:
        for version in (4, 6):
            # What both have stays, as where both are on the network of one node.
            old, new = (
                [
                    each
                    for each in addresses
                    if each not in others and ipaddress.ip_address(each).version == version
                ]
                for addresses, others in ((before, after), (after, before))
            )
            found.update(zip(old, new, strict=False))
    except ValueError as error:
        raise ArtifactCorrupt(f"{SOURCE}: {error}", file=SOURCE) from error
    return found


def _unpack(request: RestoreRequest, source: SourceFacts, target: SeenTree, part: int) -> None:
    """Unpack the archives where the placeholder has their folders."""
    files = [(row, open_regular(part, row.name)) for row in source.archives]
    with opened(_namespace(request.pid, "mnt")) as fd:
        # The root of this process is that of the container from here on.
        syscalls.setns(fd, syscalls.CLONE_NEWNS)
    mounts = [mount.path for mount in target.mounts] + [mount.path for mount in source.mounts]
    with opened(open_root("/")) as root:
        for row, fd in files:
            with opened(open_dir(root, PurePosixPath(row.path).parts[1:])) as folder:
                archive.unpack(fd, folder, leave_out=below(row.path, mounts), is_upper=row.is_upper)


class _Restore:
    """One call of CRIU."""

    def __init__(
        self,
        request: RestoreRequest,
        source: SourceFacts,
        spared: Collection[str],
        images: Path,
        work: Path,
        changed: Sequence[str],
        verdict: int,
        caller: Caller,
    ) -> None:
        self._request = request
        self._source = source
        self._spared = spared
        self._images = images
        self._work = work
        self._changed = changed
        self._verdict = verdict
        self._caller = caller

    def run(self, node: Node) -> None:
        """Run CRIU, in a child of the helper that nothing else is done in."""
        pid = self._request.pid
        # A pod may have a cgroup namespace of its own, and the kernel may let no process leave it.
        with contextlib.suppress(PermissionError):
            _enter_cgroups_of(1)
        listed = Path(f"/proc/{pid}/cgroup").read_text()
        for folder in observe.cgroup_folders(pid, listed, node.cgroups):
            (folder / "cgroup.procs").write_text(str(os.getpid()))
        _enter_cgroups_of(pid)
        namespaces = {name: _namespace(pid, name) for name in ("pid", "net")}
        stdio = [
            os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY if number == 0 else os.O_WRONLY)
            for number in range(3)
        ]
        self._mount(_mounts_of(pid))
        syscalls.setns(namespaces["net"], syscalls.CLONE_NEWNET)
        syscalls.setns(namespaces["pid"], syscalls.CLONE_NEWPID)
        plan = RestorePlan(
            images=str(self._images),
            work=str(self._work),
            root=str(self._root),
            pidfile=str(self._work / "pid"),
            network=namespaces["net"],
            external=external_mounts(self._source.mounts, left_out=self._spared),
            pipes=inherited(self._source.stdio, stdio),
            script=str(self._work / "script"),
        )
        with ActionScript(self._work, "post-restore") as script:
            criu = subprocess.Popen(
                [node.criu, *restore_arguments(plan)],
                cwd=self._work,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[namespaces["net"], *stdio],
                restore_signals=False,
                preexec_fn=_enter,  # noqa: PLW1509 - there are no threads
            )
            self._let_go(criu.pid, script)
            status = criu.wait()
        if status < 0:
            raise OutcomeUnknown(f"CRIU was ended by signal {-status} while it restored")
        if status:
            raise criu_failed(self._work, "restore")

    def _let_go(self, criu: int, script: ActionScript) -> None:
        """Name the restored sockets, then let the processes run if the agent says WHOLE.

        Otherwise CRIU ends the processes before one of them has run.
        """
        with opened(os.pidfd_open(criu)) as pidfd:
            ready, _, _ = select.select([script.asks, pidfd], [], [])
            if script.asks in ready:
                with opened(open_root(self._root)) as root:
                    socket_names.rename(root, self._source.sockets)
                self._caller.begin("await-pages")
                ready, _, _ = select.select([self._verdict, pidfd], [], [])
                self._caller.begin("thaw-restored")
                is_whole = self._verdict in ready and os.read(self._verdict, 1) == WHOLE
                script.answer(go_on=is_whole)

    @property
    def _root(self) -> Path:
        return self._work / "root"

    def _mount(self, tree: int) -> None:
        """Mount the copy of the placeholder's mounts, and the changed images over the others."""
        syscalls.unshare(syscalls.CLONE_NEWNS)
        syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_SLAVE)
        self._root.mkdir()
        syscalls.move_mount(tree, str(self._root))
        # They stay slaves where they were: CRIU compares that with the source.
        syscalls.mount(None, str(self._root), None, syscalls.MS_REC | syscalls.MS_SLAVE)
        for name in self._changed:
            new = str(self._work / "images" / name)
            syscalls.mount(new, str(self._images / name), None, syscalls.MS_BIND)


def _enter() -> None:
    """Prepare the process that becomes CRIU."""
    syscalls.end_with_parent()
    # Of the process namespace that it is in: CRIU compares pids with it.
    syscalls.mount("proc", "/proc", "proc")


def _mounts_of(pid: int) -> int:
    """Return a copy of the mounts of a process, which only a process among them can make."""
    with opened(_namespace(pid, "mnt")) as theirs, opened(_namespace(os.getpid(), "mnt")) as ours:
        syscalls.setns(theirs, syscalls.CLONE_NEWNS)
        try:
            return syscalls.open_tree("/")
        finally:
            syscalls.setns(ours, syscalls.CLONE_NEWNS)


def _enter_cgroups_of(pid: int) -> None:
    with opened(_namespace(pid, "cgroup")) as fd:
        syscalls.setns(fd, syscalls.CLONE_NEWCGROUP)


def _namespace(pid: int, name: str) -> int:
    return os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)


def _restored(request: RestoreRequest, inside: int) -> procfs.Stat:
    """Return the process that has this pid in the namespace of the placeholder."""
    found = procfs.child_in(request.pid, inside)
    if found is None:
        raise OutcomeUnknown(f"process {inside} was restored and is not there")
    return found
