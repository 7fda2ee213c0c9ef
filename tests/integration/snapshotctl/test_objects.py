"""The commands on objects, against a real operator."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from tests.integration.snapshotctl.conftest import Cli, interrupt, pod, read_until


def test_a_manifest_is_stored_once(running: Cli, tmp_path: Path) -> None:
    file = tmp_path / "pod.yaml"
    file.write_text(pod("once"))
    assert running.ok("apply", "-f", str(file)).out == "pod/once created\n"
    assert running.ok("apply", "-f", str(file)).out == "pod/once unchanged\n"
    [result] = running.value("apply", "-f", str(file))
    assert (result["kind"], result["action"]) == ("Pod", "unchanged")
    # What get prints can be applied again.
    text = running.ok("get", "pod/once", "-o", "yaml").out
    assert yaml.safe_load(text)["status"]
    assert running.apply(text).out == "pod/once unchanged\n"


def test_every_problem_of_every_document_is_named_with_its_place(running: Cli) -> None:
    bad = pod("Bad_Name") + "  nonsense: 1\n---\n" + pod("good") + "---\nkind: Nothing\n"
    refused = running.run("apply", "-f", "-", stdin=bad)
    assert refused.code == 4
    assert re.search(r"stdin:4: metadata\.name: .*Bad_Name", refused.err)
    assert "stdin:9: spec.nonsense: " in refused.err
    assert "stdin:20: kind: " in refused.err
    assert running.run("get", "pod/good").code == 3


def test_an_image_that_is_not_used_is_named_with_its_line(running: Cli) -> None:
    said = running.apply(pod("pictured") + "      image: vllm:1\n")
    assert said.out == "pod/pictured created\n"
    assert said.err.startswith("warning: stdin:9: spec.containers[0].image: is not used: ")


def test_objects_are_listed_as_a_table_and_that_there_are_none_is_said(running: Cli) -> None:
    running.apply(pod("listed"))
    head, *rows = running.ok("get", "pods").out.splitlines()
    assert head.split() == ["NAME", "READY", "STATUS", "NODE", "GPUS", "RESTORE-FROM", "AGE"]
    assert any(row.startswith("listed ") for row in rows)
    assert running.ok("get", "pods", "-A").out.startswith("NAMESPACE")
    empty = running.ok("get", "snapshots", "-n", "elsewhere")
    assert (empty.out, empty.err) == ("", "no snapshots in namespace elsewhere\n")
    assert running.value("get", "snapshots") == []


def test_an_object_that_does_not_exist_is_not_found(running: Cli) -> None:
    for verb in ("get", "delete", "wait"):
        running.refused(3, "missing does not exist", verb, "pod/missing")
    for verb in ("explain", "watch", "events"):
        running.refused(3, "no dynamocheckpoint/missing", verb, "missing")
    running.refused(3, "no spans", "trace", "0" * 31 + "1")


def test_several_objects_are_deleted_or_none(running: Cli) -> None:
    for name in ("first", "second"):
        running.apply(pod(name))
    refused = running.refused(3, "Pod frist does not exist", "delete", "pod/second", "pod/frist")
    assert refused.err.endswith("next: did you mean pod/first?\n")
    running.refused(3, "no object is called secnod", "explain", "secnod")
    assert {"first", "second"} <= {
        each["metadata"]["name"] for each in running.value("get", "pods")
    }
    lines = running.ok("delete", "pod", "first", "second", "first").out.splitlines()
    assert [line.partition(" ")[0] for line in lines if not line.startswith(" ")] == [
        "pod/first",
        "pod/second",
    ]
    for name in ("first", "second"):
        running.ok("wait", f"pod/{name}", "--for", "delete", "--timeout", "60s")


def test_a_deleted_object_is_waited_for_until_it_is_gone(running: Cli) -> None:
    running.schedule("goner")
    running.ok("delete", "pod", "goner")
    gone = running.ok("wait", "pod/goner", "--for", "delete", "--timeout", "60s")
    again = running.ok("wait", "pod/goner", "--for", "delete").out
    assert again == gone.out
    assert gone.out == "pod/goner delete: it is gone\n"
    assert running.run("get", "pod/goner").code == 3


def test_a_bare_name_that_nothing_has_is_not_taken_for_deleted(running: Cli) -> None:
    misspelt = running.run("wait", "misspelt", "--for", "delete")
    assert (misspelt.code, misspelt.out) == (3, "")
    assert "there is no " in misspelt.err
    assert "next: name the kind where it may be gone already, as in pod/misspelt" in misspelt.err


def test_waiting_ends_when_time_runs_out_or_by_an_interrupt(running: Cli) -> None:
    running.apply(pod("slow"))
    running.refused(6, "not within 0.5 s", "wait", "pod/slow", "--timeout", "500ms")
    said = "pod/slow is not over within 0.5 s, and goes on"
    assert "delete" not in running.refused(6, said, "watch", "pod/slow", "--timeout", "500ms").err
    running.apply(pod("endless"))
    process = running.start("--server", running.record()["url"], "wait", "pod/endless")
    follower = running.start("wait", "pod/endless", "--for", "condition=PodScheduled")
    read_until(follower, "condition=PodScheduled")
    follower.communicate()
    assert interrupt(process).code == 130


def roots(spans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [span for span in spans if not span.get("parent_id")]


def test_an_apply_begins_a_trace_that_can_be_shown(running: Cli) -> None:
    running.schedule("traced")
    spans = running.value("trace", "pod/traced")
    [root] = roots(spans)
    assert (root["name"], root["service"], root["node"]) == ("apply", "snapshotctl", "cli")
    shown = running.ok("trace", "traced").out
    assert shown.startswith(f"trace {root['trace_id']}: ")
    assert running.value("trace", root["trace_id"])
    # The pod goes on, so more spans may have come.
    assert roots(running.value("trace", f"00-{root['trace_id']}-{root['span_id']}-01")) == [root]


def test_a_bare_name_is_that_of_the_object_that_has_it(running: Cli) -> None:
    running.apply(pod("only-one"))
    assert running.value("get", "only-one")["kind"] == "Pod"
    assert running.ok("describe", "only-one").out.startswith("Name:            only-one")
    running.ok("wait", "only-one", "--for", "condition=PodScheduled")
    assert running.value("get", "node-1")["kind"] == "Node"
    assert running.ok("delete", "only-one").out.startswith("pod/only-one ")
    running.refused(3, "pod/never-made", "get", "never-made")
    slip = running.run("get", "pdos")
    assert "next: did you mean the kind pods?" in slip.err


def test_a_bare_name_that_several_objects_have_is_answered_with_them(running: Cli) -> None:
    running.apply(pod("twice") + "---\n" + JOB.format(name="twice"))
    for command in ("get", "describe", "delete", "wait"):
        refused = running.refused(
            2, "may be any of 2 objects: job/twice, pod/twice", command, "twice"
        )
        assert "next: name the kind as well, as in job/twice" in refused.err
    assert running.value("get", "job/twice")["kind"] == "Job"


JOB = """\
apiVersion: batch/v1
kind: Job
metadata:
  name: {name}
