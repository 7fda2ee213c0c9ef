"""The files of a machine that runs Snapback under systemd, as values.

A machine of the role `operator` has nats-server, the operator and the page; one of the role `node`
has a GPU memory service and an agent. Units have no paths of their own choice: state is in
/var/lib/snapback, sockets in /run/snapback, everything that a person sets in /etc/snapback.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

from snapshot_shared.ids import NodeName
from snapshot_shared.permissions import User

RoleName = Literal["operator", "node"]

CONFIGURATION = PurePosixPath("/etc/snapback")
STATE = PurePosixPath("/var/lib/snapback")
SOCKETS = PurePosixPath("/run/snapback")
SERVER_CONFIGURATION = CONFIGURATION / "nats-server.conf"
SERVER_STORE = STATE / "nats"
CA = CONFIGURATION / "ca.pem"

_SYSTEM = PurePosixPath("/etc/systemd/system")
_USER = "snapback"
_READ = ("*.nk", "*.env", "ca.pem", "nats.crt", "nats.key", SERVER_CONFIGURATION.name)
"""What services read that others may not; people may have more in the folder."""


class Programs(NamedTuple):
    """Where the programs of a machine are."""

    python: str
    nats_server: str = ""


class NodeOptions(NamedTuple):
    """What is particular to a node. `devices` counts simulated GPUs; None serves those of CUDA."""

    name: NodeName
    artifacts: Path
    devices: int | None = None


class File(NamedTuple):
    """A file to install. One that people change (`is_theirs`) is written only once."""

    path: PurePosixPath
    text: str
    mode: int = 0o644
    is_theirs: bool = False


class Service(NamedTuple):
    """One unit, the variables that people may change, and the folder that has to be mounted."""

    name: str
    what: str
    command: tuple[str, ...]
    after: tuple[str, ...] = ()
    variables: Mapping[str, str] | None = None
    lines: tuple[str, ...] = ()
    mounted: Path | None = None

    @property
    def unit(self) -> str:
        """The name of its unit."""
        return f"snapback-{self.name}.service"


def users_of(role: RoleName, node: NodeName | None) -> list[User]:
    """Return the users of NATS whose seeds a machine of a role has."""
    if role == "operator":
        return [User("operator"), User("viewer"), User("snapshotctl")]
    return [User("agent", node), User("gms", node)]


def seed_path(user: User) -> PurePosixPath:
    """Return where a machine has the seed of a user."""
    return CONFIGURATION / f"{user.name}.nk"


def operator_services(programs: Programs, url: str, *, has_ca: bool) -> list[Service]:
    """Return the services of the machine of the operator, in the order of their start."""
    server = (programs.nats_server, "--config", str(SERVER_CONFIGURATION))
    # A new configuration has other users.
    reload = "ExecReload=/bin/kill -HUP $MAINPID"
    operator = _common(url, User("operator"), has_ca=has_ca)
    page = _common(url, User("viewer"), has_ca=has_ca)
    del page["SNAPBACK_STATE_DIR"]
    return [
        Service("nats", "NATS server of Snapback", server, lines=(*_state("nats"), reload)),
        Service(
            "operator",
            "Snapback operator",
            (programs.python, "-P", "-m", "snapshot_operator.main"),
            after=("nats",),
            variables=operator,
            lines=_state("operator"),
        ),
        Service(
            "page",
            "Snapback page",
            (programs.python, "-P", "-m", "snapshot_page.main"),
            after=("nats",),
            variables={**page, "SNAPBACK_HTTP_ADDRESS": "127.0.0.1:8080"},
        ),
    ]


def node_services(
    programs: Programs, url: str, node: NodeOptions, *, has_ca: bool
) -> list[Service]:
    """Return the services of a node, in the order of their start."""
    shared = {
        "SNAPBACK_NODE": node.name,
        "SNAPBACK_ARTIFACT_ROOT": str(node.artifacts),
        "SNAPBACK_SOCKET_DIR": str(SOCKETS),
    }
    if node.devices is None:
        shared["SNAPBACK_GMS_DEVICE"] = "cuda"
    else:
        shared |= {"SNAPBACK_GMS_DEVICE": "simulated", "SNAPBACK_DEVICES": str(node.devices)}
    # Workers are connected to what is in it, also while a service is started again.
    sockets = ("RuntimeDirectory=snapback", "RuntimeDirectoryPreserve=yes")
    return [
        Service(
            "gms",
            "Snapback GPU memory service",
            (programs.python, "-P", "-m", "gms.main"),
            variables=_common(url, User("gms", node.name), has_ca=has_ca) | shared,
            lines=(*_state("gms"), *sockets, "LimitMEMLOCK=infinity"),
            mounted=node.artifacts,
        ),
        Service(
            "agent",
            "Snapback agent",
            (programs.python, "-P", "-m", "snapshot_agent.main"),
            after=("gms",),
            variables=_common(url, User("agent", node.name), has_ca=has_ca) | shared,
            # The workers are its children and outlive it, and so do their guards.
            lines=(*_state("agent"), *sockets, "KillMode=process"),
            mounted=node.artifacts,
        ),
    ]


def files_of(services: Iterable[Service]) -> list[File]:
    """Return the units of services, the files of their variables, and the user that they have."""
    found = [
        File(PurePosixPath("/etc/sysusers.d/snapback.conf"), f'u {_USER} - "Snapback"\n'),
        File(
            PurePosixPath("/etc/tmpfiles.d/snapback.conf"),
            "".join(f"z {CONFIGURATION}/{name} 0640 root {_USER}\n" for name in _READ),
        ),
    ]
    for service in services:
        found.append(File(_SYSTEM / service.unit, _unit(service)))
        if service.variables is not None:
            text = "".join(f"{name}={_value(v)}\n" for name, v in sorted(service.variables.items()))
            found.append(File(_environment(service), text, 0o640, is_theirs=True))
    return found


def next_steps(services: Iterable[Service]) -> list[str]:
    """Return the commands that have systemd start what was installed."""
    return [
        "systemd-sysusers && systemd-tmpfiles --create",
        "systemctl daemon-reload",
        f"systemctl enable --now {' '.join(service.unit for service in services)}",
    ]


def _common(url: str, user: User, *, has_ca: bool) -> dict[str, str]:
    found = {
        "SNAPBACK_NATS_URL": url,
        "SNAPBACK_NATS_CREDENTIALS": str(seed_path(user)),
        "SNAPBACK_STATE_DIR": str(STATE / user.role),
    }
    return found | ({"SNAPBACK_NATS_CA": str(CA)} if has_ca else {})


def _state(name: str) -> tuple[str, ...]:
    return (f"StateDirectory=snapback/{name}", "StateDirectoryMode=0700")


def _environment(service: Service) -> PurePosixPath:
    return CONFIGURATION / f"{service.name}.env"


def _unit(service: Service) -> str:
    before = [f"snapback-{name}.service" for name in service.after]
    mounts = [] if service.mounted is None else [f"RequiresMountsFor={_word(str(service.mounted))}"]
    lines = [
        "[Unit]",
        f"Description={service.what}",
        f"After={' '.join(['network-online.target', *before])}",
        "Wants=network-online.target",
        *mounts,
        "",
        "[Service]",
        f"User={_USER}",
        *([f"EnvironmentFile={_environment(service)}"] if service.variables is not None else []),
        f"ExecStart={' '.join(map(_word, service.command))}",
        *service.lines,
        "LimitNOFILE=65536",
        "Restart=always",
        "RestartSec=1",
        "",
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    return "\n".join(lines) + "\n"


def _word(text: str) -> str:
    """Return one word of a line of a unit, where `%` and `$` have a meaning (systemd.service)."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if set(escaped) & set(" \t'\"\\;") else escaped


def _value(text: str) -> str:
    """Return the value of a variable in a file of variables (systemd.exec, EnvironmentFile=)."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"' if set(escaped) & set(" \t'\"\\;#") else escaped
