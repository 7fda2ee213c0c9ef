"""Captures and restores while everything is replaced: the operator, NATS, and the nodes' services.

A fault of the simulation holds an order as a step of it begins. Then all pods of the chart are
replaced, as an upgrade does, and the chart is upgraded. There is a row for each step and driver, so
all of them take most of an hour: `make test-upgrades`, of which `TURN=1/4` is a quarter.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from snapshot_api.well_known import RESTORE_FROM
from snapshot_operator.core.restore import RESTORED
from snapshot_shared import steps, subjects
from snapshot_shared.api import Fault, SimReply, SimRequest
from snapshot_shared.codec import decode_json, encode_json
from snapshot_shared.ids import NodeName
from snapshot_shared.orders import Driver
from tests.cluster.demo import SYS_RESOURCE, capabilities
from tests.cluster.kubectl import Kubectl
from tests.cluster.release import Release, connected, example, installed
from tests.cluster.rig import polled
from tests.cluster.target import Target

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.waits,
    pytest.mark.cpu(300),
    # Images are unpacked on each node.
    pytest.mark.timeout(900),
]

SOURCE, TARGET = "node-1", "node-2"
DRIVERS: tuple[Driver, ...] = ("cooperative", "criu")
SIZE_MIB = "64"
READY_S = 300.0
UNCUT = ("restore-process", "signal")
"""Steps of a restore by CRIU for which a service that is stopped waits."""
STALL_S = 8.0
"""How long they are held: less than their time."""
CAPTURE = ("prepare", "dump", "save", "seal", "release")
RESTORE = ("load", "commit", "place", "restore")


class Row(NamedTuple):
    """A step of an order in which everything is replaced."""

    driver: Driver
    verb: str
    step: str

    @property
    def is_uncut(self) -> bool:
        return self.driver == "criu" and self.step in UNCUT

    @property
    def service(self) -> str:
        return "gms" if self.verb in steps.GMS_VERBS else "agent"


def rows(verbs: tuple[str, ...]) -> list[Row]:
    """Return a row for each step of some verbs, by each driver that is in a cluster."""
    return [
        Row(driver, verb, step)
        for driver in DRIVERS
        for verb in verbs
        if verb != "place" or driver == "criu"
        for step in steps.table(verb, driver)
    ]


def named(row: Row) -> str:
    return "-".join(row)


@pytest.fixture(scope="module")
def release(
    request: pytest.FixtureRequest, target: Target, service_images: dict[str, str]
) -> Iterator[Release]:
    """The chart with CRIU and the faults of the simulation, on nodes that share a folder."""
    if target.own is None:
        pytest.skip("only on a cluster that the tests start: unset KUBECONFIG")
    artifacts = target.own.folder / "upgraded"
    artifacts.mkdir(exist_ok=True)
    values = {
        "storage.hostPath": str(artifacts),
        "simulation.devices": "4",
        "node.helper.enabled": "true",
    }
    if not capabilities() >> SYS_RESOURCE & 1:
        values["node.helper.extraCapabilities"] = "null"
    words = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    for service in ("agent", "gms"):
        words += ["--set-string", f"node.{service}.env.SNAPBACK_SIM=1"]
    with installed(request, target, service_images, *words) as found:
        yield found


@contextlib.asynccontextmanager
async def held(release: Release, folder: Path, node: str, row: Row) -> AsyncIterator[None]:
    """Hold the order that begins within the block at a step of it; return when it is there."""
    subject = subjects.rpc(NodeName(node), row.service, "sim")
    stall_s = STALL_S if row.is_uncut else 0.0
    fault = Fault(action="stall", step=row.step, verb=row.verb, stall_s=stall_s)
    async with connected(release, folder, "snapshotctl") as bus:

        async def armed(request: SimRequest = SimRequest()) -> list[Fault]:  # noqa: B008 - a value
            return decode_json(await bus.request(subject, encode_json(request)), SimReply).armed

        # One of a row that failed may be left.
        assert await armed(SimRequest(arm=fault, clear=True)) == [fault]
        yield
        await polled(armed, lambda left: not left)


def replaced(release: Release) -> None:
    """Replace all pods of the chart, and upgrade it."""
    name = f"{release.name}-snapback"
    parts = (f"daemonset/{name}-node", f"deployment/{name}-operator", f"statefulset/{name}-nats")
    release.kubectl.run("rollout", "restart", *parts)
    release.install()
    for part in parts:
        release.kubectl.run("rollout", "status", part, "--timeout=120s")


def worker(container: dict[str, Any], pod: dict[str, Any], image: str, node: str) -> None:
    """Change the pod of an example to a small worker on a node."""
    pod["nodeSelector"] = {"kubernetes.io/hostname": node}
    container["image"] = image
    others = [row for row in container["env"] if row["name"] == "POD_SOCKET_DIR"]
    sizes = [{"name": "SIZE_MIB", "value": SIZE_MIB}, {"name": "WARMUP_SECONDS", "value": "1"}]
    container["env"] = [*sizes, *others]


def captured(driver: Driver, image: str, name: str = "llm") -> list[dict[str, Any]]:
    """Return the manifests by which a worker on SOURCE is captured."""
    claims, checkpoint = example("checkpoint-criu" if driver == "criu" else "checkpoint")
    checkpoint["metadata"]["name"] = name
    checkpoint["spec"]["identity"]["model"] = f"example/{name}-{secrets.token_hex(4)}"
    job = checkpoint["spec"]["job"]
    job["sourcePolicy"] = "Resume"
    pod = job["podTemplateSpec"]["spec"]
    worker(pod["containers"][0], pod, image, SOURCE)
    return [claims, checkpoint]


def restored(driver: Driver, image: str, source: str) -> dict[str, Any]:
    """Return the pod that is restored on TARGET."""
    [pod] = example("restore-criu" if driver == "criu" else "restore")
    pod["metadata"] = {"name": "again", "annotations": {RESTORE_FROM: source}}
    worker(pod["spec"]["containers"][0], pod["spec"], image, TARGET)
    return pod


def answer(namespace: Kubectl, pod: str) -> str:
    """Ask a worker what depends on its weights and its memory."""
    ask = ("python", "deploy/examples/ask.py", "What is my name?")
    return namespace.run("exec", pod, "--container", "main", "--", *ask)


def only_pod(namespace: Kubectl, job: str) -> str:
    [pod] = namespace.list("pods", f"--selector=job-name={job}")
    [status] = pod["status"]["containerStatuses"]
    assert status["restartCount"] == 0
    return str(pod["metadata"]["name"])


@pytest.mark.turns
@pytest.mark.parametrize("row", rows(CAPTURE), ids=named)
async def test_a_capture_in_whose_step_everything_is_replaced_becomes_ready(
    release: Release, namespace: Kubectl, service_images: dict[str, str], tmp_path: Path, row: Row
) -> None:
    async with held(release, tmp_path, SOURCE, row):
        manifests = captured(row.driver, service_images["gms"])
        await asyncio.to_thread(namespace.apply, *manifests)
    await asyncio.to_thread(replaced, release)
    await asyncio.to_thread(
        namespace.wait, "dynamocheckpoint/llm", until="condition=Ready", within_s=READY_S
    )
    assert answer(namespace, only_pod(namespace, "llm"))
    [content] = [
        each["status"]
        for each in namespace.list("snapshotcontents")
        if each["spec"]["snapshotRef"]["namespace"] == namespace.namespace
    ]
    print(f"{named(row)}: attempt {content['attempt']}, paused {content.get('pausedSeconds')} s")
    words = ("dynamocheckpoint/llm", "job/llm", "--timeout=60s")
    # The Job goes with its checkpoint, maybe before it is asked for.
    namespace.run("delete", *words, "--ignore-not-found")


class Source(NamedTuple):
    """What restores begin from: a namespace with a checkpoint of each driver, and answers."""

    namespace: Kubectl
    answers: dict[Driver, str]


@pytest.fixture(scope="module")
def source(release: Release, target: Target, service_images: dict[str, str]) -> Iterator[Source]:
    name = f"{release.name}-source"
    target.kubectl.run("create", "namespace", name)
    namespace = target.kubectl.within(name)
    answers: dict[Driver, str] = {}
    for driver in DRIVERS:
        namespace.apply(*captured(driver, service_images["gms"], driver))
        namespace.wait(f"dynamocheckpoint/{driver}", until="condition=Ready", within_s=READY_S)
        answers[driver] = answer(namespace, only_pod(namespace, driver))
    yield Source(namespace, answers)
    namespace.run("delete", "dynamocheckpoints,jobs", "--all", "--timeout=60s")
    target.kubectl.run("delete", "namespace", name, "--wait=false")


@pytest.mark.turns
@pytest.mark.parametrize("row", rows(RESTORE), ids=named)
async def test_a_restore_in_whose_step_everything_is_replaced_ends_well(
    release: Release, source: Source, service_images: dict[str, str], tmp_path: Path, row: Row
) -> None:
    namespace, answers = source
    # A process is brought into its place only while the devices are still loaded.
    loads = held(release, tmp_path, TARGET, row._replace(verb="load", step="read"))
    try:
        async with (
            loads if row.verb == "place" else contextlib.nullcontext(),
            held(release, tmp_path, TARGET, row),
        ):
            pod = restored(row.driver, service_images["gms"], row.driver)
            await asyncio.to_thread(namespace.apply, pod)
        if row.is_uncut:
            # The others of the chart take longer than the step is held.
            agent = f"pod/{release.agents()[TARGET]}"
            release.kubectl.run("delete", agent, "--wait=false")
        await asyncio.to_thread(replaced, release)
        await asyncio.to_thread(
            namespace.wait, "pod/again", until=f"condition={RESTORED}", within_s=READY_S
        )
        assert answer(namespace, "again") == answers[row.driver]
        [restore] = namespace.list("snapshotrestores")
        print(f"{named(row)}: attempt {restore['status']['attempt']}")
    finally:
        namespace.run("delete", "pod/again", "--timeout=60s")
