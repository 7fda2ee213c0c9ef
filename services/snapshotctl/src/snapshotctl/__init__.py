"""The command line: drives snapshots and restores and runs the demo."""
