"""Trace context and finished spans as values. Ids of long spans are derived, never remembered.

The operator ends a capture's span minutes after its children have begun, perhaps in another
process. So the span id of an order or of a whole capture is a hash of its identity: any process
that knows the identity can create child spans, or end the span.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from snapshot_shared.ids import short_hash
from snapshot_shared.model import Message
from snapshot_shared.subjects import family

NANOSECONDS = 1e9

_TRACEPARENT = re.compile(r"^00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})$")


class SpanContext(NamedTuple):
    """A span's place: the trace and the span itself, in lower hex."""

    trace_id: str
    span_id: str

    @property
    def traceparent(self) -> str:
        """Write as a W3C traceparent."""
        return f"00-{self.trace_id}-{self.span_id}-01"


SpanKind = Literal["internal", "server", "client", "producer", "consumer"]


class SpanRecord(Message, omit_defaults=True, tag_field="type", tag="snapback.v1.span"):
    """A finished span, as the SPANS stream keeps it. Times are nanoseconds since the epoch.

    `kind` is that of OpenTelemetry.
    """

    trace_id: str
    """The trace."""
    span_id: str
    """The span."""
    parent_id: str = ""
    """The span above it; empty for the first of a trace."""
    name: str
    """A verb or a step."""
    service: str
    """The service that sent it."""
    node: str
    """The node."""
    start_ns: int
    """When it began, in nanoseconds since the epoch."""
    end_ns: int
    """When it ended, in nanoseconds since the epoch."""
    error: str = ""
    """The reason, when it failed."""
    attributes: dict[str, str | int | float | bool] = {}
    """Facts about the work."""
    links: list[str] = []
    """Spans of other traces that this one belongs to."""
    kind: SpanKind = "internal"
    """Its role; `producer` and `consumer` are of a message."""


def parse_traceparent(value: str) -> SpanContext | None:
    """Read a W3C traceparent; anything else is None, for a bad one must never stop work."""
    match = _TRACEPARENT.fullmatch(value)
    if match is None or set(match[1]) == {"0"} or set(match[2]) == {"0"}:
        return None
    return SpanContext(match[1], match[2])


def derived_context(trace_id: str, *identity: str) -> SpanContext:
    """Return the context of the span with this identity in a trace."""
    return SpanContext(trace_id, short_hash("span", trace_id, *identity, length=16))


def derived_trace(*identity: str) -> str:
    """Return the trace id of work that began without a trace."""
    return short_hash("trace", *identity, length=32)


def order_context(traceparent: str, order: str, attempt: int) -> SpanContext | None:
    """Return the context of an order's own span: the parent of every step of it."""
    parent = parse_traceparent(traceparent)
    return derived_context(parent.trace_id, order, str(attempt)) if parent else None


def message_attributes(
    operation: Literal["publish", "process"],
    template: str,
    *,
    client: str,
    order: str,
    attempt: int,
) -> dict[str, str | int | float | bool]:
    """Describe the sending or the carrying out of an order, as OpenTelemetry does of messages.

    `template` is the subject with names for its variable words, `client` who sends or takes.
    """
    return {
        "messaging.system": "nats",
        "messaging.operation.name": operation,
        "messaging.operation.type": "send" if operation == "publish" else operation,
        "messaging.destination.name": family(template),
        "messaging.destination.template": template,
        "messaging.message.id": order,
        "messaging.client.id": client,
        "snapback.order.id": order,
        "snapback.attempt": attempt,
    }


def shown_name(span: SpanRecord) -> str:
    """Return the name of a span; of a message its verb, for the subject is long."""
    operation = span.attributes.get("messaging.operation.name")
    verb = span.attributes.get("snapback.verb")
    return f"{operation} {verb}" if operation and verb else span.name


class Bar(NamedTuple):
    """One span of a waterfall. Times are seconds; `start_s` counts from the trace's begin.

    `drawn_s` is where its bar begins: `start_s` without the pauses that are left out before it.
    `orphan` says that its parent is not there, for example because it has not ended yet.
    """

    depth: int
    span: SpanRecord
    start_s: float
    duration_s: float
    orphan: bool
    drawn_s: float


class Waterfall(NamedTuple):
    """A whole trace in the order in which it is drawn, and how long it took in seconds.

    `links` are the ids of other traces that it is linked to. `pauses` are the begins and lengths
    of those that no bar shows, and `drawn_s` is how long all is without them.
    """

    bars: list[Bar]
    total_s: float
    links: list[str]
    pauses: list[tuple[float, float]]
    drawn_s: float

    @property
    def services(self) -> list[str]:
        """Name the services that took part."""
        return sorted({bar.span.service for bar in self.bars})


def layout(spans: Sequence[SpanRecord]) -> Waterfall:
    """Order spans parents first, siblings by their start. A repeated span counts once.

    A pause in which nothing was done, and which is longer than all the work together, is left out
    of the bars: a verification a day after a capture would make dots of them.
    """
    known = {span.span_id: span for span in spans}
    begin = min((span.start_ns for span in known.values()), default=0)
    end = max((span.end_ns for span in known.values()), default=0)
    children: dict[str, list[SpanRecord]] = {}
    for span in known.values():
        parent = span.parent_id if span.parent_id in known else ""
        children.setdefault(parent, []).append(span)
    for siblings in children.values():
        siblings.sort(key=lambda span: (span.start_ns, -span.end_ns, span.span_id), reverse=True)
    pauses = _long_pauses(sorted((span.start_ns, span.end_ns) for span in known.values()))
    bars: list[Bar] = []
    waiting = [(0, span) for span in children.get("", [])]
    while waiting:
        depth, span = waiting.pop()
        start, length = span.start_ns - begin, span.end_ns - span.start_ns
        orphan = bool(span.parent_id) and span.parent_id not in known
        drawn = start - sum(long for since, long in pauses if since < span.start_ns)
        at, lasted, drawn_s = (time / NANOSECONDS for time in (start, length, drawn))
        bars.append(Bar(depth, span, at, lasted, orphan, drawn_s))
        waiting += [(depth + 1, child) for child in children.get(span.span_id, [])]
    own = {span.trace_id for span in known.values()}
    contexts = {parse_traceparent(link) for span in known.values() for link in span.links}
    links = sorted({context.trace_id for context in contexts if context} - own)
    shown = [((at - begin) / NANOSECONDS, lasted / NANOSECONDS) for at, lasted in pauses]
    total = (end - begin) / NANOSECONDS
    return Waterfall(bars, total, links, shown, total - sum(lasted for _, lasted in shown))


def _long_pauses(times: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return begin and length of the pauses that are longer than all the work together."""
    pauses: list[tuple[int, int]] = []
    until = times[0][0] if times else 0
    for start, end in times:
        if start > until:
            pauses.append((until, start - until))
        until = max(until, end)
    work = until - times[0][0] - sum(lasted for _, lasted in pauses) if times else 0
    return [(at, lasted) for at, lasted in pauses if lasted > work > 0]
