"""The operator's webhooks on a real API server: the whole program, at an address of this host."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import copy
import io
import json
import random
import shutil
import signal
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from snapshot_api.facts import AGENT_LABEL
from snapshot_operator.kube import rbac
from snapshot_operator.kube.certificates import Certificates, renewed
from snapshot_operator.kube.rbac import CERTIFICATE_SECRET
from snapshot_operator.kube.restoring import INSTALLED_INIT
from snapshot_operator.kube.webhook_tls import Introduction
from snapshot_operator.kube.webhooks import BASE, MUTATING, VALIDATING, Endpoint, configurations
from snapshot_shared.clocks import Clocks
from snapshot_shared.errors import InvalidManifest
from snapshot_shared.kube_client import KubeClient, load_configuration
from tests.cluster.kubectl import Kubectl, KubectlError
from tests.cluster.oci import write_image
from tests.cluster.operators import INIT, Operator, trusts
from tests.cluster.programs import REPOSITORY
from tests.cluster.rig import SHELL, polled
from tests.cluster.simulated import until
from tests.cluster.target import Target
from tests.support.objects import checkpoint_document

pytestmark = pytest.mark.cluster

FIELDS = ("ca.crt", "ca.key", "tls.crt", "tls.key")
STANDBY = {"name": "SNAPSHOT_RESTORE_STANDBY", "value": "1"}


def pod(name: str, **annotations: str) -> dict[str, Any]:
    marks = {f"nvidia.com/{key.replace('_', '-')}": text for key, text in annotations.items()}
    main = {
        "name": "main",
        "image": SHELL,
        "command": ["sleep", "600"],
        "env": [{"name": "Z", "value": "1"}, {"name": "A", "value": "2"}],
        "readinessProbe": {"exec": {"command": ["false"]}, "initialDelaySeconds": 60},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "annotations": marks},
        # Nothing is to run: no node has this label.
        "spec": {"containers": [main], "nodeSelector": {"no-node": "has-it"}},
    }


def checkpoint(name: str, **template: Any) -> dict[str, Any]:
    main = {"name": "main", "image": SHELL, "command": ["sleep", "600"]}
    spec = {"nodeSelector": {"no-node": "has-it"}, "containers": [main], **template}
    document = checkpoint_document(name, podTemplateSpec={"spec": spec})
    del document["metadata"]["namespace"]
    return document


def env_of(found: Any) -> list[Any]:
    env: list[Any] = found["spec"]["containers"][0].get("env", [])
    return env


@pytest.fixture
def _placed(namespace: Kubectl) -> Iterator[None]:
    """Have all nodes say that they have an agent: a pod that waits is placed on one of these."""
    namespace.run("label", "nodes", "--all", "--overwrite", f"{AGENT_LABEL}=true")
    yield
    namespace.run("label", "nodes", "--all", f"{AGENT_LABEL}-")


def status_of(namespace: Kubectl) -> Any:
    (found,) = namespace.get("pod", "restored")["status"]["containerStatuses"]
    return found


@pytest.mark.usefixtures("_placed")
def test_a_worker_in_standby_has_its_control_directory_and_is_ready_once_it_says_restored(
    operator: Operator, namespace: Kubectl, shell_image: str
) -> None:
    document = pod("restored", restore_from="llm")
    document["spec"] |= {"nodeSelector": {}, "terminationGracePeriodSeconds": 0}
    (container,) = document["spec"]["containers"]
    del container["readinessProbe"]
    container["image"] = shell_image
    namespace.apply(document, pod("other"))
    (other,) = namespace.get("pod", "other")["spec"]["containers"]
    assert [row["name"] for row in other["env"]] == ["Z", "A"]
    assert "startupProbe" not in other
    namespace.wait("pod/restored", until="jsonpath={.status.phase}=Running", within_s=90)
    status = status_of(namespace)
    assert (status["started"], status["ready"]) == (False, False)
    script = 'test "$SNAPSHOT_RESTORE_STANDBY" = 1 && touch "$SNAPSHOT_CONTROL_DIR/restored"'
    namespace.run("exec", "restored", "--", "bash", "-c", script)
    until(lambda: status_of(namespace)["ready"], "the worker is ready")
    assert status_of(namespace)["restartCount"] == 0


@pytest.fixture
def init_image(target: Target, tmp_path: Path) -> str:
    """The name of an image with what placeholders get from that of the agent."""
    if shutil.which("cc") is None:
        pytest.skip("cc is missing (packages gcc and libc6-dev)")
    subprocess.run(["make", "--silent", "init"], cwd=REPOSITORY, check=True)
    files = {INSTALLED_INIT: REPOSITORY / ".tools" / "snapback-init"}
    archive = write_image(tmp_path / "init.tar", INIT, files, [INSTALLED_INIT])
    return target.images.provide(archive, INIT)[INIT]


@pytest.mark.usefixtures("_placed")
def test_a_container_for_a_process_of_criu_waits_and_ends_at_once_when_its_pod_is_deleted(
    operator: Operator, namespace: Kubectl, shell_image: str, init_image: str
) -> None:
    source = checkpoint("llm")
    source["spec"]["job"] |= {"driver": "criu", "sharedMemory": {"size": "64Mi"}}
    namespace.apply(source)
    document = pod("restored", restore_from="llm")
    # With it the API server shows how the container of a deleted pod ended.
    document["metadata"]["finalizers"] = ["example.com/kept"]
    document["spec"]["nodeSelector"] = {}
    (container,) = document["spec"]["containers"]
    container |= {"image": shell_image, "args": ["600"], "stdin": True}
    namespace.apply(document)
    namespace.wait("pod/restored", until="jsonpath={.status.phase}=Running", within_s=90)
    found = namespace.get("pod", "restored")
    assert found["metadata"]["annotations"]["nvidia.com/restore-driver"] == "criu"
    (container,) = found["spec"]["containers"]
    assert container["command"] == ["/snapback/snapback-init", "--", "sleep", "600"]
    assert container["args"] == ["600"]
    volumes = {each["name"]: each for each in found["spec"]["volumes"]}
    shared = next(row for row in container["volumeMounts"] if row["mountPath"] == "/dev/shm")
    assert volumes[shared["name"]]["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Mi"}
    assert "waiting for a restore" in namespace.run("logs", "restored", "--container", "main")
    status = status_of(namespace)
    assert (status["started"], status["restartCount"]) == (False, 0)
    # What is stored is what a webhook that is called again is given.
    again = copy.deepcopy(found)
    again["metadata"] = {"name": "again", "annotations": found["metadata"]["annotations"]}
    words = ("create", "--dry-run=server", "--output=json", "--filename", "-")
    assert json.loads(namespace.run(*words, given=json.dumps(again)))["spec"] == found["spec"]

    namespace.run("delete", "pod", "restored", "--wait=false")
    until(lambda: "terminated" in status_of(namespace)["state"], "the container has ended")
    assert status_of(namespace)["state"]["terminated"]["exitCode"] == 128 + signal.SIGTERM
    namespace.run("patch", "pod", "restored", "--patch", '{"metadata": {"finalizers": null}}')


def test_a_pod_that_is_to_be_capturable_has_a_control_directory_and_does_not_wait(
    operator: Operator, namespace: Kubectl
) -> None:
    namespace.apply(pod("serving", capturable="true"))
    namespace.apply(pod("other", capturable="false"))
    found = namespace.get("pod", "serving")
    assert {"name": "SNAPSHOT_CONTROL_DIR", "value": "/snapshot-control"} in env_of(found)
    assert STANDBY not in env_of(found)
    [container] = found["spec"]["containers"]
    assert "startupProbe" not in container
    assert len(env_of(namespace.get("pod", "other"))) == 2
    given = json.dumps(pod("wrong", capturable="yes"))
    refused = namespace.try_("apply", "--filename", "-", given=given)
    assert "metadata.annotations[nvidia.com/capturable]: 'yes' is not one of" in refused.stderr


def test_a_deletion_warns_of_the_pods_that_are_restored_from_what_goes(
    operator: Operator, namespace: Kubectl
) -> None:
    namespace.apply(checkpoint("llm"))
    namespace.apply(pod("replica", restore_from="llm"))
    until(lambda: namespace.list("snapshotrestores"), "the restore of the pod")
    deleted = namespace.try_("delete", "dynamocheckpoint", "llm", "--wait=false")
    assert deleted.returncode == 0
    assert "Warning: pods are restored from llm" in deleted.stderr
    assert "replica" in deleted.stderr


async def test_a_checkpoint_that_is_wrong_is_refused_with_every_path(
    operator: Operator, namespace: Kubectl, kubeconfig: str
) -> None:
    document = checkpoint("llm")
    document["spec"]["gpuMemoryService"] = {"extraClientContainers": ["main", "proxy", "other"]}
    path = f"/apis/nvidia.com/v1alpha1/namespaces/{namespace.namespace}/dynamocheckpoints"
    async with KubeClient(await load_configuration(kubeconfig)) as client:
        with pytest.raises(InvalidManifest) as caught:
            await client.request("POST", path, body=document)
    assert [cause["field"] for cause in caught.value.values["problems"]] == [
        "spec.gpuMemoryService.extraClientContainers[1]",
        "spec.gpuMemoryService.extraClientContainers[2]",
    ]


def test_no_field_of_a_pod_template_can_be_changed_and_metadata_can(
    operator: Operator, namespace: Kubectl
) -> None:
    namespace.apply(checkpoint("llm"))
    with pytest.raises(KubectlError, match=r"spec\.job\.podTemplateSpec\S*: .*is immutable"):
        namespace.apply(checkpoint("llm", hostNetwork=True))
    namespace.run("label", "dynamocheckpoint", "llm", "team=a")
    namespace.apply(checkpoint("llm"))


def test_without_an_operator_a_pod_is_refused_unless_it_says_that_it_can_start_cold(
    operator: Operator, namespace: Kubectl
) -> None:
    operator.end(signal.SIGKILL)
    namespace.apply(pod("restored", restore_from="llm", restore_policy="Immediate"))
    assert STANDBY not in env_of(namespace.get("pod", "restored"))
    namespace.apply(pod("other"))
    for document in (pod("again", restore_from="llm"), checkpoint("llm")):
        refused = namespace.try_("apply", "--filename", "-", given=json.dumps(document))
        assert "failed calling webhook" in refused.stderr
    operator.start()
    namespace.apply(pod("again", restore_from="llm"))
    assert STANDBY in env_of(namespace.get("pod", "again"))

    def reason() -> str:
        rows = namespace.get("pod", "restored")["status"].get("conditions", [])
        return next((row["reason"] for row in rows if row["type"] == "nvidia.com/Restored"), "")

    until(lambda: reason() == "NotInStandby", "the pod says that it is not restored")


class Flood:
    """What a pod without rights can do to a port: connections that never finish what they ask.

    Its address is not that of the API server and of the kubelet.
    """

    AT_ONCE = 300
    SOURCE = ("127.0.0.2", 0)

    def __init__(self, address: str, context: ssl.SSLContext | None, text: bytes) -> None:
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._context = context
        self._text = text
        self.connections = 0

    async def _drip(self) -> None:
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                reader, writer = await asyncio.open_connection(
                    self._host, self._port, local_addr=self.SOURCE
                )
                self.connections += 1
                try:
                    if self._context is not None:
                        await writer.start_tls(self._context)
                    writer.write(self._text)
                    while not reader.at_eof():
                        writer.write(b"x")
                        await writer.drain()
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(0.5):
                                await reader.read(4096)
                finally:
                    writer.close()

    @contextlib.asynccontextmanager
    async def on(self) -> AsyncIterator[None]:
        tasks = [asyncio.ensure_future(self._drip()) for _ in range(self.AT_ONCE)]
        try:
            await asyncio.sleep(2.0)
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        assert self.connections > self.AT_ONCE


def unverified() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


@pytest.mark.turns
async def test_a_pod_without_rights_learns_nothing_and_stops_nothing(
    operator: Operator, namespace: Kubectl, kubeconfig: str
) -> None:
    webhooks = operator.endpoint.url.removeprefix("https://")
    pods = f"/api/v1/namespaces/{namespace.namespace}/pods"
    checkpoints = f"/apis/nvidia.com/v1alpha1/namespaces/{namespace.namespace}/dynamocheckpoints"
    head = b"POST /webhooks/pods HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n"
    floods = [
        # The beginning of a handshake.
        Flood(webhooks, None, b"\x16\x03\x01\x02\x00"),
        Flood(webhooks, unverified(), head),
        Flood(webhooks, unverified(), head + b"\r\n"),
        Flood(operator.health, None, b"GET /healthz HTTP/1.1\r\n"),
    ]
    large = checkpoint("large")
    [main] = large["spec"]["job"]["podTemplateSpec"]["spec"]["containers"]
    main["env"] = [{"name": f"V{n}", "value": "x" * 40} for n in range(20_000)]
    review = json.dumps({"request": {"uid": "u", "namespace": "victim", "object": large}}).encode()
    healths: list[float] = []

    async with (
        KubeClient(await load_configuration(kubeconfig)) as client,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(5.0)) as session,
    ):

        async def probe() -> None:
            """Ask as a kubelet does, each time by a new connection."""
            while True:
                began = time.monotonic()
                async with session.get(f"http://{operator.health}/healthz") as answer:
                    assert answer.status == 200
                healths.append(time.monotonic() - began)
                await asyncio.sleep(0.5)

        async def work() -> None:
            for number in range(5):
                body = pod(f"p{number}", restore_from="llm")
                found = await client.request("POST", pods, params={"dryRun": "All"}, body=body)
                assert STANDBY in env_of(msgspec.json.decode(found))
                body = checkpoint(f"c{number}")
                await client.request("POST", checkpoints, params={"dryRun": "All"}, body=body)
                await asyncio.sleep(0.3)

        async def ask_directly() -> None:
            for path in ("/webhooks/pods", "/guess/webhooks/objects"):
                url = f"{operator.endpoint.url}{path}"
                async with session.post(url, data=io.BytesIO(review * 6), ssl=False) as answer:
                    assert (answer.status, await answer.text()) == (404, "404: Not Found")

        probing = asyncio.ensure_future(probe())
        try:
            for flood in floods:
                async with flood.on():
                    await work()
            await ask_directly()
            # The API server hands a user's object on, however large.
            text = json.dumps(large)
            create = ("create", "--filename", "-")
            working = asyncio.ensure_future(work())
            refused = [asyncio.to_thread(namespace.try_, *create, given=text) for _ in range(6)]
            answers = [each.stderr for each in await asyncio.gather(*refused)]
            await working
            assert all("at most 512" in each for each in answers), answers
        finally:
            probing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await probing
    assert len(healths) > 20


def of_authority(stored: Certificates, issued: datetime) -> Certificates:
    """Return the same with a certificate that was issued at a time by the newest authority."""
    return renewed(stored._replace(certificate=b"", key=b""), ["old"], issued)


def with_old_authority(stored: Certificates) -> Certificates:
    """Return the same with one more authority, which is to be followed by another one."""
    old = renewed(None, ["old"], datetime.now(UTC) - timedelta(days=7 * 365))
    both = old.authorities + stored.authorities
    return stored._replace(authorities=both, authority_key=old.authority_key)


async def test_certificates_are_renewed_while_the_api_server_asks_and_no_request_is_lost(
    operator: Operator, namespace: Kubectl, kubeconfig: str
) -> None:
    secret = f"/api/v1/namespaces/{operator.namespace}/secrets/{CERTIFICATE_SECRET}"
    config = f"{BASE}/{MUTATING}/{rbac.NAME}"
    pods = f"/api/v1/namespaces/{namespace.namespace}/pods"
    stop = asyncio.Event()
    asked = 0

    async with KubeClient(await load_configuration(kubeconfig)) as client:

        async def load() -> None:
            nonlocal asked
            body = pod("p", restore_from="llm")
            while not stop.is_set():
                answer = await client.request("POST", pods, params={"dryRun": "All"}, body=body)
                assert STANDBY in env_of(msgspec.json.decode(answer))
                asked += 1

        async def store(change: Callable[[Certificates], Certificates]) -> None:
            """Put certificates of another age into the Secret, and wait for those that follow."""
            found: Any = msgspec.json.decode(await client.request("GET", secret))
            stored = Certificates(*(base64.b64decode(found["data"][key]) for key in FIELDS))
            values = [base64.b64encode(each).decode() for each in change(stored)]
            found["data"] |= dict(zip(FIELDS, values, strict=True))
            await client.request("PUT", secret, body=found)
            await polled(
                lambda: client.request("GET", secret),
                lambda now: msgspec.json.decode(now)["data"] != found["data"],
            )
            await asyncio.sleep(1.0)

        async def authorities() -> int:
            found: Any = msgspec.json.decode(await client.request("GET", config))
            bundle = base64.b64decode(found["webhooks"][0]["clientConfig"]["caBundle"])
            return bundle.count(b"BEGIN CERTIFICATE")

        month = datetime.now(UTC) - timedelta(days=61)
        loading = [asyncio.ensure_future(load()) for _ in range(3)]
        try:
            served = [operator.serial()]
            await store(lambda stored: of_authority(stored, month))
            served.append(operator.serial())
            trusted = await authorities()
            await store(with_old_authority)
            served.append(operator.serial())
            assert await authorities() == trusted + 2
            await store(lambda stored: of_authority(stored, month))
            served.append(operator.serial())
        finally:
            stop.set()
            await asyncio.gather(*loading)
    # The second step changes what is trusted alone.
    assert served[1] == served[2]
    assert len({*served}) == 3
    assert None not in served
    assert asked > 20


async def test_several_operators_make_and_renew_one_certificate(
    namespace: Kubectl, kubeconfig: str
) -> None:
    assert namespace.namespace is not None
    endpoint = Endpoint(namespace.namespace)
    now = time.time()
    async with KubeClient(await load_configuration(kubeconfig)) as client:
        for later in (0.0, 61 * 86_400.0):
            clocks = Clocks(time.monotonic, lambda: now + later, "boot")  # noqa: B023 - used here
            several = [Introduction(client, endpoint, clocks, random.random) for _ in range(4)]
            found = await asyncio.gather(*(each._current() for each in several))
            assert len({*found}) == 1
            stored = namespace.get("secret", CERTIFICATE_SECRET)["data"]["tls.crt"]
            assert found[0]
            assert base64.b64decode(stored) == found[0].certificate
            assert len({each._secrets for each in several}) == 1


def test_a_configuration_that_is_made_again_is_trusted_again(
    operator: Operator, target: Target, namespace: Kubectl
) -> None:
    kubectl = target.kubectl
    for kind in (MUTATING, VALIDATING):
        kubectl.run("delete", kind, rbac.NAME)
    assert STANDBY not in env_of(dry_run(namespace))
    kubectl.apply(*configurations(operator.endpoint))
    until(lambda: trusts(kubectl), "the API server trusts the operator")
    until(lambda: STANDBY in env_of(dry_run(namespace)), "pods are changed")


def dry_run(kubectl: Kubectl) -> Any:
    """Return how a pod that asks for a restore would be stored."""
    given = json.dumps(pod("asks", restore_from="llm"))
    words = ("create", "--dry-run=server", "--output=json", "--filename", "-")
    return json.loads(kubectl.run(*words, given=given))


def test_the_operator_was_refused_nothing(operator: Operator) -> None:
    refused = [line for line in operator.log.read_text().splitlines() if "forbidden" in line]
    # An Event about what goes with its namespace.
    assert not [line for line in refused if "because it is being terminated" not in line]
