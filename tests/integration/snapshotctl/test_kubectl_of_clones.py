"""Which pods the doctor asks kubectl for, with a program in its place that has a few objects."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from snapshotctl.adapters.kubectl import Kubernetes
from snapshotctl.views.installation import Asked

PROGRAM = """
import json, sys
objects = json.load(open({objects!r}))
_, _, _, kind, *rest = sys.argv[1:]
rest = [word for word in rest if word not in ("--output=json", "--ignore-not-found")]
if rest[:1] == ["--namespace"] and kind == "pods":
    if rest[1] == "secret":
        sys.exit("Error from server (Forbidden): pods is forbidden: User ada cannot list pods")
    found = [each for each in objects["pods"]
             if each["metadata"]["namespace"] == rest[1] and each["metadata"]["name"] in rest[2:]]
    if len(rest[2:]) == 1:
        print(json.dumps(found[0]) if found else "")
        sys.exit()
elif "--all-namespaces" in rest and not kind.startswith("snapshotrestores"):
    found = objects["workloads"]
else:
    found = objects["restores"] if kind.startswith("snapshotrestores") else []
print(json.dumps({{"items": found}}))
"""


def named(kind: str, namespace: str, name: str, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "metadata": {"namespace": namespace, "name": name}, **more}


def restore(namespace: str, pod: str, driver: str = "criu") -> dict[str, Any]:
    reference = {"name": pod, "uid": pod}
    return named(
        "SnapshotRestore",
        namespace,
        f"restore-{pod}",
        spec={"podRef": reference},
        status={"state": "Restored", "driver": driver},
    )


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the objects that the program has."""
    objects = tmp_path / "objects.json"
    program = tmp_path / "kubectl"
    program.write_text(f"#!{sys.executable}{PROGRAM.format(objects=str(objects))}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return objects


def seen(kubectl: Path, *restores: dict[str, Any]) -> Any:
    labels = {"app.kubernetes.io/component": "node"}
    node = named("DaemonSet", "snapback", "snapback-node")
    node["metadata"]["labels"] = labels
    node["spec"] = {"template": {"spec": {"containers": []}}}
    pods = [named("Pod", space, name) for space in ("a", "b") for name in ("one", "two", "three")]
    kubectl.write_text(json.dumps({"workloads": [node], "restores": restores, "pods": pods}))
    return Kubernetes("config", None).installation()


def test_the_pods_of_processes_that_were_brought_back_are_read(kubectl: Path) -> None:
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


def test_without_such_a_process_no_pods_are_read(kubectl: Path) -> None:
    assert seen(kubectl, restore("a", "three", "cooperative")).clones == Asked([])


def test_pods_that_may_not_be_read_are_no_pods(kubectl: Path) -> None:
    failure = seen(kubectl, restore("secret", "one")).clones.failure
    assert failure.reason == "NotPermitted"
