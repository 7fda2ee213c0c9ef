"""The operator as a program that serves webhooks, at an address of this host."""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from snapshot_operator.kube import rbac
from snapshot_operator.kube.webhooks import MUTATING, VALIDATING, Endpoint, configurations
from tests.cluster.cluster import Cluster
from tests.cluster.kubectl import Kubectl
from tests.cluster.simulated import Service, until
from tests.support.ports import free_port

INIT = "snapback.local/init:1"


class Operator(Service):
    """`python -m snapshot_operator.main`, with the rights of the operator alone."""

    def __init__(
        self, namespace: str, endpoint: Endpoint, settings: dict[str, str], log: Path
    ) -> None:
        super().__init__("snapshot_operator.main", settings, log)
        self.health = settings["SNAPBACK_HEALTH_ADDRESS"]
        self.namespace = namespace
        self.endpoint = endpoint

    def start(self) -> None:
        """Start, and return when it answers at its port."""
        self.begin()
        until(self._answers, f"the operator answers, whose log is {self.log}")

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log.read_text()[-2000:]
        return self.serial() is not None

    def serial(self) -> int | None:
        """Return the serial number of the certificate that is served now."""
        from cryptography import x509

        where = urlsplit(self.endpoint.url)
        try:
            pem = ssl.get_server_certificate((where.hostname or "", where.port or 0), timeout=5)
        except OSError:
            return None
        return x509.load_pem_x509_certificate(pem.encode()).serial_number


def admission(cluster: Cluster, nats_url: str, folder: Path) -> Iterator[Operator]:
    """Run an operator whose webhooks are configured; for a fixture."""
    space, kubectl, address = f"admission-{os.getpid()}", cluster.kubectl, cluster.host_address
    endpoint = Endpoint(space, url=f"https://{address}:{free_port(address)}")
    kubectl.run("create", "namespace", space)
    kubectl.run("create", "serviceaccount", rbac.NAME, "--namespace", space)
    kubectl.apply(rbac.cluster_role(), rbac.lease_role(space), *configurations(endpoint))
    account = f"--serviceaccount={space}:{rbac.NAME}"
    kubectl.run("create", "clusterrolebinding", space, f"--clusterrole={rbac.NAME}", account)
    own = kubectl.within(space)
    own.run("create", "rolebinding", rbac.NAME, f"--role={rbac.NAME}", account)
    token = own.run("create", "token", rbac.NAME, "--duration=2h").strip()
    config = json.loads(kubectl.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": token}
    file = folder / "kubeconfig"
    file.write_text(json.dumps(config))
    settings = {
        "SNAPBACK_WORLD": "kubernetes",
        "SNAPBACK_KUBECONFIG": str(file),
        "SNAPBACK_NAMESPACE": space,
        "SNAPBACK_NATS_URL": nats_url,
        "SNAPBACK_STATE_DIR": str(folder / "state"),
        "SNAPBACK_WEBHOOK_ADDRESS": endpoint.url.removeprefix("https://"),
        "SNAPBACK_WEBHOOK_URL": endpoint.url,
        "SNAPBACK_HEALTH_ADDRESS": f"{address}:{free_port(address)}",
        "SNAPBACK_AGENT_IMAGE": INIT,
    }
    running = Operator(space, endpoint, settings, folder / "operator.log")
    running.start()
    until(lambda: trusts(kubectl), "the API server trusts the operator")
    try:
        yield running
    finally:
        running.end()
        for kind in ("mutatingwebhookconfiguration", "validatingwebhookconfiguration"):
            kubectl.run("delete", kind, rbac.NAME)
        kubectl.run("delete", "clusterrolebinding", space)
        kubectl.run("delete", "namespace", space, "--wait=false")


def trusts(kubectl: Kubectl) -> bool:
    """Whether both webhooks have an authority that is trusted."""
    kinds = (MUTATING, VALIDATING)
    found = [kubectl.get(kind, rbac.NAME)["webhooks"][0]["clientConfig"] for kind in kinds]
    return all("caBundle" in each for each in found)
