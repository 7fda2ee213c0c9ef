"""Which object a command means."""

import pytest

from snapshot_shared.objects.kinds import KINDS
from snapshotctl.domain.exits import WrongArguments
from snapshotctl.domain.targets import (
    everywhere,
    kinds_like,
    meant,
    meant_one,
    one_target,
    pod_named,
    target,
    traced,
    verified,
)
from tests.unit.tables import each


@pytest.mark.parametrize("words", [["pod", "w"], ["pod/w"], ["pods/w"], ["Pod", "w"], ["po/w"]])
def test_a_kind_has_many_names_and_two_ways_to_name_an_object(words: list[str]) -> None:
    found = one_target(words, "ns")
    assert (found.kind.name, found.namespace, found.name) == ("Pod", "ns", "w")


def test_a_kind_alone_means_all_of_it() -> None:
    assert target(["pods"], "ns").name is None


def test_a_kind_without_namespaces_has_none() -> None:
    assert target(["nodes", "n"], "ns").namespace is None


def test_all_namespaces_are_none() -> None:
    assert everywhere(target(["pods"], "ns")).namespace is None


def test_a_name_and_all_namespaces_exclude_each_other() -> None:
    with pytest.raises(WrongArguments):
        everywhere(target(["pods", "w"], "ns"))


@each(
    "words", [["nothing"], ["nothing/w"], ["pod", "a", "b"], ["pod", "A_B"], ["pod/"], ["pod/../x"]]
)
def test_words_that_name_nothing_are_refused(words: list[str]) -> None:
    with pytest.raises(WrongArguments):
        target(words, "ns")


def test_an_unknown_kind_is_answered_with_the_known_ones() -> None:
    with pytest.raises(WrongArguments) as refused:
        target(["nothing"], "ns")
    assert "dynamocheckpoints" in refused.value.next_step


def test_a_namespace_that_is_no_label_is_refused() -> None:
    with pytest.raises(WrongArguments):
        target(["pods"], "a.b")


def test_one_object_needs_a_name() -> None:
    with pytest.raises(WrongArguments, match="a name is missing"):
        one_target(["pods"], "ns")


def test_a_bare_name_is_traced_as_whatever_may_have_a_trace() -> None:
    assert [(t.kind.name, t.namespace) for t in traced("x", "ns")] == [
        ("DynamoCheckpoint", "ns"),
        ("Snapshot", "ns"),
        ("SnapshotContent", None),
        ("Pod", "ns"),
        ("SnapshotRestore", "ns"),
    ]


@pytest.mark.parametrize("word", ["DynamoCheckpoint", "dckpt", "ckpt", "checkpoint", "checkpoints"])
def test_a_checkpoint_has_a_short_name(word: str) -> None:
    assert target([word], "ns").kind.name == "DynamoCheckpoint"


@pytest.mark.parametrize(
    "word", ["SnapshotRestore", "snapshotrestores", "srestore", "restore", "restores"]
)
def test_a_restore_has_many_names(word: str) -> None:
    assert target([word], "ns").kind.name == "SnapshotRestore"


def test_a_kind_and_a_name_are_traced_as_they_are() -> None:
    assert [str(t) for t in traced("pod/x", "ns")] == ["pod/x"]


def test_a_bare_name_is_verified_as_checkpoint_snapshot_and_content() -> None:
    assert [(t.kind.name, t.namespace) for t in verified("x", "ns")] == [
        ("DynamoCheckpoint", "ns"),
        ("Snapshot", "ns"),
        ("SnapshotContent", None),
    ]


def test_what_holds_no_artifact_cannot_be_verified() -> None:
    with pytest.raises(WrongArguments, match="holds no artifact"):
        verified("pod/x", "ns")


def test_a_bare_name_may_be_that_of_any_kind() -> None:
    found = meant(["demo-llm"], "ns")
    assert {item.kind.name for item in found} == set(KINDS)
    assert {item.name for item in found} == {"demo-llm"}
    assert meant_one(["demo-llm"], "ns") == found


@pytest.mark.parametrize("words", [["pod", "x"], ["pod/x"], ["dckpt/x"]])
def test_words_with_a_kind_mean_one_object(words: list[str]) -> None:
    assert meant(words, "ns") == [one_target(words, "ns")]


def test_a_kind_is_no_name() -> None:
    assert [item.name for item in meant(["pods"], "ns")] == [None]
    with pytest.raises(WrongArguments, match="a name is missing"):
        meant_one(["pods"], "ns")


def test_a_slip_in_a_kind_is_seen() -> None:
    assert kinds_like("pdos") == ["pods"]
    assert kinds_like("demo-llm") == []


def test_a_process_is_that_of_a_pod() -> None:
    assert pod_named("w") == pod_named("pod/w") == pod_named("po/w") == "w"
    with pytest.raises(WrongArguments, match="a Node has no process"):
        pod_named("node/w")
