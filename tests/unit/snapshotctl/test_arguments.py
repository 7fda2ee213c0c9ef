"""What the words of a command line mean: objects, services, servers, labels, steps, numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from snapshot_api.kinds import KINDS
from snapshot_shared import errors
from snapshot_shared.errors import NotFound
from snapshot_shared.steps import Place
from snapshotctl.commands import sim
from snapshotctl.domain import exits, formats, selectors, servers, sources, targets
from snapshotctl.domain.exits import Exit, WrongArguments, exit_of
from snapshotctl.domain.servers import ClusterNamed, ContextNamed, Server
from tests.unit.tables import each

# Which object is meant.


CHECKPOINTS = ("dckpt", "ckpt", "checkpoint", "checkpoints", "DynamoCheckpoint")
RESTORES = ("srestore", "restore", "restores", "snapshotrestores", "SnapshotRestore")


@each(
    ("words", "kind", "namespace", "name"),
    [
        *((words, "Pod", "ns", "w") for words in ("pod w", "pod/w", "pods/w", "Pod w", "po/w")),
        ("pods", "Pod", "ns", None),
        ("nodes n", "Node", None, "n"),
        *((word, "DynamoCheckpoint", "ns", None) for word in CHECKPOINTS),
        *((word, "SnapshotRestore", "ns", None) for word in RESTORES),
    ],
)
def test_a_kind_has_many_names_and_two_ways_to_name_an_object(
    words: str, kind: str, namespace: str | None, name: str | None
) -> None:
    found = targets.target(words.split(), "ns")
    assert (found.kind.name, found.namespace, found.name) == (kind, namespace, name)


def test_all_namespaces_are_none_and_exclude_a_name() -> None:
    assert targets.everywhere(targets.target(["pods"], "ns")).namespace is None
    with pytest.raises(WrongArguments):
        targets.everywhere(targets.target(["pods", "w"], "ns"))


@each(
    ("words", "namespace"),
    [
        (["nothing"], "ns"),
        (["nothing/w"], "ns"),
        (["pod", "a", "b"], "ns"),
        (["pod", "A_B"], "ns"),
        (["pod/"], "ns"),
        (["pod/../x"], "ns"),
        (["pods"], "a.b"),
    ],
)
def test_words_that_name_nothing_are_refused(words: list[str], namespace: str) -> None:
    with pytest.raises(WrongArguments):
        targets.target(words, namespace)


def test_an_unknown_kind_is_answered_with_the_known_ones_and_a_slip_is_seen() -> None:
    with pytest.raises(WrongArguments) as refused:
        targets.target(["nothing"], "ns")
    assert "dynamocheckpoints" in refused.value.next_step
    assert targets.kinds_like("pdos") == ["pods"]
    assert targets.kinds_like("demo-llm") == []


def test_one_object_needs_a_name() -> None:
    for meant in (targets.one_target, targets.meant_one):
        with pytest.raises(WrongArguments, match="a name is missing"):
            meant(["pods"], "ns")
    assert [item.name for item in targets.meant(["pods"], "ns")] == [None]


def test_a_bare_name_is_traced_and_verified_as_whatever_may_have_a_trace_or_an_artifact() -> None:
    captured = [("DynamoCheckpoint", "ns"), ("Snapshot", "ns"), ("SnapshotContent", None)]
    started = [("Pod", "ns"), ("SnapshotRestore", "ns")]
    verified, traced = targets.verified("x", "ns"), targets.traced("x", "ns")
    assert [(t.kind.name, t.namespace) for t in verified] == captured
    assert [(t.kind.name, t.namespace) for t in traced] == captured + started
    assert [str(t) for t in targets.traced("pod/x", "ns")] == ["pod/x"]
    with pytest.raises(WrongArguments, match="holds no artifact"):
        targets.verified("pod/x", "ns")


def test_a_bare_name_may_be_that_of_any_kind_and_words_with_a_kind_mean_one_object() -> None:
    found = targets.meant(["demo-llm"], "ns")
    assert {item.kind.name for item in found} == set(KINDS)
    assert {item.name for item in found} == {"demo-llm"}
    assert targets.meant_one(["demo-llm"], "ns") == found
    for words in (["pod", "x"], ["pod/x"], ["dckpt/x"]):
        assert targets.meant(words, "ns") == [targets.one_target(words, "ns")]


def test_a_process_is_that_of_a_pod() -> None:
    assert {targets.pod_named(word) for word in ("w", "pod/w", "po/w")} == {"w"}
    with pytest.raises(WrongArguments, match="a Node has no process"):
        targets.pod_named("node/w")


def test_several_objects_are_named_as_kubectl_takes_them() -> None:
    for words in (["pod", "a", "b"], ["pod/a", "pod/b"], ["pods", "a", "b"]):
        assert [str(one) for (one,) in targets.several(words, "ns")] == ["pod/a", "pod/b"]
    first, second = targets.several(["a", "b"], "ns")
    assert {each.name for each in first} == {"a"}
    assert len(second) == len(targets.NAMED)
    for words in (["pods"], ["pod/a", "pod"], ["pod/a", "nonsense/b"]):
        with pytest.raises(WrongArguments):
            targets.several(words, "ns")


def test_a_slip_of_a_name_is_recognised() -> None:
    there = [targets.Target(KINDS["Pod"], "ns", name) for name in ("warm", "cold", "worker-1")]
    assert [str(each) for each in targets.names_like("wram", there)] == ["pod/warm"]
    assert targets.names_like("else", there) == []


# Whose log is meant.

PROGRAMS = ["nats-server", "node-1-agent", "node-1-gms", "node-2-agent", "operator", "page"]


PODS = ("my-worker", "pod/operator", "demo-llm-dfec6", "pod/node-1-agent", "x-agent", "node-2-gms")


@each(
    ("word", "program"),
    [
        ("operator", "operator"),
        ("nats", "nats-server"),
        ("nats-server", "nats-server"),
        ("agent@node-1", "node-1-agent"),
        ("node-2-agent", "node-2-agent"),
        ("gms", "node-1-gms"),
        *((pod, None) for pod in PODS),
    ],
)
def test_a_word_is_a_service_with_its_program_or_else_a_pod(word: str, program: str | None) -> None:
    service = sources.service_named(word, PROGRAMS)
    assert (sources.program_of(service, PROGRAMS) if service else None) == program


@each(
    ("name", "typed"),
    [
        ("my-worker", "my-worker"),
        ("x-agent", "x-agent"),
        ("node-1-agent", "pod/node-1-agent"),
        ("operator", "pod/operator"),
        ("gms", "pod/gms"),
    ],
)
def test_a_pod_that_is_called_like_a_service_is_typed_with_its_kind(name: str, typed: str) -> None:
    assert sources.pod_typed(name, PROGRAMS) == typed


def test_a_service_of_several_nodes_or_of_none_is_answered_with_those_that_there_are() -> None:
    listed = ["nats", "operator", "page", "agent@node-1", "agent@node-2", "gms@node-1"]
    assert sources.known_services(PROGRAMS) == listed
    several, absent = sources.service_named("agent"), sources.service_named("helper@node-1")
    assert several is not None
    assert absent is not None
    with pytest.raises(WrongArguments) as refused:
        sources.program_of(several, PROGRAMS)
    assert refused.value.next_step == "name agent@node-1 or agent@node-2"
    with pytest.raises(NotFound) as missing:
        sources.program_of(absent, PROGRAMS)
    assert ", ".join(listed) in missing.value.next_step
    with pytest.raises(WrongArguments, match="'saver' is no service of a node"):
        sources.service_named("saver@node-1")


# Which objects a selector of labels leaves, as with kubectl.

LABELS = {"app": "llm", "tier": "dev", "example.com/team": "a", "empty": ""}
SELECTING = [
    *("app=llm", "app == llm", "app!=asr", "absent!=x", "app=llm,tier=dev", "app in (asr, llm)"),
    *("app notin (asr),tier in (dev,test)", "absent notin (x)", "app", "!absent"),
    *("example.com/team=a", "empty="),
]
LEAVING_OUT = [
    *("app=asr", "app!=llm", "absent=x", "absent in (x)", "!app", "absent", "app=llm,tier=prod")
]


@each(
    ("text", "selects"),
    [*((text, True) for text in SELECTING), *((text, False) for text in LEAVING_OUT)],
)
def test_a_selector_selects_or_leaves_out(text: str, selects: bool) -> None:
    assert selectors.matches(selectors.parse(text), LABELS) is selects


@each("text", ["=", "a=b=c", "a,,b", "a in", "a in (x y)", "-a=b", "a>1", ","])
def test_a_selector_that_is_none_is_answered_with_its_forms(text: str) -> None:
    with pytest.raises(WrongArguments) as refused:
        selectors.parse(text)
    assert "app=llm" in refused.value.next_step


# Which server is talked to.

CONTEXT = ContextNamed("context-env", "NATS_CONTEXT")
NAMED = {"NATS_CONTEXT": "context-env"}
IN_CLUSTER = {**NAMED, "SNAPBACK_CLUSTER": "from-env"}
EVERYTHING = {**IN_CLUSTER, "NATS_URL": "nats://env:1"}


@each(
    ("server", "cluster", "environment", "selected", "expected"),
    [
        ("flag:2", "c", EVERYTHING, "s", Server("nats://flag:2", "--server")),
        (None, "c", EVERYTHING, "s", ClusterNamed("c", "--cluster")),
        (None, None, EVERYTHING, "s", Server("nats://env:1", "NATS_URL")),
        (None, None, IN_CLUSTER, "s", ClusterNamed("from-env", "SNAPBACK_CLUSTER")),
        (None, None, NAMED, "s", CONTEXT),
        (None, None, {}, "s", ContextNamed("s", "the selected nats context")),
        (None, None, {}, None, ClusterNamed("default", "the default")),
        (None, None, {"NATS_URL": ""}, None, ClusterNamed("default", "the default")),
    ],
)
def test_flags_beat_the_environment_which_beats_what_was_selected(
    server: str | None,
    cluster: str | None,
    environment: Mapping[str, str],
    selected: str | None,
    expected: object,
) -> None:
    assert servers.choose(server, cluster, environment, selected) == expected


@each("text", ["http://a", "nats://", "nats://a:port", "nats://a:99999", "nats://["])
def test_what_is_no_address_of_nats_is_refused(text: str) -> None:
    with pytest.raises(WrongArguments, match="--server"):
        servers.choose(text, None, {}, None)


@each("name", ["../x", "A", "a/b", "a.b", "-a", "a" * 64])
def test_a_cluster_whose_name_is_no_folder_is_refused(name: str) -> None:
    with pytest.raises(WrongArguments):
        servers.choose(None, name, {}, None)


def _context(**fields: str) -> Server:
    return servers.server_of_context(json.dumps(fields).encode(), CONTEXT)


@each(
    ("fields", "expected"),
    [
        ({"url": "nats://a:1,nats://b:2"}, {"url": "nats://a:1"}),
        ({}, {"url": "nats://127.0.0.1:4222", "inbox": "_INBOX.snapshotctl"}),
        ({"url": "nats://a:1", "token": "t"}, {"url": "nats://t@a:1"}),
        ({"url": "nats://a:1", "nkey": "/k"}, {"credentials": "/k"}),
        ({"inbox_prefix": "_INBOX.viewer"}, {"inbox": "_INBOX.viewer"}),
        ({"url": "nats://a:1", "user": "u", "password": "p@ss"}, {"url": "nats://u:p%40ss@a:1"}),
    ],
)
def test_a_context_gives_the_first_of_its_servers_with_the_login(
    fields: dict[str, str], expected: dict[str, str]
) -> None:
    found = _context(**fields)
    assert {name: getattr(found, name) for name in expected} == expected


def test_an_address_is_reached_with_the_key_that_the_environment_names() -> None:
    keys = {"NATS_NKEY": "/k", "NATS_INBOX_PREFIX": "_INBOX.viewer"}
    for address, environment in (("a:1", keys), (None, keys | {"NATS_URL": "a"})):
        found = servers.choose(address, None, environment, "")
        assert isinstance(found, Server)
        assert (found.credentials, found.inbox) == ("/k", "_INBOX.viewer")


def test_a_context_that_we_cannot_use_says_why() -> None:
    with pytest.raises(WrongArguments, match="creds"):
        _context(url="nats://a:1", creds="/c")
    for data in (b"", b"[]", b'{"url": 3}', b"\xff", b"[" * 100_000):
        with pytest.raises(WrongArguments, match="cannot be read"):
            servers.server_of_context(data, CONTEXT)


def test_several_addresses_are_completed_one_by_one_and_shown_without_passwords() -> None:
    chosen = servers.choose("a:1, tls://u:pw@b:2,c", None, {}, None)
    assert isinstance(chosen, Server)
    assert chosen.url == "nats://a:1,tls://u:pw@b:2,nats://c"
    assert servers.shown(chosen.url) == "nats://a:1,tls://b:2,nats://c"
    assert servers.endpoints("nats://localhost:1,nats://b") == {("127.0.0.1", 1), ("b", 4222)}


# At which step a fault is armed.


@each(
    ("step", "verb", "service", "found"),
    [
        ("write", None, None, Place("gms", "save", "write")),
        ("read", None, None, Place("gms", "load", "read")),
        ("publish", None, None, Place("gms", "commit", "publish")),
        ("forget", None, None, Place("gms", "drop", "forget")),
        ("copy-state", None, None, Place("agent", "dump", "copy-state")),
        ("write-root", None, None, Place("agent", "seal", "write-root")),
        ("check", "load", None, Place("gms", "load", "check")),
        ("check", "restore", "agent", Place("agent", "restore", "check")),
        ("tombstone", "delete", None, Place("agent", "delete", "tombstone")),
        ("compensate", None, None, Place("agent", "abort", "compensate")),
        ("compensate", None, "gms", Place("gms", "abort", "compensate")),
    ],
)
def test_a_step_is_found_in_the_service_that_carries_it_out(
    step: str, verb: str | None, service: str | None, found: Place
) -> None:
    assert sim.place(step, verb, service) == found


@each(("step", "verbs"), [("check", 3), ("tombstone", 2), ("signal", 2)])
def test_a_name_that_several_verbs_have_asks_for_the_verb(step: str, verbs: int) -> None:
    with pytest.raises(WrongArguments) as raised:
        sim.place(step, None, None)
    assert raised.value.next_step.count("--verb") == verbs


@each(
    ("verb", "step", "hint"),
    [
        ("save", "write", "checkpoint.yaml"),
        ("load", "read", "restore.yaml"),
        ("delete", "remove", "delete dynamocheckpoint"),
    ],
)
def test_the_command_that_leads_to_the_step_is_named_and_after_a_crash_the_restart(
    verb: str, step: str, hint: str
) -> None:
    place = sim.place(step, verb, None)
    assert hint in sim.looks("node-2", place, "fail")[0]
    assert "restart" not in "\n".join(sim.looks("node-2", place, "fail"))
    restart = f"restart node-2 --service {place.service}"
    assert restart in "\n".join(sim.looks("node-2", place, "crash"))


def test_without_a_service_both_are_meant() -> None:
    assert list(sim.services(None)) == ["agent", "gms"]
    assert list(sim.services("gms")) == ["gms"]


# Numbers, as people write and read them.


GIB = 1024**3


@each(
    ("function", "table"),
    [
        (formats.parse_duration, {"90s": 90, "5m": 300, "1h30m": 5400, "7d": 604_800}),
        (formats.parse_duration, {"250ms": 0.25, "1.5s": 1.5}),
        (formats.parse_size, {"1024": 1024, "512 MiB": GIB // 2, "4GiB": 4 * GIB, "4Gi": 4 * GIB}),
        (formats.parse_size, {"1.5kB": 1500, "2G": 2 * 10**9}),
        (formats.size, {0: "0 B", 1023: "1023 B", 1024: "1 KiB", 1536: "1.5 KiB"}),
        (formats.size, {GIB // 4: "256 MiB", 5 * 1024**2 * GIB: "5120 TiB"}),
        (formats.span_time, {0.0004: "0.4 ms", 0.012: "12 ms", 1.239: "1.24 s", 125.4: "2m 05s"}),
        (formats.age, {-3: "0s", 59: "59s", 192: "3m12s", 3600: "60m", 7200: "2h", 400_000: "4d"}),
    ],
)
def test_numbers_are_read_and_written_with_their_units(
    function: Any, table: dict[Any, Any]
) -> None:
    assert {given: function(given) for given in table} == table


def test_a_rate_needs_time_and_an_age_a_time_with_a_zone() -> None:
    assert formats.rate(2_500_000_000, 1.0) == "2.5 GB/s"
    assert formats.rate(500, 1.0) == "500 B/s"
    assert {formats.rate(10, seconds) for seconds in (0.0, -1.0)} == {"-"}
    assert formats.age_of("1970-01-01T00:01:00Z", 100) == "40s"
    times = ("", "yesterday", "1970-01-01T00:01:00")
    assert {formats.age_of(text, 100) for text in times} == {"-"}


@each("text", ["", "5", "m", "5x", "5m ", "-5m", "0s", "8d", "1h2", "\u0665m"])
def test_what_is_no_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(WrongArguments) as refused:
        formats.parse_duration(text)
    assert text in refused.value.message


@each("text", ["", "MiB", "-1", "1XB", "1i", "1e9", "4GiBs"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(WrongArguments):
        formats.parse_size(text)


def test_text_of_others_stays_on_its_line_and_sends_nothing_to_the_terminal() -> None:
    assert formats.plain("a\x1b[31m b\r\n\tc\x9b") == "a b c"


@each(
    ("line", "plain", "coloured"),
    [
        ("a\tb", "a\tb", "a\tb"),
        ("\x1b[1;32mINFO\x1b[0m ok", "INFO ok", "\x1b[1;32mINFO\x1b[0m ok\x1b[0m"),
        ("50 %\r\x1b[2K\x1b[A60 %", "50 %60 %", "50 %60 %"),
        ("\x1b]0;title\x07x\x1b]8;;http://a\x1b\\y", "xy", "xy"),
        ("\x1bcall\x1b(B\x9b31m\x07\x1b", "all31m", "all31m"),
        ("\x1b[38:5:1mred", "red", "\x1b[38:5:1mred\x1b[0m"),
    ],
)
def test_a_line_of_a_program_keeps_its_colours_alone(line: str, plain: str, coloured: str) -> None:
    assert formats.printable(line, coloured=False) == plain
    assert formats.printable(line, coloured=True) == coloured


@each(
    ("text", "lines"),
    [
        ("short", ["short"]),
        ("", [""]),
        ("x" * 30, ["x" * 30]),
        ("one two three four five six", ["one two three four", "  five six"]),
        ("  one two three four five six", ["  one two three four", "    five six"]),
        (
            "do this: `snapshotctl get pods -A -o wide`, then look",
            ["do this:", "  `snapshotctl get pods -A -o wide`,", "  then look"],
        ),
        (
            "next: snapshotctl down --cluster a && snapshotctl up",
            ["next:", "  snapshotctl down --cluster a && snapshotctl up"],
        ),
        ("a  b   aligned as it was before", ["a  b   aligned as it", "  was before"]),
    ],
)
def test_a_line_is_broken_between_words_and_never_in_a_command(text: str, lines: list[str]) -> None:
    assert formats.wrapped(text, 20) == lines


# With which code a command exits.


REFUSALS = (
    *(errors.InvalidManifest, errors.InvalidName, errors.AlreadyExists, errors.Forbidden),
    *(errors.Conflict, errors.RequestExpired),
)


@each(
    ("error", "code"),
    [
        (errors.NotFound("x"), Exit.NOT_FOUND),
        *((error("x"), Exit.REFUSED) for error in REFUSALS),
        (errors.BusUnavailable("x"), Exit.UNREACHABLE),
        (errors.DeadlineExceeded("x"), Exit.TIMEOUT),
        (errors.SourceExited("x"), Exit.FAILED),
        (errors.Internal("x"), Exit.FAILED),
        (exits.WrongArguments("x"), Exit.USAGE),
        (exits.NeverTrue("x"), Exit.FAILED),
        (exits.DemoFailed("x"), Exit.FAILED),
        (errors.RemoteFailure(errors.NotFound("x").to_failure()), Exit.NOT_FOUND),
    ],
)
def test_the_reason_of_an_error_gives_the_exit_code(
    error: errors.SnapbackError, code: Exit
) -> None:
    assert exit_of(error.to_failure()) is code


def test_every_code_is_explained_and_every_reason_in_its_table_exists() -> None:
    text = exits.help_text()
    assert all(f"{code.value}  " in text for code in Exit)
    assert set(exits.MEANINGS) == set(Exit)
    assert set(exits.REASONS) <= {found.reason for found in _all(errors.SnapbackError)}


def _all(kind: type[errors.SnapbackError]) -> list[type[errors.SnapbackError]]:
    return [kind, *(found for child in kind.__subclasses__() for found in _all(child))]
