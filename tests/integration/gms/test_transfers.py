"""Saves and loads: real child processes, real bytes, and artifacts that cannot be trusted."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash

import snapback_client as client
from gms.adapters.simulated import SimulatedDevice
from gms.adapters.transfer_process import TransferProcesses
from gms.domain import tasks
from gms.transfer_child.load import load
from gms.transfer_child.save import save
from snapback_client.errors import GmsUnavailable
from snapback_client.frames import LEASE_SOCKET, ErrorReply, encode_frame
from snapback_client.wire import Inbox, close_all, send
from snapshot_shared import errors
from snapshot_shared.codec import encode_json
from snapshot_shared.orders import ArtifactRef
from tests.bench.machine import huge_bytes_free
from tests.support.gms_rig import MIB, attach, transfer_processes
from tests.support.waiting import later, until, wait_until
from tests.support.weights import OTHER, PART, UID, Weights, digests_of, flip

ARRAYS: dict[str, tuple[Any, Any]] = {
    "big": (20 * MIB + 3, "u1"),
    "matrix": ((300, 70), "f4"),
    "tiny": ((), "i8"),
}


@pytest.fixture
def capture(service: Any, tmp_path: Path) -> Weights:
    return Weights(service, tmp_path / "artifacts", ARRAYS)


@pytest.fixture
def saved(capture: Weights) -> Weights:
    """Weights of which there is an artifact."""
    capture.run(capture.save_task())
    return capture


def test_a_load_waits_for_a_service_that_is_being_started(saved: Weights) -> None:
    path = saved.service.folder / LEASE_SOCKET
    away = path.rename(path.with_suffix(".away"))
    with later(lambda: away.rename(path)):
        assert isinstance(saved.events(saved.load_task())[-1], tasks.TransferDone)


def test_a_load_that_finds_no_service_says_so_and_may_be_tried_again(
    saved: Weights, tmp_path: Path
) -> None:
    task = saved.load_task(socket_dir=str(tmp_path), deadline_s=0.2)
    with pytest.raises(errors.SnapbackError, match=f"service answers at {tmp_path}") as raised:
        saved.events(task)
    assert (raised.value.reason, raised.value.retryable) == ("GmsUnavailable", True)
    assert isinstance(raised.value, GmsUnavailable)


@pytest.mark.parametrize("pages", ["ordinary", "huge"])
def test_a_save_and_a_load_bring_the_same_arrays_to_another_device(
    launch: Any, tmp_path: Path, pages: str
) -> None:
    if pages == "huge" and huge_bytes_free() < 64 * MIB:
        pytest.skip("this host has set no huge pages aside (vm.nr_hugepages)")
    devices = [
        SimulatedDevice(node="n1", index=index, capacity=64 * MIB, huge_pages=pages == "huge")
        for index in range(2)
    ]
    capture = Weights(launch(devices=devices), tmp_path / "artifacts", ARRAYS)
    saved = capture.events(capture.save_task())
    loaded = capture.events(capture.load_task())
    assert capture.service.device(1).domains[0].layout is None, "a load ends hidden"
    ref = capture.service.publish("l1")
    assert (ref.layout_id, ref.structure_hash) == (
        capture.layout.layout_id,
        capture.layout.structure_hash,
    )
    with client.restore(capture.state, device=1) as pool:
        assert digests_of(pool) == capture.digests
    for events in (saved, loaded):
        assert isinstance(events[0], tasks.TransferLeased)
        assert isinstance(events[-1], tasks.TransferDone)
        progress = [event for event in events if isinstance(event, tasks.TransferProgress)]
        assert [p.done for p in progress] == sorted({p.done for p in progress})
        assert progress[0].done == 0
        assert progress[-1].done == progress[-1].total == events[-1].bytes
        assert len(progress) >= 3, "more than the first and the last"


def test_a_save_that_is_done_ends_the_fence_and_a_repeat_gives_the_same_result(
    capture: Weights,
) -> None:
    first = capture.run(capture.save_task())
    assert capture.service.device().fence is None
    times = {path: path.stat().st_mtime_ns for path in capture.path.iterdir()}
    (again,) = capture.events(capture.save_task())
    assert again == msgspec.structs.replace(first, moved=0, backend=""), "nothing is written again"
    assert {path: path.stat().st_mtime_ns for path in capture.path.iterdir()} == times


def test_a_part_that_was_left_half_written_is_not_written_over(capture: Weights) -> None:
    capture.path.mkdir(parents=True)
    (capture.path / "shard-0000.bin").write_bytes(b"half")
    with pytest.raises(errors.SnapbackError):
        capture.run(capture.save_task())
    assert (capture.path / "shard-0000.bin").read_bytes() == b"half"


def test_a_save_that_fails_leaves_no_bytes_behind(capture: Weights) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            save(capture.save_task(), lambda _: None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not capture.path.exists()
    capture.run(capture.save_task())


def test_a_save_needs_the_fence_and_the_layout_of_the_plan(capture: Weights) -> None:
    with pytest.raises(errors.HoldDeadline):
        capture.run(capture.save_task(fence_token="other"))
    wrong = msgspec.structs.replace(capture.layout, generation=9)
    with pytest.raises(errors.StaleLayout):
        capture.run(capture.save_task(layout=wrong))
    assert not capture.path.exists()
    capture.run(capture.save_task())


def test_readers_are_admitted_while_a_save_reads(capture: Weights) -> None:
    with pytest.raises(client.DeadlineExceeded, match="fenced"):
        client.connect(lock="RO", deadline_s=0.05)
    save = attach(capture.service, "RO", fence_token="f1")
    with client.connect(lock="RO", deadline_s=5.0) as pool:
        assert digests_of(pool) == capture.digests
    generation = client.GenerationRef(
        incarnation=capture.layout.incarnation, generation=capture.layout.generation
    )
    with pytest.raises(client.DeadlineExceeded, match="leased"):
        client.connect(lock="RW", if_match=generation, deadline_s=0.05)
    save.detach()
    client.connect(lock="RW", if_match=generation, deadline_s=5.0).close()


@pytest.mark.parametrize("where", [0, 16 * MIB - 1])
def test_one_flipped_bit_fails_the_load_and_leaves_no_memory(saved: Weights, where: int) -> None:
    flip(saved.path / "shard-0000.bin", where)
    # Its memory is free when its process has ended.
    with pytest.raises(errors.ArtifactCorrupt) as caught:
        saved.apart(saved.load_task())
    assert caught.value.values["file"] == "shard-0000.bin"
    assert caught.value.values["chunk"] == where // (8 * MIB)
    wait_until(lambda: saved.service.device(1).used == 0)


@pytest.mark.parametrize("damage", ["link", "fifo", "linked folder"])
def test_files_that_are_not_what_was_written_are_refused(saved: Weights, damage: str) -> None:
    task = saved.load_task()
    wrong = saved.path if damage == "linked folder" else saved.path / "shard-0001.bin"
    elsewhere = wrong.rename(wrong.with_name("elsewhere"))
    if damage == "fifo":
        os.mkfifo(wrong)
    else:
        wrong.symlink_to(elsewhere)
    with pytest.raises(errors.ArtifactCorrupt):
        saved.apart(task)
    wait_until(lambda: saved.service.device(1).used == 0)


@pytest.mark.parametrize("name", ["shard-0000.bin", "part.json"])
def test_a_missing_file_is_named(saved: Weights, name: str) -> None:
    task = saved.load_task()
    (saved.path / name).unlink()
    with pytest.raises(errors.ArtifactMissing, match=name):
        saved.run(task)


def test_a_manifest_that_is_not_the_sealed_one_is_refused(saved: Weights) -> None:
    task = saved.load_task()
    saved.forge(lambda m: msgspec.structs.replace(m, order=f"save-{UID}-gpu-9"))
    with pytest.raises(errors.ArtifactCorrupt, match="not the one that was sealed"):
        saved.run(task)


@pytest.mark.parametrize(
    "change", [{"generation": 2}, {"part": "gpu-1"}, {"layout": None}, {"bytes": 5}, {"files": []}]
)
def test_a_manifest_that_contradicts_itself_is_refused_even_with_the_right_digest(
    saved: Weights, change: dict[str, Any]
) -> None:
    forged = saved.forge(lambda m: msgspec.structs.replace(m, **change))
    with pytest.raises(errors.ArtifactCorrupt):
        saved.run(saved.load_task(part_digest=forged))


def test_an_artifact_of_another_layout_is_refused(saved: Weights) -> None:
    with pytest.raises(errors.Incompatible):
        saved.run(saved.load_task(structure_hash="ab" * 32))


def test_a_device_that_is_too_small_is_refused_with_both_values_before_it_is_touched(
    launch: Any, tmp_path: Path
) -> None:
    service = launch(capacities=(64 * MIB, 16 * MIB))
    capture = Weights(service, tmp_path, ARRAYS)
    capture.run(capture.save_task())
    with pytest.raises(errors.DeviceTooSmall) as caught:
        capture.run(capture.load_task())
    assert caught.value.values == {"needed": 26 * MIB, "capacity": 16 * MIB}
    assert service.device(1).used == 0


def test_a_load_waits_for_the_memory_that_an_engine_gives_up_as_long_as_it_may(
    saved: Weights,
) -> None:
    with client.connect(1, lock="RW", domain="kv") as cache:
        cache.allocate("k", 50 * MIB, "u1")
        with pytest.raises(errors.OutOfDeviceMemory):
            saved.run(saved.load_task(memory_wait_s=0))
        with later(cache.sleep):
            saved.run(saved.load_task())


def start_child(*arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "gms.transfer_child", *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_a_transfer_ends_with_the_process_that_started_it(capture: Weights) -> None:
    blocker = client.connect(1, lock="RW")
    capture.run(capture.save_task())
    with start_child("load") as child:
        assert child.stdin is not None
        child.stdin.write(encode_json(capture.load_task(deadline_s=600.0)) + b"\n")
        child.stdin.close()
        assert child.wait(10) == 3
    blocker.close()


@pytest.mark.parametrize(
    ("verb", "task"),
    [("copy", b"{}\n"), ("", b"{}\n"), ("save", b"{}\n"), ("load", b"no json\n"), ("load", b"")],
)
def test_a_task_that_makes_no_sense_is_answered_as_one(verb: str, task: bytes) -> None:
    with start_child(*verb.split()) as child:
        out, _ = child.communicate(task, timeout=10)
        assert child.returncode == 2
    event = msgspec.json.decode(out, type=tasks.TransferEvent)
    assert isinstance(event, tasks.TransferFailed)
    assert event.reason in ("InvalidInput", "InvalidMessage")


def test_the_program_imports_nothing_heavy() -> None:
    code = (
        "import sys, gms.transfer_child.__main__\n"
        "print(sorted({'grpc', 'nats', 'opentelemetry', 'asyncio', 'numpy',\n"
        "              'obstore'} & set(sys.modules)))\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert found.stdout == b"[]\n"


def test_a_backend_that_is_not_installed_leaves_no_part(capture: Weights) -> None:
    with pytest.raises(errors.InvalidInput, match="SNAPBACK_TRANSFER_BACKEND='nixl'"):
        capture.run(capture.save_task(backend="nixl"))
    assert not capture.path.exists()


def files_of(capture: Weights, uid: str) -> dict[str, Path]:
    folder = capture.root / PART.replace(UID, uid)
    return {path.name: path for path in folder.glob("shard-*")}


def links_of(capture: Weights) -> list[int]:
    """How many names the files of the second capture have, each."""
    return [path.stat().st_nlink for _, path in sorted(files_of(capture, OTHER).items())]


def test_a_save_of_an_unchanged_layout_writes_nothing_and_outlives_its_parent(
    capture: Weights,
) -> None:
    task = capture.seal_and_save_again()
    again = capture.events(task)
    done = again[-1]
    assert isinstance(done, tasks.TransferDone)
    assert done.moved == 0
    progress = [event for event in again if isinstance(event, tasks.TransferProgress)]
    assert progress[-1].done == progress[-1].total == done.bytes
    older, newer = files_of(capture, UID), files_of(capture, OTHER)
    assert all(newer[name].samefile(older[name]) for name in older)
    capture.run(capture.load_task())  # The parent still loads.
    shutil.rmtree(capture.root / "default" / UID)
    capture.run(capture.load_task(content_uid=OTHER, load_token="l2"))


def test_a_save_of_a_layout_that_changed_in_one_place_writes_that_file(capture: Weights) -> None:
    task = capture.seal_and_save_again()
    entry = capture.manifest().files[0]
    path = files_of(capture, UID)["shard-0000.bin"]
    # As if the layout had held other bytes then, and the file says so truthfully.
    path.unlink()
    path.write_bytes(bytes(entry.size))
    digests = [
        xxhash.xxh3_128_hexdigest(bytes(min(entry.chunk_bytes, entry.size - at)))
        for at in range(0, entry.size, entry.chunk_bytes)
    ]
    capture.forge(
        lambda m: msgspec.structs.replace(
            m, files=[msgspec.structs.replace(entry, chunks=digests), *m.files[1:]]
        )
    )
    done = capture.run(task)
    assert done.moved == entry.size
    assert links_of(capture) == [1, 2]


def test_a_file_of_the_parent_that_is_damaged_is_not_shared(capture: Weights) -> None:
    task = capture.seal_and_save_again()
    path = files_of(capture, UID)["shard-0001.bin"]
    flip(path)
    done = capture.run(task)
    assert done.moved == path.stat().st_size
    assert links_of(capture) == [2, 1]
    capture.run(capture.load_task(content_uid=OTHER))


def parent(uid: str) -> ArtifactRef:
    digest = "sha256:" + "0" * 64
    return ArtifactRef(namespace="default", content_uid=uid, generation=1, root_digest=digest)


@pytest.mark.parametrize("named", [None, parent(UID)])
def test_a_generation_that_is_not_sealed_and_another_namespace_share_nothing(
    capture: Weights, named: ArtifactRef | None
) -> None:
    task = msgspec.structs.replace(capture.seal_and_save_again(), parent=named)
    done = capture.run(msgspec.structs.replace(task, namespace="other"))
    assert done.moved == done.bytes
    (capture.path.parent / "root.json").unlink()
    capture.layout = capture.fence("f3")
    done = capture.run(capture.save_task(content_uid=OTHER, fence_token="f3", parent=named))
    assert done.moved == done.bytes


def test_the_parent_that_is_named_comes_before_a_newer_artifact(capture: Weights) -> None:
    task = capture.seal_and_save_again()
    newer = UID.replace("1", "7")
    shutil.copytree(capture.root / "default" / UID, capture.root / "default" / newer)
    (capture.root / "default" / newer / "gen-1" / "root.json").touch()
    third = UID.replace("1", "8")
    for uid, named, shared in [(OTHER, parent(UID), UID), (third, parent(third), newer)]:
        done = capture.run(msgspec.structs.replace(task, content_uid=uid, parent=named))
        assert done.moved == 0
        ours, theirs = files_of(capture, uid), files_of(capture, shared)
        assert all(ours[name].samefile(theirs[name]) for name in theirs)
        capture.layout = capture.fence(f"after-{uid}")
        task = capture.save_task(fence_token=f"after-{uid}")


def test_what_is_wrong_with_older_artifacts_does_not_stop_a_save(
    capture: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = capture.seal_and_save_again()
    (capture.root / "default" / "a-file").write_text("")
    really_open = os.open

    def refusing(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        # For root no folder is shut.
        if path == "shut":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return really_open(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", refusing)
    (capture.root / "default" / "shut").mkdir()
    assert save(task, lambda _: None).moved == 0
    capture.layout = capture.fence("f3")
    shutil.rmtree(capture.root / "default" / OTHER)
    (capture.path / "part.json").write_text("no manifest")
    done = capture.run(capture.save_task(content_uid=OTHER, fence_token="f3"))
    assert done.moved == done.bytes


def lying_server(folder: Path, real: Path, lies_at: int) -> threading.Thread:
    """Serve one client as the real service does, but lie in the answer of this number."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(folder / LEASE_SOCKET))
    listener.listen()
    listener.settimeout(20)

    def serve() -> None:
        inbox = Inbox()
        with listener, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
            server.connect(str(real / LEASE_SOCKET))
            client_end, _ = listener.accept()
            with client_end:
                for number in itertools.count():
                    data, _ = inbox.receive(client_end)
                    if not data:
                        return
                    send(server, data)
                    data, descriptors = inbox.receive(server)
                    if number == lies_at:
                        lie = errors.ArtifactCorrupt("chunk 3 is damaged").to_failure()
                        data = encode_frame(ErrorReply.of(lie))
                    send(client_end, data, descriptors)
                    close_all(descriptors)

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


