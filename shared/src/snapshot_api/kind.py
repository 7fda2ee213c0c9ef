"""How a kind is declared: its names, its versions, and the columns of `kubectl get`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from snapshot_api.well_known import OURS
from snapshot_shared.errors import InvalidManifest


class Column(NamedTuple):
    """One column of `kubectl get`; a wide one is shown with `-o wide`."""

    name: str
    path: str
    description: str
    type: str = "string"
    is_wide: bool = False

    def schema(self) -> dict[str, Any]:
        """Return the column as an entry of `additionalPrinterColumns`."""
        wide = {"priority": 1} if self.is_wide else {}
        named = {"name": self.name, "type": self.type, "jsonPath": self.path}
        return {**named, "description": self.description, **wide}


Document = dict[str, Any]


class Version(NamedTuple):
    """One version of a kind.

    `to_hub` and `from_hub` make a document of the version that programs read, and back; neither is
    given for that version itself. They get documents with any of their fields left out.
    `deprecated` is the warning of a version that people shall no longer use.
    """

    name: str
    type: type[Any]
    columns: tuple[Column, ...] = ()
    to_hub: Callable[[Document], Document] | None = None
    from_hub: Callable[[Document], Document] | None = None
    deprecated: str = ""


class Scale(NamedTuple):
    """The paths that `kubectl scale` and autoscalers read and write."""

    replicas: str = ".spec.replicas"
    observed: str = ".status.replicas"
    selector: str = ".status.selector"


def _recorded(value: Any) -> str:
    found: str = value.status.phase
    return found


class Kind(NamedTuple):
    """How a kind is named, stored, decoded and shown.

    Of the `versions` the first is the hub: it is stored, and programs know that one alone. `phase`
    returns the phase of an object that is not going. `others` are names by which people call the
    kind beside its name, plural and short name.
    """

    name: str
    group: str
    plural: str
    short: str
    versions: tuple[Version, ...]
    phase: Callable[[Any], str] = _recorded
    namespaced: bool = True
    appliable: bool = True
    others: tuple[str, ...] = ()
    scale: Scale | None = None

    @property
    def hub(self) -> Version:
        """The version that is stored, and that programs know."""
        return self.versions[0]

    @property
    def type(self) -> type[Any]:
        """The type of objects in memory."""
        return self.hub.type

    @property
    def api_version(self) -> str:
        """The apiVersion of the hub."""
        return self.api_version_of(self.hub)

    @property
    def is_ours(self) -> bool:
        """Whether this product defines the kind."""
        return self.group == OURS

    def api_version_of(self, version: Version) -> str:
        """Return the apiVersion of objects of a version."""
        return f"{self.group}/{version.name}" if self.group else version.name

    def version_of(self, api_version: object) -> Version | None:
        """Return the version with an apiVersion; None if the kind has none."""
        found = (each for each in self.versions if self.api_version_of(each) == api_version)
        return next(found, None)


def converted(kind: Kind, document: Document, version: Version) -> Document:
    """Return a document of any version of a kind as one of another version.

    Raise InvalidManifest if the kind has no version of the document's apiVersion.
    """
    found = kind.version_of(document.get("apiVersion"))
    if found is None:
        raise InvalidManifest(f"{kind.name} has no version {document.get('apiVersion')!r}")
    if found.name == version.name:
        return document
    hub = found.to_hub(document) if found.to_hub else document
    result = version.from_hub(hub) if version.from_hub else hub
    return result | {"apiVersion": kind.api_version_of(version)}


_READY = ".status.conditions[?(@.type=='Ready')]"
AGE = Column("Age", ".metadata.creationTimestamp", "Time since it was created", "date")
PHASE = Column("Phase", ".status.phase", "The phase")
PROGRESS = Column("Progress", ".status.progress", "Parts that are complete, of all")
SIZE = Column("Size", ".status.size", "The size of the artifact")
REASON = Column("Reason", f"{_READY}.reason", "Why it is ready, or is not")
TRACE = Column(
    "Trace",
    r".metadata.annotations['nvidia\.com/traceparent']",
    "Where it belongs in its trace (W3C)",
    is_wide=True,
)


def driver(path: str) -> Column:
    """Return the column of the driver, which is at a path."""
    return Column("Driver", path, "How the state of the process is captured", is_wide=True)


def seconds(name: str, path: str, description: str) -> Column:
    """Return a wide column of a time in seconds."""
    return Column(name, path, description, "number", is_wide=True)


def artifact(path: str) -> Column:
    """Return the column of what names the artifact, which is at a path."""
    return Column("Artifact", path, "Where the artifact is found", is_wide=True)
