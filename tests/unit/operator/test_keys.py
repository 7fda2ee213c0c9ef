"""The keys of NATS in a cluster: which seeds there are, and what the server makes of them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from snapshot_operator.keys import SEED, accounts, users_by_secret, with_missing
from snapshot_shared.errors import InvalidInput
from snapshot_shared.ids import NodeName
from snapshot_shared.nkey import new_seed, public_key
from snapshot_shared.permissions import User, users_of
from tests.support.nats_server import nats_server_binary

NODES = [NodeName("node-2"), NodeName("a.example")]


def test_each_user_has_one_seed_and_those_of_nodes_are_found_by_the_name_of_the_node() -> None:
    found = users_by_secret("x-nats", NODES)
    users = [user for keys in found.values() for user in keys.values()]
    assert sorted(users, key=lambda user: user.name) == sorted(
        users_of(NODES), key=lambda user: user.name
    )
    assert found["x-nats-operator"] == {SEED: User("operator")}
    assert found["x-nats-agents"]["a.example"] == User("agent", NodeName("a.example"))
    assert list(found["x-nats-gms"]) == ["a.example", "node-2"]


def test_a_seed_that_exists_is_never_replaced_nor_removed() -> None:
    first = with_missing({}, ["node-1", "node-2"])
    second = with_missing(first, ["node-2", "node-3"])
    assert set(second) == {"node-1", "node-2", "node-3"}
    assert {key: second[key] for key in first} == first
    assert len({public_key(seed) for seed in second.values()}) == 3


def test_the_accounts_hold_public_keys_alone_and_nats_server_takes_them(tmp_path: Path) -> None:
    seeds = [(user, "place", new_seed()) for user in users_of(NODES)]
    text = accounts(seeds)
    for _, _, seed in seeds:
        assert seed not in text
        assert public_key(seed).encode() in text
    (tmp_path / "accounts.conf").write_bytes(text)
    configuration = tmp_path / "nats.conf"
    configuration.write_text("jetstream {}\ninclude accounts.conf\n")
    done = subprocess.run(
        [str(nats_server_binary()), "-t", "-c", str(configuration)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_what_is_no_seed_is_named_by_its_place() -> None:
    with pytest.raises(InvalidInput, match="snapback-nats-agents/node-1"):
        accounts([(User("operator"), "snapback-nats-agents/node-1", b"SUXX")])
