"""Decides for one SnapshotContent: its capture, its readers, its verification, its deletion.

This is the only writer of a content's status. A restore asks to read by naming the content in its
own status; that it is registered here, by uid, is what lets it begin, and what keeps the artifact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec.structs import replace

from snapshot_api.facts import Pod
from snapshot_api.kinds import AnyObject
from snapshot_api.meta import OrderStatus
from snapshot_api.v1alpha1.checkpoint import DynamoCheckpoint
from snapshot_api.v1alpha1.content import Committed, SnapshotContent, SnapshotContentStatus
from snapshot_api.v1alpha1.restore import SnapshotRestore
from snapshot_api.v1alpha1.snapshot import Snapshot
from snapshot_api.views import is_answered
from snapshot_api.well_known import VERIFY
from snapshot_operator.core import (
    backpressure,
    capture,
    conditions,
    fold,
    importing,
    ordering,
    quarantine,
)
from snapshot_operator.core.capture import UNDER_WAY, ContentView
from snapshot_operator.core.conditions import Wait
from snapshot_operator.core.interventions import requested
from snapshot_operator.core.nodes import all_nodes, known, node, reading_node, unusable_for_new_work
from snapshot_operator.core.owning import owned_by, serves
from snapshot_operator.core.plan import (
    NOTHING,
    Adopt,
    Finalize,
    Plan,
    Reader,
    is_adopted,
    owing_plan,
)
from snapshot_shared.ids import Uid, derived_uid, order_id
from snapshot_shared.transitions import RESTORE, Capture, Restore


def gather(reader: Reader, content: SnapshotContent) -> ContentView:
    """Read what a decision about a content depends on, and no more: each read wakes it later."""
    status, source = content.status, content.spec.source
    unanswered = [item.node for item in status.orders if not is_answered(item)]
    is_pending = status.capture is Capture.PENDING
    chooses = _may_choose_a_node(content)
    name = content.metadata.name
    named = _restores(reader.by_index("reading", name))
    reading = [restore for restore in named if serves(content, restore)]
    # One that finds damage comes under this value, and so wakes the content before it ends.
    reader.by_index("reading", damaged_key(name))
    present = {restore.metadata.uid for restore in reading}
    others = {uid: reader.by_uid(uid) for uid in status.readers if uid not in present}
    return ContentView(
        content,
        home=node(reader, source.node_name) if is_pending and source.node_name else None,
        known=known(reader, unanswered),
        nodes=all_nodes(reader) if chooses else (),
        rivals=_rivals(reader, content) if is_pending else (),
        parents=_parents(reader, content),
        readers=[*reading, *_restores(others.values())],
        gone=frozenset(uid for uid, found in others.items() if found is None),
        source=_source(reader, content),
        is_full=(is_pending or chooses) and reader.is_full,
    )


def _may_choose_a_node(content: SnapshotContent) -> bool:
    """Whether a generation is to be removed, or the artifact to be read."""
    status = content.status
    is_deleted = content.metadata.deletion_timestamp is not None
    if status.capture is Capture.PENDING and not is_deleted:
        return content.spec.source.artifact is not None
    is_over = is_deleted or status.capture in (Capture.READY, Capture.FAILED)
    left = status.generations if is_deleted else _given_up(status)
    asked = requested(content, VERIFY) != status.verify_request
    return bool((is_over and left) or asked or status.verifications > status.verified)


def _source(reader: Reader, content: SnapshotContent) -> Pod | None:
    if content.status.capture not in (Capture.PENDING, Capture.PREPARING, Capture.STAGING):
        return None
    ref = content.spec.source.pod_ref
    if ref is None:
        return None
    found = reader.get("Pod", content.spec.source.namespace, ref.name, ref.uid or "")
    return found if isinstance(found, Pod) else None


def _rivals(reader: Reader, content: SnapshotContent) -> list[SnapshotContent]:
    found = (reader.by_index("captures", key) for key in capture_keys(content))
    return [value for values in found for value in _contents(values)]


def _parents(reader: Reader, content: SnapshotContent) -> list[SnapshotContent]:
    space = content.spec.source.namespace
    found: dict[str, SnapshotContent] = {}
    for part, structure in capture.prepared_layouts(content):
        for value in _contents(reader.peek_index("layouts", f"{space}/{part}/{structure}")):
            found[value.metadata.uid] = value
    return list(found.values())


def _contents(values: Iterable[object]) -> list[SnapshotContent]:
    return [value for value in values if isinstance(value, SnapshotContent)]


def _restores(values: Iterable[object]) -> list[SnapshotRestore]:
    return [value for value in values if isinstance(value, SnapshotRestore)]


def capture_keys(content: SnapshotContent) -> list[str]:
    """Return what unsettled captures of one container share; nothing for an import."""
    pod = content.spec.source.pod_ref
    return [f"{pod.uid}/{pod.containers[0]}"] if pod is not None else []


def damaged_key(name: str) -> str:
    """Return under which value restores are found that have found a content damaged."""
    return f"{name}/damaged"


def layout_keys(content: SnapshotContent) -> list[str]:
    """Return the keys under which later saves find the layouts of a committed artifact."""
    committed = content.status.committed
    if committed is None or content.metadata.deletion_timestamp:
        return []
    space = content.spec.source.namespace
    return [
        f"{space}/{entry.part}/{entry.layout.structure_hash}"
        for entry in committed.vector
        if entry.layout is not None
    ]


def reconcile(view: ContentView, now: float) -> Plan:
    """Return the next step of a content. Same input, same plan."""
    content = view.content
    status = content.status
    if not is_adopted(content):
        return NOTHING if content.metadata.deletion_timestamp else Plan((Adopt(content),))
    settled = fold.mark_lost(status.orders, now, view.known)
    if settled != status.orders:
        return owing_plan(content, replace(status, orders=settled), now)
    again = ordering.renewed(status.orders, now, besides="delete")
    if again is not None:
        return owing_plan(content, replace(status, orders=again), now)
    registered = _registered(view, now)
    if registered != status:
        return owing_plan(content, registered, now)
    if status.capture in (*UNDER_WAY, Capture.ABORTING):
        return capture.step(view, now)
    if content.metadata.deletion_timestamp:
        return _deletion(view, now)
    artifact = content.spec.source.artifact
    match status.capture:
        case Capture.PENDING if artifact is not None:
            return importing.step(view, artifact, _reader(view), now)
        case Capture.READY if status.committed is not None:
            return _ready(view, status.committed, now)
        case Capture.FAILED:
            return _clean(view, now)
        case _:
            return capture.step(view, now)


# Readers.


def _registered(view: ContentView, now: float) -> SnapshotContentStatus:
    """Return the status after restores that ended or vanished are out, and new ones are in.

    One that found damage leaves its mark with the write that takes it out.
    """
    content, status = view.content, view.content.status
    ended = {
        restore.metadata.uid
        for restore in view.readers
        if restore.metadata.uid in status.readers and _is_over(restore)
    }
    for restore in view.readers:
        damage = quarantine.damage_in(restore.status.orders)
        if restore.metadata.uid in ended and damage is not None:
            finder = f"pod {restore.metadata.namespace}/{restore.spec.pod_ref.name}"
            status = quarantine.quarantined(replace(content, status=status), damage, finder, now)
    left = [uid for uid in status.readers if uid not in ended | view.gone]
    marked = replace(content, status=status)
    if may_be_read(marked):
        left += [
            restore.metadata.uid
            for restore in view.readers
            if restore.status.state is Restore.PENDING and restore.metadata.uid not in left
        ]
    return replace(status, readers=left) if left != status.readers else status


def _is_over(restore: SnapshotRestore) -> bool:
    """Whether a restore needs the artifact no more: it ended, or what it reads is of no use."""
    is_damaged = quarantine.damage_in(restore.status.orders) is not None
    return restore.status.state in RESTORE.terminal() or is_damaged


def may_be_read(content: SnapshotContent) -> bool:
    """Whether a restore may begin to read the artifact."""
    return (
        content.status.committed is not None
        and content.metadata.deletion_timestamp is None
        and not quarantine.is_quarantined(content)
    )


# What follows a capture.


def _ready(view: ContentView, committed: Committed, now: float) -> Plan:
    """Order the release first, then what was asked for; then have older attempts removed."""
    content, status = view.content, view.content.status
    if _is_held(content):
        order = ordering.release(content, status.traceparent, now)
        return owing_plan(content, replace(status, orders=[*status.orders, order]), now)
    checked = quarantine.verification(quarantine.asked(content), committed, _reader(view), now)
    left = _given_up(status)
    if checked == status and left and not _is_owed(content, now):
        return _remove(view, left[0], now)
    return owing_plan(content, checked, now)


def _given_up(status: SnapshotContentStatus) -> list[int]:
    """Return the attempts that may have left files and are not the one that was committed."""
    committed = status.committed
    return [n for n in status.generations if committed is None or n != committed.generation]


def _is_held(content: SnapshotContent) -> bool:
    """Whether the captured worker still waits to be let go; an import has none."""
    is_capture = content.spec.source.artifact is None
    return is_capture and not fold.find(content.status.orders, "release")


def _reader(view: ContentView) -> str | Wait:
    if view.is_full:
        return Wait(backpressure.REASON, backpressure.MESSAGE)
    wait = Wait("NoNode", "no node is ready to read the artifact, and not cordoned")
    usable = [found for found in view.nodes if not unusable_for_new_work(found)]
    return reading_node(usable, view.content.spec.source.node_name) or wait


def _clean(view: ContentView, now: float) -> Plan:
    """Have removed what failed attempts may have written; no reader ever saw it."""
    content, status = view.content, view.content.status
    if _is_owed(content, now):
        return owing_plan(content, status, now)
    if status.generations:
        return _remove(view, status.generations[0], now)
    return owing_plan(content, status, now)


def _is_owed(content: SnapshotContent, now: float) -> bool:
    """Whether something of the attempt may still be writing."""
    return any(
        not is_answered(item) and not fold.is_late(item, now)
        for item in content.status.orders
        if item.verb not in ("verify", "delete")
    )


# What is left to do before a content that is deleted may go: the first of these that holds.


def _unreleased(view: ContentView, now: float) -> Plan | None:
    content, status = view.content, view.content.status
    if status.capture is not Capture.READY or not _is_held(content):
        return None
    order = ordering.release(content, status.traceparent, now)
    return owing_plan(content, replace(status, orders=[*status.orders, order]), now)


def _uncleaned(view: ContentView, now: float) -> Plan | None:
    owed = [
        item
        for item in view.content.status.orders
        if item.verb in ("release", "abort") and not fold.is_done(item)
    ]
    if not owed:
        return None
    verbs = ", ".join(f"{item.verb} on {item.node}" for item in owed)
    return _deletion_waits(view.content, "CleaningOwed", f"waits for {verbs}", now)


def _read(view: ContentView, now: float) -> Plan | None:
    readers = view.content.status.readers
    if not readers:
        return None
    message = f"restored by {', '.join(readers)}"
    return _deletion_waits(view.content, "ReadersRegistered", message, now)


def _written(view: ContentView, now: float) -> Plan | None:
    content = view.content
    return owing_plan(content, content.status, now) if _is_owed(content, now) else None


def _unremoved(view: ContentView, now: float) -> Plan | None:
    status = view.content.status
    keep = status.committed if view.content.spec.deletion_policy == "Retain" else None
    left = [n for n in status.generations if keep is None or n != keep.generation]
    return _remove(view, left[0], now) if left else None


_DELETION: tuple[Callable[[ContentView, float], Plan | None], ...] = (
    _unreleased,
    _uncleaned,
    _read,
    _written,
    _unremoved,
)


def _deletion(view: ContentView, now: float) -> Plan:
    """End a content: the worker is let go, readers end, the artifact is removed."""
    left = (plan for step in _DELETION if (plan := step(view, now)) is not None)
    return next(left, Plan((Finalize(view.content),)))


def _deletion_waits(content: SnapshotContent, reason: str, message: str, now: float) -> Plan:
    rows = conditions.with_conditions(
        content.status.conditions, content, now, ("Deleting", False, reason, message)
    )
    return owing_plan(content, replace(content.status, conditions=rows), now)


def _remove(view: ContentView, generation: int, now: float) -> Plan:
    """Have one generation removed, by any node: all reach the artifact root. Failures rest."""
    content, status = view.content, view.content.status
    last = _delete_of(content, generation)
    if last is not None and fold.succeeded(last):
        left = [number for number in status.generations if number != generation]
        orders = [item for item in status.orders if item.order != last.order]
        return owing_plan(content, replace(status, generations=left, orders=orders), now)
    due = fold.due_at(last) if last is not None and last.state != fold.LOST else now
    if last is not None and due is not None and now < due:
        if not is_answered(last):
            return owing_plan(content, status, now)
        cause = last.final.failure if last.final else None
        return _deletion_waits(
            content, "DeleteFailed", cause.message if cause else f"{last.node} is gone", now
        )
    chosen = reading_node(view.nodes, content.spec.source.node_name)
    if chosen is None:
        return _deletion_waits(content, "NoNode", "no node is ready to remove the artifact", now)
    order = ordering.delete(content, generation, chosen, now, last)
    return owing_plan(content, replace(status, orders=fold.replaced(status.orders, order)), now)


def _delete_of(content: SnapshotContent, generation: int) -> OrderStatus | None:
    name = order_id("delete", Uid(content.metadata.uid), f"gen-{generation}")
    return next((item for item in content.status.orders if item.order == name), None)


def content_name(snapshot: Snapshot) -> str:
    """Return the name of the content of a snapshot.

    That of an import is made of the artifact, so that one content at most can have its files.
    """
    artifact = snapshot.spec.source.artifact
    if artifact is None:
        return f"snapshotcontent-{snapshot.metadata.uid}"
    space = snapshot.metadata.namespace or "default"
    return import_name(space, artifact.content_uid, artifact.generation)


def import_name(namespace: str, content_uid: str, generation: int) -> str:
    """Return the name of the content that imports a generation."""
    return f"snapshotcontent-{derived_uid(namespace, f'{content_uid}/gen-{generation}')}"


def content_behind(
    get: Callable[[str, str | None, str], AnyObject | None], value: AnyObject
) -> SnapshotContent | None:
    """Return the content that a checkpoint, a snapshot or a content leads to, if there is one.

    None for a content of another snapshot or another namespace: a status may name any.
    """
    match value:
        case DynamoCheckpoint():
            name = value.status.content_name
        case Snapshot():
            name = value.status.bound_snapshot_content_name or content_name(value)
        case SnapshotContent():
            name = value.metadata.name
        case _:
            return None
    found = get("SnapshotContent", None, name) if name else None
    if isinstance(value, SnapshotContent):
        return found if isinstance(found, SnapshotContent) else None
    if not serves(found, value) or (isinstance(value, Snapshot) and not owned_by(found, value)):
        return None
    return found
