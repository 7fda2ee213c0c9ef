"""Python code in a process of its own that starts at once: a fork of one that has the imports.

An interpreter with the imports of a client takes a fifth of a second of CPU to start, that of a
transfer half a second. The process that forks has one thread, so that every fork is sound. It ends
with the process of the tests.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 60.0
_MESSAGE = 128 * 1024


class Forks:
    """A process that has imported some modules, and forks for each piece of code."""

    def __init__(self, *modules: str) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(WITHIN_S)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.forks", *modules],
                cwd=ROOT,
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
                stdin=theirs,
                stdout=subprocess.DEVNULL,
            )

    def run(
        self,
        code: str,
        *arguments: str,
        stdin: bytes = b"",
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[bytes]:
        """Run code as `python -c` does, in the environment of this process unless told another.

        Its standard input is a pipe with these bytes, which stays open until it ends.
        """
        order = {
            "code": code,
            "arguments": ["-c", *arguments],
            "environment": dict(os.environ if environment is None else environment),
            "folder": str(Path.cwd()),
        }
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            given, giving = os.pipe()
            try:
                assert os.write(giving, stdin) == len(stdin)
                files = [given, out.fileno(), err.fileno()]
                socket.send_fds(self._control, [json.dumps(order).encode()], files)
                status = int(self._control.recv(_MESSAGE))
            finally:
                os.close(given)
                os.close(giving)
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(code, status, out.read(), err.read())

    def close(self) -> None:
        self._control.close()
        self._process.wait()


@functools.cache
def forks(*modules: str) -> Forks:
    """Return the process that has these imports, one for all tests of this process."""
    found = Forks(*modules)
    atexit.register(found.close)
    return found


def main() -> None:
    for name in sys.argv[1:]:
        importlib.import_module(name)
    with socket.socket(fileno=os.dup(0)) as control:
        while True:
            data, files, _, _ = socket.recv_fds(control, _MESSAGE, 3)
            if not data:
                return
            if (pid := os.fork()) == 0:
                control.close()
                os._exit(_become(json.loads(data), files))
            for file in files:
                os.close(file)
            _, status = os.waitpid(pid, 0)
            control.send(str(os.waitstatus_to_exitcode(status)).encode())


def _become(order: dict[str, str], files: list[int]) -> int:
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ |= order["environment"]
    os.chdir(order["folder"])
    sys.argv = list(order["arguments"])
    try:
        exec(compile(order["code"], "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001 - shown as an interpreter does
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    main()
