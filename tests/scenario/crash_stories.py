"""What the product does on a disk: journals, captures, removals."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec

from gms.adapters.staging import Staging
from gms.domain.tasks import SaveTask
from gms.transfer_child.save import saved_before, write_part
from snapback_client.frames import AllocationInfo, MetadataItem
from snapshot_agent.adapters.artifacts import ArtifactRoot
from snapshot_agent.adapters.copying import ByteCounter, copied
from snapshot_agent.adapters.library import ArtifactLibrary
from snapshot_agent.domain.sealing import check_part, check_plan, root_manifest
from snapshot_agent.handlers.artifacts import proven_parts
from snapshot_agent.ports import GenerationRef
from snapshot_shared import files, ledger, orders
from snapshot_shared.artifact import QUARANTINE, ROOT_MANIFEST, Facts, PartManifest
from snapshot_shared.codec import MAX_MANIFEST_BYTES, digest, encode_json
from snapshot_shared.errors import SnapbackError
from snapshot_shared.journal import KEEP_S, Journal
from snapshot_shared.stripes import StripeRoots
from tests.scenario.crash_rig import Story, run
from tests.support import builders

NOW = 2_000_000_000.0
UID = builders.UID
BASE = Path("/sim/nodes")
STATE_FILES = {"empty": b"", "small.json": b"{}" * 50, "weights": bytes(range(256)) * 36}
INFOS = [
    AllocationInfo(id="w0", size=5000, aligned=8192, tag="", slot=0),
    AllocationInfo(id="w1", size=9000, aligned=12288, tag="", slot=1),
]
MEMORY = [memoryview(bytearray(range(len(info.id), 256)) * 40)[: info.size] for info in INFOS]
SHARDS = {"shard-0000.bin": 5000, "shard-0001.bin": 8192, "shard-0002.bin": 808}
"""What a save writes, in bytes; each is one chunk."""
LAYOUT = builders.layout(bytes=14000)
VECTOR = [
    orders.VectorEntry(part="process"),
    orders.VectorEntry(part="gpu-0", ordinal=0, layout=LAYOUT),
]

_DECODER: msgspec.json.Decoder[ledger.Record] = msgspec.json.Decoder(ledger.Record)


async def _nobody_asks(done: int) -> None:
    pass


class Capture(Story):
    """Stage a process part and a part of GPU memory, seal, and remove again."""

    name = "capture"
    steps = ("stage_process", "stage_gpu", "seal", "remove")
    generation = 1

    def __init__(self, base: Path = BASE) -> None:
        super().__init__()
        self.base = base
        self.artifacts = base / "artifacts"
        self.state = base / "state"
        self.root = ArtifactRoot(self.artifacts)
        self.place = GenerationRef("default", UID, self.generation)
        self.results: dict[str, orders.PartResult] = {}
        self.moved = 0

    def prepare(self) -> None:
        with files.opened(files.open_root(self.state, create=True)) as folder:
            for name, data in STATE_FILES.items():
                files.write_new(folder, name, data)

    def sealed(self) -> Capture:
        """Do everything but the removal, and return the story itself."""
        self.prepare()
        for step in ("stage_process", "stage_gpu", "seal"):
            getattr(self, step)()
        return self

    def stage_process(self) -> None:
        manifest, found = run(self._staged_process())
        self._promise_part("process", manifest.bytes, found)

    async def _staged_process(self) -> tuple[PartManifest, str]:
        with files.opened(files.open_root(self.state)) as state:
            async with self.root.new_part(self.place, "process") as part:
                entries = await copied(state, part, ByteCounter(_nobody_asks))
                manifest = PartManifest(
                    kind="process",
                    part="process",
                    namespace="default",
                    content_uid=UID,
                    generation=self.generation,
                    order=f"dump-{UID}",
                    bytes=sum(entry.size for entry in entries),
                    files=entries,
                    vector=VECTOR,
                    facts=Facts(driver="cooperative"),
                )
                return manifest, await self.root.finish_part(part, manifest)

    def stage_gpu(self) -> None:
        task = self.task()
        with files.opened(files.open_root(task.root, create=True)) as root:
            done = saved_before(root, task)
            if done is None:
                items = [MetadataItem(key="k", allocation="w1", offset=0, value=b"v")]
                done = write_part(root, task, INFOS, items, MEMORY, lambda _: None)
            self.moved = done.moved
        self._promise_part("gpu-0", done.bytes, done.digest)

    def task(self) -> SaveTask:
        return builders.save_task(
            root=str(self.artifacts),
            generation=self.generation,
            threads=1,
            layout=LAYOUT,
            shard_bytes=8192,
        )

    def _promise_part(self, part: str, size: int, found: str) -> None:
        self.results[part] = orders.PartResult(part=part, bytes=size, digest=found)
        self.promises[f"staged {part}"] = found

    def seal(self) -> None:
        self.promises["sealed"] = run(self._sealed())

    async def _sealed(self) -> str:
        order = orders.SealOrder(
            order=f"seal-{UID}",
            attempt=self.generation,
            node="node-1",
            owner=UID,
            deadline_s=60.0,
            namespace="default",
            content_uid=UID,
            pod=orders.PodRef(namespace="default", name="llm", uid=UID),
            vector=VECTOR,
            parts=list(self.results.values()),
        )
        check_plan(order, await self.root.parts(self.place))
        parts = []
        for result in order.parts:
            manifest, found = await self.root.read_part(self.place, result.part)
            parts.append((check_part(order, result, manifest, found), found))
        return await self.root.seal(root_manifest(order, parts))

    def remove(self) -> None:
        self.promises = {"removing": True}
        run(self.root.remove(self.place))
        self.promises = {"removed": True}

    def check(self, promises: dict[str, Any]) -> None:
        self.check_generation(promises)
        run(self.root.remove(self.place))
        assert not files.os.path.exists(self.where()), "the generation cannot be removed"
        again = type(self)(self.base)
        again.place = GenerationRef("default", UID, self.generation + 1)
        again.generation += 1
        again.stage_process()

    def check_generation(self, promises: dict[str, Any]) -> None:
        """Check the generation of this story before anything is recovered."""
        if found := visible(self.artifacts, self.place):
            verify(self.root, self.place, found)
        if not {"staged gpu-0", "removing", "removed"} & set(promises):
            promises = {**promises, **self._save_again()}
        for part in ("process", "gpu-0"):
            if wanted := promises.get(f"staged {part}"):
                manifest, found = run(self.root.read_part(self.place, part))
                assert found == wanted, f"{part} is another one than was staged"
                run(self.root.check_bytes(self.place, manifest, _nobody_asks))
        if "staged process" in promises and "staged gpu-0" in promises:
            self._check_seal_again(promises)
        if "removed" in promises:
            assert not files.os.path.exists(self.where()), "what was removed is back"

    def where(self) -> Path:
        return self.artifacts / "default" / UID / f"gen-{self.generation}"

    def _save_again(self) -> dict[str, Any]:
        """Repeat the save, as when its order is delivered again; a refusal promises nothing."""
        again = type(self)(self.base)
        with contextlib.suppress(SnapbackError):
            again.stage_gpu()
        return again.promises

    def _check_seal_again(self, promises: dict[str, Any]) -> None:
        wanted = promises.get("sealed")
        if wanted is not None:
            verify(self.root, self.place, wanted)
        again = type(self)(self.base)
        for part in ("process", "gpu-0"):
            manifest, found = run(self.root.read_part(self.place, part))
            again._promise_part(part, manifest.bytes, found)
        again.seal()
        assert wanted in (None, again.promises["sealed"]), "sealed twice, differently"
        verify(self.root, self.place, again.promises["sealed"])


class SecondCapture(Capture):
    """The same beside an older artifact, which stays whole."""

    name = "second capture"
    generation = 2

    def prepare(self) -> None:
        Capture(self.base).sealed()

    def check_generation(self, promises: dict[str, Any]) -> None:
        older = GenerationRef("default", UID, 1)
        found = visible(self.artifacts, older)
        assert found is not None, "the older artifact is gone"
        verify(self.root, older, found)
        super().check_generation(promises)


class StripedCapture(Capture):
    """The same with files of GPU memory in two stripe roots, in which nothing stays.

    The process part, which is in no stripe, is there already.
    """

    name = "striped capture"
    steps = ("stage_gpu", "seal", "remove")

    def __init__(self, base: Path = BASE) -> None:
        super().__init__(base)
        self.stripes = {name: str(base / name) for name in ("one", "two")}
        self.root = ArtifactRoot(self.artifacts, stripes=StripeRoots(self.stripes))

    def prepare(self) -> None:
        super().prepare()
        self.stage_process()
        for folder in self.stripes.values():
            files.make_folder(folder)

    def task(self) -> SaveTask:
        return msgspec.structs.replace(
            super().task(), shard_bytes=4096, stripe_roots=self.stripes, note_bytes=1
        )

    def stage_gpu(self) -> None:
        super().stage_gpu()
        self._check_spread()

    def _check_spread(self) -> None:
        for folder in self.stripes.values():
            assert files.os.path.exists(f"{folder}/default/{UID}/gen-{self.generation}/gpu-0")

    def check_generation(self, promises: dict[str, Any]) -> None:
        super().check_generation(promises)
        run(self.root.remove(self.place))
        for folder in self.stripes.values():
            left = f"{folder}/default/{UID}/gen-{self.generation}"
            assert not files.os.path.exists(left), "something is left in a stripe root"


class ResumedSave(Capture):
    """Save GPU memory with a note after each chunk: what is noted is never written again."""

    name = "resumed save"
    steps = ("stage_gpu",)

    def __init__(self, base: Path = BASE) -> None:
        super().__init__(base)
        self.promises["noted"] = 0

    def task(self) -> SaveTask:
        return msgspec.structs.replace(super().task(), note_bytes=1)

    def stage_gpu(self) -> None:
        note = Staging.note

        def promising(staging: Staging, chunks: Sequence[tuple[str, int, str]]) -> None:
            note(staging, chunks)
            self.promises["noted"] += sum(SHARDS[name] for name, _, _ in chunks)

        with patch.object(Staging, "note", promising):
            super().stage_gpu()

    def check(self, promises: dict[str, Any]) -> None:
        again = type(self)(self.base)
        try:
            again.stage_gpu()
        except SnapbackError:
            # It cannot be told from what is somebody else's; its capture has to begin again.
            assert not promises["noted"], "what was noted is refused"
            return
        staged = promises.get("staged gpu-0", again.promises["staged gpu-0"])
        assert again.promises["staged gpu-0"] == staged, "another part than was staged"
        missing = 0 if "staged gpu-0" in promises else sum(SHARDS.values()) - promises["noted"]
        assert again.moved <= missing, f"{again.moved} bytes were written, {missing} were missing"
        manifest, _ = run(self.root.read_part(self.place, "gpu-0"))
        run(self.root.check_bytes(self.place, manifest, _nobody_asks))


class SetAside(Story):
    """Move generations that nobody knows into quarantine."""

    name = "quarantine"
    unknown = tuple((f"space-{number}", UID, "gen-1") for number in range(10))
    steps = ("set_aside",) * len(unknown)

    def __init__(self, base: Path = BASE) -> None:
        super().__init__()
        self.artifacts = base / "artifacts"
        self.library = ArtifactLibrary(self.artifacts)

    def prepare(self) -> None:
        with files.opened(files.open_root(self.artifacts, create=True)) as root:
            for path in self.unknown:
                with files.opened(files.make_dir(root, path)) as folder:
                    files.write_new(folder, "state", b"nobody's")

    def set_aside(self) -> None:
        path = self.unknown[self.at]
        if run(self.library.set_aside(path, "label")):
            self.promises["/".join(path)] = "set aside"

    def check(self, promises: dict[str, Any]) -> None:
        for path in self.unknown:
            before, after = (
                files.os.path.exists(folder.joinpath(*path, "state"))
                for folder in (self.artifacts, self.artifacts / QUARANTINE / "label")
            )
            shown = "/".join(path)
            assert before != after, f"{shown} is in {before + after} places"
            assert after or shown not in promises, f"{shown} was moved, and is back"
            run(self.library.set_aside(path, "label"))
        assert run(self.library.count_set_aside()) == len(self.unknown)
        assert run(self.library.listing(NOW)) == ([], [])


class Journaling(Story):
    """Open a journal that is not there yet, append, open it again and append."""

    name = "journal"
    steps = ("open", "accept", "begin_and_end", "append_at_start", "open", "append_more")

    def __init__(self, base: Path = BASE) -> None:
        super().__init__()
        self.folder = base / "state" / "agent"
        self.promises = {"records": [], "under way": []}
        self.journal: Journal | None = None

    def open(self) -> None:
        if self.journal is not None:
            self.journal.close()
        self.journal = Journal.open(self.folder, wall=lambda: NOW)

    def recover(self) -> None:
        self.journal = None
        self.open()
        assert self.journal is not None
        # What was under way is on record or not; from here on that is settled.
        self.promises = {"records": self.journal.ledger.records(), "under way": []}

    def accept(self) -> None:
        self._append(accepted(1), ledger.Began(order=order(1), attempt=1, step="freeze"))

    def begin_and_end(self) -> None:
        self._append(ledger.Ended(order=order(1), attempt=1, step="freeze"))
        self._append(accepted(2))

    def append_at_start(self) -> None:
        self._append(ledger.Began(order=order(2), attempt=1, step="freeze"))

    def append_more(self) -> None:
        self._append(ledger.Ended(order=order(2), attempt=1, step="freeze"), accepted(3))

    def _append(self, *records: ledger.Record) -> None:
        assert self.journal is not None
        before = list(self.promises["records"])
        self.promises = {"records": before, "under way": list(records)}
        run(self.journal.append(*records))
        self.promises = {"records": [*before, *records], "under way": []}

    def check(self, promises: dict[str, Any]) -> None:
        journal = Journal.open(self.folder, wall=lambda: NOW)
        found = self.known(journal.ledger)
        under_way = promises["under way"]
        allowed = [self.known(folded([*promises["records"], *more])) for more in ([], under_way)]
        assert found in allowed, f"{len(found)} records are there, promised {len(allowed[0])}"
        run(journal.append(accepted(9)))
        journal.close()
        again = Journal.open(self.folder, wall=lambda: NOW)
        wanted = folded([*(_DECODER.decode(line) for line in found), accepted(9)])
        assert self.known(again.ledger) == self.known(wanted)
        again.close()

    def known(self, found: ledger.Ledger) -> list[bytes]:
        """Give what a journal knows, comparable."""
        return [encode_json(record) for record in found.records()]


class OlderJournal(Journaling):
    """The same with a journal that holds old results, which opening drops."""

    name = "older journal"

    def __init__(self, base: Path = BASE) -> None:
        super().__init__(base)
        self.promises["records"] = [accepted(7)]

    def prepare(self) -> None:
        journal = Journal.open(self.folder, wall=lambda: NOW)
        run(journal.append(accepted(7), *finished(8)))
        journal.close()

    def known(self, found: ledger.Ledger) -> list[bytes]:
        found.entries.pop(order(8), None)
        return super().known(found)


class Service(SecondCapture):
    """A capture beside an older one, with its steps in a journal, as an agent does it."""

    name = "service"

    def __init__(self, base: Path = BASE) -> None:
        super().__init__(base)
        self.log = OlderJournal(base / "log")

    def prepare(self) -> None:
        super().prepare()
        self.log.prepare()
        self.log.open()

    def play_all(self) -> None:
        """Do the capture, each step on record before and after. NoSpace may end it anywhere."""
        self.log._append(accepted(1))
        for step in ("stage_process", "stage_gpu", "seal"):
            self.log._append(ledger.Began(order=order(1), attempt=1, step=step))
            getattr(self, step)()
            self.log._append(ledger.Ended(order=order(1), attempt=1, step=step))


def order(number: int) -> str:
    return f"dump-{UID[:-1]}{number}"


def accepted(number: int, wall: float = NOW) -> ledger.Accepted:
    return builders.accepted(order=order(number), wall=wall)


def finished(number: int) -> list[ledger.Record]:
    """Give the records of an order that ended so long ago that they may go."""
    return [
        accepted(number, NOW - 2 * KEEP_S),
        ledger.Reported(report=builders.told(order=order(number), kind="staged")),
        ledger.Delivered(order=order(number), attempt=1, n=1),
    ]


def folded(records: list[ledger.Record]) -> ledger.Ledger:
    found = ledger.Ledger()
    for record in records:
        found.apply(record)
    return found


def visible(artifacts: Path, place: GenerationRef) -> str | None:
    """Give the digest of the root manifest that a reader would find, if there is a readable one."""
    path = [place.namespace, place.content_uid, f"gen-{place.generation}"]
    try:
        with (
            files.opened(files.open_root(artifacts)) as top,
            files.opened(files.open_dir(top, path)) as folder,
        ):
            return digest(files.read_bounded(folder, ROOT_MANIFEST, MAX_MANIFEST_BYTES))
    except (SnapbackError, FileNotFoundError):
        return None


def verify(root: ArtifactRoot, place: GenerationRef, root_digest: str) -> None:
    """Read a whole artifact as `verify` does, and its GPU memory as GMS does."""
    ref = orders.ArtifactRef(**place._asdict(), root_digest=root_digest)
    manifest = run(root.read_root(ref))
    machine: Any = SimpleNamespace(artifacts=root)
    for part in run(proven_parts(machine, ref, manifest)):
        run(root.check_bytes(place, part, _nobody_asks))
