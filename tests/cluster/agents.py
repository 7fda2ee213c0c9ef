"""An agent on every node, in a pod with the rights of the chart's, from this tree."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path
from typing import Any

from snapshot_operator.kube import restoring, shaping
from snapshot_shared import subjects
from snapshot_shared.api import Fault, SimReply, SimRequest
from snapshot_shared.codec import decode_json, encode_json
from snapshot_shared.ids import NodeName
from tests.cluster.kubectl import Kubectl, KubectlError
from tests.cluster.rig import Rig, polled
from tests.cluster.simulated import ROOT, container, pod
from tests.support.json_patch import applied

NAME = "snapback-node"
CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL")
HELPER_CAPABILITIES = (
    *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL"),
    *("MKNOD", "NET_ADMIN", "NET_BIND_SERVICE", "NET_RAW", "SETFCAP", "SETGID", "SETPCAP"),
    *("SETUID", "SYS_ADMIN", "SYS_CHROOT", "SYS_NICE", "SYS_PTRACE", "SYS_TIME"),
)
CRIU = ROOT / ".tools/criu/criu"
INIT = ROOT / ".tools/snapback-init"
TINY_WORKER = Path(__file__).resolve().parents[1] / "support" / "tiny_worker.py"


EXAMPLE = ROOT / "deploy/examples/worker_template.py"
READER = """
import snapback_client as client
with client.connect(0, lock="RO", deadline_s=60) as pool:
    print(pool["table"].min(), pool["table"].max(), pool["table"].shape)
"""


def with_agents(kubectl: Kubectl, nats_url: str, artifacts: Path, **options: Any) -> Kubectl:
    """Run an agent on every node, in the namespace of these commands, and return when all serve."""
    kubectl.apply(agents(nats_url, artifacts, **options))
    kubectl.run("rollout", "status", f"daemonset/{NAME}", "--timeout=60s")
    return kubectl


def agents(
    nats_url: str, artifacts: Path, *, helper: bool = False, **settings: str
) -> dict[str, Any]:
    """Return a DaemonSet of agents that share the folder `artifacts` of this host.

    With `helper` it has the container that dumps and restores processes by CRIU.
    """
    if helper:
        settings["SNAPBACK_HELPER"] = "/run/helper/helper.sock"
    environment = {
        "SNAPBACK_WORLD": "kubernetes",
        "SNAPBACK_NATS_URL": nats_url,
        "SNAPBACK_STATE_DIR": "/var/lib/snapback/agent",
        "SNAPBACK_ARTIFACT_ROOT": "/artifacts",
        "SNAPBACK_SOCKET_DIR": "/var/lib/snapback/sockets",
        "SNAPBACK_HTTP_ADDRESS": "0.0.0.0:9090",
        "SNAPBACK_SIM": "1",
        "SNAPBACK_GUARD_STARTER": "/run/guards/starter.sock",
        "HOME": "/tmp",
        **settings,
    }
    env: list[dict[str, Any]] = [
        {"name": name, "value": value} for name, value in environment.items()
    ]
    node = {"fieldRef": {"fieldPath": "spec.nodeName"}}
    env.append({"name": "SNAPBACK_NODE", "valueFrom": node})
    paths = {
        "pods": ("/var/lib/kubelet/pods", "/var/lib/kubelet/pods"),
        "pod-logs": ("/var/log/pods", "/var/log/pods"),
        "pod-resources": ("/var/lib/kubelet/pod-resources", "/var/lib/kubelet/pod-resources"),
        "state": ("/var/lib/snapback", "/var/lib/snapback"),
        "artifacts": (str(artifacts), "/artifacts"),
    }
    mounts = [{"name": name, "mountPath": at} for name, (_, at) in paths.items()]
    common: dict[str, Any] = {
        "env": env,
        "securityContext": {
            "runAsUser": 0,
            "capabilities": {"drop": ["ALL"], "add": list(CAPABILITIES)},
        },
        "volumeMounts": [*mounts, {"name": "guards", "mountPath": "/run/guards"}],
    }
    agent = container(
        "agent",
        *(sys.executable, "-m", "snapshot_agent.main"),
        readinessProbe={"httpGet": {"port": 9090, "path": "/readyz"}, "periodSeconds": 1},
        **common,
    )
    guards = container("guards", sys.executable, "-m", "snapshot_agent.guard_starter", **common)
    volumes = [{"name": name, "hostPath": {"path": of}} for name, (of, _) in paths.items()]
    volumes.append({"name": "guards", "emptyDir": {"medium": "Memory"}})
    containers = [agent, guards]
    if helper:
        containers.append(_helper(env, mounts))
        volumes += [
            {"name": "helper", "emptyDir": {"medium": "Memory"}},
            {"name": "run", "emptyDir": {"medium": "Memory"}},
            {"name": "tmp", "emptyDir": {}},
            {"name": "programs", "hostPath": {"path": "/usr/bin"}},
            {"name": "runtime", "hostPath": {"path": "/var/lib/containerd"}},
            {"name": "cgroups", "hostPath": {"path": "/sys/fs/cgroup"}},
            {
                "name": "seccomp",
                "hostPath": {"path": "/var/lib/kubelet/seccomp", "type": "DirectoryOrCreate"},
            },
        ]
        for each in (agent, guards):
            each["volumeMounts"] = [
                *each["volumeMounts"],
                {"name": "helper", "mountPath": "/run/helper"},
            ]
    template = pod(
        NAME,
        *containers,
        hostPID=True,
        automountServiceAccountToken=False,
        volumes=volumes,
        terminationGracePeriodSeconds=20,
    )
    labels = {"app": NAME}
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": NAME},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": template["spec"]},
        },
    }


def _helper(env: list[dict[str, Any]], mounts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the container `helper`, with the rights of the chart's that this host has."""
    environment = {
        "SNAPBACK_STATE_DIR": "/var/lib/snapback/helper",
        "SNAPBACK_CRIU": str(CRIU),
        "SNAPBACK_CGROUP_DIR": "/host/cgroup",
        "SNAPBACK_SECCOMP_DIR": "/host/seccomp",
    }
    return container(
        "helper",
        *(sys.executable, "-m", "snapshot_agent.helper"),
        env=[
            *(each for each in env if each["name"] not in environment),
            *({"name": name, "value": value} for name, value in environment.items()),
        ],
        securityContext={
            "runAsUser": 0,
            "capabilities": {"drop": ["ALL"], "add": list(HELPER_CAPABILITIES)},
            "seccompProfile": {"type": "Unconfined"},
        },
        volumeMounts=[
            *mounts,
            {"name": "run", "mountPath": "/run"},
            {"name": "tmp", "mountPath": "/tmp"},
            # For scripts: what runs this Python here is no more than /usr and its libraries.
            {"name": "programs", "mountPath": "/bin", "readOnly": True},
            {"name": "helper", "mountPath": "/run/helper"},
            {"name": "runtime", "mountPath": "/var/lib/containerd", "readOnly": True},
            {"name": "cgroups", "mountPath": "/host/cgroup"},
            {"name": "seccomp", "mountPath": "/host/seccomp"},
        ],
    )


