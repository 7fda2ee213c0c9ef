"""Saves and loads: real child processes, real bytes, and artifacts that cannot be trusted."""

from __future__ import annotations

import contextlib
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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import xxhash

import snapback_client as client
from gms.adapters.simulated import SimulatedDevice
from gms.adapters.transfer_process import TransferProcesses
from gms.domain.tasks import (
    LoadTask,
    SaveTask,
    TransferDone,
    TransferEvent,
    TransferFailed,
    TransferLeased,
    TransferProgress,
)
from gms.transfer_child.load import load
from gms.transfer_child.save import save
from snapback_client.errors import GmsUnavailable
from snapback_client.frames import (
    LEASE_SOCKET,
    ErrorReply,
    encode_frame,
)
from snapback_client.wire import Inbox, close_all, send
from snapshot_shared.artifact import check_part_manifest
from snapshot_shared.codec import digest, encode_json
from snapshot_shared.errors import (
    ArtifactCorrupt,
    ArtifactExists,
    ArtifactMissing,
    ContainerFailed,
    DeviceTooSmall,
    Incompatible,
    InvalidInput,
    NotFound,
    OutOfDeviceMemory,
    SnapbackError,
    StaleLayout,
    TransferKilled,
)
from snapshot_shared.orders import ArtifactRef
from tests.bench.machine import huge_bytes_free
from tests.support.gms_rig import attach, children_of
from tests.support.waiting import until, wait_until
from tests.support.weights import OTHER, UID, Weights, digests_of, flip

MIB = 1024 * 1024
ARRAYS: dict[str, tuple[Any, Any]] = {
    "big": (20 * MIB + 3, "u1"),
    "matrix": ((300, 70), "f4"),
    "tiny": ((), "i8"),
}


@pytest.fixture
def capture(service: Any, tmp_path: Path) -> Weights:
    return Weights(service, tmp_path / "artifacts", ARRAYS)


def test_a_load_waits_for_a_service_that_is_being_started(capture: Weights) -> None:
    capture.run(capture.save_task())
    path = capture.service.folder / LEASE_SOCKET
    away = path.rename(path.with_suffix(".away"))
    threading.Timer(0.5, away.rename, [path]).start()
    assert isinstance(capture.events(capture.load_task())[-1], TransferDone)


def test_a_load_that_finds_no_service_says_so_and_may_be_tried_again(
    capture: Weights, tmp_path: Path
) -> None:
    capture.run(capture.save_task())
    task = capture.load_task(socket_dir=str(tmp_path), deadline_s=0.2)
    with pytest.raises(SnapbackError, match="no GPU memory service answers at ") as raised:
        capture.events(task)
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
        assert isinstance(events[0], TransferLeased)
        assert isinstance(events[-1], TransferDone)
        progress = [event for event in events if isinstance(event, TransferProgress)]
        assert [p.done for p in progress] == sorted({p.done for p in progress})
        assert progress[0].done == 0
        assert progress[-1].done == progress[-1].total == events[-1].bytes
        assert len(progress) >= 3, "more than the first and the last"


def test_a_part_has_shards_digests_and_a_manifest_that_proves_them(capture: Weights) -> None:
    done = capture.run(capture.save_task())
    manifest = capture.manifest()
    check_part_manifest(manifest)
    assert done.digest == digest((capture.path / "part.json").read_bytes())
    assert done.bytes == manifest.bytes == sum(f.size for f in manifest.files)
    assert [file.name for file in manifest.files] == ["shard-0000.bin", "shard-0001.bin"]
    assert manifest.layout is not None
    assert len(manifest.layout.allocations[0].extents) == 2, "an allocation may be split"
    for file in manifest.files:
        data = (capture.path / file.name).read_bytes()
        assert len(data) == file.size
        starts = range(0, file.size, file.chunk_bytes)
        chunks = [xxhash.xxh3_128_hexdigest(data[at : at + file.chunk_bytes]) for at in starts]
        assert chunks == file.chunks


def test_what_is_written_is_private(capture: Weights) -> None:
    capture.run(capture.save_task())
    for path in [capture.root, *capture.root.rglob("*")]:
        wanted = 0o700 if path.is_dir() else 0o600
        assert path.stat().st_mode & 0o777 == wanted, path


def test_a_save_that_is_done_ends_the_fence_and_a_repeat_gives_the_same_result(
    capture: Weights,
) -> None:
    first = capture.run(capture.save_task())
    assert capture.service.device().fence is None
    times = {path: path.stat().st_mtime_ns for path in capture.path.iterdir()}
    (again,) = capture.events(capture.save_task())
    assert again == msgspec.structs.replace(first, moved=0, backend=""), "nothing is written again"
    assert {path: path.stat().st_mtime_ns for path in capture.path.iterdir()} == times


