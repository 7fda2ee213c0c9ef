"""The plugin sockets, called as the kubelet calls them, and what drivers ask the API server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

import snapback_client as client
from gms.adapters.claim_files import ClaimFiles
from gms.adapters.cluster_api import KubeApi, cluster_api
from gms.adapters.device_memory import ClaimedDevice, DeviceSockets, claimed_devices
from gms.adapters.kubelet_messages import decode, encode
from gms.adapters.kubelet_plugin import ClaimPlugin, DevicePlugin, KubeletPlugin, plugin_folder
from gms.adapters.simulated import SimulatedDevice
from gms.domain.claims import DRIVER, cdi_file
from gms.handlers.claims import Claims
from gms.handlers.slices import publish_slices
from snapback_client.frames import Access
from snapshot_shared.errors import InvalidInput, StoreBusy, UnknownDevice
from snapshot_shared.files import opened
from tests.support.claimed_rig import claimable
from tests.support.cluster_api import MemoryApi
from tests.support.gms_rig import MIB, GmsProgram
from tests.support.waiting import until


class Claim(NamedTuple):
    name: str
    uid: str


FIRST = Claim("first", "11111111-6c5f-4a51-9d3a-7b8f3a6f2d11")
SECOND = Claim("second", "22222222-6c5f-4a51-9d3a-7b8f3a6f2d11")
DRA = "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin"


class Node:
    """One node: its devices, its folders, and a driver that can be ended and started.

    Two claims have the first device allocated, until a test says otherwise.
    """

    def __init__(self, folder: Path) -> None:
        self.kubelet = folder / "kubelet"
        self.cdi = folder / "cdi"
        (self.kubelet / "plugins_registry").mkdir(parents=True)
        self.api = MemoryApi()
        for claim in (FIRST, SECOND):
            self.api.allocate(*claim, "gpu-0")
        self.devices = [
            SimulatedDevice(node="n1", index=index, capacity=64 * MIB) for index in range(2)
        ]
        self.claimable = [claimable(each) for each in self.devices]
        self.claims_folder = plugin_folder(self.kubelet, DRIVER) / "claims"

    @contextlib.asynccontextmanager
    async def driver(self, patience_s: float = 5.0) -> AsyncIterator[Claims]:
        sockets = DeviceSockets({each.info.uuid: each for each in self.devices})
        files = ClaimFiles(plugin_folder(self.kubelet, DRIVER), self.cdi, self.claimable)
        claims = Claims(self.api, files, sockets, "n1", self.claimable, patience_s=patience_s)
        await claims.restore()
        try:
            async with KubeletPlugin(self.kubelet, ClaimPlugin(claims)):
                yield claims
        finally:
            await sockets.aclose()

    async def registered(self) -> dict[str, Any]:
        """Return the answer of the plugin that is in the registry."""
        (path,) = (self.kubelet / "plugins_registry").iterdir()
        return await call(path, "pluginregistration.Registration/GetInfo", "Empty", "PluginInfo")

    async def prepare(self, *names: tuple[str, str]) -> dict[str, Any]:
        return await self._claims("NodePrepareResources", "Prepared", names)

    async def error(self, claim: tuple[str, str]) -> str:
        """Prepare a claim; return why it is refused, which is empty for one that is not."""
        return str((await self.prepare(claim))[claim[1]]["error"])

    async def unprepare(self, *names: tuple[str, str]) -> dict[str, Any]:
        return await self._claims("NodeUnprepareResources", "Unprepared", names)

    async def _claims(
        self, method: str, reply: str, names: tuple[tuple[str, str], ...]
    ) -> dict[str, Any]:
        info = await self.registered()
        claims = [{"namespace": "default", "name": name, "uid": uid} for name, uid in names]
        path = Path(info["endpoint"])
        answer = await call(path, f"{DRA}/{method}", "Claims", reply, {"claims": claims})
        return dict(answer["claims"])

    def spec(self, claim: Claim) -> Any:
        return json.loads((self.cdi / cdi_file(claim.uid)).read_bytes())

    def mount(self, claim: Claim) -> Path:
        """Return the folder that a container of the claim has its devices in."""
        return self.claims_folder / claim.uid


async def call(
    path: Path, method: str, request: str, reply: str, value: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    async with grpc.aio.insecure_channel(f"unix:{path}") as channel:
        data = await channel.unary_unary(f"/{method}")(encode(request, value or {}), timeout=20)
    return decode(reply, data)


@pytest.fixture
def node() -> Iterator[Node]:
    # Not tmp_path: its paths are too long for sockets.
    with tempfile.TemporaryDirectory() as folder:
        yield Node(Path(folder))


async def test_the_messages_are_those_of_the_kubelet() -> None:
    info = {"type": "DRAPlugin", "name": "n", "endpoint": "/e", "supported_versions": ["v1", "v2"]}
    assert encode("PluginInfo", info) == b'\n\tDRAPlugin\x12\x01n\x1a\x02/e"\x02v1"\x02v2'
    claims = b"\n\x0f\n\x02ns\x12\x03uid\x1a\x04name"
    assert decode("Claims", claims) == {
        "claims": [{"namespace": "ns", "uid": "uid", "name": "name"}]
    }
    device = {"request_names": ["r"], "pool_name": "p", "device_name": "d", "cdi_device_ids": ["c"]}
    prepared = {"claims": {"u": {"devices": [device]}}}
    assert (
        encode("Prepared", prepared)
        == b'\n\x13\n\x01u\x12\x0e\n\x0c\n\x01r\x12\x01p\x1a\x01d"\x01c'
    )
    # A claim without an error keeps its entry, without which the kubelet fails all.
    assert encode("Unprepared", {"claims": {"u": {}}}) == b"\n\x05\n\x01u\x12\x00"


async def test_the_driver_registers_under_its_name_with_both_versions(node: Node) -> None:
    async with node.driver():
        info = await node.registered()
        assert (info["type"], info["name"]) == ("DRAPlugin", DRIVER)
        assert info["supported_versions"] == ["v1.DRAPlugin", "v1beta1.DRAPlugin"]
        assert Path(info["endpoint"]).is_socket()
    assert list((node.kubelet / "plugins_registry").iterdir()) == []


async def test_sockets_that_a_killed_driver_has_left_are_replaced(node: Node) -> None:
    for path in (f"plugins_registry/{DRIVER}-reg.sock", f"plugins/{DRIVER}/plugin.sock"):
        (node.kubelet / path).parent.mkdir(parents=True, exist_ok=True)
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(node.kubelet / path))
    async with node.driver():
        assert (await node.registered())["name"] == DRIVER


def test_a_folder_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="has more than 107 bytes"):
        KubeletPlugin(tmp_path / ("k" * 90), DevicePlugin([], tmp_path))


async def test_a_prepared_claim_has_a_specification_and_memory_of_its_device(node: Node) -> None:
    node.api.allocate(*FIRST, "gpu-1")
    async with node.driver():
        answer = (await node.prepare(FIRST))[FIRST.uid]
        assert answer["error"] == ""
        (device,) = answer["devices"]
        assert device["request_names"] == ["gpu"]
        assert (device["pool_name"], device["device_name"]) == ("n1", "gpu-1")
        assert device["cdi_device_ids"] == [f"{DRIVER}/claim={FIRST.uid}-0"]
        (edits,) = (each["containerEdits"] for each in node.spec(FIRST)["devices"])
        assert edits["mounts"][0]["hostPath"] == str(node.mount(FIRST) / "0")
        await asyncio.to_thread(uses_memory, node, FIRST, node.devices[1])
        await until(lambda: node.devices[1].used == 0)


def uses_memory(node: Node, claim: Claim, device: SimulatedDevice) -> None:
    """Allocate, write and read as the memory server of a pod does."""
    (claimed,) = claimed_devices(node.mount(claim))
    assert claimed.info.uuid == device.info.uuid
    assert claimed.info.capacity == device.info.capacity
    with contextlib.closing(claimed):
        handle = claimed.create(4 * MIB)
        assert device.used == 4 * MIB
        with opened(claimed.export(handle, Access.RW)) as memory:
            assert os.pread(memory, 2 * MIB, 0) == bytes(2 * MIB)
            os.pwrite(memory, b"weights", 0)
        with opened(claimed.export(handle, Access.RO)) as memory:
            assert os.pread(memory, 7, 0) == b"weights"


async def test_a_claim_is_prepared_once_however_often_it_is_asked_for(node: Node) -> None:
    node.api.allocate(*FIRST, "gpu-0", "gpu-1")
    async with node.driver():
        answers = await asyncio.gather(*(node.prepare(FIRST) for _ in range(3)))
        assert answers[0] == answers[1] == answers[2] == await node.prepare(FIRST)
        assert len(answers[0][FIRST.uid]["devices"]) == 2
        # Once prepared, nothing is asked of the API server.
        node.api.is_away = True
        assert await node.prepare(FIRST) == answers[0]


async def test_a_claim_that_fails_leaves_the_others_of_its_call_alone(node: Node) -> None:
    async with node.driver():
        answers = await node.prepare(FIRST, ("gone", SECOND.uid), ("bad", "../../x"))
    assert answers[FIRST.uid]["error"] == ""
    assert 'resourceclaims "gone" not found' in answers[SECOND.uid]["error"]
    assert "$.uid" in answers["../../x"]["error"]
    assert [each.name for each in node.claims_folder.iterdir()] == [FIRST.uid]


async def test_unprepare_removes_everything_and_may_be_repeated(node: Node) -> None:
    async with node.driver():
        await node.prepare(FIRST)
        for _ in range(2):
            answer = await node.unprepare(FIRST, SECOND)
            assert answer[FIRST.uid] == {"error": ""}
        assert list(node.cdi.iterdir()) == []
        assert list(node.claims_folder.iterdir()) == []
        assert "$.uid" in (await node.unprepare(("c", "..")))[".."]["error"]


async def test_a_device_is_given_when_its_last_claim_is_unprepared_late(node: Node) -> None:
    async with node.driver():
        await node.prepare(FIRST)
        waiting = asyncio.create_task(node.error(SECOND))
        await until(lambda: node.api.calls.count("claim") == 2)
        assert not waiting.done()
        await node.unprepare(FIRST)
        assert await waiting == ""
        # What comes later still for the old claim touches nothing of the new one.
        await node.unprepare(FIRST)
        assert node.spec(SECOND)["devices"]
        await asyncio.to_thread(uses_memory, node, SECOND, node.devices[0])


async def test_a_device_that_stays_held_is_refused_with_the_claim_that_holds_it(node: Node) -> None:
    monitor = Claim("monitor", "33333333-6c5f-4a51-9d3a-7b8f3a6f2d11")
    node.api.allocate(*monitor, "gpu-0", admin=True)
    async with node.driver(patience_s=0.1):
        await node.prepare(FIRST)
        held = f"gpu-0 is still held by claim default/first ({FIRST.uid})"
        assert held in await node.error(SECOND)
        assert await node.error(monitor) == ""


async def test_a_claim_that_is_unprepared_while_it_is_prepared_leaves_nothing(node: Node) -> None:
    async with node.driver() as claims:
        async with claims._turn:
            unpreparing = asyncio.create_task(claims.unprepare(FIRST.uid))
            preparing = asyncio.create_task(node.error(FIRST))
            await until(lambda: FIRST.uid in claims._prepared)
        await unpreparing
        assert "unprepared meanwhile" in await preparing
    assert list(node.claims_folder.iterdir()) == []
    assert not node.cdi.exists()


async def test_a_claim_keeps_its_device_after_a_failure_until_it_is_unprepared(
    node: Node,
) -> None:
    # No folder can be made there.
    node.cdi.write_bytes(b"")
    async with node.driver(patience_s=0.1):
        assert str(node.cdi) in await node.error(FIRST)
        node.cdi.unlink()
        assert "still held" in await node.error(SECOND)
        assert await node.error(FIRST) == ""
        await node.unprepare(FIRST)
        assert await node.error(SECOND) == ""


async def test_a_driver_that_starts_again_serves_what_was_prepared(node: Node) -> None:
    async with node.driver():
        before = await node.prepare(FIRST)
        spec = node.spec(FIRST)
    # A tmpfs as a rule; without the file no container of the pod could start again.
    (node.cdi / cdi_file(FIRST.uid)).unlink()
    node.api.is_away = True
    async with node.driver():
        assert node.spec(FIRST) == spec
        await asyncio.to_thread(uses_memory, node, FIRST, node.devices[0])
        assert await node.prepare(FIRST) == before
        await node.unprepare(FIRST)
    assert list(node.claims_folder.iterdir()) == []


async def test_a_damaged_record_is_replaced_when_its_claim_is_prepared(node: Node) -> None:
    async with node.driver():
        before = await node.prepare(FIRST)
    (node.mount(FIRST) / "claim.json").write_bytes(b'{"devices": [')
    (node.claims_folder / "unknown").mkdir()
    async with node.driver():
        assert await node.prepare(FIRST) == before


async def test_a_claim_waits_while_the_api_server_is_away(node: Node) -> None:
    node.api.is_away = True
    async with node.driver():
        waiting = asyncio.create_task(node.error(FIRST))
        await until(lambda: "claim" in node.api.calls)
        node.api.is_away = False
        assert await waiting == ""


async def test_memory_of_a_pod_outlives_the_driver_and_is_counted_by_the_next(node: Node) -> None:
    async with node.driver():
        await node.prepare(FIRST)
        claimed = ClaimedDevice(node.mount(FIRST) / "0", 0)
        kept = await asyncio.to_thread(claimed.create, 8 * MIB)
    await until(lambda: node.devices[0].used == 0)
    os.pwrite(kept, b"still here", 0)
    async with node.driver():
        other = await asyncio.to_thread(claimed.create, 2 * MIB)
        assert node.devices[0].used == 10 * MIB
        assert os.pread(kept, 10, 0) == b"still here"
        for handle in (kept, other):
            await asyncio.to_thread(claimed.release, handle)
        assert node.devices[0].used == 0
    await asyncio.to_thread(claimed.close)


def test_a_container_without_devices_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UnknownDevice) as caught:
        claimed_devices(tmp_path / "gpu")
    assert "resources.claims" in caught.value.next_step


async def test_the_device_plugin_lists_devices_until_it_ends_and_hands_them_out(
    node: Node,
) -> None:
    folder = plugin_folder(node.kubelet, DRIVER) / "devices"
    async with KubeletPlugin(node.kubelet, DevicePlugin(node.claimable, folder)) as _:
        info = await node.registered()
        assert (info["type"], info["name"]) == ("DevicePlugin", "nvidia.com/gpu")
        async with grpc.aio.insecure_channel(f"unix:{info['endpoint']}") as channel:
            listing = channel.unary_stream("/v1beta1.DevicePlugin/ListAndWatch")(b"")
            devices = decode("DeviceList", await listing.read())["devices"]
            uuids = [each.uuid for each in node.claimable]
            assert devices == [{"ID": uuid, "health": "Healthy"} for uuid in uuids]
            request = {"container_requests": [{"devices_ids": uuids[1:]}]}
            allocate = "v1beta1.DevicePlugin/Allocate"
            path = Path(info["endpoint"])
            answer = await call(path, allocate, "AllocateRequest", "AllocateResponse", request)
            (container,) = answer["container_responses"]
            assert container["envs"]["SNAPBACK_GPU_0"] == uuids[1]
            assert container["mounts"][0]["host_path"] == str(folder / uuids[1])
            bad = {"container_requests": [{"devices_ids": ["GPU-x"]}]}
            with pytest.raises(grpc.aio.AioRpcError, match="GPU-x"):
                await call(path, allocate, "AllocateRequest", "AllocateResponse", bad)
            assert not listing.done()


@contextlib.asynccontextmanager
async def publishing(node: Node, count: int) -> AsyncIterator[None]:
    work = publish_slices(
        node.api, "n1", node.claimable[:count], jitter=lambda: 0.5, first_pause_s=0.01
    )
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_the_slice_is_published_again_whenever_it_is_deleted(node: Node) -> None:
    async with publishing(node, 2):
        await until(lambda: "watch" in node.api.calls)
        (found,) = node.api.stored.values()
        assert [each["name"] for each in found["spec"]["devices"]] == ["gpu-0", "gpu-1"]
        # As the kubelet does when it starts.
        await node.api.delete_slice(f"n1-{DRIVER}")
        await until(lambda: len(node.api.stored) == 1 and node.api.calls[-1] == "watch")
        assert node.api.calls.count("create") == 2


async def test_other_devices_make_a_new_generation_of_the_slice(node: Node) -> None:
    for count in (1, 2):
        node.api.calls.clear()
        async with publishing(node, count):
            await until(lambda: "watch" in node.api.calls)
    (found,) = node.api.stored.values()
    assert found["spec"]["pool"] == {"name": "n1", "generation": 2, "resourceSliceCount": 1}
    assert node.api.calls == ["slices", "node_uid", "replace", "slices", "node_uid", "watch"]


async def test_the_slice_is_published_once_the_api_server_answers(node: Node) -> None:
    node.api.is_away = True
    async with publishing(node, 2):
        await until(lambda: len(node.api.calls) > 2)
        node.api.is_away = False
        await until(lambda: len(node.api.stored) == 1)


def gms_process(folder: Path, **settings: str) -> GmsProgram:
    folder.mkdir()
    settings = {"SNAPBACK_NATS_URL": "nats://127.0.0.1:9", **settings}
    return GmsProgram(folder, folder / "sockets", **settings)


async def test_a_worker_has_memory_of_the_node_through_the_memory_server_of_its_pod(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = node.kubelet.parent
    plugin = {"SNAPBACK_KUBELET_PLUGIN": "device-plugin", "SNAPBACK_KUBELET_DIR": str(node.kubelet)}
    devices = plugin_folder(node.kubelet, DRIVER) / "devices"
    with contextlib.ExitStack() as running:
        for_node = gms_process(home / "node", **plugin)
        running.callback(for_node.stop)
        for_node.start()
        registry = node.kubelet / "plugins_registry"
        await until(lambda: any(registry.iterdir()))
        # What the device plugin mounts, at its place in the container.
        (home / "gpu").mkdir()
        (home / "gpu/0").symlink_to(devices / node.claimable[0].uuid)
        claimed = {"SNAPBACK_GMS_DEVICE": "claimed", "SNAPBACK_DEVICE_DIR": str(home / "gpu")}
        for_pod = gms_process(home / "pod", **claimed)
        running.callback(for_pod.stop)
        for_pod.start()
        for name, value in (*claimed.items(), ("NVIDIA_VISIBLE_DEVICES", "void")):
            monkeypatch.setenv(name, value)
        await asyncio.to_thread(writes_and_reads, str(for_pod.sockets), for_node.process.pid)


def writes_and_reads(sockets: str, node_pid: int) -> None:
    before = memfds(node_pid)
    with client.connect(0, lock="RW", socket_dir=sockets) as pool:
        pool.allocate("a", 8 * MIB, "u1")[:] = 7
        assert memfds(node_pid) == before + 1
        pool.commit()
    with client.connect(0, lock="RO", socket_dir=sockets) as pool:
        assert int(pool["a"][-1]) == 7
    # More than the device of the node has.
    with (
        client.connect(0, lock="RW", domain="kv", socket_dir=sockets) as pool,
        pytest.raises(client.OutOfDeviceMemory),
    ):
        pool.allocate("b", 60 * MIB, "u1", wait_s=0)


def memfds(pid: int) -> int:
    """Return how many allocations of devices a process holds."""
    found = 0
    for each in Path(f"/proc/{pid}/fd").iterdir():
        # It may have been closed since it was listed.
        with contextlib.suppress(FileNotFoundError):
            found += "snapback-gpu" in str(each.readlink())
    return found


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"SNAPBACK_KUBELET_PLUGIN": "dra", "SNAPBACK_KUBECONFIG": "/nowhere"},
            "/nowhere cannot be used to reach the API server",
        ),
        (
            {"SNAPBACK_KUBELET_PLUGIN": "dra"},
            "the service account of this pod cannot be used to reach the API server",
        ),
        (
            {"SNAPBACK_GMS_DEVICE": "claimed", "SNAPBACK_DEVICE_DIR": "/nowhere"},
            "there are 0 simulated devices in /nowhere",
        ),
        ({"SNAPBACK_DEVICE_PRODUCT": "x" * 65}, "SNAPBACK_DEVICE_PRODUCT"),
    ],
)
def test_a_service_that_cannot_offer_its_devices_ends_with_the_reason(
    node: Node, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], message: str
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    folder = node.kubelet.parent / "gms"
    settings = {"SNAPBACK_KUBELET_DIR": str(node.kubelet), **settings}
    assert message in "\n".join(gms_process(folder).refused(**settings))


class Server:
    """Answers every call with one status and body, and keeps what was asked."""

    def __init__(self) -> None:
        self.status, self.body = 200, b"{}"
        self.asked: list[tuple[str, str]] = []
        self.event = asyncio.Event()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        assert request.headers["Authorization"] == "Bearer secret"
        self.asked.append((request.method, request.path_qs))
        if "watch" not in request.query:
            return web.Response(status=self.status, body=self.body)
        response = web.StreamResponse()
        await response.prepare(request)
        await self.event.wait()
        await response.write(
            b'{"type": "DELETED", "object": {"metadata": {"resourceVersion": "78"}}}\n'
        )
        return response


@pytest.fixture
async def server() -> Server:
    return Server()


@pytest.fixture
async def api(server: Server, tmp_path: Path) -> AsyncIterator[KubeApi]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    async with TestServer(app) as serving:
        config = {
            "current-context": "here",
            "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": {"server": str(serving.make_url(""))}}],
            "users": [{"name": "u", "user": {"token": "secret"}}],
        }
        (tmp_path / "kubeconfig").write_text(json.dumps(config))
        async with cluster_api(tmp_path / "kubeconfig") as found:
            yield found
        server.event.set()


async def test_a_node_is_asked_for_its_uid(api: KubeApi, server: Server) -> None:
    server.body = b'{"metadata": {"uid": "u"}}'
    assert await api.node_uid("n1") == "u"
    assert server.asked == [("GET", "/api/v1/nodes/n1")]


@pytest.mark.parametrize("answer", [b"", b"<html>", b'{"metadata": {}}', b"[" * 2000])
async def test_an_answer_that_is_no_object_is_none_of_an_api_server(
    api: KubeApi, server: Server, answer: bytes
) -> None:
    server.body = answer
    with pytest.raises(StoreBusy):
        await api.claim("default", "c")


async def test_a_cluster_without_claims_is_known_by_its_missing_group(
    api: KubeApi, server: Server
) -> None:
    assert await api.has_claims()
    server.status = 404
    assert not await api.has_claims()
    await api.delete_slice("gone")
    assert server.asked[-1][1] == "/apis/resource.k8s.io/v1/resourceslices/gone"


async def test_a_watch_ends_with_the_first_event(api: KubeApi, server: Server) -> None:
    waiting = asyncio.create_task(api.slices_changed("n1", "77"))
    async with asyncio.timeout(10):
        while not server.asked:
            await asyncio.wait([waiting], timeout=0.01)
        assert not waiting.done()
        server.event.set()
        await waiting
    ((_, path),) = server.asked
    assert f"fieldSelector=spec.nodeName%3Dn1,spec.driver%3D{DRIVER}" in path
    assert "resourceVersion=77" in path