def worker(*arguments: str, standby: bool = False) -> dict[str, Any]:
    """Return a container of the worker of the control directory's protocol."""
    main = container("main", sys.executable, str(TINY_WORKER), *arguments)
    if standby:
        main["env"] = [{"name": "SNAPSHOT_RESTORE_STANDBY", "value": "1"}]
    return main


def source(*arguments: str) -> dict[str, Any]:
    """Return the spec of a pod of such a worker on node-1."""
    spec: dict[str, Any] = pod("source", worker(*arguments), nodeName="node-1")["spec"]
    return spec


def placeholder(name: str, source: str, node: str) -> dict[str, Any]:
    """Return a pod that waits to be restored, as the webhook makes it."""
    document = pod(name, worker(standby=True), nodeName=node)
    document["metadata"]["annotations"] = {"nvidia.com/restore-from": source}
    shaping.with_control_directory(document["spec"], document["spec"]["containers"][0])
    return document


def with_weights(node: str, **main: Any) -> dict[str, Any]:
    """Return a pod of a worker that has its weights on the devices of a claim."""
    # Not by `nodeName`, as only the scheduler gives a claim its devices.
    where = {"kubernetes.io/hostname": node}
    worker = container("main", sys.executable, str(EXAMPLE), **main)
    server = container("gms-server", sys.executable, "-m", "gms.main")
    return pod("source", worker, initContainers=[server], nodeSelector=where)


def standby_with_weights(name: str, source: str, node: str) -> dict[str, Any]:
    """Return such a pod that waits to be restored, as the webhook makes it."""
    document = with_weights(node, env=[{"name": "SNAPSHOT_RESTORE_STANDBY", "value": "1"}])
    document["metadata"] = {"name": name, "annotations": {"nvidia.com/restore-from": source}}
    [main] = document["spec"]["containers"]
    shaping.with_control_directory(document["spec"], main)
    shaping.with_devices(document["spec"], main, shaping.devices_name(source))
    shaping.with_memory_server(document["spec"], main, "none")
    return document


async def arm(rig: Rig, node: str, step: str, action: Any) -> None:
    """Have the agent of a node do something else at a step."""
    request = encode_json(SimRequest(arm=Fault(step=step, action=action)))
    answer = await rig.bus.request(
        subjects.rpc(NodeName(node), "agent", "sim"), request, timeout_s=10.0
    )
    assert decode_json(answer, SimReply).armed


async def running(nodes: Kubectl, job: str) -> str:
    """Return the name of the pod of a Job."""
    [found] = await asyncio.to_thread(nodes.list, "pods", f"--selector=job-name={job}")
    return str(found["metadata"]["name"])


def waiting(document: dict[str, Any], of: str, profile: str = "") -> dict[str, Any]:
    """Return a pod that waits for its process, as admission makes it."""
    document["metadata"]["annotations"] = {"nvidia.com/restore-from": of}
    patch = restoring.standby_patch(document, driver="criu", shared_memory={}, profile=profile)
    changed: dict[str, Any] = applied(document, patch)
    [install] = changed["spec"]["initContainers"]
    # The image of these tests has no files; its programs are those of this host.
    mounts = install["volumeMounts"]
    program = container(install["name"], str(INIT), *install["command"][1:])
    program["volumeMounts"] = [*program["volumeMounts"], *mounts]
    changed["spec"]["initContainers"] = [program]
    return changed


async def events_of(nodes: Kubectl, name: str) -> list[str]:
    """Return what a worker has written of itself; a kubelet that starts anew is waited for."""

    async def read() -> str:
        with contextlib.suppress(KubectlError):
            return await asyncio.to_thread(nodes.run, "exec", name, "--", "cat", "/events")
        return ""

    return (await polled(read)).splitlines()
