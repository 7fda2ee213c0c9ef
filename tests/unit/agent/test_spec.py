"""From a container's spec to the process that is started for it."""

from collections.abc import Sequence
from pathlib import Path, PurePath

import msgspec
import pytest
from msgspec.structs import replace

from snapshot_agent.domain import spec
from snapshot_agent.domain.control import ContainerPaths, container_paths
from snapshot_agent.domain.mounts import mounts_in
from snapshot_api.facts import Container
from snapshot_shared.errors import InvalidInput
from snapshot_shared.orders import DeviceRef, Driver, PodRef, RunOrder
from tests.support import builders
from tests.unit.tables import each

POD = PodRef(namespace="default", name="llm", uid=builders.UID)
NODE = spec.NodeEnvironment(
    node="node-1",
    run="r1",
    socket_dir=PurePath("/run/sb"),
    workdir=Path("/srv"),
    path="/venv/bin:/usr/bin",
    home="/somewhere",
    init=Path("/opt/init"),
    confined=("python", "confined.py"),
)
WHERE = container_paths(Path("/state"), Path("/run/sb"), POD.uid, "main")
DEVICES = [DeviceRef(ordinal=1, uuid="GPU-b"), DeviceRef(ordinal=0, uuid="GPU-a")]


def container(**fields: object) -> Container:
    given = {"name": "main", "command": ["run"], **fields}
    return msgspec.convert(given, Container)


def launched(
    *,
    standby: bool = False,
    traceparent: str = "",
    apart: bool = False,
    where: ContainerPaths = WHERE,
    node: spec.NodeEnvironment = NODE,
    devices: Sequence[DeviceRef] = DEVICES,
    **fields: object,
) -> spec.ProcessSpec:
    how = {"standby": standby, "traceparent": traceparent, "apart": apart}
    return spec.process_spec(container(**fields), POD, devices, node, where, **how)  # type: ignore[arg-type]


