"""A saver and a loader in a pod, as the GMS of the node and the programs share their work."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import snapback_client as client
from gms.adapters.grpc_api import GrpcServer
from gms.adapters.pod_memory import PodMemories
from gms.adapters.pod_transfers import PodTransfers
from gms.domain import tasks
from gms.domain.containers import Outcome
from gms.handlers.control import GmsControl
from gms.handlers.orders import GmsOrders
from gms.transfer_child.copies import hand_out
from snapshot_agent.adapters.gms_grpc import PodGms
from snapshot_shared import errors
from snapshot_shared.codec import encode_pretty
from snapshot_shared.frames import MissingDevice, StatusReply, StatusRequest
from snapshot_shared.orders import LoadOrder, PodRef, SaveOrder
from snapshot_shared.volumes import GMS_VOLUME, folder_of
from tests.support.gms_rig import MIB, TransferThreads, carried_out, program
from tests.support.waiting import until
from tests.support.weights import UID, flip, load_order, save_order

PART = ("default", UID, "gen-1", "gpu-0")
SHARD = "shard-0000.bin"
BYTES = np.arange(3 * MIB, dtype="u1")


class Pod:
    """The volume of a saver or loader, the program in it, and the artifact root of the node."""

    def __init__(self, service: Any, home: Path) -> None:
        self.service = service
        self.root = home / "artifacts"
        self.volume = home / "volume"
        self.volume.mkdir()
        self.work = PodTransfers(self.volume, TransferThreads())

    @contextlib.contextmanager
    def program(self, name: str) -> Iterator[subprocess.Popen[str]]:
        """Run a program that follows the orders of the volume; it has to end when it is told to."""
        folders = {"GMS_SOCKET_DIR": str(self.service.folder), "GMS_ORDER_DIR": str(self.volume)}
        with program(name, **folders) as process:
            yield process
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=30)
            # SIGTERM ends one that has only just been started by itself.
            assert process.returncode in (0, -signal.SIGTERM, -signal.SIGKILL), said
            assert "Traceback" not in said

    def save(self, **changes: Any) -> tuple[SaveOrder, Any]:
        order = save_order(self.service.layout())
        task = tasks.save_task(
            order,
            tasks.DEFAULT_OPTIONS,
            attempt=1,
            socket_dir="",
            root=str(self.root),
            deadline_s=20.0,
        )
        return replace(order, **changes), task

    def load(self, saved: tasks.TransferDone) -> tuple[LoadOrder, Any]:
        order = load_order(
            part_digest=saved.digest,
            device=self.service.uuids[0],
            layout_id=saved.layout.layout_id,
            structure_hash=saved.layout.structure_hash,
        )
        task = tasks.load_task(
            order,
            tasks.DEFAULT_OPTIONS,
            attempt=1,
            device=order.device,
            socket_dir="",
            root=str(self.root),
            deadline_s=20.0,
            load_token="t",
            order=order.order,
        )
        return order, task

    async def run(self, order: Any, task: Any) -> list[tasks.TransferEvent]:
        async with asyncio.timeout(30):
            return [event async for event in self.work.run(order, task)]


@pytest.fixture
def pod(service: Any, tmp_path: Path) -> Pod:
    with client.connect(0, lock="RW") as pool:
        pool.allocate("w", 3 * MIB, "u1")[:] = BYTES
        pool.commit()
    return Pod(service, tmp_path)


def saved(pod: Pod) -> tasks.TransferDone:
    """Save as the node itself does."""
    _, task = pod.save()
    return carried_out(replace(task, socket_dir=str(pod.service.folder)))


async def test_what_a_saver_writes_is_an_artifact_and_a_loader_brings_it_back_hidden(
    pod: Pod,
) -> None:
    with pod.program("gms-saver"):
        events = await pod.run(*pod.save())
    done = events[-1]
    assert isinstance(events[0], tasks.TransferLeased)
    assert isinstance(done, tasks.TransferDone)
    assert (pod.root.joinpath(*PART) / "part.json").exists()
    assert list(pod.volume.iterdir()) == []
    pod.service.restart()
    with pod.program("gms-loader"):
        assert isinstance((await pod.run(*pod.load(done)))[-1], tasks.TransferDone)
    assert pod.service.device(0).domains[0].layout is None
    assert pod.service.publish("t", 0).layout_id == done.layout.layout_id
    with client.connect(0, lock="RO", deadline_s=5) as pool:
        assert np.array_equal(pool["w"], BYTES)
    assert list(pod.volume.iterdir()) == []


async def test_a_program_carries_out_one_order_after_the_other(pod: Pod) -> None:
    with pod.program("gms-saver"):
        for part in ("gpu-0", "gpu-1"):
            order, task = pod.save(part=part, order=f"save-{UID}-{part}")
            await pod.run(order, replace(task, part=part, order=order.order))
    assert {path.name for path in pod.root.joinpath(*PART[:3]).iterdir()} == {"gpu-0", "gpu-1"}


async def test_an_order_that_is_taken_back_ends_in_the_container_too(pod: Pod) -> None:
    order, task = pod.load(saved(pod))
    pod.service.restart()
    with client.connect(0, lock="RW"), pod.program("gms-loader"):
        # The loader waits for our session.
        work = asyncio.ensure_future(pod.run(order, task))
        await until(lambda: list(pod.volume.glob("load-*/order.json")))
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
        await until(lambda: not list(pod.volume.iterdir()))
    assert pod.service.device(0).loads == []


async def test_an_order_is_carried_out_by_a_program_that_is_started_again(pod: Pod) -> None:
    order, task = pod.load(saved(pod))
    pod.service.restart()
    with client.connect(0, lock="RW"), pod.program("gms-loader") as process:
        work = asyncio.ensure_future(pod.run(order, task))
        await until(lambda: list(pod.volume.glob("load-*/order.json")))
        process.kill()
        process.wait(20)
    with pod.program("gms-loader"):
        assert isinstance((await work)[-1], tasks.TransferDone)


async def test_the_failure_of_a_saver_is_that_of_the_order(pod: Pod) -> None:
    stale = replace(pod.service.layout(), generation=7)
    order, task = pod.save(layout=stale)
    with pod.program("gms-saver"), pytest.raises(errors.StaleLayout):
        await pod.run(order, task)
    assert list(pod.volume.iterdir()) == []


def say_damaged(folder: Path, reason: str) -> None:
    outcome = Outcome(
        verb="load", failure=errors.Failure(reason=reason, message="chunk 3 is damaged")
    )
    (folder / "failed").write_bytes(encode_pretty(outcome))


async def answer_as_a_stranger(pod: Pod, answer: Callable[[Path], object]) -> None:
    """Answer the order as a program of a stranger does."""
    await until(lambda: list(pod.volume.glob("[sl]*/order.json")))
    (folder,) = pod.volume.iterdir()
    answer(folder)


@pytest.mark.parametrize(
    ("name", "data", "error", "says"),
    [
        ("failed", b"no \xff luck", errors.ContainerFailed, "no .* luck"),
        ("failed", b"", errors.ContainerFailed, "failed"),
        ("done", b"", errors.SnapbackError, "default"),
    ],
)
async def test_a_foreign_program_that_fails_or_writes_nothing_is_said(
    pod: Pod, name: str, data: bytes, error: type[Exception], says: str
) -> None:
    answer = asyncio.ensure_future(
        answer_as_a_stranger(pod, lambda folder: (folder / name).write_bytes(data))
    )
    with pytest.raises(error, match=says):
        await pod.run(*pod.save())
    await answer
    assert list(pod.volume.iterdir()) == []


@pytest.mark.parametrize(
    "answer",
    [
        lambda folder: (folder / "event").symlink_to("order.json"),
        lambda folder: (folder / "done").mkdir(),
        lambda folder: (folder / "done").symlink_to("order.json"),
        lambda folder: (folder / "failed").symlink_to(folder),
        shutil.rmtree,
        *(partial(say_damaged, reason=reason) for reason in sorted(errors.DAMAGE)),
    ],
    ids=[
        "link-of-event",
        "folder-for-done",
        "link-of-done",
        "link-of-failed",
        "no-folder",
        *sorted(errors.DAMAGE),
    ],
)
async def test_a_loader_cannot_have_a_sound_artifact_doubted(
    pod: Pod, answer: Callable[[Path], object]
) -> None:
    order, task = pod.load(saved(pod))
    answering = asyncio.ensure_future(answer_as_a_stranger(pod, answer))
    with pytest.raises(errors.ContainerFailed):
        await pod.run(order, task)
    await answering
    assert list(pod.volume.iterdir()) == []


def link_the_namespace(filled: Path, _event: tasks.TransferEvent) -> None:
    (filled / "default").symlink_to(filled)


def remove_the_folder(filled: Path, event: tasks.TransferEvent) -> None:
    if isinstance(event, tasks.TransferProgress) and event.done:
        shutil.rmtree(filled)


def link_a_file(filled: Path, event: tasks.TransferEvent) -> None:
    if isinstance(event, tasks.TransferProgress) and event.done:
        (shard,) = filled.joinpath(*PART).iterdir()
        shard.unlink()
        shard.symlink_to("part.json")


@pytest.mark.parametrize("change", [link_the_namespace, remove_the_folder, link_a_file])
async def test_what_a_pod_does_to_the_folder_of_its_order_is_no_damage(
    pod: Pod, change: Callable[[Path, tasks.TransferEvent], None]
) -> None:
    order, task = pod.load(saved(pod))
    filled = pod.volume / f".{tasks.order_folder(order.order, order.attempt)}"
    filled.mkdir()
    with pytest.raises(errors.ContainerFailed):
        hand_out(replace(task, staged=str(pod.volume)), partial(change, filled))


async def test_damage_of_the_artifact_itself_is_found_before_a_loader_gets_it(pod: Pod) -> None:
    order, task = pod.load(saved(pod))
    flip(pod.root.joinpath(*PART, SHARD), 77)
    with pytest.raises(errors.ArtifactCorrupt):
        await pod.run(order, task)
    assert list(pod.volume.iterdir()) == []


class LyingMemory(GmsControl):
    """The memory server of a pod, as anybody may write one."""

    missing: tuple[MissingDevice, ...] = ()

    async def status(self, request: StatusRequest) -> StatusReply:
        if not self.missing:
            raise errors.ArtifactMissing("the weights are not there")
        return replace(await super().status(request), devices=[], missing=list(self.missing))


@contextlib.contextmanager
def lying(pod: Pod, *missing: MissingDevice) -> Iterator[tuple[Path, PodRef]]:
    """Serve one in a pod; yield the folder of the kubelet and the pod."""
    service, ref = pod.service, PodRef(uid=UID, name="worker", namespace="default")

    async def started(folder: Path) -> GrpcServer:
        control = LyingMemory(service.gms)
        control.missing = missing
        server = GrpcServer(folder, control, service.transfers)
        await server.start()
        return server

    with tempfile.TemporaryDirectory(prefix="gms-") as home:
        kubelet = Path(home)
        volume = Path(folder_of(kubelet, ref.uid, GMS_VOLUME))
        volume.parent.mkdir(parents=True)
        # A path as long as that of a volume is no address of a socket.
        volume.symlink_to(kubelet)
        (kubelet / "logs" / f"{ref.namespace}_{ref.name}_{ref.uid}").mkdir(parents=True)
        server = service.run(started(kubelet))
        yield kubelet, ref
        service.run(server.close())


GONE = MissingDevice(
    uuid="GPU-gone", index=0, failure=errors.Failure(reason="ArtifactCorrupt", message="chunk 3")
)


@pytest.mark.parametrize("missing", [(), (GONE,)])
async def test_what_a_memory_server_says_to_gms_is_no_damage(
    pod: Pod, missing: tuple[MissingDevice, ...]
) -> None:
    unused: Any = None
    order, _ = pod.load(saved(pod))
    with lying(pod, *missing) as (kubelet, ref):
        find = PodMemories(kubelet, kubelet / "logs", unused).find
        orders = GmsOrders(find, unused, unused, unused, root=pod.root)
        with pytest.raises(errors.ContainerFailed):
            await orders.load(replace(order, pod=ref, device=GONE.uuid), unused)


async def test_what_a_memory_server_says_to_an_agent_is_no_damage(pod: Pod) -> None:
    with lying(pod) as (kubelet, ref), pytest.raises(errors.ContainerFailed):
        await PodGms(kubelet, kubelet).at(ref).devices(wait_s=0.0)


@contextlib.asynccontextmanager
async def answered_before(pod: Pod) -> AsyncIterator[Path]:
    """Yield the part that a saver has written, as long as the node has not been told of it."""
    done = saved(pod)
    path = pod.root.joinpath(*PART)
    staged = pod.volume / f"save-{UID}-gpu-0.1"
    aside = staged.joinpath(*PART)
    aside.parent.mkdir(parents=True)
    path.rename(aside)
    (staged / "order.json").write_text("[]")
    assert done.bytes
    yield aside
    (staged / "done").write_text("")


async def test_what_was_saved_while_the_service_of_the_node_was_away_is_taken(pod: Pod) -> None:
    async with answered_before(pod) as part:
        pass
    assert isinstance((await pod.run(*pod.save()))[-1], tasks.TransferDone)
    assert not part.exists()
    assert (pod.root.joinpath(*PART) / "part.json").exists()


async def test_bytes_that_differ_from_their_digests_are_no_artifact(pod: Pod) -> None:
    async with answered_before(pod) as part:
        flip(part / SHARD, 77)
    with pytest.raises(errors.ArtifactCorrupt):
        await pod.run(*pod.save())
    assert not pod.root.joinpath(*PART).exists()


async def test_the_part_of_another_order_is_refused_with_both(pod: Pod) -> None:
    async with answered_before(pod) as part:
        manifest = part / "part.json"
        manifest.write_text(manifest.read_text().replace(UID, UID.replace("5", "6")))
    with pytest.raises(errors.InvalidInput) as refused:
        await pod.run(*pod.save())
    assert UID in refused.value.values["expected"]
    assert UID not in refused.value.values["found"]


async def test_a_link_in_the_place_of_a_part_is_not_followed(pod: Pod, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    async with answered_before(pod) as part:
        part.rename(secret)
        part.symlink_to(secret)
    with pytest.raises(errors.ArtifactCorrupt):
        await pod.run(*pod.save())
    assert not pod.root.joinpath(*PART).exists()
