"""A node is drained, in a cluster of real services: its labelled pods go on elsewhere."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.integration.snapshotctl.conftest import Cli, fresh, interrupt, read_until
from tests.support.live_cluster import pod

DRAIN = ("drain", "node-1", "--capture")


@pytest.fixture
def two_nodes(faulty: Cli) -> Cli:
    """A user whose default cluster runs, with two nodes of two GPUs and no object."""
    return fresh(faulty, "--nodes", "2", "--gpus", "2")


def _start(cli: Cli, *names: str, label: str = "true") -> None:
    for name in names:
        document = pod(name, "node-1")
        document["metadata"]["labels"] = {"app": "llm", "nvidia.com/capture-on-drain": label}
        cli.apply(json.dumps(document))
    for name in names:
        cli.ok("wait", f"pod/{name}", "--timeout", "60s")


def test_labelled_pods_go_on_elsewhere_as_they_were_and_the_others_are_named(
    two_nodes: Cli,
) -> None:
    _start(two_nodes, "ada")
    _start(two_nodes, "stays", label="false")
    ada = two_nodes.pods()["ada"]
    two_nodes.said_by(ada, chat="My name is Ada.")
    before = two_nodes.said_by(ada)
    plan = two_nodes.ok(*DRAIN, "--dry-run").out
    assert "pod/ada: would be captured as snapshot/ada-" in plan
    assert "pod/stays: left: it has no label" in plan
    assert set(two_nodes.pods()) == {"ada", "stays"}
    ended = two_nodes.run(*DRAIN, "--timeout", "2m")
    assert ended.code == 1, ended
    assert ended.out.startswith("node/node-1 cordoned\n")
    assert "1 pod is left on node-1" in ended.err
    assert "pod/stays: it has no label nvidia.com/capture-on-drain=true. Next: " in ended.err
    pods = two_nodes.pods()
    [name] = set(pods) - {"stays"}
    assert f"pod/ada goes on as pod/{name} on node-2\n" in ended.out
    assert "pod/ada " in ended.out
    assert "process part" in ended.out
    assert pods[name]["metadata"]["labels"]["app"] == "llm"
    assert two_nodes.said_by(pods[name]) == before
    assert two_nodes.said_by(pods["stays"])
    two_nodes.ok("delete", "pod/stays")
    two_nodes.ok("wait", "pod/stays", "--for", "delete", "--timeout", "30s")
    again = two_nodes.ok(*DRAIN)
    assert again.out == "node/node-1 already cordoned\nnode/node-1 drained\n"
    assert set(two_nodes.pods()) == {name}


def test_what_is_not_captured_by_the_deadline_is_named_and_goes_on_until_the_next_drain(
    two_nodes: Cli,
) -> None:
    _start(two_nodes, "ada")
    two_nodes.ok("sim", "stall", "node-1", "--at", "copy-state")
    late = two_nodes.run(*DRAIN, "--deadline", "2s", "-o", "json")
    assert late.code == 6, late
    [line] = [each for each in _entries(late.out) if "state" in each]
    assert (line["pod"], line["state"]) == ("ada", "late")
    assert line["why"].startswith("DeadlineExceeded: ")
    assert two_nodes.said_by(two_nodes.pods()["ada"])
    two_nodes.ok("sim", "stall", "node-1", "--clear")
    done = two_nodes.ok(*DRAIN, "-o", "json", "--timeout", "2m")
    [line] = [each for each in _entries(done.out) if "state" in each]
    assert (line["pod"], line["state"], line["node"]) == ("ada", "moved", "node-2")
    assert set(two_nodes.pods()) == {line["name"]}


def _entries(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_an_interrupted_drain_aborts_what_is_under_way_and_says_what_to_do(two_nodes: Cli) -> None:
    _start(two_nodes, "ada", "bob")
    two_nodes.ok("sim", "stall", "node-1", "--at", "copy-state")
    draining = two_nodes.start(*DRAIN, "--parallel", "1")
    read_until(draining, "process part")
    ended = interrupt(draining)
    assert ended.code == 130
    assert "goes on: its capture is being aborted" in ended.err
    assert "node-1 stays cordoned; go on: snapshotctl drain node-1 --capture" in ended.err
    for name in ("ada", "bob"):
        assert two_nodes.said_by(two_nodes.pods()[name])
    two_nodes.ok("sim", "stall", "node-1", "--clear")
    two_nodes.ok(*DRAIN, "--timeout", "2m")
    assert {pod["status"]["nodeName"] for pod in two_nodes.pods().values()} == {"node-2"}
