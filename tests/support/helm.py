"""helm, as a person runs it, and what it makes of the chart."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from tests.cluster import programs

CHART = programs.REPOSITORY / "deploy" / "helm" / "snapback"
COMMAND_S = 420.0
# One that is built from its module says that it knows Kubernetes 1.20.
KUBERNETES = ("--kube-version", "1.35.0", "--api-versions", "resource.k8s.io/v1")


class HelmError(Exception):
    """A command failed; says which, and what helm said."""


def find() -> Path | None:
    return programs.find("helm")


def run(*words: str, kubeconfig: Path | None = None) -> str:
    """Run a command and return its standard output; raise HelmError when it fails."""
    program = find()
    assert program, f"helm is missing: {programs.NEXT_STEP}"
    # Repositories and plugins of the person's own are left out.
    environment = {name: value for name, value in os.environ.items() if name[:5] != "HELM_"}
    if kubeconfig:
        environment["KUBECONFIG"] = str(kubeconfig)
    words = (str(program), *words)
    return programs.said_by(*words, error=HelmError, timeout=COMMAND_S, env=environment)


def rendered(*words: str, release: str = "snapback") -> list[Any]:
    """Return the documents that an install would apply, hooks among them."""
    where = ("--namespace", "snapback-system", *KUBERNETES)
    text = run("template", release, str(CHART), *where, *words)
    return [document for document in yaml.safe_load_all(text) if document]
