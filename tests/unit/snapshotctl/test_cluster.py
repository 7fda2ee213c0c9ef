"""A local cluster as values: its processes, its record, what it leaves behind."""

import json
from pathlib import Path

import pytest

from snapshot_shared.ids import NodeName
from snapshot_shared.permissions import users_of
from snapshotctl.domain import cluster as plans
from snapshotctl.domain.cluster import (
    ClusterPaths,
    ClusterRecord,
    Inventory,
    NodeSpec,
    ProcessRecord,
    RunProcess,
)

PATHS = ClusterPaths(Path("/s"), Path("/k"))
SETTING = plans.ClusterSettings(
    "/py",
    PATHS,
    "run1",
    "nats://127.0.0.1:1",
    Path("/work"),
    {
        "PATH": "/bin",
        "SNAPBACK_RUN": "outer",
        "SNAPBACK_NODE": "outer",
        "SNAPBACK_OTLP_ENDPOINT": "http://otlp",
        "SNAPBACK_KEEP_COUNT": "3",
        "SNAPBACK_DEVICE_HUGE_PAGES": "1",
        "SNAPBACK_PROCESS_PER_DEVICE": "1",
    },
)
KEYS = [(user, f"U{n}") for n, user in enumerate(users_of([NodeName("node-1")]))]
NODE = NodeSpec(name="node-1", gpus=2, gpu_memory=1024)


def _process(name: str, pid: int) -> ProcessRecord:
    return ProcessRecord(name=name, pid=pid, started=pid * 10)


def _record(name: str, run: str, *, owner: int | None = None) -> ClusterRecord:
    return ClusterRecord(
        name=name,
        run=run,
        boot_id="b",
        state_dir=f"/s/{name}",
        socket_dir=f"/k/{run}",
        processes=[_process("nats-server", 1)],
        owner=_process("snapshotctl", owner) if owner else None,
    )


def test_every_process_carries_the_run_and_none_the_settings_of_another() -> None:
    programs = [plans.operator_program(SETTING), *plans.node_programs(SETTING, NODE)]
    assert [program.name for program in programs] == ["operator", "node-1-gms", "node-1-agent"]
    for program in programs:
        assert program.environment["SNAPBACK_RUN"] == "run1"
        assert program.environment.get("SNAPBACK_SIM") == (
            None if program.name == plans.OPERATOR else "1"
        )
        assert program.environment["SNAPBACK_OTLP_ENDPOINT"] == "http://otlp"
        assert program.environment["SNAPBACK_KEEP_COUNT"] == "3"
        assert program.environment["SNAPBACK_DEVICE_HUGE_PAGES"] == "1"
        assert program.environment["SNAPBACK_PROCESS_PER_DEVICE"] == "1"
        assert program.environment.get("SNAPBACK_NODE") in (None, "node-1")


def test_services_have_states_of_their_own_and_nodes_share_the_artifacts() -> None:
    programs = [
        plans.operator_program(SETTING),
        *plans.node_programs(SETTING, NODE),
        *plans.node_programs(SETTING, NodeSpec(name="node-2", gpus=1, gpu_memory=1)),
    ]
    states = [program.environment["SNAPBACK_STATE_DIR"] for program in programs]
    assert len(set(states)) == len(states)
    roots = {program.environment.get("SNAPBACK_ARTIFACT_ROOT") for program in programs[1:]}
    assert roots == {"/s/artifacts"}


def test_the_bus_syncs_every_write_and_listens_on_loopback_alone() -> None:
    text = plans.nats_configuration(plans.local_nats("x", PATHS), KEYS)
    assert "sync_interval: always" in text
    assert 'listen: "127.0.0.1:-1"' in text
    assert "http" not in text


def test_a_path_cannot_break_out_of_the_configuration() -> None:
    text = plans.nats_configuration(
        plans.local_nats("x", ClusterPaths(Path('/a" b\n}'), Path("/k"))), KEYS
    )
    assert r'"/a\" b\n}/nats/store"' in text


def test_every_user_has_a_key_and_a_list_and_no_other_user_gets_in() -> None:
    text = plans.nats_configuration(plans.local_nats("x", PATHS), KEYS)
    accounts = json.loads(text.partition("accounts: ")[2])
    users = [user for account in accounts.values() for user in account["users"]]
    assert {user["nkey"] for user in users} == {key for _, key in KEYS}
    assert all(user["permissions"]["publish"]["allow"] for user in users)
    assert all(user["permissions"]["subscribe"]["allow"] for user in users)
    assert "no_auth_user" not in text


