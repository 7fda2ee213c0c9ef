"""What a declaration says of its fields beside their types: rules, list keys and the like."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Meta

from snapshot_shared.model import Model


class Rule(NamedTuple):
    """A rule between the fields of a struct, which lists it in its `RULES`.

    `cel` is true of a right object: `self` is the object, `oldSelf` what it was before a change.
    `path` is the field that the error names, such as `.saver`. `said` is an expression for a
    message that has the values found; `message` stands in the generated pages, and is given if the
    expression fails.
    """

    cel: str
    message: str
    path: str = ""
    reason: str = "FieldValueInvalid"
    said: str = ""


FORBIDDEN = "FieldValueForbidden"
"""The reason of a rule by which a field must not be there."""


def set_once(name: str) -> Rule:
    """Return the rule that a field of a status stays what it is, once it is set."""
    return Rule(
        f"!has(oldSelf.{name}) || (has(self.{name}) && self.{name} == oldSelf.{name})",
        "is never changed once it is set",
        f".{name}",
    )


def never_falls(name: str) -> Rule:
    """Return the rule that a number of a status never falls."""
    return Rule(
        f"!has(oldSelf.{name}) || (has(self.{name}) && self.{name} >= oldSelf.{name})",
        "never falls",
        f".{name}",
    )


class Marks(NamedTuple):
    """The marks of one field, which `Annotated` holds as `Meta(extra=...)`."""

    list_map: tuple[str, ...] = ()
    is_immutable: bool = False
    is_undefaulted: bool = False
    declared: type[Model] | None = None


def list_map(*keys: str) -> Meta:
    """Mark a list whose items differ by these fields, for server-side apply."""
    return Meta(extra={"list_map": keys})


IMMUTABLE = Meta(extra={"is_immutable": True})
"""Marks a field that never changes, nor anything in it."""

UNDEFAULTED = Meta(extra={"is_undefaulted": True})
"""Marks a field that stays away if it is left out: its absence has a meaning of its own."""


def declared_as(struct: type[Model]) -> Meta:
    """Mark a field that a definition declares by another struct than programs read."""
    return Meta(extra={"declared": struct})


class Open(Model):
    """A struct whose objects keep the fields that it does not name."""
