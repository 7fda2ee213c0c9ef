"""The demo's decisions."""

from pathlib import Path

import pytest

from snapshot_shared.manifests import parse
from snapshotctl.domain import demo
from snapshotctl.domain.cluster import Handle
from snapshotctl.domain.demo import Answer
from snapshotctl.domain.documents import load
from snapshotctl.domain.exits import DemoFailed, WrongArguments

EXAMPLES = Path(__file__).resolve().parents[3] / "deploy" / "examples"


def _example(name: str) -> object:
    [document] = load((EXAMPLES / name).read_bytes(), name)
    return document.value


@pytest.mark.parametrize("name", ["checkpoint.yaml", "restore.yaml"])
def test_the_examples_are_used_as_they_are_but_for_their_size(name: str) -> None:
    before = _example(name)
    after = demo.sized(before, 64)
    assert str(after).replace("'64'", "'512'") == str(before)
    parse(after)


def test_an_example_without_a_size_is_refused() -> None:
    with pytest.raises(DemoFailed, match="SIZE_MIB"):
        demo.sized({"spec": {"containers": [{"env": [{"name": "OTHER", "value": "1"}]}]}}, 64)


def test_the_refused_pod_differs_in_name_and_node_only() -> None:
    before = demo.sized(_example("restore.yaml"), 64)
    after = demo.moved_to(before, "x", "node-small")
    assert parse(after).metadata.name == "x"
    after["metadata"]["name"] = before["metadata"]["name"]
    after["spec"]["nodeSelector"] = before["spec"]["nodeSelector"]
    assert after == before


@pytest.mark.parametrize("size_mib", [16, 512, 2048, 100_000])
def test_the_nodes_hold_the_weights_and_the_small_one_cannot(size_mib: int) -> None:
    part = size_mib * demo.MIB // demo.GPUS
    assert all(node.gpu_memory >= part for node in demo.nodes(size_mib))
    assert demo.small_node(size_mib).gpu_memory < part


@pytest.mark.parametrize("size_mib", [0, 15, -1, 10**9])
def test_a_size_that_makes_no_sense_is_refused(size_mib: int) -> None:
    with pytest.raises(WrongArguments):
        demo.check_size(size_mib)


def test_equal_answers_have_no_differences() -> None:
    answers = [Answer("q", b'{"answer": 1}\n')]
    assert demo.differences(answers, list(answers)) == []


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
    assert demo.differences([Answer("q", b"a\n"), Answer("r", b"b\n")], after)


@pytest.mark.parametrize("line", [b"", b"no json\n", b'{"error": "no"}\n', b"[1]\n", b"\xff\n"])
def test_a_line_that_is_no_answer_ends_the_demo(line: bytes) -> None:
    with pytest.raises(DemoFailed):
        demo.checked_answer(line)


def test_a_refusal_has_to_name_both_values() -> None:
    demo.check_refusal("DeviceTooSmall", "needs 800 bytes, has 400", 800, 400)
    with pytest.raises(DemoFailed, match="400"):
        demo.check_refusal("DeviceTooSmall", "needs 800 bytes", 800, 400)


def test_a_refusal_for_another_reason_ends_the_demo() -> None:
    with pytest.raises(DemoFailed, match="NodeLost"):
        demo.check_refusal("NodeLost", "800 400", 800, 400)


HANDLE = Handle("snapshotctl -x", "nats -y", Path("/a"), "/l", "", "end", is_ours=True)


def test_everything_is_shown_by_two_commands() -> None:
    names = demo.Names("c", "content-1", "p", "r", "a" * 32)
    twins = demo.twins(names, HANDLE)
    assert len(twins) == 7
    for twin in twins:
        assert twin.ours.startswith("snapshotctl -x ")
        assert twin.stock.startswith("nats -y ")


def test_a_refusal_that_was_not_tried_is_not_shown() -> None:
    names = demo.Names("c", "content-1", "p", None, "a" * 32)
    assert [twin.what for twin in demo.twins(names, HANDLE) if "refused" in twin.what] == []


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ({"node-1": [demo.GIB] * 2, "node-2": [demo.GIB] * 3}, []),
        ({"node-1": [demo.GIB] * 2}, ["node-2 has 0 GPUs of 0 MiB"]),
        ({"node-1": [demo.GIB, 1], "node-2": [demo.GIB] * 2}, ["node-1 has 2 GPUs of 0 MiB"]),
    ],
)
def test_nodes_that_the_demo_cannot_use_are_named(
    found: dict[str, list[int]], says: list[str]
) -> None:
    problems = demo.too_small(demo.nodes(512), found)
    assert [problem.partition(";")[0] for problem in problems] == says
