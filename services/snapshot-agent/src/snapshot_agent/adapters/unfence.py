"""Ends a fence where no agent does: a guard whose agent is gone starts this program.

`python -m snapshot_agent.adapters.unfence <socket folder of GMS> <token>`. A guard has no gRPC of
its own, because it must start at once.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from snapshot_agent.adapters.gms_grpc import GmsClient
from snapshot_shared.errors import SnapbackError


async def end_fence(socket_dir: Path, token: str) -> None:
    """End one fence; one that is not there, or whose GMS is gone, has ended."""
    client = GmsClient(socket_dir)
    try:
        await client.unfence(token)
    finally:
        await client.close()


def main(arguments: list[str]) -> int:
    """End the fence that the arguments name."""
    folder, token = arguments
    try:
        asyncio.run(end_fence(Path(folder), token))
    except SnapbackError as error:
        sys.stderr.write(f"unfence: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
