"""The commands with which people look, and those that capture and restore, on a real cluster."""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotctl.domain.exits import Exit
from tests.integration.snapshotctl.conftest import Cli, interrupt, pod, read_until
from tests.support.objects import snapshot_document

pytestmark = pytest.mark.waits

WORKER = """\
apiVersion: v1
kind: Pod
metadata:
  name: {name}
  annotations: {annotations}
spec:
  containers:
    - name: main
      command: {command}
      env:
        - {{name: SIZE_MIB, value: "8"}}
        - {{name: WARMUP_REQUESTS, value: "0"}}
        - {{name: WARMUP_SECONDS, value: "0"}}
      resources: {{limits: {{nvidia.com/gpu: {gpus}}}}}
"""
CAPTURE = ("checkpoint", "--manifest", "-", "--framework", "vllm")
SERVES = '["python3", "deploy/examples/worker.py"]'


def _pod(name: str, command: str = SERVES, *, gpus: int = 1, source: str = "") -> str:
    annotations = f'{{nvidia.com/restore-from: "{source}"}}' if source else "{}"
    return WORKER.format(name=name, command=command, gpus=gpus, annotations=annotations)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    """A cluster of two nodes on which a checkpoint `warm` was captured."""
    found = Cli(tmp_path_factory.mktemp("user"))
    found.ok("up", "--nodes", "2", "--gpus", "2", "--gpu-memory", "64MiB")
    found.ok(*CAPTURE, "--checkpoint-id", "warm", stdin=_pod("source"))
    yield found
    found.purge()


def _has(text: str, *wanted: str) -> None:
    """Each of these texts stands in the output, one after another."""
    at = 0
    for word in wanted:
        at = text.find(word, at)
        assert at >= 0, f"{word!r} is missing, or too early, in:\n{text}"


def test_what_is_well_is_explained_from_the_request_to_now(running: Cli) -> None:
    _has(
        running.ok("explain", "warm").out,
        "dynamocheckpoint/warm is well: Captured",
        "asked: start a worker of source on 1 GPU, capture it once it is warm; then it ends",
        "run ordered from agent@node-1",
        "prepare prepared by agent@node-1",
        "save gpu-0 staged by gms@node-1, 8 MiB",
        "the capture ended after",
        "Where it stands",
        "generation 1",
        "What to do",
        "`snapshotctl restore warm`",
    )


def test_a_refused_restore_is_explained_with_both_values_and_what_to_do(running: Cli) -> None:
    running.apply(_pod("misfit", gpus=2, source="warm"))
    waited = running.run("wait", "pod/misfit", "--timeout", "30s")
    assert (waited.code, waited.err.count("Next:"), waited.err.count("next:")) == (1, 0, 1)
    assert "cannot come true" in waited.err
    assert "next: give the pod as many nvidia.com/gpu as the source had; see why: " in waited.err
    _has(
        running.ok("explain", "misfit").out,
        "pod/misfit has failed: Incompatible",
        "asked: restore a worker from warm on 2 GPUs",
        "the snapshot has 1 GPU, the pod asks for 2",
        "give the pod as many nvidia.com/gpu as the source had",
        "`snapshotctl artifacts show warm`",
    )
    running.refused(1, "pod/misfit has failed: Incompatible", "watch", "misfit")


def test_a_viewer_elsewhere_sees_all_but_the_logs_and_where_they_are(
    running: Cli, tmp_path: Path
) -> None:
    elsewhere = Cli(tmp_path)
    elsewhere.environment["NATS_NKEY"] = str(running.state() / "keys" / "viewer.nk")
    elsewhere.environment["NATS_INBOX_PREFIX"] = "_INBOX.viewer"
    running.apply(_pod("nowhere", source="nothing"))
    running.ok("wait", "pod/nowhere", "--for", "condition=PodScheduled=False")
    server = running.record()["url"]
    text = elsewhere.ok("--server", server, "explain", "nowhere").out
    _has(text, "pod/nowhere waits: WaitingForSnapshot", "Log", "standard error of the operator")
    elsewhere.ok("--server", server, "describe", "pod", "nowhere")
    elsewhere.ok("--server", server, "watch", "warm")
    assert "warm" in elsewhere.ok("--server", server, "events").out
    elsewhere.refused(4, "snap.api.retention", "--server", server, "artifacts", "gc", "--dry-run")
    running.ok("delete", "pod", "nowhere")


