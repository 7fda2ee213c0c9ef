"""The command bundle: collect what a bug report needs, as far as it can be read."""

from __future__ import annotations

import os
from collections.abc import Awaitable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from snapshot_api.kinds import KINDS
from snapshot_api.redaction import redacted
from snapshot_shared.errors import SnapbackError
from snapshotctl.adapters import archive
from snapshotctl.command import command, new_app
from snapshotctl.domain import bundle_files, formats
from snapshotctl.domain.bundle_files import BundleFile, Missing
from snapshotctl.domain.cluster import ClusterPaths
from snapshotctl.ports import Operator
from snapshotctl.tools import Tools
from snapshotctl.views import finding, findings, queue
from snapshotctl.views.findings import Observed

MAX_SPANS = 5000
"""How many of the newest spans are taken."""

app = new_app()


@command(app, "snapshotctl bundle", "snapshotctl bundle --file report.tar.gz --reports 2000")
async def bundle(
    tools: Tools,
    file: Annotated[
        str | None, typer.Option("--file", "-f", metavar="FILE.tar.gz", help="Where it goes.")
    ] = None,
    reports: Annotated[
        int, typer.Option("--reports", metavar="N", min=0, help="How many of the last reports.")
    ] = 500,
) -> None:
    """Collect what a bug report needs into one archive.

    Versions, the doctor's findings, all objects, nodes, orders, reports, dead letters, traces,
    settings, and the ends of a local cluster's logs. Values of environment variables, keys and
    passwords are taken out. What cannot be had is named, and the rest is taken.
    """
    now = tools.now()
    stamp = datetime.fromtimestamp(now, UTC).strftime("%Y%m%dT%H%M%SZ")
    path = Path(bundle_files.file_name(file, stamp))
    collection = Collection()
    seen = await tools.observe()
    collection.add("versions.json", archive.versions())
    collection.add("settings.json", bundle_files.settings(os.environ))
    _add_findings(collection, seen)
    if seen.unreachable is None:
        async with tools.operator() as operator:
            await _add_cluster(collection, operator, last=reports)
    else:
        collection.missing.append(Missing("everything of the cluster", seen.unreachable.message))
    if record := tools.local_record(seen.local.cluster):
        collection.add("cluster.json", record)
        for name, data in archive.log_ends(ClusterPaths(Path(record.state_dir), Path()).logs):
            collection.add_text(name, data)
    files = collection.files(seen.version)
    _show(tools, path, archive.write(path, files, now=now), files, collection.missing)


class Collection:
    """What was taken, what could not be, and the secrets that no file may show."""

    def __init__(self) -> None:
        """Begin empty."""
        self.members: list[BundleFile] = []
        self.missing: list[Missing] = []
        self._secrets: frozenset[str] = frozenset()

    def add(self, name: str, value: Any) -> None:
        """Take a value, without the values of environment variables."""
        plain = formats.data(value)
        self._secrets |= bundle_files.secrets_in(plain)
        self.members.append(bundle_files.as_json(name, redacted(plain)))

    def add_text(self, name: str, data: bytes) -> None:
        """Take a text as it is."""
        self.members.append(BundleFile(name, data))

    async def take(self, name: str, answer: Awaitable[Any]) -> None:
        """Take an answer, or the reason why it did not come."""
        try:
            self.add(name, await answer)
        except SnapbackError as error:
            self.missing.append(Missing(name, str(error.to_failure())))

    def files(self, version: str) -> list[BundleFile]:
        """Return everything without its secrets, a list of contents first."""
        # Only now: the object that shows a secret may come after the log that holds it.
        found = [
            BundleFile(m.name, bundle_files.scrubbed(m.data, self._secrets)) for m in self.members
        ]
        readme = bundle_files.contents(found, self.missing, version)
        return [BundleFile(readme.name, bundle_files.scrubbed(readme.data, self._secrets)), *found]


def _add_findings(collection: Collection, seen: Observed) -> None:
    """Take the doctor's findings, and the streams and nodes that they are about."""
    found = findings.examine(seen)
    collection.add("doctor.json", found)
    text = "\n".join([*map(finding.line, found), finding.summary(found), ""])
    collection.add_text("doctor.txt", text.encode())
    if seen.cluster is None:
        return
    collection.add("streams.json", [stream._asdict() for stream in seen.cluster.streams])
    collection.add(
        "nodes.json",
        [
            {"name": node.name, "presence": node.presence, "skewS": node.skew_s, "gms": node.gms}
            for node in seen.cluster.nodes
        ],
    )


async def _add_cluster(collection: Collection, operator: Operator, *, last: int) -> None:
    """Take all objects, orders, dead letters, the last reports and the newest spans."""
    for kind in KINDS.values():
        await collection.take(f"objects/{kind.plural}.json", operator.all_of(kind, None))

    async def orders() -> list[dict[str, Any]]:
        return [
            {"subject": m.subject, "sequence": m.sequence, "at": m.at}
            | {"payload": queue.readable(m.payload)}
            for m in await operator.queued(None)
        ]

    async def dead() -> list[dict[str, Any]]:
        return [queue.dead_value(message) for message in await operator.dead(None)]

    async def reports() -> list[Any]:
        return (await operator.reports())[-last:] if last else []

    async def spans() -> list[Any]:
        return (await operator.all_spans())[-MAX_SPANS:]

    await collection.take("orders.json", orders())
    await collection.take("reports.json", reports())
    await collection.take("progress.json", operator.progress_now(None))
    await collection.take("dead.json", dead())
    await collection.take("spans.json", spans())


def _show(
    tools: Tools, path: Path, size: int, files: list[BundleFile], missing: list[Missing]
) -> None:
    screen = tools.screen
    if not screen.wants_table:
        members = [{"name": file.name, "bytes": len(file.data)} for file in files]
        lacks = [found._asdict() for found in missing]
        screen.value({"file": str(path), "bytes": size, "members": members, "missing": lacks})
        return
    for file in files:
        screen.line(f"  {formats.size(len(file.data)):>8}  {file.name}")
    for found in missing:
        screen.line(f"   missing  {found.what}: {formats.plain(found.why)}")
    screen.line(f"{path} ({formats.size(size)}) is written; look into it before you send it.")
