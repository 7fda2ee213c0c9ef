"""What the operator's NATS service answers: `snap.api.<verb>`, JSON in and out.

The fault switch of a simulated node (`Fault`, `SimRequest`, `SimReply`) speaks the same way.

Every reply either has a `failure` or the fields of its success.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from snapshot_shared.artifact import Facts
from snapshot_shared.errors import Failure
from snapshot_shared.model import Message
from snapshot_shared.orders import Attempt, Label, UidStr

ASKED_AT = "Snapback-Asked-At"
"""Header of a request: when it was sent, in seconds since the epoch."""
WITHIN = "Snapback-Within"
"""Header of a request: how many seconds its client waits. It is refused after that."""


def age_headers(now: float, within_s: float) -> dict[str, str]:
    """Return the headers of a request that is sent at `now` and waited for `within_s` seconds."""
    return {ASKED_AT: f"{now:.3f}", WITHIN: f"{within_s:.3f}"}


def _empty() -> list[Any]:
    """Return an empty list. msgspec would leave it out of a message if `list` itself made it."""
    return []


class ApplyRequest(Message):
    """Store these manifests, all or none. `traceparent` becomes the trace of what follows."""

    documents: list[msgspec.Raw]
    traceparent: str = ""
    dry_run: bool = False


Action = Literal["created", "configured", "unchanged"]
"""`configured` comes from an API server alone: the operator changes no spec."""


class Applied(Message):
    """What became of one manifest, or with a dry run would; then a new one has no `uid`."""

    kind: str
    namespace: str | None = None
    name: str
    uid: str
    action: Action


class ApplyReply(Message, omit_defaults=True):
    """One result a manifest in the same order, or the failure; then nothing was stored."""

    results: list[Applied] = msgspec.field(default_factory=_empty)
    failure: Failure | None = None


class GetRequest(Message):
    """Read one object by name, or a page of all of a kind (in all namespaces when None)."""

    kind: str
    namespace: str | None = None
    name: str | None = None
    limit: int = 200
    after: str = ""


class GetReply(Message, omit_defaults=True):
    """Objects in the order of their keys; `next` is the `after` of the next page, or empty."""

    items: list[Any] = msgspec.field(default_factory=_empty)
    next: str = ""
    failure: Failure | None = None


class DeleteRequest(Message):
    """Mark an object for deletion; it goes when its finalizers are answered.

    With a `uid`, only that incarnation: Conflict when another one has the name.
    """

    kind: str
    namespace: str | None = None
    name: str
    uid: str = ""


class DeleteReply(Message, omit_defaults=True):
    """`gone` says whether it is gone already."""

    gone: bool = False
    failure: Failure | None = None


class VerifyRequest(Message):
    """Have every byte read of what a checkpoint, snapshot or content holds; `uid` as to delete."""

    kind: str
    namespace: str | None = None
    name: str
    uid: str = ""


class VerifyReply(Message, omit_defaults=True):
    """The content, and the number of the verification.

    It has ended when the content's `status.verified` is below neither that nor
    `status.verifications`; the result is the condition `Verified`.
    """

    content: str = ""
    verification: int = 0
    failure: Failure | None = None


class CordonRequest(Message):
    """Let nothing new begin on a node, or let it again.

    With a `resource_version`, only if the node has not changed since it was read: Conflict else.
    """

    node: str
    unschedulable: bool
    resource_version: str = ""


class CordonReply(Message, omit_defaults=True):
    """The node, and whether it was otherwise before."""

    node: str = ""
    changed: bool = False
    failure: Failure | None = None


class AbortRequest(Message):
    """End the capture behind a checkpoint, snapshot or content now. `by` is shown to people.

    `uid` as to delete.
    """

    kind: str
    namespace: str | None = None
    name: str
    uid: str = ""
    by: Annotated[str, Meta(min_length=1, max_length=128)]


class AbortReply(Message, omit_defaults=True):
    """The content, and the state its capture was in; it ends `Failed` with reason `Aborted`."""

    content: str = ""
    capture: str = ""
    failure: Failure | None = None


class RequeueRequest(Message):
    """Publish the current order with this id again, as the operator has it."""

    order: str


class RequeueReply(Message, omit_defaults=True):
    """What was published, and for whom."""

    order: str = ""
    attempt: int = 0
    node: str = ""
    service: str = ""
    failure: Failure | None = None


class HealthRequest(Message):
    """Ask how the operator itself is."""


class FactsReply(Message):
    """What is read of the status of an agent: facts of its node, and of the artifact in question.

    The body of that request may be an `ArtifactRef`. `failure` says why the node cannot read it.
    Earlier agents have none of these.
    """

    facts: Facts = Facts()
    source: Facts | None = None
    failure: Failure | None = None


class HealthReply(Message, omit_defaults=True):
    """The operator's version, its last sweep (seconds since the epoch), and how full ORDERS was.

    `ahead_s` is how far the clock of its machine is ahead of the API server's, by which it goes.
    """

    version: str = ""
    swept_at: float | None = None
    fill: float = 0.0
    ahead_s: float = 0.0
    failure: Failure | None = None


class RetentionRequest(Message, omit_defaults=True):
    """Ask what retention would delete now; with `run` it is done first."""

    namespace: str | None = None
    run: bool = False
    after: str = ""


class Retained(Message):
    """One captured artifact by the object that stands for it: whether it goes, and why (not)."""

    kind: str
    namespace: str
    name: str
    content: str
    bytes: int
    goes: bool
    why: str


class RetentionReply(Message, omit_defaults=True):
    """The artifacts by the names of their contents; `next` is the `after` of the next page.

    `limits` are what a namespace may keep (count, days, bytes); one that is missing is none.
    """

    artifacts: list[Retained] = msgspec.field(default_factory=_empty)
    limits: dict[str, float] = {}
    next: str = ""
    failure: Failure | None = None


class TemplateRequest(Message):
    """An agent asks for the spec of a pod that a run order names."""

    namespace: str
    name: str
    uid: str
    node: str


class TemplateReply(Message, omit_defaults=True):
    """The pod's spec as JSON (an `objects.PodSpec`), whose digest the run order carries."""

    spec: Any = None
    failure: Failure | None = None


