"""docs/metrics.md: every metric, from the table that the services record by."""

from __future__ import annotations

from collections.abc import Iterator

from snapshot_shared.instruments import TABLE, Instrument, Of, Shape

PAGE = "metrics.md"

_HEAD = """\
# Metrics

<!-- Made by `make docs` from snapshot_shared/instruments.py. -->

With `SNAPBACK_HTTP_ADDRESS` set a service shows its metrics to Prometheus on `/metrics`, beside
`/healthz` and `/readyz`; with `SNAPBACK_OTLP_ENDPOINT` set it sends them every 15 s to a collector
as well. With neither it records nothing. No service ever waits for a reader. In a cluster of
`snapshotctl up` write `SNAPBACK_HTTP_ADDRESS=127.0.0.1:0`: each service takes a free port and says
which in its log.

Names, units and kinds are those of OpenTelemetry; below each stands its name in Prometheus. A
histogram has the endings `_bucket`, `_sum` and `_count`. Attributes hold words of short lists,
never the id of an order or the name of an object: those are in
[traces and logs](architecture.md#traces-metrics-logs). `error.type` is the reason of a failure and
absent where nothing failed.

[deploy/observability](../deploy/observability) has a Grafana dashboard, alert rules with
[a runbook each](runbooks.md), and the configurations of Prometheus and of an OpenTelemetry
collector. In a cluster `monitoring.enabled` of [the chart](../deploy/helm/snapback/README.md) leads
a Prometheus operator to the metrics and the alerts.
"""

_TITLES = {
    Of.ALL: "Every service",
    Of.NODE: "Agent and GMS",
    Of.OPERATOR: "Operator",
    Of.AGENT: "Agent",
    Of.GMS: "GMS",
}


def page() -> str:
    """Write the page."""
    parts = [_HEAD]
    for of, title in _TITLES.items():
        rows = [_row(found) for found in TABLE if found.of is of]
        parts.append("\n".join([f"## {title}\n", *_COLUMNS, *rows]) + "\n")
    return "\n".join(parts)


_COLUMNS = (
    "| metric | kind, unit | attributes | meaning | look when |",
    "|---|---|---|---|---|",
)


def _row(found: Instrument) -> str:
    ending = "_…" if found.shape is Shape.HISTOGRAM else ""
    cells = (
        f"`{found.name}`<br>`{found.prometheus}{ending}`",
        f"{found.shape.value}, `{found.unit}`",
        "<br>".join(_attributes(found)) or "none",
        found.meaning,
        found.look_when,
    )
    return f"| {' | '.join(cells)} |"


def _attributes(found: Instrument) -> Iterator[str]:
    yield from (f"`{name}={value}`" for name, value in found.fixed)
    yield from (f"`{name}`" for name in found.attributes)
