"""Every metric of the product: its name, unit, attributes, meaning, and when to look at it.

Names follow OpenTelemetry: `messaging.*` and `process.*` are its conventions, `snapback.*` is ours.
Values of attributes are words from short lists: verbs, steps, reasons, kinds, devices of the node.
No order, object or user is ever one. `metrics` records them; docs/metrics.md is made from here.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple


class Shape(StrEnum):
    """How a metric behaves, in the words of OpenTelemetry."""

    COUNTER = "counter"
    OBSERVED_COUNTER = "observable counter"
    UP_DOWN = "observable up-down counter"
    GAUGE = "observable gauge"
    HISTOGRAM = "histogram"


class Of(StrEnum):
    """Which services have a metric."""

    ALL = "all"
    NODE = "agent, GMS"
    OPERATOR = "operator"
    AGENT = "agent"
    GMS = "GMS"


class Instrument(NamedTuple):
    """One metric. `unit` is in UCUM; `fixed` attributes are the same on every value.

    The values of `attributes` are given in their order; `error.type` is always the last, and empty
    when nothing failed.
    """

    name: str
    shape: Shape
    unit: str
    of: Of
    meaning: str
    look_when: str
    attributes: tuple[str, ...] = ()
    fixed: tuple[tuple[str, str], ...] = ()

    @property
    def prometheus(self) -> str:
        """Name of the family in the format of Prometheus, without `_bucket`, `_sum`, `_count`."""
        name = re.sub(r"[^a-zA-Z0-9:]+", "_", self.name)
        unit = _SUFFIXES.get(self.unit, "")
        if unit and not name.endswith(f"_{unit}"):
            name = f"{name}_{unit}"
        return f"{name}_total" if self.shape in _COUNTERS else name

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of its attributes in the format of Prometheus, the fixed ones first."""
        names = (*(name for name, _ in self.fixed), *self.attributes)
        return tuple(re.sub(r"[^a-zA-Z0-9]+", "_", name) for name in names)

    @property
    def series(self) -> tuple[str, ...]:
        """Names that an expression may use."""
        if self.shape is not Shape.HISTOGRAM:
            return (self.prometheus,)
        return tuple(self.prometheus + end for end in ("_bucket", "_sum", "_count"))


_COUNTERS = (Shape.COUNTER, Shape.OBSERVED_COUNTER)
_SUFFIXES = {"s": "seconds", "By": "bytes"}

SECONDS: tuple[float, ...] = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0),
)
"""Upper bounds of the buckets of every histogram: from a journal record to a long capture."""

VERB, STEP, OUTCOME = "snapback.verb", "snapback.step", "snapback.outcome"
WEBHOOK = "snapback.webhook"
KIND, PHASE, STATE = "snapback.kind", "snapback.phase", "snapback.state"
DEVICE, DOMAIN, LOCK = "snapback.device", "snapback.domain", "snapback.lock"
METHOD, RESOURCE, STATUS = "http.request.method", "snapback.resource", "http.response.status_code"
ERROR = "error.type"
DESTINATION = "messaging.destination.name"


def _messaging(operation: str) -> tuple[tuple[str, str], ...]:
    return (("messaging.system", "nats"), ("messaging.operation.name", operation))


# Messages.

SENT = Instrument(
    "messaging.client.sent.messages",
    Shape.COUNTER,
    "{message}",
    Of.ALL,
    "messages that were to be stored in a stream or bucket",
    "a service seems silent: its reports, spans and presence are counted here",
    (DESTINATION, ERROR),
    _messaging("publish"),
)
PUBLISH_DURATION = Instrument(
    "messaging.client.operation.duration",
    Shape.HISTOGRAM,
    "s",
    Of.ALL,
    "time until JetStream had a message",
    "everything is slow: above 0.1 s NATS or its disk is",
    (DESTINATION, ERROR),
    _messaging("publish"),
)
CONSUMED = Instrument(
    "messaging.client.consumed.messages",
    Shape.COUNTER,
    "{message}",
    Of.ALL,
    "messages that a durable consumer delivered",
    "orders are published and nothing happens on a node",
    (DESTINATION,),
    _messaging("fetch"),
)
PROCESS_DURATION = Instrument(
    "messaging.process.duration",
    Shape.HISTOGRAM,
    "s",
    Of.ALL,
    "time to carry out an order, or to fold a report",
    "captures or restores are slow: which verb it is, then which step",
    (DESTINATION, VERB, ERROR),
    _messaging("process"),
)
CONNECTED = Instrument(
    "snapback.nats.connected",
    Shape.GAUGE,
    "1",
    Of.ALL,
    "1 while the service is connected to NATS",
    "first of all",
)
RECONNECTIONS = Instrument(
    "snapback.nats.reconnections",
    Shape.COUNTER,
    "{reconnection}",
    Of.ALL,
    "times that the connection came back",
    "it rises on many nodes: a server restarts or the network flaps",
)
SPANS_DROPPED = Instrument(
    "snapback.span.dropped",
    Shape.COUNTER,
    "{span}",
    Of.ALL,
    "finished spans that never reached the SPANS stream",
    "a trace has holes",
    (OUTCOME,),
)

