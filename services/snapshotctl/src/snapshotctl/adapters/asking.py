"""Puts one question to a worker, and prints its answer: the program that `ask` runs beside it.

It runs with the Python of the worker's container, so it needs the standard library alone, and no
new one. Its one argument is JSON: `to` (a socket in POD_SOCKET_DIR, or a port), `timeout_s`, and
either `line` or `method`, `path` and `body`.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

MAX_ANSWER_BYTES = 16 * 1024 * 1024
_REFUSED = 400
"""Answers from this status of HTTP on are errors."""


def main(argument: str) -> int:
    """Ask, and return the exit code: 1 with a line on standard error where there is no answer."""
    asked = json.loads(argument)
    where = _where(asked["to"])
    # The timeout of a socket is that of each read, and a worker may say a little at a time.
    signal.signal(signal.SIGALRM, _late)
    signal.setitimer(signal.ITIMER_REAL, max(asked["timeout_s"], 0.001))
    try:
        with _connected(where) as connection:
            answer = _line(connection, asked) if "line" in asked else _http(connection, asked)
    except (OSError, http.client.HTTPException, ValueError) as error:
        sys.stderr.write(f"{where}: {error or type(error).__name__}\n")
        return 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    sys.stdout.buffer.write(answer)
    return 0


def _late(_number: int, _frame: object) -> None:
    raise TimeoutError("the whole answer was not there in time")


def _where(to: str) -> str:
    """Return the address of a port, or the path of a socket."""
    if to.isascii() and to.isdigit():
        return f"127.0.0.1:{to}"
    return str(Path(os.environ["POD_SOCKET_DIR"]) / to)


def _connected(where: str) -> socket.socket:
    if not where.startswith("/"):
        host, _, port = where.partition(":")
        return socket.create_connection((host, int(port)))
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(where)
    except BaseException:
        connection.close()
        raise
    return connection


def _line(connection: socket.socket, asked: dict[str, Any]) -> bytes:
    connection.sendall(asked["line"].encode() + b"\n")
    with connection.makefile("rb") as answers:
        answer = answers.readline(MAX_ANSWER_BYTES)
    if not answer.endswith(b"\n"):
        raise ValueError("the worker hung up before the end of its answer")
    return answer


def _http(connection: socket.socket, asked: dict[str, Any]) -> bytes:
    client = http.client.HTTPConnection("localhost")
    client.sock = connection
    body = asked["body"].encode() or None
    headers = {"Content-Type": "application/json"} if body else {}
    client.request(asked["method"], asked["path"], body, headers)
    response = client.getresponse()
    answer = response.read(MAX_ANSWER_BYTES)
    if response.status >= _REFUSED:
        shown = " ".join(answer[:2000].decode("utf-8", "replace").split())
        raise ValueError(f"HTTP {response.status} {response.reason}: {shown}")
    return answer if answer.endswith(b"\n") else answer + b"\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
