"""How the containers of a pod are found on a node: by what the kernel says of their processes.

The runtime puts every container into a cgroup below that of its pod, and the kubelet mounts a file
of `<its folder>/pods/<uid>/containers/<name>` into each, for its termination message. Neither can
be changed from within a container without privileges. Source of both: the kubelet, for cgroups of
version 1 and 2, with the drivers `cgroupfs` and `systemd`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from snapshot_agent.domain.control import Access
from snapshot_agent.domain.mounts import Mount, mounts_in
from snapshot_shared.volumes import CONTROL_VOLUME, GMS_VOLUME, INIT_VOLUME


class SeenProcess(NamedTuple):
    """A process of a pod: `container` is the name of its cgroup. `start` is in clock ticks."""

    pid: int
    start: int
    container: str


def container_in(cgroups: str, pod_uid: str) -> str | None:
    """Return the cgroup of a container of this pod, given /proc/<pid>/cgroup.

    None for processes of other pods and of the host.
    """
    names = {f"pod{pod_uid}", f"pod{pod_uid.replace('-', '_')}.slice"}
    for line in cgroups.splitlines():
        path = line.partition(":")[2].partition(":")[2]
        # A name for systemd, `<slice>:<prefix>:<id>`, is the name of one folder where the kubelet
        # uses systemd and the runtime does not.
        parts = (part for each in path.split("/") for part in each.split(":", 1))
        for above, name in itertools.pairwise(parts):
            # systemd repeats the names above in each: kubepods-burstable-pod<uid>.slice.
            if above in names or above.rpartition("-")[2] in names:
                return name
    return None


def name_in(mounts: str, pod_uid: str) -> str | None:
    """Return the name of a container of this pod, given /proc/<pid>/mountinfo of a process.

    None for a process that has no mount of the kubelet's folder of a container.
    """
    pattern = re.compile(rf"/pods/{re.escape(pod_uid)}/containers/([^/]+)/[^/]+$")
    for mount in mounts_in(mounts):
        if found := pattern.search(mount.root):
            return found[1]
    return None


def own_mounts(
    mounts: Iterable[Mount],
    pod_uid: str,
    volumes: Iterable[str] = (CONTROL_VOLUME, GMS_VOLUME, INIT_VOLUME),
) -> list[str]:
    """Return the mounts of a container by which it meets the services of its node."""
    names = "|".join(map(re.escape, volumes))
    pattern = re.compile(rf"/pods/{re.escape(pod_uid)}/volumes/kubernetes\.io~empty-dir/({names})/")
    return [mount.path for mount in mounts if pattern.search(f"{mount.root}/")]


def first_processes(seen: Iterable[SeenProcess]) -> list[SeenProcess]:
    """Return the first process of each container, which the runtime has started before others."""
    firsts: dict[str, SeenProcess] = {}
    for process in sorted(seen, key=lambda each: (each.start, each.pid)):
        firsts.setdefault(process.container, process)
    return list(firsts.values())


def access_of(status: str, uid_map: str, gid_map: str) -> Access:
    """Return the owner of what a process may read in a volume, given its files of /proc.

    A pod with a user namespace has its volumes mapped: on the disk they have its own ids.
    """
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    uid, gid = (int(fields[name].split()[1]) for name in ("Uid", "Gid"))
    return Access(_inside(uid, uid_map), _inside(gid, gid_map))


def _inside(outside: int, mapping: str) -> int:
    for line in mapping.splitlines():
        inside, begin, count = map(int, line.split())
        if begin <= outside < begin + count:
            return inside + outside - begin
    return outside


def command_of(cmdline: bytes) -> Sequence[str]:
    """Return the arguments of a process, given /proc/<pid>/cmdline."""
    return [word.decode(errors="replace") for word in cmdline.split(b"\0")[:-1]]


def restored_pid(data: bytes) -> int | None:
    """Return the pid in the file of a restored process; None when it is none."""
    text = data.strip()
    return int(text) if text.isdigit() and len(text) <= 10 else None
