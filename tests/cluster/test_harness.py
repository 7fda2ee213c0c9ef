"""The cluster of the tests: it says why it did not start, and never leaves anything.

What works in a cluster (DNS, Services, nodes that share nothing) every other test relies on.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import programs
from tests.cluster.cluster import FAILED, Cluster, sweep
from tests.cluster.evidence import collect
from tests.cluster.host import ClusterError, link_name
from tests.cluster.kubectl import Kubectl
from tests.cluster.machine import cgroup_of, marked
from tests.cluster.target import Target

pytestmark = [pytest.mark.cluster, pytest.mark.turns, pytest.mark.waits]

READ_S = 60.0
OWNER = """
import sys
from tests.cluster.cluster import Cluster
cluster = Cluster(sys.argv[1])
cluster.up(1, owned=True)
print("everything runs", flush=True)
sys.stdin.read()
"""


def traces(cluster: Cluster) -> dict[str, list[str]]:
    """Return what this host has of a cluster, by the kinds of which it has something."""
    folder, link = str(cluster.folder), link_name(cluster.name)
    found = {
        "processes": [*map(str, marked(cluster.folder)), *_naming(folder, "cmdline")],
        "mounts": _naming(folder, "mounts"),
        "cgroups": [str(path) for path in programs.CGROUPS.glob(f"**/{cgroup_of(cluster.folder)}")],
        "links": [str(path) for path in Path("/sys/class/net").glob(link)],
        "folders": [folder] if cluster.folder.exists() else [],
    }
    return {kind: each for kind, each in found.items() if each}


def _naming(text: str, file: str) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if process.name != str(os.getpid()) and text in (process / file).read_text(
                "utf-8", "replace"
            ):
                found.append(f"{process.name} {file}")
    return found


@contextlib.contextmanager
def started(text: str, *words: str) -> Iterator[None]:
    """Start a program of Python that prints a line with this text, and kill it in the end."""
    process = subprocess.Popen(
        [sys.executable, "-u", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=programs.REPOSITORY,
    )
    try:
        assert process.stdout
        assert any(text in line for line in process.stdout), f"it ended without {text!r}"
        yield
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def name() -> Iterator[str]:
    """The name of a cluster of this test alone, which is taken down whatever the test does."""
    if why := programs.lacking():
        pytest.skip(why)
    name = f"test-{secrets.token_hex(4)}"
    yield name
    Cluster(name).down()


@pytest.mark.parametrize("moment", ["machines have booted", "containerd of node-1", "is Ready"])
def test_down_removes_what_a_harness_that_was_killed_left(name: str, moment: str) -> None:
    with started(moment, "-m", "tests.cluster", "--name", name, "up", "--nodes=1"):
        pass
    cluster = Cluster(name)
    assert {*traces(cluster)} == {"processes", "mounts", "cgroups", "links", "folders"}
    cluster.down()
    assert traces(cluster) == {}


def test_a_cluster_is_left_alone_while_its_owner_runs_and_ends_with_it(name: str) -> None:
    cluster = Cluster(name)
    with started("everything runs", "-c", OWNER, name):
        sweep()
        with pytest.raises(ClusterError, match=f"{name} is used by a process that runs"):
            cluster.down()
        watched = [os.pidfd_open(machine.pid) for machine in cluster.machines if machine.pid]
        assert len(watched) == 2
    for file in watched:
        assert select.select([file], [], [], READ_S)[0]
        os.close(file)
    sweep()
    assert traces(cluster) == {}


def test_a_component_that_ends_is_reported_with_its_log(name: str) -> None:
    words = (sys.executable, "-m", "tests.cluster", "--name", name, "up")
    done = subprocess.run(
        [*words, "--api-flag=--no-such-flag"],
        capture_output=True,
        text=True,
        check=False,
        timeout=READ_S,
        cwd=programs.REPOSITORY,
    )
    assert done.returncode == 1
    assert "kube-apiserver of control-plane ended with exit status 1" in done.stderr
    assert "unknown flag: --no-such-flag" in done.stderr
    assert traces(Cluster(name)) == {}
    [log] = (FAILED / name).rglob("kube-apiserver.log")
    assert "unknown flag" in log.read_text()
    shutil.rmtree(FAILED / name)


def pod(name: str, image: str, *command: str, **spec: Any) -> dict[str, Any]:
    """Return a pod that runs a command."""
    container = {"name": "main", "image": image, "command": command}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 0} | spec,
    }


def test_a_node_that_is_killed_becomes_not_ready_and_comes_back_with_its_pods(
    own_cluster: Cluster, namespace: Kubectl, shell_image: str
) -> None:
    namespace.apply(pod("stays", shell_image, "sleep", "infinity", nodeName="node-2"))
    namespace.wait("pod/stays", until="condition=Ready")
    own_cluster.kill("node-2")
    try:
        own_cluster.kubectl.wait("node/node-2", until="condition=Ready=Unknown")
        own_cluster.kubectl.wait("node/node-1", until="condition=Ready")
    finally:
        own_cluster.start("node-2")
    own_cluster.kubectl.wait("node/node-2", until="condition=Ready")
    restarted = "jsonpath={.status.containerStatuses[0].restartCount}=1"
    namespace.wait("pod/stays", until=restarted)
    namespace.wait("pod/stays", until="condition=Ready")


AGENT = """
python -P -c 'import snapshot_agent.main'
cd /opt/snapback
criu/criu --version | grep -q 'Version: 4'
criu/nft --version
./snapback-init --install /tmp/init
cmp snapback-init /tmp/init
"""


@pytest.mark.timeout(1500)
def test_the_images_of_the_services_run(namespace: Kubectl, service_images: dict[str, str]) -> None:
    """Each image has the packages of its service; what they do is for other tests."""
    commands = {
        "operator": ["python", "-P", "-c", "import snapshot_operator.main"],
        "gms": ["python", "-P", "-c", "import gms.main"],
        "snapshot-agent": ["sh", "-euc", AGENT],
        "snapshotctl": ["snapshotctl", "--version"],
        "page": ["python", "-P", "-c", "import snapshot_page.main"],
        "nats": ["nats-server", "--version"],
    }
    assert {*commands} == {*service_images}
    for name, command in commands.items():
        namespace.apply(pod(name, service_images[name], *command, restartPolicy="Never"))
    for name in commands:
        namespace.wait(f"pod/{name}", until="jsonpath={.status.phase}=Succeeded")
    assert namespace.run("logs", "nats").startswith("nats-server: v")


def test_what_is_kept_of_a_failed_test_has_objects_events_and_logs(
    target: Target, namespace: Kubectl, shell_image: str, tmp_path: Path
) -> None:
    script = "echo the reason; exit 3"
    namespace.apply(pod("fails", shell_image, "bash", "-c", script, restartPolicy="Never"))
    namespace.wait("pod/fails", until="jsonpath={.status.phase}=Failed")
    kept = collect(tmp_path / "kept", namespace, target.own)
    assert "exitCode: 3" in (kept / "objects.yaml").read_text()
    assert "pod/fails" in (kept / "events.txt").read_text().lower()
    assert (kept / "pods" / "fails" / "main.log").read_text() == "the reason\n"
    assert "kind: Node" in (kept / "cluster-objects.yaml").read_text()
    if target.own:
        assert (kept / "components" / "node-1" / "kubelet.log").stat().st_size
