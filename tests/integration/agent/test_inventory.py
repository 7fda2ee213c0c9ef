"""What an agent does with the directories below its artifact root that have no owner."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest

from snapshot_agent.adapters import presence
from snapshot_agent.adapters.library import ArtifactLibrary
from snapshot_agent.handlers.inventory import Counts, Inventory
from snapshot_operator.core.inventory import Policy, reply
from snapshot_shared import subjects
from snapshot_shared.api import FoundGeneration, InventoryReply, Verdict
from snapshot_shared.artifact import QUARANTINE, ROOT_MANIFEST
from snapshot_shared.codec import decode_json
from snapshot_shared.errors import NotFound
from snapshot_shared.orders import Presence
from tests.support.agent_rig import Rig, fresh_uid
from tests.support.operator_world import World
from tests.support.waiting import until

DAY_S = 86400.0
NOW = 1_900_000_000.0
LABEL = "20300317T174640Z-node-1"
UID = "00000000-0000-4000-8000-000000000001"
OTHER = "00000000-0000-4000-8000-000000000002"
STATE = ("default", UID, "gen-1", "process", "state")


class Operator:
    """Judges by a policy as the operator does, with a store that knows nothing.

    Or it says the same of every generation.
    """

    def __init__(self, policy: Policy = Policy(), says: Verdict | None = None) -> None:  # noqa: B008
        self.policy, self.says = policy, says
        self.asked: list[FoundGeneration] = []

    async def judge(self, found: Sequence[FoundGeneration]) -> InventoryReply:
        self.asked += found
        if self.says is not None:
            return InventoryReply(verdicts=[self.says] * len(found))
        return reply(found, [], self.policy)


async def looked(root: Path, operator: Operator, now: float = NOW) -> Counts:
    """Look once; return what is counted then."""
    watcher = Inventory(ArtifactLibrary(root), operator, "node-1", lambda: now)
    await watcher.look()
    return watcher.counts


def put(root: Path, *names: str, days: float = 30.0) -> Path:
    """Put a file below the root; all that leads to it has not changed for days."""
    file = root.joinpath(*names)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("unowned")
    for path in (file, *file.parents[: len(names)]):
        os.utime(path, (NOW - days * DAY_S,) * 2)
    return file


def tree(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir()}


async def test_a_generation_without_a_root_manifest_is_moved_with_its_path_and_back_by_hand(
    tmp_path: Path,
) -> None:
    before = put(tmp_path, *STATE)
    assert await looked(tmp_path, Operator()) == Counts(unknown=0, quarantined=1)
    moved = "/".join((QUARANTINE, LABEL, *STATE))
    assert tree(tmp_path) == {moved}
    assert (tmp_path / moved).read_text() == "unowned"
    (tmp_path / moved).parents[1].rename(before.parents[1])
    assert await looked(tmp_path, Operator(says="keep")) == Counts()
    assert tree(tmp_path) == {"/".join(STATE)}


async def test_a_sealed_artifact_without_an_owner_stays_and_is_counted(tmp_path: Path) -> None:
    manifest = put(tmp_path, "default", UID, "gen-1", ROOT_MANIFEST)
    operator = Operator()
    assert await looked(tmp_path, operator) == Counts(unknown=1, quarantined=0)
    assert operator.asked[0].sealed
    assert manifest.exists()


@pytest.mark.parametrize(
    ("days", "files"),
    [
        (6.9, [STATE, ("models", "llama")]),
        (30.0, [(".snapshot", "hourly", "x"), ("lost+found", "#12"), ("default", ".nfs0001")]),
    ],
    ids=["changed lately", "hidden or of the file system"],
)
async def test_what_is_none_of_ours_or_changed_lately_stays(
    tmp_path: Path, days: float, files: list[tuple[str, ...]]
) -> None:
    for names in files:
        put(tmp_path, *names, days=days)
    before = tree(tmp_path)
    assert await looked(tmp_path, Operator(Policy("all"))) == Counts()
    assert tree(tmp_path) == before


ODD = (
    ("notes",),
    ("models", "llama", "weights"),
    ("default", UID, "gen-0", "x"),
    ("default", UID, "gen-01", "x"),
    ("default", UID, "gen-1000001", "x"),
    ("default", UID, "gen-2"),
    ("default", "A" + UID[1:], "gen-1", "x"),
    ("Default", UID, "gen-1", "x"),
    ("default", "a" * 200),
    ("default", UID, "\udcff"),
)


@pytest.mark.parametrize("names", ODD, ids=lambda names: ascii("/".join(names))[:60])
async def test_what_is_no_generation_is_moved_only_when_everything_is(
    tmp_path: Path, names: tuple[str, ...]
) -> None:
    put(tmp_path, *names)
    before = tree(tmp_path)
    assert await looked(tmp_path, Operator()) == Counts(unknown=1, quarantined=0)
    assert tree(tmp_path) == before
    assert await looked(tmp_path, Operator(Policy("all"))) == Counts(unknown=0, quarantined=1)
    assert tree(tmp_path) == {f"{QUARANTINE}/{LABEL}/{path}" for path in before}


async def test_links_and_pipes_are_moved_as_they_are_and_never_followed(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    put(outside, UID, "gen-1", "process", "state")
    (root / "default" / UID).mkdir(parents=True)
    (root / "space").symlink_to(outside)
    (root / "default" / OTHER).symlink_to(outside / UID)
    (root / "default" / UID / "gen-1").symlink_to(outside / UID / "gen-1")
    os.mkfifo(root / "default" / UID / "gen-2")
    operator = Operator(Policy("all", after_s=0.0))
    await looked(root, operator, now=4e9)
    assert operator.asked == []
    assert tree(outside) == {f"{UID}/gen-1/process/state"}
    (label,) = (root / QUARANTINE).iterdir()
    assert (label / "space").is_symlink()
    assert (label / "default" / OTHER).is_symlink()
    assert (label / "default" / UID / "gen-1").is_symlink()
    assert (label / "default" / UID / "gen-2").is_fifo()


async def test_a_root_manifest_that_is_a_link_seals_nothing(tmp_path: Path) -> None:
    put(tmp_path, *STATE)
    (tmp_path / "default" / UID / "gen-1" / ROOT_MANIFEST).symlink_to("/etc/hostname")
    operator = Operator(Policy("off"))
    await looked(tmp_path, operator)
    assert [item.sealed for item in operator.asked] == [False]


async def test_a_quarantine_that_is_a_link_leads_nowhere(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    outside.mkdir()
    state = put(root, *STATE)
    (root / QUARANTINE).symlink_to(outside)
    assert await looked(root, Operator()) == Counts(unknown=1, quarantined=0)
    assert state.exists()
    assert list(outside.iterdir()) == []


async def test_what_stands_in_quarantine_is_never_replaced(tmp_path: Path) -> None:
    put(tmp_path, "notes")
    there = put(tmp_path, QUARANTINE, LABEL, "notes")
    there.write_text("of before")
    assert await looked(tmp_path, Operator(Policy("all"))) == Counts(unknown=1, quarantined=1)
    assert there.read_text() == "of before"
    assert (tmp_path / "notes").read_text() == "unowned"


async def test_two_agents_with_one_root_move_a_generation_once(tmp_path: Path) -> None:
    put(tmp_path, *STATE)

    class Slow(Operator):
        async def judge(self, found: Sequence[FoundGeneration]) -> InventoryReply:
            await looked(tmp_path, Operator())
            return await super().judge(found)

    assert await looked(tmp_path, Slow(Policy())) == Counts(unknown=0, quarantined=1)
    assert tree(tmp_path) == {f"{QUARANTINE}/{LABEL}/default/{UID}/gen-1/process/state"}


async def test_nothing_is_moved_while_no_operator_answers(tmp_path: Path) -> None:
    state = put(tmp_path, *STATE)
    with pytest.raises(NotFound):
        await looked(tmp_path, Mock(judge=Mock(side_effect=NotFound("no operator answers"))))
    assert state.exists()
    assert not (tmp_path / QUARANTINE).exists()


async def test_more_generations_than_fit_into_one_question_are_all_asked_about(
    tmp_path: Path,
) -> None:
    for _ in range(1001):
        (tmp_path / "default" / fresh_uid() / "gen-1").mkdir(parents=True)
    operator = Operator(says="tell")
    assert await looked(tmp_path, operator) == Counts(unknown=1001, quarantined=0)
    assert len(set(operator.asked)) == 1001


async def test_a_root_that_is_not_there_yet_is_empty(tmp_path: Path) -> None:
    assert await looked(tmp_path / "none", Operator(Policy("all"))) == Counts()
    assert not (tmp_path / "none").exists()


async def test_an_agent_asks_the_operator_when_it_starts_and_reports_what_it_moved(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "EVERY_S", 0.2)
    endpoint = World().nodes.endpoints()["inventory.*"]
    await rig.bus.serve("snap-operator", "1.0.0", {}, {subjects.inventory(rig.node): endpoint})
    state = put(rig.root, *STATE)
    os.utime(state.parents[1], (1.0, 1.0))
    async with (
        rig.bus.listening(subjects.bucket_key(subjects.NODES_BUCKET, rig.node)) as published,
        rig.agent(),
    ):
        await until(lambda: not state.exists(), "the generation to be moved")
        while decode_json((await published.get()).data, Presence).quarantined != 1:
            pass
    (moved,) = (rig.root / QUARANTINE).glob(f"*-{rig.node}/default/{UID}/gen-1/process/state")
    assert moved.read_text() == "unowned"
