"""A script by which CRIU asks, within a dump or a restore, whether it may go on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, Self

_SCRIPT = """#!/bin/sh
[ "$CRTOOLS_SCRIPT_ACTION" = {action} ] || exit 0
echo 1<>asks
read -r status <answers
exit "$status"
"""


class ActionScript:
    """The script, in the folder in which CRIU works. Leaving the block closes its pipes."""

    def __init__(self, work: Path, action: Literal["post-dump", "post-restore"]) -> None:
        """Have CRIU ask at this action: all is written, or restored, and no process runs yet."""
        for name in ("asks", "answers"):
            os.mkfifo(work / name)
        self.path = work / "script"
        self.path.write_text(_SCRIPT.format(action=action))
        self.path.chmod(0o700)
        # Both ends of each: no side then waits for the other to open it, or sees its end.
        self.asks = os.open(work / "asks", os.O_RDWR | os.O_CLOEXEC)
        self._answers = os.open(work / "answers", os.O_RDWR | os.O_CLOEXEC)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.asks)
        os.close(self._answers)

    def answer(self, *, go_on: bool) -> None:
        """Let CRIU go on, or fail."""
        os.write(self._answers, b"0\n" if go_on else b"1\n")