def test_an_upgrade_that_meets_nothing_may_begin(running: Cli) -> None:
    said = running.ok("upgrade-check").out
    _has(said, "no capture is under way", "all 2 nodes answer", "3 ok, 0 warn, 0 fail")


def test_a_deletion_names_the_pods_that_are_restored_from_what_goes(running: Cli) -> None:
    running.apply(json.dumps(snapshot_document("later", "absent")))
    running.apply(_pod("reader", source="later"))
    running.ok("wait", "pod/reader", "--for", "condition=PodScheduled=False")
    assert "pods are restored from later" in running.ok("delete", "snapshot/later").err
    running.ok("delete", "pod/reader")


def test_a_worker_that_failed_is_explained_with_what_it_wrote(running: Cli) -> None:
    said = '["sh", "-c", "echo out of cheese; exit 3"]'
    running.apply(pod("failing", said))
    running.run("wait", "pod/failing", "--timeout", "30s")
    found = running.value("explain", "pod/failing")
    assert (found["state"], found["reason"]) == ("failed", "ContainerExited")
    assert "exit code 3" in found["message"]
    assert "out of cheese" in [line["text"] for line in found["log"]]
    # The explanation is what the reason advises to read.
    assert "the text above shows the last lines" in running.ok("explain", "pod/failing").out
    assert "run exited by agent@node-1 with exit code 3" in [h["what"] for h in found["happened"]]


def test_what_hangs_is_explained_with_who_is_waited_for(running: Cli) -> None:
    running.ok("sim", "stall", "node-2", "--at", "spawn")
    here = _pod("hanging", gpus=0).replace("spec:\n", "spec:\n  nodeName: node-2\n", 1)
    running.schedule("hanging", here)
    running.until(lambda lines: [o for o in lines if o["state"] != "queued"], "orders", "node-2")
    _has(
        running.ok("explain", "hanging").out,
        "pod/hanging is under way: Starting",
        "Where it stands",
        "waits for agent@node-2 to end run-",
        "agent@node-2 reported accepted; its deadline is in",
        "node-2 was last seen",
    )
    _has(
        running.ok("explain", "node-2").out,
        "node/node-2 is well: AgentPresent",
        "1 pod there: hanging",
        "1 order not answered: run-",
    )
    running.ok("delete", "pod", "hanging")


def test_everything_that_is_known_is_described_with_the_events_at_the_end(running: Cli) -> None:
    [content] = [
        item["metadata"]["name"]
        for item in running.value("get", "snapcontents".removesuffix("s"))
        if item["spec"]["snapshotRef"]["name"] == "warm"
    ]
    whole = ("get", f"snapcontent/{content}", "--version")
    assert running.value(*whole, "v1alpha1")["apiVersion"] == "nvidia.com/v1alpha1"
    running.refused(2, "has no version 'v1'\nnext: use v1alpha1", *whole, "v1", "-o", "json")
    running.refused(2, "add -o yaml or -o json", *whole, "v1alpha1")
    text = running.ok("describe", "snapcontent", content).out
    _has(text, "Name:", content, "Spec:", "Status:", "Conditions:", "Parts:", "Readers:", "Orders:")
    _has(text, "Obligations:", "Events:", "the capture ended after")
    assert re.search(r"gpu-0 +8 MiB +sha256:[0-9a-f]{64} +GPU-", text)
    found = running.value("describe", f"snapcontent/{content}")
    assert found["object"]["status"]["capture"] == "Ready"
    assert "seal sealed by agent@node-1" in " ".join(item["what"] for item in found["events"])


