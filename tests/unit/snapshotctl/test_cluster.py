"""A local cluster as values: its processes, its record, its keys, what it leaves behind."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from snapshot_api.meta import OwnerReference
from snapshot_shared.errors import InvalidInput
from snapshot_shared.ids import NodeName
from snapshot_shared.nkey import public_key
from snapshot_shared.permissions import User, users_of
from snapshotctl.adapters.nkeys import admit
from snapshotctl.domain import cluster as plans
from tests.support import builders
from tests.unit.snapshotctl.conftest import cluster_record
from tests.unit.tables import each

PATHS = plans.ClusterPaths(Path("/s"), Path("/k"))
HANDED_ON = {
    "SNAPBACK_OTLP_ENDPOINT": "http://otlp",
    "SNAPBACK_KEEP_COUNT": "3",
    "SNAPBACK_DEVICE_HUGE_PAGES": "1",
    "SNAPBACK_PROCESS_PER_DEVICE": "1",
}
OUTER = {"PATH": "/bin", "SNAPBACK_RUN": "outer", "SNAPBACK_NODE": "outer"}
URL = "nats://127.0.0.1:1"
SETTING = plans.ClusterSettings("/py", PATHS, "run1", URL, Path("/work"), OUTER | HANDED_ON)
KEYS = [(user, f"U{n}") for n, user in enumerate(users_of([NodeName("node-1")]))]
NODE = plans.NodeSpec(name="node-1", gpus=2, gpu_memory=1024)


def _process(name: str, pid: int) -> plans.ProcessRecord:
    return plans.ProcessRecord(name=name, pid=pid, started=pid * 10)


def _record(name: str, **more: Any) -> plans.ClusterRecord:
    fields = {"socket_dir": "/k/r", "processes": [_process("nats-server", 1)], **more}
    return cluster_record(Path("/s") / name, **fields)


def test_every_process_carries_the_run_and_none_the_settings_of_another() -> None:
    programs = [plans.operator_program(SETTING), *plans.node_programs(SETTING, NODE)]
    assert [program.name for program in programs] == ["operator", "node-1-gms", "node-1-agent"]
    for program in programs:
        found = program.environment
        assert found["SNAPBACK_RUN"] == "run1"
        assert found.get("SNAPBACK_SIM") == (None if program.name == plans.OPERATOR else "1")
        assert found.items() >= HANDED_ON.items()
        assert found.get("SNAPBACK_NODE") in (None, "node-1")
    seeds = [program.environment["SNAPBACK_NATS_CREDENTIALS"] for program in programs]
    assert seeds == [f"/s/keys/{name}.nk" for name in ("operator", "gms-node-1", "agent-node-1")]
    programs += plans.node_programs(SETTING, plans.NodeSpec(name="node-2", gpus=1, gpu_memory=1))
    states = [program.environment["SNAPBACK_STATE_DIR"] for program in programs]
    assert len(set(states)) == len(states)
    roots = {program.environment.get("SNAPBACK_ARTIFACT_ROOT") for program in programs[1:]}
    assert roots == {"/s/artifacts"}


def test_the_bus_syncs_every_write_listens_on_loopback_and_lets_in_users_with_a_key_alone() -> None:
    text = plans.nats_configuration(plans.local_nats("x", PATHS), KEYS)
    assert "sync_interval: always" in text
    assert 'listen: "127.0.0.1:-1"' in text
    assert "http" not in text
    accounts = json.loads(text.partition("accounts: ")[2])
    users = [user for account in accounts.values() for user in account["users"]]
    assert {user["nkey"] for user in users} == {key for _, key in KEYS}
    assert all(user["permissions"]["publish"]["allow"] for user in users)
    assert all(user["permissions"]["subscribe"]["allow"] for user in users)
    assert "no_auth_user" not in text
    # Nor can a path break out of it.
    odd = plans.local_nats("x", plans.ClusterPaths(Path('/a" b\n}'), Path("/k")))
    assert r'"/a\" b\n}/nats/store"' in plans.nats_configuration(odd, KEYS)


def test_a_node_has_a_helper_where_the_cluster_has_the_tools() -> None:
    assert plans.helper_program(SETTING, NODE) is None
    setting = SETTING._replace(tools=Path("/t"))
    helper = plans.helper_program(setting, NODE)
    _, agent = plans.node_programs(setting, NODE)
    assert helper is not None
    assert helper.environment["SNAPBACK_RUN"] == "run1"
    assert helper.environment["SNAPBACK_CRIU"] == "/t/criu/criu"
    assert agent.environment["SNAPBACK_INIT"] == "/t/snapback-init"
    socket = helper.environment["SNAPBACK_HELPER"]
    assert socket == agent.environment["SNAPBACK_HELPER"] == "/k/node-1/helper.sock"
    assert not {"SNAPBACK_NATS_URL", "SNAPBACK_NATS_CREDENTIALS"} & helper.environment.keys()


def test_the_operator_ends_first_and_the_bus_last() -> None:
    names = ["nats-server", "operator", "node-1-gms", "node-1-agent", "node-2-gms", "node-2-agent"]
    names.append("node-2-helper")
    record = _record("x", processes=[_process(name, pid) for pid, name in enumerate(names, 1)])
    assert [[p.name for p in group] for group in plans.stop_order(record)] == [
        ["operator"],
        ["node-1-agent", "node-2-agent"],
        ["node-1-gms", "node-2-gms", "node-2-helper"],
        ["nats-server"],
    ]


NOTHING = plans.Inventory([], frozenset(), [], [], [])
ALL, NONE = frozenset({1}), frozenset[int]()
DEFAULT, DEMO = _record("default"), _record("demo-1")
OWNED = _record("demo-1", owner=_process("snapshotctl", 9))
NATS, SOCKETS = [plans.RunProcess(1, "r", "nats-server")], [(Path("/k/r"), "r")]
STRAY, FOLDER = [plans.RunProcess(7, "gone", "worker.py")], [(Path("/tmp/snapback-x"), "gone")]
PURGE = "snapshotctl down --cluster demo-1 --purge"


@each(
    ("found", "left"),
    [
        # A running cluster, a stopped one of the user, a demo that was kept and runs.
        ({"clusters": [(DEFAULT, ALL)], "processes": NATS, "socket_folders": SOCKETS}, []),
        ({"clusters": [(DEFAULT, NONE)]}, []),
        ({"clusters": [(DEMO, ALL)], "processes": NATS}, []),
        # A demo that is under way, also while nothing of it runs yet.
        ({"clusters": [(OWNED, NONE)], "owners_alive": frozenset({"r"})}, []),
        # What a program that runs has started.
        ({"processes": STRAY, "socket_folders": FOLDER, "supervised": frozenset({"gone"})}, []),
        # A process and a folder of sockets of no known cluster.
        ({"processes": STRAY}, ["process 7 .*kill 7"]),
        ({"socket_folders": FOLDER}, ["rm -r /tmp/snapback-x"]),
        # The state of a demo that ended, and what a killed one left running.
        ({"clusters": [(DEMO, NONE)]}, [PURGE]),
        ({"clusters": [(OWNED, ALL)], "processes": NATS}, ["process 1 ", PURGE]),
    ],
)
def test_what_nobody_will_end_is_left_over(found: dict[str, Any], left: list[str]) -> None:
    lines = plans.leftovers(NOTHING._replace(**found))
    assert len(lines) == len(left), lines
    assert all(re.search(*pair) for pair in zip(left, lines, strict=True)), lines


@pytest.mark.parametrize(
    ("alive", "expected"),
    [(frozenset({1}), ([], True)), (frozenset[int](), (["nats-server"], False))],
)
def test_the_processes_that_ended_are_named(
    alive: frozenset[int], expected: tuple[list[str], bool]
) -> None:
    assert plans.ended(_record("x").processes, alive) == expected


def test_a_seed_is_made_once_and_kept_from_others(tmp_path: Path) -> None:
    seed = tmp_path / "state" / "keys" / "viewer.nk"
    made = public_key(seed)
    assert (made[0], len(made)) == ("U", 56)
    seed.chmod(0o644)
    assert public_key(seed) == made
    assert (seed.stat().st_mode & 0o777, seed.parent.stat().st_mode & 0o777) == (0o600, 0o700)


@pytest.mark.parametrize("content", ["", "junk", "SU", "SU" + "a" * 56, "SA" + "A" * 56, "\0"])
def test_what_is_no_seed_of_a_user_is_named_and_left_alone(tmp_path: Path, content: str) -> None:
    seed = tmp_path / "operator.nk"
    seed.write_text(content)
    with pytest.raises(InvalidInput, match=r"operator\.nk"):
        public_key(seed)
    assert seed.read_text() == content


def test_a_configuration_holds_public_halves_of_seeds_that_stay_the_same(tmp_path: Path) -> None:
    server = plans.NatsServer("x", "0.0.0.0:4222", tmp_path / "store", monitor="127.0.0.1:8222")
    seeds = {User("operator"): tmp_path / "operator" / "seed.nk"}
    configuration = tmp_path / "nats-server" / "nats.conf"
    admit(configuration, server, seeds)
    written = configuration.read_text()
    assert public_key(seeds[User("operator")]) in written
    assert seeds[User("operator")].read_text().strip() not in written
    assert 'listen: "0.0.0.0:4222"\nhttp: "127.0.0.1:8222"\n' in written
    admit(configuration, server, seeds)
    assert configuration.read_text() == written


def test_what_is_kept_of_before_is_counted_and_a_new_cluster_has_nothing() -> None:
    assert plans.kept([]) == ""
    owner = OwnerReference(api_version="v1", kind="x", name="x", uid=builders.UID)
    of_checkpoint = builders.with_meta(builders.snapshot(), owner_references=[owner])
    values = [builders.pod("a", phase="Failed"), builders.pod("b"), builders.snapshot()]
    assert plans.kept(values[1:2]) == "1 pod"
    assert plans.kept([*values, of_checkpoint]) == "1 snapshot, 2 pods (1 ended)"
