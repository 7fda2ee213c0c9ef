"""The console script, the commands with their options, and the only place that chooses."""

from snapshotctl.main.entry import main

__all__ = ["main"]