def test_another_order_does_not_write_over_a_part(capture: Weights) -> None:
    capture.run(capture.save_task())
    with pytest.raises(ArtifactExists):
        capture.run(capture.save_task(order=f"save-{UID}-gpu-1"))


def test_a_part_that_was_left_half_written_is_not_written_over(capture: Weights) -> None:
    capture.path.mkdir(parents=True)
    (capture.path / "shard-0000.bin").write_bytes(b"half")
    with pytest.raises(SnapbackError):
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
    with pytest.raises(NotFound):
        capture.run(capture.save_task(fence_token="other"))
    wrong = msgspec.structs.replace(capture.layout, generation=9)
    with pytest.raises(StaleLayout):
        capture.run(capture.save_task(layout=wrong))
    assert not capture.path.exists()
    capture.run(capture.save_task())


def test_a_save_that_dies_keeps_the_fenced_layout_and_can_come_again(capture: Weights) -> None:
    async def first_event_only() -> None:
        async with contextlib.aclosing(TransferProcesses().run(capture.save_task())) as events:
            async for event in events:
                assert isinstance(event, TransferLeased)
                return

    capture.service.run(first_event_only())
    fence = capture.service.device().fence
    assert fence is not None
    assert fence.phase == "leased"
    shutil.rmtree(capture.path, ignore_errors=True)
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
def test_one_flipped_bit_fails_the_load_and_leaves_no_memory(capture: Weights, where: int) -> None:
    capture.run(capture.save_task())
    flip(capture.path / "shard-0000.bin", where)
    # Its memory is free when its process has ended.
    with pytest.raises(ArtifactCorrupt) as caught:
        capture.apart(capture.load_task())
    assert caught.value.values["file"] == "shard-0000.bin"
    assert caught.value.values["chunk"] == where // (8 * MIB)
    assert capture.service.device(1).used == 0


def _truncate(path: Path) -> None:
    os.truncate(path / "shard-0001.bin", 10)


def _link(path: Path) -> None:
    (path / "shard-0001.bin").rename(path / "elsewhere")
    (path / "shard-0001.bin").symlink_to(path / "elsewhere")


def _fifo(path: Path) -> None:
    (path / "shard-0001.bin").unlink()
    os.mkfifo(path / "shard-0001.bin")


def _linked_folder(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


@pytest.mark.parametrize("damage", [_truncate, _link, _fifo, _linked_folder])
def test_files_that_are_not_what_was_written_are_refused(
    capture: Weights, damage: Callable[[Path], None]
) -> None:
    capture.run(capture.save_task())
    task = capture.load_task()
    damage(capture.path)
    with pytest.raises(ArtifactCorrupt):
        capture.apart(task)
    assert capture.service.device(1).used == 0


@pytest.mark.parametrize("name", ["shard-0000.bin", "part.json"])
def test_a_missing_file_is_named(capture: Weights, name: str) -> None:
    capture.run(capture.save_task())
    task = capture.load_task()
    (capture.path / name).unlink()
    with pytest.raises(ArtifactMissing, match=name):
        capture.run(task)


def test_a_manifest_that_is_not_the_sealed_one_is_refused(capture: Weights) -> None:
    capture.run(capture.save_task())
    task = capture.load_task()
    capture.forge(lambda m: msgspec.structs.replace(m, order=f"save-{UID}-gpu-9"))
    with pytest.raises(ArtifactCorrupt, match="not the one that was sealed"):
        capture.run(task)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"generation": 2}, ArtifactCorrupt),
        ({"part": "gpu-1"}, ArtifactCorrupt),
        ({"layout": None}, ArtifactCorrupt),
        ({"bytes": 5}, ArtifactCorrupt),
        ({"files": []}, ArtifactCorrupt),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused_even_with_the_right_digest(
    capture: Weights, change: dict[str, Any], error: type[SnapbackError]
) -> None:
    capture.run(capture.save_task())
    forged = capture.forge(lambda m: msgspec.structs.replace(m, **change))
    with pytest.raises(error):
        capture.run(capture.load_task(part_digest=forged))


def test_an_artifact_of_another_layout_is_refused_with_both(capture: Weights) -> None:
    capture.run(capture.save_task())
    with pytest.raises(Incompatible) as caught:
        capture.run(capture.load_task(structure_hash="ab" * 32))
    assert caught.value.values == {
        "expected": "ab" * 32,
        "found": capture.layout.structure_hash,
    }


