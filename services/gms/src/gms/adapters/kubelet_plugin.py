"""The sockets of a kubelet plugin: its registration, and one of the two services for devices.

The kubelet watches its folder `plugins_registry`, asks what appears there for the name and the
socket of a plugin, and calls that. Both folders are root's, and so are the clients.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import grpc
import msgspec

from gms.adapters.kubelet_messages import decode, encode
from gms.domain.claims import DRIVER, ClaimableDevice, ClaimRef, PreparedClaim, cdi_id
from gms.domain.plugin_devices import RESOURCE, container_allocation, device_list
from gms.ports import ClaimService
from snapshot_shared.errors import InvalidInput, InvalidMessage, failure_of
from snapshot_shared.files import make_folder
from snapshot_shared.tasks import in_thread

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[bytes, bytes]
Call = Callable[[dict[str, Any]], Awaitable[Mapping[str, Any]]]

MAX_ADDRESS_BYTES = 107
"""The longest path of a unix socket that gRPC can bind."""


class Service(Protocol):
    """A plugin service: who it says it is, and what it answers."""

    kind: str
    name: str
    versions: tuple[str, ...]

    def handlers(self) -> Sequence[grpc.GenericRpcHandler]:
        """Return the handlers of its gRPC services."""
        ...


class KubeletPlugin:
    """Serves a plugin for the length of a block."""

    def __init__(self, kubelet_dir: Path, service: Service) -> None:
        """Prepare to serve below the kubelet's own folder. InvalidInput for one too long."""
        file = service.name.replace("/", "_")
        self.folder = plugin_folder(kubelet_dir, file)
        self.socket = self.folder / "plugin.sock"
        self.registration = kubelet_dir / "plugins_registry" / f"{file}-reg.sock"
        self._service = service
        for path in (self.socket, self.registration):
            if len(str(path).encode()) > MAX_ADDRESS_BYTES:
                raise InvalidInput(
                    f"the path of the socket {path} has more than {MAX_ADDRESS_BYTES} bytes",
                    next_step="set SNAPBACK_KUBELET_DIR to a shorter path of the same folder",
                )
        self._servers: list[grpc.aio.Server] = []

    async def __aenter__(self) -> None:
        """Serve, then register: the kubelet calls within milliseconds."""
        await in_thread(make_folder, self.folder)
        await self._serve(self.socket, self._service.handlers())
        await self._serve(self.registration, [self._registration()])

    async def __aexit__(self, *_: object) -> None:
        """Unregister, then end the calls under way."""
        while self._servers:
            await self._servers.pop().stop(grace=None)
        for path in (self.registration, self.socket):
            await in_thread(path.unlink, missing_ok=True)

    async def _serve(self, path: Path, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        # What a killed process has left would keep gRPC from binding.
        await in_thread(path.unlink, missing_ok=True)
        server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        server.add_generic_rpc_handlers(tuple(handlers))
        server.add_insecure_port(f"unix:{path}")
        await server.start()
        self._servers.append(server)

    def _registration(self) -> grpc.GenericRpcHandler:
        service = self._service

        async def info(_request: dict[str, Any]) -> Mapping[str, Any]:
            return {
                "type": service.kind,
                "name": service.name,
                "endpoint": str(self.socket),
                "supported_versions": list(service.versions),
            }

        async def status(request: dict[str, Any]) -> Mapping[str, Any]:
            if request["plugin_registered"]:
                log.info("the kubelet has registered %s", service.name)
            else:
                log.error("the kubelet refuses %s: %s", service.name, request["error"])
            return {}

        return grpc.method_handlers_generic_handler(
            "pluginregistration.Registration",
            {
                "GetInfo": _unary("Empty", "PluginInfo", info),
                "NotifyRegistrationStatus": _unary("RegistrationStatus", "Empty", status),
            },
        )


def plugin_folder(kubelet_dir: Path, name: str) -> Path:
    """Return where a plugin keeps what is its own."""
    return kubelet_dir / "plugins" / name


class ClaimPlugin:
    """The service of a DRA driver."""

    kind = "DRAPlugin"
    name = DRIVER
    versions: tuple[str, ...] = ("v1.DRAPlugin", "v1beta1.DRAPlugin")
    """The kubelet takes the first that it knows."""

    def __init__(self, claims: ClaimService) -> None:
        """Have claims prepared and unprepared."""
        self._claims = claims

    def handlers(self) -> Sequence[grpc.GenericRpcHandler]:
        methods = {
            "NodePrepareResources": _unary("Claims", "Prepared", self._prepare_all),
            "NodeUnprepareResources": _unary("Claims", "Unprepared", self._unprepare_all),
        }
        return [
            grpc.method_handlers_generic_handler(
                f"k8s.io.kubelet.pkg.apis.dra.{version}.DRAPlugin", methods
            )
            for version in ("v1", "v1beta1")
        ]

    async def _prepare_all(self, request: dict[str, Any]) -> Mapping[str, Any]:
        return await _each(request, self._prepare)

    async def _unprepare_all(self, request: dict[str, Any]) -> Mapping[str, Any]:
        return await _each(request, self._unprepare)

    async def _prepare(self, ref: ClaimRef) -> Mapping[str, Any]:
        claim = await self._claims.prepare(ref)
        log.info("prepared claim %s/%s (%s)", ref.namespace, ref.name, ref.uid)
        return _prepared(claim)

    async def _unprepare(self, ref: ClaimRef) -> Mapping[str, Any]:
        await self._claims.unprepare(ref.uid)
        log.info("unprepared claim %s/%s (%s)", ref.namespace, ref.name, ref.uid)
        return {}


async def _each(
    request: dict[str, Any], call: Callable[[ClaimRef], Awaitable[Mapping[str, Any]]]
) -> Mapping[str, Any]:
    """Answer for each claim by itself: one without an entry fails the others, too."""

    async def answer(claim: dict[str, Any]) -> Mapping[str, Any]:
        try:
            return await call(msgspec.convert(claim, ClaimRef))
        except msgspec.ValidationError as error:
            return {"error": str(failure_of(InvalidMessage(f"not a valid claim: {error}")))}
        except Exception as error:  # noqa: BLE001 - where a failure becomes the answer of a claim
            failure = failure_of(error)
            log.warning("claim %s: %s", claim["uid"], failure)
            return {"error": str(failure)}

    claims = request["claims"]
    answers = await asyncio.gather(*(answer(claim) for claim in claims))
    named = zip((claim["uid"] for claim in claims), answers, strict=True)
    return {"claims": dict(named)}


def _prepared(claim: PreparedClaim) -> Mapping[str, Any]:
    return {
        "devices": [
            {
                "request_names": [each.request],
                "pool_name": each.pool,
                "device_name": each.device,
                "cdi_device_ids": [cdi_id(claim.uid, each.ordinal)],
            }
            for each in claim.devices
        ]
    }


class DevicePlugin:
    """The service of a device plugin, for clusters without DRA."""

    kind = "DevicePlugin"
    name = RESOURCE
    versions: tuple[str, ...] = ("v1beta1",)

    def __init__(self, devices: Sequence[ClaimableDevice], folder: Path) -> None:
        """Hand out devices that have folders below `folder`, named by their uuids."""
        self._devices = devices
        self._folder = folder

    def handlers(self) -> Sequence[grpc.GenericRpcHandler]:
        methods = {
            "GetDevicePluginOptions": _unary("Empty", "DevicePluginOptions", self._options),
            "ListAndWatch": grpc.unary_stream_rpc_method_handler(self._list),
            "Allocate": _unary("AllocateRequest", "AllocateResponse", self._allocate),
        }
        return [grpc.method_handlers_generic_handler("v1beta1.DevicePlugin", methods)]

    async def _options(self, _request: dict[str, Any]) -> Mapping[str, Any]:
        return {}

    async def _list(self, _data: bytes, _context: Context) -> AsyncGenerator[bytes, None]:
        yield encode("DeviceList", device_list(self._devices))
        # The devices stay as they are; an end of the stream would mean that they are gone.
        await asyncio.Event().wait()

    async def _allocate(self, request: dict[str, Any]) -> Mapping[str, Any]:
        return {
            "container_responses": [
                container_allocation(each["devices_ids"], self._devices, str(self._folder))
                for each in request["container_requests"]
            ]
        }


def _unary(request: str, reply: str, answer: Call) -> grpc.RpcMethodHandler[bytes, bytes]:
    """Decode, answer, encode."""

    async def call(data: bytes, context: Context) -> bytes:
        try:
            return encode(reply, await answer(decode(request, data)))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            failure = failure_of(error)
            log.exception("a call of the kubelet failed")
            await context.abort(grpc.StatusCode.INTERNAL, str(failure))

    return grpc.unary_unary_rpc_method_handler(call)
