"""A machine of a cluster: namespaces of processes, mounts, network and host name on this host.

Its process 1 holds them. When it ends, the kernel kills every process of the machine and removes
its mounts and its network; so nothing of a machine has to be found and ended one by one.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from tests.cluster.programs import CGROUPS, hierarchies

END_S = 30.0
TAIL_LINES = 15
MARK = "SNAPBACK_MACHINE"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BOUND = {
    "/etc/cdi": "cdi",
    "/etc/cni/net.d": "cni",
    "/var/lib/cni": "ipam",
    "/var/lib/containerd": "containerd",
    "/var/lib/kubelet": "kubelet",
    "/var/lib/snapback": "snapback",
}
"""Folders of a machine that are folders of its home on the host, by their paths in the machine."""
_BOOTED = "booted"
# What a node writes into /etc and below /var stays in its home, and a node sees nothing of another
# one: the layer of each takes the writes. /run is empty, as after a boot.
_BOOT = """
set -e
home=$1 name=$2 init=$3
shift 3
mount --make-rshared /
mount -t proc proc /proc
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/lock /run/netns
for each in etc var/lib var/log; do
    mkdir -p "$home/layers/$each" "$home/layers/work/$each"
    work=$home/layers/work/$each
    mount -t overlay -o "lowerdir=/$each,upperdir=$home/layers/$each,workdir=$work" overlay "/$each"
done
while [ "$1" ]; do
    mkdir -p "$1" "$home/$2"
    mount --bind "$home/$2" "$1"
    shift 2
done
hostname "$name"
ip link set lo up
echo booted
exec "$init" ${SNAPBACK_OWNED:+owned} >/dev/null 2>&1
"""
# The shell between the machine's process 1 and a component records how the component ends.
_START = """
log=$2.log into=$1
shift 2
{ "$@" & echo $! >"$into.pid"; wait $!; echo $? >"$into.new"; mv "$into.new" "$into.exit"; } \
    </dev/null >>"$log" 2>&1 &
until [ -s "$into.pid" ]; do sleep 0.01; done
"""


class ComponentError(Exception):
    """A component or a command of a machine failed; says which, how, and what to look at."""


class Machine:
    """The machine `name` of the cluster in `folder`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.home = folder / name
        self.cgroup = f"/{cgroup_of(folder)}/{name}"
        self._cluster = folder

    @property
    def pid(self) -> int | None:
        """Its process 1, by its id on the host; none where the machine does not run."""
        for pid, name in marked(self._cluster):
            if name == self.name and _is_first(pid):
                return pid
        return None

    def boot(self, lifeline: int | None) -> None:
        """Start the machine; it ends when the other end of the pipe `lifeline` is closed."""
        for folder in ("log", "components"):
            (self.home / folder).mkdir(parents=True, exist_ok=True)
        words = ["unshare", "--mount", "--net", "--uts", "--pid", "--fork", "--propagation=slave"]
        words += ["sh", "-c", _BOOT, "sh", str(self.home), self.name, str(self._cluster / "init")]
        words += [word for path, name in BOUND.items() for word in (path, name)]
        environment = self.environment()
        if lifeline is not None:
            environment["SNAPBACK_OWNED"] = "1"
        with subprocess.Popen(
            # Its parent is to be no process of ours, which would have to wait for its end.
            ["sh", "-c", 'exec 3<&0; "$@" <&3 3<&- &', "sh", *words],
            stdin=subprocess.DEVNULL if lifeline is None else lifeline,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=environment,
        ) as process:
            assert process.stdout
            said = list(_until_booted(process.stdout))
        if not said or said[-1] != _BOOTED:
            raise ComponentError(f"{self.name} did not boot: {' '.join(said)}")

    def run(self, *words: str, given: str | IO[bytes] = "") -> str:
        """Run a command in the machine and return its standard output.

        Raise ComponentError when it fails.
        """
        with_text = given.encode() if isinstance(given, str) else None
        done = subprocess.run(
            self.inside(*words),
            input=with_text,
            stdin=None if with_text is not None else given,  # type: ignore[arg-type]
            capture_output=True,
            check=False,
            env=self.environment(),
        )
        if done.returncode:
            said = (done.stderr or done.stdout).decode(errors="replace").strip()
            raise ComponentError(f"{self.name}: {' '.join(words[:4])}: {said}")
        return done.stdout.decode(errors="replace")

    def inside(self, *words: str) -> list[str]:
        """Return the command that runs `words` in the machine."""
        pid = self.pid
        if pid is None:
            raise ComponentError(f"{self.name} does not run; `start {self.name}` boots it")
        return ["nsenter", f"--target={pid}", "--mount", "--net", "--uts", "--pid", *words]

    def start(self, component: str, *words: str) -> None:
        """Start a component and leave it running."""
        into, log = self.home / "components" / component, self.home / "log" / component
        into.with_suffix(".json").write_text(json.dumps(words))
        # Of one that ran before, for instance before the machine was killed.
        for suffix in (".exit", ".pid"):
            into.with_suffix(suffix).unlink(missing_ok=True)
        subprocess.run(
            [*self.inside("sh", "-c", _START, "sh"), str(into), str(log), *words],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            check=True,
            env=self.environment(),
        )

    def start_again(self, component: str) -> None:
        """Start a component that was stopped as it was started before."""
        file = self.home / "components" / f"{component}.json"
        self.start(component, *json.loads(file.read_text()))

    def send(self, component: str, number: signal.Signals) -> None:
        """Send a signal to a component."""
        pid = (self.home / "components" / f"{component}.pid").read_text().strip()
        self.run("sh", "-c", f"kill -{number.value} {pid}")

    def stop(self, *components: str) -> None:
        """End components at once, and return when they have ended; `check` does not mind that."""
        for component in components:
            self.send(component, signal.SIGKILL)
        for component in components:
            ended = (self.home / "components" / component).with_suffix(".exit")
            until = f"until [ -s {ended} ]; do sleep 0.01; done"
            self.run("timeout", f"{END_S:g}", "sh", "-c", until)
            ended.unlink()

    def check(self) -> None:
        """Raise ComponentError when a component has ended."""
        for file in sorted((self.home / "components").glob("*.exit")):
            log = self.home / "log" / f"{file.stem}.log"
            lines = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
            raise ComponentError(
                f"{file.stem} of {self.name} ended with exit status {file.read_text().strip()};"
                f" its log is {log}, and its last lines are:\n" + "\n".join(lines)
            )

    def kill(self) -> None:
        """End the machine and everything in it at once, as a power cut does."""
        end(self._cluster, self.name)

    def make_cgroup(self) -> None:
        """Make the cgroup below which the kubelet makes its own."""
        for top in hierarchies():
            folder = top / self.cgroup.strip("/")
            folder.mkdir(parents=True, exist_ok=True)
            for each in (folder.parent, folder):
                _fill(each)

    def environment(self) -> dict[str, str]:
        return {
            "HOME": "/root",
            "PATH": f"{self._cluster}/bin:{PATH}",
            MARK: str(self.home),
        }


