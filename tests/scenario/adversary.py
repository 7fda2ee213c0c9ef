"""A user of one namespace who writes whatever statuses, annotations, labels and finalizers take.

No admission policy is here, so the store takes all of it. What the user wants is of another
namespace: its memory, its artifacts, its workers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from snapshot_api.facts import Pod
from snapshot_api.kinds import AnyObject, kind_of
from snapshot_api.meta import Condition, OrderStatus, time_of
from snapshot_api.v1alpha1.checkpoint import DynamoCheckpoint
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.v1alpha1.restore import SnapshotRestore
from snapshot_api.v1alpha1.snapshot import Snapshot
from snapshot_api.views import orders_of, part_of
from snapshot_api.well_known import (
    RESTORE_CONTENT,
    RESTORE_DIGEST,
    RESTORE_FROM,
    RESTORE_UID,
    SNAPSHOT_UID,
)
from snapshot_operator.core.conditions import timestamp
from snapshot_operator.core.plan import FINALIZER
from snapshot_shared.errors import Conflict, NotFound
from snapshot_shared.orders import TERMINAL, AnyOrder, Report, order_in
from tests.scenario.store import at_once
from tests.support.objects import (
    checkpoint_document,
    pod_template,
    restore_document,
    snapshot_document,
)

if TYPE_CHECKING:
    from tests.scenario.faults import Fault
    from tests.scenario.world import World

TENANT = "tenant"
"""The namespace of the user. The others of a world are in `default`."""

SOURCE = "mine"
"""The name of the source from which the pods of the user ask to be restored."""


def thieves(seed: int) -> Iterator[tuple[Any, ...]]:
    """Yield what the user applies and when, in one world of four.

    Pods wait for a source. Its snapshot has a pod that never comes. Its checkpoint has the identity
    of a checkpoint of others, and a worker for which no node has the devices.
    """
    rng = random.Random(f"thieves {seed}")
    for index in range(rng.choice((0, 0, 0, 2))):
        yield rng.random() * 5, _tenants(restore_document(SOURCE, f"thief-{index}", gpus=1))
    if rng.random() < 0.5:
        return
    if rng.random() < 0.5:
        yield rng.random() * 5, _tenants(snapshot_document(SOURCE, "nobody"))
    else:
        document = checkpoint_document(SOURCE, model="example/a")
        # No node has so many, so its worker never starts.
        document["spec"]["job"]["podTemplateSpec"] = pod_template(
            resources={"limits": {"nvidia.com/gpu": 64}}
        )
        yield rng.random() * 5, _tenants(document)


def _tenants(document: dict[str, Any]) -> dict[str, Any]:
    document["metadata"]["namespace"] = TENANT
    return document


def is_tenants(value: AnyObject | None) -> bool:
    """Whether an object is of the user, or a content of a snapshot of the user."""
    if isinstance(value, SnapshotContent):
        return value.spec.snapshot_ref.namespace == TENANT
    return value is not None and value.metadata.namespace == TENANT


def namespaces_in(order: AnyOrder) -> set[str]:
    named = (getattr(order, name, None) for name in ("pod", "artifact", "parent"))
    own = getattr(order, "namespace", None)
    return {each.namespace for each in named if each is not None} | ({own} if own else set())


def forge(world: World, fault: Fault) -> None:
    """Write what a forgery makes of an object of the user, if there is one."""
    rng = random.Random(f"{world.seed} {fault}")
    mine = [each for each in world.rules.present() if type(each) in _FORGERIES and is_tenants(each)]
    contents = [each for each in world.rules.contents() if not is_tenants(each)]
    if not mine or not contents:
        return
    value, victim = rng.choice(mine), rng.choice(contents)
    world.note(f"{value.metadata.name} is forged with {victim.metadata.name}")
    try:
        rng.choice(_FORGERIES[type(value)])(world, value, victim, rng)
    except (Conflict, NotFound) as error:
        world.note(f"the forgery is refused: {error}")


def _content(
    world: World, value: SnapshotRestore, victim: SnapshotContent, rng: random.Random
) -> None:
    """Name a content of another namespace, and a node."""
    node = rng.choice(world.nodes).name
    _write(world, value, content_name=victim.metadata.name, node_name=node)


def _copied(
    world: World, value: SnapshotRestore, victim: SnapshotContent, rng: random.Random
) -> None:
    """Have the orders of another object as own ones, which nobody has published."""
    _write(world, value, orders=[replace(item, state="ordered") for item in orders_of(victim)])


def _readdressed(
    world: World, value: SnapshotRestore, victim: SnapshotContent, rng: random.Random
) -> None:
    """The same, with the user's object as their owner and in their ids."""
    _write(world, value, orders=[_of(value, item) for item in orders_of(victim)])


