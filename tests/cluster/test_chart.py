"""The chart on a real cluster: installed, looked at, upgraded, and uninstalled."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from gms.domain.claims import DRIVER
from snapshot_api.facts import AGENT_LABEL
from snapshot_api.well_known import POD_SPEC, RESTORE_FROM
from snapshot_operator.core.restore import RESTORED
from snapshot_shared import subjects
from snapshotctl.domain.exits import Exit
from tests.cluster.cluster import Cluster
from tests.cluster.kubectl import Kubectl
from tests.cluster.release import (
    DEVICES,
    EXAMPLES,
    PATIENCE_S,
    Release,
    connected,
    example,
    installed,
)
from tests.cluster.rig import polled
from tests.cluster.target import Target
from tests.support import helm
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.waits,
    pytest.mark.cpu(300),
    # Images are unpacked on each node.
    pytest.mark.timeout(900),
]

until = partial(wait_until, within_s=PATIENCE_S)
SLICES = ("get", "resourceslices", f"--field-selector=spec.driver={DRIVER}", "--output=json")


SEED = "seed.nk"
READABLE = ("/var/lib", "/run", "/tmp", "/etc", "/srv")


@pytest.fixture(scope="module")
def release(
    request: pytest.FixtureRequest, target: Target, service_images: dict[str, str]
) -> Iterator[Release]:
    """The chart with simulated devices, in a namespace of its own."""
    with installed(request, target, service_images) as found:
        yield found


async def announced(release: Release, folder: Path) -> set[str]:
    """Return the nodes that the bucket of NATS has, as a viewer sees it."""
    async with connected(release, folder, "viewer") as bus:
        return set(await bus.entries(subjects.NODES_BUCKET))


def nodes(release: Release) -> set[str]:
    return {each["metadata"]["name"] for each in release.kubectl.list("nodes")}


def slices(release: Release) -> dict[str, int]:
    """Return how many simulated devices each node has published."""
    items = json.loads(release.kubectl.run(*SLICES))["items"]
    return {each["spec"]["nodeName"]: len(each["spec"]["devices"]) for each in items}


async def test_all_pods_are_ready_and_every_node_announces_itself_with_its_devices(
    release: Release, tmp_path: Path
) -> None:
    found = [pod for each in ("operator", "nats", "node") for pod in release.pods(each)]
    assert len(found) == 2 + len(nodes(release))
    ready = [
        next(each["status"] for each in pod["status"]["conditions"] if each["type"] == "Ready")
        for pod in found
    ]
    assert set(ready) == {"True"}
    until(lambda: slices(release) == dict.fromkeys(nodes(release), DEVICES), "slices")
    await announced_by_all(release, tmp_path)


def seeds(release: Release) -> dict[str, str]:
    """Return the seed of each service of each node, as its container finds it."""
    found = {}
    for node, pod in release.agents().items():
        for container in ("agent", "gms"):
            inside = ("exec", pod, "--container", container, "--", "sh", "-c")
            assert release.kubectl.run(*inside, "ls -A /var/lib/snapback/keys").split() == [SEED]
            seed = release.kubectl.run(*inside, f"cat /var/lib/snapback/keys/{SEED}")
            found[f"{node}/{container}"] = seed.strip()
    return found


def test_an_agent_can_read_no_key_but_its_own(release: Release) -> None:
    found = seeds(release)
    assert len(set(found.values())) == 2 * len(nodes(release))
    secrets = json.dumps(release.kubectl.list("secrets"))
    for seed in found.values():
        assert seed not in secrets
        assert base64.b64encode(seed.encode()).decode().rstrip("=")[:-1] not in secrets
    # All that an agent can read, the volumes of all pods of its node among it.
    look = f"grep -rshoE 'SU[A-Z2-7]{{56}}' {' '.join(READABLE)} | sort -u"
    for node, pod in release.agents().items():
        inside = ("exec", pod, "--container", "agent", "--", "sh", "-c", look)
        seen = set(release.kubectl.run(*inside).split())
        assert found[f"{node}/agent"] in seen
        assert seen & {seed for name, seed in found.items() if name != f"{node}/agent"} == set()


def test_the_example_of_a_checkpoint_becomes_ready(
    release: Release, namespace: Kubectl, service_images: dict[str, str]
) -> None:
    documents, _ = checkpoint(service_images["gms"])
    namespace.apply(*documents)
    name = "dynamocheckpoint/demo-llm"
    namespace.wait(name, until="condition=Ready", within_s=PATIENCE_S)
    [content] = [
        each
        for each in release.kubectl.list("snapshotcontents")
        if each["spec"]["snapshotRef"]["namespace"] == namespace.namespace
    ]
    assert content["status"]["committed"]
    # The operator deletes the artifact, and then lets the objects go.
    namespace.run("delete", name, "--timeout=90s")
    namespace.run("delete", "jobs,pods", "--all")


def snapshotctl(release: Release, *words: str, code: int = 0) -> str:
    """Run snapshotctl against the cluster, and return what it says."""
    done = release.kubectl.snapshotctl("--kubeconfig", str(release.kubectl.kubeconfig), *words)
    assert done.returncode == code, (done.stdout, done.stderr)
    return done.stdout + done.stderr


def checkpoint(image: str) -> tuple[list[Any], dict[str, Any]]:
    """Return the example of a checkpoint with another image, and the container of its worker."""
    documents = example("checkpoint")
    [main] = documents[1]["spec"]["job"]["podTemplateSpec"]["spec"]["containers"]
    main["image"] = image
    return documents, main


@pytest.fixture
def without_operator(release: Release) -> Iterator[None]:
    before = release.keys
    release.install("--set", "operator.replicas=0")
    until(lambda: release.pods("operator") == [], "the end of the operator")
    yield
    release.roll_back()
    assert release.keys == before
    assert release.pods("operator")


@pytest.fixture
def worker(
    release: Release, namespace: Kubectl, service_images: dict[str, str], tmp_path: Path
) -> Path:
    """The manifest of a worker with a claim of devices, which is there."""
    namespace.apply(example("checkpoint")[0])
    [pod] = example("restore")
    pod["metadata"] = {"name": "worker"}
    # Where the artifact is: the nodes share no folder.
    pod["spec"]["nodeSelector"] = {"kubernetes.io/hostname": min(nodes(release))}
    pod["spec"]["containers"][0]["image"] = service_images["gms"]
    field = {"fieldRef": {"fieldPath": "spec.nodeName"}}
    pod["spec"]["containers"][0]["env"] += [
        {"name": "WARMUP_SECONDS", "value": "1"},
        {"name": "NODE", "valueFrom": field},
    ]
    manifest = tmp_path / "worker.yaml"
    manifest.write_text(yaml.safe_dump(pod))
    return manifest


def captured_and_restored(
    release: Release, namespace: Kubectl, worker: Path, *options: str
) -> None:
    """Capture the pod of a manifest and restore it, by a kubeconfig and more options."""
    space = ("--namespace", str(namespace.namespace))
    words = ("--manifest", str(worker), "--timeout", "5m", *space)
    captured = ("checkpoint", "--checkpoint-id", "mine", "--framework", "vllm", *words)
    assert "mine created" in snapshotctl(release, *options, *captured)
    phase = "--output=jsonpath={.status.phase}"
    assert namespace.run("get", "dynamocheckpoint/mine", phase) == "Ready"
    assert "created" in snapshotctl(release, *options, "restore", "mine", *words)
    assert namespace.get("pod", "worker")["spec"]["initContainers"][0]["name"] == "gms-server"


def test_snapshotctl_captures_and_restores_with_a_kubeconfig_alone(
    release: Release, namespace: Kubectl, worker: Path
) -> None:
    space = ("--namespace", str(namespace.namespace))
    captured_and_restored(release, namespace, worker)
    ask = ("python", "deploy/examples/ask.py", "What is my name?")
    inside = ("exec", "worker", "--container", "main", "--")
    answer = namespace.run(*inside, *ask)
    # A worker that ends goes on from what was brought to its pod.
    # The end of the container may kill the command.
    namespace.try_(*inside, "python", "-c", "import os; os.kill(1, 15)")
    count = "jsonpath={.status.containerStatuses[0].restartCount}=1"
    namespace.run("wait", "pod/worker", f"--for={count}", "--timeout=60s")
    namespace.run("wait", "pod/worker", "--for=condition=Ready", "--timeout=60s")
    assert namespace.run(*inside, *ask) == answer
    shown = json.loads(
        snapshotctl(release, "get", "dynamocheckpoints", "mine", "-o", "json", *space)
    )
    assert shown["status"]["phase"] == "Ready"
    assert "order prepare" in snapshotctl(release, "trace", "mine", *space)
    wrong = snapshotctl(release, "--context", "nobody", "nodes", code=2)
    assert "get-contexts" in wrong
    restored_by_the_name_of_revisions(release, namespace, worker, *space)
    restored_without_its_source(release, namespace, *space)
    namespace.run("delete", "pods", "--all", "--wait=false")
    namespace.run("delete", "dynamocheckpoint/mine", "--timeout=60s")


def restored_by_the_name_of_revisions(
    release: Release, namespace: Kubectl, worker: Path, *space: str
) -> None:
    """Capture the pod `worker` twice and keep one revision, from which another pod is restored."""
    taken = ("checkpoint", "worker", "--checkpoint-id", "chat", "--keep", "1", *space)
    assert "snapshot/chat-1 is ready" in snapshotctl(release, *taken)
    assert "snapshot/chat-1 deleted" in snapshotctl(release, *taken)
    pod = yaml.safe_load(worker.read_text())
    pod["metadata"] = {"name": "named", "annotations": {RESTORE_FROM: "chat"}}
    namespace.apply(pod)
    namespace.wait("pod/named", until=f"condition={RESTORED}", within_s=PATIENCE_S)
    [named] = [
        restore["status"]["contentName"]
        for restore in namespace.list("snapshotrestores")
        if restore["spec"]["podRef"]["name"] == "named"
    ]
    assert named == namespace.get("snapshot", "chat-2")["status"]["boundSnapshotContentName"]
    namespace.run("delete", "pod/named", "snapshot/chat-2", "--timeout=90s")


def restored_without_its_source(release: Release, namespace: Kubectl, *space: str) -> None:
    """Capture the pod `worker`, delete it, and start another one of what its Snapshot keeps."""
    before = namespace.get("pod", "worker")["spec"]
    snapshotctl(release, "checkpoint", "worker", "--checkpoint-id", "later", *space)
    text = namespace.get("snapshot", "later")["metadata"]["annotations"][POD_SPEC]
    assert "WARMUP_SECONDS" in text
    assert not any(row.get("value", "-") in text for row in before["containers"][0]["env"][:2])
    namespace.run("delete", "pod", "worker", "--timeout=60s")
    given = {
        row["name"]: row["value"] for row in example("restore")[0]["spec"]["containers"][0]["env"]
    }
    given["WARMUP_SECONDS"] = "1"
    refused = snapshotctl(release, "restore", "later", *space, code=Exit.REFUSED)
    assert all(f"--env {name}=VALUE" in refused for name in given)
    values = [word for name, value in given.items() for word in ("--env", f"{name}={value}")]
    # Any node may take it, and only one has the artifact.
    others = sorted(nodes(release) - {before["nodeName"]})
    release.kubectl.run("cordon", *others)
    try:
        said = snapshotctl(release, "restore", "later", *values, *space)
    finally:
        release.kubectl.run("uncordon", *others)
    [name] = re.findall(r"^pod/(later-restored-\w+) created", said, re.MULTILINE)
    # What the operator does not know of a pod is there, too, and the variable of another field.
    after = namespace.get("pod", name)["spec"]
    assert after["resourceClaims"] == before["resourceClaims"]
    rows = {row["name"]: row for row in after["containers"][0]["env"]}
    assert rows.items() >= {row["name"]: row for row in before["containers"][0]["env"]}.items()
    assert rows["NODE"]["valueFrom"]["fieldRef"]["fieldPath"] == "spec.nodeName"


def findings(release: Release, code: int) -> dict[str, list[tuple[str, str]]]:
    """What the doctor says, by its level, with the fixes."""
    said = json.loads(snapshotctl(release, "doctor", "-o", "json", code=code))
    found: dict[str, list[tuple[str, str]]] = {"ok": [], "warn": [], "fail": []}
    for row in said:
        found[row["level"]].append((row["what"], row.get("fix", "")))
    return found


@pytest.mark.turns
def test_the_doctor_looks_at_what_the_chart_has_installed(release: Release) -> None:
    well = findings(release, code=0)
    said = "\n".join(what for what, _ in well["ok"])
    name = f"{release.name}-snapback"
    for what in (
        "all 4 kinds are defined",
        "the API server reaches the webhooks",
        f"DaemonSet {name}-node is ready on all 2 nodes",
        f"Deployment {name}-operator is ready",
        f"StatefulSet {name}-nats is ready",
        "the nodes have no container helper",
        "the keys of NATS are there",
        "artifacts are in /var/lib/snapback/artifacts of each node",
    ):
        assert what in said
    release.kubectl.run("scale", f"deployment/{name}-operator", "--replicas=0")
    try:
        until(lambda: release.pods("operator") == [], "the end of the operator")
        ill = findings(release, code=1)
    finally:
        release.kubectl.run("scale", f"deployment/{name}-operator", "--replicas=1")
        release.kubectl.run("rollout", "status", f"deployment/{name}-operator", "--timeout=90s")
    [(webhooks, step)] = [row for row in ill["fail"] if "an object that is valid" in row[0]]
    assert "failed calling webhook" in webhooks
    assert "port 9443" in step
    assert [what for what, _ in ill["warn"] if "operator has no pods" in what]


@pytest.mark.turns
def starts_cold_without_admission(release: Release, namespace: Kubectl, worker: Path) -> None:
    """Start a rendered pod that does not wait for its source, and have it answer."""
    pod = yaml.safe_load(worker.read_text())
    pod["metadata"] = {
        "name": "cold",
        "annotations": {
            "nvidia.com/restore-from": "none",
            "nvidia.com/restore-policy": "Immediate",
        },
    }
    manifest = worker.with_name("cold.yaml")
    manifest.write_text(yaml.safe_dump(pod))
    words = ("--namespace", str(namespace.namespace))
    text = snapshotctl(release, "render", "-f", str(manifest))
    assert "gms-server" in text
    namespace.run("create", *words, "--filename", "-", given=text)
    ask = ("exec", "cold", "--container", "main", "--", "python", "deploy/examples/ask.py", "Hi")
    until(lambda: namespace.try_(*ask).returncode == 0, "the cold worker answers")
    namespace.run("delete", "pod", "cold", "--timeout=60s")


@pytest.mark.usefixtures("without_operator")
def test_snapshotctl_captures_and_restores_in_a_cluster_whose_operator_is_away(
    release: Release, namespace: Kubectl, worker: Path
) -> None:
    space = ("--namespace", str(namespace.namespace))
    away = snapshotctl(release, "get", "pods", *space, code=5)
    assert "no operator answers" in away
    starts_cold_without_admission(release, namespace, worker)
    captured_and_restored(release, namespace, worker, "--own-operator")
    namespace.run("delete", "pods", "--all", "--wait=false")
    namespace.run("delete", "dynamocheckpoint/mine", "--wait=false")


def refusal(namespace: Kubectl) -> str:
    """Return what the API server says of a restored pod whose policy is none."""
    [pod] = example("restore")
    pod["metadata"]["annotations"]["nvidia.com/restore-policy"] = "Never"
    words = ("create", "--dry-run=server", "--filename", "-")
    done = namespace.try_(*words, given=json.dumps(pod))
    assert done.returncode != 0
    return done.stderr


REFUSED = "metadata.annotations[nvidia.com/restore-policy]: 'Never' is not one of"


def test_a_pod_that_is_to_be_restored_waits_and_what_is_wrong_is_refused_by_its_path(
    release: Release, namespace: Kubectl
) -> None:
    given = str(EXAMPLES / "restore.yaml")
    words = ("create", "--dry-run=server", "--output=json", "--filename", given)
    pod = json.loads(namespace.run(*words))
    assert [each["name"] for each in pod["spec"]["initContainers"]] == ["gms-server"]
    [main] = pod["spec"]["containers"]
    assert {"name": "SNAPSHOT_RESTORE_STANDBY", "value": "1"} in main["env"]
    assert REFUSED in refusal(namespace)


@pytest.mark.turns
async def test_an_upgrade_keeps_every_key_and_nats_reads_its_users_again(
    release: Release, tmp_path: Path
) -> None:
    before, of_nodes = release.keys, seeds(release)
    server = release.pods("nats")[0]["metadata"]["uid"]
    release.install()
    assert release.keys == before
    assert seeds(release) == of_nodes
    assert release.pods("nats")[0]["metadata"]["uid"] != server
    assert REFUSED in refusal(release.kubectl.within("default"))
    # What NATS had was in an emptyDir: the nodes announce themselves again.
    await announced_by_all(release, tmp_path)


@pytest.mark.turns
async def test_an_upgrade_lets_a_node_in_that_has_other_keys(
    release: Release, tmp_path: Path, own_cluster: Cluster
) -> None:
    """As one that has joined the cluster, or was set up again."""
    before, of_nodes = release.keys, seeds(release)
    node = own_cluster.nodes[0]
    node.run("rm", "-r", "/var/lib/snapback/keys")
    release.kubectl.run("delete", "pod", release.agents()[node.name], "--wait")
    release.install()
    after = seeds(release)
    changed = {f"{node.name}/{service}" for service in ("agent", "gms")}
    assert {name for name in after if after[name] != of_nodes[name]} == changed
    own = ("operator", "snapshotctl", "viewer")
    assert {each: release.keys[each] for each in own} == {each: before[each] for each in own}
    await announced_by_all(release, tmp_path)


async def announced_by_all(release: Release, folder: Path) -> None:
    await polled(lambda: announced(release, folder), lambda found: found == nodes(release))


@pytest.mark.turns
def test_an_uninstall_ends_captures_and_keeps_checkpoints_that_can_be_deleted_then(
    release: Release, namespace: Kubectl, service_images: dict[str, str]
) -> None:
    documents, main = checkpoint(service_images["gms"])
    # Quiet at once, and never ready to be captured: its capture is under way until it is ended.
    main["command"] = ["sh", "-c", "echo >$SNAPSHOT_CONTROL_DIR/ready-for-snapshot; sleep 600"]
    namespace.apply(*documents)
    namespace.wait("snapshot/demo-llm", until="create", within_s=PATIENCE_S)
    bound = "jsonpath={.status.boundSnapshotContentName}"
    namespace.wait("snapshot/demo-llm", until=bound, within_s=PATIENCE_S)
    name = namespace.run("get", "snapshot/demo-llm", f"--output={bound}")
    begun = "jsonpath={.status.capture}=Preparing"
    namespace.wait(f"snapshotcontent/{name}", until=begun, within_s=PATIENCE_S)
    release.helm("uninstall", release.name, "--wait", "--timeout=5m")
    content = release.kubectl.get("snapshotcontent", name)
    assert content["status"]["failure"]["reason"] == "Aborted"
    assert content["status"].get("obligations", []) == []
    for kind in ("dynamocheckpoints", "snapshots", "snapshotcontents"):
        for each in namespace.list(kind):
            assert "finalizers" not in each["metadata"], each
    [pod] = namespace.list("pods")
    assert pod["status"]["phase"] == "Running"
    namespace.run("delete", "dynamocheckpoint,snapshot", "--all", "--timeout=30s")
    release.kubectl.run("delete", "snapshotcontent", name, "--timeout=30s")
    leaves_the_keys_and_the_definitions_alone(release)
    # Its kubelet waits for the driver of the simulated GPUs, which has gone with the release.
    namespace.run("delete", f"pod/{pod['metadata']['name']}", "--force")


def leaves_the_keys_and_the_definitions_alone(release: Release) -> None:
    """Wait until an uninstalled release has left its keys, the definitions and nothing else."""
    kinds_of_cluster = (
        *("clusterroles", "clusterrolebindings"),
        *("mutatingwebhookconfigurations", "validatingwebhookconfigurations"),
    )
    assert release.kubectl.list(",".join(kinds_of_cluster), f"--selector={release.label}") == []
    namespaced = ("--verbs=list", "--namespaced", "--output=name")
    kinds = [
        each
        for each in release.kubectl.run("api-resources", *namespaced).split()
        if not each.startswith("events")
    ]

    def left() -> set[str]:
        items = release.kubectl.list(",".join(kinds))
        return {f"{each['kind']}/{each['metadata']['name']}" for each in items}

    roles = ("accounts", "operator", "snapshotctl", "viewer")
    expected = {f"Secret/{release.name}-snapback-nats-{role}" for role in roles}
    # Of every namespace.
    expected |= {"ServiceAccount/default", "ConfigMap/kube-root-ca.crt"}
    assert release.kubectl.list("nodes", f"--selector={AGENT_LABEL}") == []
    until(lambda: left() == expected, f"only {sorted(expected)} left")
    until(lambda: slices(release) == {}, "the end of slices")
    found = {each["metadata"]["name"] for each in release.kubectl.list("crd")}
    files = (helm.CHART / "crds").iterdir()
    assert found >= {file.stem for file in files}