def test_events_are_followed_as_they_happen_until_an_interrupt(running: Cli) -> None:
    with running.start("events", "--follow", "-o", "json") as follower:
        read_until(follower, "dynamocheckpoint/warm")
        running.apply(pod("followed"))
        seen = read_until(follower, "run started by")
        running.ok("delete", "pod/followed")
        seen += read_until(follower, '"gone"')
        ended = interrupt(follower, signal.SIGINT)
    assert (ended.code, ended.err) == (130, "interrupted\n")
    assert [json.loads(line) for line in seen.splitlines()]
    assert '"object": "pod/followed", "what": "created"' in seen


def test_a_restore_is_shown_phase_by_phase_and_its_pod_can_be_captured(running: Cli) -> None:
    running.refused(Exit.NOT_FOUND, "next: did you mean warm?", "restore", "wram")
    shown = running.ok("restore", "warm").out
    [pod] = re.findall(r"^pod/(warm-restored-\w+) created", shown)
    _has(shown, "load gpu-0", "done", "restore the process", "done", f"pod/{pod} is ready")
    assert "gpu-0: 8 MiB of 8 MiB" in shown
    assert re.search(r"^ +restored in [\d.]+ m?s$", shown, re.MULTILINE)
    again = running.ok("watch", pod).out
    _has(
        again, "load gpu-0", "commit gpu-0", "restore the process", f"pod/{pod} is ready: Restored"
    )

    taken = running.ok("checkpoint", pod, "--checkpoint-id", "second").out
    _has(taken, "snapshot/second created", "prepare", "seal", "snapshot/second is ready: Captured")
    assert re.search(
        r"^ +captured .* in .*/s\); worker paused for [\d.]+ m?s$", taken, re.MULTILINE
    )
    refused = running.refused(
        Exit.REFUSED, "nothing was captured now", "checkpoint", pod, "--checkpoint-id", "second"
    )
    assert re.search(r"snapshot/second is Ready since \w+; nothing", refused.err)
    before = running.value("get", "snap/second")
    taken = running.ok("checkpoint", pod, "--checkpoint-id", "second", "--replace")
    assert "snapshot/second deleted" in taken.err
    _has(taken.out, "snapshot/second created", "snapshot/second is ready: Captured")
    assert running.value("get", "snap/second")["metadata"]["uid"] != before["metadata"]["uid"]
    lines = running.ok("checkpoint", pod, "-o", "json").out.splitlines()
    first, last = json.loads(lines[0]), json.loads(lines[-1])
    assert (first["kind"], first["action"]) == ("Snapshot", "created")
    assert (last["state"], last["object"]) == ("fine", f"snapshot/{first['name']}")
    # A snapshot has the spec of its pod but no values of variables, which a new process needs.
    spec = running.value("get", f"pod/{pod}")["spec"]
    running.ok("delete", "pod", pod)
    running.ok("wait", f"pod/{pod}", "--for", "delete", "--timeout", "60s")
    said = "variables whose values were not kept: SIZE_MIB, WARMUP_"
    running.refused(Exit.REFUSED, said, "restore", "second")
    rows = spec["containers"][0]["env"]
    given = [word for row in rows for word in ("--env", f"{row['name']}={row['value']}")]
    shown = running.ok("restore", "second", *given).out
    [back] = re.findall(r"^pod/(second-restored-\w+) created", shown)
    assert running.value("get", f"pod/{back}")["spec"] == spec
    running.ok("delete", "pod", back)