# Orders, as the service that carries them out sees them.

ACCEPTED = Instrument(
    "snapback.order.accepted",
    Shape.COUNTER,
    "{order}",
    Of.NODE,
    "orders that are in the journal",
    "comparing with those that finished",
    (VERB,),
)
REPEATED = Instrument(
    "snapback.order.repeated",
    Shape.COUNTER,
    "{order}",
    Of.NODE,
    "deliveries of an order that was known already, answered from the journal or ignored",
    "it rises without reconnections: acks or reports get lost",
    (VERB,),
)
FINISHED = Instrument(
    "snapback.order.finished",
    Shape.COUNTER,
    "{order}",
    Of.NODE,
    "terminal reports: `done`, `failed` or `rejected`, and the reason of those that failed",
    "something fails: the reason says where docs/troubleshooting.md begins",
    (VERB, OUTCOME, ERROR),
)
DEAD_LETTERS = Instrument(
    "snapback.order.dead_letters",
    Shape.COUNTER,
    "{message}",
    Of.NODE,
    "messages that could not be taken as an order and were copied to DEAD",
    "ever: versions differ, or an unknown client publishes",
    (ERROR,),
)
QUEUED = Instrument(
    "snapback.order.queue.duration",
    Shape.HISTOGRAM,
    "s",
    Of.NODE,
    "age of an order when it begins, from its publication; two clocks are compared",
    "orders begin late: the node, its NATS connection or its journal is slow",
    (VERB,),
)
IN_FLIGHT = Instrument(
    "snapback.order.in_flight",
    Shape.UP_DOWN,
    "{order}",
    Of.NODE,
    "orders that are being carried out now",
    "one never ends",
    (VERB,),
)
OUTBOX = Instrument(
    "snapback.report.outbox",
    Shape.UP_DOWN,
    "{report}",
    Of.NODE,
    "reports that NATS has not acknowledged yet",
    "the operator seems not to notice what a node did",
)
STEP_DURATION = Instrument(
    "snapback.step.duration",
    Shape.HISTOGRAM,
    "s",
    Of.NODE,
    "time of one step of an order",
    "an order is slow or fails: which step it is",
    (VERB, STEP, ERROR),
)
JOURNAL_DURATION = Instrument(
    "snapback.journal.append.duration",
    Shape.HISTOGRAM,
    "s",
    Of.NODE,
    "time to write records and have them on disk (fdatasync)",
    "all steps are slow on one node: its disk is",
    (ERROR,),
)
JOURNAL_SIZE = Instrument(
    "snapback.journal.size",
    Shape.UP_DOWN,
    "By",
    Of.NODE,
    "size of the journal; a start compacts it",
    "starts become slow",
)

# The operator.