spec:
  template:
    spec:
      containers:
        - name: main
          command: ["sleep", "1000"]
"""


def test_a_watch_shows_objects_and_each_change(running: Cli) -> None:
    follower = running.start("get", "pods", "-l", "app=watched", "--watch")
    assert follower.stderr is not None
    assert "no pods in namespace default yet" in follower.stderr.readline()
    text = pod("watched").replace(
        "  name: watched\n", "  name: watched\n  labels: {app: watched}\n"
    )
    running.apply(text)
    assert "RESTORE-FROM" in read_until(follower, "watched ")
    read_until(follower, "Running")
    running.ok("delete", "pod/watched")
    read_until(follower, "(deleted)")
    assert interrupt(follower).code == 130


def test_a_watch_of_one_object_is_one_line_a_change_for_a_program(running: Cli) -> None:
    assert running.run("get", "pod/never-made", "--watch").code == 3
    running.apply(pod("followed"))
    follower = running.start("get", "followed", "-w", "-o", "json")
    first = json.loads(read_until(follower, "\n"))
    assert (first["type"], first["object"]["metadata"]["name"]) == ("ADDED", "followed")
    running.ok("delete", "followed")
    last = read_until(follower, '"DELETED"').splitlines()[-1]
    assert json.loads(last)["object"]["metadata"]["deletionTimestamp"]
    assert interrupt(follower).code == 130


def test_a_dry_run_checks_everything_and_stores_nothing(running: Cli, tmp_path: Path) -> None:
    file = tmp_path / "dry.yaml"
    file.write_text(pod("dry"))
    assert running.ok("apply", "-f", str(file), "--dry-run").out == "pod/dry created (dry run)\n"
    assert running.run("get", "pod/dry").code == 3
    running.ok("apply", "-f", str(file))
    again = running.ok("apply", "-f", str(file), "--dry-run")
    assert again.out == "pod/dry unchanged (dry run)\n"
    file.write_text(pod("dry", '["sleep", "5"]'))
    why = '  spec.containers[0].command[1]: "5" is wanted, "1000" is there\n'
    running.refused(4, why, "apply", "-f", str(file), "--dry-run")
    bad = running.run("apply", "-f", "-", "--dry-run", stdin=pod("Bad_Name"))
    assert "stdin:4: metadata.name: " in bad.err
    assert running.ok("get", "dry", "-o", "wide").out.splitlines()[0].split()[-1] == "TRACE"
