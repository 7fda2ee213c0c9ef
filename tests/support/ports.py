"""Ports for programs that cannot choose one themselves."""

from __future__ import annotations

import socket


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port on which nobody listens."""
    with socket.create_server((address, 0)) as server:
        return int(server.getsockname()[1])
