"""Which server a command talks to."""

import json
from collections.abc import Mapping

import pytest

from snapshotctl.domain.exits import WrongArguments
from snapshotctl.domain.servers import (
    ClusterNamed,
    ContextNamed,
    Server,
    choose,
    endpoints,
    server_of_context,
    shown,
)
from tests.unit.tables import each

EVERYTHING = {
    "NATS_URL": "nats://env:1",
    "SNAPBACK_CLUSTER": "from-env",
    "NATS_CONTEXT": "context-env",
}


def _without(*names: str) -> Mapping[str, str]:
    return {name: value for name, value in EVERYTHING.items() if name not in names}


@each(
    ("server", "cluster", "environment", "selected", "expected"),
    [
        ("flag:2", "c", EVERYTHING, "s", Server("nats://flag:2", "--server")),
        (None, "c", EVERYTHING, "s", ClusterNamed("c", "--cluster")),
        (None, None, EVERYTHING, "s", Server("nats://env:1", "NATS_URL")),
        (None, None, _without("NATS_URL"), "s", ClusterNamed("from-env", "SNAPBACK_CLUSTER")),
        (
            None,
            None,
            _without("NATS_URL", "SNAPBACK_CLUSTER"),
            "s",
            ContextNamed("context-env", "NATS_CONTEXT"),
        ),
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
    assert choose(server, cluster, environment, selected) == expected


@pytest.mark.parametrize(
    "text", ["http://a", "nats://", "nats://a:port", "nats://a:99999", "nats://["]
)
def test_what_is_no_address_of_nats_is_refused(text: str) -> None:
    with pytest.raises(WrongArguments, match="--server"):
        choose(text, None, {}, None)


@each("name", ["../x", "A", "a/b", "a.b", "-a", "a" * 64])
def test_a_cluster_whose_name_is_no_folder_is_refused(name: str) -> None:
    with pytest.raises(WrongArguments):
        choose(None, name, {}, None)


def _context(**fields: str) -> Server:
    return server_of_context(json.dumps(fields).encode(), ContextNamed("c", "NATS_CONTEXT"))


def test_a_context_gives_the_first_of_its_servers() -> None:
    assert _context(url="nats://a:1,nats://b:2").url == "nats://a:1"


def test_a_context_without_a_url_means_the_port_of_nats() -> None:
    assert _context().url == "nats://127.0.0.1:4222"


def test_the_login_of_a_context_is_used_and_never_shown() -> None:
    found = _context(url="nats://a:1", user="u", password="p@ss")
    assert found.url == "nats://u:p%40ss@a:1"
    assert shown(found.url) == "nats://a:1"


def test_a_token_of_a_context_is_used() -> None:
    assert _context(url="nats://a:1", token="t").url == "nats://t@a:1"


def test_the_nkey_of_a_context_is_used() -> None:
    assert _context(url="nats://a:1", nkey="/k").credentials == "/k"


def test_an_address_is_reached_with_the_key_that_the_environment_names() -> None:
    keys = {"NATS_NKEY": "/k", "NATS_INBOX_PREFIX": "_INBOX.viewer"}
    expected = ("/k", "_INBOX.viewer")
    for found in (
        choose("a:1", None, keys, None),
        choose(None, None, keys | {"NATS_URL": "a"}, ""),
    ):
        assert isinstance(found, Server)
        assert (found.credentials, found.inbox) == expected


def test_a_context_has_the_prefix_of_the_inboxes_of_its_user() -> None:
    assert _context(inbox_prefix="_INBOX.viewer").inbox == "_INBOX.viewer"
    assert _context().inbox == "_INBOX.snapshotctl"


def test_a_context_that_we_cannot_use_says_why() -> None:
    with pytest.raises(WrongArguments, match="creds"):
        _context(url="nats://a:1", creds="/c")


@pytest.mark.parametrize("data", [b"", b"[]", b'{"url": 3}', b"\xff", b"[" * 100_000])
def test_a_context_that_cannot_be_read_is_refused(data: bytes) -> None:
    with pytest.raises(WrongArguments, match="cannot be read"):
        server_of_context(data, ContextNamed("c", "NATS_CONTEXT"))


def test_several_addresses_are_completed_one_by_one_and_shown_without_passwords() -> None:
    chosen = choose("a:1, tls://u:pw@b:2,c", None, {}, None)
    assert isinstance(chosen, Server)
    assert chosen.url == "nats://a:1,tls://u:pw@b:2,nats://c"
    assert shown(chosen.url) == "nats://a:1,tls://b:2,nats://c"


def test_a_cluster_is_known_by_any_of_its_addresses() -> None:
    assert endpoints("nats://localhost:1,nats://b") == {("127.0.0.1", 1), ("b", 4222)}
