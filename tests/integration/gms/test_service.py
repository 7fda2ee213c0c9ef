"""The whole service as a process: its life, and the orders that NATS brings it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import tempfile
import threading
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import snapback_client as client
from gms.adapters.simulated import simulated_uuid
from snapback_client.frames import Attach, LockMode, MemoryDomain
from snapback_client.lease import Lease
from snapshot_shared import orders, subjects
from snapshot_shared.bus import Bus
from snapshot_shared.codec import encode_json
from snapshot_shared.ids import NodeName, OrderId
from tests.support import builders
from tests.support.agent_rig import Rig
from tests.support.artifact_keys import put_encryption
from tests.support.gms_rig import GmsProgram, fields_of
from tests.support.nats_server import nats_server
from tests.support.waiting import wait_until
from tests.support.weights import load_order, save_order

NOWHERE = "nats://127.0.0.1:9"
PATIENCE_S = 20.0
DEVICE = simulated_uuid("n1", 0)


def incarnation(process: GmsProgram, patience_s: float = PATIENCE_S) -> str:
    request = Attach(device=DEVICE, domain=MemoryDomain.KV, lock=LockMode.RW, deadline_s=patience_s)
    with contextlib.closing(Lease.attach(str(process.sockets), request)) as lease:
        return lease.attached.incarnation


@pytest.fixture
def process(
    tmp_path: Path, socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[GmsProgram]:
    monkeypatch.setenv("GMS_SOCKET_DIR", str(socket_dir))
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", DEVICE)
    found = GmsProgram(tmp_path, socket_dir, SNAPBACK_NATS_URL=NOWHERE)
    yield found
    found.kill()


def test_workers_are_served_while_the_disk_does_not_answer(process: GmsProgram) -> None:
    state = Path(process.environment["SNAPBACK_STATE_DIR"])
    state.mkdir(mode=0o700)
    # An open for reading waits for a writer.
    os.mkfifo(state / "journal", 0o600)
    process.start()
    wait_until((state / "lock").exists)
    assert incarnation(process, patience_s=1.0)


def test_a_stop_is_orderly_and_leaves_no_socket(process: GmsProgram) -> None:
    running = process.start()
    with client.connect(lock="RW") as pool:
        pool.allocate("w", 10, np.uint8)
        running.send_signal(signal.SIGTERM)
        assert running.wait(PATIENCE_S) == 0
        assert list(process.sockets.iterdir()) == []
        with pytest.raises(client.SnapbackError):
            pool.commit()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.6])
def test_what_waits_for_a_transfer_ends_with_the_service_and_says_nothing(
    process: GmsProgram, number: signal.Signals, after_s: float
) -> None:
    running = process.start()
    threading.Event().wait(after_s)
    waiting = [os.pidfd_open(pid) for pid in process.children()]
    # As ctrl-C on a terminal does.
    os.killpg(running.pid, number)
    assert running.wait(PATIENCE_S) in (0, -number)
    for descriptor in waiting:
        ended, _, _ = select.select([descriptor], [], [], PATIENCE_S)
        os.close(descriptor)
        assert ended, "it waits on"
    assert "Traceback" not in process.log.read_text()


def test_a_killed_service_is_replaced_by_one_that_says_that_it_is_another(
    process: GmsProgram,
) -> None:
    first = process.start()
    before = incarnation(process)
    first.kill()
    first.wait()
    (process.sockets / "gms-grpc.sock").unlink()
    process.start()
    assert incarnation(process) != before


def test_a_second_service_of_one_node_says_why_it_does_not_start(
    process: GmsProgram, tmp_path: Path
) -> None:
    process.start()
    second = GmsProgram(tmp_path, process.sockets, SNAPBACK_NATS_URL=NOWHERE)
    second.log = tmp_path / "second.log"
    assert second.refused()[-1].startswith("AlreadyExists: another")


def test_the_keys_of_artifacts_are_read_once_at_the_start(
    process: GmsProgram, tmp_path: Path
) -> None:
    put_encryption(tmp_path / "keys")
    process.environment["SNAPBACK_ARTIFACT_KEYS"] = str(tmp_path / "keys")
    process.start()
    assert process.stop() == 0
    assert process.log.read_text().count("artifacts are encrypted by key") == 1


def test_a_transfer_backend_that_there_is_not_is_refused_at_the_start(process: GmsProgram) -> None:
    (line,) = process.refused(SNAPBACK_TRANSFER_BACKEND="nixl")
    assert "SNAPBACK_TRANSFER_BACKEND='nixl'" in line
    assert "posix-buffered, posix-direct" in line


# Orders.


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with nats_server(tmp_path_factory.mktemp("nats")) as server:
        asyncio.run(made(server.url))
        yield server.url


async def made(url: str) -> None:
    """Make the streams."""
    bus = Bus(url, "test-operator")
    await bus.connect()
    await bus.ensure_assets()
    await bus.close()


@pytest.fixture(scope="module", params=["0", "1"], ids=["one-process", "process-per-device"])
def ordered(
    url: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[GmsProgram]:
    """A service that carries out orders, of which each has an owner of its own."""
    with tempfile.TemporaryDirectory(prefix="gms-") as sockets:
        process = GmsProgram(
            tmp_path_factory.mktemp("gms"),
            Path(sockets),
            SNAPBACK_NATS_URL=url,
            SNAPBACK_PROCESS_PER_DEVICE=request.param,
        )
        process.start()
        yield process
        process.stop()


@pytest.fixture
async def operator(ordered: GmsProgram, url: str, tmp_path: Path) -> AsyncIterator[Rig]:
    """The operator's side, without an agent."""
    found = Rig(tmp_path, url, ordered.sockets)
    found.node = NodeName("n1")
    await found.open()
    yield found
    await found.close()