@pytest.mark.parametrize(
    "lies_at", range(6), ids=["attach", "allocate", "export", "metadata", "commit", "detach"]
)
def test_an_artifact_is_not_damaged_because_a_memory_server_says_so(
    saved: Weights, lies_at: int
) -> None:
    with tempfile.TemporaryDirectory(prefix="gms-") as folder:
        server = lying_server(Path(folder), saved.service.folder, lies_at)
        with pytest.raises(errors.ContainerFailed, match="chunk 3 is damaged"):
            load(saved.load_task(socket_dir=folder), lambda _: None)
        server.join()


def spare_processes() -> list[int]:
    words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in transfer_processes()}
    return [pid for pid, found in words.items() if b"either" in found.split(b"\0")]


async def spare(processes: TransferProcesses) -> int:
    """Wait until a process waits for a task, and give it."""
    await until(lambda: processes._spares, "a process waits for a task")
    (found,) = spare_processes()
    return found


def test_a_transfer_takes_a_process_that_waits_and_none_is_left_at_the_end(
    capture: Weights,
) -> None:
    async def run(processes: TransferProcesses, task: tasks.SaveTask | tasks.LoadTask) -> None:
        waiting = await spare(processes)
        last = [event async for event in processes.run(task)][-1]
        assert isinstance(last, tasks.TransferDone)
        assert waiting not in spare_processes()

    async def several() -> None:
        async with TransferProcesses(spares=1) as processes:
            await run(processes, capture.save_task())
            await run(processes, capture.load_task())

    capture.service.run(several())
    assert spare_processes() == []


def test_a_waiting_process_that_was_killed_is_replaced(capture: Weights) -> None:
    async def save() -> tasks.TransferEvent:
        async with TransferProcesses(spares=1) as processes:
            os.kill(await spare(processes), signal.SIGKILL)
            return [event async for event in processes.run(capture.save_task())][-1]

    assert isinstance(capture.service.run(save()), tasks.TransferDone)
