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
        # Python flushes standard output at its end; without a reader that has to go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code
