"""Who may say and hear what: exact lists, from which nothing is taken away again."""

from __future__ import annotations

import pytest

from snapshot_shared import subjects
from snapshot_shared.bus import BUCKETS, STREAMS
from snapshot_shared.ids import NodeName
from snapshot_shared.permissions import STREAMS as KNOWN
from snapshot_shared.permissions import User, allowed, server_accounts, users_of
from tests.unit.tables import each

A, B = NodeName("node-a"), NodeName("node.b")
USERS = users_of([A, B])


def matches(pattern: str, subject: str) -> bool:
    """Compare as NATS does: `*` is one token, `>` one or more at the end."""
    wanted, found = pattern.split("."), subject.split(".")
    for index, word in enumerate(wanted):
        if word == ">":
            return len(found) > index
        if index >= len(found) or word not in ("*", found[index]):
            return False
    return len(wanted) == len(found)


def may_publish(user: User, subject: str) -> bool:
    return any(matches(pattern, subject) for pattern in allowed(user).publish)


def may_hear(user: User, subject: str) -> bool:
    return any(matches(pattern, subject) for pattern in allowed(user).subscribe)


def test_the_streams_are_those_that_the_bus_makes() -> None:
    made = [stream.name for stream in STREAMS]
    made += [subjects.stream_of_bucket(bucket.bucket) for bucket in BUCKETS]
    assert sorted(KNOWN) == sorted(str(name) for name in made)


@each("user", USERS)
def test_nobody_hears_the_answers_to_another(user: User) -> None:
    for other in USERS:
        assert may_hear(user, f"{other.inbox}.x") == (user == other)


@pytest.mark.parametrize("role", ["agent", "gms"])
def test_no_subject_of_one_node_is_a_subject_of_another(role: str) -> None:
    mine, yours = User(role, A), User(role, B)  # type: ignore[arg-type]
    assert not set(allowed(mine).publish) & set(allowed(yours).publish)
    heard = set(allowed(mine).subscribe) & set(allowed(yours).subscribe)
    assert all(subject.startswith("$SRV.") for subject in heard)


@each("user", USERS)
def test_only_the_operator_orders_and_changes_streams(user: User) -> None:
    is_operator = user.role == "operator"
    assert may_publish(user, "snap.order.node-a.agent.x") == is_operator
    assert may_publish(user, "$JS.API.STREAM.CREATE.ORDERS") == is_operator
    for verb in ("DELETE", "PURGE", "RESTORE", "SNAPSHOT", "LEADER.STEPDOWN"):
        assert not may_publish(user, f"$JS.API.STREAM.{verb}.ORDERS")
    assert not may_publish(user, "$JS.API.CONSUMER.CREATE.ORDERS")
    assert not may_publish(user, "$JS.API.CONSUMER.CREATE.ORDERS.spy")
    assert not may_publish(user, "$JS.API.CONSUMER.DELETE.ORDERS.agent-node-a")


@each("user", USERS)
def test_only_the_person_at_the_command_line_changes_objects(user: User) -> None:
    verbs = ("apply", "delete", "verify", "retention", "cordon", "abort", "requeue", "health")
    for verb in verbs:
        assert may_publish(user, subjects.api(verb)) == (user.role == "snapshotctl")
    assert may_publish(user, subjects.api("get")) == (user.role in ("snapshotctl", "viewer"))
    assert may_publish(user, "snap.rpc.agent.node-a.sim") == (user.role == "snapshotctl")
    assert may_hear(user, subjects.api("apply")) == (user.role == "operator")


@each("user", USERS)
def test_only_viewers_and_people_follow_reports_and_request_the_status_of_a_service(
    user: User,
) -> None:
    may_view = user.role in ("viewer", "snapshotctl")
    assert may_publish(user, "snap.rpc.gms.node-a.status") == may_view
    for subject in ("snap.report.node-a.x.failed", "snap.progress.node-a.x", "snap.dead.node-a"):
        assert may_hear(user, subject) == may_view


def test_a_viewer_publishes_only_questions() -> None:
    reading = ("$SRV.", "$SYS.REQ.USER.INFO", "$JS.API.INFO", "$JS.API.DIRECT.GET.", "snap.rpc.")
    reading += ("snap.api.get", "$JS.API.STREAM.", "$JS.API.CONSUMER.")
    lists = allowed(User("viewer"))
    assert all(subject.startswith(reading) for subject in lists.publish)
    changing = {
        "CREATE",
        "UPDATE",
        "DELETE",
        "PURGE",
        "NEXT",
        "apply",
        "verify",
        "retention",
        "sim",
    }
    assert not [s for s in lists.publish if set(s.split(".")) & changing]
    assert not lists.answers


def test_every_grant_to_publish_is_an_allowance_and_no_wildcard_of_everything() -> None:
    accounts = server_accounts([(user, "U") for user in USERS])
    users = [user for account in accounts.values() for user in account["users"]]
    assert len(users) == len(USERS)
    for user in users:
        permissions = user["permissions"]
        assert set(permissions["publish"]) == set(permissions["subscribe"]) == {"allow"}
        granted = permissions["publish"]["allow"] + permissions["subscribe"]["allow"]
        assert not {">", "*", "$JS.>", "$JS.API.>", "snap.>", "_INBOX.>"} & set(granted)


@pytest.mark.parametrize("user", [User("agent"), User("gms"), User("viewer", A)])
def test_a_user_that_makes_no_sense_has_no_lists(user: User) -> None:
    with pytest.raises(ValueError, match="is no user"):
        allowed(user)
