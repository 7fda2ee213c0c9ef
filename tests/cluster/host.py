"""What clusters share on a host: the folder that has them all, its locks, and addresses."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import json
import os
import subprocess
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from tests.cluster.programs import said_by

LINKS = ipaddress.IPv4Network("198.18.0.0/15")
"""Where a host reaches its clusters: addresses for tests of networks, which are routed nowhere."""


class ClusterError(Exception):
    """A cluster cannot be used as asked; says what was found and the next step."""


def root() -> Path:
    """Return the folder that has a folder for each cluster."""
    return Path(os.environ.get("SNAPBACK_CLUSTERS", f"{tempfile.gettempdir()}/snapback-clusters"))


@contextlib.contextmanager
def locked(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold a folder, which is made if need be, as the only process; the kernel lets go of it.

    Raise ClusterError when another process holds it and `wait` is not set.
    """
    with contextlib.ExitStack() as stack:
        while True:
            try:
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                file = os.open(folder, os.O_RDONLY)
            except FileNotFoundError:
                # Removed meanwhile, itself or the folder that it is in.
                continue
            stack.callback(os.close, file)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                raise ClusterError(
                    f"cluster {folder.name} is used by a process that runs; end that first"
                ) from None
            # The process that held it before may have removed it: then this is another folder.
            with contextlib.suppress(FileNotFoundError):
                if folder.stat().st_ino == os.fstat(file).st_ino:
                    break
        yield


def connect(name: str, pid: int) -> str:
    """Connect the network of a process with the host, and return its address there."""
    with locked(root(), wait=True):
        ours, theirs = _free_link(name)
        link = link_name(name)
        ip(
            f"link add {link} type veth peer name host netns {pid}",
            f"address add {ours}/30 dev {link}",
            f"link set {link} up",
        )
        ip(
            f"address add {theirs}/30 dev host",
            "link set host up",
            f"route add default via {ours}",
            network_of=pid,
        )
    return str(theirs)


def disconnect(name: str) -> None:
    """Remove what `connect` made, if it is there."""
    words = ["ip", "link", "delete", link_name(name)]
    subprocess.run(words, capture_output=True, check=False)


def link_name(name: str) -> str:
    """Return the name of the host's end of the link to a cluster: it has at most 15 bytes."""
    return f"snap{zlib.crc32(name.encode()):08x}"


def ip(*commands: str, network_of: int | None = None) -> None:
    """Carry out commands of the program ip, here or in the network of a process."""
    inside = [] if network_of is None else ["nsenter", f"--net=/proc/{network_of}/ns/net"]
    said_by(*inside, "ip", "-batch", "-", error=ClusterError, input="\n".join(commands))


def _free_link(name: str) -> tuple[ipaddress.IPv4Address, ipaddress.IPv4Address]:
    """Return the two addresses of a subnet that overlaps with none of this host."""
    said = subprocess.run(["ip", "-json", "-4", "address"], capture_output=True, check=True).stdout
    taken = [
        ipaddress.IPv4Interface(f"{entry['local']}/{entry['prefixlen']}").network
        for link in json.loads(said)
        for entry in link["addr_info"]
    ]
    subnets = [*LINKS.subnets(new_prefix=30)]
    first = zlib.crc32(name.encode()) % len(subnets)
    for subnet in (*subnets[first:], *subnets[:first]):
        if not any(subnet.overlaps(each) for each in taken):
            ours, theirs = subnet.hosts()
            return ours, theirs
    raise ClusterError(f"no subnet of {LINKS} is free on this host")
