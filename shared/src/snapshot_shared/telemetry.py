"""Spans and logs. OpenTelemetry makes the spans; two ways lead out of the process.

Finished spans always go to the SPANS stream (so that a trace can be shown with no collector) and,
when an OTLP endpoint is set, to it as well. Nothing ever waits for either.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import logging
import secrets
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.semconv.attributes.error_attributes import ERROR_TYPE
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)
from opentelemetry.trace import (
    SpanContext as OtelContext,
)
from opentelemetry.trace import (
    SpanKind as OtelKind,
)

from snapshot_shared import instruments, subjects
from snapshot_shared.codec import encode_json
from snapshot_shared.errors import BusUnavailable, SnapbackError, failure_of
from snapshot_shared.metrics import (
    EXPORT_WITHIN_S,
    OFF,
    Metrics,
    reason_of,
    resource_attributes,
)
from snapshot_shared.spans import SpanContext, SpanKind, SpanRecord, parse_traceparent

if TYPE_CHECKING:
    from snapshot_shared.bus import Bus

log = logging.getLogger(__name__)

T = TypeVar("T")

_PRESET: contextvars.ContextVar[SpanContext | None] = contextvars.ContextVar(
    "preset_span", default=None
)
_CURRENT: contextvars.ContextVar[str] = contextvars.ContextVar("traceparent", default="")
_WORK: contextvars.ContextVar[tuple[str, int]] = contextvars.ContextVar("order", default=("", 0))
MAX_WAITING_SPANS = 4096

Attributes = Mapping[str, str | int | float | bool]


class _Ids(IdGenerator):
    """Random ids, except where the identity of a span has fixed them."""

    def generate_span_id(self) -> int:
        preset = _PRESET.get()
        return int(preset.span_id, 16) if preset else secrets.randbits(64) or 1

    def generate_trace_id(self) -> int:
        preset = _PRESET.get()
        return int(preset.trace_id, 16) if preset else secrets.randbits(128) or 1


class _Outbox(SpanProcessor):
    """Keeps finished spans until somebody publishes them; the oldest give way."""

    def __init__(self, service: str, node: str, metrics: Metrics) -> None:
        self.service = service
        self.node = node
        self.metrics = metrics
        self.records: deque[SpanRecord] = deque(maxlen=MAX_WAITING_SPANS)
        self.filled = asyncio.Event()

    def on_end(self, span: ReadableSpan) -> None:
        if len(self.records) == MAX_WAITING_SPANS:
            self.metrics.add(instruments.SPANS_DROPPED, "too-many")
        self.records.append(_record(span, self.service, self.node))
        self.filled.set()


class Telemetry:
    """The tracer of one service on one node."""

    def __init__(
        self,
        service: str,
        node: str,
        version: str,
        *,
        otlp_endpoint: str | None = None,
        metrics: Metrics = OFF,
    ) -> None:
        """Build the tracer; spans wait until `publish_to` runs."""
        resource = Resource.create(resource_attributes(service, node, version))
        self.service = service
        self.node = node
        self._provider = TracerProvider(
            resource=resource, id_generator=_Ids(), shutdown_on_exit=False
        )
        self._outbox = _Outbox(service, node, metrics)
        self._provider.add_span_processor(self._outbox)
        if otlp_endpoint:
            self._export_to(otlp_endpoint)
        self._tracer = self._provider.get_tracer("snapback")

    def _export_to(self, endpoint: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415 - costs start-up time
            OTLPSpanExporter,
        )
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415 - as above

        exporter = OTLPSpanExporter(
            endpoint=endpoint.rstrip("/") + "/v1/traces", timeout=EXPORT_WITHIN_S
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))

    @contextlib.contextmanager
    def span(
        self,
        name: str,
        *,
        kind: SpanKind = "internal",
        parent: str = "",
        identity: SpanContext | None = None,
        links: Sequence[str] = (),
        attributes: Attributes | None = None,
    ) -> Iterator[str]:
        """Record a block as a span and give its traceparent.

        `parent` is a traceparent; empty means the span around this block, if there is one.
        """
        context = parse_traceparent(parent or _CURRENT.get())
        span = self._start(name, context, identity, links, attributes, kind=kind)
        own = _traceparent(span)
        try:
            with _set(_CURRENT, own):
                yield own
        except BaseException as error:
            _mark(span, error)
            raise
        finally:
            span.end()

    def record(
        self,
        name: str,
        *,
        start_ns: int,
        end_ns: int,
        parent: str = "",
        identity: SpanContext | None = None,
        links: Sequence[str] = (),
        attributes: Attributes | None = None,
        error: str = "",
    ) -> None:
        """Record a span whose times are known already."""
        span = self._start(
            name, parse_traceparent(parent), identity, links, attributes, start_ns=start_ns
        )
        if error:
            span.set_status(StatusCode.ERROR, error)
        span.end(end_ns)

    def _start(
        self,
        name: str,
        parent: SpanContext | None,
        identity: SpanContext | None,
        links: Sequence[str],
        attributes: Attributes | None,
        *,
        start_ns: int | None = None,
        kind: SpanKind = "internal",
    ) -> Span:
        around = set_span_in_context(NonRecordingSpan(_otel(parent))) if parent else None
        contexts = [found for link in links if (found := parse_traceparent(link))]
        token = _PRESET.set(identity)
        try:
            return self._tracer.start_span(
                name,
                context=around,
                links=[Link(_otel(found)) for found in contexts],
                attributes=dict(attributes or {}),
                start_time=start_ns,
                kind=OtelKind[kind.upper()],
            )
        finally:
            _PRESET.reset(token)

    async def publish_to(self, bus: Bus) -> None:
        """Send finished spans to the SPANS stream, for ever."""
        while True:
            await self._outbox.filled.wait()
            self._outbox.filled.clear()
            await self.flush(bus)

    async def flush(self, bus: Bus) -> None:
        """Send what has finished up to now; spans that cannot be sent are dropped."""
        records = self._outbox.records
        while records:
            record = records.popleft()
            try:
                subject = subjects.span(record.node, record.trace_id)
                await bus.publish(subject, encode_json(record))
            except (BusUnavailable, SnapbackError) as error:
                self._outbox.metrics.add(instruments.SPANS_DROPPED, "not-published")
                log.debug("span %s dropped: %s", record.name, error)

    def shutdown(self) -> None:
        """Send what OTLP still waits for."""
        self._provider.shutdown()


@contextlib.contextmanager
def working_on(order: str, attempt: int, traceparent: str = "") -> Iterator[None]:
    """Name the order that the block works on, and its span, in every line that is logged there."""
    with _set(_WORK, (order, attempt)), _set(_CURRENT, traceparent or _CURRENT.get()):
        yield


@contextlib.contextmanager
def _set(variable: contextvars.ContextVar[T], value: T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        # A coroutine that is thrown away is closed in another context, which has nothing of ours.
        with contextlib.suppress(ValueError):
            variable.reset(token)


def current_traceparent() -> str:
    """Give the traceparent of the span around the caller, or an empty string."""
    return _CURRENT.get()


def _otel(context: SpanContext) -> OtelContext:
    return OtelContext(
        int(context.trace_id, 16),
        int(context.span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )


def _traceparent(span: Span) -> str:
    context = span.get_span_context()
    return SpanContext(f"{context.trace_id:032x}", f"{context.span_id:016x}").traceparent


def _mark(span: Span, error: BaseException) -> None:
    if isinstance(error, asyncio.CancelledError):
        span.set_attribute(ERROR_TYPE, reason_of(error))
        span.set_status(StatusCode.ERROR, "cancelled")
        return
    failure = failure_of(error)
    span.set_attribute(ERROR_TYPE, failure.reason)
    span.set_status(StatusCode.ERROR, failure.message)


def _record(span: ReadableSpan, service: str, node: str) -> SpanRecord:
    context = span.context
    parent = span.parent
    failed = span.status.status_code is StatusCode.ERROR
    return SpanRecord(
        trace_id=f"{context.trace_id:032x}",
        span_id=f"{context.span_id:016x}",
        parent_id=f"{parent.span_id:016x}" if parent else "",
        name=span.name,
        service=service,
        node=node,
        start_ns=span.start_time or 0,
        end_ns=span.end_time or 0,
        error=(span.status.description or "error") if failed else "",
        attributes=dict(span.attributes or {}),  # type: ignore[arg-type]
        links=[
            SpanContext(f"{link.context.trace_id:032x}", f"{link.context.span_id:016x}").traceparent
            for link in span.links
        ],
        kind=span.kind.name.lower(),  # type: ignore[arg-type]
    )


class _JsonLines(logging.Formatter):
    """One JSON object a line, with the trace of the block that logged it."""

    def __init__(self, service: str, node: str) -> None:
        super().__init__()
        self._fixed = {"service": service, "node": node}

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            **self._fixed,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if context := parse_traceparent(_CURRENT.get()):
            line["trace_id"], line["span_id"] = context
        order, attempt = _WORK.get()
        if order:
            line["order_id"], line["attempt"] = order, attempt
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_to_stderr(service: str, node: str, level: str) -> None:
    """Make every log line of this process a JSON object on standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines(service, node))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
