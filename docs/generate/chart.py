"""What the chart takes from the code and from its values: rules, definitions, and its README."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from docs.generate import crds

from snapshot_operator.kube import policies, rbac

CHART = "deploy/helm/snapback"
ROOT = Path(__file__).parents[2]
VALUES = ROOT / CHART / "values.yaml"
ALERTS = "deploy/observability/alerts.yml"

_MADE = "# Made from snapshot_operator.kube.{module} by `make docs`; do not edit.\n"
_RELEASE = "NAME-OF-THE-RELEASE"
_HEAD = """\
# The chart

<!-- Made from values.yaml by `make docs`. -->

`helm install snapback deploy/helm/snapback --namespace snapback-system --create-namespace` installs
Snapback on a cluster; [docs/kubernetes.md](../../../docs/kubernetes.md) shows how to begin, what is
installed, and what an uninstall leaves. `values.schema.json` refuses what is not listed here.

| value | default | meaning |
|---|---|---|
"""
_LINE = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z]\w*):(?P<rest>.*)$")


class Value(NamedTuple):
    """A value that can be set: its path, its default, and the comment above it."""

    path: str
    default: Any
    meaning: str


def files() -> Iterator[tuple[str, str]]:
    """Return the path of each file, from the root of the repository, and its text."""
    for path, text in crds.files():
        yield path.replace("deploy/crds", f"{CHART}/crds"), text
    roles = (("cluster", rbac.cluster_role()), ("namespace", rbac.lease_role("")))
    for name, role in roles:
        text = yaml.safe_dump(role["rules"], sort_keys=False, default_flow_style=None, width=100)
        yield f"{CHART}/files/operator-{name}-rules.yaml", _MADE.format(module="rbac") + text
    text = _templated(policies.policies(_RELEASE))
    yield f"{CHART}/templates/policies.yaml", _MADE.format(module="policies") + text
    text = _templated(rbac.tenant_roles(_RELEASE))
    yield f"{CHART}/templates/tenants.yaml", _MADE.format(module="rbac") + text
    alerts = (ROOT / ALERTS).read_text(encoding="utf-8")
    yield f"{CHART}/files/alerts.yml", f"# Copied from {ALERTS} by `make docs`.\n{alerts}"
    yield f"{CHART}/README.md", _HEAD + "".join(map(_row, values(VALUES.read_text())))


def _templated(documents: list[dict[str, Any]]) -> str:
    """Return documents as a template, in which names begin with that of the release."""
    text = yaml.safe_dump_all(documents, sort_keys=False, width=100)
    return text.replace(_RELEASE, '{{ include "snapback.name" . }}')


def values(text: str) -> Iterator[Value]:
    """Return the values of a values.yaml, in their order. LookupError for one without a comment."""
    defaults = yaml.safe_load(text)
    path: list[str] = []
    comment: list[str] = []
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            comment.append(line.lstrip(" #"))
            continue
        if found := _LINE.match(line):
            path = [*path[: len(found["indent"]) // 2], found["key"]]
            if found["rest"]:
                name = ".".join(path)
                if not comment:
                    raise LookupError(f"{name} in values.yaml has no comment above it")
                yield Value(name, _at(defaults, path), " ".join(comment))
        comment = []


def _at(values: Any, path: list[str]) -> Any:
    for key in path:
        values = values[key]
    return values


def _row(value: Value) -> str:
    default = yaml.safe_dump(value.default, default_flow_style=True, width=10**6)
    default = default.removesuffix("\n...\n").strip()
    return f"| `{value.path}` | `{default}` | {value.meaning} |\n"
