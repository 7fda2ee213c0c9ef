"""What the driver `criu+cuda` asks of the kubelet and of the helper of its node."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import xxhash

from snapshot_agent.adapters.criu_cuda import AGAIN_S, CriuCuda, GpusUnknown
from snapshot_agent.domain import helping
from snapshot_agent.domain.control import ContainerPaths
from snapshot_agent.domain.driving import Phase
from snapshot_agent.ports import DriverState, Dump, Process, RestoreSource, Worker
from snapshot_shared.artifact import FileEntry
from snapshot_shared.codec import decode_json, encode_json
from snapshot_shared.errors import ArtifactCorrupt, CriuFailed, NotEligible
from snapshot_shared.files import open_root, opened
from snapshot_shared.orders import PodRef
from snapshot_shared.tasks import readable
from tests.support.agent_rig import ignored, stat_of
from tests.support.cuda_rig import GivenDevices

POD = PodRef(namespace="default", name="llm", uid="00000000-0000-4000-8000-000000000001")
A, B = (f"GPU-{n}0000000-0000-4000-8000-000000000000" for n in "ab")


class Helper:
    """The other end of the helper's socket."""

    def __init__(self, path: Path) -> None:
        self.asked: list[helping.Request] = []
        self.verdicts: list[bytes] = []
        self.awaits_verdict = False
        self.answers: helping.Reply = helping.Done()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.setblocking(False)
        self._serving = asyncio.ensure_future(self._serve())

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            caller, _ = await loop.sock_accept(self._listener)
            with caller:
                await readable(caller.fileno())
                data, fds, _, _ = socket.recv_fds(caller, 65536, 1)
                self.asked.append(decode_json(data, helping.Request, limit=65536))  # type: ignore[arg-type]
                if self.awaits_verdict:
                    await readable(fds[0])
                    self.verdicts.append(os.read(fds[0], 1))
                for fd in fds:
                    os.close(fd)
                await loop.sock_sendall(caller, encode_json(self.answers))

    async def close(self) -> None:
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)
        self._listener.close()


@pytest.fixture
def kubelet() -> GivenDevices:
    return GivenDevices(A, B)


@pytest.fixture
def clock() -> list[float]:
    """The time; its last is now."""
    return [1000.0]


@pytest.fixture
async def helper(tmp_path: Path) -> AsyncIterator[Helper]:
    made = Helper(tmp_path / "helper.sock")
    yield made
    await made.close()


@pytest.fixture
def driver(tmp_path: Path, kubelet: GivenDevices, clock: list[float]) -> CriuCuda:
    return CriuCuda(tmp_path / "helper.sock", lambda: clock[-1], kubelet)


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    paths = ContainerPaths(tmp_path, tmp_path, placeholder=tmp_path)
    return Worker(POD, Process(*stat_of(os.getpid()).key), paths)


async def test_the_helper_is_told_which_gpus_the_kubelet_gave_to_a_worker_if_that_answers(
    driver: CriuCuda, helper: Helper, worker: Worker, kubelet: GivenDevices
) -> None:
    helper.answers = helping.Done(bytes=7)
    assert await driver.inspect(worker, quiet=True) == 7
    kubelet.answers = False
    with pytest.raises(GpusUnknown) as caught:
        await driver.inspect(worker, quiet=False)
    assert caught.value.retryable
    [asked] = helper.asked
    assert isinstance(asked, helping.Inspect)
    assert asked.gpus == [A, B]


@pytest.mark.parametrize("was_there", [False, True])
async def test_a_helper_that_starts_after_its_agent_is_waited_for(
    driver: CriuCuda, worker: Worker, tmp_path: Path, *, was_there: bool
) -> None:
    if was_there:
        # One that was killed leaves its socket, at which nothing listens.
        await Helper(tmp_path / "helper.sock").close()
    asked = asyncio.ensure_future(driver.inspect(worker, quiet=True))
    await asyncio.sleep(0.3)
    assert not asked.done()
    helper = Helper(tmp_path / "started.sock")
    (tmp_path / "started.sock").rename(tmp_path / "helper.sock")
    helper.answers = helping.Done(bytes=7)
    assert await asked == 7
    await helper.close()


