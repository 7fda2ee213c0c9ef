"""Simulated GPUs on a real cluster: claimed, used, shared, and given back."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from snapshot_agent.adapters.gms_grpc import PodGms
from snapshot_agent.adapters.node_gpus import NodeGpus
from snapshot_shared.orders import PodRef
from tests.cluster.cluster import Cluster
from tests.cluster.kubectl import Kubectl
from tests.cluster.simulated import (
    DEVICE_BYTES,
    DEVICES,
    GPU,
    Driver,
    container,
    drivers_of,
    pod,
    template,
    until,
)

pytestmark = [pytest.mark.cluster, pytest.mark.turns, pytest.mark.root, pytest.mark.cpu(240)]

LOOK = """
import glob, json, os
files = sorted(glob.glob('/run/snapback/gpu/*/device.json'))
print(json.dumps({
    'environment': {name: value for name, value in os.environ.items()
                    if name.startswith(('SNAPBACK_', 'NVIDIA_'))},
    'devices': {name.split('/')[-2]: json.load(open(name)) for name in files},
    'mounts': [line.split()[1:4:2] for line in open('/proc/mounts') if '/run/snapback' in line],
}))
"""
"""Prints what a container has of its devices."""

WORKER = """
import json, time
import snapback_client as client
pool = client.connect(0, lock='RW', deadline_s=60)
pool.allocate('weights', 200 << 20, 'u1')[:] = 7
layout = pool.commit()
print(json.dumps({'kind': pool.device_kind, 'sum': int(pool['weights'][:1000].sum())}), flush=True)
"""
READER = """
import json
import snapback_client as client
with client.connect(0, lock='RO', deadline_s=60) as pool:
    print(json.dumps({'sum': int(pool['weights'][-1000:].sum())}))
