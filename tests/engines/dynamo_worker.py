"""A worker of Dynamo that can be captured: its own snapshot lifecycle around its own mocker.

As Dynamo's workers of vLLM and SGLang do, it is captured before it registers. The copy that was
restored applies the environment of its new container, and registers as that.
"""

from __future__ import annotations

import asyncio
import time

from dynamo.common.snapshot.lifecycle import SnapshotConfig, configure_snapshot_capture_env
from dynamo.common.snapshot.restore_context import (
    apply_snapshot_restore_env,
    maybe_run_restore_standby_mode,
)
from dynamo.mocker.main import main as serve

WARM_UP_S = 2.0


class Engine:
    """An engine that is warm and has nothing to pause."""

    def __init__(self) -> None:
        time.sleep(WARM_UP_S)

    async def pause(self, *_: object) -> None:
        """Do nothing."""


async def captured(config: SnapshotConfig) -> None:
    """Wait to be captured; return in the source when it is, and in a copy when it is restored."""
    if await config.run_lifecycle(Engine()):
        apply_snapshot_restore_env()


def main() -> None:
    """Run the worker with the arguments of the mocker."""
    maybe_run_restore_standby_mode()
    config = SnapshotConfig.from_env()
    if config is not None:
        configure_snapshot_capture_env()
        asyncio.run(captured(config))
    serve()


if __name__ == "__main__":
    main()
