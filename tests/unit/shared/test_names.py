"""Nothing that is not a name becomes part of a subject, a key or a path."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshot_shared import ids, subjects
from snapshot_shared.errors import InvalidName
from snapshot_shared.files import check_component
from tests.unit.tables import each

UID = ids.Uid("00000000-0000-0000-0000-000000000001")


@each(
    "name",
    ["", "*", ">", "a.>", "a b", "A", "a_b", "../x", "a..b", "-a", "a-", "a" * 254, "a\0", "ä"],
)
def test_a_bad_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidName):
        ids.check_name(name)


@given(st.text(alphabet="a1-.", max_size=300))
def test_a_name_begins_and_ends_with_a_letter_or_digit_and_has_no_two_dots(text: str) -> None:
    is_name = 0 < len(text) <= 253 and not set(text[0] + text[-1]) & set("-.")
    is_name = is_name and ".." not in text
    try:
        found = ids.check_name(text) == text
    except InvalidName:
        found = False
    assert found == is_name


@given(st.from_regex(ids.NAME_PATTERN, fullmatch=True).filter(lambda name: len(name) <= 63))
def test_a_name_survives_the_way_through_a_subject(name: str) -> None:
    token = ids.token(name)
    assert "." not in token
    assert ids.name_of(token) == name


@pytest.mark.parametrize("check", [ids.check_node, ids.token])
def test_the_name_of_a_node_has_63_characters_at_most(check: Callable[[str], str]) -> None:
    assert check("a" * 63) == "a" * 63
    with pytest.raises(InvalidName, match="at most 63"):
        check("a" * 64)


def test_an_object_of_the_longest_name_is_announced_on_a_subject() -> None:
    name = f"{'a' * 126}.{'b' * 126}"
    assert subjects.event("pods", "team", name) == f"snap.event.pods.team.{name.replace('.', '_')}"


@given(st.text(max_size=200))
def test_no_text_makes_a_subject_with_wildcards_or_more_words(text: str) -> None:
    try:
        subject = subjects.order(ids.NodeName(text), "agent", ids.order_id("dump", UID))
    except InvalidName:
        return
    assert len(subject.split(".")) == 5
    assert not set(subject) & set("*> \t\n")


@given(st.text(max_size=300))
def test_parsing_any_subject_gives_an_order_or_a_refusal(text: str) -> None:
    try:
        node, service, order = subjects.parse_order(text)
    except InvalidName:
        return
    assert subjects.order(node, service, order) == text


def test_an_order_id_tells_its_verb_and_owner() -> None:
    order = ids.order_id("save", UID, "gpu-3")
    assert (ids.verb_of(order), ids.owner_of(order)) == ("save", UID)


@each("name", ["", ".", "..", "a/b", "a\0b", "x" * 129, "a\\b", "a\nb", "a\x7f", "ä", "a\u2028"])
def test_a_path_component_is_one_plain_name(name: str) -> None:
    with pytest.raises(InvalidName):
        check_component(name)


def test_hashes_of_different_word_boundaries_differ() -> None:
    assert ids.short_hash("ab", "c") != ids.short_hash("a", "bc")


NODE = ids.NodeName("node-1.rack")
ORDER = ids.order_id("dump", UID)


@each(
    ("made", "wanted"),
    [
        (subjects.order(NODE, "gms", ORDER), f"snap.order.node-1_rack.gms.{ORDER}"),
        (subjects.orders_of(NODE, "agent"), "snap.order.node-1_rack.agent.*"),
        (subjects.order_template("gms", "save"), "snap.order.{node}.gms.save-{owner}"),
        (subjects.durable(NODE, "gms"), "gms-node-1_rack"),
        (subjects.report(NODE, ORDER, "staged"), f"snap.report.node-1_rack.{ORDER}.staged"),
        (subjects.reports_of(ORDER), f"snap.report.*.{ORDER}.*"),
        (subjects.progress(NODE, ORDER), f"snap.progress.node-1_rack.{ORDER}"),
        (subjects.span("operator", "a" * 32), f"snap.span.operator.{'a' * 32}"),
        (subjects.spans_of("a" * 32), f"snap.span.*.{'a' * 32}"),
        (subjects.dead(NODE), "snap.dead.node-1_rack"),
        (subjects.rpc(NODE, "gms", "status"), "snap.rpc.gms.node-1_rack.status"),
        (subjects.event("pods", None, "a.b"), "snap.event.pods.-.a_b"),
        (subjects.event("pods", "default", "a"), "snap.event.pods.default.a"),
        (subjects.family("snap.report.node-1.x.y"), "snap.report"),
    ],
)
def test_every_subject_is_built_of_its_words(made: str, wanted: str) -> None:
    assert made == wanted


@pytest.mark.parametrize("trace", ["", "a" * 31, "a" * 33, "a" * 31 + "."])
def test_a_span_needs_a_trace_id(trace: str) -> None:
    with pytest.raises(InvalidName):
        subjects.span("operator", trace)


@pytest.mark.parametrize(
    "subject", ["snap.order.n.agent", f"snap.orders.n.agent.{ORDER}", f"snap.order.n.x.{ORDER}"]
)
def test_another_subject_is_none_of_an_order(subject: str) -> None:
    with pytest.raises(InvalidName):
        subjects.parse_order(subject)


@pytest.mark.parametrize("key", ["", "a..b", ".a", "a b", "a*"])
def test_a_key_of_a_bucket_is_words(key: str) -> None:
    assert subjects.check_key("A-b/c=d_e.f") == "A-b/c=d_e.f"
    with pytest.raises(InvalidName):
        subjects.check_key(key)
