"""The demo's decisions, and what it prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from snapshot_shared.manifests import parse
from snapshotctl.domain import criu_host, demo_engines, demo_script, demo_story
from snapshotctl.domain.cluster import ClusterAccess
from snapshotctl.domain.criu_host import CriuHost
from snapshotctl.domain.demo_engines import ENGINES, Engine
from snapshotctl.domain.demo_script import MIB, Answer, Machine, checks
from snapshotctl.domain.documents import load
from snapshotctl.domain.exits import DemoFailed, Unready, WrongArguments
from tests.unit.tables import each

EXAMPLES = Path(__file__).resolve().parents[3] / "deploy" / "examples"
TEXT, ONNX = ENGINES["text"], ENGINES["onnx"]


def _example(name: str) -> Any:
    [document] = load((EXAMPLES / name).read_bytes(), name)
    return document.value


@pytest.mark.parametrize("name", [TEXT.checkpoint, TEXT.restore])
def test_the_examples_are_used_as_they_are_but_for_their_size_and_warm_up(name: str) -> None:
    before = _example(name)
    after = demo_script.with_variables(before, demo_engines.variables(TEXT, 64, "short"))
    assert str(after).replace("'64'", "'512'").replace("'1'", "'8'") == str(before)
    parse(after)
    full = demo_script.with_variables(before, demo_engines.variables(TEXT, 512, "full"))
    assert full == before


def test_an_example_that_lacks_a_variable_is_refused() -> None:
    with pytest.raises(DemoFailed, match="SIZE_MIB"):
        demo_script.with_variables(
            {"spec": {"containers": [{"env": [{"name": "OTHER", "value": "1"}]}]}},
            {"SIZE_MIB": "64"},
        )


def test_a_warm_up_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(WrongArguments, match="--warm-up 2s is not one of full, short"):
        demo_engines.variables(TEXT, 512, "2s")


def test_a_worker_without_a_long_warm_up_has_no_short_one() -> None:
    assert demo_engines.variables(ONNX, ONNX.size_mib, "short") == {}


def test_a_worker_is_captured_once_it_was_asked_and_has_learned() -> None:
    containers = _example(TEXT.checkpoint)["spec"]["job"]["podTemplateSpec"]["spec"]["containers"]
    values = {each["name"]: each["value"] for each in containers[0]["env"]}
    assert int(values["WARMUP_REQUESTS"]) == 1 + len(TEXT.said)


def test_the_refused_pod_differs_in_name_and_node_only() -> None:
    before = _example(TEXT.restore)
    after = demo_script.moved_to(before, "x", "node-small")
    assert parse(after).metadata.name == "x"
    after["metadata"]["name"] = before["metadata"]["name"]
    after["spec"]["nodeSelector"] = before["spec"]["nodeSelector"]
    assert after == before


@pytest.mark.parametrize("size_mib", [16, 512, 2048, 100_000])
def test_the_nodes_hold_the_weights_and_the_small_one_cannot(size_mib: int) -> None:
    part = size_mib * demo_script.MIB // demo_script.GPUS
    assert all(node.gpu_memory >= part for node in demo_script.nodes(size_mib))
    assert demo_script.small_node(part).gpu_memory < part
    assert demo_script.small_node(part + 4711).gpu_memory % (2 * MIB) == 0


@pytest.mark.parametrize("size_mib", [0, 15, -1, 10**9])
def test_a_size_that_makes_no_sense_is_refused(size_mib: int) -> None:
    with pytest.raises(WrongArguments):
        demo_engines.check_size(TEXT, size_mib)


def test_an_engine_with_a_model_has_its_size_and_no_other() -> None:
    assert demo_engines.check_size(TEXT, None) == 512
    assert demo_engines.check_size(TEXT, 64) == 64
    assert demo_engines.check_size(ONNX, None) == ONNX.size_mib
    with pytest.raises(WrongArguments, match=r"--size-mib 64: .* leave --size-mib"):
        demo_engines.check_size(ONNX, 64)


def test_an_engine_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    assert demo_engines.engine_of("onnx") is ONNX
    with pytest.raises(WrongArguments, match="--engine vllm is not one of text, onnx"):
        demo_engines.engine_of("vllm")


def test_an_engine_that_is_installed_is_not_for_a_cluster_that_runs_already() -> None:
    assert demo_engines.engine_of("text", is_started_here=False) is TEXT
    with pytest.raises(WrongArguments, match="--engine onnx is not for --on"):
        demo_engines.engine_of("onnx", is_started_here=False)


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_the_pod_of_an_engine_is_restored_from_its_checkpoint(engine: Engine) -> None:
    checkpoint, pod = _example(engine.checkpoint), _example(engine.restore)
    assert [type(parse(each)).__name__ for each in (checkpoint, pod)] == ["DynamoCheckpoint", "Pod"]
    source = pod["metadata"]["annotations"]["nvidia.com/restore-from"]
    assert source == checkpoint["metadata"]["name"]
    containers = checkpoint["spec"]["job"]["podTemplateSpec"]["spec"]["containers"]
    assert containers[0]["command"] == pod["spec"]["containers"][0]["command"]


def test_the_files_that_the_demo_asks_about_are_in_the_checkout() -> None:
    assert len(set(ONNX.asked)) == 20
    lacking = [name for name in ONNX.asked if not (EXAMPLES.parents[1] / name).is_file()]
    assert lacking == []
    assert ONNX.needed == [*ONNX.asked, ".engines/.installed"]
    assert TEXT.needed == []


def test_equal_answers_have_no_differences() -> None:
    answers = [Answer("q", b'{"answer": 1}\n')]
    assert demo_script.differences(answers, list(answers)) == []


@pytest.mark.parametrize(
    "after",
    [
        [Answer("q", b"a \n"), Answer("r", b"b\n")],
        [Answer("q", b"a\n")],
        [],
        [Answer("q", b"a\n"), Answer("r", b"b\n"), Answer("s", b"c\n")],
    ],
)
def test_any_other_byte_and_any_lost_answer_is_a_difference(after: list[Answer]) -> None:
    assert demo_script.differences([Answer("q", b"a\n"), Answer("r", b"b\n")], after)


@pytest.mark.parametrize("line", [b"", b"no json\n", b'{"error": "no"}\n', b"[1]\n", b"\xff\n"])
def test_a_line_that_is_no_answer_ends_the_demo(line: bytes) -> None:
    with pytest.raises(DemoFailed):
        demo_script.checked_answer(TEXT, line)


def test_an_answer_is_shown_as_its_engine_has_it() -> None:
    line = b'{"label": "python", "score": 0.5}'
    shown = demo_script.checked_answer(ONNX, line)
    assert shown == "python (score 0.5)"


def test_a_refusal_has_to_name_both_values() -> None:
    demo_script.check_refusal("DeviceTooSmall", "needs 1 KiB, has 400 B", 1024, 400)
    with pytest.raises(DemoFailed, match="400 B"):
        demo_script.check_refusal("DeviceTooSmall", "needs 1 KiB", 1024, 400)


def test_a_refusal_for_another_reason_ends_the_demo() -> None:
    with pytest.raises(DemoFailed, match="NodeLost"):
        demo_script.check_refusal("NodeLost", "800 400", 800, 400)


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({"node-1": [demo_script.GIB] * 2, "node-2": [demo_script.GIB] * 3}, []),
        ({"node-1": [demo_script.GIB] * 2}, ["node-2 has 0 GPUs of 0 MiB"]),
        (
            {"node-1": [demo_script.GIB, 1], "node-2": [demo_script.GIB] * 2},
            ["node-1 has 2 GPUs of 0 MiB"],
        ),
    ],
)
def test_nodes_that_the_demo_cannot_use_are_named(
    found: dict[str, list[int]], says: list[str]
) -> None:
    problems = demo_script.too_small(demo_script.nodes(512), found)
    assert [problem.partition(";")[0] for problem in problems] == says


def test_the_driver_of_the_demo_is_that_of_its_checkpoint_alone() -> None:
    checkpoint = {"kind": "DynamoCheckpoint", "spec": {"job": {"sourcePolicy": "Resume"}}}
    pod = {"kind": "Pod", "spec": {}}
    assert demo_script.driven(checkpoint, "criu")["spec"]["job"]["driver"] == "criu"
    assert demo_script.driven(pod, "criu") == pod


CRIU_HOST = CriuHost(
    system="Linux", is_root=True, missing=[], tools="/t", has_criu=True, has_init=True
)


def test_a_machine_with_all_that_criu_needs_passes() -> None:
    criu_host.require(criu_host.checks(CRIU_HOST), "the demo")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"system": "Darwin"}, ("Darwin", "use Linux")),
        ({"is_root": False}, ("root", "sudo")),
        ({"missing": ["unshare", "setsid"]}, ("unshare, setsid", "install util-linux")),
        ({"has_criu": False}, ("/t", "make criu")),
        ({"has_init": False}, ("/t", "make init")),
    ],
)
def test_what_criu_lacks_on_a_machine_is_named_with_its_fix(
    change: dict[str, object], says: tuple[str, str]
) -> None:
    with pytest.raises(Unready) as raised:
        criu_host.require(criu_host.checks(CRIU_HOST._replace(**change)), "the demo")  # type: ignore[arg-type]
    [problem] = raised.value.values["problems"]
    assert all(word in problem for word in says)


def test_a_driver_that_no_cluster_is_started_for_is_refused_with_those_that_there_are() -> None:
    assert (criu_host.check_driver("cooperative"), criu_host.check_driver("criu")) == (False, True)
    with pytest.raises(WrongArguments, match="--driver podman is not one of cooperative, criu"):
        criu_host.check_driver("podman")


GOOD = Machine(
    system="Linux",
    kernel="6.1",
    python=(3, 11),
    has_venv=True,
    has_pidfd=True,
    memory=8 * 1024 * MIB,
    state_dir="/home",
    disk=8 * 1024 * MIB,
    shared_memory=64 * MIB,
    has_examples=True,
    examples="deploy/examples",
    has_nats=True,
)


def _missing(machine: Machine, size_mib: int = 512) -> list[str]:
    return [f"{check.what}: {check.fix}" for check in checks(machine, size_mib) if not check.ok]


def test_a_machine_that_has_everything_passes() -> None:
    assert _missing(GOOD) == []


@each(
    ("change", "fix"),
    [
        ({"system": "Darwin"}, "Linux"),
        ({"has_pidfd": False}, "Linux 5.3"),
        ({"has_venv": False}, "apt install python3.11-venv"),
        ({"python": (3, 10)}, "Python 3.11"),
        ({"has_nats": False}, "make setup"),
        ({"memory": 900 * MIB}, "SIZE_MIB=300"),
        ({"disk": 0}, "XDG_STATE_HOME"),
        ({"shared_memory": 0}, "mount -t tmpfs"),
        ({"has_examples": False}, "deploy/examples"),
        ({"missing": [".engines/.installed"]}, "make engines"),
    ],
)
def test_what_is_missing_is_named_with_its_fix(change: dict[str, object], fix: str) -> None:
    [line] = _missing(GOOD._replace(**change))  # type: ignore[arg-type]
    assert fix in line


def test_three_times_the_weights_fit_into_memory() -> None:
    assert _missing(GOOD._replace(memory=3 * 2048 * MIB), 2048) == []
    assert len(_missing(GOOD._replace(memory=3 * 2048 * MIB - 1), 2048)) == 1


def test_everything_missing_is_listed_at_once() -> None:
    bare = GOOD._replace(has_venv=False, memory=0, disk=0, shared_memory=0, has_nats=False)
    assert len(_missing(bare)) == 5


ACCESS = ClusterAccess(
    "snapshotctl --cluster x", "nats -y", Path("/a"), "/l", "http://page/", "end", is_ours=True
)


def test_a_restore_that_was_faster_is_said_to_be() -> None:
    assert demo_story.conclusion(20.0, 2.0) == (
        "The restore was 10.0 times as fast as the cold start."
    )


def test_a_restore_that_was_slower_is_not_worded_as_a_success() -> None:
    said = demo_story.conclusion(2.0, 3.0)
    assert "slower than the cold start: it took 1.5 times as long" in said
    assert "fast" not in said


def test_only_the_first_answers_of_many_are_shown() -> None:
    shown = demo_story.answers([(f"file-{number}", "txt") for number in range(20)])
    assert shown == [
        "    file-0 -> txt",
        "    file-1 -> txt",
        "    file-2 -> txt",
        "    and 17 more",
    ]


def test_a_long_detail_is_broken_between_words() -> None:
    lines = demo_story.answers([("When", "word " * 40)])
    assert max(map(len, lines)) <= demo_story.WIDTH
    assert " ".join(" ".join(lines).split()) == f"When -> {('word ' * 40).strip()}"


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_titles_fit_into_a_line(engine: object) -> None:
    for size_mib in (16, 512, 2048):
        assert len(demo_story.cold_start(engine, size_mib)) <= demo_story.WIDTH  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("share", "shown"), [("", "capturing: 3 s"), ("1 of 2", "capturing: 1 of")]
)
def test_what_is_under_way_is_shown_with_its_time(share: str, shown: str) -> None:
    said = demo_story.waiting("capturing", 3.2, share)
    assert said.strip().startswith(shown)
    assert "3 s so far" in said


@pytest.mark.parametrize(("engine", "asks"), [("text", 1), ("onnx", 0)])
def test_a_worker_that_takes_text_can_be_asked_by_the_command_line(engine: str, asks: int) -> None:
    lines = demo_story.look_around(ACCESS, "demo-llm-restored", ENGINES[engine])
    assert sum(" ask demo-llm-restored " in line for line in lines) == asks
    assert (lines[0], lines[-1]) == ("It goes on; its page is http://page/", "End")
