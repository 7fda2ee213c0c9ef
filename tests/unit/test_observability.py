"""deploy/observability asks only for metrics that there are, by the labels that they have."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from snapshot_shared.instruments import TABLE
from tests.unit.tables import each
from tests.unit.test_words import anchors

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "observability"

KNOWN = {name: found for found in TABLE for name in found.series}
OF_PROMETHEUS = {"instance", "job", "le", "service"}
METRIC = re.compile(r"\b(?:snapback|messaging|process)_[a-z0-9_]+")
MATCHERS = re.compile(r"\{([^}]*)\}")
GROUPED = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")
SECTIONS = {
    found[1]: found[0]
    for found in re.finditer(
        r"^### (\w+)\n(?:(?!^##).*\n)*", (ROOT / "docs/runbooks.md").read_text(), re.MULTILINE
    )
}
LABEL = re.compile(r"([a-z_]+)\s*(?:=|!=|=~|!~)")


@cache
def document(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


def alerts() -> list[dict[str, Any]]:
    return [rule for group in document("alerts.yml")["groups"] for rule in group["rules"]]


def panels() -> Iterator[dict[str, Any]]:
    for panel in json.loads((FOLDER / "grafana-dashboard.json").read_text())["panels"]:
        if panel["type"] != "row":
            yield panel


def expressions() -> dict[str, str]:
    of_panels = {
        f"{panel['title']}/{target['refId']}": target["expr"]
        for panel in panels()
        for target in panel["targets"]
    }
    return of_panels | {rule["alert"]: rule["expr"] for rule in alerts()}


@each(("name", "expression"), expressions().items())
def test_an_expression_uses_metrics_and_labels_of_the_table(name: str, expression: str) -> None:
    labels = {name for inner in MATCHERS.findall(expression) for name in LABEL.findall(inner)}
    for inner in GROUPED.findall(expression):
        labels |= {name.strip() for name in inner.split(",")}
    metrics = set(METRIC.findall(GROUPED.sub("", MATCHERS.sub("", expression))))
    assert metrics
    assert metrics <= set(KNOWN)
    assert labels <= OF_PROMETHEUS.union(*(KNOWN[name].labels for name in metrics))


def test_the_dashboard_shows_nearly_every_metric() -> None:
    shown = {name for expression in expressions().values() for name in METRIC.findall(expression)}
    hidden = {found.name for found in TABLE if not shown.intersection(found.series)}
    assert hidden == {
        "messaging.client.consumed.messages",
        "snapback.order.accepted",
        "snapback.pod.running",
    }


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


@each("rule", alerts())
def test_an_alert_says_what_it_means_and_where_to_read_on(rule: dict[str, Any]) -> None:
    section = rule["alert"].lower()
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"]["runbook_url"] == f"docs/runbooks.md#{section}"
    assert section in anchors(ROOT / "docs/runbooks.md")


@each("rule", alerts())
def test_what_an_alert_shows_is_a_label_that_its_expression_keeps(rule: dict[str, Any]) -> None:
    shown = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
    kept = {
        name.strip()
        for inner in re.findall(r"\bby\s*\(([^)]*)\)", rule["expr"])
        for name in inner.split(",")
    }
    aggregated = re.search(r"\b(max|min|sum|absent)\s*(by\s*)?\(", rule["expr"])
    assert not aggregated or shown <= kept


def test_each_alert_has_a_runbook_that_says_what_is_lost_what_to_type_and_how_to_mend_it() -> None:
    assert sorted(SECTIONS) == sorted(rule["alert"] for rule in alerts())
    order = re.compile(r"\*\*Costs\*\*.*?```sh.*?\*\*To mend it\*\*", re.DOTALL)
    assert [name for name, section in SECTIONS.items() if not order.search(section)] == []


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not here")
@pytest.mark.parametrize(
    "words",
    [("check", FOLDER / "alerts.yml"), ("test", Path(__file__).with_name("alerts_over_time.yml"))],
)
def test_alerts_fire_when_they_should_and_not_before(words: tuple[str, Path]) -> None:
    verb, file = words
    done = subprocess.run(
        ["promtool", verb, "rules", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_and_the_collector_read_what_the_services_have() -> None:
    found = document("prometheus.yml")
    assert all((FOLDER / name).exists() for name in found["rule_files"])
    (job,) = found["scrape_configs"]
    targets = {target for group in job["static_configs"] for target in group["targets"]}
    services = ("operator", "page", "agent-1", "gms-1", "agent-2", "gms-2")
    assert targets == {f"{name}:9090" for name in services}
    found = document("otel-collector.yaml")
    assert found["receivers"]["otlp"]["protocols"] == {"http": {"endpoint": "0.0.0.0:4318"}}
    pipelines = found["service"]["pipelines"]
    assert set(pipelines) == {"traces", "metrics"}
    for pipeline in pipelines.values():
        for kind, names in pipeline.items():
            assert set(names) <= set(found[kind])
