"""Dumps a worker by CRIU, with the files of its container.

CRIU runs an action script between the parts of a dump. It waits at `post-dump`, when the images
are written and the processes are still stopped: the files are archived then, and the dump fails
cleanly when they cannot be. A dump that has to end early is made to fail at its next write, after
which CRIU sets the worker free by itself; it is killed if that takes longer than GRACE_S.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import resource
import subprocess
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple, Self

from snapshot_agent.domain import criu_gates, criu_images, criu_log, criu_seen
from snapshot_agent.domain.criu_gates import Disk, OnDevices
from snapshot_agent.domain.criu_plan import DumpPlan, dump_arguments, external_mounts
from snapshot_agent.domain.criu_seen import SeenNode, SeenTree
from snapshot_agent.domain.criu_source import (
    SOURCE,
    Archive,
    RenamedSocket,
    SourceFacts,
    SourceMount,
    SourceThread,
    credentials_of,
)
from snapshot_agent.domain.helping import DumpRequest, Inspect, RestoreRequest
from snapshot_agent.domain.mounts import Mount
from snapshot_agent.helper import archive, cuda_worker, observe, socket_names, syscalls, threads
from snapshot_agent.helper.action_script import ActionScript
from snapshot_agent.helper.beneath import open_inside
from snapshot_agent.helper.caller import Caller
from snapshot_agent.helper.children import KDAT, Watch, in_child, work_folder
from snapshot_agent.helper.cuda_worker import OnCuda
from snapshot_agent.helper.settling import Records
from snapshot_shared import units
from snapshot_shared.codec import encode_pretty
from snapshot_shared.errors import (
    ArtifactCorrupt,
    ArtifactMissing,
    CriuFailed,
    NoSpace,
    NotEligible,
    OutcomeUnknown,
)
from snapshot_shared.files import (
    create_file,
    free_bytes,
    names_in,
    open_root,
    opened,
    read_bounded,
    write_new,
)

log = logging.getLogger(__name__)

TRIES = 3
"""How often a worker is dumped until it has no file of its control directory open."""

GRACE_S = 5.0
"""How long CRIU may take to free the worker when its dump has to end early, in seconds."""

_HOST_NAME = re.compile(r"^[A-Za-z0-9._-]{1,64}\Z")
"""As Linux takes it; that of a pod is narrower."""


class _OpenControlFile(Exception):
    """A worker was dumped with a file open that no other control directory has."""


class Node(NamedTuple):
    """What a node has for CRIU: the program, artifacts, cgroups, the records of dumps, scratch."""

    criu: Path
    artifacts: Path
    cgroups: Path
    records: Records
    scratch: Path | None = None

    def disk(self, request: Inspect | DumpRequest | RestoreRequest) -> Path:
        """Return the folder below which CRIU writes or reads. NotEligible: there is none."""
        if not request.scratch:
            return self.artifacts
        if self.scratch is None:
            raise NotEligible(
                "the helper of this node has no scratch folder, its agent has one",
                next_step="set SNAPBACK_SCRATCH_DIR of both to one folder that both have",
            )
        return self.scratch


class Captured(NamedTuple):
    """A tree of files that is archived: a folder of the node, and where the container has it."""

    source: Callable[[], int]
    archive: Archive
    leave_out: Sequence[str]


Dumped = tuple[SourceFacts, float | None]
"""The facts of a dumped worker, and for how many seconds it was stopped, if CRIU says so."""


class Found(NamedTuple):
    """A worker that can be dumped. `cuda` is None where the driver is not `criu+cuda`."""

    seen: SeenTree
    cuda: OnCuda | None

    @property
    def bytes(self) -> int:
        """How many bytes CRIU will write, about."""
        return criu_seen.estimate(self.seen) + (self.cuda.bytes if self.cuda else 0)


def inspect(request: Inspect | DumpRequest, node: Node, here: SeenNode, *, quiet: bool) -> Found:
    """Return what is seen of a worker. NotEligible when it cannot be dumped, or as of CUDA."""
    seen = observe.tree(request.pid, request.start, cgroups=node.cgroups)
    cuda = devices = None
    if request.gpus is not None:
        pids = [process.pid for process in seen.processes]
        cuda = cuda_worker.look(pids, request.gpus, quiet=quiet)
        devices = OnDevices(cuda.bytes)
    _check(request, node, here, seen, devices, quiet=quiet)
    return Found(seen, cuda)


def _check(
    request: Inspect | DumpRequest,
    node: Node,
    here: SeenNode,
    seen: SeenTree,
    devices: OnDevices | None,
    *,
    quiet: bool,
) -> None:
    volumes = criu_seen.volumes_to_capture(seen, ours=request.ours)
    path = node.disk(request)
    with opened(open_root(path)) as root:
        disk = Disk(str(path), free_bytes(root))
    dumping = criu_gates.Dumping(
        seen,
        here,
        disk=disk,
        captured=[mount.path for mount in volumes],
        ours=request.ours,
        quiet=quiet,
        cuda=devices,
        plain=request.plain,
        seccomp_profile=request.seccomp_profile if isinstance(request, Inspect) else "",
    )
    criu_gates.check_dump(dumping)
    if seen.upper and not request.plain and not Path(seen.upper).is_dir():
        raise NotEligible(
            f"what the container has written is in {seen.upper}, which the helper of this node "
            "does not have",
            next_step="have `node.runtimeDir` of the chart name the folder of the container "
            "runtime or of its snapshotter",
            path=seen.upper,
        )


def dump(request: DumpRequest, part: int, node: Node, caller: Caller) -> float | None:
    """Dump a worker into the directory `part`; return for how many seconds it was stopped.

    It goes on, unless CRIU had to be killed. None where CRIU does not say how long.
    """
    watch = Watch(caller, "dump-process", request.within_s)
    here = observe.node(node.criu)
    found = inspect(request, node, here, quiet=True)
    # Nothing of another one's is locked. The worker goes on with its connections to the outside,
    # which are closed where it is restored, and those within it rest while it is stopped.
    network = 0 if request.plain else found.seen.root.namespaces["net"]
    cuda = found.cuda if found.cuda and found.cuda.pids else None
    locks, undo_s = (cuda.pids, cuda.undo_s) if cuda else ((), 0.0)
    record = node.records.dumping(request.pid, request.start, network, locks, undo_s)
    if cuda:
        caller.begin("checkpoint-devices")
    with record as criu_works, cuda_worker.held(cuda, watch) if cuda else nullcontext():
        if cuda:
            # Its memory has grown, and its devices are closed.
            seen = observe.tree(request.pid, request.start, cgroups=node.cgroups)
            _check(request, node, here, seen, OnDevices(checkpointed=True), quiet=True)
            found = Found(seen, cuda._replace(bytes=0))
        with criu_works(), _naming_the_disk(part, node.disk(request), found.bytes):
            facts, frozen_s = _dumped(
                partial(_dump, request, part, node, here, found, caller, watch), part
            )
    with _naming_the_disk(part, node.disk(request), found.bytes):
        write_new(part, SOURCE, recorded(facts))
    # CRIU does not know for how long CUDA was locked.
    return None if cuda else frozen_s


def recorded(facts: SourceFacts) -> bytes:
    """Return the record of a worker. NotEligible: no restore would read it."""
    data = encode_pretty(facts)
    try:
        criu_gates.read_source(data)
    except ArtifactCorrupt as error:
        raise NotEligible(f"the worker cannot be recorded: {error.message}") from error
    return data


def _dumped(dump: Callable[[], Dumped], part: int) -> Dumped:
    """Dump a worker, and again if it had a file of its control directory open.

    A worker that polls its control directory opens files there. The container of a restore has
    other control files, so CRIU would not find the open one. Raise CriuFailed after TRIES dumps.
    """
    path = ""
    for _ in range(TRIES):
        try:
            return dump()
        except _OpenControlFile as error:
            path = str(error)
            log.info("the worker had %s open while it was dumped, so it is dumped again", path)
            for name in names_in(part):
                os.unlink(name, dir_fd=part)
    raise CriuFailed(
        f"the worker had {path} of its control directory open in each of {TRIES} dumps",
        next_step="let the worker close the files of its control directory after it has read them",
        path=path,
    )


def _require_closed(part: int, control: Collection[str]) -> None:
    has_remaps = criu_images.REMAPS in names_in(part)
    remaps = _image(part, criu_images.REMAPS) if has_remaps else b""
    if found := criu_images.open_below(_image(part, criu_images.FILES), remaps, control):
        raise _OpenControlFile(found[0])


def _image(part: int, name: str) -> bytes:
    return read_bounded(part, name, criu_images.MAX_IMAGE_BYTES)


def _dump(
    request: DumpRequest,
    part: int,
    node: Node,
    here: SeenNode,
    found: Found,
    caller: Caller,
    watch: Watch,
) -> Dumped:
    """Run CRIU; return the facts of the worker as it was dumped, and how long it was stopped."""
    seen = found.seen
    trees = _captured(request, seen)
    settings = threads.settings(seen, node.cgroups)
    network = seen.root.namespaces["net"]

    def look() -> None:
        caller.progress(_size(part), found.bytes)

    with work_folder() as work, ActionScript(work, "post-dump") as script:
        plan = DumpPlan(
            pid=request.pid,
            images=f"/proc/self/fd/{part}",
            work=str(work),
            script=str(script.path),
            network=network,
            external=external_mounts(seen.mounts),
            watched=[
                # Those of a plain worker are all mounts of the node.
                *(request.control if request.plain else request.ours),
                *(mount.path for mount in _volumes(request, seen)),
            ],
            locks=not request.plain,
        )
        caller.begin("write-images")
        with _Criu([str(node.criu), *dump_arguments(plan)], part, work, script) as criu:
            criu.until_written(watch, look)
            _require_closed(part, request.control)
            sockets = socket_names.renamed(request.pid, seen)
            caller.begin("pack-files")
            for tree in trees:
                in_child(partial(_pack, tree, part), watch)
            caller.begin("thaw-process")
            criu.until_ended(watch, look)
        frozen_s = _frozen_s(work / "stats-dump")
    archives = [tree.archive for tree in trees]
    return _facts(request, found, here, archives, sockets, settings), frozen_s


@contextlib.contextmanager
def _naming_the_disk(part: int, disk: Path, total: int) -> Iterator[None]:
    """Have the error of a full disk say which and how much; `total` is the estimate in bytes."""
    try:
        yield
    except (CriuFailed, NoSpace) as error:
        if isinstance(error, CriuFailed) and criu_log.FULL not in error.message:
            raise
        free = free_bytes(part)
        raise NoSpace(
            f"the disk of {disk} is full: of about {units.size(total)} of the dump "
            f"{units.size(_size(part))} are written, and {units.size(free)} are free "
            f"({error.message})",
            needed=total,
            free=free,
            path=str(disk),
        ) from error


def _frozen_s(stats: Path) -> float | None:
    try:
        return criu_images.frozen_s(stats.read_bytes())
    except (OSError, ArtifactCorrupt) as error:
        # What was dumped is whole.
        log.warning("how long the worker was stopped is not known: %s", error)
        return None


def _facts(
    request: DumpRequest,
    found: Found,
    node: SeenNode,
    archives: list[Archive],
    sockets: list[RenamedSocket],
    settings: list[SourceThread],
) -> SourceFacts:
    seen = found.seen
    links = {each.number: each.link for each in seen.root.descriptors}
    needed = criu_seen.used_mounts(seen) if request.plain else {each.path for each in seen.mounts}
    return SourceFacts(
        criu=node.criu or (),
        kernel=node.kernel,
        host=host_name(request.pid),
        addresses=list(seen.addresses),
        mounts=[
            SourceMount(path=each.path, fs_type=each.fs_type, is_needed=each.path in needed)
            for each in seen.mounts
        ],
        resident=criu_seen.resident(seen),
        capabilities=criu_seen.all_capabilities(seen),
        credentials=credentials_of(seen),
        stdio=[links.get(number, "") for number in range(3)],
        net=seen.root.namespaces["net"],
        processor=list(node.processor),
        archives=archives,
        sockets=sockets,
        threads=settings,
        cuda=found.cuda.facts if found.cuda else None,
    )


class _Criu:
    """CRIU while it dumps. Leaving the block ends a dump that is not over."""

    def __init__(self, argv: Sequence[str], part: int, work: Path, script: ActionScript) -> None:
        """Start it; `work` is the folder of `script`."""
        self._work = work
        self._script = script
        self._criu = subprocess.Popen(
            argv,
            cwd=work,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[part],
            # Python ignores SIGXFSZ, and so has CRIU to: it sees an error and frees the worker.
            restore_signals=False,
            preexec_fn=syscalls.end_with_parent,  # noqa: PLW1509 - there are no threads
        )
        self._pidfd = os.pidfd_open(self._criu.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._criu.returncode is None:
            self._end()
        os.close(self._pidfd)
        if self._criu.returncode < 0:
            raise OutcomeUnknown(
                f"CRIU was ended by signal {-self._criu.returncode} while it dumped, so the "
                "connections of the worker are broken",
                next_step="capture a new worker",
            )

    def until_written(self, watch: Watch, look: Callable[[], None]) -> None:
        """Wait until the images are written."""
        if self._script.asks not in watch.wait(self._script.asks, self._pidfd, look=look):
            self._require_success()

    def until_ended(self, watch: Watch, look: Callable[[], None]) -> None:
        """Have CRIU set the worker free, and wait for its end."""
        self._script.answer(go_on=True)
        watch.wait(self._pidfd, look=look)
        self._require_success()

    def _require_success(self) -> None:
        if self._criu.wait() > 0:
            raise criu_failed(self._work, "dump")

    def _end(self) -> None:
        """Have the dump fail. CRIU is killed when that takes too long."""
        self._script.answer(go_on=False)
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(self._criu.pid, resource.RLIMIT_FSIZE, (0, 0))
        try:
            self._criu.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._criu.kill()
            self._criu.wait()
        KDAT.unlink(missing_ok=True)


def _pack(tree: Captured, part: int) -> None:
    with opened(tree.source()) as source, opened(create_file(part, tree.archive.name)) as sink:
        archive.pack(source, sink, leave_out=tree.leave_out, is_upper=tree.archive.is_upper)


def _volumes(request: DumpRequest, seen: SeenTree) -> list[Mount]:
    return criu_seen.volumes_to_capture(seen, ours=request.ours)


def _captured(request: DumpRequest, seen: SeenTree) -> list[Captured]:
    """Return the trees of files that belong to the state of a container."""
    mounts = [mount.path for mount in seen.mounts]
    found: list[Captured] = []

    def add(path: str, source: Callable[[], int], *, is_upper: bool) -> None:
        row = Archive(name=f"files-{len(found)}.tar", path=path, is_upper=is_upper)
        found.append(Captured(source, row, below(path, mounts)))

    if seen.upper and not request.plain:
        add("/", partial(open_root, seen.upper), is_upper=True)
    for mount in _volumes(request, seen):
        add(mount.path, partial(open_inside, request.pid, mount.path), is_upper=False)
    return found


def below(path: str, mounts: Sequence[str]) -> list[str]:
    """Return the mounts below a path, relative to it."""
    of = PurePosixPath(path)
    return [
        str(PurePosixPath(each).relative_to(of))
        for each in mounts
        if each != path and PurePosixPath(each).is_relative_to(of)
    ]


def host_name(pid: int) -> str:
    """Return the name of a pod's host, as the kubelet has written it into its /etc/hostname.

    A plain worker has the name of its node, which need not have such a file.
    """
    try:
        with opened(open_inside(pid, "/etc")) as folder:
            found = read_bounded(folder, "hostname", 256).decode(errors="replace").strip()
    except (ArtifactCorrupt, ArtifactMissing):
        # The file is of this host, so its absence must not put an artifact into quarantine.
        found = os.uname().nodename
    if not _HOST_NAME.match(found):
        raise NotEligible(f"{found!r} in the container's /etc/hostname is no name of a host")
    return found


def criu_failed(work: Path, verb: criu_log.Verb) -> CriuFailed:
    """Return the error of a CRIU that has failed and left its log in the folder `work`."""
    log = work / f"{verb}.log"
    said = log.read_text(errors="replace") if log.exists() else ""
    message, next_step = criu_log.failure(said, verb)
    return CriuFailed(message, next_step=next_step)


def _size(directory: int) -> int:
    with os.scandir(directory) as entries:
        return sum(entry.stat().st_size for entry in entries)
