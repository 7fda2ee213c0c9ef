"""The cluster of the tests: it comes up, says why not, and never leaves anything."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cluster import programs
from tests.cluster.cluster import FAILED, Cluster, sweep
from tests.cluster.host import ClusterError, link_name
from tests.cluster.machine import cgroup_of, marked

pytestmark = [pytest.mark.cluster, pytest.mark.waits]

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
        if process.name != str(os.getpid()):
            try:
                if text in (process / file).read_text(errors="replace"):
                    found.append(f"{process.name} {file}")
            except OSError:
                continue
    return found


@contextlib.contextmanager
def started(*words: str) -> Iterator[subprocess.Popen[str]]:
    """Start a program of Python that has this repository on its path, and kill it in the end."""
    process = subprocess.Popen(
        [sys.executable, "-u", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=programs.REPOSITORY,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def finished(*words: str) -> subprocess.CompletedProcess[str]:
    """Run the command line of clusters to its end."""
    command = [sys.executable, "-m", "tests.cluster", *words]
    return subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=READ_S,
        cwd=programs.REPOSITORY,
    )


def until(process: subprocess.Popen[str], text: str) -> str:
    """Read what a program prints to the line that has a text, and return all of it."""
    said = ""
    assert process.stdout
    for line in process.stdout:
        said += line
        if text in line:
            return said
    raise AssertionError(f"ended without {text!r}:\n{said}")


@pytest.fixture
def name() -> Iterator[str]:
    """The name of a cluster of this test alone, which is taken down whatever the test does."""
    if why := programs.lacking():
        pytest.skip(why)
    name = f"test-{secrets.token_hex(4)}"
    yield name
    Cluster(name).down()


def test_down_leaves_nothing(name: str) -> None:
    cluster = Cluster(name)
    cluster.up(1)
    assert {*traces(cluster)} == {"processes", "mounts", "cgroups", "links", "folders"}
    cluster.down()
    assert traces(cluster) == {}


def test_two_clusters_run_at_once(name: str) -> None:
    names = (name, f"{name}-b")
    try:
        with ThreadPoolExecutor() as pool:
            up = [pool.submit(finished, "--name", each, "up", "--nodes=1") for each in names]
        assert [each.result().returncode for each in up] == [0, 0], up[0].result().stdout
        for each in names:
            [node] = Cluster(each).kubectl.list("nodes")
            assert node["metadata"]["name"] == "node-1"
            Cluster(each).kubectl.run("create", "namespace", each)
        assert "NotFound" in Cluster(name).kubectl.try_("get", "namespace", names[1]).stderr
    finally:
        Cluster(names[1]).down()
    assert traces(Cluster(names[1])) == {}


@pytest.mark.parametrize("moment", ["machines have booted", "containerd of node-1", "is Ready"])
def test_down_removes_what_a_harness_that_was_killed_left(name: str, moment: str) -> None:
    with started("-m", "tests.cluster", "--name", name, "up", "--nodes=1") as process:
        until(process, moment)
    cluster = Cluster(name)
    assert "processes" in traces(cluster)
    cluster.down()
    assert traces(cluster) == {}


def test_up_removes_what_a_harness_that_was_killed_left(name: str) -> None:
    killed = Cluster(f"{name}-killed")
    with started("-m", "tests.cluster", "--name", killed.name, "up", "--nodes=1") as process:
        until(process, "the API server answers")
    assert "processes" in traces(killed)
    Cluster(name).up(1)
    assert traces(killed) == {}


def test_a_cluster_is_left_alone_while_its_owner_runs_and_ends_with_it(name: str) -> None:
    cluster = Cluster(name)
    with started("-c", OWNER, name) as process:
        until(process, "everything runs")
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


def test_the_status_of_a_cluster_that_runs_names_a_component_that_was_killed(name: str) -> None:
    cluster = Cluster(name)
    cluster.up(1)
    with pytest.raises(ClusterError, match="runs already; take it down first"):
        Cluster(name).up(1)
    assert finished("--name", name, "status").returncode == 0
    cluster.machine("node-1").send("kube-proxy", signal.SIGKILL)
    done = finished("--name", name, "status")
    assert done.returncode == 1
    assert "kube-proxy of node-1 ended with exit status 137" in done.stdout


def test_a_component_that_ends_is_reported_with_its_log(name: str) -> None:
    done = finished("--name", name, "up", "--api-flag=--no-such-flag")
    assert done.returncode == 1
    assert "kube-apiserver of control-plane ended with exit status 1" in done.stdout
    assert "unknown flag: --no-such-flag" in done.stdout
    assert traces(Cluster(name)) == {}
    [log] = (FAILED / name).rglob("kube-apiserver.log")
    assert "unknown flag" in log.read_text()
    shutil.rmtree(FAILED / name)


def test_what_is_missing_is_named_with_the_package_that_has_it(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "runc (package runc)" in programs.lacking()
    assert "ip (package iproute2)" in programs.lacking()
    with pytest.raises(ClusterError, match="gcc"):
        Cluster(name).up(1)
