"""Label selectors as kubectl takes them: `app=llm,tier!=dev,env in (a, b),!old`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from snapshotctl.domain.exits import WrongArguments

_KEY = r"(?P<key>[A-Za-z0-9](?:[-A-Za-z0-9_./]{0,315}[A-Za-z0-9])?)"
_VALUE = r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_EQUAL = re.compile(rf"{_KEY}\s*(?P<sign>==|!=|=)\s*(?P<value>(?:{_VALUE})?)", re.ASCII)
_SET = re.compile(rf"{_KEY}\s+(?P<sign>in|notin)\s*\((?P<values>[^()]*)\)", re.ASCII)
_THERE = re.compile(rf"(?P<sign>!?)\s*{_KEY}", re.ASCII)
_ONE_VALUE = re.compile(rf"(?:{_VALUE})?", re.ASCII)
_COMMA = re.compile(r",(?![^()]*\))")


class Requirement(NamedTuple):
    """What one label has to be: one of `values`, or with none of them there at all."""

    key: str
    values: frozenset[str] | None
    is_negated: bool = False

    def holds(self, labels: Mapping[str, str]) -> bool:
        """Whether labels are so; one that is missing has no value, and so is none of them."""
        is_there = self.key in labels
        holds = is_there if self.values is None else is_there and labels[self.key] in self.values
        return holds != self.is_negated


def parse(text: str) -> list[Requirement]:
    """Return the requirements of a selector, all of which have to hold. WrongArguments."""
    return [_requirement(part.strip(), text) for part in _COMMA.split(text)]


def matches(requirements: Sequence[Requirement], labels: Mapping[str, str]) -> bool:
    """Whether all requirements hold; with none of them every object is selected."""
    return all(requirement.holds(labels) for requirement in requirements)


def _requirement(part: str, text: str) -> Requirement:
    if found := _EQUAL.fullmatch(part):
        return Requirement(found["key"], frozenset({found["value"]}), found["sign"] == "!=")
    if found := _SET.fullmatch(part):
        values = [value.strip() for value in found["values"].split(",")]
        if all(_ONE_VALUE.fullmatch(value) for value in values):
            return Requirement(found["key"], frozenset(values), found["sign"] == "notin")
    elif found := _THERE.fullmatch(part):
        return Requirement(found["key"], None, found["sign"] == "!")
    raise WrongArguments(
        f"{part!r} of the selector {text!r} is not understood",
        next_step="write it as app=llm, app!=llm, app, !app or 'app in (llm, asr)', with commas "
        "between several",
    )
