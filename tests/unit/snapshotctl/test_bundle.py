"""What a bundle holds, and that no secret gets into it."""

from __future__ import annotations

import asyncio
import os
import resource
import tarfile
from pathlib import Path
from typing import Any

import pytest

from snapshot_api.redaction import redacted
from snapshot_api.well_known import POD_SPEC
from snapshot_shared.errors import BusUnavailable, NoSpace
from snapshotctl.adapters import archive
from snapshotctl.commands.bundle import Collection
from snapshotctl.domain import bundle_files
from snapshotctl.domain.bundle_files import BundleFile, Missing
from snapshotctl.domain.exits import WrongArguments
from tests.unit.tables import each

SEED = "SU" + "A" * 56
POD = {
    "spec": {
        "containers": [
            {
                "name": "main",
                "command": ["serve", "--api-key", "sk-first", "--size=3", "--token=sk-second"],
                "env": [{"name": "HF_TOKEN", "value": "hf_third"}, {"name": "SIZE", "value": "77"}],
            }
        ]
    }
}


def test_no_value_of_an_environment_variable_and_no_secret_argument_stays() -> None:
    [container] = redacted(POD)["spec"]["containers"]
    assert [item["name"] for item in container["env"]] == ["HF_TOKEN", "SIZE"]
    assert {item["value"] for item in container["env"]} == {"<redacted>"}
    saver = {"envs": [{"name": "A", "value": "one"}, {"name": "B", "valueFrom": {}}]}
    assert redacted(saver)["envs"][0] == {"name": "A", "value": "<redacted>"}
    shown = ["serve", "--api-key", "<redacted>", "--size=3", "--token=<redacted>"]
    assert container["command"] == shown
    assert bundle_files.secrets_in(POD) == {"hf_third", "sk-first", "sk-second"}
    assert bundle_files.secrets_in({"name": "TOKEN", "value": "short"}) == frozenset()


def test_a_secret_in_a_line_for_a_shell_and_one_in_an_annotation_do_not_stay() -> None:
    value = {
        "args": ["-c", "export HF_TOKEN=hf_one; serve --api-key sk-two", "x"],
        "annotations": {
            "example.com/password": "pw-three",
            "example.com/team": "red",
            POD_SPEC: '{"containers":[]}',
        },
    }
    assert redacted(value) == {
        "args": ["-c", "export HF_TOKEN=<redacted>", "x"],
        "annotations": {
            "example.com/password": "<redacted>",
            "example.com/team": "red",
            POD_SPEC: "<redacted>",
        },
    }
    assert {"hf_one; serve --api-key sk-two", "pw-three"} <= bundle_files.secrets_in(value)


@each(
    ("text", "left"),
    [
        (f"key {SEED} was read", "key <redacted> was read"),
        ("SO" + "B" * 56, "<redacted>"),
        ("nats://me:pw@host:4222,tls://tok@b", "nats://<redacted>@host:4222,tls://<redacted>@b"),
        ("Authorization: Bearer abc.def-123456", "Authorization: Bearer <redacted>"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----.", "<redacted>."),
        ("it said hf_third twice: hf_third", "it said <redacted> twice: <redacted>"),
        ('{"a": "x\\ny\\"z"}', '{"a": "<redacted>"}'),
        ("nothing to see at http://host/path@2", "nothing to see at http://host/path@2"),
    ],
)
def test_secrets_are_taken_out_of_any_text(text: str, left: str) -> None:
    secrets = ["hf_third", 'x\ny"z', "third"]
    assert bundle_files.scrubbed(text.encode(), secrets) == left.encode()


def test_settings_are_ours_and_name_no_secret() -> None:
    environment = {
        "SNAPBACK_NODE": "n",
        "NATS_PASSWORD": "pw",
        "NATS_NKEY": "/path",
        "HOME": "/x",
        "AWS_SECRET_ACCESS_KEY": "aws",
    }
    found = bundle_files.settings(environment)
    assert found == {"NATS_NKEY": "<redacted>", "NATS_PASSWORD": "<redacted>", "SNAPBACK_NODE": "n"}


def test_a_secret_that_one_object_shows_is_taken_out_of_every_file() -> None:
    collection = Collection()
    collection.add_text("logs/agent.log", b"refused hf_third")
    collection.add("objects/pods.json", [POD])
    collection.missing.append(Missing("spans.json", "no answer for sk-first"))
    files = collection.files("1.0")
    assert [name for name, _ in files] == ["README.txt", "logs/agent.log", "objects/pods.json"]
    assert not [name for name, data in files if b"hf_third" in data or b"sk-" in data]
    assert b"spans.json: no answer for <redacted>" in files[0].data


def test_what_cannot_be_had_is_named_and_the_rest_is_taken() -> None:
    async def lost() -> Any:
        raise BusUnavailable("no answer")

    async def there() -> Any:
        return [1]

    async def collect() -> Collection:
        collection = Collection()
        await collection.take("a.json", lost())
        await collection.take("b.json", there())
        return collection

    collection = asyncio.run(collect())
    assert [member.name for member in collection.members] == ["b.json"]
    assert collection.missing[0].what == "a.json"
    assert "BusUnavailable: no answer" in collection.missing[0].why


def test_the_archive_is_for_its_owner_alone_and_replaces_an_older_one(tmp_path: Path) -> None:
    path = tmp_path / "x.tar.gz"
    path.write_bytes(b"old")
    size = archive.write(path, [BundleFile("a.txt", b"hello")], now=5.0)
    assert (path.stat().st_size, path.stat().st_mode & 0o777) == (size, 0o600)
    assert list(tmp_path.iterdir()) == [path]
    with tarfile.open(path) as found:
        [entry] = found.getmembers()
        assert (entry.name, entry.mtime, entry.mode) == ("x/a.txt", 5, 0o600)
        file = found.extractfile(entry)
        assert file is not None
        assert file.read() == b"hello"


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "x.tar.gz"
    path.write_bytes(b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(NoSpace) as refused:
            archive.write(path, [BundleFile("noise", os.urandom(300_000))], now=0.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(path) in refused.value.message
    assert "snapshotctl bundle --file" in refused.value.next_step
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"old"


def test_the_ends_of_logs_are_taken_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"x" * bundle_files.LOG_BYTES + b"end")
    (tmp_path / "key").write_text(SEED)
    (tmp_path / "b.log").symlink_to(tmp_path / "key")
    os.mkfifo(tmp_path / "c.log")
    # Or a reader that opens it would hang.
    os.open(tmp_path / "c.log", os.O_RDWR | os.O_NONBLOCK)
    [found] = archive.log_ends(tmp_path)
    assert found.name == "logs/a.log"
    assert len(found.data) == bundle_files.LOG_BYTES
    assert found.data.endswith(b"xend")


def test_a_bundle_is_named_by_its_time_or_as_the_user_says(tmp_path: Path) -> None:
    assert bundle_files.file_name(None, "now") == "snapback-bundle-now.tar.gz"
    assert bundle_files.file_name("a.tgz", "now") == "a.tgz"
    with pytest.raises(WrongArguments, match="not the name of a bundle"):
        bundle_files.file_name("cluster.yaml", "now")
    with pytest.raises(WrongArguments, match="missing"):
        archive.write(tmp_path / "missing" / "x.tar.gz", [], now=0.0)
