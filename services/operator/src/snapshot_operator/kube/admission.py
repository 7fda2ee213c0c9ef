"""What the operator answers when the API server asks before it stores: reviews over HTTPS.

Every replica answers, whether it is the active one or not. How the worker of a pod has to wait
depends on the driver of its source; where there is none yet, the pod itself says.

A caller is known by the secret in the path before anything is read for it. What a review costs is
bounded by its size, and is spent in a thread, so that orders and the lease go on.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import math
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta

from snapshot_api import revisions
from snapshot_api.facts import SECCOMP_LABEL
from snapshot_api.kinds import AnyObject
from snapshot_api.v1alpha1.checkpoint import DynamoCheckpoint, SharedMemorySpec
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.v1alpha1.restore import SnapshotRestore
from snapshot_api.v1alpha1.snapshot import Snapshot
from snapshot_api.validate import Problem, changes, problems, restore_problems, warnings
from snapshot_api.views import warning_of_readers
from snapshot_api.well_known import IMMEDIATE, RESTORE_FROM
from snapshot_operator.core.content import content_behind
from snapshot_operator.core.restore_request import RestoreRequest, driver_of, mismatch
from snapshot_operator.kube import conversion
from snapshot_operator.kube.namespaces import is_selected
from snapshot_operator.kube.restoring import (
    Images,
    capturable_patch,
    cold_patch,
    placeholder_problems,
    restore_request,
    standby_patch,
)
from snapshot_operator.kube.seccomp import label_of
from snapshot_operator.kube.shaping import GMS_DISABLED, GMS_DISABLED_FIX, has_memory_server
from snapshot_operator.kube.store import RESOURCES
from snapshot_operator.kube.webhooks import CONVERSIONS, DELETIONS, OBJECTS, PATHS, PODS
from snapshot_shared import http, instruments
from snapshot_shared.codec import encode_json
from snapshot_shared.errors import Failure, NotFound, SnapbackError
from snapshot_shared.http import Guests
from snapshot_shared.kube_client import KubeClient
from snapshot_shared.metrics import OFF, Metrics
from snapshot_shared.tasks import in_thread

log = logging.getLogger(__name__)

MAX_BYTES = 2 * 1536 * 1024 + 256 * 1024
"""A review of a change has two objects. etcd takes 1.5 MiB, so none that is stored is larger."""
BODY_S = 5.0
"""How long the body of a review may take, in seconds."""
JUDGED = 2
"""How many reviews are judged at a time."""
KEEP_ALIVE_S = 120.0
"""Longer than an API server keeps a connection that it does not use (90 s): it is the one to end
it, or a request could be lost that is on its way."""
MAX_SHOWN = 50
READ_S = 2.0
"""How long a namespace is read, and then sources: an API server waits `TIMEOUT_S` for both."""


class RequestedKind(msgspec.Struct, frozen=True):
    """The kind of the object in a request."""

    group: str = ""
    kind: str = ""


class Request(msgspec.Struct, frozen=True, rename="camel"):
    """The request of an AdmissionReview."""

    uid: str
    operation: str
    kind: RequestedKind = RequestedKind()
    namespace: str = ""
    name: str = ""
    object: msgspec.Raw = msgspec.Raw(b"null")
    old_object: msgspec.Raw = msgspec.Raw(b"null")


class Review(msgspec.Struct, frozen=True):
    """An admission.k8s.io/v1 AdmissionReview."""

    request: Request


class Answer(NamedTuple):
    """Whether an object may be stored, and changed in what: a JSON Patch."""

    refused: tuple[Problem, ...] = ()
    warned: tuple[str, ...] = ()
    patch: tuple[dict[str, Any], ...] = ()

    @property
    def outcome(self) -> str:
        """How it is counted."""
        return "denied" if self.refused else "changed" if self.patch else "allowed"


class Sources(NamedTuple):
    """What the name in `restore-from` leads to, as it is stored now."""

    named: tuple[Snapshot | DynamoCheckpoint, ...] = ()
    content: SnapshotContent | None = None

    @property
    def is_captured(self) -> bool:
        """Whether there is an artifact to restore from."""
        return self.content is not None and self.content.status.committed is not None

    @property
    def was_confined(self) -> bool:
        """Whether the spec of the worker that was captured named a seccomp profile with a filter.

        An artifact of a worker without a filter cannot be restored into a container with one.
        """
        profile = self.content.spec.source.seccomp_profile if self.content is not None else ""
        return self.is_captured and profile not in ("", "Unconfined")

    @property
    def shared_memory(self) -> dict[str, Any] | None:
        """What the checkpoint says of the shared memory of its worker; None without one."""
        for source in self.named:
            if isinstance(source, DynamoCheckpoint):
                shared = source.spec.job.shared_memory or SharedMemorySpec()
                found: dict[str, Any] = msgspec.to_builtins(shared)
                return found
        return None


class _PodSpec(msgspec.Struct, frozen=True, rename="camel"):
    containers: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    init_containers: list[dict[str, Any]] | None = None
    volumes: list[dict[str, Any]] | None = None


class _PodMeta(msgspec.Struct, frozen=True):
    annotations: dict[str, str] | None = None


class _Pod(msgspec.Struct, frozen=True):
    """The shape of a pod, which is checked before the pod is judged."""

    spec: _PodSpec
    metadata: _PodMeta = _PodMeta()


class _ListMeta(msgspec.Struct, frozen=True):
    # Named so by the API, and a keyword of Python.
    continue_: str = msgspec.field(default="", name="continue")


class _List(msgspec.Struct, frozen=True):
    metadata: _ListMeta = _ListMeta()
    items: list[msgspec.Raw] | None = None


PAGE = 20
"""How many objects are read at a time. An object may have 256 KiB of annotations, and a page is
decoded without a pause."""

MAX_RESTORES = 500
"""How many restores are read before a warning about a deletion."""

T = TypeVar("T")
Judge = Callable[[bytes], Awaitable[tuple[bytes, str]]]
"""Returns the answer to the body of a review, and how the answer is counted."""

_REVIEW = msgspec.json.Decoder(Review)
_POD = msgspec.json.Decoder(_Pod)
_DOCUMENT = msgspec.json.Decoder(dict[str, Any])
_LIST = msgspec.json.Decoder(_List)
_NULL = msgspec.Raw(b"null")


class Admission:
    """Answers reviews. Sources are read from the API server itself, and never from memory."""

    def __init__(
        self,
        client: KubeClient,
        metrics: Metrics = OFF,
        images: Images = Images(),  # noqa: B008 - it never changes
        *,
        allows_gms: bool = True,
        selector: str = "",
        seccomp_profile: str = "",
    ) -> None:
        """Read by `client`; `images` are those of what is put into pods.

        Unless it `allows_gms`, checkpoints with one are refused. Where a label `selector` limits
        the namespaces that are reconciled, pods of others are left alone: they would wait in vain.
        `seccomp_profile` is that of workers which CRIU restores, if a node has it.
        """
        self._seccomp_profile = seccomp_profile
        self._client = client
        self._images = images
        self._allows_gms = allows_gms
        self._selector = selector
        self._metrics = metrics
        self._judging = asyncio.Semaphore(JUDGED)

    def app(self, knows: Callable[[str], bool], guests: Guests) -> web.Application:
        """Return what serves the webhooks to callers whose path begins with a secret it knows."""
        app = web.Application()
        answers: tuple[tuple[str, Judge, int], ...] = (
            (PODS, partial(_admitted, self.pod), MAX_BYTES),
            (OBJECTS, partial(_admitted, self.object), MAX_BYTES),
            (DELETIONS, partial(_admitted, self.deletion), MAX_BYTES),
            (CONVERSIONS, self.conversion, conversion.MAX_BYTES),
        )
        for webhook, judge, most in answers:
            answering = self._answering(webhook, judge, most, knows, guests)
            app.router.add_post(f"/{{secret}}{PATHS[webhook]}", answering)
        return app

    def _answering(
        self, webhook: str, judge: Judge, most: int, knows: Callable[[str], bool], guests: Guests
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def answer(asked: web.Request) -> web.Response:
            if not knows(asked.match_info["secret"]):
                unknown = web.Response(status=HTTPStatus.NOT_FOUND)
                unknown.force_close()
                return unknown
            guests.trust(asked.transport)
            began = time.perf_counter()
            outcome = "failed"
            try:
                async with asyncio.timeout(BODY_S):
                    body = await asked.clone(client_max_size=most).read()
                answered, outcome = await judge(body)
                return web.Response(body=answered, content_type="application/json")
            except TimeoutError:
                return web.Response(status=HTTPStatus.REQUEST_TIMEOUT)
            except (msgspec.DecodeError, RecursionError) as error:
                return web.Response(status=HTTPStatus.BAD_REQUEST, text=f"{error}\n")
            finally:
                taken = time.perf_counter() - began
                self._metrics.record(instruments.ADMISSION_DURATION, taken, webhook, outcome)

        return answer

    async def conversion(self, body: bytes) -> tuple[bytes, str]:
        """Return the answer to a ConversionReview. msgspec.DecodeError for any other body."""
        return await self._judged(conversion.answer, body), "changed"

    async def _judged(self, work: Callable[..., T], *arguments: Any) -> T:
        async with self._judging:
            return await in_thread(work, *arguments)

    async def pod(self, request: Request) -> Answer:
        """Return how a pod has to be changed that is to be restored or captured.

        A denial names its fields.

        msgspec.DecodeError where the object is no pod.
        """
        pod, asked, refused = await self._judged(_asked_by, request.object)
        if request.operation != "CREATE":
            return Answer()
        if unselected := await self._unselected(request.namespace):
            return Answer(warned=(unselected,))
        if refused:
            return Answer(refused)
        if not asked.source:
            if not asked.is_capturable:
                return Answer()
            profile = await self._profile(pod["spec"]) if self._seccomp_profile else ""
            return Answer(
                patch=(*await self._judged(capturable_patch, pod, self._images, profile),)
            )
        found = await self._sources(request.namespace, asked)
        if wrong := mismatch(asked, found.named, found.content):
            return Answer((_denied(wrong),))
        if asked.policy == IMMEDIATE and not found.is_captured:
            text = f"{asked.source} is not captured yet, and the pod does not wait: it starts cold"
            patch = await self._judged(cold_patch, pod, self._images)
            return Answer(warned=(text,), patch=(*patch,))
        driver = driver_of(found.named, found.content) or ""
        is_confined = self._seccomp_profile and found.was_confined
        profile = await self._profile(pod["spec"]) if is_confined else ""
        return await self._judged(
            _standing_by, pod, self._images, driver, found.shared_memory, profile
        )

    async def object(self, request: Request) -> Answer:
        """Return whether an object of ours may be stored, with everything that is wrong with it.

        msgspec.DecodeError where the object is none of Kubernetes.
        """
        return await self._judged(self._validated, request)

    async def deletion(self, request: Request) -> Answer:
        """Return a warning if pods are restored from the object; a deletion is never refused."""
        try:
            async with asyncio.timeout(READ_S):
                restores = await self._all_of("SnapshotRestore", request.namespace, MAX_RESTORES)
        except (SnapbackError, TimeoutError, msgspec.DecodeError) as error:
            log.warning("readers of %s are not named: %s", request.name, error)
            return Answer()
        found = [each for each in restores if isinstance(each, SnapshotRestore)]
        text = warning_of_readers(request.kind.kind, request.namespace, request.name, found)
        return Answer(warned=(text,) if text else ())

    def _validated(self, request: Request) -> Answer:
        new = _document(request.object)
        old = _document(request.old_object) if request.old_object != _NULL else None
        if old is not None and old.get("spec") == new.get("spec"):
            return Answer()
        changed = changes(old.get("spec"), new.get("spec")) if old is not None else ()
        refused = (*problems(new, "kubernetes"), *changed, *self._gated(new))
        return Answer(refused, tuple(map(str, warnings(new, "kubernetes"))))

    def _gated(self, new: Any) -> tuple[Problem, ...]:
        if self._allows_gms or new.get("kind") != "DynamoCheckpoint":
            return ()
        with contextlib.suppress(AttributeError, KeyError, TypeError):
            if has_memory_server(new):
                text = f"{GMS_DISABLED}. Next: {GMS_DISABLED_FIX}"
                return (Problem("spec.gpuMemoryService", text),)
        return ()

    async def _unselected(self, namespace: str) -> str:
        """Return why nothing is restored in a namespace, if that is so or cannot be read."""
        if not self._selector:
            return ""
        try:
            async with asyncio.timeout(READ_S):
                if await is_selected(self._client, self._selector, namespace):
                    return ""
            why = f"is not selected ({self._selector})"
        except (SnapbackError, TimeoutError) as error:
            log.warning("namespace %s cannot be read: %s", namespace, error)
            why = "cannot be read now"
        return f"namespace {namespace} {why}: the pod starts cold"

    async def _profile(self, spec: dict[str, Any]) -> str:
        """Return the seccomp profile if a node has it; empty if nodes cannot be read now."""
        profile = self._seccomp_profile
        params = {"labelSelector": f"{SECCOMP_LABEL}={label_of(profile)}", "limit": "1"}
        if place := spec.get("nodeName"):
            params["fieldSelector"] = f"metadata.name={place}"
        try:
            async with asyncio.timeout(READ_S):
                path = RESOURCES["Node"].path(None)
                answer = await self._client.request("GET", path, params=params)
                return profile if _LIST.decode(answer).items else ""
        except (SnapbackError, TimeoutError, msgspec.DecodeError) as error:
            log.warning("a pod gets no seccomp profile, as nodes cannot be read: %s", error)
        return ""

    async def _sources(self, namespace: str, asked: RestoreRequest) -> Sources:
        """Return what there is; nothing where it cannot be read now.

        A restore compares it again before its first order.
        """
        try:
            async with asyncio.timeout(READ_S):
                kinds = ("Snapshot", "DynamoCheckpoint")
                read = [await self._read(kind, namespace, asked.source) for kind in kinds]
                if not any(read):
                    snapshots = await self._all_of("Snapshot", namespace)
                    read = [revisions.newest(snapshots, asked.source)]
                named = (*(each for each in read if isinstance(each, Snapshot | DynamoCheckpoint)),)
                return Sources(named, await self._content(named[0]) if named else None)
        except (SnapbackError, TimeoutError, msgspec.DecodeError) as error:
            why = f"no answer in {READ_S:g} s" if isinstance(error, TimeoutError) else error
            log.warning("%s is not compared with what the pod asks for: %s", asked.source, why)
            return Sources()

    async def _all_of(self, kind: str, namespace: str, most: float = math.inf) -> list[AnyObject]:
        """Read the objects of a kind page by page, of more than `most` the first ones."""
        resource = RESOURCES[kind]
        found: list[AnyObject] = []
        params = {"limit": str(PAGE)}
        while len(found) < most:
            path = resource.path(namespace or None)
            answer = await self._client.request("GET", path, params=params)
            page = _LIST.decode(answer)
            found += [resource.value_in(bytes(raw)) for raw in page.items or ()]
            if not page.metadata.continue_:
                break
            params["continue"] = page.metadata.continue_
        return found

    async def _content(self, source: AnyObject) -> SnapshotContent | None:
        places: list[tuple[str, str | None, str]] = []
        content_behind(lambda *place: places.append(place), source)
        found = await self._read(*places[0]) if places else None
        return content_behind(lambda *_: found, source)

    async def _read(self, kind: str, namespace: str | None, name: str) -> AnyObject | None:
        resource = RESOURCES[kind]
        try:
            answer = await self._client.request("GET", resource.path(namespace, name))
        except NotFound:
            return None
        return resource.value_in(answer)


async def _admitted(
    decide: Callable[[Request], Awaitable[Answer]], body: bytes
) -> tuple[bytes, str]:
    request = _REVIEW.decode(body).request
    found = await decide(request)
    return review(request, found), found.outcome


def _document(raw: msgspec.Raw) -> dict[str, Any]:
    return _DOCUMENT.decode(raw)


def _asked_by(raw: msgspec.Raw) -> tuple[Any, RestoreRequest, tuple[Problem, ...]]:
    """Return a pod, its restore request, and the problems of the request."""
    _POD.decode(raw)
    pod: Any = _document(raw)
    asked = restore_request(pod)
    return pod, asked, tuple(restore_problems(pod))


def _standing_by(
    pod: Any, images: Images, driver: str, shared_memory: dict[str, Any] | None, profile: str
) -> Answer:
    if refused := tuple(placeholder_problems(pod, driver)):
        return Answer(refused)
    return Answer(patch=(*standby_patch(pod, images, driver, shared_memory, profile),))


def _denied(wrong: Failure) -> Problem:
    return Problem(f"metadata.annotations[{RESTORE_FROM}]", f"{wrong.message}; {wrong.next_step}")


def review(request: Request, answer: Answer) -> bytes:
    """Return an answer as the API server takes it."""
    response: dict[str, Any] = {"uid": request.uid, "allowed": not answer.refused}
    if answer.refused:
        response["status"] = _status(request, answer.refused)
    elif answer.patch:
        patch = base64.b64encode(encode_json(answer.patch)).decode()
        response |= {"patchType": "JSONPatch", "patch": patch}
    if answer.warned:
        response["warnings"] = [*answer.warned[:MAX_SHOWN]]
    return encode_json(
        {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}
    )


def _status(request: Request, refused: Iterable[Problem]) -> dict[str, Any]:
    """Return a refusal as the API server says one itself, with a cause for each field."""
    shown = [*refused]
    return {
        "status": "Failure",
        "code": HTTPStatus.UNPROCESSABLE_ENTITY.value,
        "reason": "Invalid",
        "message": "; ".join(map(str, shown[:MAX_SHOWN])),
        "details": {
            "group": request.kind.group,
            "kind": request.kind.kind,
            "name": request.name,
            "causes": [
                {"reason": "FieldValueInvalid", "field": each.path, "message": each.text}
                for each in shown[:MAX_SHOWN]
            ],
        },
    }


@contextlib.asynccontextmanager
async def serving(
    admission: Admission, knows: Callable[[str], bool], address: str, context: ssl.SSLContext
) -> AsyncIterator[int]:
    """Answer at `host:port` for the length of the block, and return the port.

    InvalidInput for an address that is none, AddressInUse when it cannot be had. What is being
    answered at the end has a second for it.
    """
    guests = Guests()
    async with http.serving(
        admission.app(knows, guests),
        address,
        guests,
        patience_s=KEEP_ALIVE_S,
        variable="SNAPBACK_WEBHOOK_ADDRESS",
        context=context,
    ) as port:
        log.info("admission is served on port %d", port)
        yield port
