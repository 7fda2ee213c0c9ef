"""docs/kubernetes.md, typed word for word beside a new cluster of one node, as kind makes one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import programs
from tests.cluster.cluster import FAILED, Cluster
from tests.cluster.evidence import collect
from tests.cluster.kubectl import Kubectl
from tests.cluster.simulated import until
from tests.cluster.target import started
from tests.docs.pages import Shell, blocks, play
from tests.support import helm
from tests.support import service_images as images
from tests.support.docker_engine import lacking

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.waits,
    pytest.mark.cpu(300),
    # Images are unpacked on the node, and the chart is installed and upgraded.
    pytest.mark.timeout(900),
]

PAGE = programs.REPOSITORY / "docs" / "kubernetes.md"
COMMAND_S = 360.0
OF_THE_CLUSTER = (
    *("componentstatuses", "endpoints", "events", "events.events.k8s.io"),
    *("leases.coordination.k8s.io", "nodes.metrics.k8s.io"),
)
"""Kinds whose objects come and go by themselves."""


@pytest.fixture
def new_cluster() -> Iterator[Cluster]:
    """A cluster that has the images of this tree, and nothing else."""
    if helm.find() is None or programs.find("nats") is None:
        pytest.skip(f"helm and nats are needed: {programs.NEXT_STEP}; run `make tools`")
    if images.cached() is None and (why := lacking()):
        pytest.skip(f"the images of the services cannot be built: {why}")
    archive = images.archive()
    with started("page", nodes=1) as cluster:
        cluster.load(archive)
        yield cluster


def objects(kubectl: Kubectl) -> set[str]:
    """Return the names of all objects of a cluster, with their kinds and namespaces."""
    kinds = kubectl.run("api-resources", "--verbs=list", "--output=name").split()
    wanted = ",".join(kind for kind in kinds if kind not in OF_THE_CLUSTER)
    found = json.loads(kubectl.run("get", wanted, "--all-namespaces", "--output=json"))["items"]
    return {
        f"{each['kind']} {each['metadata'].get('namespace', '-')}/{each['metadata']['name']}"
        for each in found
    }


def test_the_commands_of_the_page_work_in_their_order_and_leave_nothing(
    new_cluster: Cluster, tmp_path: Path
) -> None:
    kubectl = new_cluster.kubectl
    # For the shell this folder is the home of its user.
    (tmp_path / ".kube").mkdir()
    shutil.copy(kubectl.kubeconfig, tmp_path / ".kube" / "config")
    program = helm.find()
    assert program
    shell = Shell(tmp_path, kubectl.program.parent, program.parent)
    before = objects(kubectl)
    story = [block for block in blocks(PAGE) if block.how and block.how.mode == "kubernetes"]
    assert len(story) >= 10
    try:
        for block in story:
            for said in play(block, shell, timeout_s=COMMAND_S):
                print(said.text)
        until(lambda: objects(kubectl) == before, "the end of all that the page has made")
    except BaseException:
        print(sorted(objects(kubectl) ^ before))
        for namespace in ("default", "snapback-system"):
            print(f"see {collect(FAILED / namespace, kubectl.within(namespace), new_cluster)}")
        raise
    finally:
        shell.close()
