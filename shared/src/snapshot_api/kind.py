"""How a kind is declared: its names, its type, and the columns of `kubectl get`."""

from __future__ import annotations

from typing import Any, NamedTuple


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


class Kind(NamedTuple):
    """How a kind is named, stored, decoded and shown.

    `others` are names by which people call it beside its name, plural and short name.
    """

    name: str
    api_version: str
    plural: str
    short: str
    type: type[Any]
    namespaced: bool = True
    appliable: bool = True
    others: tuple[str, ...] = ()
    columns: tuple[Column, ...] = ()


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