def _made(
    world: World, value: SnapshotRestore, victim: SnapshotContent, rng: random.Random
) -> None:
    """Order that an artifact is deleted, or that a worker is ended."""
    source = victim.spec.source
    taken: dict[str, Any] = {"namespace": source.namespace, "generation": 1}
    verb, fields = rng.choice(
        (
            ("delete", taken | {"content_uid": victim.artifact_uid}),
            ("abort", {"content_uid": victim.artifact_uid, "on_failure": "Kill"}),
        )
    )
    if verb == "abort" and source.pod_ref is not None:
        pod = {"namespace": source.namespace, "name": source.pod_ref.name}
        fields |= {"pod": pod | {"uid": source.pod_ref.uid or value.metadata.uid}}
    name, node = f"{verb}-{value.metadata.uid}", rng.choice(world.nodes).name
    order = {"type": f"snapback.v1.{verb}_order", "order": name, "attempt": 1, "node": node}
    order |= {"owner": value.metadata.uid, "deadline_s": 60.0, **fields}
    item = OrderStatus(
        order=name,
        verb=verb,
        attempt=1,
        node=node,
        service="agent",
        payload=msgspec.Raw(json.dumps(order).encode()),
        ordered_at=time_of(world.wall),
        deadline=time_of(world.wall + 60.0),
    )
    _write(world, value, orders=[item])


def _let_go(
    world: World, value: SnapshotRestore, victim: SnapshotContent, rng: random.Random
) -> None:
    """Take the finalizer off, and put another object's label on."""
    at_once(world.store.label(value, SNAPSHOT_UID, victim.metadata.uid))
    at_once(world.store.remove_finalizer(_read(world, value), FINALIZER))


def _ended(
    world: World, value: SnapshotRestore, victim: SnapshotContent, rng: random.Random
) -> None:
    """Answer all that was ordered as done."""
    now = _read(world, value)
    _write(world, value, orders=[_answered(item, world.wall) for item in now.status.orders])


def _bound(world: World, value: Snapshot, victim: SnapshotContent, rng: random.Random) -> None:
    """Bind the snapshot to a content of another namespace."""
    now = timestamp(world.wall)
    ready = Condition(type="Ready", status="True", reason="Captured", last_transition_time=now)
    name = victim.metadata.name
    _write(world, value, bound_snapshot_content_name=name, conditions=rng.choice(([], [ready])))


def _led(
    world: World, value: DynamoCheckpoint, victim: SnapshotContent, rng: random.Random
) -> None:
    """Lead the checkpoint to a content, a snapshot and a worker of another namespace."""
    names = {"content_name": victim.metadata.name, "snapshot_name": victim.spec.snapshot_ref.name}
    shares = rng.choice(("", victim.spec.snapshot_ref.name))
    _write(world, value, phase="Ready", shares=shares, job_name="a", **names)


def _asked(world: World, value: Pod, victim: SnapshotContent, rng: random.Random) -> None:
    """Name a source, a content or an artifact of another namespace by an annotation."""
    committed = victim.status.committed
    annotation, text = rng.choice(
        (
            (RESTORE_FROM, victim.spec.snapshot_ref.name),
            (RESTORE_FROM, f"{victim.spec.snapshot_ref.namespace}/{victim.spec.snapshot_ref.name}"),
            (RESTORE_UID, victim.spec.snapshot_ref.uid),
            (RESTORE_CONTENT, victim.metadata.name),
            (RESTORE_DIGEST, committed.root_digest if committed else ""),
        )
    )
    at_once(world.store.annotate(_read(world, value), annotation, text))


def _labelled(world: World, value: AnyObject, victim: SnapshotContent, rng: random.Random) -> None:
    """Take the label by which the operator finds what belongs to a snapshot."""
    uid = rng.choice((victim.metadata.uid, victim.spec.snapshot_ref.uid))
    at_once(world.store.label(_read(world, value), SNAPSHOT_UID, uid))


Forgery = Callable[[Any, Any, SnapshotContent, random.Random], None]

_FORGERIES: Mapping[type, tuple[Forgery, ...]] = {
    SnapshotRestore: (
        _content,
        _content,
        _copied,
        _readdressed,
        _made,
        _made,
        _ended,
        _let_go,
    ),
    Snapshot: (_bound, _bound, _labelled, _let_go),
    DynamoCheckpoint: (_led, _led, _labelled, _let_go),
    Pod: (_asked, _asked, _labelled),
}
"""What the user writes into an object, by its kind."""


def _answered(item: OrderStatus, at: float) -> OrderStatus:
    kind = TERMINAL[item.verb]
    final = Report(
        order=item.order,
        attempt=item.attempt,
        n=9,
        kind=kind,  # type: ignore[arg-type]
        node=item.node,
        service=item.service,
        at=at,
    )
    return replace(item, state=kind, final=final)


def _of(value: AnyObject, item: OrderStatus) -> OrderStatus:
    uid, part = value.metadata.uid, part_of(item.order)
    name = f"{item.verb}-{uid}" + (f"-{part}" if part else "")
    order = json.loads(bytes(item.payload)) | {"order": name, "owner": uid}
    assert order_in(json.dumps(order).encode()) is not None
    payload = msgspec.Raw(json.dumps(order).encode())
    return replace(item, order=name, payload=payload, state="ordered", final=None)


def _write(world: World, value: AnyObject, **changes: Any) -> None:
    now = _read(world, value)
    at_once(world.store.update_status(replace(now, status=replace(now.status, **changes))))


def _read(world: World, value: AnyObject) -> Any:
    """Return the object as the store has it now. NotFound."""
    meta = value.metadata
    found = at_once(world.store.read(kind_of(value).name, meta.namespace, meta.name))
    if found is None:
        raise NotFound(f"{meta.name} is gone")
    return found
