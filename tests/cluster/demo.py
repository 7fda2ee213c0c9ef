"""Capture a worker on one node, cut that node's power, restore it on the other: with kubectl alone.

`make demo-cluster` starts a cluster of two nodes on this machine, installs the chart with simulated
GPUs, and then types what a person types. At the end it leaves nothing; KEEP=1 leaves the cluster.
With DRIVER=criu the worker does not save its own state: its process itself goes on.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.cluster import programs
from tests.cluster.cluster import Cluster
from tests.cluster.host import ClusterError
from tests.cluster.kubectl import Kubectl, KubectlError
from tests.cluster.machine import ComponentError
from tests.support import helm, service_images

NAME = "demo"
SYSTEM = "snapback-system"
EXAMPLES = "deploy/examples/kubernetes"
SAID = ("My name is Ada and I like amber.", "The harbour opens at seven.")
ASKED = "What is my name?"
SOURCE, TARGET = "node-1", "node-2"
READY_S = 180
SYS_RESOURCE = 24
"""The number of a capability, without which CRIU dumps processes of root alone."""
SUFFIXES = {"cooperative": "", "criu": "-criu"}
"""By driver, how the names of the examples end."""
LAST = ("--tail=4", "--prefix", "--all-containers")


class DemoError(Exception):
    """The demo did not show what it is for."""


class Shell:
    """Types commands: each is shown as a person would type it, and then what it prints."""

    def __init__(self, kubectl: Kubectl) -> None:
        """Use the cluster of `kubectl`."""
        self._kubectl = kubectl
        self._began = time.monotonic()

    def step(self, what: str) -> None:
        """Say what comes next."""
        print(f"\n== {time.monotonic() - self._began:5.1f} s  {what}", flush=True)

    def kubectl(self, *words: str, most: int = 40) -> str:
        """Run kubectl and show the first lines of what it prints. KubectlError."""
        print(f"$ kubectl {shlex.join(words)}", flush=True)
        said = self._kubectl.run(*words, within_s=READY_S + 60)
        lines = said.rstrip().splitlines()
        print("\n".join(f"  {line}" for line in lines[:most]), flush=True)
        if len(lines) > most:
            print(f"  … and {len(lines) - most} lines more", flush=True)
        return said

    def until(self, *words: str) -> None:
        """Run kubectl until it succeeds."""
        print(f"$ until kubectl {shlex.join(words)}; do sleep 1; done", flush=True)
        end = time.monotonic() + READY_S
        while self._kubectl.try_(*words).returncode:
            if time.monotonic() > end:
                raise DemoError(f"not within {READY_S} s: kubectl {shlex.join(words)}")
            time.sleep(1)

    def ask(self, pod: str, words: str, *options: str) -> str:
        """Say something to a worker and return its answer."""
        inside = ("exec", pod, "--container", "main", "--", "python", "deploy/examples/ask.py")
        return self.kubectl(*inside, *options, words)


def install(cluster: Cluster, shell: Shell, driver: str) -> None:
    """Install the chart: what is not of a node is put where the power stays."""
    shell.step("the images of the services: built from this tree where they are not yet")
    cluster.load(service_images.archive())
    artifacts = cluster.folder / "artifacts"
    artifacts.mkdir()
    stays = {
        f"{part}.nodeSelector.kubernetes\\.io/hostname": TARGET for part in ("operator", "nats")
    }
    values = {
        "image.tag": "dev",
        "simulation.enabled": "true",
        # A store that both nodes see, as a cluster has it.
        "storage.hostPath": str(artifacts),
        **stays,
    }
    if driver == "criu":
        values["node.helper.enabled"] = "true"
        if not capabilities() >> SYS_RESOURCE & 1:
            # Then workers of root alone can be captured, as these are.
            values["node.helper.extraCapabilities"] = "null"
    shell.step("helm install: operator, NATS, and an agent and a memory service on each node")
    words = ("install", "snapback", str(helm.CHART.relative_to(programs.REPOSITORY)))
    options = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    where = ("--namespace", SYSTEM, "--create-namespace", "--wait", "--timeout", "6m")
    print(f"$ helm {shlex.join([*words, *where, *options])}", flush=True)
    helm.run(*words, *where, *options, kubeconfig=cluster.kubectl.kubeconfig)
    nodes = ("rollout", "status", "daemonset/snapback-node", f"--timeout={READY_S}s")
    shell.kubectl("--namespace", SYSTEM, *nodes)
    shell.kubectl("--namespace", SYSTEM, "get", "pods", "--output=wide")
    shell.kubectl("get", "resourceslices")


def capabilities() -> int:
    """Return the capabilities of this process, which the nodes of its cluster have."""
    status = Path("/proc/self/status").read_text().splitlines()
    [line] = (line for line in status if line.startswith("CapEff:"))
    return int(line.split()[1], 16)


def capture(shell: Shell, suffix: str) -> str:
    """Capture a worker that has been talked to; return what it answers afterwards."""
    shell.step(f"capture a worker on {SOURCE}")
    shell.kubectl("cordon", TARGET)
    shell.kubectl("apply", "--filename", f"{EXAMPLES}/checkpoint{suffix}.yaml")
    shell.kubectl("wait", "job/demo-llm", "--for=create", f"--timeout={READY_S}s")
    is_running = "--for=jsonpath={.status.phase}=Running"
    worker = "--selector=job-name=demo-llm"
    shell.kubectl("wait", "pod", worker, "--for=create", f"--timeout={READY_S}s")
    shell.kubectl("wait", "pod", worker, is_running, f"--timeout={READY_S}s")
    pod = shell.kubectl("get", "pods", worker, "--output=name").strip()
    shell.until("exec", pod, "--container", "main", "--", "test", "-S", "/tmp/worker.sock")
    for words in SAID:
        shell.ask(pod, words, "--chat")
    shell.kubectl(
        "wait", "dynamocheckpoint/demo-llm", "--for=condition=Ready", f"--timeout={READY_S}s"
    )
    shell.kubectl("get", "snapback")
    shell.kubectl("get", "dynamocheckpoints,snapshotcontents", "--output=wide")
    shell.kubectl("get", "events", "--field-selector=involvedObject.kind!=Node")
    answer = shell.ask(pod, ASKED)
    shell.kubectl("logs", pod, *LAST)
    return answer


def lose(cluster: Cluster, shell: Shell) -> None:
    """Cut the power of the node with the worker."""
    shell.step(f"cut the power of {SOURCE}, with the worker, its agent and its GPU memory")
    print(f"$ python -m tests.cluster --name {NAME} kill {SOURCE}")
    cluster.kill(SOURCE)
    shell.kubectl("wait", f"node/{SOURCE}", "--for=condition=Ready=Unknown", "--timeout=90s")
    shell.kubectl("uncordon", TARGET)
    shell.kubectl("get", "nodes")


def restore(shell: Shell, suffix: str) -> str:
    """Restore the worker; return what it answers."""
    shell.step(f"restore it on {TARGET}")
    shell.kubectl("apply", "--filename", f"{EXAMPLES}/restore{suffix}.yaml")
    pod = "pod/demo-llm-restored"
    shell.kubectl("wait", pod, "--for=condition=nvidia.com/Restored", f"--timeout={READY_S}s")
    shell.kubectl("wait", pod, "--for=condition=Ready", f"--timeout={READY_S}s")
    answer = shell.ask(pod, ASKED)
    shell.kubectl("get", pod, "--output=wide")
    shell.kubectl("get", "snapshotrestores", "--output=wide")
    conditions = "jsonpath={range .status.conditions[*]}{.type}={.status} {.reason}{'\\n'}{end}"
    shell.kubectl("get", pod, f"--output={conditions}")
    shell.kubectl("logs", pod, *LAST)
    for part in ("deployment/snapback-operator", "statefulset/snapback-nats"):
        shell.kubectl("--namespace", SYSTEM, "logs", part, "--tail=3")
    of_node = ("--selector=app.kubernetes.io/component=node", "--output=name")
    here = f"--field-selector=spec.nodeName={TARGET}"
    agents = shell.kubectl("--namespace", SYSTEM, "get", "pods", *of_node, here).strip()
    shell.kubectl("--namespace", SYSTEM, "logs", agents, *LAST)
    return answer


def trace(cluster: Cluster, shell: Shell) -> None:
    """Show the traces of capture and restore."""
    shell.step("what happened when: the traces")
    config = ("--kubeconfig", str(cluster.kubectl.kubeconfig))
    environment = os.environ | {"PATH": f"{cluster.folder / 'bin'}:{os.environ['PATH']}"}
    program = Path(sys.executable).with_name("snapshotctl")
    for what in ("dynamocheckpoint/demo-llm", "pod/demo-llm-restored"):
        print(f"$ snapshotctl --kubeconfig {config[1]} trace {what}", flush=True)
        subprocess.run([program, *config, "trace", what], env=environment, check=True, timeout=60)


def play(cluster: Cluster, shell: Shell, driver: str) -> None:
    """Play it all. DemoError unless the restored worker answers as it did before."""
    suffix = SUFFIXES[driver]
    install(cluster, shell, driver)
    before = capture(shell, suffix)
    lose(cluster, shell)
    after = restore(shell, suffix)
    trace(cluster, shell)
    shell.step("the answers")
    print(f"  before, on {SOURCE}: {before.strip()}\n  after,  on {TARGET}: {after.strip()}")
    if before != after:
        raise DemoError("the restored worker answers otherwise than before")
    print("  the same, byte for byte")


def main() -> int:
    """Play the demo on a cluster of its own, and return the exit status."""
    why = programs.lacking()
    if not why and helm.find() is None:
        why = f"helm is missing: {programs.NEXT_STEP}"
    if why:
        print(f"demo-cluster: {why}", file=sys.stderr)
        return 1
    driver = os.environ.get("DRIVER") or "cooperative"
    if driver not in SUFFIXES:
        print(f"demo-cluster: DRIVER is {driver}; use {' or '.join(SUFFIXES)}", file=sys.stderr)
        return 2
    os.chdir(programs.REPOSITORY)
    # As Ctrl-C: what was begun is ended.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    is_kept = os.environ.get("KEEP") == "1"
    cluster = Cluster(NAME)
    shell = Shell(cluster.kubectl)
    try:
        shell.step("a cluster of two nodes on this machine")
        cluster.up(owned=not is_kept)
        try:
            play(cluster, shell, driver)
        finally:
            if is_kept:
                print(f"\nexport KUBECONFIG={cluster.kubectl.kubeconfig}")
                print(f"export PATH={cluster.folder / 'bin'}:$PATH   # has kubectl")
                print(f"Next: kubectl get snapback. `make cluster-down NAME={NAME}` ends it.")
            else:
                shell.step("ending the cluster")
                cluster.down()
    except KeyboardInterrupt:
        print("demo-cluster: interrupted", file=sys.stderr)
        return 130
    except (
        ClusterError,
        ComponentError,
        DemoError,
        KubectlError,
        helm.HelmError,
        subprocess.SubprocessError,
    ) as error:
        print(f"demo-cluster: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
