"""The console script. It imports nothing slow, so that Ctrl-C is caught from the first moment."""

from __future__ import annotations

import os
import sys

INTERRUPTED = 130


def main() -> int:
    """Run a command and give its exit code. No traceback gets out of here."""
    try:
        from snapshotctl.main.commands import run  # noqa: PLC0415 - see above

        code = run(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader went away; what Python would still flush at its end must go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code
