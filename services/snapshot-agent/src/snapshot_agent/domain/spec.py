"""Builds the process of a container from the spec of its pod.

Command, arguments and environment are expanded as Kubernetes does it: `$(NAME)` is replaced when
NAME is known by then, stays as it is when not, and `$$` is one `$`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import NamedTuple

from snapshot_agent.domain import control
from snapshot_agent.domain.control import CONTROL_DIR, ContainerPaths
from snapshot_shared.errors import InvalidInput
from snapshot_shared.objects.kubernetes import GPU_RESOURCE, Container
from snapshot_shared.orders import DeviceRef, PodRef

_REFERENCE = re.compile(r"\$(?:\$|\(([^()]*)\))")

STANDBY = "SNAPSHOT_RESTORE_STANDBY"
OURS = frozenset({CONTROL_DIR, STANDBY, "POD_UID", "SNAPBACK_RUN"})
"""Variables that a manifest cannot set, because processes are found by them."""

RESUME_FROM = "--resume-from"
"""The argument of a program that is started from its state, followed by the folder of the state."""


class NodeEnvironment(NamedTuple):
    """What the node adds to a process. `path` and `home` are those of the agent."""

    node: str
    run: str
    socket_dir: PurePath
    workdir: Path
    path: str
    home: str


class ProcessSpec(NamedTuple):
    """A process to start: its arguments, its whole environment, and where."""

    argv: list[str]
    env: dict[str, str]
    cwd: Path
    paths: ContainerPaths


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
) -> ProcessSpec:
    """Build the process of one container. InvalidInput when it has no command."""
    if not container.command:
        raise InvalidInput(
            f"container {container.name} has no command, and images are not pulled here",
            next_step="give it a command",
            container=container.name,
        )
    env = _own_env(pod, devices, environment, where, standby=standby, traceparent=traceparent)
    for variable in container.env:
        if variable.name not in OURS:
            env[variable.name] = expand(variable.value, env)
    argv = [expand(text, env) for text in (*container.command, *container.args)]
    cwd = (
        environment.workdir / container.working_dir
        if container.working_dir
        else environment.workdir
    )
    return ProcessSpec(argv, env, cwd, where)


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
    where: ContainerPaths,
    *,
    standby: bool,
    traceparent: str,
) -> dict[str, str]:
    ordered = sorted(devices, key=lambda device: device.ordinal)
    env = {
        "PATH": environment.path,
        "HOME": environment.home,
        CONTROL_DIR: str(where.control),
        "GMS_SOCKET_DIR": str(environment.socket_dir),
        "NVIDIA_VISIBLE_DEVICES": ",".join(device.uuid for device in ordered),
        "POD_NAME": pod.name,
        "POD_NAMESPACE": pod.namespace,
        "POD_UID": pod.uid,
        "POD_SOCKET_DIR": str(where.sockets),
        "NODE_NAME": environment.node,
        "SNAPBACK_RUN": environment.run,
    }
    if standby:
        env[STANDBY] = "1"
    if traceparent:
        env["TRACEPARENT"] = traceparent
    return env


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