"""


@pytest.fixture(scope="module")
def drivers(
    own_cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Driver]]:
    with drivers_of(own_cluster, tmp_path_factory.mktemp("d")) as found:
        yield found


@pytest.fixture
def kubectl(namespace: Kubectl, drivers: dict[str, Driver]) -> Iterator[Kubectl]:
    """A namespace of its own; the devices of its pods are free again after the test."""
    yield namespace
    namespace.run("delete", "pods", "--all")


def python(kubectl: Kubectl, pod: str, code: str, container: str = "main") -> Any:
    """Run code in a container and return the JSON that it prints."""
    words = ("exec", pod, "--container", container, "--", sys.executable, "-c", code)
    return json.loads(kubectl.run(*words))


def given(kubectl: Kubectl, driver: Driver, name: str, container: str = "main") -> list[str]:
    """Return the uuids of the GPUs that a kubelet says it gave to a container."""
    where = PodRef(uid="", name=name, namespace=str(kubectl.namespace), container=container)
    gms = PodGms(driver.sockets, driver.kubelet)

    async def asked() -> list[str]:
        found = await NodeGpus(gms, driver.kubelet).of(where)
        await gms.close()
        assert found is not None
        return [device.uuid for device in found]

    return asyncio.run(asked())


def test_a_container_has_the_devices_of_its_claim_and_others_have_none(
    kubectl: Kubectl, drivers: dict[str, Driver]
) -> None:
    both, bare = container("main", resources=GPU), container("other")
    kubectl.apply(template("two", count=2), pod("p", both, bare, claim="two"))
    kubectl.wait("pod/p", until="condition=Ready")
    found = python(kubectl, "p", LOOK)
    driver = drivers[kubectl.get("pod", "p")["spec"]["nodeName"]]
    published = driver.devices().values()
    assert sorted(given(kubectl, driver, "p")) == sorted(published)
    assert given(kubectl, driver, "p", "other") == []
    uuids = [found["devices"][number]["uuid"] for number in ("0", "1")]
    assert sorted(uuids) == sorted(published)
    assert found["devices"]["0"]["capacity"] == DEVICE_BYTES
    assert found["environment"] == {
        "NVIDIA_VISIBLE_DEVICES": "void",
        "SNAPBACK_GMS_DEVICE": "claimed",
        "SNAPBACK_GPU_0": uuids[0],
        "SNAPBACK_GPU_1": uuids[1],
    }
    assert [path for path, _ in found["mounts"]] == ["/run/snapback/gpu/0", "/run/snapback/gpu/1"]
    assert all(options.split(",")[0] == "ro" for _, options in found["mounts"])
    assert python(kubectl, "p", LOOK, "other") == {"environment": {}, "devices": {}, "mounts": []}


def test_selectors_that_are_written_for_nvidias_driver_choose_simulated_devices(
    kubectl: Kubectl,
) -> None:
    selector = (
        "device.attributes['gpu.nvidia.com'].productName.lowerAscii().matches('^.*h200.*$') && "
        "device.capacity['gpu.nvidia.com'].memory.compareTo(quantity('512Mi')) >= 0 && "
        "device.attributes['gpu.nvidia.com'].cudaComputeCapability"
        ".compareTo(semver('8.0.0')) >= 0"
    )
    kubectl.apply(
        template("fits", selector=selector),
        template("larger", selector=selector.replace("512Mi", "80Gi")),
        pod("fits", container("main", resources=GPU), claim="fits"),
        pod("larger", container("main", resources=GPU), claim="larger"),
    )
    kubectl.wait("pod/fits", until="condition=Ready")
    kubectl.wait("pod/larger", until="condition=PodScheduled=false")
    rows = {row["type"]: row for row in kubectl.get("pod", "larger")["status"]["conditions"]}
    assert "cannot allocate all claims" in rows["PodScheduled"]["message"]


def served_pod() -> dict[str, Any]:
    """Return a pod with an engine, and a memory server that is ready when its socket answers.

    Neither container may use as much memory as the engine takes of the device, and neither is root.
    """
    mounts = [{"name": "sockets", "mountPath": "/sockets"}]
    settings = {
        "SNAPBACK_NODE": "in-the-pod",
        "SNAPBACK_STATE_DIR": "/sockets/state",
        "SNAPBACK_ARTIFACT_ROOT": "/sockets/artifacts",
        "SNAPBACK_SOCKET_DIR": "/sockets",
        "SNAPBACK_NATS_URL": "nats://127.0.0.1:9",
    }
    server = container(
        "gms",
        *(sys.executable, "-m", "gms.main"),
        restartPolicy="Always",
        env=[{"name": name, "value": value} for name, value in settings.items()],
        resources=GPU | {"limits": {"memory": "150Mi"}},
        startupProbe={
            "exec": {"command": ["/usr/bin/test", "-S", "/sockets/gms-grpc.sock"]},
            "periodSeconds": 1,
            "failureThreshold": 60,
        },
        volumeMounts=mounts,
    )
    engine = container(
        "main",
        resources=GPU | {"limits": {"memory": "100Mi"}},
        env=[{"name": "GMS_SOCKET_DIR", "value": "/sockets"}],
        volumeMounts=mounts,
    )
    return pod(
        "p",
        engine,
        claim="one",
        initContainers=[server],
        volumes=[{"name": "sockets", "emptyDir": {}}],
        securityContext={"runAsUser": 1000, "runAsGroup": 1000},
    )


def test_a_pod_is_not_charged_for_memory_of_its_device_and_keeps_it_while_the_driver_is_away(
    kubectl: Kubectl, drivers: dict[str, Driver]
) -> None:
    kubectl.apply(template("one"), served_pod())
    kubectl.wait("pod/p", until="condition=Ready")
    assert python(kubectl, "p", WORKER) == {"kind": "simulated", "sum": 7000}
    assert python(kubectl, "p", READER) == {"sum": 7000}
    statuses = kubectl.get("pod", "p")["status"]
    containers = statuses["containerStatuses"] + statuses["initContainerStatuses"]
    assert [each["restartCount"] for each in containers] == [0, 0]
    driver = drivers[kubectl.get("pod", "p")["spec"]["nodeName"]]
    [claim] = kubectl.list("resourceclaims")
    uid = claim["metadata"]["uid"]
    driver.end(signal.SIGKILL)
    try:
        assert python(kubectl, "p", READER) == {"sum": 7000}
        kubectl.run("delete", "pod", "p", "--wait=false")
        assert driver.holds(uid)
    finally:
        driver.start()
    kubectl.wait("pod/p", until="delete")
    until(lambda: not driver.holds(uid), "unprepare")
    assert len(driver.devices()) == DEVICES


def test_the_device_plugin_gives_limits_of_nvidia_gpus(
    kubectl: Kubectl, drivers: dict[str, Driver]
) -> None:
    node, driver = next(iter(drivers.items()))
    driver.end()
    limits = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
    try:
        driver.start("device-plugin")
        kubectl.wait(
            f"node/{node}", until=f"jsonpath={{.status.allocatable.nvidia\\.com/gpu}}={DEVICES}"
        )
        # Each container has devices of its own: the API knows no claim that they share.
        kubectl.apply(pod("p", container("main", **limits), container("second", **limits)))
        kubectl.wait("pod/p", until="condition=Ready")
        found = [python(kubectl, "p", LOOK, each) for each in ("main", "second")]
        uuids = [each["environment"]["SNAPBACK_GPU_0"] for each in found]
        held = [given(kubectl, driver, "p", each) for each in ("main", "second")]
        assert held == [[uuid] for uuid in uuids]
        assert [each["devices"]["0"]["uuid"] for each in found] == uuids
        assert len(set(uuids)) == DEVICES
        kubectl.run("delete", "pod", "p")
    finally:
        driver.end()
        driver.start()
