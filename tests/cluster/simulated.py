"""The node services of simulated devices beside real kubelets, and pods that use their devices."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from gms.domain.claims import DRIVER, cdi_file
from tests.cluster.cluster import Cluster
from tests.cluster.kubectl import Kubectl
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "snapback.local/pause:1"
MIB = 2**20
DEVICES = 2
DEVICE_BYTES = 512 * MIB
PATIENCE_S = 90.0
NOWHERE = "nats://127.0.0.1:9"
HOST_PATHS = ("/usr", "/lib", "/lib64", sys.base_prefix, str(ROOT))
"""What an image without files gets of the host, to run this Python with these packages."""

until = partial(wait_until, within_s=PATIENCE_S)


class Service:
    """`python -m` of a module, which logs to a file."""

    def __init__(self, module: str, settings: dict[str, str], log: Path) -> None:
        self.log = log
        self._command = [sys.executable, "-m", module]
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None

    def begin(self, **settings: str) -> None:
        environment = os.environ | self._settings | settings
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self._command, env=environment, stderr=log)

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End it, if it runs."""
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(30)
            self._process = None


class Driver(Service):
    """`python -m gms.main` of one node, on the folders of its kubelet and its runtime."""

    def __init__(
        self, node: str, home: Path, state: Path, kubectl: Kubectl, **settings: str
    ) -> None:
        self.node = node
        self.kubelet, self.cdi = home / "kubelet", home / "cdi"
        self.claims = self.kubelet / "plugins" / DRIVER / "claims"
        self.sockets = state / node / "sockets"
        self._kubectl = kubectl
        of_node = {
            "SNAPBACK_NODE": node,
            "SNAPBACK_STATE_DIR": str(state / node),
            "SNAPBACK_ARTIFACT_ROOT": str(state / "artifacts"),
            "SNAPBACK_SOCKET_DIR": str(self.sockets),
            "SNAPBACK_NATS_URL": NOWHERE,
            "SNAPBACK_DEVICES": str(DEVICES),
            "SNAPBACK_DEVICE_BYTES": str(DEVICE_BYTES),
            "SNAPBACK_DEVICE_PRODUCT": "NVIDIA H200 (simulated)",
            "SNAPBACK_KUBELET_DIR": str(self.kubelet),
            "SNAPBACK_POD_LOGS_DIR": str(home / "layers/var/log/pods"),
            "SNAPBACK_CDI_DIR": str(self.cdi),
            "SNAPBACK_KUBECONFIG": str(kubectl.kubeconfig),
        }
        super().__init__("gms.main", of_node | settings, state / f"{node}.log")

    def start(self, plugin: str = "dra") -> None:
        """Start, and return when the kubelet has registered the plugin."""
        seen = self._registrations()
        self.begin(SNAPBACK_KUBELET_PLUGIN=plugin)
        until(lambda: self._registrations() > seen, f"the driver of {self.node}: {self.log}")

    def devices(self) -> dict[str, str]:
        """Return the uuids of the devices that are published, by name."""
        where = f"--field-selector=spec.nodeName={self.node}"
        return {
            device["name"]: device["attributes"]["gpu.nvidia.com/uuid"]["string"]
            for each in self._kubectl.list("resourceslices", where)
            for device in each["spec"]["devices"]
        }

    def holds(self, uid: str) -> bool:
        """Whether anything of a claim is on this node."""
        return (self.cdi / cdi_file(uid)).exists() or (self.claims / uid).exists()

    def _registrations(self) -> int:
        return self.log.read_text().count("has registered") if self.log.exists() else 0


@contextlib.contextmanager
def drivers_of(cluster: Cluster, state: Path, **settings: str) -> Iterator[dict[str, Driver]]:
    """Run the drivers of all nodes for the length of the block, and yield them by their nodes."""
    kubectl = cluster.kubectl
    kubectl.run("apply", "--filename", str(ROOT / "deploy/helm/snapback/files/device-class.yaml"))
    found = {
        node.name: Driver(node.name, node.home, state, kubectl, **settings)
        for node in cluster.nodes
    }
    try:
        for driver in found.values():
            driver.start()
        yield found
    finally:
        for driver in found.values():
            driver.end()


def template(name: str, *, count: int = 1, selector: str = "") -> dict[str, Any]:
    """Return a claim template as it is written for NVIDIA GPUs."""
    exactly: dict[str, Any] = {"deviceClassName": "gpu.nvidia.com", "count": count}
    if selector:
        exactly["selectors"] = [{"cel": {"expression": selector}}]
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name},
        "spec": {"spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}},
    }


def container(name: str, *command: str, **fields: Any) -> dict[str, Any]:
    """Return a container that runs a program of the host."""
    mounts = [{"name": f"host{n}", "mountPath": path} for n, path in enumerate(HOST_PATHS)]
    mounts = [{**mount, "readOnly": True} for mount in mounts]
    return {
        "name": name,
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": list(command or ("/usr/bin/sleep", "infinity")),
        **fields,
        "volumeMounts": [*mounts, *fields.get("volumeMounts", [])],
    }


def pod(name: str, *containers: dict[str, Any], claim: str = "", **spec: Any) -> dict[str, Any]:
    """Return a pod; its claim `gpu` is made from the template `claim`."""
    host = [{"name": f"host{n}", "hostPath": {"path": path}} for n, path in enumerate(HOST_PATHS)]
    claims = [{"name": "gpu", "resourceClaimTemplateName": claim}] if claim else []
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "resourceClaims": claims,
            **spec,
            "containers": list(containers),
            "volumes": [*host, *spec.get("volumes", [])],
        },
    }


GPU = {"claims": [{"name": "gpu"}]}
"""The resources of a container that has the devices of the claim."""
