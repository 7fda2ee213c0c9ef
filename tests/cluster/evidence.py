"""What is kept of a test that failed: objects, events, and logs of pods and components."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.cluster.cluster import Cluster
from tests.cluster.kubectl import Kubectl


def collect(folder: Path, namespace: Kubectl, cluster: Cluster | None) -> Path:
    """Write the evidence of a namespace into a new folder and return it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _write(folder / "nodes.yaml", namespace, "get", "nodes", "--output", "yaml")
    _write(folder / "events.txt", namespace, "events")
    for scope, file in (("true", "objects.yaml"), ("false", "cluster-objects.yaml")):
        words = ("api-resources", "--verbs=list", f"--namespaced={scope}", "--output=name")
        # Events stand in a file of their own.
        kinds = [kind for kind in namespace.run(*words).split() if not kind.startswith("events")]
        _write(folder / file, namespace, "get", ",".join(kinds), "--output", "yaml")
    for pod in namespace.list("pods"):
        name, spec = pod["metadata"]["name"], pod["spec"]
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            for suffix, flags in (("", ()), (".previous", ("--previous",))):
                file = folder / "pods" / name / f"{container['name']}{suffix}.log"
                _write(file, namespace, "logs", name, "--container", container["name"], *flags)
    if cluster:
        cluster.keep_logs(folder / "components")
    return folder


def _write(file: Path, kubectl: Kubectl, *words: str) -> None:
    """Write what a command says; one that fails is evidence as well, or has nothing to say."""
    done = kubectl.try_(*words)
    if done.returncode == 0 or words[-1] != "--previous":
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(done.stdout + done.stderr)