def load_of_nothing(device: str = DEVICE) -> orders.LoadOrder:
    return load_order(
        owner=str(uuid.uuid4()),
        uid=str(uuid.uuid4()),
        part_digest="sha256:" + "0" * 64,
        device=device,
        layout_id="l",
        structure_hash="h",
    )


async def test_a_load_of_what_is_not_there_fails_with_its_reason(operator: Rig) -> None:
    await operator.refused(load_of_nothing(), "ArtifactRootEmpty")


async def test_an_order_for_a_device_that_is_not_here_fails_with_both(operator: Rig) -> None:
    failure = await operator.refused(load_of_nothing("GPU-z"), "UnknownDevice")
    assert failure.values["expected"] == [DEVICE]


async def test_a_commit_of_what_was_not_loaded_fails_and_a_drop_of_it_is_done(
    operator: Rig,
) -> None:
    owner = str(uuid.uuid4())
    fields: dict[str, Any] = {"device": DEVICE, "load_token": "t"}
    commit = orders.CommitOrder(layout_id="l", **fields, **fields_of("commit", owner))
    await operator.refused(commit, "LoadLost")
    drop = orders.DropOrder(**fields, **fields_of("drop", owner))
    assert (await operator.carry_out(drop)).kind == "dropped"


async def test_a_drop_for_a_device_that_is_served_no_more_is_done(operator: Rig) -> None:
    drop = orders.DropOrder(device="GPU-z", load_token="", **fields_of("drop", str(uuid.uuid4())))
    assert (await operator.carry_out(drop)).kind == "dropped"


async def test_a_save_without_its_fence_fails_and_writes_nothing(
    operator: Rig, ordered: GmsProgram
) -> None:
    save = save_order(builders.layout(device=DEVICE), uid=str(uuid.uuid4()), fence_token="f")
    await operator.refused(save, "HoldDeadline")
    assert list(Path(ordered.environment["SNAPBACK_ARTIFACT_ROOT"]).iterdir()) == []
    kinds = [report.kind for report in operator.reports if report.order == save.order]
    assert kinds == ["accepted", "failed"]


async def test_an_abort_makes_sure_that_no_later_save_begins(operator: Rig) -> None:
    owner = str(uuid.uuid4())
    abort = orders.AbortOrder(
        content_uid=owner, fence_token="f", **fields_of("abort", owner, "-gms")
    )
    subject = subjects.order(operator.node, "gms", OrderId(abort.order))
    await operator.bus.publish(subject, encode_json(abort))
    assert (await operator.answer(abort)).kind == "aborted"
    save = save_order(builders.layout(device=DEVICE), uid=owner, fence_token="f")
    await operator.refused(save, "Superseded", kind="rejected")
