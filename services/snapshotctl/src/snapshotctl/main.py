"""The console script."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType

INTERRUPTED = 130


def main() -> int:
    """Run the command of `sys.argv` and return its exit code."""
    return _guarded(lambda cli: cli.run(sys.argv[1:]))


def plugin() -> int:
    """Do the same as `kubectl snapback`, in the cluster of kubectl's current context."""
    return _guarded(lambda cli: cli.run(sys.argv[1:], is_plugin=True))


def complete() -> int:
    """Print what may follow the words of `kubectl snapback`, as kubectl reads it."""
    return _guarded(lambda cli: cli.complete(sys.argv[1:]))


def _guarded(work: Callable[[ModuleType], int]) -> int:
    try:
        # Here and not above, so that Ctrl-C during the imports prints no traceback.
        from snapshotctl import cli  # noqa: PLC0415

        code = work(cli)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return 1
    except OSError as error:
        # A full disk, where standard output is a file: what typer prints by itself ends here.
        sys.stderr.write(f"error: {error.strerror or error}\n")
        _drop_output()
        return 1
    return code


def _drop_output() -> None:
    """Let what is still to be printed go nowhere: Python flushes standard output at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
