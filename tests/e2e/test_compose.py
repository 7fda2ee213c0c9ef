"""`docker compose up`, and what a person can do then; the last test takes it down."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import service_images
from tests.support.docker_engine import Engine, engine, lacking
from tests.support.service_images import REPOSITORY, environment

pytestmark = [pytest.mark.docker, pytest.mark.waits, pytest.mark.timeout(1500)]

SERVICES = ["operator", "page", "agent-1", "gms-1", "agent-2", "gms-2"]
RUNNING = {*SERVICES, "nats-server", "node-1", "node-2"}
EXAMPLE = REPOSITORY / "deploy" / "examples" / "checkpoint.yaml"
RUN = "SNAPBACK_RUN=compose"


COMMAND_S = 300.0

_ASK = """
import json, socket, sys
with socket.socket(socket.AF_UNIX) as worker:
    worker.settimeout(60)
    worker.connect(sys.argv[1])
    worker.sendall(json.dumps({"op": "ask", "prompt": "What is my name?"}).encode() + b"\\n")
    print(worker.makefile().readline(), end="")
"""


class Compose:
    """The commands that a person types."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._environment = environment(engine) | {"SIZE_MIB": "32", "WARM_UP": "short"}

    def try_(
        self, *words: str, given: str = "", within_s: float = COMMAND_S
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            words,
            input=given,
            capture_output=True,
            text=True,
            check=False,
            timeout=within_s,
            cwd=REPOSITORY,
            env=self._environment,
        )

    def run(self, *words: str, given: str = "", within_s: float = COMMAND_S) -> str:
        """Run a command that has to succeed, and give its standard output."""
        done = self.try_(*words, given=given, within_s=within_s)
        said = f"{done.stdout}\n{done.stderr}"
        assert done.returncode == 0, f"{' '.join(words)}: {done.returncode}\n{said}"
        return done.stdout

    def docker(self, *words: str) -> str:
        return self.run("docker", *words)

    def compose(self, *words: str, given: str = "") -> str:
        return self.run("docker", "compose", *words, given=given)

    def up(self) -> float:
        """Start what does not run, and give the seconds until everything is healthy."""
        since = time.monotonic()
        self.compose("up", "--detach")
        return time.monotonic() - since

    def ctl(self, *words: str, given: str = "") -> str:
        """Run snapshotctl as a person does."""
        return self.compose("run", "--rm", "-T", "snapshotctl", *words, given=given)

    def wait(self, checkpoint: str, timeout: str) -> None:
        """Wait until a checkpoint has ended, well or not."""
        words = ("wait", f"dynamocheckpoint/{checkpoint}", "--timeout", timeout)
        self.try_("docker", "compose", "run", "--rm", "-T", "snapshotctl", *words)

    def nats(self, *words: str) -> str:
        """Run the stock nats CLI as a person does."""
        return self.compose("run", "--rm", "-T", "nats", *words)

    def object(self, kind: str, name: str) -> Any:
        """Read an object."""
        return json.loads(self.ctl("get", kind, name, "-o", "json"))

    def containers(self) -> list[Any]:
        """Inspect all containers, also those that have ended."""
        found = self.docker("ps", "--all", "--quiet").split()
        return list(json.loads(self.docker("inspect", *found))) if found else []

    def ask(self, node: str, pod_uid: str) -> str:
        """Ask the worker of a pod on a node a question that changes nothing."""
        path = f"/run/snapback/{pod_uid[:8]}/worker.sock"
        return self.compose("exec", "-T", f"agent-{node}", "python", "-c", _ASK, path)

    def fetch(self, url: str) -> str:
        """Read a URL from where the engine publishes its ports."""
        code = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1]).read().decode())"
        return self.run(*self.engine.inside("python3", "-c", code, url))


