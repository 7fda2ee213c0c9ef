"""What every test on a cluster relies on; on a cluster of the reader's as well."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.evidence import collect
from tests.cluster.host import ClusterError
from tests.cluster.images import Images
from tests.cluster.kubectl import Kubectl
from tests.cluster.oci import programs, write_image
from tests.cluster.target import Target

pytestmark = [pytest.mark.cluster, pytest.mark.waits]


def pod(name: str, image: str, script: str, **spec: Any) -> dict[str, Any]:
    """Return a pod that runs a script of bash."""
    container = {"name": "main", "image": image, "command": ["bash", "-c", script]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 0} | spec,
    }


def ready(node: Any) -> str:
    [found] = [each for each in node["status"]["conditions"] if each["type"] == "Ready"]
    return str(found["status"])


def test_all_nodes_are_ready(target: Target) -> None:
    nodes = target.kubectl.list("nodes")
    assert {ready(node) for node in nodes} == {"True"}
    if target.own:
        assert [node["metadata"]["name"] for node in nodes] == ["node-1", "node-2"]


def test_a_pod_of_an_image_made_here_runs(namespace: Kubectl, shell_image: str) -> None:
    namespace.apply(pod("hello", shell_image, "echo hello from $HOSTNAME", restartPolicy="Never"))
    namespace.wait("pod/hello", until="jsonpath={.status.phase}=Succeeded")
    assert namespace.run("logs", "hello") == "hello from hello\n"


def test_a_command_runs_in_a_pod(namespace: Kubectl, shell_image: str) -> None:
    namespace.apply(pod("waits", shell_image, "sleep infinity"))
    namespace.wait("pod/waits", until="condition=Ready")
    assert namespace.run("exec", "waits", "--", "bash", "-c", "echo $((6 * 7))") == "42\n"


def test_dns_answers_in_the_pods_of_every_node(
    target: Target, namespace: Kubectl, shell_image: str
) -> None:
    names = [node["metadata"]["name"] for node in target.kubectl.list("nodes")]
    script = "getent hosts kubernetes.default"
    service = target.kubectl.within("default").get("service", "kubernetes")
    for name in names:
        namespace.apply(pod(name, shell_image, script, nodeName=name, restartPolicy="OnFailure"))
    for name in names:
        namespace.wait(f"pod/{name}", until="jsonpath={.status.phase}=Succeeded")
        assert namespace.run("logs", name).split()[0] == service["spec"]["clusterIP"]


def test_a_pod_reaches_another_node_by_a_service(
    own_cluster: Cluster, namespace: Kubectl, shell_image: str
) -> None:
    """The service leads to the kubelet of the other node, which listens at its address."""
    node = own_cluster.kubectl.get("node", "node-2")
    [address] = [a["address"] for a in node["status"]["addresses"] if a["type"] == "InternalIP"]
    port = {"name": "https", "port": 443, "targetPort": 10250}
    namespace.apply(
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "kubelet"},
            "spec": {"ports": [port]},
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": "kubelet", "labels": {"kubernetes.io/service-name": "kubelet"}},
            "addressType": "IPv4",
            "endpoints": [{"addresses": [address]}],
            "ports": [{"name": "https", "port": 10250}],
        },
        pod(
            "caller",
            shell_image,
            "exec 3<>/dev/tcp/kubelet/443 && echo connected",
            nodeName="node-1",
            restartPolicy="OnFailure",
        ),
    )
    namespace.wait("pod/caller", until="jsonpath={.status.phase}=Succeeded")
    assert namespace.run("logs", "caller").endswith("connected\n")


def test_a_file_of_a_node_is_on_that_node_alone(
    own_cluster: Cluster, namespace: Kubectl, shell_image: str
) -> None:
    host_path = {"path": "/var/lib/snapback", "type": "DirectoryOrCreate"}
    volume = {"name": "node", "hostPath": host_path}
    for name, script in {
        "node-1": "echo mine >/node/file",
        "node-2": "[[ ! -e /node/file ]]",
    }.items():
        found = pod(name, shell_image, script, nodeName=name, restartPolicy="Never")
        found["spec"]["volumes"] = [volume]
        mount = {"name": "node", "mountPath": "/node"}
        found["spec"]["containers"][0]["volumeMounts"] = [mount]
        namespace.apply(found)
        namespace.wait(f"pod/{name}", until="jsonpath={.status.phase}=Succeeded", within_s=20)
    assert (own_cluster.folder / "node-1" / "snapback" / "file").read_text() == "mine\n"


def test_a_node_that_is_killed_becomes_not_ready_and_comes_back_with_its_pods(
    own_cluster: Cluster, namespace: Kubectl, shell_image: str
) -> None:
    namespace.apply(pod("stays", shell_image, "sleep infinity", nodeName="node-2"))
    namespace.wait("pod/stays", until="condition=Ready")
    own_cluster.kill("node-2")
    try:
        own_cluster.kubectl.wait("node/node-2", until="condition=Ready=Unknown")
        assert ready(own_cluster.kubectl.get("node", "node-1")) == "True"
    finally:
        own_cluster.start("node-2")
    own_cluster.kubectl.wait("node/node-2", until="condition=Ready")
    restarted = "jsonpath={.status.containerStatuses[0].restartCount}=1"
    namespace.wait("pod/stays", until=restarted)
    namespace.wait("pod/stays", until="condition=Ready")


def test_images_are_loaded_by_a_command_of_the_reader(
    own_cluster: Cluster, namespace: Kubectl, tmp_path: Path
) -> None:
    name = "snapback.local/loaded:1"
    archive = write_image(tmp_path / "loaded.tar", name, programs("bash"), ["bash"])
    words = [sys.executable, "-m", "tests.cluster", "--name", own_cluster.name, "load"]
    given = {"LOAD_IMAGES": shlex.join(words)}
    provided = Images(None, given).provide(archive, name)
    namespace.apply(pod("loaded", provided[name], "echo it runs", restartPolicy="Never"))
    namespace.wait("pod/loaded", until="jsonpath={.status.phase}=Succeeded")
    assert namespace.run("logs", "loaded") == "it runs\n"


@pytest.mark.parametrize(
    ("given", "said"), [({}, "give a command"), ({"LOAD_IMAGES": "false"}, "false /nowhere")]
)
def test_an_image_that_cannot_be_loaded_is_an_error_with_the_next_step(
    given: dict[str, str], said: str
) -> None:
    with pytest.raises(ClusterError, match=said):
        Images(None, given).provide(Path("/nowhere"), "snapback.local/loaded:1")


AGENT = """
python -P -c 'import snapshot_agent.main'
cd /opt/snapback
criu/criu --version | grep -q 'Version: 4'
criu/nft --version
./snapback-init --install /tmp/init
cmp snapback-init /tmp/init
"""


@pytest.mark.timeout(1500)
def test_the_images_of_the_services_run(namespace: Kubectl, service_images: dict[str, str]) -> None:
    """Each image has the packages of its service; what they do is for other tests."""
    commands = {
        "operator": ["python", "-P", "-c", "import snapshot_operator.main"],
        "gms": ["python", "-P", "-c", "import gms.main"],
        "snapshot-agent": ["sh", "-euc", AGENT],
        "snapshotctl": ["snapshotctl", "--version"],
        "page": ["python", "-P", "-c", "import snapshot_page.main"],
        "nats": ["nats-server", "--version"],
    }
    assert {*commands} == {*service_images}
    for name, command in commands.items():
        found = pod(name, service_images[name], "", restartPolicy="Never")
        found["spec"]["containers"][0]["command"] = command
        namespace.apply(found)
    for name in commands:
        namespace.wait(f"pod/{name}", until="jsonpath={.status.phase}=Succeeded")
    assert namespace.run("logs", "nats").startswith("nats-server: v")


def test_what_is_kept_of_a_failed_test_has_objects_events_and_logs(
    target: Target, namespace: Kubectl, shell_image: str, tmp_path: Path
) -> None:
    namespace.apply(pod("fails", shell_image, "echo the reason; exit 3", restartPolicy="Never"))
    namespace.wait("pod/fails", until="jsonpath={.status.phase}=Failed")
    kept = collect(tmp_path / "kept", namespace, target.own)
    assert "exitCode: 3" in (kept / "objects.yaml").read_text()
    assert "pod/fails" in (kept / "events.txt").read_text().lower()
    assert (kept / "pods" / "fails" / "main.log").read_text() == "the reason\n"
    assert "kind: Node" in (kept / "cluster-objects.yaml").read_text()
    if target.own:
        assert {folder.name for folder in (kept / "components").iterdir()} == {
            *("control-plane", "node-1", "node-2")
        }
        assert (kept / "components" / "node-1" / "kubelet.log").stat().st_size
