"""Decisions and values of the command line. No I/O, no clock."""