RECONCILE_DURATION = Instrument(
    "snapback.reconcile.duration",
    Shape.HISTOGRAM,
    "s",
    Of.OPERATOR,
    "time of one look at an object: `changed`, `unchanged`, `conflict`, `waits` or `failed`",
    "objects do not move: many conflicts are two operators, many `waits` a bus or a full disk",
    (KIND, OUTCOME),
)
API_REQUEST_DURATION = Instrument(
    "snapback.kubernetes.request.duration",
    Shape.HISTOGRAM,
    "s",
    Of.OPERATOR,
    "time of one request to the Kubernetes API, by method, resource and HTTP status",
    "objects do not move in a cluster: 409 are two writers, 429 and 5xx an API server in need",
    (METHOD, RESOURCE, STATUS),
)
ADMISSION_DURATION = Instrument(
    "snapback.admission.duration",
    Shape.HISTOGRAM,
    "s",
    Of.OPERATOR,
    "time of one request of the API server: `allowed`, `changed`, `denied` or `failed`",
    "pods start cold or manifests are refused in a cluster: `failed` are answers that are missing",
    (WEBHOOK, OUTCOME),
)
WORK_QUEUE = Instrument(
    "snapback.workqueue.depth",
    Shape.UP_DOWN,
    "{object}",
    Of.OPERATOR,
    "objects that wait to be looked at",
    "it stays above 0: the operator has more to do than it can",
)
OBJECTS = Instrument(
    "snapback.object.count",
    Shape.UP_DOWN,
    "{object}",
    Of.OPERATOR,
    "objects by kind and phase, counted every 10 s",
    "many are in one phase and stay there",
    (KIND, PHASE),
)
NODES = Instrument(
    "snapback.node.count",
    Shape.UP_DOWN,
    "{node}",
    Of.OPERATOR,
    "nodes that are `ready`, `not-ready` or `lost`, counted every 10 s",
    "pods stay Pending, or a node seems gone",
    (STATE,),
)
READERS = Instrument(
    "snapback.artifact.readers",
    Shape.UP_DOWN,
    "{pod}",
    Of.OPERATOR,
    "pods that restore from an artifact, counted every 10 s",
    "an artifact cannot be deleted",
)
QUARANTINED = Instrument(
    "snapback.artifact.quarantined",
    Shape.UP_DOWN,
    "{artifact}",
    Of.OPERATOR,
    "artifacts that were found damaged, counted every 10 s",
    "ever: storage loses bytes",
)
SWEEP_AGE = Instrument(
    "snapback.sweep.age",
    Shape.GAUGE,
    "s",
    Of.OPERATOR,
    "time since a sweep last ended well; it runs every 30 s",
    "above 120 s: JetStream does not answer, and lost orders are not published again",
)
STREAM_FILL = Instrument(
    "snapback.stream.fill",
    Shape.GAUGE,
    "1",
    Of.OPERATOR,
    "share of the room of a stream that is taken, by messages or bytes, as of the last sweep",
    "above 0.8 for ORDERS: nothing new begins (reason BusFull)",
    ("snapback.stream",),
)
UNPUBLISHED = Instrument(
    "snapback.order.unpublished",
    Shape.COUNTER,
    "{order}",
    Of.OPERATOR,
    "orders that could not be published at once and wait for the sweep",
    "captures begin late",
    (VERB,),
)
ORDER_DURATION = Instrument(
    "snapback.order.duration",
    Shape.HISTOGRAM,
    "s",
    Of.OPERATOR,
    "time from the decision to order something to its folded answer",
    "longer than messaging.process.duration: the way there or back is slow",
    (VERB, ERROR),
)
CAPTURE_DURATION = Instrument(
    "snapback.capture.duration",
    Shape.HISTOGRAM,
    "s",
    Of.OPERATOR,
    "time of a whole attempt to capture, until it is committed or has failed",
    "captures are slow or fail",
    (ERROR,),
)
CAPTURE_PAUSE = Instrument(
    "snapback.capture.pause.duration",
    Shape.HISTOGRAM,
    "s",
    Of.OPERATOR,
    "time for which a capture has paused its worker, where that went on",
    "users notice captures",
)
CAPTURE_IO = Instrument(
    "snapback.capture.io",
    Shape.COUNTER,
    "By",
    Of.OPERATOR,
    "bytes of committed artifacts",
    "the disk fills up",
)
RESTORE_DURATION = Instrument(
    "snapback.restore.duration",
    Shape.HISTOGRAM,
    "s",
    Of.OPERATOR,
    "time of a whole restore, until the worker serves again or it has failed",
    "workers start slowly or fail to",
    (ERROR,),
)

# The agent.

SLOTS_USED = Instrument(
    "snapback.slot.used",
    Shape.UP_DOWN,
    "{slot}",
    Of.AGENT,
    "workers that are being captured now, up to the end of their dump",
    "equal to the limit for long: captures wait for their turn",
)
SLOTS_LIMIT = Instrument(
    "snapback.slot.limit",
    Shape.UP_DOWN,
    "{slot}",
    Of.AGENT,
    "workers that may be captured at a time (SNAPBACK_SLOTS)",
    "beside snapback.slot.used",
)
FREEZE_DURATION = Instrument(
    "snapback.worker.freeze.duration",
    Shape.HISTOGRAM,
    "s",
    Of.AGENT,
    "time from freezing a worker to its thaw",
    "users notice captures",
)
HOLD_DURATION = Instrument(
    "snapback.worker.hold.duration",
    Shape.HISTOGRAM,
    "s",
    Of.AGENT,
    "time in which a worker was quiet: `complete` or `aborted`",
    "users notice captures",
    (OUTCOME,),
)
FROZEN = Instrument(
    "snapback.worker.frozen",
    Shape.UP_DOWN,
    "{worker}",
    Of.AGENT,
    "workers that are frozen now",
    "a worker does not answer",
)
FROZEN_AGE = Instrument(
    "snapback.worker.frozen.age",
    Shape.GAUGE,
    "s",
    Of.AGENT,
    "time for which the worker that has been frozen longest is so now; 0 when none is",
    "above the time that its state takes to copy",
)
HELD = Instrument(
    "snapback.worker.held",
    Shape.UP_DOWN,
    "{worker}",
    Of.AGENT,
    "workers that a capture holds now",
    "a worker does not answer",
)
GUARDS = Instrument(
    "snapback.guard.active",
    Shape.UP_DOWN,
    "{guard}",
    Of.AGENT,
    "guards of held workers; as many as are held, else one is being armed",
    "fewer than snapback.worker.held for long",
)
PODS = Instrument(
    "snapback.pod.running",
    Shape.UP_DOWN,
    "{pod}",
    Of.AGENT,
    "pods whose processes this agent watches",
    "comparing with what the operator says",
)

