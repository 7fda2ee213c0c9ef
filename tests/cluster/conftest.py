"""What tests have of the cluster of their session, and what is kept when one fails."""

from __future__ import annotations

import re
import secrets
from collections.abc import Generator, Iterator

import pytest

from tests.cluster.cluster import FAILED, Cluster
from tests.cluster.evidence import collect
from tests.cluster.kubectl import Kubectl
from tests.cluster.oci import programs as host_programs
from tests.cluster.oci import write_image
from tests.cluster.target import Target
from tests.support import service_images as images
from tests.support.docker_engine import lacking

SHELL = "snapback.local/shell:1"
FAILURE = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Have the fixtures of a test know whether it failed."""
    report = yield
    item.stash[FAILURE] = item.stash.get(FAILURE, False) or report.failed
    return report


@pytest.fixture(scope="session")
def own_cluster(target: Target) -> Cluster:
    """The cluster of the tests, whose nodes a test may kill and start again."""
    if target.own is None:
        pytest.skip("only on a cluster that the tests start: unset KUBECONFIG")
    return target.own


@pytest.fixture(scope="session")
def shell_image(target: Target, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The name of an image with bash and a few programs of this host."""
    files = host_programs("bash", "cat", "false", "getent", "sh", "sleep", "touch")
    archive = write_image(tmp_path_factory.mktemp("images") / "shell.tar", SHELL, files, ["bash"])
    return target.images.provide(archive, SHELL)[SHELL]


@pytest.fixture(scope="session")
def service_images(target: Target) -> dict[str, str]:
    """The names of the images of the services, by those of their folders; `nats` is one more."""
    if images.cached() is None and (why := lacking()):
        pytest.skip(f"the images of the services cannot be built: {why}")
    names = {name: images.image(name) for name in images.NAMES}
    provided = target.images.provide(images.archive(), *names.values())
    return {name: provided[image] for name, image in names.items()}


@pytest.fixture
def namespace(request: pytest.FixtureRequest, target: Target) -> Iterator[Kubectl]:
    """Commands in a namespace of this test alone; if it fails, what is in there is kept."""
    words = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower().removeprefix("test_"))
    name = f"{words[:40].strip('-')}-{secrets.token_hex(3)}"
    target.kubectl.run("create", "namespace", name)
    kubectl = target.kubectl.within(name)
    # Pods are refused until it is there.
    kubectl.wait("serviceaccount/default", until="create")
    yield kubectl
    if request.node.stash.get(FAILURE, False):
        print(f"\nobjects, events and logs are in {collect(FAILED / name, kubectl, target.own)}")
    target.kubectl.run("delete", "namespace", name, "--wait=false")
