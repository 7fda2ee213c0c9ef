"""Records the metrics of `instruments`, for Prometheus, for a collector, or for neither.

`OFF` records nothing and costs a comparison; the SDK is imported only when something reads. All
reading happens in the event loop, where the state that is read lives; what is read is sent by a
thread, and nothing waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import resource
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snapshot_shared import instruments
from snapshot_shared.errors import failure_of
from snapshot_shared.instruments import Instrument, Shape
from snapshot_shared.tasks import any_set

if TYPE_CHECKING:
    from aiohttp import web
    from opentelemetry.metrics import CallbackOptions, Observation
    from opentelemetry.sdk.metrics.export import MetricReader
    from prometheus_client import CollectorRegistry

log = logging.getLogger(__name__)

EXPORT_EVERY_S = 15.0
EXPORT_WITHIN_S = 5.0
"""How long one message to a collector may take, in seconds."""
CLOSE_S = 1.0
"""How long the last message may hold up the end, in seconds."""
LOOK_EVERY_S = 1.0

Read = Callable[[], Mapping[tuple[str, ...], float]]
"""Gives the values that hold now, by the values of their attributes."""


def resource_attributes(service: str, node: str, version: str) -> dict[str, str]:
    """Return who records, as attributes of OpenTelemetry."""
    return {"service.name": service, "service.version": version, "k8s.node.name": node}


class Metrics:
    """The metrics of one service on one node."""

    def __init__(
        self,
        service: str = "",
        node: str = "",
        version: str = "",
        *,
        scraped: bool = False,
        otlp_endpoint: str | None = None,
    ) -> None:
        """Record for `routes` when `scraped`, for a collector when there is one, else nothing."""
        self._meter: Any = None
        self._registry: CollectorRegistry | None = None
        self._sender: _Sender | None = None
        self._pushed: MetricReader | None = None
        self._instruments: dict[str, Any] = {}
        self._reads: dict[str, list[Read]] = {}
        self._provider: Any = None
        if scraped or otlp_endpoint:
            self._begin(resource_attributes(service, node, version), otlp_endpoint, scraped=scraped)

    def _begin(self, who: dict[str, str], otlp_endpoint: str | None, *, scraped: bool) -> None:
        from opentelemetry.sdk.metrics import MeterProvider  # noqa: PLC0415 - costs start-up time
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 - as above

        readers: list[MetricReader] = []
        if scraped:
            from opentelemetry.exporter.prometheus import (  # noqa: PLC0415 - as above
                PrometheusMetricReader,
            )
            from prometheus_client import CollectorRegistry  # noqa: PLC0415 - as above

            self._registry = CollectorRegistry()
            readers.append(
                PrometheusMetricReader(scope_info_enabled=False, registry=self._registry)
            )
        if otlp_endpoint:
            self._sender = _Sender(otlp_endpoint)
            self._pushed = _push_reader(self._sender)
            readers.append(self._pushed)
        self._provider = MeterProvider(
            metric_readers=readers, resource=Resource.create(who), shutdown_on_exit=False
        )
        self._meter = self._provider.get_meter("snapback")
        self.observe(instruments.CPU_TIME, _cpu_time)
        self.observe(instruments.MEMORY, _memory)
        self.observe(instruments.DESCRIPTORS, _descriptors)

    @property
    def is_on(self) -> bool:
        """Whether anything reads."""
        return self._meter is not None

    def add(self, instrument: Instrument, *values: str, by: float = 1) -> None:
        """Count; `values` are those of the instrument's attributes, in their order."""
        if self._meter is not None:
            self._of(instrument).add(by, _attributes(instrument, values))

    def record(self, instrument: Instrument, amount: float, *values: str) -> None:
        """Put an amount into a histogram."""
        if self._meter is not None:
            self._of(instrument).record(amount, _attributes(instrument, values))

    def observe(self, instrument: Instrument, read: Read) -> None:
        """Have `read` called whenever the values are wanted. It must be quick."""
        if self._meter is not None:
            self._reads.setdefault(instrument.name, []).append(read)
            self._of(instrument)

    @contextlib.contextmanager
    def timed(
        self, instrument: Instrument, *values: str, counted: Instrument | None = None
    ) -> Iterator[None]:
        """Record how long the block takes; the reason of its failure becomes `error.type`.

        `counted` is a counter of the same attributes that counts the block as well.
        """
        if self._meter is None:
            yield
            return
        began, reason = time.perf_counter(), ""
        try:
            yield
        except BaseException as error:
            reason = reason_of(error)
            raise
        finally:
            self.record(instrument, time.perf_counter() - began, *values, reason)
            if counted is not None:
                self.add(counted, *values, reason)

    @contextlib.contextmanager
    def moving(self, verb: str) -> Iterator[Callable[[int], None]]:
        """Record how long a part takes and, where it is given, how many bytes were moved."""

        def moved(size: int) -> None:
            self.add(instruments.TRANSFER_IO, verb, by=size)

        with self.timed(instruments.TRANSFER_DURATION, verb):
            yield moved

    def _of(self, instrument: Instrument) -> Any:
        if (known := self._instruments.get(instrument.name)) is None:
            known = self._instruments[instrument.name] = self._make(instrument)
        return known

    def _make(self, instrument: Instrument) -> Any:
        meter, name = self._meter, instrument.name
        said = {"unit": instrument.unit, "description": instrument.meaning}
        match instrument.shape:
            case Shape.COUNTER:
                return meter.create_counter(name, **said)
            case Shape.HISTOGRAM:
                return meter.create_histogram(
                    name, **said, explicit_bucket_boundaries_advisory=instruments.SECONDS
                )
            case Shape.OBSERVED_COUNTER:
                return meter.create_observable_counter(name, [self._reader(instrument)], **said)
            case Shape.UP_DOWN:
                return meter.create_observable_up_down_counter(
                    name, [self._reader(instrument)], **said
                )
            case Shape.GAUGE:
                return meter.create_observable_gauge(name, [self._reader(instrument)], **said)

    def _reader(self, instrument: Instrument) -> Callable[[CallbackOptions], list[Observation]]:
        from opentelemetry.metrics import Observation  # noqa: PLC0415 - costs start-up time

        def read_all(_options: CallbackOptions) -> list[Observation]:
            return [
                Observation(value, _attributes(instrument, values))
                for read in self._reads[instrument.name]
                for values, value in read().items()
            ]

        return read_all

    def routes(self) -> list[web.RouteDef]:
        """Return the route `/metrics` for Prometheus, or none."""
        if self._registry is None:
            return []
        from aiohttp import web  # noqa: PLC0415 - costs start-up time
        from prometheus_client import CONTENT_TYPE_LATEST  # noqa: PLC0415 - as above

        async def metrics(_request: web.Request) -> web.Response:
            return web.Response(body=self.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

        return [web.get("/metrics", metrics)]

    def text(self) -> bytes:
        """Return all values in the text format of Prometheus; empty when nothing scrapes."""
        if self._registry is None:
            return b""
        from prometheus_client import generate_latest  # noqa: PLC0415 - costs start-up time

        return generate_latest(self._registry)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Watch the event loop and send to the collector for the length of the block."""
        if self._meter is None:
            yield
            return
        task = asyncio.create_task(self._look(), name="metrics")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            self._push()
            if self._sender is not None:
                await self._sender.close()
            self._provider.shutdown()

    async def _look(self) -> None:
        loop = asyncio.get_running_loop()
        pushed_at = loop.time()
        while True:
            began = loop.time()
            await any_set(LOOK_EVERY_S)
            late = max(loop.time() - began - LOOK_EVERY_S, 0.0)
            self.record(instruments.LOOP_DELAY, late)
            if loop.time() - pushed_at >= EXPORT_EVERY_S:
                pushed_at = loop.time()
                self._push()

    def _push(self) -> None:
        if self._pushed is not None:
            self._pushed.collect()


OFF = Metrics()
"""Records nothing."""


def reason_of(error: BaseException) -> str:
    """Return the reason of a failure as the value of `error.type`."""
    if isinstance(error, asyncio.CancelledError):
        return "Cancelled"
    return failure_of(error).reason


def _attributes(instrument: Instrument, values: tuple[str, ...]) -> dict[str, str]:
    found = dict(instrument.fixed)
    found.update(zip(instrument.attributes, values, strict=True))
    if not found.get(instruments.ERROR, "-"):
        del found[instruments.ERROR]
    return found


class _Sender:
    """Sends to a collector from a thread of its own; while it is slow, newer values give way."""

    def __init__(self, endpoint: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import (  # noqa: PLC0415 - costs start-up time
            OTLPMetricExporter,
        )

        self._exporter = OTLPMetricExporter(
            endpoint=endpoint.rstrip("/") + "/v1/metrics", timeout=EXPORT_WITHIN_S
        )
        self._waiting: queue.Queue[Any] = queue.Queue(maxsize=2)
        self._thread = threading.Thread(target=self._send, name="metrics", daemon=True)
        self._thread.start()

    def offer(self, data: Any) -> None:
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(data)

    def _send(self) -> None:
        while (data := self._waiting.get()) is not None:
            self._exporter.export(data)

    async def close(self) -> None:
        """Let what waits be sent, for a second at most."""
        self.offer(None)
        await asyncio.to_thread(self._thread.join, CLOSE_S)
        self._exporter.shutdown()


def _push_reader(sender: _Sender) -> MetricReader:
    from opentelemetry.sdk.metrics.export import MetricReader  # noqa: PLC0415 - costs start-up time

    class PushReader(MetricReader):
        def _receive_metrics(
            self, metrics_data: Any, timeout_millis: float = 10_000, **_kwargs: Any
        ) -> None:
            sender.offer(metrics_data)

        def shutdown(self, timeout_millis: float = 30_000, **_kwargs: Any) -> None:
            """Have nothing to end: the sender is closed by who made it."""

    return PushReader()


def _cpu_time() -> dict[tuple[str, ...], float]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {("user",): used.ru_utime, ("system",): used.ru_stime}


def _memory() -> dict[tuple[str, ...], float]:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return {(): pages * os.sysconf("SC_PAGE_SIZE")}


def _descriptors() -> dict[tuple[str, ...], float]:
    return {(): len(list(Path("/proc/self/fd").iterdir()))}
