"""What must hold in every world: the rules of the product, checked while it runs and at its end.

Each broken rule is a line that says what was seen, by whom and when.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from snapshot_agent.adapters.guard import RETURN_S
from snapshot_agent.adapters.guards import MARGIN_S
from snapshot_agent.handlers.captures import SLACK_S
from snapshot_agent.ports import Worker
from snapshot_api.facts import Node, Pod
from snapshot_api.kinds import AnyObject, kind_of
from snapshot_api.meta import OrderStatus, is_true
from snapshot_api.v1alpha1.checkpoint import DynamoCheckpoint
from snapshot_api.v1alpha1.content import SnapshotContent, SnapshotContentStatus
from snapshot_api.v1alpha1.restore import SnapshotRestore
from snapshot_api.v1alpha1.snapshot import Snapshot
from snapshot_api.views import is_answered, orders_of
from snapshot_operator.core import fold
from snapshot_operator.core.ordering import BUDGET_S
from snapshot_operator.core.quarantine import damage_in
from snapshot_operator.local.pods import holds_devices
from snapshot_shared import artifact
from snapshot_shared.codec import decode_json, digest
from snapshot_shared.errors import InvalidMessage
from snapshot_shared.ids import OrderId, owner_of
from snapshot_shared.journal import Journal
from snapshot_shared.ledger import Ledger
from snapshot_shared.orders import CLEANING, AnyOrder, Order, Report, StopOrder
from snapshot_shared.subjects import parse_order
from snapshot_shared.transitions import CAPTURE, RESTORE, Capture, Restore
from tests.scenario.adversary import TENANT, is_tenants, namespaces_in
from tests.scenario.loop import CURRENT, Process, current
from tests.scenario.node import SHARED
from tests.scenario.node import owner_of as disk_owner
from tests.scenario.worker import Saved, SimWorker
from tests.support.rules import names_a_newer_attempt

if TYPE_CHECKING:
    from tests.scenario.node import SimNode
    from tests.scenario.world import World

Kind = Literal["lost", "doubled", "half", "stale", "frozen", "ended", "leaked", "foreign", "defect"]
"""What a broken rule comes down to.

