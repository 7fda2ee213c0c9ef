"""What kubectl prints, as values."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from snapshotctl.domain.targets import Target

Kind = Literal["arguments", "forbidden", "missing", "refused", "unreachable"]


class NatsService(NamedTuple):
    """The Service of a NATS that the chart runs."""

    namespace: str
    name: str


class Problem(NamedTuple):
    """Why a command of kubectl failed."""

    kind: Kind
    message: str
    next_step: str = ""


KUBE_PARTS = {
    "operator": ("operator", "operator"),
    "nats": ("nats", "nats"),
    "nats-server": ("nats", "nats"),
    "page": ("page", "page"),
    "agent": ("node", "agent"),
    "gms": ("node", "gms"),
    "helper": ("node", "helper"),
}
"""The component, as the chart labels it, and the container of each service."""

_SIGNS: tuple[tuple[str, Kind, str], ...] = (
    ("context was not found", "arguments", "list them: kubectl config get-contexts"),
    ("does not exist", "arguments", "list them: kubectl config get-contexts"),
    ("no such file or directory", "arguments", "name a kubeconfig that exists with --kubeconfig"),
    ("error loading config file", "arguments", "see what kubectl says: kubectl config view"),
    ("(forbidden)", "forbidden", "ask for these rights, or see them: kubectl auth can-i --list"),
    ("unauthorized", "forbidden", "log in again, as kubectl needs it"),
    ("no matches for kind", "missing", "install the chart: docs/kubernetes.md"),
    ("(notfound)", "missing", ""),
    ("unable to connect", "unreachable", "see whether the cluster answers: kubectl version"),
    ("connection to the server", "unreachable", "see whether the cluster answers: kubectl version"),
    ("connection refused", "unreachable", "see whether the cluster answers: kubectl version"),
    ("i/o timeout", "unreachable", "see whether the cluster answers: kubectl version"),
)
"""What stands in an error of kubectl, in lower case; the first that does decides."""


def nats_services(answer: dict[str, Any]) -> list[NatsService]:
    """Return the Services of NATS in a list, without those that only name its pods."""
    return [
        NatsService(item["metadata"]["namespace"], item["metadata"]["name"])
        for item in answer["items"]
        if item["spec"].get("clusterIP") != "None"
    ]


_OF_ITS_POD = (
    "SNAPBACK_HEALTH_ADDRESS",
    "SNAPBACK_HTTP_ADDRESS",
    "SNAPBACK_KUBECONFIG",
    "SNAPBACK_NAMESPACE",
    "SNAPBACK_NATS_",
    "SNAPBACK_OTLP_ENDPOINT",
    "SNAPBACK_STATE_DIR",
    "SNAPBACK_WEBHOOK_",
)
"""Settings of an operator that hold in its pod alone, or the beginnings of their names."""


def operator_variables(deployments: dict[str, Any], name: str) -> dict[str, str]:
    """Return the settings that a Deployment has for its operator, as far as they hold elsewhere."""
    containers = [
        container
        for item in deployments["items"]
        if item["metadata"]["name"] == name
        for container in item["spec"]["template"]["spec"]["containers"]
    ]
    return {
        row["name"]: row["value"]
        for container in containers
        for row in container.get("env", [])
        if row["name"].startswith("SNAPBACK_")
        and "value" in row
        and (
            row["name"] == "SNAPBACK_NAMESPACE_SELECTOR" or not row["name"].startswith(_OF_ITS_POD)
        )
    }


def api_path(target: Target) -> str:
    """Return where the API server has an object."""
    version, plural = target.kind.api_version, target.kind.plural
    base = f"/api/{version}" if "/" not in version else f"/apis/{version}"
    space = f"/namespaces/{target.namespace}" if target.namespace else ""
    return f"{base}{space}/{plural}/{target.name}"


def problem_in(said: str) -> Problem:
    """Return what an error of kubectl means; one that is not known is a refusal."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    message = lines[-1].removeprefix("error: ") if lines else "kubectl failed, and does not say why"
    lowered = said.lower()
    for sign, kind, step in _SIGNS:
        if sign in lowered:
            return Problem(kind, message, step)
    return Problem("refused", "; ".join(lines) or message)
