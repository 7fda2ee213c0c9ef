"""Orders about artifacts alone: `seal`, `delete`, `verify`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import get_args

from snapshot_agent.domain.sealing import check_part, check_plan, check_proven, root_manifest
from snapshot_agent.ports import GenerationRef, Machine, Orders
from snapshot_shared.artifact import PartManifest, RootManifest, RootPart
from snapshot_shared.courier import OrderContext, Result
from snapshot_shared.errors import ArtifactError
from snapshot_shared.ids import Uid, order_id
from snapshot_shared.orders import (
    ArtifactRef,
    DeleteOrder,
    Driver,
    PartResult,
    Proven,
    SealOrder,
    VectorEntry,
    VerifyOrder,
)
from snapshot_shared.runner import Step


class Artifacts:
    """The orders `seal`, `delete` and `verify`."""

    def __init__(self, machine: Machine, orders: Orders, slots: asyncio.Semaphore) -> None:
        """Read at most as many artifacts at a time as `slots` allows."""
        self._machine = machine
        self._orders = orders
        self._slots = slots

    async def seal(self, order: SealOrder, ctx: OrderContext) -> Result:
        """Check every part of the plan and write the root manifest last."""
        place = GenerationRef(order.namespace, order.content_uid, order.attempt)
        parts: list[tuple[PartManifest, str]] = []
        sealed: dict[str, object] = {}

        async def check() -> None:
            self._orders.require_current(f"capture-{order.content_uid}", order.attempt)
            check_plan(order, await self._machine.artifacts.parts(place))
            for result in order.parts:
                manifest, digest = await self._machine.artifacts.read_part(place, result.part)
                parts.append((check_part(order, result, manifest, digest), digest))

        async def write_root() -> None:
            # Checked again: an abort may have arrived while the parts were read.
            self._orders.require_current(f"capture-{order.content_uid}", order.attempt)
            root = root_manifest(order, parts)
            sealed["root_digest"] = await self._machine.artifacts.seal(root)
            sealed["bytes"] = root.bytes

        table = [Step("check-parts", check, 60.0), Step("write-root", write_root, 60.0)]
        await ctx.steps("seal", table)
        return sealed

    async def delete(self, order: DeleteOrder, ctx: OrderContext) -> Result:
        """Remove exactly the generation that is named."""
        content = Uid(order.content_uid)

        async def tombstone() -> None:
            await self._orders.tombstone(f"capture-{content}", order.generation)

        async def remove() -> None:
            for verb in ("dump", "seal"):
                await self._orders.cancel(order_id(verb, content), order.generation)
            place = GenerationRef(order.namespace, order.content_uid, order.generation)
            await self._machine.artifacts.remove(place)

        table = [Step("tombstone", tombstone, 10.0), Step("remove", remove, order.deadline_s)]
        await ctx.steps("delete", table)
        return {}

    async def verify(self, order: VerifyOrder, ctx: OrderContext) -> Result:
        """Read every byte of an artifact."""
        counted = 0
        proven: Proven | None = None

        async def read_all() -> None:
            nonlocal counted, proven
            ref = order.artifact
            root = await self._machine.artifacts.read_root(ref)
            for manifest in await proven_parts(self._machine, ref, root):
                before = counted

                async def report(done: int, name: str = manifest.part, base: int = before) -> None:
                    await ctx.progress(name, "read-all", base + done, root.bytes)

                place = GenerationRef(ref.namespace, ref.content_uid, ref.generation)
                with naming(manifest.part):
                    await self._machine.artifacts.check_bytes(place, manifest, report)
                counted += manifest.bytes
            proven = proven_by(root)

        async with self._slots:
            await ctx.steps("verify", [Step("read-all", read_all, order.deadline_s)])
        return {"bytes": counted, "proven": proven}


@contextlib.contextmanager
def naming(part: str) -> Iterator[None]:
    """Add the name of the part to errors about the artifact."""
    try:
        yield
    except ArtifactError as error:
        error.values.setdefault("part", part)
        raise


def proven_by(root: RootManifest) -> Proven:
    """Return what an operator without a record of the artifact needs to restore from it."""
    known: tuple[Driver, ...] = get_args(Driver)
    return Proven(
        bytes=root.bytes,
        parts=[PartResult(part=row.part, bytes=row.bytes, digest=row.digest) for row in root.parts],
        vector=[
            VectorEntry(part=row.part, ordinal=_ordinal(row), layout=row.layout)
            for row in root.parts
        ],
        # Artifacts that name no known driver are older than the field.
        driver=next((driver for driver in known if driver == root.facts.driver), "cooperative"),
    )


def _ordinal(row: RootPart) -> int | None:
    """Return the ordinal of the device whose memory a part holds."""
    return None if row.kind == "process" else int(row.part.removeprefix("gpu-"))


async def proven_parts(
    machine: Machine, ref: ArtifactRef, root: RootManifest
) -> list[PartManifest]:
    """Read all part manifests of an artifact; each must be the one that the root proves."""
    place = GenerationRef(ref.namespace, ref.content_uid, ref.generation)
    found: list[PartManifest] = []
    for row in root.parts:
        with naming(row.part):
            manifest, digest = await machine.artifacts.read_part(place, row.part)
            check_proven(root, row, manifest, digest)
        found.append(manifest)
    return found
