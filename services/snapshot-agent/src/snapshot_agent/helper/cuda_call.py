"""One call of the CUDA driver for each of some processes: `… cuda_call VERB VALUE PARENT PID…`.

It may hang within the driver, and is killed then; it ends with its parent. It prints a line of JSON
for each process: pid, status, name, and value. VERB is lock (VALUE is the timeout in milliseconds),
checkpoint, restore (VALUE has pairs of hexadecimal uuids, `old:new`, with commas between), unlock,
state or thread.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
from typing import Any

_PR_SET_PDEATHSIG = 1


class Driver:
    """The driver, initialised. ImportError, OSError or RuntimeError when it is missing."""

    def __init__(self) -> None:
        """Load cuda-bindings and the driver; cuInit is part of what a restore needs."""
        self._api: Any = importlib.import_module("cuda.bindings.driver")
        (status,) = self._api.cuInit(0)
        if int(status) != 0:
            raise RuntimeError(f"cuInit: {status.name}")

    def call(self, verb: str, value: str, pid: int) -> tuple[Any, ...]:
        """Make a call and return its status and what else it returned."""
        api = self._api
        match verb:
            case "lock":
                lock = api.CUcheckpointLockArgs()
                lock.timeoutMs = int(value)
                found = api.cuCheckpointProcessLock(pid, lock)
            case "checkpoint":
                found = api.cuCheckpointProcessCheckpoint(pid, None)
            case "restore":
                found = api.cuCheckpointProcessRestore(pid, self._placement(value))
            case "unlock":
                found = api.cuCheckpointProcessUnlock(pid, None)
            case "state":
                found = api.cuCheckpointProcessGetState(pid)
            case "thread":
                found = api.cuCheckpointProcessGetRestoreThreadId(pid)
            case _:
                raise ValueError(verb)
        return tuple(found)

    def _placement(self, value: str) -> Any:
        if not value:
            return None
        api, pairs = self._api, []
        for words in value.split(","):
            old, _, new = words.partition(":")
            pair = api.CUcheckpointGpuPair()
            pair.oldUuid, pair.newUuid = self._uuid(old), self._uuid(new)
            pairs.append(pair)
        args = api.CUcheckpointRestoreArgs()
        args.gpuPairs, args.gpuPairsCount = pairs, len(pairs)
        return args

    def _uuid(self, digits: str) -> Any:
        uuid = self._api.CUuuid()
        # Its bytes cannot be assigned.
        ctypes.memmove(uuid.getPtr(), bytes.fromhex(digits), 16)
        return uuid


def main(arguments: list[str]) -> int:
    """Make the calls, in the order of the processes."""
    verb, value, parent, *pids = arguments
    # A call whose answer no program waits for any more must not begin.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != int(parent):
        return 1
    try:
        driver = Driver()
    except (ImportError, OSError, RuntimeError) as error:
        # cuda-bindings has an error of its own, a RuntimeError, where there is no library, and an
        # OSError where their search for libraries finds no folder for temporary files.
        _say({"missing": str(error).splitlines()[0]})
        return 1
    for pid in pids:
        status, *values = driver.call(verb, value, int(pid))
        found = int(values[0]) if values and int(status) == 0 else 0
        _say({"pid": int(pid), "status": int(status), "name": status.name, "value": found})
    return 0


def _say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    # The driver's own threads and handlers may hang at the end of the interpreter.
    os._exit(code)
