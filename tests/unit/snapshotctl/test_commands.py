"""The command line without a server: help, wrong arguments, exit codes, and what it imports."""

from __future__ import annotations

import asyncio
import gc
import json
import pkgutil
import re
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import pytest
import typer
import yaml

from snapshot_shared.reasons import REASONS
from snapshotctl import commands
from snapshotctl.adapters.folders import write_record
from snapshotctl.cli import COMMANDS, app, hoisted, module_of
from snapshotctl.command import carry_out
from snapshotctl.domain.cluster import NodeSpec
from snapshotctl.domain.exits import Exit
from tests.unit.snapshotctl.conftest import Run, cluster_record
from tests.unit.tables import each

ARTIFACTS = ["ls", "show", "verify", "diff", "gc"]
SIM = ["crash", "stall", "fail", "restart"]
DEAD = ["ls", "show", "requeue"]


def _help_without(run: Run, marks: Iterable[tuple[str, str]]) -> list[str]:
    """Name the commands whose help lacks a text, each given as its words and the text."""
    return [words for words, mark in marks if mark not in run(*words.split(), "--help").out]


def test_the_help_of_every_command_has_an_example(run: Run) -> None:
    examples = [(name, f"\n    snapshotctl {name}") for name in COMMANDS]
    examples += [(f"dead {verb}", f"\n    snapshotctl dead {verb}") for verb in DEAD]
    examples += [(f"artifacts {verb}", f"\n    snapshotctl artifacts {verb}") for verb in ARTIFACTS]
    examples += [(f"sim {verb}", f"\n    snapshotctl sim {verb} node-1") for verb in SIM]
    assert _help_without(run, examples) == []
    assert _help_without(run, [(name, "Examples:") for name in COMMANDS]) == []
    assert _help_without(run, [("sim", f"\n  {verb} ") for verb in SIM]) == []
    assert _help_without(run, [("bundle", "-f, --file FILE.tar.gz")]) == []


def test_the_list_of_commands_has_the_first_sentence_of_the_help_of_each() -> None:
    group = typer.main.get_command(app)
    context = typer.Context(group)
    sentences = {
        name: group.get_command(context, name).get_short_help_str(200)  # type: ignore[attr-defined]
        for name in COMMANDS
    }
    wrong = {
        name: sentence
        for name, sentence in sentences.items()
        if sentence.removesuffix(".") != COMMANDS[name].removesuffix(".")
    }
    assert wrong == {}


def test_a_command_is_the_module_of_its_name() -> None:
    modules = {
        found.name for found in pkgutil.iter_modules(commands.__path__, "snapshotctl.commands.")
    }
    assert modules == {module_of(name) for name in COMMANDS}