Work that never ends or is forgotten; done twice; visible though not whole; an older attempt over a
newer one; a worker that is kept from its work; one that is ended without a cause; something left
behind; what another namespace has, read or touched; and anything else of ours.
"""
KINDS: tuple[Kind, ...] = get_args(Kind)

FINISHED = ("Succeeded", "Failed")
_OWN_ENDS = ("ContainerExited", "DeadlineExceeded", "Superseded")
"""Why a pod may fail that serves; the last is a lie about its start, which only a node can tell."""
REASON = re.compile(r"^[A-Z][A-Za-z0-9]+$")
FROZEN_S = BUDGET_S["dump"] + SLACK_S + 2 * MARGIN_S + 1.0
"""How long a worker may be stopped: the dump of an agent that hangs, and a margin."""
ALONE_S = 3.0
"""How much longer than a guard waits for its agent a worker may be held without one."""


GENERATION_DEPTH = 4
"""How many names lead from the quarantine to a generation in it."""


class Rules:
    """Watches one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.broken: list[str] = []
        self.kinds: set[Kind] = set()
        self.journals: dict[str, Journal] = {}
        self.saved: set[Saved] = set()
        self.restores = 0
        self.captures = 0
        self._dumps: dict[tuple[str, int], Process] = {}
        self._deleted: set[str] = set()
        self._terminal: dict[tuple[str | int, ...], str] = {}
        self._attempts: dict[str, int] = {}
        self._seen: dict[str, AnyObject] = {}
        self._gone: set[str] = set()
        self._terms: dict[str, int] = {}
        self._served: set[str] = set()
        self._looked = -1
        self.lies: set[bytes] = set()
        """Reports that no node has sent."""
        self._held: set[Process] = set()
        self._alone: dict[str, tuple[Process | None, float]] = {}

    def fail(self, kind: Kind, what: str) -> None:
        """Note a broken rule and end the world."""
        self.kinds.add(kind)
        self.broken.append(f"{self._world.loop.now:9.3f} {kind}: {what}")
        self._world.stop()

    # While it runs.

    @contextlib.contextmanager
    def dumping(self, node: SimNode, worker: Worker) -> Iterator[None]:
        """One process is dumped by one agent at a time."""
        key, me = (node.name, worker.process.pid), current()
        other = self._dumps.get(key)
        if other is not None and other.is_alive:
            self.fail(
                "doubled", f"two dumps of {worker.process} on {node.name}: by {other} and by {me}"
            )
        self._dumps[key] = me
        try:
            yield
        finally:
            if self._dumps.get(key) is me:
                del self._dumps[key]

    def quiesced(self, worker: SimWorker, saved: Saved) -> None:
        """Remember what a worker saved. From now on it is held."""
        self.saved.add(saved)
        self._held.add(worker.process)

    def let_go(self, worker: SimWorker, how: str) -> None:
        self._held.discard(worker.process)
        self._world.note(f"{worker.process} goes on after {how}")

    def restored(self, worker: SimWorker, saved: Saved, weights: str) -> None:
        """A restored worker has a state and weights that belong together and were captured."""
        self.restores += 1
        pod = self._seen.get(worker.pod)
        if pod is not None and pod.metadata.namespace == TENANT:
            self.fail("foreign", f"{worker.process} has a state of another namespace: {saved}")
        if saved not in self.saved:
            self.fail("half", f"{worker.process} was given a state that nobody saved: {saved}")
        if weights != saved.weights:
            self.fail("half", f"{worker.process} has other weights than its state belongs to")

    def misused(self, descriptor: int) -> None:
        """A descriptor that is closed may be that of another file by now."""
        self.fail("defect", f"{CURRENT.get()} used descriptor {descriptor}, which was closed")

    def closed(self, process: Process) -> None:
        """A service that has ended by itself has nothing open."""
        if names := self._open_names(process):
            self.fail("leaked", f"{process} ended and had {', '.join(sorted(names))} open")
        self._world.note(f"{process} has nothing open")

    def published(self, subject: str, data: bytes) -> None:
        """Look at what a stream has taken: an order of the store, or one end of an attempt."""
        with contextlib.suppress(InvalidMessage):
            if subject.startswith("snap.order."):
                self._ordered(subject, decode_json(data, cast("type[Any]", AnyOrder)))
            elif subject.startswith("snap.report.") and data not in self.lies:
                self._reported(decode_json(data, Report))

    def _ordered(self, subject: str, order: Order) -> None:
        value = self._seen.get(order.owner)
        if is_tenants(value) and (others := namespaces_in(cast("AnyOrder", order)) - {TENANT}):
            self.fail("foreign", f"{order.order} of {TENANT} went out for {others}")
        if self._world.has_just_rewound:
            return
        owner, which = order.owner, f"{order.order} attempt {order.attempt}"
        # A later attempt may be in the store already: that of an operator whose clock is ahead.
        last = {item.order: item.attempt for item in orders_of(self._seen.get(owner))}
        # One that has gone out before may be repeated at the moment in which its answer is stored.
        is_repeated = self._attempts.get(subject) == order.attempt
        is_ahead = order.attempt > last.get(order.order, 0)
        if owner not in self._gone and is_ahead and not is_repeated:
            self.fail("stale", f"{which} went out and is not in the store")
        newest = self._attempts.setdefault(subject, order.attempt)
        if order.attempt < newest and not self._world.has_just_resumed:
            self.fail("stale", f"{which} went out over attempt {newest}")
        self._attempts[subject] = max(order.attempt, newest)
        if isinstance(order, StopOrder):
            self._stopped(order)

    def _stopped(self, order: StopOrder) -> None:
        """A worker is ended when its pod is deleted or has ended, and for no other reason."""
        pod = self._seen.get(order.owner)
        if not isinstance(pod, Pod) or pod.metadata.uid in self._gone:
            return
        if not pod.metadata.deletion_timestamp and pod.status.phase not in FINISHED:
            name = f"{pod.metadata.name} ({pod.status.phase})"
            self.fail("ended", f"the worker of pod {name} was ordered to stop")

    def _reported(self, report: Report) -> None:
        if not report.is_terminal or names_a_newer_attempt(report):
            return
        key = (report.node, report.service, report.order, report.attempt)
        build = self._world.node(report.node).build
        reason = report.failure and report.failure.reason
        if report.schema not in build.schemas and reason != "UnsupportedVersion":
            self.fail("defect", f"{key} was carried out by a build that cannot read it")
        owner = owner_of(OrderId(report.order))
        if report.kind == "deleted":
            self._deleted.add(owner)
        if reason == "Superseded" and owner in self._deleted:
            # A store of before asks again for what led to an artifact that is deleted by now.
            return
        value = f"{report.kind} {report.failure and report.failure.reason} {report.part}"
        value += f" {report.root_digest}"
        # What no build could decode has no attempt: each build says in its own words why.
        said_by = key if report.attempt else (*key, build.name)
        known = self._terminal.setdefault(said_by, value)
        if known != value:
            self.fail("doubled", f"{key} ended twice: {known}; {value}")

    def acked(self, subject: str, data: bytes) -> None:
        """Look at what was acked: an order is in the journal then, a report in the store."""
        with contextlib.suppress(InvalidMessage):
            if subject.startswith("snap.order."):
                self._acked_order(subject, decode_json(data, cast("type[Any]", AnyOrder)))
            elif subject.startswith("snap.report.") and data not in self.lies:
                self._acked_report(decode_json(data, Report))

    def _acked_order(self, subject: str, order: Order) -> None:
        node, service, _ = parse_order(subject)
        ledger = self.journals[f"{service}@{node}"].ledger
        entry = ledger.entry(order.order)
        if entry is None and order.owner in _deleted_in(ledger):
            # An ack may arrive after the deletion by which a node forgets the orders of a capture.
            return
        if entry is None or entry.attempt < order.attempt:
            which = f"{order.order} attempt {order.attempt}"
            self.fail("lost", f"{which} was acked and is in no journal")

    def _acked_report(self, report: Report) -> None:
        owner = owner_of(OrderId(report.order))
        known = orders_of(self._seen.get(owner))
        for item in known:
            same = (item.order, item.attempt) == (report.order, report.attempt)
            if same and item.state == "ordered" and report.kind != "accepted":
                # It ended before it was ordered, and is told again when the order arrives.
                return
        if self._world.is_rewound:
            # What was in the store is not in its older copy, nor is what is acked on its way there.
            return
        if owner not in self._gone and fold.fold(known, report, 0.0) is not None:
            self.fail("lost", f"{report.kind} of {report.order} was acked and is not in the store")

    def changed(self, change: str, value: AnyObject) -> None:
        before = self._seen.get(value.metadata.uid)
        self._seen[value.metadata.uid] = value
        if (line := _shown(value)) != (before and _shown(before)) or change != "MODIFIED":
            self._world.note(f"{change.lower()} {line}")
        if change == "DELETED":
            self._gone.add(value.metadata.uid)
            return
        if before is not None and before.status != value.status:
            self._written(value)
        self._failure(value)
        match before, value:
            case SnapshotContent(), SnapshotContent():
                self._capture(before, value)
                self._doubt(before, value)
                self._readers(before, value)
            case SnapshotRestore(), SnapshotRestore():
                self._restore(before, value)
            case Pod(), Pod():
                self._ended(before, value)
                self._placed(before, value)

    def rewound(self, values: list[AnyObject]) -> None:
        """Know only what a store holds that was restored from an older copy."""
        self._seen = {value.metadata.uid: value for value in values}
        self._gone.clear()
        self._terms.clear()
        self._served.clear()
        self._attempts.clear()

    def present(self) -> Iterator[AnyObject]:
        """Return what the store holds, oldest first."""
        return (value for uid, value in self._seen.items() if uid not in self._gone)

    def _written(self, value: AnyObject) -> None:
        """Only the active operator writes a status, and none that another has taken over from."""
        process = CURRENT.get()
        if process is None:
            return
        uid, name = value.metadata.uid, f"{kind_of(value).name} {value.metadata.name}"
        term = self._world.lease.active.get(process)
        if term is None:
            self.fail("doubled", f"{process} is not the active operator and wrote {name}")
            return
        newest = self._terms.setdefault(uid, term)
        if term < newest and self._world.lease.is_noticed(process):
            self.fail("doubled", f"{process} wrote {name} after another had taken over")
        self._terms[uid] = max(term, newest)

    def _capture(self, before: SnapshotContent, after: SnapshotContent) -> None:
        name, old, new = after.metadata.name, before.status, after.status
        if new.attempt < old.attempt:
            self.fail("stale", f"{name}: the attempt went from {old.attempt} to {new.attempt}")
        if old.committed is not None and new.committed != old.committed:
            self.fail("stale", f"{name}: what was committed changed")
        if old.capture is not new.capture and not _leads(CAPTURE, old.capture, new.capture):
            self.fail("defect", f"{name}: {old.capture} to {new.capture}")
        if old.committed is None and new.committed is not None:
            self.captures += 1
            imported = after.spec.source.artifact
            wanted = new.attempt if imported is None else imported.generation
            if new.committed.generation != wanted:
                self.fail("stale", f"{name}: generation {new.committed.generation} of {wanted}")
            self._verify(after)

    def _doubt(self, before: SnapshotContent, after: SnapshotContent) -> None:
        """Only what is damaged is doubted, and verifications are counted upwards."""
        old, new = before.status, after.status
        if new.verified < old.verified or new.verifications < old.verifications:
            self.fail("lost", f"{after.metadata.name}: a verification was forgotten")
        is_new = is_true(new.conditions, "Quarantined") and not is_true(
            old.conditions, "Quarantined"
        )
        if is_new and not self.artifact_problem(after):
            self.fail("defect", f"{after.metadata.name} is in quarantine and whole")

    def _readers(self, before: SnapshotContent, after: SnapshotContent) -> None:
        """Nothing new reads what is doubted, and nothing is forgotten while it reads."""
        old, new = before.status.readers, after.status.readers
        for uid in set(new) - set(old):
            if is_tenants(self._seen.get(uid)) and not is_tenants(after):
                self.fail("foreign", f"{after.metadata.name} has a reader of {TENANT}")
        if set(new) - set(old) and is_true(after.status.conditions, "Quarantined"):
            self.fail("half", f"{after.metadata.name} has new readers and is in quarantine")
        for uid in set(old) - set(new):
            reader = self._seen.get(uid)
            if isinstance(reader, SnapshotRestore) and uid not in self._gone:
                ended = reader.status.state in RESTORE.terminal()
                if not ended and not damage_in(reader.status.orders):
                    name = reader.metadata.name
                    self.fail("lost", f"{after.metadata.name} has forgotten its reader {name}")

    def _restore(self, before: SnapshotRestore, after: SnapshotRestore) -> None:
        name, old, new = after.metadata.name, before.status, after.status
        if new.attempt < old.attempt:
            self.fail("stale", f"{name}: the attempt went from {old.attempt} to {new.attempt}")
        if old.state is not new.state and not _leads(RESTORE, old.state, new.state):
            self.fail("defect", f"{name}: {old.state} to {new.state}")
        if old.state is Restore.PENDING and new.state not in (Restore.PENDING, *RESTORE.terminal()):
            read = (c for c in self.contents() if c.metadata.name == new.content_name)
            if not any(after.metadata.uid in content.status.readers for content in read):
                self.fail("half", f"{name} began and is no reader of {new.content_name}")

    def _ended(self, before: Pod, after: Pod) -> None:
        """A worker that serves fails by its own end, its limit or a deleted Node alone."""
        if is_true(after.status.conditions, "Ready"):
            self._served.add(after.metadata.uid)
        if after.status.phase != "Failed" or before.status.phase == "Failed":
            return
        reason, name = after.status.reason, after.metadata.name
        if reason == "NodeLost":
            home = after.status.node_name
            for value in self.present():
                if isinstance(value, Node) and value.metadata.name == home:
                    self.fail("ended", f"pod {name} failed with {home}, which is there")
        elif after.metadata.uid in self._served and reason not in _OWN_ENDS:
            self.fail("ended", f"pod {name} served and failed: {reason} {after.status.message}")

    def _placed(self, before: Pod, after: Pod) -> None:
        """A device belongs to one pod until what that left there is forgotten."""
        if before.status.node_name or not after.status.node_name:
            return
        taken = {device.uuid for device in after.status.devices}
        for other in self.present():
            if not isinstance(other, Pod) or other.metadata.uid == after.metadata.uid:
                continue
            if holds_devices(other) and taken & {device.uuid for device in other.status.devices}:
                names = f"{after.metadata.name} and {other.metadata.name}"
                self.fail("doubled", f"{names} have a device of {after.status.node_name}")

    def _failure(self, value: AnyObject) -> None:
        found = getattr(value.status, "failure", None)
        if found is not None and not REASON.match(found.reason):
            self.fail("defect", f"{value.metadata.name} failed without a reason: {found}")
        if found is not None and found.reason == "Internal":
            self.fail("defect", f"{value.metadata.name} failed by a defect: {found}")

    def _verify(self, content: SnapshotContent) -> None:
        """What becomes visible is whole, and durable on the disk that all share."""
        committed = content.status.committed
        assert committed is not None
        problem = self.artifact_problem(content)
        # An older copy of the store may bring back what was deleted since, files and all.
        if problem and not (self._world.has_flipped_bits or self._world.is_rewound):
            self.fail("half", f"{content.metadata.name} was committed and is not whole: {problem}")

    def artifact_problem(self, content: SnapshotContent) -> str:
        """Say what is wrong with a committed artifact, or nothing."""
        import xxhash

        committed = content.status.committed
        assert committed is not None
        path = "/".join(
            artifact.generation_path(
                content.spec.source.namespace, content.artifact_uid, committed.generation
            )
        )
        try:
            data = self._world.read(f"{SHARED}/{path}/{artifact.ROOT_MANIFEST}")
            if digest(data) != committed.root_digest:
                return "the root manifest is another"
            root = decode_json(data, artifact.RootManifest)
            for part in root.parts:
                where = f"{SHARED}/{path}/{part.part}"
                data = self._world.read(f"{where}/{artifact.PART_MANIFEST}")
                if digest(data) != part.digest:
                    return f"the manifest of {part.part} is another"
                for entry in decode_json(data, artifact.PartManifest).files:
                    data = self._world.read(f"{where}/{entry.name}")
                    chunks = [
                        xxhash.xxh3_128_hexdigest(data[at : at + entry.chunk_bytes])
                        for at in range(0, len(data), entry.chunk_bytes)
                    ]
                    if len(data) != entry.size or chunks != list(entry.chunks):
                        return f"{part.part}/{entry.name} is damaged"
        except (OSError, InvalidMessage) as error:
            return str(error)
        return ""

    def contents(self) -> Iterator[SnapshotContent]:
        """Give the contents that are in the store, oldest first."""
        return (value for value in self.present() if isinstance(value, SnapshotContent))

    def _set_aside(self) -> Iterator[tuple[str, ...]]:
        """Give the paths of what lies in quarantine, from the label down to generations."""
        todo: list[tuple[str, ...]] = [()]
        while todo:
            path = todo.pop()
            try:
                inode = self._world.disk.os.find(
                    "/".join((str(SHARED), artifact.QUARANTINE, *path))
                )
            except OSError:
                continue
            found = self._world.disk.image[inode]
            if len(path) == GENERATION_DEPTH:
                yield path
            elif isinstance(found, dict):
                todo += [(*path, name) for name in found]

    def _quarantine(self) -> None:
        """What a content knows, or may yet write, is never moved away from it.

        An older copy of the store may bring one back whose artifact was moved after it had gone.
        """
        if self._world.is_rewound:
            return
        known = {content.artifact_uid: content for content in self.contents()}
        for _, namespace, uid, folder in self._set_aside():
            content = known.get(uid)
            if content is None or content.spec.source.namespace != namespace:
                continue
            number = int(folder.removeprefix("gen-"))
            is_over = content.status.capture in (Capture.READY, Capture.FAILED)
            imported = content.spec.source.artifact
            if imported is not None and self._world.settings.quarantine == "all":
                # An agent may have asked before the import was there, and moves it after that.
                continue
            may_write = imported is None and (number <= content.status.attempt or not is_over)
            if may_write or (imported is not None and imported.generation == number):
                self.fail("lost", f"{folder} of {content.metadata.name} was moved into quarantine")

    def _unknown_left(self) -> Iterator[tuple[Kind, str]]:
        """Nothing that nobody knows is ever removed, and what shall be moved is moved."""
        tree = self._world.disk.tree()
        set_aside = {
            "/".join(path.split("/")[4:]) for path in tree if f"/{artifact.QUARANTINE}/" in path
        }
        for path, is_moved in self._world.unknown.items():
            is_there = f"/shared/{path}" in tree
            if not is_there and path not in set_aside:
                yield "lost", f"{path} was nobody's, and is gone"
            elif is_there and is_moved:
                yield "leaked", f"{path} is nobody's, and was not moved into quarantine"
        for uid in self._gone if self._world.settings.quarantine == "incomplete" else ():
            seen = self._seen[uid]
            is_content = isinstance(seen, SnapshotContent) and not self._world.has_flipped_bits
            if is_content and (problem := self._retained_problem(seen)):
                yield "lost", f"{seen.metadata.name} was retained and is not whole: {problem}"

    def _retained_problem(self, content: SnapshotContent) -> str:
        is_retained = content.spec.deletion_policy == "Retain"
        is_artifact = content.status.committed is not None
        return self.artifact_problem(content) if is_retained and is_artifact else ""

    def look(self) -> None:
        """Look at what time may break: nobody is frozen for too long, or held by nobody."""
        if self._looked != self._world.disk.operations:
            self._looked = self._world.disk.operations
            self._quarantine()
        now = self._world.loop.now
        for worker in self._world.workers():
            process = worker.process
            if process.is_stopped and now - process.stopped_at > FROZEN_S:
                self.fail("frozen", f"{process} was frozen for {FROZEN_S} s")
        for node in self._world.nodes:
            if node.agent is not None and node.agent.is_alive:
                self._alone.pop(node.name, None)
                continue
            gone, since = self._alone.setdefault(node.name, (node.agent, now))
            if gone is not node.agent:
                # One has lived meanwhile, for less than the time between two looks.
                self._alone[node.name] = (node.agent, now)
                continue
            if now - since > RETURN_S / node.machine.rate + ALONE_S:
                self._free_of_agents(node)

    def _free_of_agents(self, node: SimNode) -> None:
        """An agent has been away for so long that its guards must have let everybody go."""
        for worker in node.workers.values():
            process = worker.process
            if process.is_alive and (process.is_stopped or process in self._held):
                self.fail("frozen", f"{process} is held although its agent is gone")

    # At the end.

    def unsettled(self, values: list[AnyObject]) -> list[str]:
        """Name what still has to happen."""
        found = []
        for value in values:
            name = f"{kind_of(value).name} {value.metadata.name}"
            if value.metadata.deletion_timestamp:
                found.append(f"{name} is being deleted")
            unanswered = [item for item in orders_of(value) if not is_answered(item)]
            forgotten = {item.verb for item in unanswered if self._is_forgotten(item)}
            found += [
                f"{name} awaits {item.order} attempt {item.attempt}"
                for item in unanswered
                if item.verb not in forgotten
            ]
            if owed := set(getattr(value.status, "obligations", ())) - forgotten:
                found.append(f"{name} owes {', '.join(sorted(owed))}")
            found += [f"{name}: {why}" for why in self._pending(value)]
        return found

    def _is_forgotten(self, item: OrderStatus) -> bool:
        """Whether the answer to an order may have been in the store that an older copy replaced.

        What cleans up is ordered again; the rest ends with its deadline, and stays unanswered.
        """
        is_over = item.verb not in CLEANING and fold.is_late(item, self._world.wall)
        return self._world.is_rewound and is_over

    def _pending(self, value: AnyObject) -> Iterator[str]:
        match value:
            case SnapshotContent():
                yield from _awaited(value.status)
            case DynamoCheckpoint() if value.status.phase not in ("Ready", "Failed"):
                yield value.status.phase
            case Snapshot() if not value.status.bytes and not _is_decided(value.status.conditions):
                yield "neither ready nor failed"
            case Pod():
                if value.status.phase == "Unknown":
                    yield "Unknown"
                # One without a node may wait for ever: nothing in the world can start it.
                if value.status.phase == "Pending" and value.status.node_name:
                    yield "Pending"
            case SnapshotRestore():
                yield from self._unrestored(value)

    def _unrestored(self, restore: SnapshotRestore) -> Iterator[str]:
        """Say what a restore waits for, unless its pod may wait for ever, too."""
        pod = self._seen.get(restore.spec.pod_ref.uid)
        if restore.status.state not in RESTORE.terminal() and not (
            restore.status.state is Restore.PENDING
            and isinstance(pod, Pod)
            and not pod.status.node_name
        ):
            yield restore.status.state

    def left_behind(self, values: list[AnyObject]) -> Iterator[tuple[Kind, str]]:
        """Name what must not be there once everything is settled.

        What a store has forgotten that was restored from an older copy is left to people.
        """
        if self._world.is_rewound:
            return
        pods = {value.metadata.uid: value for value in values if isinstance(value, Pod)}
        uids = {value.metadata.uid for value in values}
        for value in values:
            for owner in value.metadata.owner_references:
                if owner.uid not in uids:
                    name = f"{kind_of(value).name} {value.metadata.name}"
                    yield "leaked", f"{name} is left of {owner.kind} {owner.name}, which is gone"
        yield from self._workers_left(pods)
        yield from self._memory_left(pods)
        yield from self._descriptors_left()
        yield from self._artifacts_left(values)
        yield from self._unknown_left()
        retired = {node.name for node in self._world.nodes if node.is_retired}
        for name, journal in self.journals.items():
            if name.partition("@")[2] in retired:
                continue
            for entry in journal.ledger.unfinished():
                yield (
                    "lost",
                    f"{name}: {entry.order} attempt {entry.attempt} was accepted and has no end",
                )

    def _workers_left(self, pods: dict[str, Pod]) -> Iterator[tuple[Kind, str]]:
        for worker in self._world.workers():
            pod = pods.get(worker.pod)
            if worker.process.is_stopped:
                yield "frozen", f"{worker.process} is frozen"
            elif pod is None or pod.status.phase not in ("Running", "Pending"):
                yield "leaked", f"{worker.process} of pod {pod and pod.status.phase} runs"
            elif not worker.serves and not worker.habits.never_quiet:
                yield "frozen", f"{worker.process} of pod {pod.metadata.name} does not serve"
        for pod in pods.values():
            lives = any(worker.pod == pod.metadata.uid for worker in self._world.workers())
            if pod.status.phase == "Running" and not lives:
                yield "lost", f"pod {pod.metadata.name} is Running without a process"

    def _descriptors_left(self) -> Iterator[tuple[Kind, str]]:
        """Nothing is open but the journals of the services and their locks."""
        for node in self._world.nodes:
            for process in node.running:
                names = self._open_names(process)
                if names - {"journal", "lock"}:
                    yield "leaked", f"{process} has {', '.join(sorted(names))} open"

    def _open_names(self, process: Process) -> set[str]:
        disk = self._world.disk
        found = disk.os.opened_by(disk_owner(process))
        return {name for inode in found for name in disk.names_of(inode) or ("a removed file",)}

    def _memory_left(self, pods: dict[str, Pod]) -> Iterator[tuple[Kind, str]]:
        used = {
            device.uuid
            for pod in pods.values()
            if pod.status.phase == "Running"
            for device in pod.status.devices
        }
        for node in self._world.nodes:
            for device in node.gms.devices if node.gms and node.machine.is_on else ():
                state = node.gms.gms.table.devices[device.info.uuid]  # type: ignore[union-attr]
                if node.gms.gms.table.fences.on(device.info.uuid):  # type: ignore[union-attr]
                    yield "leaked", f"{device.info.uuid} is fenced"
                if device.info.uuid not in used and (device.used or state.hidden):
                    yield "leaked", f"{device.info.uuid} keeps {device.used} bytes that nobody uses"

    def _artifacts_left(self, values: list[AnyObject]) -> Iterator[tuple[Kind, str]]:
        contents = {
            value.metadata.uid: value for value in values if isinstance(value, SnapshotContent)
        }
        for content in contents.values():
            if content.status.committed is None or self._world.has_flipped_bits:
                continue
            if problem := self.artifact_problem(content):
                yield "half", f"{content.metadata.name} is not whole any more: {problem}"
        for uid, seen in self._seen.items():
            if not isinstance(seen, SnapshotContent) or uid in contents:
                continue
            if seen.spec.deletion_policy == "Delete":
                # An empty folder that a power loss brings back is no artifact.
                where = f"/shared/{seen.spec.source.namespace}/{uid}/"
                tree = self._world.disk.tree()
                if any(path.startswith(where) and content for path, content in tree.items()):
                    yield "leaked", f"{seen.metadata.name} is deleted and its files are left"


