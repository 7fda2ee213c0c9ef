"""A collector of OpenTelemetry over HTTP that keeps and decodes what it gets."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from snapshot_shared.spans import SpanRecord

_KINDS = {1: "internal", 2: "server", 3: "client", 4: "producer", 5: "consumer"}


class Collector(ThreadingHTTPServer):
    """Keeps what is posted."""

    daemon_threads = True

    def __init__(self) -> None:
        self.posts: list[tuple[str, bytes]] = []
        posts = self.posts

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                size = int(self.headers["Content-Length"])
                posts.append((self.path, self.rfile.read(size)))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_args: object) -> None:
                """Keep the output of the tests clean."""

        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def spans(self) -> list[SpanRecord]:
        """Every span, as the SPANS stream would keep it."""
        found = []
        for path, body in list(self.posts):
            if path == "/v1/traces":
                for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                    who = _values(group.resource.attributes)
                    for scope in group.scope_spans:
                        found += [_span(span, who) for span in scope.spans]
        return found

    @property
    def metrics(self) -> dict[str, set[str]]:
        """The names of all metrics by the service that sent them."""
        found: dict[str, set[str]] = {}
        for path, body in list(self.posts):
            if path == "/v1/metrics":
                for group in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                    service = _values(group.resource.attributes)["service.name"]
                    for scope in group.scope_metrics:
                        found.setdefault(service, set()).update(m.name for m in scope.metrics)
        return found


@contextlib.contextmanager
def running_collector() -> Iterator[Collector]:
    """A collector on a free port of this machine."""
    server = Collector()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _span(span: Any, who: dict[str, Any]) -> SpanRecord:
    return SpanRecord(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        name=span.name,
        service=who["service.name"],
        node=who["k8s.node.name"],
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        error=span.status.message,
        attributes=_values(span.attributes),
        links=[f"00-{link.trace_id.hex()}-{link.span_id.hex()}-01" for link in span.links],
        kind=_KINDS[span.kind],  # type: ignore[arg-type]
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in attributes}
