"""The demo's decisions, and what it prints."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from snapshot_api.manifests import parse
from snapshotctl.domain import criu_host, demo_engines, demo_script, demo_story
from snapshotctl.domain.cluster import ClusterAccess
from snapshotctl.domain.criu_host import CriuHost
from snapshotctl.domain.demo_engines import ENGINES, Engine
from snapshotctl.domain.demo_script import GIB, MIB, Answer, Machine, checks
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


BARE = {"spec": {"containers": [{"env": [{"name": "OTHER", "value": "1"}]}]}}


ELSEWHERE = functools.partial(demo_engines.engine_of, is_started_here=False)


@each(
    ("call", "words", "refusal"),
    [
        (demo_script.with_variables, (BARE, {"SIZE_MIB": "64"}), "SIZE_MIB"),
        (demo_engines.variables, (TEXT, 512, "2s"), "--warm-up 2s is not one of full, short"),
        *((demo_engines.check_size, (TEXT, size), "--size-mib") for size in (0, 15, -1, 10**9)),
        (demo_engines.check_size, (ONNX, 64), "--size-mib 64: .* leave --size-mib"),
        (demo_engines.engine_of, ("tgi", "criu"), "--engine tgi is not one of text, onnx, vllm"),
        (ELSEWHERE, ("onnx", "criu"), "--engine onnx is not for --on"),
        (criu_host.check_driver, ("podman",), "--driver podman is not one of cooperative, criu"),
    ],
)
def test_what_the_demo_has_not_is_refused(call: Any, words: tuple[Any, ...], refusal: str) -> None:
    with pytest.raises((DemoFailed, WrongArguments), match=refusal):
        call(*words)


def test_options_of_the_demo_have_their_defaults() -> None:
    assert demo_engines.variables(ONNX, ONNX.size_mib, "short") == {}
    assert [demo_engines.check_size(TEXT, size) for size in (None, 64)] == [512, 64]
    assert demo_engines.check_size(ONNX, None) == ONNX.size_mib
    assert demo_engines.engine_of("onnx", "criu") is ONNX
    assert demo_engines.engine_of("text", "criu", is_started_here=False) is TEXT
    assert [criu_host.check_driver(name) for name in ("cooperative", "criu")] == [False, True]


def test_the_checkpoint_waits_for_all_questions_and_the_refused_pod_has_another_node() -> None:
    containers = _example(TEXT.checkpoint)["spec"]["job"]["podTemplateSpec"]["spec"]["containers"]
    values = {each["name"]: each["value"] for each in containers[0]["env"]}
    assert int(values["WARMUP_REQUESTS"]) == 1 + len(TEXT.said)
    before = _example(TEXT.restore)
    after = demo_script.moved_to(before, "x", "node-small")
    assert parse(after).metadata.name == "x"
    after["metadata"]["name"] = before["metadata"]["name"]
    after["spec"]["nodeSelector"] = before["spec"]["nodeSelector"]
    assert after == before


@pytest.mark.parametrize("size_mib", [16, 512, 2048, 100_000])
def test_the_nodes_hold_the_weights_and_the_small_one_cannot(size_mib: int) -> None:
    part = size_mib * MIB // demo_script.GPUS
    assert all(node.gpu_memory >= part for node in demo_script.nodes(size_mib))
    assert demo_script.small_node(part).gpu_memory < part
    assert demo_script.small_node(part + 4711).gpu_memory % (2 * MIB) == 0


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


def test_any_other_byte_and_any_lost_answer_is_a_difference() -> None:
    first, second, third = Answer("q", b"a\n"), Answer("r", b"b\n"), Answer("s", b"c\n")
    assert demo_script.differences([first, second], [first, second]) == []
    for after in ([Answer("q", b"a \n"), second], [first], [], [first, second, third]):
        assert demo_script.differences([first, second], after), after


def test_an_answer_is_shown_as_its_engine_has_it_and_any_other_line_ends_the_demo() -> None:
    line = b'{"label": "python", "score": 0.5}'
    assert demo_script.checked_answer(ONNX, line) == "python (score 0.5)"
    for noise in (b"", b"no json\n", b'{"error": "no"}\n', b"[1]\n", b"\xff\n"):
        with pytest.raises(DemoFailed):
            demo_script.checked_answer(TEXT, noise)


def test_a_refusal_has_to_name_both_values_and_the_reason() -> None:
    demo_script.check_refusal("DeviceTooSmall", "needs 1 KiB, has 400 B", 1024, 400)
    with pytest.raises(DemoFailed, match="400 B"):
        demo_script.check_refusal("DeviceTooSmall", "needs 1 KiB", 1024, 400)
    with pytest.raises(DemoFailed, match="NodeLost"):
        demo_script.check_refusal("NodeLost", "800 400", 800, 400)


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({"node-1": [GIB] * 2, "node-2": [GIB] * 3}, []),
        ({"node-1": [GIB] * 2}, ["node-2 has 0 GPUs of 0 MiB"]),
        ({"node-1": [GIB, 1], "node-2": [GIB] * 2}, ["node-1 has 2 GPUs of 0 MiB"]),
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
    system="Linux",
    is_root=True,
    missing=[],
    tools="/t",
    has_criu=True,
    has_init=True,
    has_loopback=True,
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
        ({"has_loopback": False}, ("127.0.0.1", "ip link set lo up")),
    ],
)
def test_what_criu_lacks_on_a_machine_is_named_with_its_fix(
    change: dict[str, object], says: tuple[str, str]
) -> None:
    with pytest.raises(Unready) as raised:
        criu_host.require(criu_host.checks(CRIU_HOST._replace(**change)), "the demo")  # type: ignore[arg-type]
    [problem] = raised.value.values["problems"]
    assert all(word in problem for word in says)


GOOD = Machine(
    system="Linux",
    kernel="6.1",
    python=(3, 11),
    has_venv=True,
    has_pidfd=True,
    memory=8 * GIB,
    state_dir="/home",
    disk=8 * GIB,
    shared_memory=64 * MIB,
    has_examples=True,
    examples="deploy/examples",
    has_nats=True,
)


def _missing(machine: Machine, size_mib: int = 512, engine: Engine = TEXT) -> list[str]:
    found = checks(machine, engine, size_mib)
    return [f"{check.what}: {check.fix}" for check in found if not check.ok]


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


def test_everything_missing_is_listed_at_once_and_three_times_the_weights_fit_into_memory() -> None:
    assert _missing(GOOD) == []
    bare = GOOD._replace(has_venv=False, memory=0, disk=0, shared_memory=0, has_nats=False)
    assert len(_missing(bare)) == 5
    assert _missing(GOOD._replace(memory=3 * 2048 * MIB), 2048) == []
    assert len(_missing(GOOD._replace(memory=3 * 2048 * MIB - 1), 2048)) == 1


def test_an_engine_may_need_more_than_its_weights_and_says_how_it_is_installed() -> None:
    vllm = ENGINES["vllm"]
    small = GOOD._replace(memory=2048 * MIB, missing=vllm.needed)
    memory, missing = _missing(small, vllm.size_mib, vllm)
    assert memory.endswith(": free memory")
    assert "make engines ENGINE=vllm" in missing
    with pytest.raises(WrongArguments, match="not captured by cooperative: add --driver criu"):
        demo_engines.engine_of("vllm", "cooperative")


ACCESS = ClusterAccess(
    "snapshotctl --cluster x", "nats -y", Path("/a"), "/l", "http://page/", "end", is_ours=True
)


def test_only_a_restore_that_was_faster_is_said_to_be() -> None:
    faster, slower = demo_story.conclusion(20.0, 2.0), demo_story.conclusion(2.0, 3.0)
    assert faster == "The restore was 10.0 times as fast as the cold start."
    assert "slower than the cold start: it took 1.5 times as long" in slower
    assert "fast" not in slower


def test_of_many_answers_the_first_are_shown_and_a_long_one_is_broken_between_words() -> None:
    shown = demo_story.answers([(f"file-{number}", "txt") for number in range(20)])
    assert shown == [*(f"    file-{number} -> txt" for number in range(3)), "    and 17 more"]
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
