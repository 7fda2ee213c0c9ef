"""Widget of nvidia.com/v1alpha1."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from snapshot_api.meta import ObjectMeta
from snapshot_shared.model import Model
from snapshot_shared.orders import Label
from tests.support.widget.v1beta1 import WidgetStatus


class WidgetSpec(Model):
    """What a widget is made of."""

    count: Annotated[int, Meta(ge=0, le=100)] = 1
    """How many widgets there are."""
    part_names: Annotated[list[Label], Meta(min_length=1, max_length=8)]
    """The names of the parts."""


class Widget(Model, tag_field="kind", tag="Widget", omit_defaults=False):
    """A thing of parts, as it was first."""

    api_version: Literal["nvidia.com/v1alpha1"] = "nvidia.com/v1alpha1"
    metadata: ObjectMeta
    spec: WidgetSpec
    status: WidgetStatus = WidgetStatus()
