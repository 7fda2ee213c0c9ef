"""Waiting for workers, which may end meanwhile."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from snapshot_agent.domain.gate import source_exited
from snapshot_agent.handlers.background import first
from snapshot_agent.ports import Worker, Workers


async def while_alive(workers: Workers, worker: Worker, work: Coroutine[Any, Any, object]) -> None:
    """Wait for something while the worker lives. SourceExited with its exit code when not."""
    index, code = await first(work, workers.ended(worker.process))
    if index == 1:
        raise source_exited(worker.pod, code if isinstance(code, int) else None)