def test_revisions_of_one_name_are_kept_in_number_and_the_newest_is_restored(running: Cli) -> None:
    running.apply(_pod("revised"))
    running.ok("wait", "pod/revised", "--timeout", "60s")
    capture = ("checkpoint", "revised", "--checkpoint-id", "chat", "--keep", "2")
    for number in (1, 2):
        shown = running.ok(*capture)
        _has(shown.out, f"snapshot/chat-{number} created", f"snapshot/chat-{number} is ready")
        assert "deleted" not in shown.err
    shown = running.ok(*capture)
    assert "snapshot/chat-1 deleted: the newest 2 of chat are kept" in shown.err
    running.ok("wait", "snapshot/chat-1", "--for", "delete", "--timeout", "60s")
    running.apply(_pod("named", source="chat"))
    running.ok("wait", "pod/named", "--timeout", "60s")
    running.refused(Exit.USAGE, "not from a pod", "restore", "pod/named")
    restored = running.ok("restore", "chat")
    assert "the newest revision of chat is chat-3" in restored.err
    [other] = re.findall(r"^pod/(chat-3-restored-\w+) created", restored.out)
    newest = running.value("get", "snap/chat-3")["status"]["boundSnapshotContentName"]
    found = {
        item["spec"]["podRef"]["name"]: item["status"]["contentName"]
        for item in running.value("get", "restores")
    }
    assert (found["named"], found[other]) == (newest, newest)
    rows = running.value("get", f"pod/{other}")["status"]["conditions"]
    assert "restored from snapshot/chat-3" in [row.get("message") for row in rows]
    assert "chat" in running.ok("get", "snap/chat-3", "-o", "wide").out.split()
    taken = ("checkpoint", "revised", "--checkpoint-id", "warm", "--keep", "1")
    running.refused(Exit.REFUSED, "are from dynamocheckpoint/warm, not from revisions", *taken)
    forgotten = capture[:-2]
    for more in ((), ("--replace",)):
        running.refused(Exit.REFUSED, "the newest of which is chat-3", *forgotten, *more)
    said = "chat is the name of 2 revisions, of which the newest is chat-3 (captured)"
    assert "snapshot/chat-3" in running.refused(Exit.NOT_FOUND, said, "explain", "chat").err
    running.refused(Exit.USAGE, "--keep is for a running POD", *capture, "--replace")
    running.ok("delete", "pod/revised", "pod/named", f"pod/{other}")
    running.ok("delete", "snapshot/chat-2", "snapshot/chat-3")


def test_a_restore_is_an_object_that_can_be_looked_at_in_every_way(running: Cli) -> None:
    running.apply(_pod("second", source="warm"))
    running.ok("wait", "pod/second", "--timeout", "60s")
    restores = running.value("get", "restores")
    [found] = [item for item in restores if item["spec"]["podRef"]["name"] == "second"]
    assert found["status"]["state"] == "Restored"
    name = found["metadata"]["name"]
    uid = running.value("get", "pod/second")["metadata"]["uid"]
    assert (name, found["spec"]["source"]) == (f"restore-{uid}", "warm")
    head, *_ = running.ok("get", "srestore", name).out.splitlines()
    columns = ["NAME", "POD", "SOURCE", "STATE", "ATTEMPT", "NODE", "GPUS", "AGE"]
    assert head.split() == columns
    pod = running.ok("describe", "pod/second").out
    _has(pod, "Restore:", name, "Orders of the restore:", f"load-{found['metadata']['uid']}-gpu-0")
    _has(running.ok("describe", f"restore/{name}").out, "source:", "warm", "Orders:", "load-")
    text = running.ok("explain", f"srestore/{name}").out
    _has(text, "asked: restore container main of pod second from warm", "load gpu-0 loaded")
    assert "load gpu-0 loaded" in running.ok("events", "pod/second").out
    lines = running.value("orders", "--all")
    assert "pod/second" in {line["owner"] for line in lines if line["verb"] == "load"}
    traced = running.value("trace", f"srestore/{name}")
    assert "order load" in {span["name"] for span in traced}
    running.ok("delete", "pod", "second")
    running.ok("wait", f"srestore/{name}", "--for", "delete", "--timeout", "60s")


def test_an_interrupted_restore_says_that_it_goes_on(running: Cli) -> None:
    late = _pod("late", '["sleep", "1000"]')
    with running.start("restore", "warm", "--manifest", "-") as process:
        assert process.stdin is not None
        process.stdin.write(late)
        process.stdin.close()
        process.stdin = None
        read_until(process, "load gpu-0")
        ended = interrupt(process)
    assert ended.code == 130
    assert "pod/late goes on; follow it: snapshotctl watch pod/late" in ended.err
    running.ok("delete", "pod", "late")


