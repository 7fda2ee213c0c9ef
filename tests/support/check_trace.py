"""Checks a trace: `snapshotctl trace NAME -o json | python tests/support/check_trace.py`.

It reads a JSON list of finished spans from standard input, prints a summary and what is wrong, and
exits 1 when anything is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import msgspec

from snapshot_shared.spans import SpanRecord
from snapshot_shared.steps import all_names

MIN_SERVICES = 5
MIN_COVERED = 0.95
MAX_INPUT_BYTES = 64 * 1024 * 1024
WHOLE = "capture"


def covered(span: SpanRecord, children: Sequence[SpanRecord]) -> float:
    """Give the share of a span's time in which at least one of its children runs."""
    total = span.end_ns - span.start_ns
    if total <= 0:
        return 1.0
    reached, busy = span.start_ns, 0
    for child in sorted(children, key=lambda found: found.start_ns):
        start, end = max(child.start_ns, reached), min(child.end_ns, span.end_ns)
        busy += max(0, end - start)
        reached = max(reached, end)
    return busy / total


def problems(spans: Sequence[SpanRecord]) -> Iterator[str]:
    """Say everything that is wrong with a trace."""
    traces = sorted({span.trace_id for span in spans})
    if len(traces) != 1:
        yield f"{len(traces)} trace ids, one was expected: {', '.join(traces)}"
    known = {span.span_id for span in spans}
    roots = [span.name for span in spans if not span.parent_id]
    if len(roots) != 1:
        yield f"{len(roots)} roots, one was expected: {', '.join(roots)}"
    for span in spans:
        if span.parent_id and span.parent_id not in known:
            yield f"{span.name} of {span.service}@{span.node}: its parent is missing"
        if span.name not in all_names():
            yield f"{span.name} of {span.service}@{span.node}: no step has this name"
    services = sorted({span.service for span in spans})
    if len(services) < MIN_SERVICES:
        yield f"{len(services)} services, {MIN_SERVICES} were expected: {', '.join(services)}"
    yield from _coverage(spans)


def _coverage(spans: Sequence[SpanRecord]) -> Iterator[str]:
    wholes = [span for span in spans if span.name == WHOLE]
    if not wholes:
        yield f"no span is called {WHOLE}"
    for whole in wholes:
        share = covered(whole, [span for span in spans if span.parent_id == whole.span_id])
        if share < MIN_COVERED:
            yield f"children cover {share:.1%} of {WHOLE}, {MIN_COVERED:.0%} were expected"


def main() -> int:
    """Check what stands on standard input."""
    data = sys.stdin.buffer.read(MAX_INPUT_BYTES)
    try:
        spans = msgspec.json.decode(data, type=list[SpanRecord])
    except msgspec.MsgspecError as error:
        sys.stdout.write(f"no list of spans: {error}\n")
        return 1
    # A span that was sent twice is one span.
    spans = list({span.span_id: span for span in spans}.values())
    services = sorted({span.service for span in spans})
    sys.stdout.write(f"{len(spans)} spans of {len(services)} services: {', '.join(services)}\n")
    for whole in (span for span in spans if span.name == WHOLE):
        share = covered(whole, [span for span in spans if span.parent_id == whole.span_id])
        seconds = (whole.end_ns - whole.start_ns) / 1e9
        sys.stdout.write(f"{WHOLE}: {seconds:.3f} s, {share:.1%} covered by its children\n")
    wrong = list(problems(spans))
    for line in wrong:
        sys.stdout.write(f"WRONG {line}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
