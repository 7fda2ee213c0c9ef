"""How images get to the nodes: into those of a cluster that was started here, or by the reader."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from tests.cluster.cluster import Cluster
from tests.cluster.host import ClusterError
from tests.cluster.programs import said_by

NEXT_STEP = (
    "the cluster of KUBECONFIG needs images of this repository; give a command that takes the path"
    " of an archive, LOAD_IMAGES='kind load image-archive', or a registry to which docker may push,"
    " REGISTRY=registry.example/snapback"
)


class Images:
    """Puts images where the pods of a cluster find them; `cluster` is one that was started here."""

    def __init__(
        self, cluster: Cluster | None, environment: Mapping[str, str] = os.environ
    ) -> None:
        self._cluster = cluster
        self._command = shlex.split(environment.get("LOAD_IMAGES", ""))
        self._registry = environment.get("REGISTRY", "").rstrip("/")

    def provide(self, archive: Path, *names: str) -> dict[str, str]:
        """Provide the images of an archive; return what pods call them, by their names there.

        Raise ClusterError where there is no way, or the way fails.
        """
        if self._cluster:
            self._cluster.load(archive)
        elif self._command:
            said_by(*self._command, str(archive), error=ClusterError)
        elif self._registry:
            return self._push(archive, names)
        else:
            raise ClusterError(NEXT_STEP)
        return {name: name for name in names}

    def _push(self, archive: Path, names: tuple[str, ...]) -> dict[str, str]:
        said_by("docker", "load", "--input", str(archive), error=ClusterError)
        pushed = {name: f"{self._registry}/{name.rpartition('/')[2]}" for name in names}
        for name, target in pushed.items():
            said_by("docker", "tag", name, target, error=ClusterError)
            said_by("docker", "push", target, error=ClusterError)
        return pushed
