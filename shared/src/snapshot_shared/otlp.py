"""Finished spans on their way to an OpenTelemetry collector. Imported only where one is set."""

from __future__ import annotations

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from snapshot_shared.metrics import EXPORT_WITHIN_S, resource_attributes
from snapshot_shared.spans import SpanRecord, parse_traceparent

_SCOPE = InstrumentationScope("snapback")


class SpanExport:
    """Sends the spans of one service over HTTP, in a thread of its own."""

    def __init__(self, endpoint: str, service: str, node: str, version: str) -> None:
        """Send to `endpoint`, the base address of the collector."""
        self._resource = Resource.create(resource_attributes(service, node, version))
        exporter = OTLPSpanExporter(
            endpoint=endpoint.rstrip("/") + "/v1/traces", timeout=EXPORT_WITHIN_S
        )
        self._processor = BatchSpanProcessor(exporter)

    def add(self, record: SpanRecord) -> None:
        """Have a span sent with the next ones."""
        status = Status(StatusCode.ERROR, record.error) if record.error else Status()
        parent = _context(record.trace_id, record.parent_id) if record.parent_id else None
        links = [found for link in record.links if (found := parse_traceparent(link))]
        self._processor.on_end(
            ReadableSpan(
                name=record.name,
                context=_context(record.trace_id, record.span_id),
                parent=parent,
                resource=self._resource,
                attributes=record.attributes,
                links=[Link(_context(*found)) for found in links],
                kind=SpanKind[record.kind.upper()],
                status=status,
                start_time=record.start_ns,
                end_time=record.end_ns,
                instrumentation_scope=_SCOPE,
            )
        )

    def shutdown(self) -> None:
        """Send what still waits."""
        self._processor.shutdown()  # type: ignore[no-untyped-call]


def _context(trace_id: str, span_id: str) -> SpanContext:
    return SpanContext(
        int(trace_id, 16),
        int(span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )
