"""The command verify, in a cluster of real services whose disk is damaged and repaired."""

from __future__ import annotations

import re
from pathlib import Path

from tests.integration.snapshotctl.conftest import EXAMPLES, Cli

CHECKPOINT = "dynamocheckpoint/demo-llm"


def _example(name: str) -> str:
    text = (EXAMPLES / name).read_text()
    return text.replace('"512"', '"16"').replace('value: "10"', 'value: "1"')


def _flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(4096)
        byte = file.read(1)[0]
        file.seek(4096)
        file.write(bytes([byte ^ 1]))


def test_damage_is_found_brings_into_quarantine_and_repair_lifts_it(cli: Cli) -> None:
    cli.ok("up", "--nodes", "1", "--gpu-memory", "64MiB")
    assert cli.run("verify", "demo-llm").code == 3
    cli.ok("apply", "-f", "-", stdin=_example("checkpoint.yaml"))
    cli.ok("wait", CHECKPOINT, "--timeout", "60s")
    verified = cli.ok("verify", "demo-llm")
    assert " is sound: node-1 read " in verified.out
    assert "MiB of snapshotcontent/" in verified.err.partition("reading ")[2]
    assert re.search(r"^  artifact: (.+) of \1\b", verified.out, re.MULTILINE)

    [shard] = (path for path in cli.state().rglob("gpu-0/*") if path.name != "part.json")
    _flip(shard)
    damaged = cli.run("verify", "demo-llm", "--timeout", "60s")
    assert damaged.code == 1
    assert f"part gpu-0: {shard.name}" in damaged.err
    assert "ArtifactCorrupt" in damaged.err
    assert "Ready (ArtifactCorrupt)" in cli.ok("get", CHECKPOINT).out
    cli.ok("apply", "-f", "-", stdin=_example("restore.yaml"))
    refused = cli.run("wait", "pod/demo-llm-restored", "--timeout", "30s")
    assert refused.code == 1
    assert "Quarantined" in refused.err
    assert shard.name in refused.err

    _flip(shard)
    sound = cli.ok("verify", "snapshot/demo-llm", "-o", "json").value()
    assert sound["verified"] is True
    cli.ok("wait", CHECKPOINT, "--timeout", "30s")
