"""kubectl on one cluster, as a person runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

COMMAND_S = 120.0
CTL_S = 240.0


class KubectlError(Exception):
    """A command failed; says which, and what kubectl said."""


class Kubectl:
    """The commands of kubectl; in a namespace, where one is named."""

    def __init__(self, kubeconfig: Path, program: Path, namespace: str | None = None) -> None:
        self.kubeconfig = kubeconfig
        self.program = program
        self.namespace = namespace

    def within(self, namespace: str) -> Kubectl:
        """Return the same for a namespace."""
        return Kubectl(self.kubeconfig, self.program, namespace)

    def words(self, *words: str) -> list[str]:
        """Return a whole command."""
        where = ["--namespace", self.namespace] if self.namespace else []
        return [str(self.program), "--kubeconfig", str(self.kubeconfig), *where, *words]

    def try_(
        self, *words: str, given: str = "", within_s: float = COMMAND_S
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, which may be a failure."""
        return subprocess.run(
            self.words(*words),
            input=given,
            capture_output=True,
            text=True,
            check=False,
            timeout=within_s,
            # A kuberc of the person's own may change what commands do.
            env=os.environ | {"KUBECTL_KUBERC": "false"},
        )

    def run(self, *words: str, given: str = "", within_s: float = COMMAND_S) -> str:
        """Run a command and return its standard output; raise KubectlError when it fails."""
        done = self.try_(*words, given=given, within_s=within_s)
        if done.returncode:
            raise KubectlError(f"kubectl {' '.join(words)}: {done.stderr.strip()}")
        return done.stdout

    def apply(self, *objects: Mapping[str, Any]) -> str:
        """Apply objects."""
        document = {"apiVersion": "v1", "kind": "List", "items": objects}
        return self.run("apply", "--filename", "-", given=json.dumps(document))

    def get(self, kind: str, name: str) -> Any:
        """Return an object."""
        return json.loads(self.run("get", kind, name, "--output", "json"))

    def list(self, kind: str, *words: str) -> Any:
        """Return the objects of a kind."""
        return json.loads(self.run("get", kind, *words, "--output", "json"))["items"]

    def wait(self, *objects: str, until: str, within_s: float = 90.0) -> None:
        """Wait until objects are as the flag `--for` of `kubectl wait` says."""
        words = ["wait", *objects, f"--for={until}", f"--timeout={within_s:g}s"]
        self.run(*words, within_s=within_s + 30)

    def snapshotctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run snapshotctl on the cluster, as a person does who has kubectl and nothing else."""
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith("NATS_")
        }
        return subprocess.run(
            [str(Path(sys.executable).with_name("snapshotctl")), *words],
            env=inherited
            | {"PATH": f"{self.program.parent}:{os.environ['PATH']}", "KUBECONFIG": ""},
            capture_output=True,
            text=True,
            check=False,
            timeout=CTL_S,
        )