def test_every_service_gets_the_seed_of_its_own_user() -> None:
    programs = [plans.operator_program(SETTING), *plans.node_programs(SETTING, NODE)]
    seeds = [program.environment["SNAPBACK_NATS_CREDENTIALS"] for program in programs]
    assert seeds == ["/s/keys/operator.nk", "/s/keys/gms-node-1.nk", "/s/keys/agent-node-1.nk"]


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
    record = _record("x", "r")
    processes = [_process(name, pid) for pid, name in enumerate(names, 1)]
    record = ClusterRecord(
        **{field: getattr(record, field) for field in record.__struct_fields__}
        | {"processes": processes}
    )
    assert [[p.name for p in group] for group in plans.stop_order(record)] == [
        ["operator"],
        ["node-1-agent", "node-2-agent"],
        ["node-1-gms", "node-2-gms", "node-2-helper"],
        ["nats-server"],
    ]


def _found(
    *clusters: tuple[ClusterRecord, frozenset[int]],
    owners: frozenset[str] = frozenset(),
    processes: tuple[RunProcess, ...] = (),
    sockets: tuple[tuple[Path, str], ...] = (),
    supervised: frozenset[str] = frozenset(),
) -> Inventory:
    return Inventory(list(clusters), owners, list(processes), list(sockets), [], supervised)


def test_a_running_cluster_leaves_nothing() -> None:
    found = _found(
        (_record("default", "r"), frozenset({1})),
        processes=(RunProcess(1, "r", "nats-server"),),
        sockets=((Path("/k/r"), "r"),),
    )
    assert plans.leftovers(found) == []


def test_a_process_of_no_known_cluster_is_left_over() -> None:
    [line] = plans.leftovers(_found(processes=(RunProcess(7, "gone", "worker.py"),)))
    assert "process 7" in line
    assert "kill 7" in line


def test_what_a_program_that_runs_has_started_is_not_left_over() -> None:
    found = _found(
        processes=(RunProcess(7, "chaos-1", "nats-server"),),
        sockets=((Path("/tmp/snapback-x"), "chaos-1"),),
        supervised=frozenset({"chaos-1"}),
    )
    assert plans.leftovers(found) == []


def test_a_folder_of_sockets_of_no_known_cluster_is_left_over() -> None:
    [line] = plans.leftovers(_found(sockets=((Path("/tmp/snapback-x"), "gone"),)))
    assert "rm -r /tmp/snapback-x" in line


def test_a_stopped_cluster_of_the_user_keeps_its_state() -> None:
    assert plans.leftovers(_found((_record("default", "r"), frozenset()))) == []


def test_the_state_of_a_demo_that_ended_is_left_over() -> None:
    [line] = plans.leftovers(_found((_record("demo-1", "r"), frozenset())))
    assert "snapshotctl down --cluster demo-1 --purge" in line


def test_a_demo_under_way_leaves_nothing_even_while_nothing_of_it_runs_yet() -> None:
    found = _found((_record("demo-1", "r", owner=9), frozenset()), owners=frozenset({"r"}))
    assert plans.leftovers(found) == []


def test_what_a_killed_demo_left_running_is_left_over() -> None:
    found = _found(
        (_record("demo-1", "r", owner=9), frozenset({1})),
        processes=(RunProcess(1, "r", "nats-server"),),
    )
    assert len(plans.leftovers(found)) == 2


def test_a_demo_that_was_kept_lives_as_long_as_its_processes() -> None:
    kept = (_record("demo-1", "r"), frozenset({1}))
    assert plans.leftovers(_found(kept, processes=(RunProcess(1, "r", "nats-server"),))) == []


@pytest.mark.parametrize(
    ("alive", "expected"),
    [(frozenset({1}), ([], True)), (frozenset[int](), (["nats-server"], False))],
)
def test_the_processes_that_ended_are_named(
    alive: frozenset[int], expected: tuple[list[str], bool]
) -> None:
    assert plans.ended(_record("x", "r").processes, alive) == expected