async def test_a_restore_names_the_gpus_here_and_those_that_have_the_weights(
    driver: CriuCuda, helper: Helper, worker: Worker, kubelet: GivenDevices, clock: list[float]
) -> None:
    kubelet.uuids = [B]
    helper.answers = helping.Done(pid=9, start=8)

    source = RestoreSource(-1, ["part"], [], {A: B}, clock[-1] + 10, ignored)
    assert await driver.restore(worker, source) == Process(9, 8)
    [asked] = helper.asked
    assert isinstance(asked, helping.RestoreRequest)
    assert (asked.gpus, asked.chosen) == ([B], {A: B})


@pytest.mark.parametrize("awaits_verdict", [True, False], ids=["helper", "earlier helper"])
@pytest.mark.parametrize("is_whole", [True, False])
async def test_a_process_is_restored_only_if_its_pages_are_right(
    driver: CriuCuda,
    helper: Helper,
    worker: Worker,
    clock: list[float],
    tmp_path: Path,
    *,
    awaits_verdict: bool,
    is_whole: bool,
) -> None:
    helper.awaits_verdict = awaits_verdict
    helper.answers = helping.Done(pid=9, start=8)
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "pages-1.img").write_bytes(b"pages")
    digest = xxhash.xxh3_128_hexdigest(b"pages" if is_whole else b"other")
    pages = FileEntry(name="pages-1.img", size=5, chunk_bytes=4096, chunks=[digest])

    with opened(open_root(tmp_path / "part")) as part:
        source = RestoreSource(part, ["part"], [pages], {}, clock[-1] + 10, ignored)
        if is_whole:
            assert await driver.restore(worker, source) == Process(9, 8)
        else:
            with pytest.raises(ArtifactCorrupt, match=r"pages-1\.img: chunk 0"):
                await driver.restore(worker, source)
    expected = helping.WHOLE if is_whole else b"0"
    assert helper.verdicts == ([expected] if awaits_verdict else [])


async def test_a_dump_is_done_with_its_worker_before_it_reads_what_was_written(
    driver: CriuCuda, helper: Helper, worker: Worker, clock: list[float], tmp_path: Path
) -> None:
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "pages-1.img").write_bytes(b"pages")
    heard: list[str] = []

    async def read(done: int) -> None:
        heard.append(f"{done} bytes are read")

    async def goes_on() -> None:
        heard.append("the worker goes on")

    with opened(open_root(tmp_path / "pages")) as part:
        dump = Dump(worker, 1, clock[-1] + 10, read, part, goes_on=goes_on)
        helper.answers = helping.Failed(failure=CriuFailed("it was told to").to_failure())
        with pytest.raises(CriuFailed):
            await driver.dump(dump)
        # How the worker is has to be settled yet.
        assert heard == []
        helper.answers = helping.Done()
        await driver.dump(dump)
    assert heard == ["the worker goes on", "5 bytes are read"]


async def test_the_cuda_driver_is_looked_for_once_a_minute_and_criu_each_time(
    driver: CriuCuda, helper: Helper, clock: list[float]
) -> None:
    for _ in range(3):
        assert (await driver.state()).failure is None
    assert helper.asked == [helping.Ping(cuda=True), helping.Ping(), helping.Ping()]
    clock.append(clock[-1] + AGAIN_S)
    helper.answers = helping.Failed(failure=NotEligible("no driver").to_failure())
    assert (await driver.state()).failure is not None
    # One that is not fit is looked at again at once.
    helper.answers = helping.Done()
    assert (await driver.state()).failure is None
    assert helper.asked[3:] == [helping.Ping(cuda=True)] * 2


async def test_a_node_says_why_its_helper_is_not_fit_and_of_which_version_its_programs_are(
    driver: CriuCuda, helper: Helper
) -> None:
    why = NotEligible("too old", next_step="use a newer one").to_failure()
    helper.answers = helping.Done(criu="4.1.1", cuda_driver="570.133.20", unfit=why)
    assert await driver.state() == DriverState(why, "4.1.1", "570.133.20")


async def test_a_node_says_that_its_helper_does_not_answer(driver: CriuCuda) -> None:
    failure = (await driver.state()).failure
    assert failure is not None
    assert (failure.reason, failure.retryable) == ("HelperUnavailable", True)
    assert "see why the helper of this node does not run" in failure.next_step


def test_a_worker_is_let_go_with_time_for_the_memory_of_its_devices(
    driver: CriuCuda, worker: Worker
) -> None:
    release = driver.release(worker, Phase.BEGUN)
    assert release.within_s > 10 + 2 * 640e9 / 5e9
    assert release.program[-3:-1] == (str(worker.process.pid), str(worker.process.start))
    assert driver.release(worker, Phase.SIGNAL).program == ()
