"""A worker with sockets of each kind, which tells after a restore what has become of them.

Its arguments are the IPv4 and the IPv6 address of its pod and the address and port of a peer that
is outside of its tree.
"""

from __future__ import annotations

import errno
import json
import signal
import socket
import sys


def listening(family: int, host: str) -> socket.socket:
    found = socket.socket(family)
    if family == socket.AF_INET6:
        found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    found.bind((host, 0))
    found.listen()
    return found


def pair(family: int, server: str, host: str) -> tuple[socket.socket, socket.socket]:
    """Return both ends of a connection to `host`, of which the accepting one is bound to `server`.

    `family` is that of the listener; the client's is that of `host`.
    """
    with listening(family, server) as listener:
        client = socket.create_connection((host, listener.getsockname()[1]))
        return client, listener.accept()[0]


def echo(ends: tuple[socket.socket, socket.socket]) -> str:
    client, server = ends
    try:
        client.sendall(b"ping")
        assert server.recv(4) == b"ping"
        server.sendall(b"pong")
        assert client.recv(4) == b"pong"
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return str(server.getsockname()[0])


def fate(connection: socket.socket) -> str:
    connection.settimeout(5)
    try:
        return repr(connection.recv(1))
    except OSError as error:
        return errno.errorcode[error.errno or 0]


def main(pod4: str, pod6: str, peer: str, port: str) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    socket.sethostname("source-host")
    listener = listening(socket.AF_INET, pod4)
    datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    datagrams.bind((pod4, 0))
    inside = {
        "loopback": pair(socket.AF_INET, "127.0.0.1", "127.0.0.1"),
        "pod4": pair(socket.AF_INET, pod4, pod4),
        "pod6": pair(socket.AF_INET6, pod6, pod6),
        "mapped": pair(socket.AF_INET6, "::", pod4),
    }
    # Its other end is in the tree but half closed.
    halves = inside["half closed"] = pair(socket.AF_INET, pod4, pod4)
    halves[0].shutdown(socket.SHUT_WR)
    connected = socket.create_connection((peer, int(port)), source_address=(pod4, 0))
    left = socket.create_connection((peer, int(port)), source_address=(pod4, 0))
    left.recv(1, socket.MSG_PEEK)
    connected.sendall(json.dumps(listener.getsockname()).encode() + b"\n")
    outside = {"connected": connected, "left": left, "accepted": listener.accept()[0]}
    connected.sendall(b"ready\n")

    signal.sigwait({signal.SIGUSR1})

    half_open = halves[1].recv(1) == b"" and halves[1].send(b"tail") == 4
    tail = halves[0].recv(4).decode()
    del inside["half closed"]
    report = {
        "host": socket.gethostname(),
        "listener": listener.getsockname()[0],
        "datagrams": datagrams.getsockname()[0],
        "inside": {name: echo(ends) for name, ends in inside.items()},
        "half closed": tail if half_open else "",
        "outside": {name: fate(connection) for name, connection in outside.items()},
    }
    with socket.create_connection(listener.getsockname()):
        report["accepts"] = bool(listener.accept())
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