def test_an_interrupt_before_a_command_has_begun_prints_no_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work() -> None:
        raise AssertionError("it has begun")

    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(asyncio, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        carry_out(work(), cast("Any", None))
    # What was never awaited says so when it is collected, and a warning fails a test here.
    gc.collect()


def test_a_schema_is_printed_without_a_server(run: Run) -> None:
    for name in ("dump_order", "dump_order.v1", "snapback.v1.dump_order"):
        schema = json.loads(run("schema", name).out)
        assert schema["$defs"]["DumpOrder"]["properties"]["vector"]["type"] == "array"
    said = run("schema", "SnapshotContent", "-o", "yaml")
    assert yaml.safe_load(said.out)["$ref"] == "#/$defs/SnapshotContent"
    said = run("schema", "-o", "json")
    assert {"dump_order.v1", "report.v1", "pod.v1"} <= set(json.loads(said.out))
    assert "\ndump_order.v1 " in run("schema").out


def test_the_doctor_reports_a_server_that_is_absent_and_credentials_that_are_none(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = run("doctor", exits=Exit.FAILED)
    assert "fail  connection: no server was named" in said.out
    assert "snapshotctl up" in said.out
    said = run("doctor", "--server", "u:pw@127.0.0.1:1", exits=Exit.FAILED)
    assert "fail  connection: cannot reach nats://127.0.0.1:1 (from --server)" in said.out
    assert "pw" not in said.out
    monkeypatch.setenv("NATS_NKEY", str(tmp_path / "missing.nk"))
    said = run("doctor", "--server", "127.0.0.1:1", "-o", "json", exits=Exit.FAILED)
    [trouble] = [f for f in json.loads(said.out) if f["level"] == "fail"]
    assert "missing.nk cannot be read" in trouble["what"]


@pytest.fixture
def kept(run: Run, tmp_path: Path) -> Path:
    """The folder of a local cluster that does not run."""
    state = tmp_path / "xdg_state_home" / "snapback" / "kept"
    (state / "logs").mkdir(parents=True)
    nodes = [NodeSpec(name="node-1", gpus=1, gpu_memory=1024)]
    page = "http://127.0.0.1:1/"
    write_record(cluster_record(state, url="nats://127.0.0.1:1", nodes=nodes, page=page))
    return state


def test_a_bundle_without_a_cluster_holds_what_this_machine_knows(
    run: Run, kept: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SNAPBACK_SECRET_TOKEN", "do-not-show")
    (kept / "logs" / "operator.log").write_text("one\n")
    path = tmp_path / "x.tar.gz"
    shown = json.loads(run("--cluster", "kept", "bundle", "-f", str(path), "-o", "json").out)
    assert [found["what"] for found in shown["missing"]] == ["everything of the cluster"]
    with tarfile.open(path) as archive:
        names = {entry.name for entry in archive.getmembers()}
        settings = archive.extractfile("x/settings.json")
        assert settings is not None
        assert json.load(settings)["SNAPBACK_SECRET_TOKEN"] == "<redacted>"
    assert names == {f"x/{member['name']}" for member in shown["members"]}
    assert {"x/README.txt", "x/versions.json", "x/doctor.txt", "x/logs/operator.log"} <= names


def test_the_log_of_a_service_is_shown_when_nothing_runs(run: Run, kept: Path) -> None:
    (kept / "logs" / "operator.log").write_text("one\n\ttwo\x1b[31m\x07\n")
    said = run("--cluster", "kept", "logs", "operator", "--tail", "1")
    assert said.out == "\ttwo\n"
    said = run("--cluster", "kept", "logs", "operator", "-o", "json")
    first = json.loads(said.out.splitlines()[0])
    assert first == {"source": "operator", "line": "one"}
    (kept / "logs" / "node-1-agent.log").write_text("three\nfour\n")
    for word in ("agent", "agent@node-1", "node-1-agent"):
        assert run("--cluster", "kept", "logs", word, "--tail", "1").out == "four\n"
    said = run("--cluster", "kept", "logs", "page", exits=Exit.NOT_FOUND)
    assert "name one of: operator, agent@node-1" in said.err


def test_a_program_of_a_cluster_that_is_down_is_not_started_alone(run: Run, kept: Path) -> None:
    for name in ("operator", "page", "nats-server", "node-1"):
        said = run("sim", "restart", name, "--cluster", "kept", exits=Exit.REFUSED)
        assert "'kept' is down" in said.err
        assert "next: start all of it: snapshotctl up --cluster kept" in said.err


def test_the_clusters_of_this_machine_are_listed_without_a_server(run: Run, kept: Path) -> None:
    said = run("clusters")
    [row] = [line for line in said.out.splitlines() if str(kept) in line]
    assert row.split() == ["kept", "down", "0/0", "-", str(kept)]
    found = json.loads(run("clusters", "-o", "json").out)
    [mine] = [cluster for cluster in found if cluster["path"] == str(kept)]
    assert (mine["state"], mine["pids"], mine["ended"]) == ("down", {}, [])


def test_the_version_needs_no_server(run: Run) -> None:
    said = run("version", "--client", "-o", "json")
    [row] = json.loads(said.out)
    assert (row["program"], row["version"]) == ("snapshotctl", metadata.version("snapback-ctl"))
    said = run("version")
    assert said.out.splitlines()[1].startswith("snapshotctl ")
    assert "no server" in said.err


def test_the_address_of_the_page_is_printed_where_there_is_no_display(
    run: Run, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    said = run("open", "--cluster", "kept")
    assert said.out == "http://127.0.0.1:1/\n"
    said = run("open", "--server", "127.0.0.1:2", exits=Exit.NOT_FOUND)
    assert "SNAPBACK_PAGE_URL" in said.err
    monkeypatch.setenv("SNAPBACK_PAGE_URL", "http://page.test/")
    assert json.loads(run("open", "-o", "json").out) == {"page": "http://page.test/"}


def test_the_page_is_opened_where_there_is_a_display(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened = tmp_path / "opened"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" >{opened}\n')
    browser.chmod(0o755)
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setenv("BROWSER", str(browser))
    monkeypatch.setenv("SNAPBACK_PAGE_URL", "http://page.test/")
    run("open", "--no-browser")
    assert not opened.exists()
    subprocess.run([sys.executable, "-m", "snapshotctl", "open"], check=True)
    assert opened.read_text() == "http://page.test/\n"


def test_the_script_of_a_shell_asks_by_the_variable_that_is_answered(run: Run) -> None:
    for shell in ("bash", "zsh", "fish"):
        assert f"_SNAPSHOTCTL_COMPLETE=complete_{shell}" in run("completion", shell).out


COMPLETED = {
    "dea": ["dead"],
    "get po": ["pods"],
    "get pods ": [],
    "get nothing ": [],
    "wait pod/": [],
    "cordon ": [],
    "abort x": [],
    "orders ": ["show"],
    "--server http://x cordon ": [],
    "schema dump": ["dump_order.v1"],
    "-o y": ["yaml"],
    "-o w": ["wide"],
    "explain DeviceTooS": ["DeviceTooSmall"],
    "explain x": [],
    "wait pod/x --for del": ["delete"],
    "logs ": [],
    "ask ": [],
    "exec ": [],
    "--cluster ": ["kept"],
    "down --name k": ["kept"],
}


def test_completion_offers_what_it_knows_and_without_a_server_says_nothing(
    run: Run, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_SNAPSHOTCTL_COMPLETE", "complete_bash")
    wrong = {}
    for line, offered in COMPLETED.items():
        monkeypatch.setenv("COMP_WORDS", f"snapshotctl {line}")
        monkeypatch.setenv("COMP_CWORD", str(len(line.split(" "))))
        said = run(exits=None)
        if (said.code, said.out.split(), said.err) != (0, offered, ""):
            wrong[line] = said
    assert wrong == {}


def test_what_a_reason_says_to_run_is_a_command_that_exists() -> None:
    verbs = {"artifacts": ARTIFACTS, "sim": SIM}
    named = [
        (name, *words.split())
        for name, reason in REASONS.items()
        for words in re.findall(r"`snapshotctl ([^`]*)`", reason.fix)
    ]
    wrong = [
        (name, command, *rest)
        for name, command, *rest in named
        if command not in (*COMMANDS, "--version", "COMMAND")
        or (command in verbs and rest[0] not in verbs[command])
    ]
    assert len(named) > 50
    assert wrong == []


def test_the_help_lists_every_command_and_every_exit_code(run: Run) -> None:
    said = run("--help")
    assert [word for word in COMMANDS if f"\n  {word} " not in said.out] == []
    assert [code.value for code in Exit if f" {code.value}  " not in said.out] == []


WRONG = {
    "'get'": "gett",
    "KIND [NAME]": "get",
    "dynamocheckpoints": "get nothing/x; describe thing x",
    "exclude each other": "get pod/x -l a=b; get pod x -A; events x -A",
    "app in (llm, asr)": "get pods -l 'a>b'",
    "No_Name": "get No_Name; checkpoint x --checkpoint-id No_Name",
    "--nonsense": "get pods --nonsense",
    "'yaml'": "-o xml nodes; get pods -o xml",
    "--filename": "apply; identity; validate",
    "'trtllm'": "checkpoint x --framework pod",
    "a name is missing": "delete pods; describe pods",
    "condition=Ready": "wait pod/x --for Ready",
    "5m": (
        "wait pod/x --timeout soon; ask x hello --timeout soon; verify x --timeout soon; "
        "watch x --timeout soon; abort x --timeout soon"
    ),
    "between 1 and": "up --nodes 0",
    "4GiB": "up --gpu-memory much",
    "lower-case": "up --name ../x",
    "between": "demo --size-mib 1",
    "100 B is not between 4 MiB and 1024 TiB": "up --gpu-memory 100",
    "'--output' / '-o': 'name' is not one of": "get pods -o name",
    "POD|SERVICE": "logs",
    "-1": "logs x --tail -1",
    "--container is for a pod": "logs operator -c main",
    "gms@NODE": "logs saver@node-1",
    "exec x -- env": "exec x",
    "a Node has no process": "exec node/x -- env",
    "the question is missing": "ask x",
    "ask, chat, raw or a /PATH": "ask x hello --as shout",
    "one line": "ask x 'a\nb' --as raw",
    "between 1 and 65535": "ask x hello --to 99999",
    "--to worker.sock or --to 8000": "ask x hello --to ../y",
    "SNAPBACK_RUN": "demo --on .",
    "--node": "keys --folder x",
    "'a/b'": "keys --folder x --node a/b",
    "NAME": "trace; verify; watch; abort",
    "a Pod holds no artifact": "verify pod/x; artifacts show pod/x",
    "NAME|REASON": "explain",
    "did you mean DeviceTooSmall": "explain DeviceToSmall",
    "docs/troubleshooting.md": "explain Xyzzy",
    "x_y": "explain x_y",
    "No_Space": "events -n No_Space",
    "show": "artifacts",
    "with another one, or with a node": "artifacts diff x",
    "diff x B, or --node NODE": "artifacts diff x y --node n",
    "--manifest FILE": "checkpoint",
    "either": "checkpoint x --manifest y.yaml",
    "missing.yaml": "checkpoint --manifest missing.yaml",
    "is missing": "restore",
    "once": "restore a --checkpoint-id b",
    "restart": "sim",
    "snapshotctl sim crash node-1 --at copy-state": "sim crash",
    "--at STEP is missing": "sim crash node-1",
    "dump: freeze, copy-state, thaw, stage": "sim crash node-1 --at melt",
    "--verb load (gms) or --verb place (agent)": "sim fail node-1 --at check",
    "the agent has no step": "sim fail node-1 --at write --service agent",
    "'copy'": "sim fail node-1 --at write --verb copy",
    "agent, gms": "sim stall node-1 --at gate --service nats; sim restart node-1 --service nats",
    "exclude": "sim stall node-1 --at gate --clear",
    "a node, or show ORDER": "orders a b",
    "snapshotctl orders --all": "orders show",
    "found 3 words": "orders show a b",
    "requeue": "dead",
    "snapshotctl dead show 3": "dead show; dead show x",
    "greater than or equal to 1": "dead requeue 0",
    "snapshotctl cordon node-1": "cordon",
    "to do without: snapshotctl cordon node-1": "drain node-1",
    "snapshotctl uncordon node-1": "uncordon",
    "snapshotctl delete pod x": "abort pod/x",
    "snapshotctl delete pod POD": "abort srestore/x",
    "a Node has no capture": "abort node/x",
    "ends with .tar.gz": "bundle --file cluster.yaml",
    "snapshotctl bundle --file report.tar.gz": "bundle --reports -1",
    "'fish'": "completion tcsh",
    "'A' is no NAME=VALUE": "restore x --env A",
    "--env is for a restore without --manifest": "restore x --env A=b --manifest /dev/null",
    "'Node_1' is not a name: lower-case letters": "cordon Node_1; orders Node_1; dead ls Node_1",
    "<verb>-<uid>": "orders show dump-me",
    "nats://127.0.0.1:4222": "doctor --server http://x; get pods --server http://x",
    "did you mean report?": "schema repot",
    "'b:x' is not the address": "get pods --server a:1,u:pw@b:x",
    "Capture and restore:": "",
    "'x.tar.gz' is not one of": "bundle -o x.tar.gz",
    "--name a and --cluster b are two clusters": "down --name a --cluster b",
    "--own-operator is for a Kubernetes clu": "restore x --own-operator --server a",
    "--context or --kubeconfig": "restore x --own-operator --server a",
}
"""Words of an answer, and the commands that it is given to."""


def test_wrong_arguments_are_answered_with_the_right_ones(run: Run) -> None:
    wrong = {}
    for answer, typed in WRONG.items():
        for command in typed.split("; "):
            said = run(*shlex.split(command), exits=None)
            is_right = answer in said.err and "Traceback" not in said.err
            if (said.code, said.out, is_right) != (Exit.USAGE, "", True):
                wrong[command] = said
    assert wrong == {}


NEED_A_SERVER = """
get pods; get nothing; get pods -w; logs x; logs operator; exec x -- env; ask x hello; open; nodes
trace x; delete pod/x; wait pod/x; verify x; explain x; describe pod x; events; events --follow
watch x; artifacts ls; artifacts gc --dry-run; checkpoint x; restore x; sim fail n --at gate
orders; orders show dump-00000000-0000-0000-0000-000000000001; dead ls; dead show 1; dead requeue 1
cordon n; uncordon n; abort x
"""


def test_without_a_server_every_command_says_how_to_start_one(run: Run) -> None:
    commands = re.split(r"; |\n", NEED_A_SERVER.strip())
    said = {command: run(*command.split(), exits=None) for command in commands}
    wrong = {
        command: found
        for command, found in said.items()
        if found.code != Exit.UNREACHABLE or "snapshotctl up" not in found.err
    }
    assert wrong == {}


def test_a_server_that_does_not_answer_is_named_with_where_it_came_from(run: Run) -> None:
    for words in (["nodes"], ["wait", "pod/x"]):
        said = run(*words, "--server", "u:secret@127.0.0.1:1", exits=Exit.UNREACHABLE)
        assert "nats://127.0.0.1:1 (from --server)" in said.err
        assert "secret" not in said.err


def test_each_named_file_is_read_and_a_wrong_one_is_refused(run: Run, tmp_path: Path) -> None:
    good, bad, missing = (tmp_path / f"{name}.yaml" for name in ("good", "bad", "missing"))
    good.write_text("{apiVersion: v1, kind: Pod, metadata: {name: w}, spec: {containers: []}}")
    bad.write_text("a: 1\nb: [\n")
    said = run("validate", "-f", str(bad), "-f", str(good), exits=Exit.REFUSED)
    assert "bad.yaml:3" in said.err
    assert "missing.yaml" in run("apply", "-f", str(missing), exits=Exit.USAGE).err


def test_a_folder_is_the_manifests_in_it_by_their_names(run: Run, tmp_path: Path) -> None:
    refused = run("validate", "-f", str(tmp_path), exits=Exit.USAGE).err
    assert f"{tmp_path} has no file that ends in .json, .yaml, .yml" in refused
    for name in ("b.yml", "a.json", "notes.txt"):
        (tmp_path / name).write_text(
            f"{{apiVersion: v1, kind: ConfigMap, metadata: {{name: {name[0]}}}}}"
        )
    lines = run("validate", "-f", str(tmp_path)).out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [f"{tmp_path}/a.json", f"{tmp_path}/b.yml"]


CHECKPOINT = """\
apiVersion: nvidia.com/v1alpha1
kind: DynamoCheckpoint
metadata: {name: llama}
spec:
  identity: {model: meta-llama/Llama-2-7b-hf, backendFramework: vllm, tensorParallelSize: 1}
---
kind: Deployment
---
apiVersion: nvidia.com/v1alpha1
kind: DynamoCheckpoint
metadata: {namespace: ns, name: other}
spec: {job: {}, identity: {model: m, backendFramework: sglang, extraParameters: {a: <b>}}}
"""


def test_the_identity_of_each_checkpoint_of_a_file_is_printed_without_a_server(
    run: Run, tmp_path: Path
) -> None:
    file = tmp_path / "two.yaml"
    file.write_text(CHECKPOINT)
    said = run("identity", "-f", str(file))
    first, second = said.out.splitlines()
    assert first == "96429b2725761a09  llama"
    values = json.loads(run("identity", "-f", str(file), "-o", "json").out)
    assert [second] == [f"{value['identityHash']}  other" for value in values[1:]]
    assert [value["namespace"] for value in values] == [None, "ns"]
    assert r'"extraParameters":{"a":"\u003cb\u003e"}' in values[1]["hashed"]


TEMPLATE = "podTemplateSpec: {spec: {containers: [{name: main, image: i, volumeMounts: [%s]}]}}"
MANIFESTS = f"""\
apiVersion: nvidia.com/v1alpha1
kind: DynamoCheckpoint
metadata: {{name: llama}}
spec:
  identity: {{model: m, backendFramework: vllm}}
  job: {{{TEMPLATE % "{name: models, mountPath: /models}"}}}
---
apiVersion: v1
kind: ConfigMap
"""


def test_manifests_for_a_cluster_are_right_without_a_server_and_what_is_missing_is_a_warning(
    run: Run, tmp_path: Path
) -> None:
    file = tmp_path / "two.yaml"
    file.write_text(MANIFESTS)
    said = run("validate", "-f", str(file))
    left = "not checked: ConfigMap of v1: Kubernetes checks it"
    assert said.out.splitlines() == [f"{file}:1: right", f"{file}:8: {left}"]
    assert f"warning: {file}:6: spec.job.podTemplateSpec.spec.containers[0]" in said.err
    first, second = json.loads(run("validate", "-f", str(file), "-o", "json").out)
    assert (len(first["warnings"]), second["warnings"]) == (1, [])
    assert (first["notChecked"], second["notChecked"]) == ("", left.partition(": ")[2])


CONFIG_MAP = "apiVersion: v1\nkind: ConfigMap"


@each(
    ("words", "text", "problems"),
    [
        (
            ["identity"],
            CHECKPOINT.replace("backendFramework: vllm", "backendFramework: pod"),
            ["two.yaml:5: spec.identity.backend", "next: correct the fields"],
        ),
        (
            ["identity"],
            CHECKPOINT.replace("Size: 1", "Size: -1, maxModelLen: x, seed: 1"),
            ["Size: -1 is less than", "maxModelLen: expected integer or null", "identity.seed: "],
        ),
        (
            ["identity"],
            CHECKPOINT.replace("identity: {model: m", "identities: {model: m"),
            ["two.yaml:12: spec.identity: "],
        ),
        (
            ["identity"],
            CHECKPOINT.replace("v1alpha1", "v2"),
            ["two.yaml:1: apiVersion: ", "two.yaml:9: apiVersion: "],
        ),
        (["identity"], CHECKPOINT.replace("DynamoCheckpoint", "Pod"), ["no DynamoCheckpoint"]),
        (
            ["validate"],
            MANIFESTS.replace("model: m,", "model: 7, seed: 1,"),
            ["two.yaml:5: spec.identity.model: ", "two.yaml:5: spec.identity.seed: "],
        ),
        (
            ["validate", "--standalone"],
            MANIFESTS.replace("name: main, ", "name: main, tty: true, "),
            ["containers[0].tty: ", "containers[0].command: is required", "two.yaml:9: kind: "],
        ),
        (
            ["validate"],
            MANIFESTS.replace("name: main, ", "name: main, env: [{name: A, value: 5}], "),
            ["containers[0].env[0].value: expected string, found 5; put it in quotes"],
        ),
        (
            ["validate"],
            MANIFESTS.replace(CONFIG_MAP, MANIFESTS.partition("---")[0]),
            ["two.yaml:10: metadata.name: llama appears twice"],
        ),
    ],
)
def test_what_is_wrong_in_a_file_is_refused_by_every_field_value_and_line(
    run: Run, tmp_path: Path, words: list[str], text: str, problems: list[str]
) -> None:
    file = tmp_path / "two.yaml"
    file.write_text(text)
    said = run(*words, "-f", str(file), exits=Exit.REFUSED)
    assert [problem for problem in problems if problem not in said.err] == []
    assert said.out == ""


def test_a_full_disk_is_an_error_and_no_traceback() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "snapshotctl", "--version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, "error: No space left on device\n")


OPTIONS = {
    "get pods -o json": "-o json get pods",
    "get -ojson pods": "-ojson get pods",
    "trace x --output=yaml": "--output=yaml trace x",
    "get pods --server a --cluster b": "--server a --cluster b get pods",
    "--server a get": "--server a get",
    "restore x --own-operator": "--own-operator restore x",
    "get -- -o json": "get -- -o json",
    "get pods -o": "-o get pods",
    "get -o=json pods -n=a": "-o json get pods -n a",
    "-n a get pods": "get pods -n a",
    "-n a exec w -- -n": "exec w -n a -- -n",
    "up --name x": "up --name x",
    "up --cluster x": "--cluster x up",
    "bundle -f x.tar.gz -o json": "-o json bundle -f x.tar.gz",
    "": "",
}


def test_common_options_move_in_front_of_the_command() -> None:
    moved = {command: shlex.join(hoisted(shlex.split(command))) for command in OPTIONS}
    assert moved == OPTIONS


def test_a_local_cluster_is_named_by_one_option_for_all_commands(run: Run) -> None:
    for words in (["down", "--cluster", "none"], ["sim", "restart", "node-1", "--cluster", "none"]):
        assert "no local cluster 'none'" in run(*words, exits=Exit.NOT_FOUND).err
    assert "--name" not in run("down", "--help").out


ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = str(ROOT / "deploy" / "examples" / "checkpoint.yaml")

SLOW = {"aiohttp", "nats", "opentelemetry"}
"""Modules that no command needs before it connects."""
UNUSED = SLOW | {"asyncio", "jsonschema", "nacl", "rich", "snapshot_api", "yaml"}
"""Modules that are not needed to list the commands."""

WITHOUT_A_SERVER = (("identity", "-f", EXAMPLE), ("explain", "DeviceTooSmall"))

PROGRAM = """
import json, sys
from snapshotctl.cli import COMMANDS, run
for words in json.loads(sys.argv[1]) + [[name, "--help"] for name in COMMANDS]:
    code = run(words)
    print("imported:", json.dumps([words, code, sorted(sys.modules)]))
"""


def test_a_command_imports_nothing_slow_that_it_does_not_need() -> None:
    first = (("--version",), ("--help",), *WITHOUT_A_SERVER)
    words = [sys.executable, "-c", PROGRAM, json.dumps(first)]
    shown = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    lines = [line for line in shown.splitlines() if line.startswith("imported: ")]
    rows = [json.loads(line.partition(" ")[2]) for line in lines]
    assert len(rows) == len(first) + len(COMMANDS)
    assert [(words, code) for words, code, _ in rows if code] == []
    imports = [set(modules) for _, _, modules in rows]
    client = "snapshotctl.adapters.operator_client"
    # The version and the help import no command.
    for imported in imports[:2]:
        assert "typer" in imported
        assert imported & UNUSED == set()
        assert not [name for name in imported if name.startswith("snapshotctl.commands")]
    # A command without a server, and the help of every command, import no client.
    for (name, *_), imported in zip(WITHOUT_A_SERVER, imports[2:4], strict=True):
        assert f"snapshotctl.commands.{name}" in imported
    assert [imported & {*SLOW, client} for imported in imports if imported & {*SLOW, client}] == []
    assert {module_of(name) for name in COMMANDS} <= imports[-1]
