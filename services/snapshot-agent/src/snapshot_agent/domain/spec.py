"""Builds the process of a container from the spec of its pod.

Command, arguments and environment are expanded as Kubernetes does it: `$(NAME)` is replaced when
NAME is known by then, stays as it is when not, and `$$` is one `$`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import NamedTuple

from snapshot_agent.domain import control
from snapshot_agent.domain.control import CONTROL_DIR, ContainerPaths
from snapshot_agent.domain.mounts import Mount
from snapshot_api.facts import GPU_RESOURCE, Container
from snapshot_shared.errors import InvalidInput
from snapshot_shared.orders import PLACEHOLDER_DRIVERS, DeviceRef, PodRef, RunOrder

_REFERENCE = re.compile(r"\$(?:\$|\(([^()]*)\))")

STANDBY = "SNAPSHOT_RESTORE_STANDBY"
OURS = frozenset({CONTROL_DIR, STANDBY, "POD_UID", "SNAPBACK_RUN"})
"""Variables that a manifest cannot set, because processes are found by them."""

RESUME_FROM = "--resume-from"
"""The argument of a program that is started from its state, followed by the folder of the state."""


INSIDE = PurePath("/dev/shm/snapback")  # noqa: S108 - a mount of the worker's own
"""Where a worker with namespaces of its own has its folders, sockets and log.

Its process remembers these paths, so that they are the same wherever it is restored.
"""

INIT = "snapback-init"
"""The program that waits in a placeholder."""
# `unshare --fork` itself exits with 1 after a child that was killed.
_APART = ("unshare", "--mount", "--pid", "--uts", "--ipc", "sh", "-c", '"$@"; exit "$?"', "sh")
_PROGRAM = f"""set -eu
umount --lazy --recursive /proc
mount -t proc proc /proc
mount -t tmpfs -o mode=1777 tmpfs {INSIDE.parent}
mkdir {INSIDE}
while [ "$1" != -- ]; do
    if [ -d "$2" ]; then mkdir "{INSIDE}/$1"; else touch "{INSIDE}/$1"; fi
    mount --bind "$2" "{INSIDE}/$1"
    shift 2
