"""Dumps by CRIU into a scratch folder, and parts that are encrypted and signed on their way."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from snapshot_shared.artifact import ROOT_MANIFEST, SIGNATURE
from snapshot_shared.orders import ArtifactRef, Report
from tests.process import node as nodes
from tests.process.killing import MIB, dump_in
from tests.process.node import Container, Node
from tests.support.agent_rig import failure_of, fresh_uid
from tests.support.artifact_keys import forged, put_encryption, put_signing

SECRET = hashlib.shake_256(b"heap").digest(2**20)[4096:4160]
"""What the heap of a worker has."""

Opened = Callable[..., contextlib.AbstractAsyncContextManager[Node]]


@pytest.fixture
def opened(criu: Path, nats_url_session: str) -> Opened:
    """Open a node with a scratch folder, whose helper has no artifact root.

    It gets these settings, in which `{}` is its folder.
    """

    @contextlib.asynccontextmanager
    async def made(**settings: str) -> AsyncIterator[Node]:
        def prepare(node: Node) -> None:
            (node.folder / "scratch").mkdir()
            given = {"SNAPBACK_SCRATCH_DIR": "{}/scratch", **settings}
            node.settings |= {name: each.format(node.folder) for name, each in given.items()}
            node.hides_artifacts = True
            put_encryption(node.folder / "keys")
            put_signing(node.folder / "keys")

        async with nodes.opened(nats_url_session, prepare=prepare) as node:
            await node.process()
            yield node

    return made


ENCRYPTED = {"SNAPBACK_ARTIFACT_KEYS": "{}/keys"}
ALWAYS = {"SNAPBACK_SCRATCH": "always"}


def scratch(node: Node) -> list[Path]:
    return [path for path in (node.folder / "scratch").rglob("*") if path.is_file()]


async def restored(node: Node, artifact: ArtifactRef) -> tuple[Report, Container]:
    target, order = await node.waiting(artifact)
    return await node.carry_out(order), target


@pytest.mark.parametrize("how", [ENCRYPTED, ALWAYS], ids=["encrypted", "plain"])
async def test_a_worker_goes_on_that_was_dumped_and_restored_by_way_of_the_scratch_folder(
    opened: Opened, how: dict[str, str]
) -> None:
    async with opened(**how) as node:
        artifact = await node.artifact()
        part = node.part(artifact.content_uid)
        plain = [path.name for path in part.iterdir() if SECRET in path.read_bytes()]
        assert bool(plain) == (how == ALWAYS)
        assert scratch(node) == []
        report, target = await restored(node, artifact)
        assert report.kind == "restored", report
        await target.goes_on()
        assert scratch(node) == []


async def test_criu_writes_nothing_below_the_artifact_root_where_there_is_a_scratch_folder(
    opened: Opened,
) -> None:
    async with opened(**ALWAYS) as node:
        halted = await dump_in(node, "archived")
        assert list(halted.part.iterdir()) == []
        assert sum(path.stat().st_size for path in scratch(node)) > 8 * MIB
        assert {path.stat().st_mode & 0o077 for path in scratch(node)} == {0}
        await node.kill_agent()
        halted.go_on()
        await node.process()
        await halted.rests()
        assert scratch(node) == []


async def test_what_is_encrypted_with_another_key_or_not_signed_leaves_its_placeholder_alone(
    opened: Opened,
) -> None:
    async with opened(**ENCRYPTED, SNAPBACK_REQUIRE_SIGNATURE="1") as node:
        artifact = await node.artifact()
        folder = node.generation(artifact.content_uid)
        await node.kill_agent()
        key = node.folder / "keys" / "encryption.key"
        ours = key.read_bytes()
        put_encryption(key.parent)
        await node.process()
        report, target = await restored(node, artifact)
        failure_of(report, "KeyUnavailable")
        await target.becomes("waits")
        key.write_bytes(ours)
        await node.kill_agent()
        await node.process()
        signature = folder / SIGNATURE
        signature.rename(folder.with_name("elsewhere"))
        report, target = await restored(node, artifact)
        failure_of(report, "NotTrusted")
        await target.becomes("waits")
        folder.with_name("elsewhere").rename(signature)
        report, target = await restored(node, artifact)
        assert report.kind == "restored", report
        await target.goes_on()


async def test_a_byte_that_was_changed_with_all_its_digests_is_never_given_to_criu(
    opened: Opened,
) -> None:
    async with opened(**ENCRYPTED) as node:
        artifact = await node.artifact()
        folder = node.generation(artifact.content_uid)
        (folder / SIGNATURE).unlink()
        pages = max(folder.glob("process/pages-*.img"), key=lambda path: path.stat().st_size)
        with pages.open("r+b") as file:
            file.seek(MIB + 77)
            [byte] = file.read(1)
            file.seek(MIB + 77)
            file.write(bytes([byte ^ 1]))
        artifact = forged(artifact, folder)
        assert (folder / ROOT_MANIFEST).exists()
        report, target = await restored(node, artifact)
        assert f"{pages.name}: segment 1 of" in failure_of(report, "ArtifactCorrupt").message
        await target.becomes("waits")
        assert scratch(node) == []


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A folder that has room for the dump of one worker."""
    folder = tmp_path / "small"
    folder.mkdir()
    size = f"size={64 * MIB}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


# It mounts on this machine, which the tests of plain processes must not see.
@pytest.mark.xdist_group("mounts")
async def test_a_scratch_folder_without_room_fails_a_capture_by_its_name_and_the_worker_goes_on(
    opened: Opened, small: Path
) -> None:
    async with opened(**ALWAYS, SNAPBACK_SCRATCH_DIR=str(small)) as node:
        halted = await dump_in(node, "begun")
        with (small / "filler").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 62 * MIB)
        halted.go_on()
        report = await halted.answered()
        assert str(small) in failure_of(report, "NoSpace").message
        await halted.container.goes_on()
        await halted.end(report)
        await halted.rests()
        assert [path.name for path in small.iterdir()] == ["filler"]
        order = node.prepare_order(halted.container, fresh_uid())  # type: ignore[arg-type]
        report = await node.carry_out(order)
        assert str(small) in failure_of(report, "NoSpace").message
        await halted.container.goes_on()
