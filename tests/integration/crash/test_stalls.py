"""SIGSTOP of each service while a worker is held: how long the worker is quiet.

A service that is stopped keeps its sockets and locks, so nothing sees that it does no work. Ten
seconds stand for any time: a worker that waited for the service would be quiet for as long.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from snapshot_agent.domain import control
from snapshot_agent.domain.spec import CONTROL_DIR
from snapshotctl.adapters import processes
from tests.integration.crash.crash_cases import CAPTURE, NODE, case, everything_settles_well
from tests.support import rules
from tests.support.agent_rig import below
from tests.support.live_cluster import LiveCluster

STOPPED_S = 10.0
SILENCE_S = 5.0
OWN_S = 3.0
"""What a small capture itself may take on a busy machine, in seconds; it takes 0.1 s."""

MOMENTS: dict[str, Callable[[Path, set[Path]], bool]] = {
    "asked": lambda folder, _: (folder / control.QUIESCE).exists(),
    "quiet": lambda folder, _: (folder / control.QUIESCED).exists(),
    "copied": lambda _, parts: bool(parts),
    "staged": lambda _, parts: any(part.exists() for part in parts),
}
"""Where a capture is, by the control directory of its worker and the manifests of its parts, whose
folders exist from the first byte on.

None of these is inside of CRIU, nor while a worker is replaced, where the deadline alone acts.
"""

ALWAYS = {("agent", "quiet")}


def _cases() -> Iterator[object]:
    for service in ("agent", "gms", "guard", "operator", "nats-server"):
        for moment in MOMENTS:
            marks = () if (service, moment) in ALWAYS else pytest.mark.slow
            yield pytest.param(service, moment, marks=marks, id=f"{service}-{moment}")


def _pid(cluster: LiveCluster, service: str) -> int | None:
    if service == "guard":
        found = below(Path(cluster.record.state_dir))
        return next((pid for pid, text in found.items() if "adapters.guard" in text), None)
    is_of_node = service in ("agent", "gms")
    return cluster.process(f"{NODE}-{service}" if is_of_node else service).pid


def _worker(run: str) -> Path | None:
    """The control directory of the one worker."""
    for pid in rules.workers(run):
        if folder := processes.environment_of(pid).get(CONTROL_DIR):
            return Path(folder)
    return None


def _seen(what: Callable[[], object], within_s: float = 60.0) -> float:
    """Return when something is first seen; in a thread, because a capture takes 0.1 s."""
    end = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < end, "nothing was seen"
        time.sleep(0.0005)
    return time.monotonic()


def _parts(cluster: LiveCluster) -> set[Path]:
    folders = cluster.artifacts.glob("default/*/gen-*/process")
    return {folder / "part.json" for folder in folders}


def _stopped_at(
    cluster: LiveCluster, service: str, moment: str, older: set[Path]
) -> tuple[int, float, Path]:
    """Stop a service at a moment of a capture, and return since when the worker is to be quiet.

    `older` are the parts of captures before it.
    """
    run = cluster.run
    _seen(lambda: _worker(run))
    folder = _worker(run)
    assert folder is not None
    asked = _seen((folder / control.QUIESCE).exists)
    pid = _pid(cluster, service)
    reached = MOMENTS[moment]
    _seen(
        lambda: reached(folder, _parts(cluster) - older) or not (folder / control.QUIESCE).exists()
    )
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    return pid, asked, folder


@pytest.mark.parametrize(("service", "moment"), [*_cases()])
async def test_a_service_that_is_stopped_keeps_a_worker_quiet_for_five_seconds_at_most(
    cluster: LiveCluster, service: str, moment: str, turn: int
) -> None:
    async with case(cluster) as session:
        stopping = asyncio.create_task(
            asyncio.to_thread(_stopped_at, cluster, service, moment, _parts(cluster))
        )
        await CAPTURE.then(session)
        pid, asked, folder = await stopping
        try:
            free = await asyncio.to_thread(
                _seen, lambda: not (folder / control.QUIESCE).exists(), STOPPED_S
            )
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        quiet_s = free - asked
        print(f"{service} stopped when {moment}: quiet for {quiet_s:.2f} s")
        assert quiet_s <= SILENCE_S + OWN_S
        await everything_settles_well(session)
