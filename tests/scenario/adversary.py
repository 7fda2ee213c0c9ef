"""A user of one namespace who writes whatever a status, a label or a finalizer takes.

No admission policy is here, so the store takes all of it. What the user wants is of another
namespace: its memory, its artifacts, its workers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from snapshot_operator.core.plan import FINALIZER
from snapshot_shared.errors import Conflict, NotFound
from snapshot_shared.objects.kinds import AnyObject
from snapshot_shared.objects.meta import OrderStatus, time_of
from snapshot_shared.objects.snapback import SNAPSHOT_UID, SnapshotContent, SnapshotRestore
from snapshot_shared.orders import AnyOrder, order_in
from snapshot_shared.views import orders_of, part_of
from tests.scenario.store import at_once
from tests.support.objects import restore_document

if TYPE_CHECKING:
    from tests.scenario.faults import Fault
    from tests.scenario.world import World

TENANT = "tenant"
"""The namespace of the user. The others of a world are in `default`."""


def thieves(seed: int) -> Iterator[tuple[Any, ...]]:
    """Yield when pods of the user are applied, in one world of four; each waits for a source."""
    rng = random.Random(f"thieves {seed}")
    for index in range(rng.choice((0, 0, 0, 2))):
        document = restore_document("mine", f"thief-{index}", gpus=1)
        document["metadata"]["namespace"] = TENANT
        yield rng.random() * 5, document


def namespaces_in(order: AnyOrder) -> set[str]:
    named = (getattr(order, name, None) for name in ("pod", "artifact", "parent"))
    own = getattr(order, "namespace", None)
    return {each.namespace for each in named if each is not None} | ({own} if own else set())


def forge(world: World, fault: Fault) -> None:
    """Write what one of `_FORGERIES` makes of an object of the user, if there is one."""
    rng = random.Random(f"{world.seed} {fault}")
    mine = [
        value
        for value in world.rules.present()
        if isinstance(value, SnapshotRestore) and value.metadata.namespace == TENANT
    ]
    contents = [*world.rules.contents()]
    if not mine or not contents:
        return
    value, victim = rng.choice(mine), rng.choice(contents)
    world.note(f"{value.metadata.name} is forged with {victim.metadata.name}")
    try:
        rng.choice(_FORGERIES)(world, value, victim, rng)
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


_FORGERIES: tuple[Callable[[Any, SnapshotRestore, SnapshotContent, random.Random], None], ...] = (
    _content,
    _content,
    _copied,
    _readdressed,
    _made,
    _made,
    _let_go,
)


def _of(value: AnyObject, item: OrderStatus) -> OrderStatus:
    uid, part = value.metadata.uid, part_of(item.order)
    name = f"{item.verb}-{uid}" + (f"-{part}" if part else "")
    order = json.loads(bytes(item.payload)) | {"order": name, "owner": uid}
    assert order_in(json.dumps(order).encode()) is not None
    payload = msgspec.Raw(json.dumps(order).encode())
    return replace(item, order=name, payload=payload, state="ordered", final=None)


def _write(world: World, value: SnapshotRestore, **changes: Any) -> None:
    now = _read(world, value)
    at_once(world.store.update_status(replace(now, status=replace(now.status, **changes))))


def _read(world: World, value: SnapshotRestore) -> Any:
    """Return the object as the store has it now. NotFound."""
    meta = value.metadata
    found = at_once(world.store.read("SnapshotRestore", meta.namespace, meta.name))
    if found is None:
        raise NotFound(f"{meta.name} is gone")
    return found
