"""The guide for several machines, typed on machines of their own: networks, mounts, processes."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.host import ip
from tests.cluster.machine import ComponentError, Machine, end
from tests.docs.pages import ROOT, blocks
from tests.support import systemctl

pytestmark = pytest.mark.timeout(400)

PAGE = ROOT / "docs/how-to/run-on-several-machines.md"
TYPED = "tests/process/test_several_machines.py types it on "
ADDRESSES = {"operator": "10.0.0.1", "node-1": "10.0.0.2", "node-2": "10.0.0.3"}
AS_A_PERSON = (
    "NATS_URL=tls://10.0.0.1:4222",
    "NATS_NKEY=/etc/snapback/snapshotctl.nk",
    "NATS_CA=/etc/snapback/ca.pem",
)
WAIT_S = 90.0
PYTHON = "/opt/snapback/.venv/bin/python"
CONNECT = """
import asyncio, sys
from pathlib import Path
from snapshot_shared.bus import Bus
from snapshot_shared.permissions import User
role, node, seed = sys.argv[1:]
bus = Bus("tls://10.0.0.1:4222", "test", credentials=seed, inbox=User(role, node).inbox,
          ca=Path("/etc/snapback/ca.pem"))
async def main():
    await bus.connect(patiently=False)
    await bus.close()
asyncio.run(main())
"""


def lacking() -> str:
    if os.geteuid() != 0:
        return "needs root"
    missing = [name for name in ("gcc", "ip", "openssl", "unshare") if shutil.which(name) is None]
    return f"{', '.join(missing)} missing" if missing else ""


def root_of(machine: Machine) -> Path:
    """Return where this host has what a machine writes below /root."""
    return machine.home / "layers/root"


class Machines:
    """The machines of the guide, joined by one network; `shared` is what all nodes mount."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.all = {name: Machine(folder, name) for name in ADDRESSES}
        self.blocks = [
            (block.how.because.removeprefix(TYPED), "\n".join(block.commands))
            for block in blocks(PAGE)
            if block.how is not None and block.how.because.startswith(TYPED)
        ]

    def boot(self, lifeline: int) -> None:
        (self.folder / "bin").mkdir()
        (self.folder / "artifacts").mkdir()
        source = ROOT / "tests/cluster/init.c"
        subprocess.run(["gcc", "-static", "-O2", "-o", self.folder / "init", source], check=True)
        (self.folder / "bin" / "snapshotctl").symlink_to(ROOT / ".venv/bin/snapshotctl")
        shim = self.folder / "bin" / "systemctl"
        shim.write_text(f'#!/bin/sh\nexec {sys.executable} {systemctl.__file__} "$@"\n')
        for name in ("systemd-sysusers", "systemd-tmpfiles"):
            # There is no user but root on these machines.
            (self.folder / "bin" / name).write_text("#!/bin/sh\n")
        for program in (self.folder / "bin").iterdir():
            program.chmod(0o755)
        for machine in self.all.values():
            machine.boot(lifeline)
            for name in ("root", "opt", "mnt"):
                upper, work = machine.home / "layers" / name, machine.home / "layers/work" / name
                for layer in (upper, work):
                    layer.mkdir(parents=True)
                # The Python of this host may be below it.
                layers = f"lowerdir=/{name},upperdir={upper},workdir={work}"
                machine.run("mount", "-t", "overlay", "-o", layers, "overlay", f"/{name}")
            for source, target in (
                (ROOT, "/opt/snapback"),
                (self.folder / "artifacts", "/mnt/artifacts"),
            ):
                machine.run("sh", "-c", f"mkdir -p {target}; mount --bind {source} {target}")
        self._join()

    def _join(self) -> None:
        hub = self.all["operator"].pid
        ip("link add hub type bridge", "link set hub up", network_of=hub)
        ip(f"address add {ADDRESSES['operator']}/24 dev hub", network_of=hub)
        for name in ("node-1", "node-2"):
            pid = self.all[name].pid
            ip(f"link add {name} netns {hub} type veth peer name eth0 netns {pid}")
            ip(f"link set {name} master hub up", network_of=hub)
            ip(f"address add {ADDRESSES[name]}/24 dev eth0", "link set eth0 up", network_of=pid)

    def type_next(self, wanted: str) -> str:
        """Type the next block of the guide on its machine, which is the one that is expected."""
        name, commands = self.blocks.pop(0)
        assert name == wanted
        return self.all[name].run("bash", "-ec", commands)

    def copy_keys(self, node: str) -> None:
        keys, into = root_of(self.all["operator"]) / "keys", root_of(self.all[node]) / "keys"
        into.mkdir()
        shutil.copy(keys / "ca.pem", into)
        for user in (f"agent-{node}", f"gms-{node}"):
            shutil.copytree(keys / user, into / user)

    def ask(self, *words: str) -> str:
        """Run snapshotctl as a person does on the operator's machine."""
        return self.all["operator"].run("env", *AS_A_PERSON, "snapshotctl", *words)

    def until(self, wanted: str, *words: str) -> str:
        """Ask until the answer has something in it, as a person does."""
        limit, said = time.monotonic() + WAIT_S, ""
        while time.monotonic() < limit:
            with contextlib.suppress(ComponentError):
                said = self.ask(*words)
                if wanted in said:
                    return said
            time.sleep(0.5)
        pytest.fail(f"no {wanted!r} in: {said}\n{self.logs()}")

    def logs(self) -> str:
        found = []
        for machine in self.all.values():
            with contextlib.suppress(ComponentError):
                found.append(machine.run("sh", "-c", "tail -n 15 /run/units/*.log"))
        return "\n".join(found)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    if why := lacking():
        pytest.skip(why)
    lifeline, ours = os.pipe()
    found = Machines(tmp_path / "site")
    found.folder.mkdir()
    try:
        found.boot(lifeline)
        yield found
    finally:
        os.close(lifeline)
        os.close(ours)
        end(found.folder)


def answers(machine: Machine) -> str:
    """Ask the worker of a machine a question."""
    find = "cd $(dirname $(find /run/snapback -name worker.sock)) && POD_SOCKET_DIR=$PWD"
    program = f"{PYTHON} /opt/snapback/deploy/examples/ask.py"
    return machine.run("sh", "-c", f"{find} {program} 'What is my name?'")


def connects(machine: Machine, role: str, node: str) -> bool:
    """Whether NATS lets in a user of a node, by its key in the folder of all keys."""
    words = (PYTHON, "-c", CONNECT, role, node, f"keys/{role}-{node}/seed.nk")
    done = subprocess.run(machine.inside("env", "--chdir=/root", *words), check=False)
    return done.returncode == 0


def test_the_guide_for_several_machines_does_what_it_says(machines: Machines) -> None:
    machines.type_next("operator")
    machines.type_next("operator")
    for node in ("node-1", "node-2"):
        machines.copy_keys(node)
        machines.type_next(node)
    machines.until("node-2", "nodes")
    machines.type_next("operator")
    before = answers(machines.all["node-1"])
    machines.all["node-1"].kill()
    machines.type_next("operator")
    assert answers(machines.all["node-2"]) == before
    machines.type_next("operator")
    assert connects(machines.all["operator"], "agent", "node-3")
    machines.type_next("operator")
    machines.until("demo-llm", "get", "dynamocheckpoint")
    machines.ask("delete", "dynamocheckpoint", "demo-llm")
    machines.type_next("operator")
    machines.until("demo-llm", "get", "dynamocheckpoint")
    assert answers(machines.all["node-2"]) == before
    assert not machines.blocks