@each(
    ("text", "expanded"),
    [
        ("$(A)", "1"),
        ("x$(A)y$(B)z", "x1y2z"),
        ("$(C)", "$(C)"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$$$$", "$$"),
        ("$A", "$A"),
        ("$(A", "$(A"),
        ("$", "$"),
        ("$()", "$()"),
        ("$(a b)", "$(a b)"),
        ("$($(A))", "$(1)"),
    ],
)
def test_references_are_expanded_as_kubernetes_does(text: str, expanded: str) -> None:
    assert spec.expand(text, {"A": "1", "B": "2"}) == expanded


def test_the_environment_names_the_node_the_pod_and_the_devices_in_their_order() -> None:
    env = launched(standby=True, traceparent="00-1-2-01").env
    assert env == {
        "PATH": "/venv/bin:/usr/bin",
        "HOME": "/somewhere",
        "SNAPSHOT_CONTROL_DIR": f"/state/pods/{POD.uid}/main/control",
        "SNAPSHOT_RESTORE_STANDBY": "1",
        "GMS_SOCKET_DIR": "/run/sb",
        "NVIDIA_VISIBLE_DEVICES": "GPU-a,GPU-b",
        "TRACEPARENT": "00-1-2-01",
        "POD_NAME": "llm",
        "POD_NAMESPACE": "default",
        "POD_UID": POD.uid,
        "POD_SOCKET_DIR": "/run/sb/00000000",
        "NODE_NAME": "node-1",
        "SNAPBACK_RUN": "r1",
    }


def test_a_process_on_a_machine_with_gpus_sees_its_own_alone() -> None:
    node = NODE._replace(cuda=True)
    assert launched(node=node).env["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b"
    assert launched(node=node, devices=[]).env["CUDA_VISIBLE_DEVICES"] == ""


def test_a_variable_sees_those_before_it_and_the_command_and_its_arguments_see_every_one() -> None:
    env = [{"name": "ONE", "value": "$(POD_NAME)-$(TWO)"}, {"name": "TWO", "value": "$(ONE)"}]
    made = launched(command=["$(ONE)"], args=["--pod=$(POD_NAME)"], env=env)
    assert (made.env["ONE"], made.env["TWO"]) == ("llm-$(TWO)", "llm-$(TWO)")
    assert made.argv == ["llm-$(TWO)", "--pod=llm"]


def test_a_manifest_changes_the_path_but_not_what_processes_are_recognised_by() -> None:
    given = {
        "PATH": "/bin",
        "SNAPSHOT_CONTROL_DIR": "/tmp",
        "POD_UID": "another",
        "SNAPBACK_RUN": "another",
        "SNAPSHOT_RESTORE_STANDBY": "1",
    }
    env = launched(env=[{"name": name, "value": value} for name, value in given.items()]).env
    assert (env["PATH"], env["POD_UID"], env["SNAPBACK_RUN"]) == ("/bin", POD.uid, "r1")
    assert env["SNAPSHOT_CONTROL_DIR"].startswith("/state/")
    assert "SNAPSHOT_RESTORE_STANDBY" not in env


def test_a_worker_with_namespaces_has_its_folders_where_every_other_one_has_them() -> None:
    made = launched(apart=True, args=["$(POD_SOCKET_DIR)/x", "$(SNAPSHOT_CONTROL_DIR)"])
    assert made.argv == ["run", "/dev/shm/snapback/sockets/x", "/dev/shm/snapback/control"]
    assert made.env["GMS_SOCKET_DIR"] == "/dev/shm/snapback/gms"
    words = list(made.before)
    assert words[0] == "unshare"
    assert words[words.index("control") :] == [
        *("control", str(WHERE.control), "sockets", str(WHERE.sockets), "gms", "/run/sb"),
        *("log", str(WHERE.log), "--", "python", "confined.py"),
    ]
    # It is found as any worker is.
    assert f"SNAPSHOT_CONTROL_DIR={made.env['SNAPSHOT_CONTROL_DIR']}" == WHERE.marker


def test_in_a_placeholder_the_first_program_waits_before_the_command() -> None:
    where = WHERE._replace(placeholder=Path("/state/init"))
    made = launched(apart=True, where=where)
    assert list(made.before[-7:]) == [
        *("init", "/state/init", "init/snapback-init", "/opt/init", "--"),
        *("/dev/shm/snapback/init/snapback-init", "--"),
    ]
    assert made.argv == ["run"]


@pytest.mark.parametrize(
    ("driver", "standby", "expected"),
    [
        ("cooperative", True, (False, True, True)),
        ("respawn", False, (False, False, False)),
        ("criu", False, (True, False, False)),
        ("criu", True, (True, True, False)),
    ],
)
def test_only_the_container_that_a_process_is_brought_to_waits_for_it(
    driver: Driver, standby: bool, expected: tuple[bool, bool, bool]
) -> None:
    pod = replace(POD, container="main")
    order = builders.work_order(
        RunOrder, pod=pod, template_digest=builders.DIGEST, driver=driver, standby=standby
    )
    waits = [spec.waits(order, name) for name in ("main", "sidecar")]
    assert (spec.is_apart(order), *waits) == expected


def test_a_dump_has_neither_the_file_systems_of_the_node_nor_our_folders() -> None:
    paths = ["/", "/proc", "/home", "/dev", "/dev/shm", "/dev/shm/snapback/control"]
    mounts = mounts_in("\n".join(f"1 1 8:1 / {path} rw - ext4 /dev/sda1 rw" for path in paths))
    assert spec.nodes_mounts(mounts) == ["/proc", "/home", "/dev", "/dev/shm/snapback/control"]


def test_a_working_directory_is_taken_from_that_of_the_agent() -> None:
    assert launched().cwd == Path("/srv")
    assert launched(workingDir="sub").cwd == Path("/srv/sub")
    assert launched(workingDir="/else").cwd == Path("/else")


def test_a_container_without_a_command_is_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match="container main has no command"):
        launched(command=[])


@each(
    ("asking", "seen"),
    [
        ("ac", {"a": ["GPU-a"], "b": [], "c": ["GPU-b"]}),
        # Devices beyond all limits go to the first.
        ("", {"a": ["GPU-a", "GPU-b"], "b": [], "c": []}),
    ],
)
def test_each_container_sees_the_devices_that_it_asks_for(
    asking: str, seen: dict[str, list[str]]
) -> None:
    limits = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
    containers = [container(name=each, **(limits if each in asking else {})) for each in "abc"]
    shared = spec.shared_out(containers, DEVICES)
    assert {name: [d.uuid for d in found] for name, found in shared.items()} == seen


def test_a_program_is_started_again_with_the_folder_of_its_state_and_all_that_it_had() -> None:
    before = launched(env=[{"name": "MODEL", "value": "small"}])
    after = spec.resumed(before, is_standby=False)
    assert after.argv == [*before.argv, "--resume-from", f"{WHERE.control}/state"]
    assert (after.env, after.cwd, after.paths) == (before.env, before.cwd, before.paths)


def test_a_program_that_was_started_again_before_has_one_folder_only() -> None:
    once = spec.resumed(
        launched(command=["run", "--resume-from", "/elsewhere", "-v"]), is_standby=False
    )
    assert once.argv[:2] == ["run", "-v"]
    assert once.argv.count("--resume-from") == 1
    assert spec.resumed(once, is_standby=False).argv == once.argv


@pytest.mark.parametrize("was_standby", [True, False])
@pytest.mark.parametrize("is_standby", [True, False])
def test_whether_a_program_waits_for_a_restore_depends_on_why_it_is_started_again(
    was_standby: bool, is_standby: bool
) -> None:
    after = spec.resumed(launched(standby=was_standby), is_standby=is_standby)
    assert after.env.get("SNAPSHOT_RESTORE_STANDBY") == ("1" if is_standby else None)


def test_control_files_belong_to_the_agent_alone_by_default() -> None:
    assert WHERE.access == (-1, -1, 0o700, 0o600)
    assert WHERE.sockets == Path("/run/sb/00000000")