@pytest.fixture(scope="session")
def docker() -> Iterator[Compose]:
    """An engine that has all images."""
    if why := lacking():
        pytest.skip(why)
    with engine() as found:
        compose = Compose(found)
        tools = compose.try_("tests/e2e/tools.sh", within_s=900)
        if tools.returncode:
            pytest.skip(tools.stderr.strip().splitlines()[-1])
        service_images.provide(found)
        yield compose


@pytest.fixture(scope="session")
def cluster(docker: Compose) -> Iterator[Compose]:
    """A cluster that is up."""
    print(f"everything is healthy {docker.up():.1f} s after `docker compose up`")
    yield docker
    if docker.containers():
        (REPOSITORY / ".e2e.log").write_text(docker.compose("logs", "--no-color", "--timestamps"))
        docker.compose("--profile", "tools", "down", "--volumes", "--timeout", "5")


@pytest.fixture(scope="session")
def played(cluster: Compose) -> str:
    """What the demo said; what it made is still there."""
    return cluster.compose("run", "--rm", "-T", "demo")


def _service(container: Any) -> str:
    return str(container["Config"]["Labels"]["com.docker.compose.service"])


def _checkpoint(name: str) -> str:
    """Give the example under another name, small, and ready to be captured at once."""
    document = yaml.safe_load(EXAMPLE.read_text())
    document["metadata"]["name"] = name
    document["spec"]["identity"]["model"] = f"example/{name}"
    [container] = document["spec"]["job"]["podTemplateSpec"]["spec"]["containers"]
    given = {"SIZE_MIB": "64", "WARMUP_REQUESTS": "0", "WARMUP_SECONDS": "0"}
    container["env"] = [{"name": key, "value": value} for key, value in given.items()]
    return json.dumps(document)


def _pod_of(cluster: Compose, checkpoint: str) -> Any:
    found = cluster.object("dynamocheckpoint", checkpoint)
    job = cluster.object("job", found["status"]["jobName"])
    pods = json.loads(cluster.ctl("get", "pods", "-o", "json"))
    [pod] = [
        pod
        for pod in pods
        for owner in pod["metadata"].get("ownerReferences", ())
        if owner["uid"] == job["metadata"]["uid"]
    ]
    return pod


def _remove(cluster: Compose, checkpoint: str) -> None:
    """Remove a checkpoint with its worker, which holds all GPUs of the node."""
    cluster.ctl("delete", "dynamocheckpoint", checkpoint)
    cluster.ctl("wait", "dynamocheckpoint", checkpoint, "--for", "delete")


@pytest.mark.parametrize("profile", ["tracing", "observability"])
def test_a_profile_whose_images_only_a_registry_has_is_well_formed(
    docker: Compose, profile: str
) -> None:
    """Nothing of it is started: that is all that can be told without a registry."""
    found = json.loads(docker.compose("--profile", profile, "config", "--format", "json"))
    services = {n: s for n, s in found["services"].items() if profile in s.get("profiles", ())}
    assert services
    for service in services.values():
        assert service["cap_drop"] == ["ALL"]
        assert {port["host_ip"] for port in service.get("ports", ())} <= {"127.0.0.1"}


def test_everything_runs_and_is_healthy(cluster: Compose) -> None:
    states = {_service(found): found["State"] for found in cluster.containers()}
    assert {name for name, state in states.items() if state["Running"]} == RUNNING
    ended = {name: state["ExitCode"] for name, state in states.items() if not state["Running"]}
    assert ended == {"keys": 0, "welcome": 0}
    healths = [state["Health"]["Status"] for state in states.values() if "Health" in state]
    assert healths.count("healthy") == 7
    assert "docker compose run --rm demo" in cluster.compose("logs", "welcome")