def test_a_device_that_is_too_small_is_refused_with_both_values_before_it_is_touched(
    launch: Any, tmp_path: Path
) -> None:
    service = launch(capacities=(64 * MIB, 16 * MIB))
    capture = Weights(service, tmp_path, ARRAYS)
    capture.run(capture.save_task())
    with pytest.raises(DeviceTooSmall) as caught:
        capture.run(capture.load_task())
    assert caught.value.values == {"needed": 26 * MIB, "capacity": 16 * MIB}
    assert service.device(1).used == 0


def test_a_device_that_is_full_is_refused_with_all_values(capture: Weights) -> None:
    capture.run(capture.save_task())
    with client.connect(1, lock="RW", domain="kv") as cache:
        cache.allocate("k", 50 * MIB, "u1")
        with pytest.raises(OutOfDeviceMemory) as caught:
            capture.run(capture.load_task(memory_wait_s=0))
    assert caught.value.values == {
        "needed": 26 * MIB,
        "free": 14 * MIB,
        "capacity": 64 * MIB,
        "used": 50 * MIB,
        "holders": {},
    }


def test_a_load_waits_for_the_memory_that_an_engine_gives_up(capture: Weights) -> None:
    capture.run(capture.save_task())
    with client.connect(1, lock="RW", domain="kv") as cache:
        cache.allocate("k", 50 * MIB, "u1")
        timer = threading.Timer(0.5, cache.sleep)
        timer.start()
        capture.run(capture.load_task())
        timer.join()


def test_a_second_load_under_one_token_is_refused_and_the_first_stays(capture: Weights) -> None:
    capture.run(capture.save_task())
    capture.run(capture.load_task())
    with pytest.raises(SnapbackError):
        capture.run(capture.load_task())
    (load,) = capture.service.device(1).loads
    assert (load.load_token, load.bytes) == ("l1", 26 * MIB)


def start_child(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "gms.transfer_child", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


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
    ("arguments", "task"),
    [
        (["copy"], b"{}\n"),
        ([], b"{}\n"),
        (["save"], b"{}\n"),
        (["load"], b"no json\n"),
        (["load"], b""),
    ],
)
def test_a_task_that_makes_no_sense_is_answered_as_one(arguments: list[str], task: bytes) -> None:
    with start_child(*arguments) as child:
        out, _ = child.communicate(task, timeout=10)
        assert child.returncode == 2
    event = msgspec.json.decode(out, type=TransferEvent)
    assert isinstance(event, TransferFailed)
    assert event.reason in ("InvalidInput", "InvalidMessage")


def test_a_transfer_process_that_is_killed_is_reported(capture: Weights) -> None:
    capture.run(capture.save_task())
    task = capture.load_task(deadline_s=600.0)
    with client.connect(1, lock="RW"), ThreadPoolExecutor(1) as pool:
        result = pool.submit(capture.events, task)
        queue = wait_until(lambda: capture.service.device(1).domains[0].waiting)
        os.kill(queue[0].pid, signal.SIGKILL)
        with pytest.raises(TransferKilled, match="signal 9"):
            result.result(20)


