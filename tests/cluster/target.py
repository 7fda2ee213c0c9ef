"""The cluster of a session of tests: it is started for them, or is the reader's."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from snapshot_api.schema.definitions import PART_OF
from tests.cluster import programs
from tests.cluster.cluster import Cluster
from tests.cluster.images import Images
from tests.cluster.kubectl import Kubectl
from tests.cluster.simulated import until


class Target(NamedTuple):
    """The cluster of the tests; `own` is none where it is the reader's."""

    kubectl: Kubectl
    own: Cluster | None
    images: Images


@contextlib.contextmanager
def started(purpose: str, nodes: int = 2) -> Iterator[Cluster]:
    """Run a cluster for the length of the block; skip the test if none can be started."""
    if why := programs.lacking():
        pytest.skip(why)
    cluster = Cluster(f"{purpose}-{os.getpid()}")
    cluster.up(nodes, owned=True)
    try:
        yield cluster
    finally:
        cluster.down()


@pytest.fixture(scope="session")
def target() -> Iterator[Target]:
    """The cluster that KUBECONFIG names, or else one that ends with this session."""
    if given := os.environ.get("KUBECONFIG"):
        kubectl = programs.find("kubectl") or shutil.which("kubectl")
        if kubectl is None:
            pytest.skip(f"kubectl is missing: {programs.NEXT_STEP}")
        yield Target(Kubectl(Path(given), Path(kubectl)), None, Images(None))
        return
    with started("test") as cluster:
        yield Target(cluster.kubectl, cluster, Images(cluster))


def define(kubectl: Kubectl) -> None:
    """Apply the CustomResourceDefinitions of this repository and wait until they are served."""
    kubectl.run("apply", "--server-side", "--filename", str(programs.CRDS))

    names = [file.stem for file in sorted(programs.CRDS.iterdir())]

    def are_served() -> bool:
        # `kubectl wait` fails for one that has no conditions yet.
        rows = [
            {row["type"]: row["status"] for row in found.get("status", {}).get("conditions") or ()}
            for found in kubectl.list("crd", f"--selector={'='.join(PART_OF)}")
        ]
        served = [each for each in rows if each.get("Established") == "True"]
        if len(served) < len(names):
            return False
        # An API server that has just started answers at first that it initialises the storage.
        return not kubectl.try_("get", ",".join(names), "--all-namespaces").returncode

    until(are_served, "the definitions")


@pytest.fixture(scope="session")
def definitions(target: Target) -> Iterator[None]:
    """The CustomResourceDefinitions of this repository are in the cluster, and no others."""
    names = [file.stem for file in sorted(programs.CRDS.iterdir())]
    said = target.kubectl.run("get", "crd", *names, "--ignore-not-found", "--output", "json")
    before = json.loads(said).get("items", []) if said else []
    label, ours = PART_OF
    if any(found["metadata"].get("labels", {}).get(label) != ours for found in before):
        pytest.skip(f"the cluster has some of {', '.join(names)} from another product")
    define(target.kubectl)
    yield
    if not before and not target.own:
        target.kubectl.run("delete", "crd", *names, "--timeout=30s")


@pytest.fixture(scope="session")
def kubeconfig(target: Target, definitions: None) -> str:
    """The path of the kubeconfig of the administrator of a cluster with our definitions."""
    return str(target.kubectl.kubeconfig)
