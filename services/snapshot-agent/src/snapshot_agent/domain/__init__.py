"""Decisions of the agent: no I/O, no clock, no asyncio."""