done
shift
export {CONTROL_DIR}={INSIDE}/control
# What was opened before is on a mount that CRIU does not find here.
exec </dev/null >>{INSIDE}/log 2>&1
exec setsid "$@"
"""
"""Becomes the first process of new namespaces: its arguments are names below `INSIDE`, each with
the path that is seen there, then `--` and a command."""


class NodeEnvironment(NamedTuple):
    """What the node adds to a process. `path` and `home` are those of the agent.

    `init` is the program that waits in a placeholder, and `confined` are the words of the one that
    starts a worker of CRIU without io_uring. With `cuda` the devices of the node are GPUs,
    of which a process sees those that it was given.
    """

    node: str
    run: str
    socket_dir: PurePath
    workdir: Path
    path: str
    home: str
    init: Path
    confined: Sequence[str] = ()
    cuda: bool = False


class ProcessSpec(NamedTuple):
    """A process to start: its arguments, its whole environment, and where.

    `before` are the words of the program that starts it in namespaces of its own, or none.
    """

    argv: list[str]
    env: dict[str, str]
    cwd: Path
    paths: ContainerPaths
    before: Sequence[str] = ()


def expand(text: str, known: Mapping[str, str]) -> str:
    """Replace `$(NAME)` where NAME is known, and `$$` by `$`."""

    def value(match: re.Match[str]) -> str:
        name = match[1]
        return "$" if name is None else known.get(name, match[0])

    return _REFERENCE.sub(value, text)


def process_spec(
    container: Container,
    pod: PodRef,
    devices: Sequence[DeviceRef],
    environment: NodeEnvironment,
    where: ContainerPaths,
    *,
    standby: bool,
    traceparent: str,
    apart: bool = False,
) -> ProcessSpec:
    """Build the process of one container. InvalidInput when it has no command.

    With `apart` it gets namespaces of its own, but for that of the network. Its file systems are
    the node's but for /dev/shm. A placeholder waits there for a process.
    """
    if not container.command:
        raise InvalidInput(
            f"container {container.name} has no command, and images are not pulled here",
            next_step="give it a command",
            container=container.name,
        )
    folders = _Folders(where.control, where.sockets, environment.socket_dir)
    env = _own_env(
        pod,
        devices,
        environment,
        _Folders(*(INSIDE / name for name in _Folders._fields)) if apart else folders,
        standby=standby,
        traceparent=traceparent,
    )
    for variable in container.env:
        if variable.name not in OURS:
            env[variable.name] = expand(variable.value, env)
    argv = [expand(text, env) for text in (*container.command, *container.args)]
    cwd = (
        environment.workdir / container.working_dir
        if container.working_dir
        else environment.workdir
    )
    if not apart:
        return ProcessSpec(argv, env, cwd, where)
    # By this the process that starts it is found.
    env[CONTROL_DIR] = str(where.control)
    return ProcessSpec(argv, env, cwd, where, _before(folders, environment, where))


class _Folders(NamedTuple):
    """The folders by which a worker meets the services of its node."""

    control: PurePath
    sockets: PurePath
    gms: PurePath


def _before(folders: _Folders, environment: NodeEnvironment, where: ContainerPaths) -> list[str]:
    seen = {**folders._asdict(), "log": where.log}
    # A restored process has the filter that it had, by CRIU.
    command = [*environment.confined]
    if where.placeholder is not None:
        seen |= {"init": where.placeholder, f"init/{INIT}": environment.init}
        command = [str(INSIDE / "init" / INIT), "--"]
    pairs = [str(word) for pair in seen.items() for word in pair]
    return [*_APART, "sh", "-c", _PROGRAM, "sh", *pairs, "--", *command]


def resumed(spec: ProcessSpec, *, is_standby: bool) -> ProcessSpec:
    """Return the process that continues from the state of another.

    With `is_standby` it waits for the end of a restore, otherwise for that of its capture.
    """
    argv = list(spec.argv)
    if RESUME_FROM in argv:
        at = argv.index(RESUME_FROM)
        del argv[at : at + 2]
    argv += [RESUME_FROM, str(spec.paths.control / control.STATE)]
    env = {name: value for name, value in spec.env.items() if name != STANDBY}
    if is_standby:
        env[STANDBY] = "1"
    return spec._replace(argv=argv, env=env)


def _own_env(
    pod: PodRef,
    devices: Sequence[DeviceRef],
    environment: NodeEnvironment,
    folders: _Folders,
    *,
    standby: bool,
    traceparent: str,
) -> dict[str, str]:
    uuids = ",".join(device.uuid for device in sorted(devices, key=lambda device: device.ordinal))
    env = {
        "PATH": environment.path,
        "HOME": environment.home,
        CONTROL_DIR: str(folders.control),
        "GMS_SOCKET_DIR": str(folders.gms),
        "NVIDIA_VISIBLE_DEVICES": uuids,
        "POD_NAME": pod.name,
        "POD_NAMESPACE": pod.namespace,
        "POD_UID": pod.uid,
        "POD_SOCKET_DIR": str(folders.sockets),
        "NODE_NAME": environment.node,
        "SNAPBACK_RUN": environment.run,
    }
    if environment.cuda:
        # No container runtime takes the other devices away.
        env["CUDA_VISIBLE_DEVICES"] = uuids
    if standby:
        env[STANDBY] = "1"
    if traceparent:
        env["TRACEPARENT"] = traceparent
    return env


def is_apart(order: RunOrder) -> bool:
    """Whether the workers of a pod get namespaces of their own, as CRIU needs them."""
    return order.driver in PLACEHOLDER_DRIVERS


def waits(order: RunOrder, container: str) -> bool:
    """Whether a container of a pod waits for a restore."""
    return order.standby and (not is_apart(order) or container == order.pod.container)


def nodes_mounts(mounts: Iterable[Mount]) -> list[str]:
    """Return those of the mounts of a worker in its namespaces that a dump does not have.

    They are the node's, as its root is, or those below `INSIDE`.
    """
    return [each.path for each in mounts if each.path not in ("/", str(INSIDE.parent))]


def shared_out(
    containers: Sequence[Container], devices: Sequence[DeviceRef]
) -> dict[str, list[DeviceRef]]:
    """Return the devices of each container by its limits, in the order of their ordinals.

    Devices beyond all limits go to the first container.
    """
    left = sorted(devices, key=lambda device: device.ordinal)
    found: dict[str, list[DeviceRef]] = {}
    for container in containers:
        wanted = int(container.resources.limits.get(GPU_RESOURCE, 0))
        found[container.name], left = left[:wanted], left[wanted:]
    found[containers[0].name] += left
    return found
