"""Whose log a word means."""

import pytest

from snapshot_shared.errors import NotFound
from snapshotctl.domain.exits import WrongArguments
from snapshotctl.domain.sources import known_services, pod_typed, program_of, service_named
from tests.unit.tables import each

PROGRAMS = ["nats-server", "node-1-agent", "node-1-gms", "node-2-agent", "operator", "page"]


@each(
    ("word", "program"),
    [
        ("operator", "operator"),
        ("nats", "nats-server"),
        ("nats-server", "nats-server"),
        ("agent@node-1", "node-1-agent"),
        ("node-2-agent", "node-2-agent"),
        ("gms", "node-1-gms"),
    ],
)
def test_a_service_is_a_program(word: str, program: str) -> None:
    service = service_named(word, PROGRAMS)
    assert service is not None
    assert program_of(service, PROGRAMS) == program


@each(
    "word",
    ["my-worker", "pod/operator", "demo-llm-dfec6", "pod/node-1-agent", "x-agent", "node-2-gms"],
)
def test_any_other_word_is_a_pod(word: str) -> None:
    assert service_named(word, PROGRAMS) is None


@pytest.mark.parametrize(
    ("name", "typed"),
    [
        ("my-worker", "my-worker"),
        ("x-agent", "x-agent"),
        ("node-1-agent", "pod/node-1-agent"),
        ("operator", "pod/operator"),
        ("gms", "pod/gms"),
    ],
)
def test_a_pod_that_is_called_like_a_service_is_typed_with_its_kind(name: str, typed: str) -> None:
    assert pod_typed(name, PROGRAMS) == typed


def test_a_service_of_several_nodes_is_asked_for_by_its_node() -> None:
    service = service_named("agent")
    assert service is not None
    with pytest.raises(WrongArguments) as refused:
        program_of(service, PROGRAMS)
    assert refused.value.next_step == "name agent@node-1 or agent@node-2"


def test_a_service_that_is_not_there_is_answered_with_those_that_are() -> None:
    service = service_named("helper@node-1")
    assert service is not None
    with pytest.raises(NotFound) as refused:
        program_of(service, PROGRAMS)
    assert "nats, operator, page, agent@node-1, agent@node-2, gms@node-1" in refused.value.next_step
    with pytest.raises(WrongArguments, match="'saver' is no service of a node"):
        service_named("saver@node-1")


def test_services_are_listed_as_they_are_typed() -> None:
    assert known_services(PROGRAMS) == [
        "nats",
        "operator",
        "page",
        "agent@node-1",
        "agent@node-2",
        "gms@node-1",
    ]
