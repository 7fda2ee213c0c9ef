"""How CRIU is called: its arguments, from what was observed of a worker and of a placeholder.

A container's mounts are those of its pod, which the target has, too. So all of them but the root
and those of proc are external to CRIU, each called by its path.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from snapshot_agent.domain.criu_source import SourceMount
from snapshot_agent.domain.mounts import Mount

NETWORK = "extNetNs"
"""What the network namespace of a container is called, which is its pod's."""

GHOST_LIMIT = "1G"
"""The longest unlinked file that is kept in the images."""

_COMMON = (
    "-v4",
    "--manage-cgroups=ignore",
    "--tcp-established",
    "--file-locks",
    "--link-remap",
    "--ghost-limit",
    GHOST_LIMIT,
    "--force-irmap",
)


def external_mounts(
    mounts: Iterable[Mount | SourceMount], *, left_out: Collection[str] = ()
) -> list[str]:
    """Return the paths of the mounts that source and target each have of their own."""
    # Of those at one path the last covers the others.
    types = {mount.path: mount.fs_type for mount in mounts if mount.path not in left_out}
    return [path for path, fs_type in types.items() if path != "/" and fs_type != "proc"]


class DumpPlan(NamedTuple):
    """A dump of process `pid`.

    `images` is the folder of the images and `work` that of the log. `script` is run before and
    after each part of the dump. `watched` are folders in which watches of inotify are looked for.
    With `locks` the whole network is locked meanwhile, which is right for one of its own alone.
    """

    pid: int
    images: str
    work: str
    script: str
    network: int
    external: Sequence[str]
    watched: Sequence[str] = ()
    locks: bool = True


def dump_arguments(plan: DumpPlan) -> list[str]:
    """Return the arguments of `criu dump`. The process goes on afterwards."""
    found = ["dump", "--tree", str(plan.pid), "--leave-running", *_places(plan.images, plan.work)]
    found += ["--log-file", "dump.log", *_COMMON]
    found += ["--network-lock", "nftables" if plan.locks else "skip"]
    found += ["--external", f"net[{plan.network}]:{NETWORK}", "--action-script", plan.script]
    for path in plan.external:
        found += ["--external", f"mnt[{path}]:{path}"]
    for path in plan.watched:
        found += ["--irmap-scan-path", path]
    return found


class RestorePlan(NamedTuple):
    """A restore into namespaces that its caller has entered.

    `root` is where a copy of the target's mounts is. `network` is a descriptor of the target's
    network namespace; `pipes` has the target's descriptor for each pipe of the source, by its link
    text. `pidfile` gets the pid of the restored process. `script` is run before and after each
    part of the restore, if there is one.
    """

    images: str
    work: str
    root: str
    pidfile: str
    network: int
    external: Sequence[str]
    pipes: Mapping[str, int]
    script: str = ""


def restore_arguments(plan: RestorePlan) -> list[str]:
    """Return the arguments of `criu restore`, which ends when the process runs."""
    found = ["restore", *_places(plan.images, plan.work), "--log-file", "restore.log", *_COMMON]
    found += ["--network-lock", "skip", "--evasive-devices", "--restore-detached"]
    found += ["--root", plan.root, "--pidfile", plan.pidfile]
    found += ["--action-script", plan.script] if plan.script else []
    found += ["--inherit-fd", f"fd[{plan.network}]:{NETWORK}"]
    for link, descriptor in plan.pipes.items():
        found += ["--inherit-fd", f"fd[{descriptor}]:{link}"]
    for name in ("uts", "ipc"):
        # Of the placeholder's first process: the child that becomes CRIU is in its namespaces.
        found += ["--join-ns", f"{name}:/proc/1/ns/{name}"]
    for path in plan.external:
        found += ["--external", f"mnt[{path}]:{plan.root}{path}"]
    return found


def inherited(stdio: Sequence[str], descriptors: Sequence[int]) -> dict[str, int]:
    """Return the descriptor for each pipe among a source's standard streams, by its link text."""
    found: dict[str, int] = {}
    for link, descriptor in zip(stdio, descriptors, strict=True):
        if link.startswith("pipe:"):
            found.setdefault(link, descriptor)
    return found


def _places(images: str, work: str) -> list[str]:
    return ["--images-dir", images, "--work-dir", work]
