"""Whose log is meant: a worker's, by its pod, or that of a service."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from snapshot_shared.errors import NotFound
from snapshotctl.domain import targets
from snapshotctl.domain.cluster import NATS, OPERATOR, PAGE
from snapshotctl.domain.exits import WrongArguments

OF_CLUSTER = {OPERATOR: OPERATOR, PAGE: PAGE, "nats": NATS, NATS: NATS}
"""Services that a cluster has once, and the programs that they are."""
OF_NODES = ("agent", "gms", "helper")
"""Services that each node has."""


class ServiceNamed(NamedTuple):
    """A service; `node` is empty for one that a cluster has once, or where it was not named."""

    service: str
    node: str = ""

    @property
    def program(self) -> str:
        """The name of its process in a local cluster."""
        return f"{self.node}-{self.service}" if self.node else OF_CLUSTER[self.service]

    def __str__(self) -> str:
        """Return it as it is typed."""
        return f"{self.service}@{self.node}" if self.node else self.service


def service_named(word: str, programs: Sequence[str] = ()) -> ServiceNamed | None:
    """Return the service of `operator` or `agent@node-1`, or of one of `programs`; None for a pod.

    WrongArguments for a service that there is not. A pod of such a name is `pod/NAME`.
    """
    if word in OF_CLUSTER or word in OF_NODES:
        return ServiceNamed(word)
    service, mark, node = word.partition("@")
    if mark:
        if service not in OF_NODES:
            raise WrongArguments(
                f"{service!r} is no service of a node",
                next_step=f"use one of: {', '.join(f'{name}@NODE' for name in OF_NODES)}",
            )
        return ServiceNamed(service, targets.node_named(node))
    node, mark, service = word.rpartition("-")
    if mark and node and service in OF_NODES and word in programs:
        return ServiceNamed(service, targets.node_named(node))
    return None


def pod_typed(name: str, programs: Sequence[str]) -> str:
    """Return how a pod is typed that may be called like a service or one of `programs`."""
    return name if service_named(name, programs) is None else f"pod/{name}"


def known_services(programs: Sequence[str]) -> list[str]:
    """Return how the services are typed whose programs have these names, those of nodes last."""
    found = (service_named(program, programs) for program in programs)
    names = {str(item) for item in found if item is not None}
    if NATS in names:
        names = names - {NATS} | {"nats"}
    return sorted(names, key=lambda name: ("@" in name, name))


def program_of(wanted: ServiceNamed, programs: Sequence[str]) -> str:
    """Return the program of a service. NotFound lists those that there are.

    One of a node that is not named is that of the only node.
    """
    if not wanted.node and wanted.service in OF_NODES:
        found = [name for name in programs if name.endswith(f"-{wanted.service}")]
        if len(found) > 1:
            each = " or ".join(str(service_named(name, programs)) for name in found)
            raise WrongArguments(f"the {wanted.service} of which node?", next_step=f"name {each}")
    else:
        found = [name for name in programs if name == wanted.program]
    if not found:
        raise NotFound(
            f"there is no log of {wanted} in this cluster",
            next_step=f"name one of: {', '.join(known_services(programs))}; or a pod",
        )
    return found[0]