# Bytes on the move: the process part by the agent, GPU memory by GMS.

TRANSFER_DURATION = Instrument(
    "snapback.transfer.duration",
    Shape.HISTOGRAM,
    "s",
    Of.NODE,
    "time to move one part: `dump`, `restore`, `save` or `load`",
    "captures or restores are slow: bytes ÷ seconds is the rate of the storage",
    (VERB, ERROR),
)
TRANSFER_IO = Instrument(
    "snapback.transfer.io",
    Shape.COUNTER,
    "By",
    Of.NODE,
    "bytes of parts that were moved",
    "beside snapback.transfer.duration",
    (VERB,),
)

# GMS.

SESSIONS = Instrument(
    "snapback.gms.sessions",
    Shape.UP_DOWN,
    "{session}",
    Of.GMS,
    "sessions that hold a lock: `RW` or `RO`; `lingering` ones ended while their process lives",
    "a fence or a writer waits: a client still uses the device",
    (DEVICE, DOMAIN, LOCK),
)
LOCK_QUEUE = Instrument(
    "snapback.gms.lock.queue",
    Shape.UP_DOWN,
    "{client}",
    Of.GMS,
    "clients that wait for a lock",
    "workers hang at their start",
    (DEVICE, DOMAIN),
)
LOCK_WAIT = Instrument(
    "snapback.gms.lock.wait.duration",
    Shape.HISTOGRAM,
    "s",
    Of.GMS,
    "time that a client waited for its lock",
    "workers start or wake slowly",
    (LOCK, ERROR),
)
MEMORY_USED = Instrument(
    "snapback.gms.memory.used",
    Shape.UP_DOWN,
    "By",
    Of.GMS,
    "bytes of a device by domain; `hidden` is loaded, not published; `retired` awaits a process",
    "out of device memory",
    (DEVICE, DOMAIN),
)
MEMORY_FREE = Instrument(
    "snapback.gms.memory.free",
    Shape.UP_DOWN,
    "By",
    Of.GMS,
    "bytes of a device that are free, as the device says",
    "out of device memory",
    (DEVICE,),
)
ALLOCATIONS = Instrument(
    "snapback.gms.allocations",
    Shape.UP_DOWN,
    "{allocation}",
    Of.GMS,
    "allocations of a device by domain",
    "descriptors run out: each is one on a simulated device",
    (DEVICE, DOMAIN),
)
GENERATION = Instrument(
    "snapback.gms.generation",
    Shape.GAUGE,
    "{generation}",
    Of.GMS,
    "newest generation that was committed on a device",
    "weights were replaced, or not",
    (DEVICE,),
)
FENCES = Instrument(
    "snapback.gms.fences",
    Shape.UP_DOWN,
    "{fence}",
    Of.GMS,
    "fences by device and phase: `pending`, `held` or `leased`",
    "workers cannot attach",
    (DEVICE, PHASE),
)
CLIENTS_REFUSED = Instrument(
    "snapback.gms.client.refused",
    Shape.COUNTER,
    "{client}",
    Of.GMS,
    "clients of the lease socket that got no session",
    "workers fail at their start",
    (ERROR,),
)

# The process.

CPU_TIME = Instrument(
    "process.cpu.time",
    Shape.OBSERVED_COUNTER,
    "s",
    Of.ALL,
    "processor time of the service, without its children",
    "the machine is busy",
    ("cpu.mode",),
)
MEMORY = Instrument(
    "process.memory.usage",
    Shape.UP_DOWN,
    "By",
    Of.ALL,
    "resident memory of the service",
    "it grows for days",
)
DESCRIPTORS = Instrument(
    "process.unix.file_descriptor.count",
    Shape.UP_DOWN,
    "{file_descriptor}",
    Of.ALL,
    "open descriptors of the service",
    "too many open files",
)
LOOP_DELAY = Instrument(
    "snapback.event_loop.delay",
    Shape.HISTOGRAM,
    "s",
    Of.ALL,
    "how much later than asked the event loop comes back to a timer, once a second",
    "a service answers late although its work is short",
)

TABLE: tuple[Instrument, ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Instrument)
)
"""All of them, in the order in which they stand above."""
