"""What is wrong with this machine and with a cluster, judged from what was observed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from snapshot_api.facts import Node
from snapshot_api.meta import condition, is_true
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_shared import subjects
from snapshot_shared.api import HealthReply
from snapshot_shared.errors import Failure
from snapshot_shared.frames import DeviceStatus, StatusReply
from snapshot_shared.ids import NodeName
from snapshot_shared.orders import SCHEMA_VERSION, Presence
from snapshotctl.domain import formats
from snapshotctl.domain.cluster import restart
from snapshotctl.views.finding import Finding, fail, ok, warn
from snapshotctl.views.installation import SeenInstallation, installation_findings
from snapshotctl.views.state import state_text, unready

MIN_PYTHON = (3, 11)
MIN_SERVER = (2, 11)
SKEW_WARN_S = 2.0
SKEW_FAIL_S = 60.0
SWEEP_LATE_S = 90.0
"""Three times the pause between two sweeps of the operator."""
FULL_BYTES = 64 * 1024 * 1024
"""With less free space not even the smallest worker is captured, whatever there is to compare."""
FILL_WARN = 0.5
FILL_FAIL = 0.8
"""From here on the operator begins nothing new."""

OTHER_KEY = "use the key of the user snapshotctl: --cluster, a nats context, or NATS_NKEY"


class Stream(NamedTuple):
    """A stream as it is: see `snapshot_shared.bus.StreamState`."""

    name: str
    exists: bool
    differs: Sequence[str]
    messages: int
    bytes: int
    fill: float
    durables: Mapping[str, str]
    paused: frozenset[str] = frozenset()


class ObservedNode(NamedTuple):
    """A node as the operator, the bus and its own services describe it.

    `skew_s` is how far the node's clock is ahead of the server's. `gms` is what its GPU memory
    service answered, `gms_version` what it is called in the directory of services.
    """

    name: str
    node: Node | None
    presence: Presence | None
    skew_s: float | None
    agent_answers: bool
    gms: StatusReply | None
    gms_version: str | None


class ObservedMachine(NamedTuple):
    """This machine. `cluster` is the local cluster in use, `ended` its dead processes.

    `sockets` is the folder of its sockets.
    """

    python: tuple[int, int]
    nats_server: str
    leftovers: Sequence[str]
    cluster: str = ""
    ended: Sequence[str] = ()
    sockets: str = ""


class ObservedCluster(NamedTuple):
    """The bus and the operator. `health` is None when no operator answered.

    `refused` is why this user may not request it, `unstored` why what was written to a stream was
    not there afterwards. `dead` counts the dead letters.
    """

    server: str
    server_version: str
    jetstream: Failure | None
    streams: Sequence[Stream]
    health: HealthReply | None
    operators: Sequence[str]
    nodes: Sequence[ObservedNode]
    contents: Sequence[SnapshotContent]
    dead: int
    refused: Failure | None = None
    unstored: Failure | None = None
    held: frozenset[str] = frozenset()
    """The uuids of the devices that pods have."""


class Observed(NamedTuple):
    """Everything that was observed. `unreachable` is why there is no cluster.

    `installation` is seen where a cluster of Kubernetes was named.
    """

    now: float
    version: str
    local: ObservedMachine
    unreachable: Failure | None
    cluster: ObservedCluster | None
    installation: SeenInstallation | None = None


def examine(seen: Observed) -> list[Finding]:
    """Return the findings, those of this machine first."""
    found = list(_machine(seen.local))
    if seen.installation is not None:
        found += installation_findings(seen.installation)
    if seen.unreachable is not None:
        found.append(fail(f"connection: {seen.unreachable.message}", _step(seen.unreachable)))
    if seen.cluster is not None:
        found += _cluster(seen, seen.cluster)
    return [msgspec.structs.replace(f, what=formats.plain(f.what)) for f in found]


def _step(failure: Failure) -> str:
    return failure.next_step or "snapshotctl up, or name a server with --server"


def _machine(local: ObservedMachine) -> Iterator[Finding]:
    version = ".".join(map(str, local.python))
    if local.python >= MIN_PYTHON:
        yield ok(f"Python {version}")
    else:
        yield fail(f"Python {version}, 3.11 is needed", "apt install python3.11 python3.11-venv")
    if local.nats_server:
        yield ok(f"nats-server {local.nats_server} of the wheel, for local clusters")
    else:
        yield warn("no nats-server of the wheel: no local cluster can be started", "make setup")
    if local.cluster and not local.ended:
        yield ok(f"local cluster {local.cluster}: all its processes run")
    for name in local.ended:
        yield fail(f"local cluster {local.cluster}: {name} ended", restart(local.cluster, name))
    count = len(local.leftovers)
    if count:
        yield warn(
            f"{formats.counted(count, 'leftover')} of local clusters that ended",
            "snapshotctl leftovers",
        )
    else:
        yield ok("no leftovers of local clusters")


def _cluster(seen: Observed, cluster: ObservedCluster) -> Iterator[Finding]:
    yield _server(cluster)
    if cluster.jetstream is not None:
        fix = "nats account info; JetStream must be on, and this user may ask it"
        yield fail(f"JetStream: {cluster.jetstream.message}", fix)
    else:
        yield from _streams(cluster)
        yield _storage(cluster.unstored)
    yield from _operator(seen, cluster)
    for node in cluster.nodes:
        yield from _node(seen, cluster, node)
    if not cluster.nodes:
        yield warn("there are no nodes", "start an agent and a GMS, or: snapshotctl up")
    yield from _artifacts(cluster)
    if cluster.dead:
        noun = "dead letter" if cluster.dead == 1 else "dead letters"
        yield warn(f"{cluster.dead} {noun}", "snapshotctl dead ls")
    else:
        yield ok("no dead letters")


def _server(cluster: ObservedCluster) -> Finding:
    known = tuple(int(word) for word in cluster.server_version.split(".")[:2])
    what = f"connected to {cluster.server}, nats-server {cluster.server_version}"
    if known >= MIN_SERVER:
        return ok(what)
    return fail(f"{what}, 2.11 is needed", "upgrade nats-server to 2.11 or later")


def _streams(cluster: ObservedCluster) -> Iterator[Finding]:
    fix = "restart the operator (snapshot_operator.main); it makes and mends them within 30 s"
    wrong = False
    for stream in cluster.streams:
        name = stream.name.removeprefix("KV_")
        what = f"bucket {name}" if name != stream.name else f"stream {name}"
        if not stream.exists:
            wrong = True
            yield fail(f"{what} is missing", fix)
        elif stream.differs:
            wrong = True
            yield warn(f"{what} has other settings: {', '.join(stream.differs)}", fix)
    if not wrong:
        yield ok(f"all {len(cluster.streams)} streams and buckets are as required")
    yield from _durables(cluster)
    orders = next((s for s in cluster.streams if s.name == subjects.ORDERS and s.exists), None)
    if orders is not None:
        yield _filling(orders)


def _storage(unstored: Failure | None) -> Finding:
    if unstored is None:
        return ok("NATS stores what is written")
    if unstored.reason == "NotPermitted":
        what = f"whether NATS stores what is written cannot be tried: {unstored.message}"
        return warn(what, OTHER_KEY)
    fix = "make space on the disk of nats-server and start it again"
    return fail(f"NATS does not store what is written: {unstored.message}", fix)


def _filling(orders: Stream) -> Finding:
    what = f"ORDERS is {100 * orders.fill:.0f}% full ({formats.counted(orders.messages, 'order')})"
    if orders.fill >= FILL_FAIL:
        return fail(f"{what}: nothing new begins", "snapshotctl orders")
    return warn(what, "snapshotctl orders") if orders.fill >= FILL_WARN else ok(what)


def _durables(cluster: ObservedCluster) -> Iterator[Finding]:
    wanted = {(subjects.REPORTS, "operator"): ("snap.report.>", "restart the operator")}
    for seen in cluster.nodes:
        name = NodeName(seen.name)
        if seen.presence is None:
            continue  # That the node is absent is a finding already.
        for service in ("agent", "gms"):
            fix = f"restart the {service} of {name}; it makes its durable when it connects"
            key = (subjects.ORDERS, subjects.durable(name, service))
            wanted[key] = (subjects.orders_of(name, service), fix)
    held = {stream.name: stream.durables for stream in cluster.streams}
    wrong = False
    for (stream, durable), (filter_, fix) in wanted.items():
        found = held.get(stream, {}).get(durable)
        if found != filter_:
            wrong = True
            how = "is missing" if found is None else f"takes {found}, not {filter_}"
            yield fail(f"durable {durable} of {stream} {how}", fix)
    for held_by in cluster.streams:
        for paused in sorted(held_by.paused):
            wrong = True
            yield warn(
                f"durable {paused} of {held_by.name} is paused: nothing is delivered to it",
                f"nats consumer resume {held_by.name} {paused}",
            )
    if not wrong:
        yield ok(f"all {len(wanted)} durables are as required")


def _operator(seen: Observed, cluster: ObservedCluster) -> Iterator[Finding]:
    health = cluster.health
    if cluster.refused is not None:
        yield warn(
            f"the health of the operator cannot be requested: {cluster.refused.message}", OTHER_KEY
        )
        return
    if health is None:
        local = seen.local.cluster
        alone = "start it, python -m snapshot_operator.main; docs/architecture.md has its settings"
        start = restart(local, "operator") if local else alone
        yield fail("no operator answers", start)
        return
    count = f", {len(cluster.operators)} of them" if len(cluster.operators) > 1 else ""
    yield ok(f"the operator answers, version {health.version}{count}")
    for version in sorted({seen.version, *cluster.operators} - {health.version}):
        fix = "install the same version everywhere; the oldest program decides what works"
        yield warn(f"version {version} is used beside the operator's {health.version}", fix)
    if health.ahead_s:
        yield warn(
            f"the clock of the operator's machine is {_apart(health.ahead_s)} the API server's, by "
            "which the operator goes",
            "there: timedatectl set-ntp true; then restart the operator",
        )
    if health.swept_at is None:
        yield warn("the operator has not swept yet", "wait 30 s: snapshotctl doctor")
        return
    age = seen.now - health.swept_at
    what = f"the last sweep was {formats.age(age)} ago"
    if age > SWEEP_LATE_S:
        yield fail(f"{what}, there should be one every 30 s", "look at the operator's log")
    else:
        yield ok(what)


def _node(seen: Observed, cluster: ObservedCluster, it: ObservedNode) -> Iterator[Finding]:
    state = state_text(it.node) if it.node is not None else "unknown to the operator"
    if it.presence is None:
        fix = (
            f"snapshotctl sim restart {it.name}"
            if seen.local.cluster
            else f"start its agent; if it is gone for good: snapshotctl delete node {it.name}"
        )
        yield fail(f"{it.name} is not there ({state})", fix)
        return
    if it.node is not None and it.node.spec.unschedulable:
        yield warn(f"{it.name} is cordoned", f"snapshotctl uncordon {it.name}")
    elif state == "Ready":
        yield ok(f"{it.name} is Ready")
    else:
        fix = f"see why, with the operator's log: snapshotctl explain node/{it.name}"
        yield warn(f"{it.name} is there and {state}", fix)
    yield from _drivers(it.name, it.presence)
    yield from _clock(it)
    yield from _space(cluster, it, it.presence)
    yield from _services(seen, cluster, it, it.presence)


def _drivers(name: str, presence: Presence) -> Iterator[Finding]:
    for why, step in unready(presence.unready):
        fix = step or f"see the log of the helper on {name}"
        yield fail(f"{name} {why}", fix)
    if "criu" in presence.drivers:
        yield ok(f"{name} captures and restores processes with CRIU {presence.criu}")


def _clock(it: ObservedNode) -> Iterator[Finding]:
    if it.skew_s is None:
        return
    if abs(it.skew_s) < SKEW_WARN_S:
        yield ok(f"the clock of {it.name} is that of the server")
        return
    finding = fail if abs(it.skew_s) >= SKEW_FAIL_S else warn
    what = f"the clock of {it.name} is {_apart(it.skew_s)} the server's"
    yield finding(what, f"on {it.name}: timedatectl set-ntp true")


def _apart(ahead_s: float) -> str:
    return f"{abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'}"


def _space(cluster: ObservedCluster, it: ObservedNode, presence: Presence) -> Iterator[Finding]:
    committed = (content.status.committed for content in cluster.contents)
    largest = max((found.bytes for found in committed if found is not None), default=0)
    free = formats.size(presence.free_bytes)
    what = f"{it.name} has {free} free below {presence.artifact_root or 'its artifact root'}"
    fix = "free space there, or: snapshotctl delete checkpoints that are not needed"
    gpu = max((device.capacity_bytes for device in presence.devices), default=0)
    if presence.free_bytes < FULL_BYTES:
        yield fail(f"{what}: no capture fits there", fix)
    elif not largest and presence.free_bytes < gpu:
        yield warn(f"{what}, a GPU there has {formats.size(gpu)} to capture", fix)
    elif presence.free_bytes < largest:
        yield fail(f"{what}, the largest snapshot has {formats.size(largest)}", fix)
    elif presence.free_bytes < 2 * largest:
        yield warn(f"{what}, room for one more like the largest snapshot", fix)
    else:
        yield ok(what)


def _services(
    seen: Observed, cluster: ObservedCluster, it: ObservedNode, presence: Presence
) -> Iterator[Finding]:
    if SCHEMA_VERSION not in presence.schemas:
        yield fail(
            f"the agent of {it.name} understands messages {presence.schemas}, not {SCHEMA_VERSION}",
            f"upgrade the agent of {it.name}",
        )
    reference = cluster.health.version if cluster.health else seen.version
    for service, version in (("agent", presence.version), ("GMS", it.gms_version)):
        if version not in (None, reference):
            fix = f"install {reference} on {it.name}"
            yield warn(f"the {service} of {it.name} is {version}, the operator {reference}", fix)
    local = seen.local.cluster
    if not it.agent_answers:
        fix = restart(local, f"{it.name}-agent") if local else f"restart the agent of {it.name}"
        yield fail(f"the agent of {it.name} does not answer", fix)
    else:
        yield ok(f"the agent of {it.name} answers, version {presence.version}")
    if it.gms is None:
        fix = restart(local, f"{it.name}-gms") if local else f"restart the GMS of {it.name}"
        yield fail(f"the GMS of {it.name} does not answer", fix)
        return
    devices = it.gms.devices
    used = formats.size(sum(device.used for device in devices))
    room = formats.size(sum(device.capacity for device in devices))
    fenced = [device.endpoint for device in devices if device.fence is not None]
    fences = f", fenced for a capture: {', '.join(fenced)}" if fenced else ""
    if len(devices) != len(presence.devices):
        has = formats.counted(len(devices), "GPU")
        what = f"the GMS of {it.name} has {has}, the agent {len(presence.devices)}"
        yield warn(what, f"wait 10 s; if it stays so, restart the agent of {it.name}")
    else:
        yield ok(
            f"the GMS of {it.name} answers: {formats.counted(len(devices), 'GPU')}, "
            f"{used} of {room} used{fences}"
        )
    if local:
        yield from _left(it, devices, cluster.held, seen.local.sockets)


def _left(
    it: ObservedNode, devices: Sequence[DeviceStatus], held: frozenset[str], sockets: str
) -> Iterator[Finding]:
    """Name the memory that a process which is no pod has committed, and has left."""
    for device in devices:
        domains = [found for found in device.domains if found.layout and not found.sessions]
        if domains and device.uuid not in held:
            yield warn(
                f"GPU {device.index} of {it.name} has {formats.size(device.used)} that no pod has: "
                "the next worker there ends with GenerationMismatch",
                f"gms drop --device {device.uuid} --socket-dir {sockets}/{it.name}",
            )


def _artifacts(cluster: ObservedCluster) -> Iterator[Finding]:
    bad = [c for c in cluster.contents if is_true(c.status.conditions, "Quarantined")]
    for content in bad:
        found = condition(content.status.conditions, "Quarantined")
        why = found.reason if found else ""
        name = content.spec.snapshot_ref
        yield warn(
            f"the artifact of snapshot {name.namespace}/{name.name} is quarantined: {why}",
            f"snapshotctl verify snapshotcontent/{content.metadata.name}",
        )
    if not bad:
        yield ok("no artifact is quarantined")
