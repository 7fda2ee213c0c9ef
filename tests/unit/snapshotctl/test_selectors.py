"""Label selectors, as kubectl has them."""

import pytest

from snapshotctl.domain.exits import WrongArguments
from snapshotctl.domain.selectors import matches, parse
from tests.unit.tables import each

LABELS = {"app": "llm", "tier": "dev", "example.com/team": "a", "empty": ""}


@each(
    "text",
    [
        "app=llm",
        "app == llm",
        "app!=asr",
        "absent!=x",
        "app=llm,tier=dev",
        "app in (asr, llm)",
        "app notin (asr),tier in (dev,test)",
        "absent notin (x)",
        "app",
        "!absent",
        "example.com/team=a",
        "empty=",
    ],
)
def test_a_selector_selects(text: str) -> None:
    assert matches(parse(text), LABELS)


@each(
    "text",
    ["app=asr", "app!=llm", "absent=x", "absent in (x)", "!app", "absent", "app=llm,tier=prod"],
)
def test_a_selector_leaves_out(text: str) -> None:
    assert not matches(parse(text), LABELS)


@each("text", ["=", "a=b=c", "a,,b", "a in", "a in (x y)", "-a=b", "a>1", ","])
def test_a_selector_that_is_none_is_answered_with_its_forms(text: str) -> None:
    with pytest.raises(WrongArguments) as refused:
        parse(text)
    assert "app=llm" in refused.value.next_step