def test_the_program_imports_nothing_heavy() -> None:
    code = (
        "import sys, gms.transfer_child.__main__\n"
        "print(sorted({'grpc', 'nats', 'opentelemetry', 'asyncio', 'numpy'} & set(sys.modules)))\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert found.stdout == b"[]\n"


def test_the_backend_that_was_chosen_moves_the_bytes_and_is_named(capture: Weights) -> None:
    saved = capture.run(capture.save_task(backend="posix-buffered"))
    loaded = capture.run(capture.load_task(backend="posix-direct"))
    assert (saved.backend, loaded.backend) == ("posix-buffered", "posix-direct")
    assert saved.moved == saved.bytes == loaded.moved


def test_a_backend_that_is_not_installed_leaves_no_part(capture: Weights) -> None:
    with pytest.raises(InvalidInput, match="SNAPBACK_TRANSFER_BACKEND='nixl'"):
        capture.run(capture.save_task(backend="nixl"))
    assert not capture.path.exists()


def files_of(capture: Weights, uid: str) -> dict[str, Path]:
    folder = capture.root / "default" / uid / "gen-1" / "gpu-0"
    return {path.name: path for path in folder.glob("shard-*")}


def test_a_save_of_an_unchanged_layout_writes_nothing_and_outlives_its_parent(
    capture: Weights,
) -> None:
    task = capture.seal_and_save_again()
    again = capture.events(task)
    done = again[-1]
    assert isinstance(done, TransferDone)
    assert done.moved == 0
    progress = [event for event in again if isinstance(event, TransferProgress)]
    assert progress[-1].done == progress[-1].total == done.bytes
    older, newer = files_of(capture, UID), files_of(capture, OTHER)
    assert all(newer[name].samefile(older[name]) for name in older)
    capture.run(capture.load_task())  # The parent still loads.
    shutil.rmtree(capture.root / "default" / UID)
    capture.path = capture.root / "default" / OTHER / "gen-1" / "gpu-0"
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
    newer = files_of(capture, OTHER)
    assert [newer[name].stat().st_nlink for name in sorted(newer)] == [1, 2]


def test_a_file_of_the_parent_that_is_damaged_is_not_shared(capture: Weights) -> None:
    task = capture.seal_and_save_again()
    path = files_of(capture, UID)["shard-0001.bin"]
    with path.open("r+b") as shard:
        shard.write(b"\xff")
    done = capture.run(task)
    assert done.moved == path.stat().st_size
    newer = files_of(capture, OTHER)
    assert [newer[name].stat().st_nlink for name in sorted(newer)] == [2, 1]
    capture.path = capture.root / "default" / OTHER / "gen-1" / "gpu-0"
    capture.run(capture.load_task(content_uid=OTHER))


def test_a_generation_that_is_not_sealed_and_another_namespace_share_nothing(
    capture: Weights,
) -> None:
    task = capture.seal_and_save_again()
    done = capture.run(msgspec.structs.replace(task, namespace="other"))
    assert done.moved == done.bytes
    (capture.path.parent / "root.json").unlink()
    capture.layout = capture.fence("f3")
    done = capture.run(capture.save_task(content_uid=OTHER, fence_token="f3"))
    assert done.moved == done.bytes


def parent(uid: str, namespace: str = "default") -> ArtifactRef:
    return ArtifactRef(
        namespace=namespace, content_uid=uid, generation=1, root_digest="sha256:" + "0" * 64
    )


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


def test_a_named_parent_that_was_not_sealed_or_is_of_another_namespace_shares_nothing(
    capture: Weights,
) -> None:
    task = capture.seal_and_save_again()
    elsewhere = msgspec.structs.replace(task, namespace="other", parent=parent(UID))
    done = capture.run(elsewhere)
    assert done.moved == done.bytes
    (capture.path.parent / "root.json").unlink()
    capture.layout = capture.fence("f3")
    done = capture.run(capture.save_task(content_uid=OTHER, fence_token="f3", parent=parent(UID)))
    assert done.moved == done.bytes


def test_what_is_wrong_with_older_artifacts_does_not_stop_a_save(capture: Weights) -> None:
    task = capture.seal_and_save_again()
    (capture.path / "part.json").write_text("no manifest")
    (capture.root / "default" / "a-file").write_text("")
    done = capture.run(task)
    assert done.moved == done.bytes


def test_a_folder_that_cannot_be_entered_does_not_stop_a_save(
    capture: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = capture.seal_and_save_again()
    shut = capture.root / "default" / "shut"
    shut.mkdir()
    really_open = os.open

    def refusing(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        # For root no folder is shut.
        if path == shut.name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return really_open(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", refusing)
    assert save(task, lambda _: None).moved == 0


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
                        lie = ArtifactCorrupt("chunk 3 is damaged").to_failure()
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
    capture: Weights, lies_at: int
) -> None:
    capture.run(capture.save_task())
    with tempfile.TemporaryDirectory(prefix="gms-") as folder:
        server = lying_server(Path(folder), capture.service.folder, lies_at)
        with pytest.raises(ContainerFailed, match="chunk 3 is damaged"):
            load(capture.load_task(socket_dir=folder), lambda _: None)
        server.join()


def spare_processes() -> list[int]:
    found = []
    for pid in children_of():
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"gms.transfer_child" in command and b"either" in command:
            found.append(pid)
    return found


async def spare(processes: TransferProcesses) -> int:
    """Wait until a process waits for a task, and give it."""
    await until(lambda: processes._spares, "a process waits for a task")
    (found,) = spare_processes()
    return found


def test_a_transfer_takes_a_process_that_waits_and_none_is_left_at_the_end(
    capture: Weights,
) -> None:
    async def run(processes: TransferProcesses, task: SaveTask | LoadTask) -> None:
        waiting = await spare(processes)
        last = [event async for event in processes.run(task)][-1]
        assert isinstance(last, TransferDone)
        assert waiting not in spare_processes()

    async def several() -> None:
        async with TransferProcesses(spares=1) as processes:
            await run(processes, capture.save_task())
            await run(processes, capture.load_task())

    capture.service.run(several())
    assert spare_processes() == []


def test_a_waiting_process_that_was_killed_is_replaced(capture: Weights) -> None:
    async def save() -> TransferEvent:
        async with TransferProcesses(spares=1) as processes:
            os.kill(await spare(processes), signal.SIGKILL)
            return [event async for event in processes.run(capture.save_task())][-1]

    assert isinstance(capture.service.run(save()), TransferDone)
