"""What kubectl is told to do, and what it says, as exit codes and next steps of ours."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from snapshot_api.kinds import KINDS
from snapshot_shared.errors import NotFound
from snapshotctl import cli
from snapshotctl.adapters.kubectl import Kubernetes
from snapshotctl.domain import kubernetes
from snapshotctl.domain.exits import Exit, WrongArguments
from snapshotctl.domain.sources import ServiceNamed
from snapshotctl.domain.targets import Target
from snapshotctl.tools import Tools
from snapshotctl.views.installation import Asked
from tests.unit.snapshotctl.conftest import Run
from tests.unit.tables import each

FORBIDDEN = (
    'Error from server (Forbidden): secrets "snapback-nats-snapshotctl" is forbidden: User "ada"'
    ' cannot get resource "secrets" in API group "" in the namespace "snapback-system"'
)


@each(
    ("said", "kind", "step"),
    [
        (FORBIDDEN, "forbidden", "can-i"),
        ('error: context was not found for specified context: "x"', "arguments", "get-contexts"),
        ('error: context "x" does not exist', "arguments", "get-contexts"),
        ("error: stat /no: no such file or directory", "arguments", "--kubeconfig"),
        ("Unable to connect to the server: EOF", "unreachable", "kubectl version"),
        (
            "E1123 memcache.go:265] see\nThe connection to the server localhost:8080 was refused",
            "unreachable",
            "kubectl version",
        ),
        (
            'error: resource mapping not found for name: "a": no matches for kind "Snapshot"',
            "missing",
            "docs/kubernetes.md",
        ),
        ('Error from server (NotFound): services "x" not found', "missing", ""),
        ("admission webhook denied the request: spec.job: x", "refused", ""),
    ],
)
def test_an_error_of_kubectl_has_its_exit_code_and_next_step(
    said: str, kind: str, step: str
) -> None:
    problem = kubernetes.problem_in(said)
    assert problem.kind == kind
    assert step in problem.next_step
    assert problem.message in said.removeprefix("error: ")


def test_silence_is_a_refusal_that_says_so() -> None:
    assert kubernetes.problem_in("\n").message == "kubectl failed, and does not say why"


def test_the_service_of_the_server_is_taken_and_not_that_of_its_pods() -> None:
    def service(name: str, address: str) -> dict[str, object]:
        return {"metadata": {"namespace": "s", "name": name}, "spec": {"clusterIP": address}}

    items = [service("a-nats", "10.0.0.7"), service("a-nats-headless", "None")]
    assert kubernetes.nats_services({"items": items}) == [kubernetes.NatsService("s", "a-nats")]


def test_an_operator_that_runs_elsewhere_has_the_settings_that_hold_there() -> None:
    def deployment(name: str, **env: str) -> dict[str, object]:
        rows = [{"name": key, "value": value} for key, value in env.items()]
        rows.append({"name": "SNAPBACK_NAMESPACE", "valueFrom": {}})  # type: ignore[dict-item]
        pod = {"spec": {"containers": [{"name": "operator", "env": rows}]}}
        return {"metadata": {"name": name}, "spec": {"template": pod}}

    kept = {
        "SNAPBACK_GMS_IMAGE": "gms:1",
        "SNAPBACK_NAMESPACE_SELECTOR": "a=b",
        "SNAPBACK_KEEP_COUNT": "5",
    }
    names = ("NATS_URL", "NATS_CREDENTIALS", "HTTP_ADDRESS", "WEBHOOK_ADDRESS")
    of_pod = {"PATH": "/bin", **{f"SNAPBACK_{name}": "x" for name in names}}
    items = [deployment("a-operator", **kept, **of_pod), deployment("b-operator", SNAPBACK_X="1")]
    assert kubernetes.operator_variables({"items": items}, "a-operator") == kept
    assert kubernetes.operator_variables({"items": []}, "a-operator") == {}


def test_an_object_is_found_where_the_api_server_has_it() -> None:
    for kind, namespace, path in (
        ("Pod", "team", "/api/v1/namespaces/team/pods/x"),
        ("Job", "team", "/apis/batch/v1/namespaces/team/jobs/x"),
        ("Node", None, "/api/v1/nodes/x"),
    ):
        assert kubernetes.api_path(Target(KINDS[kind], namespace, "x")) == path


PROGRAM = """\
#!{python} -IS
import json, pathlib, sys
folder = pathlib.Path(__file__).parent
if "config" in sys.argv:
    sys.exit(print((folder / "namespace").read_text(), end=""))
