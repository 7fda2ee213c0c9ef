"""Spans and logs.

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

from snapshot_shared import instruments, subjects
from snapshot_shared.codec import encode_json
from snapshot_shared.errors import SnapbackError, failure_of
from snapshot_shared.metrics import OFF, Metrics, reason_of
from snapshot_shared.spans import SpanContext, SpanKind, SpanRecord, parse_traceparent

if TYPE_CHECKING:
    from snapshot_shared.bus import Bus

log = logging.getLogger(__name__)

T = TypeVar("T")

_CURRENT: contextvars.ContextVar[str] = contextvars.ContextVar("traceparent", default="")
_WORK: contextvars.ContextVar[tuple[str, int]] = contextvars.ContextVar("order", default=("", 0))
MAX_WAITING_SPANS = 4096
ERRORS_A_MINUTE = 10
"""How often an error of one place and type is logged."""
ERROR_TYPE = "error.type"
"""The attribute of a failed span that names the reason, as OpenTelemetry calls it."""

Attributes = Mapping[str, str | int | float | bool]


class _Outbox:
    """Finished spans until they are published; the oldest give way."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self.records: deque[SpanRecord] = deque(maxlen=MAX_WAITING_SPANS)
        self.filled = asyncio.Event()

    def add(self, record: SpanRecord) -> None:
        if len(self.records) == MAX_WAITING_SPANS:
            self.metrics.add(instruments.SPANS_DROPPED, "too-many")
        self.records.append(record)
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
        self.service = service
        self.node = node
        self._outbox = _Outbox(metrics)
        self._export = None
        if otlp_endpoint:
            from snapshot_shared.otlp import SpanExport  # noqa: PLC0415 - costs start-up time

            self._export = SpanExport(otlp_endpoint, service, node, version)

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
        around = parse_traceparent(parent or _CURRENT.get())
        own = _own_context(around, identity)
        start_ns = time.time_ns()
        found = dict(attributes or {})
        failure = ""
        try:
            with _set(_CURRENT, own.traceparent):
                yield own.traceparent
        except BaseException as error:
            found[ERROR_TYPE] = reason_of(error)
            is_cancelled = isinstance(error, asyncio.CancelledError)
            failure = "cancelled" if is_cancelled else failure_of(error).message or "error"
            raise
        finally:
            times_ns = (start_ns, time.time_ns())
            self._finish(name, own, around, times_ns, failure, found, links, kind)

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
        around = parse_traceparent(parent)
        own = _own_context(around, identity)
        found = dict(attributes or {})
        self._finish(name, own, around, (start_ns, end_ns), error, found, links, "internal")

    def _finish(
        self,
        name: str,
        own: SpanContext,
        around: SpanContext | None,
        times_ns: tuple[int, int],
        error: str,
        attributes: dict[str, str | int | float | bool],
        links: Sequence[str],
        kind: SpanKind,
    ) -> None:
        record = SpanRecord(
            trace_id=own.trace_id,
            span_id=own.span_id,
            parent_id=around.span_id if around else "",
            name=name,
            service=self.service,
            node=self.node,
            start_ns=times_ns[0],
            end_ns=times_ns[1],
            error=error,
            attributes=attributes,
            links=[found.traceparent for link in links if (found := parse_traceparent(link))],
            kind=kind,
        )
        self._outbox.add(record)
        if self._export is not None:
            self._export.add(record)

    async def publish_to(self, bus: Bus) -> None:
        """Send finished spans to the SPANS stream."""
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
                is_sent = await bus.announce(subject, encode_json(record))
            except SnapbackError as error:
                log.debug("span %s dropped: %s", record.name, error)
                is_sent = False
            if not is_sent:
                self._outbox.metrics.add(instruments.SPANS_DROPPED, "not-published")

    def shutdown(self) -> None:
        """Send what OTLP still waits for."""
        if self._export is not None:
            self._export.shutdown()


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
    """Return the traceparent of the span around the caller, or an empty string."""
    return _CURRENT.get()


def _own_context(around: SpanContext | None, identity: SpanContext | None) -> SpanContext:
    """Return the place of a new span: in the trace around it, with its identity if it has one."""
    trace = around or identity
    return SpanContext(
        trace.trace_id if trace else secrets.token_hex(16),
        identity.span_id if identity else secrets.token_hex(8),
    )


class _Repeated(logging.Filter):
    """Lets an error through a few times a minute; then the next says how many were left out.

    Two are the same that come from one place in the code and are of one type.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[str, int, Any], tuple[int, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.ERROR:
            return True
        error = record.exc_info[0] if record.exc_info else None
        place = (record.pathname, record.lineno, error)
        now = int(record.created // 60)
        minute, count = self._seen.get(place, (now, 0))
        if minute != now:
            record.left_out = max(count - ERRORS_A_MINUTE, 0)
            count = 0
        self._seen[place] = (now, count + 1)
        return count < ERRORS_A_MINUTE


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
        if left_out := getattr(record, "left_out", 0):
            line["left_out"] = left_out
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_to_stderr(service: str, node: str, level: str) -> None:
    """Make every log line of this process a JSON object on standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_Repeated())
    handler.setFormatter(_JsonLines(service, node))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
