"""What a benchmark prints and writes, and how it ends."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from tests.bench.page import with_section


def say(text: str) -> None:
    """Say on standard error what is under way."""
    print(text, file=sys.stderr, flush=True)


def write(json: Path | None, page: Path | None, results: Any, section: str = "") -> None:
    """Write results as JSON, and as a section of a page for people, where that was asked for."""
    if json:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(results)) + b"\n")
    if page:
        old = page.read_text() if page.exists() else "# Benchmarks\n"
        page.write_text(with_section(old, section))


def run(main: Callable[[], int]) -> NoReturn:
    """Run a benchmark and end with its status, or with that of a process that a signal has ended.

    SIGTERM cleans up as ctrl-C does.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