def test_artifacts_are_listed_shown_compared_and_judged(running: Cli) -> None:
    running.ok(*CAPTURE, "--checkpoint-id", "twin", stdin=_pod("source"))
    bigger = _pod("source").replace('"8"', '"16"')
    running.ok(*CAPTURE, "--checkpoint-id", "big", stdin=bigger)
    head, *rows = running.ok("artifacts", "ls").out.splitlines()
    assert head.split()[:4] == ["NAMESPACE", "NAME", "SIZE", "GENERATION"]
    assert {"warm", "twin", "big"} <= {row.split()[1] for row in rows[:-1]}

    _has(
        running.ok("artifacts", "show", "warm").out,
        "warm: 8 MiB, not verified",
        "root digest  sha256:",
        "driver       cooperative",
        "gpu-0",
        "shard-0000.bin",
        "1 x 8 MiB",
    )
    running.ok("artifacts", "verify", "warm", "--timeout", "60s")
    shown = running.value("artifacts", "show", "warm")
    assert shown["state"] == "verified"
    [weights] = [part for part in shown["manifests"] if part["part"] == "gpu-0"]
    assert sum(file["size"] for file in weights["files"]) == weights["bytes"] == 8 * 2**20

    same = running.value("artifacts", "diff", "warm", "twin")
    [gpu] = [part for part in same["parts"] if part["part"] == "gpu-0"]
    assert (gpu["differing"], gpu["structure"]) == (0, "same")
    other = running.value("artifacts", "diff", "warm", "big")
    [gpu] = [part for part in other["parts"] if part["part"] == "gpu-0"]
    assert (other["same"], gpu["left"], gpu["right"]) == (False, 8 * 2**20, 16 * 2**20)
    assert gpu["differing"] >= 8 * 2**20

    fits = running.ok("artifacts", "diff", "warm", "--node", "node-1")
    _has(fits.out, "FACT", "process driver", "cooperative", "warm can be restored on node-1.")
    found = running.value("artifacts", "diff", "warm", "--node", "node-1")
    assert found["refused"] is None
    verdicts = {row["fact"]: row["verdict"] for row in found["facts"]}
    assert (verdicts["arch"], verdicts["device_product"]) == ("same", "same")
    assert running.run("artifacts", "diff", "warm", "--node", "node-9").code == Exit.NOT_FOUND

    judged = running.value("artifacts", "gc", "--dry-run")
    assert judged["limits"] == {}
    assert {item["why"] for item in judged["artifacts"]} <= {
        "it is within the limits",
        "it is the newest usable one of its identity",
    }


def test_what_is_over_the_limits_is_named_first_and_goes_when_that_is_asked(cli: Cli) -> None:
    cli.environment["SNAPBACK_KEEP_COUNT"] = "1"
    cli.ok("up", "--nodes", "1", "--gpus", "1", "--gpu-memory", "64MiB")
    cli.apply(_pod("source"))
    cli.ok("checkpoint", "source", "--checkpoint-id", "old")
    # Artifacts of the same second have no order of age.
    threading.Event().wait(1.0)
    cli.ok("checkpoint", "source", "--checkpoint-id", "new")
    judged = cli.value("artifacts", "gc", "--dry-run")["artifacts"]
    # The operator's own sweep may have been quicker.
    if len(judged) == 2:
        going = {item["name"]: item["why"] for item in judged if item["goes"]}
        assert going == {"old": "the namespace holds 2 artifacts, the limit is 1"}
    cli.ok("artifacts", "gc")
    cli.ok("wait", "snapshot/old", "--for", "delete", "--timeout", "60s")
    left = cli.ok("artifacts", "gc", "--dry-run").out
    _has(left, "limits a namespace: count 1", "stays", "new", "0 of 1 artifact")