def test_no_container_has_a_privilege_or_a_folder_of_the_host(cluster: Compose) -> None:
    for found in cluster.containers():
        host = found["HostConfig"]
        assert host["CapDrop"] == ["ALL"]
        assert not host["CapAdd"]
        assert not host["Privileged"]
        assert host["ReadonlyRootfs"]
        assert "no-new-privileges:true" in host["SecurityOpt"]
        assert found["Config"]["User"] == "65532:65532"
        assert {mount["Type"] for mount in found["Mounts"]} <= {"volume", "tmpfs"}
        addresses = {
            port["HostIp"] for ports in (host["PortBindings"] or {}).values() for port in ports
        }
        assert addresses <= {"127.0.0.1"}


@pytest.mark.parametrize("service", sorted(RUNNING))
def test_what_runs_is_an_ordinary_user_with_no_capability(cluster: Compose, service: str) -> None:
    status = cluster.compose("exec", "-T", service, "cat", "/proc/self/status")
    found = dict(re.findall(r"^(Uid|CapEff|CapBnd|NoNewPrivs):\s+(\S+)", status, re.MULTILINE))
    assert found == {"Uid": "65532", "CapEff": "0" * 16, "CapBnd": "0" * 16, "NoNewPrivs": "1"}
    written = cluster.try_("docker", "compose", "exec", "-T", service, "touch", "/opt/x")
    assert "Read-only file system" in written.stderr


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_has_its_own_key_and_no_other(cluster: Compose, service: str) -> None:
    folder = "/var/lib/snapback/keys"
    find = ["find", folder, "-mindepth", "1", "-printf", "%P %m %U\\n"]
    assert cluster.compose("exec", "-T", service, *find) == "seed.nk 600 65532\n"
    seed = cluster.compose("exec", "-T", service, "cat", f"{folder}/seed.nk")
    configuration = cluster.compose("exec", "-T", "nats-server", "cat", f"{folder}/nats.conf")
    assert seed.startswith("SU")
    assert seed.strip() not in configuration


def test_the_page_is_reached_from_the_host_and_shows_the_nodes(cluster: Compose) -> None:
    assert cluster.fetch("http://127.0.0.1:8080/readyz") == "ok\n\n"
    state = json.loads(cluster.fetch("http://127.0.0.1:8080/api/state"))
    assert {row["name"] for row in state["nodes"]["rows"]} == {"node-1", "node-2"}


def test_the_demo_captures_loses_and_restores(played: str) -> None:
    assert re.search(r"node-1 is lost: its \d+ processes are killed with SIGKILL", played)
    assert played.count("My name is -> Ada.") == 2
    assert "all 3 answers are the same, byte for byte" in played
    assert "docker compose run --rm snapshotctl trace pod/demo-llm-restored" in played
    print(*re.findall(r"cold start: .*|restore: .*", played))


@pytest.mark.usefixtures("played")
def test_the_node_that_was_killed_comes_back_by_itself(cluster: Compose) -> None:
    cluster.up()
    assert re.search(r"^node-1 +Ready ", cluster.ctl("nodes"), re.MULTILINE)


QUESTIONS = {
    "1 what is queued": (["consumer", "report", "ORDERS"], "agent-node-1"),
    "2 what was ordered": (["kv", "get", "snap_schemas", "save_order.v1", "--raw"], "fence_token"),
    "3 why did it fail": (["stream", "subjects", "REPORTS", "snap.report.*.*.failed"], "failed"),
    "4 how far is it": (
        ["kv", "get", "snap_objects", "pods.default.demo-llm-restored", "--raw"],
        '"Ready"',
    ),
    "5 which agents are alive": (["kv", "get", "snap_nodes", "node-1", "--raw"], '"drivers"'),
    "5 and which versions": (["micro", "ls"], "snap-operator"),
    "6 is a GMS healthy": (["req", "snap.rpc.gms.node-2.status", "", "--raw"], '"devices"'),
    "7 who holds what": (["req", "snap.rpc.agent.node-2.status", "", "--raw"], '"node-2"'),
    "8 dead letters": (["stream", "info", "DEAD"], "snap.dead.*"),
    "9 have it done again": (
        ["req", "snap.api.requeue", '{"order": "dump-00000000-0000-0000-0000-000000000001"}'],
        "next_step",
    ),
    "10 take no work": (["consumer", "pause", "ORDERS", "agent-node-2", "1h", "--force"], "node-2"),
    "10 take work again": (["consumer", "resume", "ORDERS", "agent-node-2", "--force"], "node-2"),
}
"""Those of docs/inspect.md, in their order, with words that each answer has."""


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize(("question", "answer"), QUESTIONS.values(), ids=QUESTIONS)
def test_the_stock_nats_cli_answers(cluster: Compose, question: list[str], answer: str) -> None:
    assert answer in cluster.nats(*question)