def cgroup_of(folder: Path) -> str:
    """Return the name of the cgroup of a cluster."""
    return f"snapback-{folder.name}"


def remove_cgroups(folder: Path) -> None:
    """Remove the cgroups of a cluster, whose processes were killed."""
    _thaw(CGROUPS / "freezer" / cgroup_of(folder))
    limit = time.monotonic() + END_S
    for top in (CGROUPS, *(each for each in CGROUPS.iterdir() if each.is_dir())):
        found = top / cgroup_of(folder)
        for each in sorted((found, *found.glob("**/")), reverse=True):
            _until_empty(each, limit)
            with contextlib.suppress(FileNotFoundError):
                each.rmdir()


def _thaw(cgroup: Path) -> None:
    """Let the processes of a cgroup of version 1 end, and of those below it.

    runc freezes a container before it kills its processes, and may be killed in between.
    """
    for state in cgroup.glob("**/freezer.state"):
        with contextlib.suppress(FileNotFoundError):
            state.write_text("THAWED")


def _until_empty(cgroup: Path, limit: float) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        while (cgroup / "cgroup.procs").read_text() and time.monotonic() < limit:
            time.sleep(0.01)


def marked(cluster: Path) -> list[tuple[int, str]]:
    """Return the processes of a cluster that this host started: their ids, and their machines."""
    start = f"{MARK}={cluster}/".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        # A process may end while it is looked at.
        with contextlib.suppress(OSError):
            entries = (folder / "environ").read_bytes().split(b"\0")
            names = [entry.removeprefix(start) for entry in entries if entry.startswith(start)]
            found += [(int(folder.name), name.decode()) for name in names]
    return found


def end(cluster: Path, machine: str | None = None) -> None:
    """Kill the processes of a cluster, or of one machine of it, and wait until none is left.

    Raise ComponentError when one does not end, which happens only in a call to a hanging disk.
    """
    while pids := [pid for pid, name in marked(cluster) if machine in (None, name)]:
        with contextlib.ExitStack() as stack:
            poll = select.poll()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    file = os.pidfd_open(pid)
                    stack.callback(os.close, file)
                    signal.pidfd_send_signal(file, signal.SIGKILL)
                    poll.register(file, select.POLLIN)
                    if not poll.poll(END_S * 1000):
                        raise ComponentError(f"process {pid} does not end after SIGKILL")
                    poll.unregister(file)


def _until_booted(output: IO[str]) -> Iterator[str]:
    for line in output:
        yield line.strip()
        if line.strip() == _BOOTED:
            return


def _is_first(pid: int) -> bool:
    """Whether a process is process 1 of a namespace below that of this process."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return line.split()[2:] == ["1"]
    return False


def _fill(cgroup: Path) -> None:
    """Give a new cgroup what its own need: CPUs in version 1, controllers in version 2."""
    for name in ("cpuset.cpus", "cpuset.mems"):
        file = cgroup / name
        if file.exists() and not (cgroup / "cgroup.controllers").exists():
            file.write_text((cgroup.parent / name).read_text())
    if (controllers := cgroup.parent / "cgroup.subtree_control").exists():
        names = (cgroup.parent / "cgroup.controllers").read_text().split()
        controllers.write_text(" ".join(f"+{name}" for name in names))
