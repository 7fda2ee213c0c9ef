"""Local clusters: up, down, and what goes wrong on the way."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import pytest

from snapshotctl.adapters import processes
from tests.integration.snapshotctl.conftest import Cli, interrupt, pod, read_until

pytestmark = pytest.mark.turns

SMALL = ("up", "--nodes", "1", "--gpus", "1", "--gpu-memory", "64MiB")


def test_a_cluster_is_found_and_is_not_left_over(running: Cli, cli: Cli) -> None:
    record = running.record()
    with urllib.request.urlopen(record["page"] + "api/state") as answer:
        nodes = json.loads(answer.read())["nodes"]["rows"]
    assert [row["name"] for row in nodes] == ["node-1"]
    assert running.state().stat().st_mode & 0o777 == 0o700
    assert Path(record["socket_dir"]).stat().st_mode & 0o777 == 0o700
    [node] = running.value("nodes")
    assert (node["node"]["metadata"]["name"], len(node["presence"]["devices"])) == ("node-1", 2)
    assert running.ok("dead", "ls").err == "no dead letters\n"
    running.refused(1, "runs already", "up")
    assert running.left(record["run"]) == []
    # Nor for another user, who does not look where its sockets are.
    assert Path(record["socket_dir"]).parent == Path(running.environment["XDG_RUNTIME_DIR"])
    assert cli.left(record["run"]) == []


def test_every_user_has_a_seed_of_its_own_that_stays_in_its_file(running: Cli) -> None:
    folder = running.state() / "keys"
    seeds = {path.stem: path.read_text().strip() for path in folder.iterdir()}
    assert set(seeds) == {"operator", "agent-node-1", "gms-node-1", "snapshotctl", "viewer"}
    assert len(set(seeds.values())) == len(seeds)
    written = "".join(path.read_text() for path in running.state().glob("**/*.conf"))
    written += "".join(path.read_text() for path in (running.state() / "logs").iterdir())
    written += (running.state() / "cluster.json").read_text()
    assert not [name for name, seed in seeds.items() if seed in written]
    # What nats-server says of its port is its own; the folder above it is closed.
    others = [
        path
        for path in (running.state(), *running.state().rglob("*"))
        if path.parent.name != "ports" and not path.is_symlink() and path.stat().st_mode & 0o077
    ]
    assert others == []

    url = running.record()["url"]
    assert running.ok("--server", url, "nodes").out
    viewer = Cli(running.home)
    viewer.environment |= {"NATS_NKEY": str(folder / "viewer.nk"), "NATS_URL": url}
    viewer.environment |= {"NATS_INBOX_PREFIX": "_INBOX.viewer"}
    assert [node["node"]["metadata"]["name"] for node in viewer.value("nodes")]
    viewer.refused(4, "viewer may not publish to snap.api.delete", "delete", "node", "node-1")


def test_a_cluster_whose_processes_died_starts_again_on_its_state_and_goes_down_without_a_trace(
    cli: Cli,
) -> None:
    up = cli.ok(*SMALL)
    assert "snapshotctl down" in up.out
    assert "kept of before" not in up.out
    assert f"page             {cli.record()['page']}" in up.out
    cli.apply(pod("waits") + "  nodeSelector: {kubernetes.io/hostname: nowhere}\n")
    run = cli.record()["run"]
    assert sorted(record["name"] for record in cli.record()["processes"]) == [
        *("nats-server", "node-1-agent", "node-1-gms", "operator", "page")
    ]
    for record in cli.record()["processes"]:
        os.kill(record["pid"], signal.SIGKILL)
    again = cli.ok(*SMALL)
    assert "  kept of before   1 pod; down --purge removes it\n" in again.out
    record = cli.record()
    assert record["run"] == run
    assert list(cli.pods()) == ["waits"]

    cli.schedule("sleeper")
    context = cli.home / "config" / "nats" / "context" / "snapback-default.json"
    assert record["url"] in context.read_text()
    cli.ok("down")
    assert cli.record()["page"] == ""
    assert cli.members() == []
    assert not Path(record["socket_dir"]).exists()
    assert not context.exists()
    assert cli.run("nodes").code == 5
    assert cli.left(run) == []
    cli.ok("down", "--purge")
    assert not cli.state().exists()
    assert cli.run("down").code == 3


def test_a_start_that_fails_shows_the_log_and_leaves_nothing_running(cli: Cli) -> None:
    cli.environment["SNAPBACK_LOG_LEVEL"] = "NO-SUCH-LEVEL"
    failed = cli.run("up", "--nodes", "1")
    assert failed.code == 1
    assert "NO-SUCH-LEVEL" in failed.err
    log = failed.err.rpartition("next: read ")[2].strip()
    assert Path(log).is_file()
    assert list(cli.state().iterdir()) == [cli.state() / "logs"]
    assert cli.left(str(cli.home)) == []
    assert "never run" in cli.ok("down", "--purge").err
    assert not cli.state().exists()


def test_a_start_on_a_full_disk_names_the_folder_and_leaves_nothing(cli: Cli) -> None:
    # Whatever is written fails, as on a full disk.
    full = ["prlimit", "--fsize=0", sys.executable, "-m", "snapshotctl", "up", "--nodes", "1"]
    with tempfile.TemporaryDirectory() as runtime:
        cli.environment["XDG_RUNTIME_DIR"] = runtime
        failed = subprocess.run(
            full, env=cli.environment, cwd=cli.workdir, capture_output=True, text=True, check=False
        )
        assert [*Path(runtime).iterdir()] == []
    assert failed.returncode == 1
    assert str(cli.state()) in failed.stderr
    assert f"next: see whether there is space there: df -h {cli.state().parent}" in failed.stderr
    assert not cli.state().exists()


def test_an_interrupted_start_leaves_nothing_half(cli: Cli) -> None:
    process = cli.start("up", "--nodes", "2", "--gpu-memory", "64MiB")
    read_until(process, "nats-server listens")
    run, sockets = cli.record()["run"], Path(cli.record()["socket_dir"])
    ended = interrupt(process)
    assert (ended.code, "interrupted" in ended.err) == (130, True)
    assert processes.members(run) == []
    assert not cli.state().exists()
    assert not sockets.exists()


def test_two_clusters_run_side_by_side_and_differ_by_name(cli: Cli) -> None:
    gpus = {"one": 1, "two": 2}
    for name, count in gpus.items():
        cli.ok("up", "--nodes", "1", "--gpus", str(count), "--gpu-memory", "64MiB", "--name", name)
    lost = cli.run("nodes")
    assert "name one that is there: --cluster one or --cluster two" in lost.err
    assert "--cluster one or --cluster two" in cli.run("down", "--name", "nope").err
    assert {name: _gpus(cli, name) for name in gpus} == gpus
    cli.ok("down", "--name", "one", "--purge")
    assert _gpus(cli, "two") == 2


def _gpus(cli: Cli, cluster: str) -> int:
    [node] = cli.ok("nodes", "-o", "json", "--cluster", cluster).value()
    return len(node["presence"]["devices"])


def test_what_a_killed_command_left_is_shown_and_can_be_removed(cli: Cli) -> None:
    process = cli.start("demo", "--size-mib", "16", "--warm-up", "short")
    read_until(process, "2/5 ")
    process.kill()
    process.communicate()
    [state] = (cli.home / "state" / "snapback").iterdir()
    run = cli.record(state.name)["run"]
    assert cli.run("leftovers").code == 1
    left = "\n".join(cli.left(run))
    assert f"snapshotctl down --cluster {state.name} --purge" in left
    assert f"process {cli.record(state.name)['processes'][0]['pid']} of run {run}" in left
    cli.ok("down", "--name", state.name, "--purge")
    assert cli.left(run) == []


def test_a_machine_says_itself_how_many_gpus_it_has(cli: Cli) -> None:
    refused = {
        ("cuda", "--nodes", "2"): "--nodes 2: with --device cuda there is one",
        ("cuda", "--gpus", "1"): "--gpus 1: with --device cuda they are this machine's",
        ("cuda", "--gpu-memory", "1GiB"): "--gpu-memory 1GiB: with --device cuda they are this",
        ("rocm",): "--device rocm is not one of simulated, cuda",
    }
    for words, why in refused.items():
        ended = cli.run("up", "--device", *words)
        assert (ended.code, why in ended.err) == (2, True), ended