def test_a_worker_outlives_its_agent_that_is_killed_in_mid_capture(cluster: Compose) -> None:
    cluster.ctl("sim", "crash", "node-1", "--at", "copy-state")
    cluster.ctl("apply", "-f", "-", given=_checkpoint("agent-dies"))
    cluster.wait("agent-dies", "2m")
    assert "was killed by signal 9; starting it again" in cluster.compose("logs", "agent-1")
    pod = _pod_of(cluster, "agent-dies")
    assert pod["status"]["phase"] == "Running"
    assert '"answer"' in cluster.ask("1", pod["metadata"]["uid"])
    _remove(cluster, "agent-dies")


@pytest.mark.parametrize("service", ["nats-server", "operator"])
def test_a_capture_ends_well_when_a_container_is_killed_meanwhile(
    cluster: Compose, service: str
) -> None:
    name = f"{service}-dies"
    cluster.ctl("apply", "-f", "-", given=_checkpoint(name))
    cluster.compose("kill", service)
    cluster.up()
    cluster.ctl("wait", f"dynamocheckpoint/{name}", "--timeout", "3m")
    assert "sha256:" in cluster.ctl("get", "snapshotcontents", "-o", "json")
    cluster.ctl("verify", name)
    _remove(cluster, name)


def test_a_node_goes_on_after_the_container_of_its_agent_and_workers_was_killed(
    cluster: Compose,
) -> None:
    cluster.ctl("apply", "-f", "-", given=_checkpoint("container-dies"))
    cluster.compose("kill", "agent-1")
    cluster.up()
    cluster.wait("container-dies", "3m")
    found = cluster.object("dynamocheckpoint", "container-dies")
    assert found["status"]["phase"] in ("Ready", "Failed")
    _remove(cluster, "container-dies")
    cluster.ctl("apply", "-f", "-", given=_checkpoint("afterwards"))
    cluster.ctl("wait", "dynamocheckpoint/afterwards", "--timeout", "3m")


def test_a_cluster_that_was_stopped_knows_everything_when_it_starts_again(cluster: Compose) -> None:
    before = cluster.ctl("get", "snapshotcontents", "-o", "json")
    cluster.compose("down", "--timeout", "5")
    assert cluster.containers() == []
    cluster.up()
    after = cluster.ctl("get", "snapshotcontents", "-o", "json")
    digests = [re.findall(r"sha256:[0-9a-f]{64}", text) for text in (before, after)]
    assert digests[0]
    assert digests[0] == digests[1]


def test_down_leaves_nothing(cluster: Compose) -> None:
    cluster.compose("--profile", "tools", "down", "--volumes", "--timeout", "5")
    assert cluster.docker("ps", "--all", "--quiet") == ""
    assert cluster.docker("volume", "ls", "--quiet") == ""
    networks = cluster.docker("network", "ls", "--format", "{{.Name}}").split()
    assert set(networks) <= {"bridge", "host", "none"}
    assert _carrying(RUN) == []


def _carrying(entry: str) -> list[str]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                environment = (folder / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if entry.encode() in environment:
                found.append(f"{folder.name} {(folder / 'cmdline').read_bytes()!r}")
    return found