def _shown(value: AnyObject) -> str:
    """Give what of an object is worth a line in the diary."""
    status: Any = value.status
    words = [kind_of(value).name, value.metadata.name.replace("snapshotcontent-", "")[:24]]
    words += [
        str(getattr(status, name))
        for name in ("phase", "node_name", "capture", "state")
        if getattr(status, name, "")
    ]
    if value.metadata.deletion_timestamp:
        words.append("deleting")
    words += [f"{item.order[:12]}/{item.attempt}={item.state}" for item in orders_of(value)]
    if owed := getattr(status, "obligations", None):
        words.append(f"owes={','.join(owed)}")
    if failure := getattr(status, "failure", None):
        words.append(failure.reason)
    return " ".join(words)


def _leads(table: Any, before: Any, after: Any) -> bool:
    """Say whether one write may take this way: at most a few events at once."""
    reached, seen = {before}, set()
    while reached - seen:
        state = (reached - seen).pop()
        seen.add(state)
        reached |= {target for (source, _), target in table.rows.items() if source is state}
    return after in reached


def _awaited(status: SnapshotContentStatus) -> Iterator[str]:
    if status.capture not in (Capture.READY, Capture.FAILED):
        yield status.capture
    if status.verified < status.verifications:
        yield "is to be verified"


def _is_decided(conditions: Any) -> bool:
    return any(is_true(conditions, kind) for kind in ("Ready", "Failed", "ReadyToUse"))


def _deleted_in(ledger: Ledger) -> set[str]:
    """Return the uids of the contents whose artifact a node has deleted."""
    return {
        owner_of(OrderId(entry.order))
        for entry in ledger.entries.values()
        if entry.terminal is not None and entry.terminal.kind == "deleted"
    }
