"""The command bundle: collect what a bug report needs, whatever of it can be had."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any

from snapshot_shared.errors import SnapbackError
from snapshot_shared.objects import KINDS
from snapshot_shared.redaction import redacted
from snapshotctl.domain import bundle, doctor, formats, queue
from snapshotctl.domain.bundle import Member, Missing
from snapshotctl.domain.doctor import Observed
from snapshotctl.ports import OnCall, Screen

SPANS = 5000
"""How many of the newest spans are taken."""


class Collection:
    """What was taken, what could not be, and the secrets that no file may show."""

    def __init__(self) -> None:
        """Begin empty."""
        self.members: list[Member] = []
        self.missing: list[Missing] = []
        self._secrets: frozenset[str] = frozenset()

    def add(self, name: str, value: Any) -> None:
        """Take a value, without the values of environment variables."""
        plain = formats.data(value)
        self._secrets |= bundle.secrets_in(plain)
        self.members.append(bundle.as_json(name, redacted(plain)))

    def add_text(self, name: str, data: bytes) -> None:
        """Take a text as it is."""
        self.members.append(Member(name, data))

    async def take(self, name: str, answer: Awaitable[Any]) -> None:
        """Take what an answer brings, or remember why it did not come."""
        try:
            self.add(name, await answer)
        except SnapbackError as error:
            self.missing.append(Missing(name, str(error.to_failure())))

    def files(self, version: str) -> list[Member]:
        """Give everything with its secrets taken out, a list of contents first."""
        found = [Member(m.name, bundle.scrubbed(m.data, self._secrets)) for m in self.members]
        readme = bundle.contents(found, self.missing, version)
        return [Member(readme.name, bundle.scrubbed(readme.data, self._secrets)), *found]


def add_findings(collection: Collection, seen: Observed) -> None:
    """Take what the doctor says, and what it looked at on the bus."""
    found = doctor.examine(seen)
    collection.add("doctor.json", found)
    text = "\n".join([*map(doctor.line, found), doctor.summary(found), ""])
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


async def add_cluster(collection: Collection, operator: OnCall, *, last: int) -> None:
    """Take all objects, orders, dead letters, the last reports and the newest spans."""
    for kind in KINDS.values():
        await collection.take(f"objects/{kind.plural}.json", operator.all_of(kind, None))

    async def orders() -> list[dict[str, Any]]:
        return [
            {"subject": m.subject, "sequence": m.sequence, "at": m.at}
            | {"payload": queue.readable(m.payload)}
            for m in await operator.queued(None)
        ]

    async def letters() -> list[dict[str, Any]]:
        return [queue.shown_letter(letter) for letter in await operator.letters(None)]

    async def reports() -> list[Any]:
        return (await operator.reports())[-last:] if last else []

    async def spans() -> list[Any]:
        return (await operator.all_spans())[-SPANS:]

    await collection.take("orders.json", orders())
    await collection.take("reports.json", reports())
    await collection.take("progress.json", operator.progress_now(None))
    await collection.take("dead-letters.json", letters())
    await collection.take("spans.json", spans())


def show(
    screen: Screen, path: str, size: int, files: Sequence[Member], missing: Sequence[Missing]
) -> None:
    """Say what was written, and what could not be taken."""
    if not screen.wants_table:
        members = [{"name": file.name, "bytes": len(file.data)} for file in files]
        lacks = [found._asdict() for found in missing]
        screen.value({"file": path, "bytes": size, "members": members, "missing": lacks})
        return
    for file in files:
        screen.line(f"  {formats.size(len(file.data)):>8}  {file.name}")
    for found in missing:
        screen.line(f"   missing  {found.what}: {formats.plain(found.why)}")
    screen.line(f"{path} ({formats.size(size)}) is written; look into it before you send it.")
