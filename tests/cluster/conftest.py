"""What tests have of the cluster of their session, and what is kept when one fails."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Generator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from snapshot_operator.kube import rbac
from snapshot_shared import subjects
from snapshot_shared.bus import Bus
from snapshot_shared.codec import encode_json
from tests.cluster.agents import with_agents
from tests.cluster.captures import Captures, Crew
from tests.cluster.cluster import FAILED, Cluster
from tests.cluster.evidence import collect
from tests.cluster.kubectl import Kubectl
from tests.cluster.oci import programs as host_programs
from tests.cluster.oci import write_image
from tests.cluster.operators import Operator, admission
from tests.cluster.rig import SHELL, Rig, environment_of, opened, serving
from tests.cluster.simulated import drivers_of
from tests.cluster.target import Target
from tests.support import service_images as images
from tests.support.docker_engine import lacking
from tests.support.nats_server import NatsServer, nats_server
from tests.support.objects import presence

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


def _address(target: Target) -> str:
    return target.own.host_address if target.own else "127.0.0.1"


@pytest.fixture
def server(target: Target, tmp_path: Path) -> Iterator[NatsServer]:
    """A nats-server that this host reaches, and pods of a cluster that the tests start."""
    with nats_server(tmp_path / "nats", address=_address(target)) as running:
        yield running


@pytest.fixture
def nats_url(server: NatsServer) -> str:
    return server.url


@pytest.fixture(scope="module")
def nats_url_session(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a nats-server of the tests of a file listens, as that of one test does."""
    with nats_server(tmp_path_factory.mktemp("nats"), address=_address(target)) as running:
        yield running.url


@pytest.fixture
async def bus(nats_url: str) -> AsyncIterator[Bus]:
    """The bus as the agent of a node has it."""
    found = Bus(nats_url, "test")
    await found.connect_and_ensure()
    yield found
    await found.close()


@pytest.fixture
async def rig(kubeconfig: str, shell_image: str, nats_url: str, bus: Bus) -> AsyncIterator[Rig]:
    """An operator that runs in this process, with its rights alone; node-1 has an agent."""
    await bus.put(subjects.NODES_BUCKET, "node-1", encode_json(presence("node-1", gpus=0)))
    async with opened(kubeconfig, "operator", rbac.cluster_role()) as found:
        stop = asyncio.Event()
        running = asyncio.ensure_future(serving(stop, found.client, nats_url))
        try:
            yield replace(found, bus=bus)
        finally:
            stop.set()
            await running


@pytest.fixture
async def site(kubeconfig: str, nats_url: str, bus: Bus, tmp_path: Path) -> AsyncIterator[Rig]:
    """The same for an operator that is started as a program."""
    async with opened(kubeconfig, "program", rbac.cluster_role()) as found:
        environment = await environment_of(found, tmp_path, nats_url)
        yield replace(found, bus=bus, environment=environment)


@pytest.fixture(scope="module")
def operator(
    own_cluster: Cluster,
    kubeconfig: str,
    nats_url_session: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Operator]:
    """An operator that runs, whose webhooks are configured; it is a pod of its own namespace."""
    yield from admission(own_cluster, nats_url_session, tmp_path_factory.mktemp("operator"))


@pytest.fixture
def artifacts(tmp_path: Path) -> Path:
    """The artifact root of all nodes."""
    (tmp_path / "artifacts").mkdir()
    return tmp_path / "artifacts"


@pytest.fixture
def nodes(own_cluster: Cluster, nats_url: str, artifacts: Path, rig: Rig) -> Kubectl:
    """Commands in the namespace of the rig, with an agent on every node."""
    return with_agents(own_cluster.kubectl.within(rig.namespace), nats_url, artifacts)


@pytest.fixture
def memory(
    own_cluster: Cluster,
    nodes: Kubectl,
    nats_url: str,
    artifacts: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Kubectl]:
    """As `nodes`, with the GMS of every node, which has simulated devices for claims."""
    settings = {
        "SNAPBACK_WORLD": "kubernetes",
        "SNAPBACK_NATS_URL": nats_url,
        "SNAPBACK_ARTIFACT_ROOT": str(artifacts),
    }
    # A short name, for the path of a unix socket has at most 107 bytes.
    with drivers_of(own_cluster, tmp_path_factory.mktemp("g"), **settings):
        yield nodes
        # The devices of a claim are given back by the drivers.
        nodes.run("delete", "jobs,pods", "--selector=app!=snapback-node")


@pytest.fixture
def captures(rig: Rig, nodes: Kubectl, artifacts: Path) -> Captures:
    return Captures(rig, nodes, artifacts)


@pytest.fixture
async def crew(rig: Rig) -> AsyncIterator[Crew]:
    made = Crew(rig)
    yield made
    await made.end()
