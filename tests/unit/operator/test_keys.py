"""The keys of NATS in a cluster: what nodes report, and what the server makes of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from snapshot_operator.keys import (
    ACCOUNTS,
    CLUSTERS_OWN,
    NODES,
    DaemonSet,
    KeyPod,
    accounts,
    admitted,
    progress,
)
from snapshot_shared.ids import NodeName
from snapshot_shared.nkey import new_seed, public_half
from tests.support.nats_server import nats_server_binary
from tests.unit.tables import each

ONE, TWO, THREE = (NodeName(f"node-{number}") for number in (1, 2, 3))


def keys() -> dict[str, str]:
    return {service: public_half(new_seed()) for service in ("agent", "gms")}


def daemon_set(desired: int, observed: int = 1) -> DaemonSet:
    return msgspec.convert(
        {
            "metadata": {"name": "x", "generation": 1},
            "status": {"observedGeneration": observed, "desiredNumberScheduled": desired},
        },
        DaemonSet,
    )


def pod(node: str, message: Any = None) -> KeyPod:
    """Return a pod whose first container has ended with a message, or runs still."""
    text = message if isinstance(message, str) else json.dumps(message)
    state = {"terminated": {"message": text}} if message is not None else {"running": {}}
    status = {"initContainerStatuses": [{"name": "keys", "state": state}]}
    return msgspec.convert({"spec": {"nodeName": node}, "status": status}, KeyPod)


def test_reports_are_complete_when_every_ready_node_that_has_a_pod_has_reported() -> None:
    first, second = keys(), keys()
    begun = progress(daemon_set(2), [pod(ONE, first)], [ONE, TWO])
    assert begun == ({ONE: first}, False)
    waiting = progress(daemon_set(2), [pod(ONE, first), pod(TWO)], [ONE, TWO])
    assert waiting == ({ONE: first}, False)
    done = progress(daemon_set(2), [pod(ONE, first), pod(TWO, second)], [ONE, TWO, THREE])
    assert done == ({ONE: first, TWO: second}, True)


def test_a_node_that_is_not_ready_is_not_awaited() -> None:
    first = keys()
    assert progress(daemon_set(2), [pod(ONE, first), pod(TWO)], [ONE]) == ({ONE: first}, True)


def test_nothing_is_complete_before_the_daemon_set_was_looked_at() -> None:
    assert not progress(daemon_set(0, observed=0), [], [ONE]).is_complete
    assert progress(daemon_set(0), [], [ONE]).is_complete


@each(
    "message",
    [
        *("", "junk", "[]", "{}", '{"agent": 1, "gms": 2}', '{"agent": "UX", "gms": "UX"}'),
        {"agent": public_half(new_seed())},
        keys() | {"operator": public_half(new_seed())},
        keys() | {"gms": public_half(new_seed()) + '", x: "'},
    ],
)
def test_what_is_no_report_admits_no_one(message: Any) -> None:
    assert progress(daemon_set(1), [pod(ONE, message)], [ONE]) == ({}, False)


def test_a_node_that_is_away_stays_admitted_and_one_that_is_gone_does_not() -> None:
    first, second, third, again = (keys() for _ in range(4))
    own = {role: public_half(new_seed()) for role in CLUSTERS_OWN}
    kept = accounts(own, admitted({}, {ONE: first, TWO: second, THREE: third}, [ONE, TWO, THREE]))
    assert admitted(kept, {ONE: again}, [ONE, TWO]) == {ONE: again, TWO: second}
    assert admitted({NODES: b"junk"}, {ONE: again}, [ONE, TWO]) == {ONE: again}


def test_nats_server_takes_the_accounts(tmp_path: Path) -> None:
    own = {role: public_half(new_seed()) for role in CLUSTERS_OWN}
    nodes = {"node-1": keys(), "a.example": keys()}
    text = accounts(own, nodes)[ACCOUNTS]
    for key in (*own.values(), *nodes["node-1"].values(), *nodes["a.example"].values()):
        assert key.encode() in text
    (tmp_path / ACCOUNTS).write_bytes(text)
    configuration = tmp_path / "nats.conf"
    configuration.write_text(f"jetstream {{}}\ninclude {ACCOUNTS}\n")
    done = subprocess.run(
        [str(nats_server_binary()), "-t", "-c", str(configuration)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_program_of_a_node_prints_the_public_keys_of_seeds_that_it_makes_once(
    tmp_path: Path,
) -> None:
    def reported() -> dict[str, str]:
        words = [sys.executable, "-m", "snapshot_shared.nkey", str(tmp_path), "agent", "gms"]
        return json.loads(subprocess.run(words, capture_output=True, check=True).stdout)

    first = reported()
    assert progress(daemon_set(1), [pod(ONE, first)], [ONE]) == ({ONE: first}, True)
    for service, key in first.items():
        seed = tmp_path / service / "seed.nk"
        assert (seed.stat().st_mode & 0o777, seed.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        assert public_half(seed.read_bytes().strip()) == key
    assert reported() == first
