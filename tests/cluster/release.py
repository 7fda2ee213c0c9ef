"""The chart as a test installs it, and what is asked of that."""

from __future__ import annotations

import base64
import contextlib
import re
import secrets
import subprocess
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from snapshot_shared.bus import Bus
from snapshot_shared.permissions import Role, User
from tests.cluster import programs
from tests.cluster.cluster import FAILED
from tests.cluster.evidence import collect
from tests.cluster.kubectl import Kubectl
from tests.cluster.target import Target
from tests.support import helm

PATIENCE_S = 120.0
DEVICES = 2
COMPONENT = "app.kubernetes.io/component"
EXAMPLES = programs.REPOSITORY / "deploy/examples/kubernetes"


class Release(NamedTuple):
    """An installed chart: commands in its namespace, and the options of its install."""

    kubectl: Kubectl
    name: str
    options: tuple[str, ...]

    def helm(self, *words: str) -> str:
        where = ("--namespace", str(self.kubectl.namespace))
        return helm.run(*words, *where, kubeconfig=self.kubectl.kubeconfig)

    def install(self, *words: str) -> str:
        """Install or upgrade it, and return when all its pods are ready."""
        chart = (self.name, str(helm.CHART), "--install", *self.options)
        said = self.helm("upgrade", *chart, "--wait", "--timeout", "6m", *words)
        self._await_nodes()
        return said

    def roll_back(self) -> None:
        """Take the last upgrade back, as docs/kubernetes.md does."""
        self.helm("rollback", self.name, "--wait", "--timeout", "6m")
        self._await_nodes()

    def _await_nodes(self) -> None:
        # For helm a DaemonSet is ready while as many pods are not as its strategy allows.
        nodes = f"daemonset/{self.name}-snapback-node"
        self.kubectl.run("rollout", "status", nodes, f"--timeout={PATIENCE_S:g}s")

    @property
    def keys(self) -> dict[str, dict[str, bytes]]:
        """The keys of NATS, by the last word of the name of their Secret."""
        found = self.kubectl.list("secrets", "--selector=app.kubernetes.io/component=nats-keys")
        return {
            each["metadata"]["name"].rpartition("-")[2]: {
                key: base64.b64decode(value) for key, value in each["data"].items()
            }
            for each in found
        }

    def pods(self, component: str) -> list[Any]:
        return list(self.kubectl.list("pods", f"--selector={self.label},{COMPONENT}={component}"))

    def agents(self) -> dict[str, str]:
        """The pods of the DaemonSet, by their nodes."""
        return {pod["spec"]["nodeName"]: pod["metadata"]["name"] for pod in self.pods("node")}

    @property
    def label(self) -> str:
        return f"app.kubernetes.io/instance={self.name}"


def example(name: str) -> list[Any]:
    """Return the documents of an example."""
    return list(yaml.safe_load_all((EXAMPLES / f"{name}.yaml").read_text()))


@contextlib.contextmanager
def installed(
    request: pytest.FixtureRequest,
    target: Target,
    service_images: Mapping[str, str],
    *more: str,
) -> Iterator[Release]:
    """Install the chart with simulated devices and `more` options, in a namespace of its own."""
    if helm.find() is None:
        pytest.skip(f"helm is missing: {programs.NEXT_STEP}")
    namespace = name = f"chart-{secrets.token_hex(3)}"
    images = {
        "operator.image": "operator",
        "node.agent.image": "snapshot-agent",
        "node.gms.image": "gms",
        "nats.image": "nats",
    }
    # A cluster has one of its name, which another test may have made.
    has_class = target.kubectl.try_("get", "deviceclass", "gpu.nvidia.com").returncode == 0
    options = {
        **{value: service_images[image] for value, image in images.items()},
        "simulation.enabled": "true",
        "simulation.devices": str(DEVICES),
        "simulation.deviceClass": "false" if has_class else "true",
    }
    words = [word for key, value in options.items() for word in ("--set", f"{key}={value}")]
    found = Release(target.kubectl.within(namespace), name, (*words, *more))
    failed, is_installed = request.session.testsfailed, False
    try:
        found.install("--create-namespace")
        is_installed = True
        yield found
    finally:
        if request.session.testsfailed > failed or not is_installed:
            print(f"\nsee {collect(FAILED / namespace, found.kubectl, target.own)}")
        with contextlib.suppress(helm.HelmError):
            found.helm("uninstall", name, "--wait")
        target.kubectl.run("delete", "namespace", namespace, "--wait=false")


@contextlib.contextmanager
def forwarded(release: Release) -> Iterator[str]:
    """Forward a port of this host to NATS, and yield its address."""
    service = f"service/{release.name}-snapback-nats"
    words = release.kubectl.words("port-forward", service, ":4222")
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        found = re.search(r"127\.0\.0\.1:(\d+)", process.stdout.readline())
        assert found
        try:
            yield f"nats://127.0.0.1:{found[1]}"
        finally:
            process.terminate()


@contextlib.asynccontextmanager
async def connected(release: Release, folder: Path, role: Role) -> AsyncIterator[Bus]:
    """Connect to NATS with the key of a role, for the length of the block."""
    seed = folder / f"{role}.nk"
    seed.write_bytes(release.keys[role]["seed.nk"])
    with forwarded(release) as url:
        bus = Bus(url, "test", credentials=str(seed), inbox=User(role).inbox)
        await bus.connect()
        try:
            yield bus
        finally:
            await bus.close()
