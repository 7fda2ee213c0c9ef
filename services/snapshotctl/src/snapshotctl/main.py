"""The console script."""

from __future__ import annotations

import os
import sys

INTERRUPTED = 130


def main() -> int:
    """Run the command of `sys.argv` and return its exit code."""
    try:
        # Here and not above, so that Ctrl-C during the imports prints no traceback.
        from snapshotctl.cli import run  # noqa: PLC0415

        code = run(sys.argv[1:])
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
