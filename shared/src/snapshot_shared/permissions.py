"""Who may publish and receive what on NATS: the users, and the exact subjects of each.

Everything that is not listed is refused; nothing is listed only to be taken away again. The lists
follow from what `snapshot_shared.bus` does, so a new operation there needs its subjects here.

A user who may create or change consumers of a stream could read it, move what it sends, and take
over the consumers of others. So a service may create exactly one, by its name and with its filter
in the subject, where the server compares them with the request; everything else is read without a
consumer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, assert_never

from snapshot_shared import subjects
from snapshot_shared.ids import NodeName, token
from snapshot_shared.orders import Service

Role = Literal["operator", "agent", "gms", "snapshotctl", "viewer"]

STREAMS = (
    subjects.ORDERS,
    subjects.REPORTS,
    subjects.PROGRESS,
    subjects.SPANS,
    subjects.DEAD,
    *(
        subjects.stream_of_bucket(bucket)
        for bucket in (subjects.NODES_BUCKET, subjects.OBJECTS_BUCKET, subjects.SCHEMAS_BUCKET)
    ),
)

MAIN = "SNAPBACK"
"""The account with the streams, of all users but viewers."""

VIEWERS = "SNAPBACK_VIEWERS"

ANSWER_S = 10
"""How long after a question its answer may be sent, in seconds."""

PEOPLES_VERBS = ("apply", "delete", "verify", "retention", "cordon", "abort", "requeue", "health")
"""What only the person at the command line may ask of the operator."""

_BEHIND = {subjects.api("get"): subjects.api("view")}
"""What viewers ask and what that is in the account of the operator, which leaves secrets out."""

_API = "$JS.API"
_WITHOUT_DURABLES = tuple(s for s in STREAMS if s not in (subjects.ORDERS, subjects.REPORTS))


class User(NamedTuple):
    """One identity on NATS. `node` belongs to the roles `agent` and `gms` and to no other."""

    role: Role
    node: NodeName | None = None

    @property
    def name(self) -> str:
        """Name for people and files: the role, or `<role>-<node>`, with dots as `_`."""
        return f"{self.role}-{token(self.node)}" if self.node else self.role

    @property
    def inbox(self) -> str:
        """Prefix below which this user, and no other, receives answers."""
        return f"_INBOX.{self.name}"


class Allowed(NamedTuple):
    """Subjects that a user may publish and subscribe to.

    With `answers` it may also send one message, within ANSWER_S, to the reply subject of each
    message that it was sent.
    """

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    answers: bool


def users_of(nodes: Iterable[NodeName]) -> list[User]:
    """List all users of a cluster with these nodes."""
    of_nodes = [User(role, node) for node in nodes for role in ("agent", "gms")]
    return [User("operator"), User("snapshotctl"), User("viewer"), *of_nodes]


def allowed(user: User) -> Allowed:
    """Return the exact lists of a user. ValueError for a role with a node missing or too many."""
    if (user.node is not None) != (user.role in ("agent", "gms")):
        raise ValueError(f"{user.role} with node {user.node!r} is no user")
    match user.role:
        case "operator":
            found = _operator()
        case "agent" | "gms":
            assert user.node is not None  # noqa: S101 - compared above
            found = _service(user.node, user.role)
        case "snapshotctl":
            found = _snapshotctl()
        case "viewer":
            found = _viewer()
        case _:
            assert_never(user.role)
    return found._replace(subscribe=(f"{user.inbox}.>", *found.subscribe))


def server_accounts(keys: Sequence[tuple[User, str]]) -> dict[str, Any]:
    """Return the `accounts` of nats-server, from users and their public nkeys.

    Viewers have an account apart, which imports exactly what is in their lists. A client
    chooses the reply subject, and JetStream answers to any; from an account apart the answer can
    only go back there. It also decides which question a viewer's `get` is.
    """
    viewer = allowed(User("viewer"))
    questions = [subject for subject in viewer.publish if not subject.startswith("$SYS.")]
    shared = [subject for subject in viewer.subscribe if not subject.startswith("_INBOX.")]
    guests = [VIEWERS]
    return {
        MAIN: {
            "jetstream": "enabled",
            "users": [_server_user(user, key) for user, key in keys if user.role != "viewer"],
            "exports": [
                *(
                    {"service": _BEHIND.get(s, s), "accounts": guests, "response": "stream"}
                    for s in questions
                ),
                *({"stream": s, "accounts": guests} for s in shared),
            ],
        },
        VIEWERS: {
            "users": [_server_user(user, key) for user, key in keys if user.role == "viewer"],
            "imports": [
                *(
                    {"service": {"account": MAIN, "subject": _BEHIND.get(s, s)}, "to": s}
                    for s in questions
                ),
                *({"stream": {"account": MAIN, "subject": s}} for s in shared),
            ],
        },
    }


def _server_user(user: User, key: str) -> dict[str, Any]:
    lists = allowed(user)
    permissions: dict[str, Any] = {
        "publish": {"allow": list(lists.publish)},
        "subscribe": {"allow": list(lists.subscribe)},
    }
    if lists.answers:
        permissions["allow_responses"] = {"max": 1, "expires": f"{ANSWER_S}s"}
    return {"nkey": key, "permissions": permissions}


def _operator() -> Allowed:
    nodes = subjects.stream_of_bucket(subjects.NODES_BUCKET)
    publish = (
        "snap.order.*.*.*",
        f"{subjects.EVENTS}.*.*.*",
        "snap.span.operator.*",
        subjects.dead(NodeName("operator")),
        subjects.bucket_key(subjects.OBJECTS_BUCKET, ">"),
        subjects.bucket_key(subjects.SCHEMAS_BUCKET, ">"),
        *(f"{_API}.STREAM.{verb}.{s}" for verb in ("INFO", "CREATE", "UPDATE") for s in STREAMS),
        f"{_API}.STREAM.MSG.GET.{subjects.ORDERS}",
        f"{_API}.STREAM.MSG.DELETE.{subjects.ORDERS}",
        f"{_API}.DIRECT.GET.{nodes}",
        f"{_API}.DIRECT.GET.{subjects.stream_of_bucket(subjects.SCHEMAS_BUCKET)}",
        *_consumer(subjects.REPORTS, "operator", "snap.report.>"),
    )
    listen = (
        f"{subjects.API}.*",
        f"{subjects.API}.template.*",
        f"{subjects.API}.inventory.*",
        f"{subjects.API}.pods.*",
        subjects.bucket_key(subjects.NODES_BUCKET, "*"),
        subjects.elections(subjects.REPORTS, "operator"),
    )
    return Allowed(publish, (*listen, *_discovery("snap-operator")), answers=True)


def _service(node: NodeName, service: Service) -> Allowed:
    name = token(node)
    publish = [
        f"snap.report.{name}.*.*",
        f"snap.progress.{name}.*",
        f"snap.span.{name}.*",
        subjects.dead(node),
        *_consumer(
            subjects.ORDERS, subjects.durable(node, service), subjects.orders_of(node, service)
        ),
    ]
    if service == "agent":
        presence = subjects.bucket_key(subjects.NODES_BUCKET, name)
        publish += [
            subjects.template(node),
            subjects.inventory(node),
            subjects.pods(node),
            presence,
            f"{_API}.DIRECT.GET.{subjects.stream_of_bucket(subjects.NODES_BUCKET)}.{presence}",
        ]
    listen = (
        subjects.rpc(node, service, "*"),
        subjects.elections(subjects.ORDERS, subjects.durable(node, service)),
        *_discovery(f"snap-{service}"),
    )
    return Allowed(tuple(publish), listen, answers=True)


def _viewer() -> Allowed:
    publish = (
        subjects.api("get"),
        "snap.rpc.*.*.status",
        "$SRV.>",
        "$SYS.REQ.USER.INFO",
        f"{_API}.INFO",
        f"{_API}.STREAM.NAMES",
        f"{_API}.STREAM.LIST",
        f"{_API}.STREAM.INFO.*",
        f"{_API}.STREAM.MSG.GET.*",
        f"{_API}.DIRECT.GET.>",
        f"{_API}.CONSUMER.NAMES.*",
        f"{_API}.CONSUMER.LIST.*",
        f"{_API}.CONSUMER.INFO.*.*",
    )
    # Requests to the operator are not among them: they hold the specs of pods.
    kinds = ("order", "report", "progress", "span", "dead", "event")
    listen = (*(f"snap.{kind}.>" for kind in kinds), "$KV.>", "$JS.EVENT.ADVISORY.>")
    return Allowed(publish, listen, answers=False)


def _snapshotctl() -> Allowed:
    """Return what a viewer may, the operator's API, the switches, and what `nats` needs to show."""
    viewer = _viewer()
    publish = (
        *viewer.publish,
        *(subjects.api(verb) for verb in PEOPLES_VERBS),
        "snap.rpc.*.*.sim",
        "snap.span.cli.*",
        f"{_API}.CONSUMER.PAUSE.{subjects.ORDERS}.*",
        *(subject for stream in _WITHOUT_DURABLES for subject in _consumers(stream)),
    )
    return viewer._replace(publish=publish)


def _consumer(stream: str, durable: str, filter_: str) -> tuple[str, ...]:
    """Return what one durable needs: to be made with this filter, pulled from, acknowledged."""
    return (
        f"{_API}.CONSUMER.CREATE.{stream}.{durable}.{filter_}",
        f"{_API}.CONSUMER.MSG.NEXT.{stream}.{durable}",
        f"$JS.ACK.{stream}.{durable}.>",
    )


def _consumers(stream: str) -> tuple[str, ...]:
    """Return what consumers of any name need, on a stream where no service depends on one."""
    return (
        f"{_API}.CONSUMER.CREATE.{stream}",
        f"{_API}.CONSUMER.CREATE.{stream}.>",
        f"{_API}.CONSUMER.MSG.NEXT.{stream}.*",
        f"{_API}.CONSUMER.DELETE.{stream}.*",
        f"$JS.ACK.{stream}.>",
        f"$JS.FC.{stream}.>",
    )


def _discovery(service: str) -> tuple[str, ...]:
    """Return the subjects of `nats micro` that a service answers."""
    return ("$SRV.*", f"$SRV.*.{service}", f"$SRV.*.{service}.*")
