"""The rules that hold after any fault, as questions to real objects, reports, files and processes.

Each gives what breaks it, one line a violation; nothing means that the rule holds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from snapshot_agent.adapters.artifacts import ArtifactRoot
from snapshot_agent.domain.control import CONTROL_DIR, QUIESCE
from snapshot_agent.domain.sealing import check_proven
from snapshot_agent.ports import GenerationRef
from snapshot_api.facts import Pod
from snapshot_api.kinds import AnyObject, kind_of
from snapshot_api.meta import condition, is_true
from snapshot_api.v1alpha1.checkpoint import DynamoCheckpoint
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.v1alpha1.restore import SnapshotRestore
from snapshot_api.v1alpha1.snapshot import Snapshot
from snapshot_api.views import with_columns
from snapshot_shared.artifact import ROOT_MANIFEST
from snapshot_shared.codec import digest
from snapshot_shared.errors import SnapbackError
from snapshot_shared.orders import ArtifactRef, Report
from snapshot_shared.transitions import Capture, Restore
from snapshotctl.adapters import processes
from tests.support.agent_rig import state_of

WORKER = "worker.py"


def unsettled(values: Iterable[AnyObject]) -> list[str]:
    """Name the objects that are neither Ready nor Failed with a reason, or still owe something."""
    found = ((value, _why_unsettled(value) or _wrong_columns(value)) for value in values)
    return [f"{_named(value)}: {why}" for value, why in found if why]


def _wrong_columns(value: AnyObject) -> str:
    """Return what kubectl shows of an object that is not what snapshotctl shows."""
    shown = with_columns(value).status
    return "" if shown == value.status else f"has columns of {value.status}, not of {shown}"


def _named(value: AnyObject) -> str:
    return f"{kind_of(value).name} {value.metadata.name}"


def _why_unsettled(value: AnyObject) -> str:
    if value.metadata.deletion_timestamp:
        return f"is being deleted, owes {getattr(value.status, 'obligations', [])}"
    match value:
        case DynamoCheckpoint():
            if value.status.phase not in ("Ready", "Failed"):
                return f"phase {value.status.phase}"
            return _without_reason(value)
        case Snapshot():
            return _without_reason(value)
        case SnapshotContent():
            return _content_unsettled(value)
        case Pod():
            return _pod_unsettled(value)
        case SnapshotRestore():
            return _restore_unsettled(value)
        case _:
            return ""


def _content_unsettled(content: SnapshotContent) -> str:
    status = content.status
    if status.capture not in (Capture.READY, Capture.FAILED):
        return f"capture {status.capture}"
    if status.verified < status.verifications:
        return "is to be verified"
    if status.committed is not None and status.generations != [status.committed.generation]:
        return f"keeps the generations {status.generations}"
    return _owing(content) or _without_reason(content)


def _restore_unsettled(restore: SnapshotRestore) -> str:
    status = restore.status
    if status.state in (Restore.RESTORED, Restore.FAILED):
        return _owing(restore)
    orders = ", ".join(f"{item.order}/{item.attempt} {item.state}" for item in status.orders)
    return f"restore {status.state}: {orders}"


def _pod_unsettled(pod: Pod) -> str:
    status = pod.status
    if status.phase == "Failed" and not status.reason:
        return "failed without a reason"
    if status.phase == "Running" and not is_true(status.conditions, "Ready"):
        return "runs and is not ready"
    if status.phase == "Pending":
        return "pending"
    return _owing(pod)


def _owing(value: Any) -> str:
    return f"owes {value.status.obligations}" if value.status.obligations else ""


def _without_reason(value: Any) -> str:
    rows = value.status.conditions
    ended = next((t for t in ("Ready", "Failed") if is_true(rows, t)), None)
    if ended is None:
        return "neither Ready nor Failed"
    found = condition(rows, ended)
    return "" if found is not None and found.reason else f"{ended} without a reason"


def doubled(reports: Iterable[Report]) -> list[str]:
    """Name the (order, attempt) that have more than one distinct terminal value.

    A copy of a report is no second value, whenever it was sent.
    """
    values: dict[tuple[str, int], set[tuple[object, ...]]] = defaultdict(set)
    for report in reports:
        if report.is_terminal and not names_a_newer_attempt(report):
            values[report.order, report.attempt].add(_value(report))
    return [
        f"{order}, attempt {attempt}: {sorted(map(str, found))}"
        for (order, attempt), found in values.items()
        if len(found) > 1
    ]


def names_a_newer_attempt(report: Report) -> bool:
    """Return whether a report ends nothing and only answers an order that has been overtaken.

    The same attempt of an order may have been given for another artifact, before the store of the
    operator was restored from a backup.
    """
    failure = report.failure
    if report.kind != "rejected" or failure is None or failure.reason != "Superseded":
        return False
    number = int(failure.values.get("attempt", 0))
    return number > report.attempt or "known" in failure.values


def _value(report: Report) -> tuple[object, ...]:
    reason = report.failure.reason if report.failure else ""
    part = (report.part.part, report.part.digest) if report.part else ()
    return (report.kind, reason, part, report.root_digest, str(report.vector), report.generation)


async def damaged(root: Path, values: Iterable[AnyObject]) -> list[str]:
    """Read every artifact whole: each is as its root manifest and the object store say.

    A generation that nobody can use, because its capture failed or its content is gone, must not
    be there at all.
    """
    contents = {v.metadata.uid: v for v in values if isinstance(v, SnapshotContent)}
    found: list[str] = []
    seen: set[tuple[str, int]] = set()
    for place in _generations(root):
        content = contents.get(place.content_uid)
        committed = content.status.committed if content is not None else None
        if committed is None or committed.generation != place.generation:
            found.append(f"{place} was left behind")
            continue
        seen.add((place.content_uid, place.generation))
        try:
            if await _read_whole(root, place) != committed.root_digest:
                found.append(f"{place} is not what was committed")
        except (SnapbackError, OSError) as error:
            found.append(f"{place}: {error}")
    for uid, content in contents.items():
        wanted = content.status.committed
        if wanted is not None and (uid, wanted.generation) not in seen:
            found.append(f"{_named(content)} is Ready and has no artifact")
    return found


def _generations(root: Path) -> Iterator[GenerationRef]:
    for folder in sorted(root.glob("*/*/gen-*")):
        uid, generation = folder.parent.name, int(folder.name.removeprefix("gen-"))
        yield GenerationRef(folder.parent.parent.name, uid, generation)


async def _read_whole(root: Path, place: GenerationRef) -> str:
    artifacts = ArtifactRoot(root)
    path = root / place.namespace / place.content_uid / f"gen-{place.generation}" / ROOT_MANIFEST
    root_digest = digest(path.read_bytes())
    ref = ArtifactRef(**place._asdict(), root_digest=root_digest)
    manifest = await artifacts.read_root(ref)
    for row in manifest.parts:
        part, part_digest = await artifacts.read_part(place, row.part)
        check_proven(manifest, row, part, part_digest)
        await artifacts.check_bytes(place, part, _quietly)
    return root_digest


async def _quietly(_done: int) -> None:
    """Take progress that nobody looks at."""


def workers(run: str) -> dict[int, str]:
    """Give the worker processes of a run: pid to the uid of the pod."""
    return {
        member.pid: processes.environment_of(member.pid).get("POD_UID", "")
        for member in processes.members(run)
        if WORKER in member.command
    }


def frozen(run: str) -> list[str]:
    """Name the processes of a run that are stopped."""
    return [
        f"process {member.pid} is stopped: {member.command}"
        for member in processes.members(run)
        if state_of(member.pid) == "T"
    ]


def held(run: str) -> list[str]:
    """Name the workers that a capture still asks to be quiet."""
    return [
        f"worker {pid} of pod {uid}"
        for pid, uid in workers(run).items()
        if (Path(processes.environment_of(pid).get(CONTROL_DIR, "")) / QUIESCE).exists()
    ]
