"""What kubectl says, as exit codes and next steps of ours."""

from __future__ import annotations

import pytest

from snapshot_shared.objects.kinds import KINDS
from snapshotctl.domain.kubernetes import (
    NatsService,
    api_path,
    nats_services,
    operator_variables,
    problem_in,
)
from snapshotctl.domain.targets import Target
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
    problem = problem_in(said)
    assert problem.kind == kind
    assert step in problem.next_step
    assert problem.message in said.removeprefix("error: ")


def test_silence_is_a_refusal_that_says_so() -> None:
    assert problem_in("\n").message == "kubectl failed, and does not say why"


def test_the_service_of_the_server_is_taken_and_not_that_of_its_pods() -> None:
    def service(name: str, address: str) -> dict[str, object]:
        return {"metadata": {"namespace": "s", "name": name}, "spec": {"clusterIP": address}}

    items = [service("a-nats", "10.0.0.7"), service("a-nats-headless", "None")]
    assert nats_services({"items": items}) == [NatsService("s", "a-nats")]


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
    of_pod = {
        "SNAPBACK_NATS_URL": "nats://snapback-nats",
        "SNAPBACK_NATS_CREDENTIALS": "/keys/seed.nk",
        "SNAPBACK_HTTP_ADDRESS": "0.0.0.0:9090",
        "SNAPBACK_WEBHOOK_ADDRESS": "0.0.0.0:9443",
        "PATH": "/bin",
    }
    items = [deployment("a-operator", **kept, **of_pod), deployment("b-operator", SNAPBACK_X="1")]
    assert operator_variables({"items": items}, "a-operator") == kept
    assert operator_variables({"items": []}, "a-operator") == {}


@pytest.mark.parametrize(
    ("kind", "namespace", "path"),
    [
        ("Pod", "team", "/api/v1/namespaces/team/pods/x"),
        ("Job", "team", "/apis/batch/v1/namespaces/team/jobs/x"),
        ("Node", None, "/api/v1/nodes/x"),
    ],
)
def test_an_object_is_found_where_the_api_server_has_it(
    kind: str, namespace: str | None, path: str
) -> None:
    assert api_path(Target(KINDS[kind], namespace, "x")) == path
