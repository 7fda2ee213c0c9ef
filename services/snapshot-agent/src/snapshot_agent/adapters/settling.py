"""Has the helper settle a worker whose dump may be under way: it runs on, or it is ended.

`python -m snapshot_agent.adapters.settling <socket> <pid> <start> <answer_s>`, the last of which is
how long a helper may take. It is the release program of a worker that CRIU dumps, so guards start
it as well as agents. A helper that was asked to stop and has left nothing under way puts a plain
file in the place of its socket. One that ended otherwise and does not come back within RETURN_S has
ended with its CRIU, which breaks the connections of the worker: it is ended. One that is there and
gives no answer in time, as while it was asked to stop and waits for the dump of another worker,
settles this one before it ends, or the next helper does. It imports nothing outside the standard
library.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time
from pathlib import Path

from snapshot_agent.adapters.guard import let_go

RETURN_S = 6.0
"""How long to wait for a helper that starts anew, in seconds."""

ANSWER_S = 12.0
"""How long a helper may take to settle a worker, in seconds."""

CUDA_ANSWER_S = 300.0
"""The same where eight devices of 80 GB are to be given their memory, by a dump that ends or after
one that was killed."""

AGAIN_S = 0.1
_ANSWER_BYTES = 128 * 1024


def settle(
    path: str,
    process: tuple[int, int],
    return_s: float = RETURN_S,
    answer_s: float = ANSWER_S,
) -> bool:
    """Settle a process; whether it was ended."""
    limit = time.monotonic() + return_s
    while True:
        answer = _asked(path, process, answer_s)
        if answer is not None and answer.get("type") == "done":
            return bool(answer.get("ended"))
        if Path(path).is_file():
            return False
        if time.monotonic() > limit:
            if answer is None:
                return False
            let_go(process, ends=True)
            return True
        select.select([], [], [], AGAIN_S)


def _asked(path: str, process: tuple[int, int], answer_s: float) -> dict[str, object] | None:
    """Return the answer of the helper, empty when it is gone; None when it is there and is busy."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller:
        caller.settimeout(answer_s)
        try:
            caller.connect(path)
            request = {"type": "settle", "pid": process[0], "start": process[1]}
            caller.send(json.dumps(request).encode())
            found = json.loads(caller.recv(_ANSWER_BYTES) or b"{}")
        except (TimeoutError, BlockingIOError):
            # The second: as many wait already as may.
            return None
        except (OSError, ValueError):
            return {}
    return found if isinstance(found, dict) else {}


def main(arguments: list[str]) -> int:
    """Settle the process that the arguments name."""
    path, pid, start, answer_s = arguments
    if settle(path, (int(pid), int(start)), answer_s=float(answer_s)):
        sys.stderr.write(f"process {pid} was ended: its dump had been killed\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
