"""What the definitions declare of a pod template; every other field is kept as it is.

The rules need the containers, `kubectl explain` the fields that matter, and server-side apply the
names by which the items of lists differ.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from snapshot_api.meta import LabelValue
from snapshot_shared.orders import Label

# All annotations of an object together may have as many bytes.
_Annotation = Annotated[str, Meta(max_length=256 * 1024)]


class TemplateMetadata(msgspec.Struct, frozen=True):
    """Labels and annotations of the pods."""

    labels: Annotated[dict[str, LabelValue], Meta(max_length=256)] = {}
    annotations: Annotated[dict[str, _Annotation], Meta(max_length=256)] = {}


class TemplateEnvVar(msgspec.Struct, frozen=True):
    """One environment variable."""

    name: Annotated[str, Meta(min_length=1, max_length=253)]


class TemplateVolumeMount(msgspec.Struct, frozen=True, rename="camel"):
    """One mount."""

    mount_path: Annotated[str, Meta(min_length=1, max_length=4096)]


class TemplateContainer(msgspec.Struct, frozen=True, rename="camel"):
    """One container."""

    name: Label
    image: Annotated[str, Meta(max_length=512)] = ""
    env: Annotated[list[TemplateEnvVar], Meta(max_length=512)] = []
    volume_mounts: Annotated[list[TemplateVolumeMount], Meta(max_length=128)] = []


class TemplateVolume(msgspec.Struct, frozen=True):
    """One volume."""

    name: Label


class TemplatePodSpec(msgspec.Struct, frozen=True, rename="camel"):
    """The spec of the pods."""

    containers: Annotated[list[TemplateContainer], Meta(min_length=1, max_length=32)]
    init_containers: Annotated[list[TemplateContainer], Meta(max_length=32)] = []
    volumes: Annotated[list[TemplateVolume], Meta(max_length=128)] = []


class TemplateSkeleton(msgspec.Struct, frozen=True):
    """What is declared of a pod template."""

    spec: TemplatePodSpec
    metadata: TemplateMetadata = TemplateMetadata()


OPENED: frozenset[type] = frozenset(
    {
        *(TemplateSkeleton, TemplateMetadata, TemplatePodSpec, TemplateContainer),
        *(TemplateEnvVar, TemplateVolumeMount, TemplateVolume),
    }
)
"""All of these: the fields that they do not name are those of a Pod."""