MAX_FOUND = 1000


class FoundGeneration(Message):
    """A generation that lies below an artifact root.

    `age_s` is how many seconds ago its directory last changed, by the agent's clock. `sealed` says
    whether it has a root manifest.
    """

    namespace: Label
    content_uid: UidStr
    generation: Attempt
    age_s: float
    sealed: bool = False


class InventoryRequest(Message):
    """An agent asks whose the generations are that it has listed before."""

    node: str
    generations: Annotated[list[FoundGeneration], Meta(max_length=MAX_FOUND)] = []


Verdict = Literal["keep", "tell", "quarantine"]
"""A generation has an owner or is too young to judge; has none and is reported; or is moved."""


class InventoryReply(Message, omit_defaults=True):
    """One verdict a generation in the same order.

    `others` is the verdict about what is no generation at all and has not changed for `after_s`
    seconds.
    """

    verdicts: list[Verdict] = msgspec.field(default_factory=_empty)
    others: Verdict = "keep"
    after_s: float = 0.0
    failure: Failure | None = None


MAX_PODS = 1000


class PodsRequest(Message):
    """An agent asks which of the pods that it has listed before the operator does not know."""

    node: str
    pods: Annotated[list[UidStr], Meta(max_length=MAX_PODS)] = []


class PodsReply(Message, omit_defaults=True):
    """The uids of those pods of which no object is there any more; the agent ends them."""

    unknown: list[UidStr] = msgspec.field(default_factory=_empty)
    failure: Failure | None = None


FaultAction = Literal["crash", "stall", "fail"]
"""Kill the service, wait until the step's deadline, or raise InjectedFault."""


class Fault(Message, omit_defaults=True):
    """What happens once when a step begins; without a verb in the first that has such a step."""

    action: FaultAction
    step: str
    verb: str = ""
    stall_s: Annotated[float, Meta(ge=0, le=86400)] = 0.0


class SimRequest(Message, omit_defaults=True):
    """Ask a service for a fault (`snap.rpc.<service>.<node>.sim`), or disarm all that are armed."""

    arm: Fault | None = None
    clear: bool = False


class SimReply(Message, omit_defaults=True):
    """All that is armed in this service now, or the failure; then nothing was changed."""

    armed: list[Fault] = msgspec.field(default_factory=_empty)
    failure: Failure | None = None


MAX_EVENT_BYTES = 1024 * 1024
"""How large an ObjectEvent may be: what NATS carries in one message."""


class ObjectEvent(Message):
    """A change of an object, announced on `subjects.event(...)`. May be lost: re-read, too.

    `source` names the process of the operator that made the change.
    """

    type: Literal["ADDED", "MODIFIED", "DELETED"]
    object: Any
    source: str = ""
