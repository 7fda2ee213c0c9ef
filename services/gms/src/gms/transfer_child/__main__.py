"""The entry point: one task on standard input, its events on standard output, as JSON lines.

With `cuda` as second argument the task is about a GPU, and the driver starts before it comes.
The process ends when standard input closes, because then the process that started it is gone. It is
on the critical path of every restore, so it imports little.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from gms.domain.tasks import LoadTask, SaveTask, TransferDone, TransferEvent, TransferFailed
from gms.transfer_child.copies import hand_out, take
from gms.transfer_child.load import load
from gms.transfer_child.save import save
from gms.transfer_child.session import Emit
from snapshot_shared.codec import MAX_MESSAGE_BYTES, decode_json, encode_json
from snapshot_shared.errors import InvalidInput, failure_of
from snapshot_shared.spans import parse_traceparent

_PR_SET_PDEATHSIG = 1

_INFO_LEVELS = ("DEBUG", "INFO")

_KINDS: dict[str, Any] = {"save": SaveTask, "load": LoadTask, "either": SaveTask | LoadTask}


def main(arguments: Sequence[str]) -> int:
    """Carry out one task. Return 0 when it is done, 1 when it failed, 2 when it is not valid."""
    libc = ctypes.CDLL(None, use_errno=True)
    # The thread below sees the end of standard input; this covers the time until it runs.
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    emit = _emitter()
    try:
        if not arguments or arguments[0] not in _KINDS or arguments[1:] not in ([], ["cuda"]):
            raise InvalidInput("usage: python -m gms.transfer_child save|load|either [cuda]")
        with_gpu = _started_driver() if arguments[1:] else None
        task: SaveTask | LoadTask = decode_json(_read_line(), _KINDS[arguments[0]])
    except Exception as error:  # noqa: BLE001 - whatever it is, reported as a failed transfer
        # The parent may have ended while this spare process waited for its task.
        with contextlib.suppress(BrokenPipeError):
            emit(TransferFailed.of(failure_of(error)))
        return 2
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if with_gpu and not task.staged:
        with_gpu(task.device)
    verb = "save" if isinstance(task, SaveTask) else "load"
    try:
        done = _work_of(task)(emit)
    except Exception as error:  # noqa: BLE001 - the one place where a failure becomes an event
        failure = failure_of(error)
        _log(task, "WARNING", f"{verb} of {task.part} failed: {failure}")
        emit(TransferFailed.of(failure))
        return 2 if isinstance(error, InvalidInput) else 1
    _log(task, "INFO", f"{verb} of {task.part} is done: {done.bytes} bytes")
    emit(done)
    return 0


def _started_driver() -> Callable[[str], None] | None:
    """Start CUDA, where it can be. Return what has the context of a device made."""
    # Only here: the transfers of simulated devices need nothing of it.
    from gms.transfer_child import gpu  # noqa: PLC0415

    driver = gpu.started()
    return functools.partial(gpu.make_context, driver) if driver else None


def _work_of(task: SaveTask | LoadTask) -> Callable[[Emit], TransferDone]:
    if isinstance(task, SaveTask):
        return functools.partial(take if task.staged else save, task)
    return functools.partial(hand_out if task.staged else load, task)


def _log(task: SaveTask | LoadTask, level: str, message: str) -> None:
    """Log a line in the format of the services, on the standard error of the parent."""
    if level == "INFO" and os.environ.get("SNAPBACK_LOG_LEVEL", "INFO").upper() not in _INFO_LEVELS:
        return
    now = time.time()
    line = {
        "at": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z",
        "level": level,
        "service": "snap-transfer",
        "node": os.environ.get("SNAPBACK_NODE", ""),
        "logger": __spec__.name if __spec__ else __name__,
        "message": message,
    }
    if context := parse_traceparent(task.traceparent):
        line["trace_id"], line["span_id"] = context
    data = encode_json({**line, "order_id": task.order, "attempt": task.attempt})
    with contextlib.suppress(OSError):
        os.write(2, data + b"\n")


def _emitter() -> Emit:
    lock = threading.Lock()

    def emit(event: TransferEvent) -> None:
        data = memoryview(encode_json(event) + b"\n")
        with lock:
            while data:
                data = data[os.write(1, data) :]

    return emit


def _read_line() -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        piece = os.read(0, 65536)
        if not piece or len(data) > MAX_MESSAGE_BYTES:
            raise InvalidInput("a task is one line of JSON on standard input")
        data += piece
    return data


def _end_with_parent() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    # No clean-up: the lease ends with the process, and a part without manifest is no part.
    os._exit(3)


if __name__ == "__main__":
    # Not sys.exit: a thread that waits for standard input must not delay the end of the process.
    os._exit(main(sys.argv[1:]))
