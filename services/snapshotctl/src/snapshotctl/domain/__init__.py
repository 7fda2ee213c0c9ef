"""Decisions of the command line: what to show, what to wait for, how to end. No I/O, no clock."""
