"""Clients killed at every point of their lives leave nothing behind in the server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from snapback_client import frames
from tests.support.doomed_clients import ANY_TIME, POINTS, SIZE
from tests.support.gms_rig import attach, open_descriptors
from tests.support.waiting import wait_until

COUNT = int(os.environ.get("KILLED_CLIENTS", "100"))
SEED = os.environ.get("KILLED_CLIENTS_SEED", "1")
ROOT = Path(__file__).resolve().parents[3]


def _commit(service: Any, device: int, content: bytes) -> None:
    lease = attach(service, device=service.uuids[device])
    lease.allocate([frames.AllocationSpec(id="a0", size=SIZE)])
    for [(_, descriptor)] in lease.export(["a0"], frames.Access.RW):
        os.pwrite(descriptor, content, 0)
    lease.commit(if_match=None)
    lease.detach()


def _served(service: Any, device: int) -> tuple[frames.Attached, bytes]:
    lease = attach(service, "RO", device=service.uuids[device])
    found = b""
    for [(_, descriptor)] in lease.export(["a0"], frames.Access.RO):
        found = os.pread(descriptor, 6, 0)
    lease.detach()
    return lease.attached, found


def _held(service: Any) -> list[Any]:
    """What the server holds for its clients, of each device."""
    devices = [service.device(index) for index in (0, 1)]
    return [
        (d.used, d.retired, [(x.sessions, x.waiting, x.lock) for x in d.domains]) for d in devices
    ]


def test_bytes_and_descriptors_return_to_where_they_were(service: Any) -> None:
    for device in (0, 1):
        _commit(service, device, b"intact")
    first, _ = _served(service, 0)
    _served(service, 1)
    held, descriptors = _held(service), open_descriptors()

    arguments = (str(service.folder), *service.uuids, str(COUNT), SEED)
    command = [sys.executable, "-m", "tests.support.doomed_clients", *arguments]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, check=False, timeout=110)
    assert ended.returncode == 0, ended.stderr.decode()
    died = json.loads(ended.stdout)
    assert sum(died.values()) == COUNT
    assert set(died) == {*POINTS, ANY_TIME}

    wait_until(lambda: _held(service) == held, lambda: (held, _held(service)))
    wait_until(lambda: open_descriptors() <= descriptors, lambda: (descriptors, open_descriptors()))

    again, content = _served(service, 0)
    assert (again.generation, again.layout_id) == (first.generation, first.layout_id)
    assert content == b"intact"
    last, content = _served(service, 1)
    assert last.generation > 1, "no writer lived to commit"
    assert (last.bytes, content[:4]) == (first.bytes, b"mine")
    ref = frames.GenerationRef(incarnation=again.incarnation, generation=again.generation)
    attach(service, if_match=ref).close()
