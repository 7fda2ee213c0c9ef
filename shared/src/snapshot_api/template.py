"""What the definitions declare of a pod template; every other field is kept as it is.

The rules need the containers, `kubectl explain` the fields that matter, and server-side apply the
names by which the items of lists differ.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from snapshot_api.meta import LabelValue
from snapshot_api.schema.marks import Open, list_map
from snapshot_shared.orders import Label

# All annotations of an object together may have as many bytes.
_Annotation = Annotated[str, Meta(max_length=256 * 1024)]


class TemplateMetadata(Open):
    """Labels and annotations of the pods."""

    labels: Annotated[dict[str, LabelValue], Meta(max_length=256)] = {}
    """Labels of the pods."""
    annotations: Annotated[dict[str, _Annotation], Meta(max_length=256)] = {}
    """Annotations of the pods."""


class TemplateEnvVar(Open):
    """One environment variable."""

    name: Annotated[str, Meta(min_length=1, max_length=253)]
    """The name of the variable."""


class TemplateVolumeMount(Open):
    """One mount."""

    mount_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    """Where it is mounted."""


class TemplateContainer(Open):
    """One container."""

    name: Label
    """The name of the container."""
    image: Annotated[str, Meta(max_length=512)] = ""
    """The image."""
    env: Annotated[list[TemplateEnvVar], Meta(max_length=512), list_map("name")] = []
    """Environment variables."""
    volume_mounts: Annotated[
        list[TemplateVolumeMount], Meta(max_length=128), list_map("mountPath")
    ] = []
    """Mounts, beside the default ones."""


class TemplateVolume(Open):
    """One volume."""

    name: Label
    """The name of the volume."""


class TemplatePodSpec(Open):
    """The spec of the pods."""

    containers: Annotated[
        list[TemplateContainer], Meta(min_length=1, max_length=32), list_map("name")
    ]
    """The containers; those fields that are not named here are kept as in a Pod."""
    init_containers: Annotated[list[TemplateContainer], Meta(max_length=32), list_map("name")] = []
    """The containers that run before."""
    volumes: Annotated[list[TemplateVolume], Meta(max_length=128), list_map("name")] = []
    """The volumes."""


class TemplateSkeleton(Open):
    """What is declared of a pod template."""

    spec: TemplatePodSpec
    """The spec of the pods, as in a Pod."""
    metadata: TemplateMetadata = TemplateMetadata()
    """Labels and annotations of the pods."""
