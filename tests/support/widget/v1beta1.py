"""Widget of nvidia.com/v1beta1."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from snapshot_api.meta import ObjectMeta
from snapshot_api.schema.marks import IMMUTABLE, Rule, list_map
from snapshot_shared.model import Model
from snapshot_shared.orders import Label


class Part(Model):
    """One part of a widget."""

    name: Label
    """The name of the part."""
    weight: Annotated[int, Meta(ge=1, le=100)] = 1
    """How much it weighs, in grams."""


class Maker(Model):
    """Who makes a widget."""

    name: Annotated[str, Meta(max_length=64)]
    """The name of the maker."""


class WidgetSpec(Model):
    """What a widget is made of."""

    RULES: ClassVar = (
        Rule(
            "self.parts.all(part, part.weight <= self.limit)",
            "no part may weigh more than the limit",
            ".parts",
            said="'no part of a ' + self.label + ' may weigh more than its limit'",
        ),
    )

    replicas: Annotated[int, Meta(ge=0, le=100)] = 1
    """How many widgets there are."""
    limit: Annotated[int, Meta(ge=1, le=100)] = 10
    """How much a part may weigh, in grams."""
    label: Annotated[str, Meta(max_length=16)] = "widget"
    """What it is called."""
    parts: Annotated[list[Part], Meta(min_length=1, max_length=8), list_map("name")]
    """The parts."""
    maker: Annotated[Maker | None, IMMUTABLE] = None
    """The maker, which stays the one that it is."""


class WidgetStatus(Model):
    """How a widget stands."""

    replicas: int = 0
    """How many widgets run."""
    selector: str = ""
    """The labels of their pods."""


class Widget(Model, tag_field="kind", tag="Widget", omit_defaults=False):
    """A thing of parts."""

    api_version: Literal["nvidia.com/v1beta1"] = "nvidia.com/v1beta1"
    metadata: ObjectMeta
    spec: WidgetSpec
    status: WidgetStatus = WidgetStatus()