with (folder / "calls").open("a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
if "get" in sys.argv and (folder / "objects").exists():
    objects = json.loads((folder / "objects").read_text())
    _, _, _, kind, *rest = sys.argv[1:]
    rest = [word for word in rest if word not in ("--output=json", "--ignore-not-found")]
    if rest[:1] == ["--namespace"] and kind == "pods":
        if rest[1] == "secret":
            sys.exit("Error from server (Forbidden): pods is forbidden: User ada cannot list pods")
        named = [[rest[1], name] for name in rest[2:]]
        found = [each for each in objects["pods"] if list(each["metadata"].values()) in named]
        if len(named) == 1:
            sys.exit(print(json.dumps(found[0]) if found else ""))
    elif kind.startswith("snapshotrestores"):
        found = objects["restores"]
    else:
        found = objects["workloads"] if "--all-namespaces" in rest else []
    print(json.dumps({{"items": found}}))
elif "get" in sys.argv:
    print((folder / "pods").read_text())
elif "exec" in sys.argv:
    print('{{"answer": "amber"}}')
    sys.stderr.write((folder / "err").read_text())
    sys.exit(int((folder / "code").read_text()))
elif "apply" in sys.argv:
    with (folder / "given").open("a") as given:
        given.write(sys.stdin.read() + "\\n")
    print((folder / "said").read_text(), end="")
else:
    print("a line")
"""


class Kubectl:
    """A kubectl that writes down how it is called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.client = Kubernetes(None, "there")
        program = folder / "kubectl"
        program.write_text(PROGRAM.format(python=sys.executable))
        program.chmod(0o755)
        self.answers(code="0", err="", namespace="")
        self.pods()

    def answers(self, **files: str) -> None:
        """Say what it exits with, prints and knows."""
        for name, text in files.items():
            (self.folder / name).write_text(text)

    def pods(self, *names: str) -> None:
        items = [
            {"metadata": {"namespace": "sys", "name": name}, "spec": {"nodeName": f"on-{name}"}}
            for name in names
        ]
        self.answers(pods=json.dumps({"items": items}))

    def dry_run(self, *documents: dict[str, Any], trace: str = "") -> list[Any]:
        """Apply documents in the context of this kubectl, and store nothing."""
        given = [msgspec.Raw(json.dumps(document).encode()) for document in documents]
        return [*self.client.apply(given, trace, dry_run=True)]

    @property
    def calls(self) -> list[list[str]]:
        """Those that reach the cluster."""
        return [json.loads(line) for line in (self.folder / "calls").read_text().splitlines()]

    @property
    def given(self) -> list[str]:
        """What each `apply` was given."""
        return (self.folder / "given").read_text().splitlines()


@pytest.fixture
def kubectl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Kubectl:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("SNAPBACK_PAGE_URL", raising=False)
    return Kubectl(tmp_path)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    return Run(monkeypatch, capfd, "--context", "there")


def test_the_log_of_a_pod_is_shown_by_kubectl(run: Run, kubectl: Kubectl) -> None:
    assert run("logs", "w", "-n", "ns", "-f", "--tail", "5").out == "a line\n"
    assert run("logs", "pod/w", "-c", "main").out == "a line\n"
    to = ["--context", "there", "logs", "w", "--namespace"]
    assert kubectl.calls == [
        [*to, "ns", "--all-containers", "--prefix", "--follow", "--tail=5"],
        [*to, "default", "--container=main", "--tail=-1"],
    ]


def test_what_names_no_namespace_is_in_that_of_the_context(run: Run, kubectl: Kubectl) -> None:
    kubectl.answers(namespace="team-a", said="thing.nvidia.com/x created (server dry run)\n")
    run("logs", "w")
    run("logs", "w", "-n", "default")
    assert [call[call.index("--namespace") + 1] for call in kubectl.calls] == ["team-a", "default"]
    kubectl.dry_run({"kind": "Thing", "metadata": {"name": "x"}})
    [item] = json.loads(kubectl.given[-1])["items"]
    assert item["metadata"]["namespace"] == "team-a"


def test_all_pods_of_a_service_that_is_there_twice_are_shown(run: Run, kubectl: Kubectl) -> None:
    kubectl.pods("operator-a", "operator-b")
    run("logs", "operator")
    *_, shown = kubectl.calls
    assert any("component=operator" in word for word in shown if word.startswith("--selector="))
    assert "--prefix" in shown


def test_the_log_of_a_service_is_that_of_its_container(run: Run, kubectl: Kubectl) -> None:
    kubectl.pods("snapback-node-x")
    assert run("logs", "agent@n", "--tail", "1").out == "a line\n"
    looked, shown = kubectl.calls
    assert "--field-selector=status.phase!=Pending,spec.nodeName=n" in looked
    assert any("app.kubernetes.io/component=node" in word for word in looked)
    assert shown[2:] == ["logs", "snapback-node-x", "--namespace", "sys", *shown[6:]]
    assert shown[6:] == ["--container=agent", "--tail=1"]


def test_a_service_of_kubernetes_that_is_missing_or_of_several_nodes_is_asked_for(
    kubectl: Kubectl,
) -> None:
    with pytest.raises(NotFound, match="no pod of operator"):
        kubectl.client.log_of(ServiceNamed("operator"))
    kubectl.pods("a", "b")
    with pytest.raises(WrongArguments) as refused:
        kubectl.client.log_of(ServiceNamed("gms"))
    assert refused.value.next_step == "name gms@on-a or gms@on-b"


def test_a_program_runs_in_the_container_and_its_exit_code_is_that_of_the_command(
    run: Run, kubectl: Kubectl
) -> None:
    kubectl.answers(code="7")
    assert "amber" in run("exec", "w", "-c", "main", "--", "ls", "-l", exits=7).out
    [call] = kubectl.calls
    assert call[2:] == [
        *("exec", "w", "--namespace", "default", "--stdin"),
        *("--container=main", "--", "ls", "-l"),
    ]


def test_a_worker_is_asked_by_a_program_in_its_container(run: Run, kubectl: Kubectl) -> None:
    answer = json.loads(run("ask", "w", "Who am I?", "-o", "json").out)
    assert answer == {"pod": "w", "namespace": "default", "answer": {"answer": "amber"}}
    [call] = kubectl.calls
    *_, python, _, source, asked = call
    assert python == "python3"
    assert "def main(" in source
    question = {"op": "ask", "prompt": "Who am I?"}
    assert json.loads(json.loads(asked)["line"]) == question
    kubectl.answers(code="1")
    said = run("ask", "w", "Who am I?", exits=Exit.FAILED)
    assert "pod w gave no answer: exit code 1" in said.err


def test_why_a_worker_gave_no_answer_is_what_the_program_said_and_not_how_kubectl_ended(
    run: Run, kubectl: Kubectl
) -> None:
    kubectl.answers(code="1", err="x.sock: refused\ncommand terminated with exit code 1\n")
    said = run("ask", "w", "Who am I?", exits=Exit.FAILED)
    assert "pod w gave no answer: x.sock: refused\n" in said.err


def test_the_chart_has_no_page_to_open(run: Run, kubectl: Kubectl) -> None:
    assert "docs/page.md" in run("open", exits=Exit.NOT_FOUND).err


def test_what_is_there_keeps_its_trace_so_that_it_may_be_unchanged(kubectl: Kubectl) -> None:
    trace = {"nvidia.com/traceparent": "00-live"}
    there = {"kind": "Thing", "metadata": {"namespace": "n", "name": "x", "annotations": trace}}
    said = "thing.nvidia.com/x configured (server dry run)\n"
    kubectl.answers(said=said, pods=json.dumps(there))
    kubectl.dry_run(named("Thing", "n", "x", spec={}), trace="new")
    first, last = (json.loads(text)["items"][0]["metadata"] for text in kubectl.given)
    assert first["annotations"] == {"nvidia.com/traceparent": "new"}
    assert last["annotations"] == trace


def test_a_dry_run_asks_the_api_server_and_stores_nothing(kubectl: Kubectl) -> None:
    said = ["created", "configured", "unchanged"]
    lines = [f"thing.nvidia.com/x{n} {word} (server dry run)\n" for n, word in enumerate(said)]
    kubectl.answers(said="".join(lines))
    documents = [{"kind": "Snapshot", "metadata": {"name": f"x{n}"}} for n in range(len(said))]
    found = kubectl.dry_run(*documents)
    assert [(item.name, item.action) for item in found] == [
        ("x0", "created"),
        ("x1", "configured"),
        ("x2", "unchanged"),
    ]
    assert {call[2] for call in kubectl.calls} == {"apply", "get"}
    for call in (kubectl.calls[0], kubectl.calls[-1]):
        assert call[2:] == ["apply", "--filename", "-", "--dry-run=server"]


# Which pods the doctor asks for.


def named(kind: str, namespace: str, name: str, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "metadata": {"namespace": namespace, "name": name}, **more}


def restore(namespace: str, pod: str, driver: str = "criu") -> dict[str, Any]:
    spec, status = {"podRef": {"name": pod, "uid": pod}}, {"state": "Restored", "driver": driver}
    return named("SnapshotRestore", namespace, f"restore-{pod}", spec=spec, status=status)


def seen(kubectl: Kubectl, *restores: dict[str, Any]) -> Any:
    spec: dict[str, Any] = {"template": {"spec": {"containers": []}}}
    node = named("DaemonSet", "snapback", "snapback-node", spec=spec)
    node["metadata"]["labels"] = {"app.kubernetes.io/component": "node"}
    pods = [named("Pod", space, name) for space in ("a", "b") for name in ("one", "two", "three")]
    objects = {"workloads": [node], "restores": restores, "pods": pods}
    kubectl.answers(objects=json.dumps(objects))
    return kubectl.client.installation()


def test_the_pods_of_restored_processes_are_read_if_they_may_be(kubectl: Kubectl) -> None:
    found = seen(
        kubectl,
        restore("b", "one"),
        restore("a", "one"),
        restore("a", "gone"),
        restore("a", "two", "criu+cuda"),
        restore("a", "three", "cooperative"),
    )
    assert len(found.restores.items) == 5
    pods = [tuple(each["metadata"].values()) for each in found.clones.items]
    assert pods == [("a", "one"), ("a", "two"), ("b", "one")]
    assert seen(kubectl, restore("a", "three", "cooperative")).clones == Asked([])
    failure = seen(kubectl, restore("secret", "one")).clones.failure
    assert failure.reason == "NotPermitted"


def test_a_plug_in_of_kubectl_uses_its_current_context_unless_another_place_is_named() -> None:
    tools = Tools(None, None, "table", is_plugin=True)
    assert tools.kubernetes is not None
    assert tools.kubernetes.name == "the current context of kubectl"
    assert Tools("127.0.0.1", None, "table", is_plugin=True).kubernetes is None
    assert Tools(None, "default", "table", is_plugin=True).kubernetes is None
    assert Tools(None, None, "table").kubernetes is None


def test_kubectl_is_given_what_may_follow_its_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.complete(["get", "--names"]) == 0
    assert cli.complete(["check"]) == 0
    first, *rest, last = capsys.readouterr().out.splitlines()
    assert [first, last] == [":4", ":4"]
    assert [line.partition("\t")[0] for line in rest] == ["checkpoint"]
