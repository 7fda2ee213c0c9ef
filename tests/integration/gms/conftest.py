"""A GPU memory service of its own for every test, in a thread of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.gms_rig import RunningGms


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """A folder whose path is short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="gms-") as folder:
        yield Path(folder)


Launch = Callable[..., RunningGms]


@pytest.fixture
def launch(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launch]:
    """Start a service with settings of its own; clients find it by the environment."""
    started: list[RunningGms] = []

    def start(**options: Any) -> RunningGms:
        running = RunningGms(socket_dir, **options)
        running.start()
        started.append(running)
        monkeypatch.setenv("GMS_SOCKET_DIR", str(socket_dir))
        monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", ",".join(running.uuids))
        return running

    yield start
    for running in started:
        running.stop()


@pytest.fixture
def service(launch: Launch) -> RunningGms:
    """A running service, and an environment in which clients find it."""
    return launch()
