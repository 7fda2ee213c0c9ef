"""The logs of a local cluster: of its services, and of the workers on its nodes."""

from __future__ import annotations

from pathlib import Path

from snapshot_shared.errors import SnapbackError
from snapshot_shared.files import names_in, open_dir, open_root, opened, read_end
from snapshotctl.domain.cluster import ClusterPaths, ClusterRecord

TAIL_BYTES = 4 * 1024 * 1024
"""How much of the end of a log is read."""

WORKER_LINES = 8


class ClusterLogs:
    """The logs of one local cluster."""

    def __init__(self, record: ClusterRecord) -> None:
        """Use the paths of `record`."""
        self._paths = ClusterPaths(Path(record.state_dir), Path(record.socket_dir))

    @property
    def folder(self) -> str:
        """Where they are, for people."""
        return str(self._paths.logs)

    def lines(self) -> list[tuple[str, str]]:
        """Return the last lines of every service, each with the name of its program."""
        return [
            (log.stem, line)
            for log in sorted(self._paths.logs.glob("*.log"))
            if log.stem != "nats-server"
            for line in _tail(log.parent, log.name)
        ]

    def worker(self, node: str, pod_uid: str) -> list[tuple[str, str]]:
        """Return the last lines that a pod's containers wrote, each with the container."""
        folder = self._paths.node(node, "agent") / "pods" / pod_uid
        try:
            with opened(open_root(folder)) as pod:
                containers = sorted(names_in(pod))
        except OSError:
            return []
        return [
            (container, line)
            for container in containers
            for line in _tail(folder, container, "log")[-WORKER_LINES:]
        ]


def _tail(folder: Path, *parts: str) -> list[str]:
    """Return the last lines of a file beneath a folder; none of what is no plain file."""
    try:
        with opened(open_root(folder)) as root, opened(open_dir(root, parts[:-1])) as place:
            return read_end(place, parts[-1], TAIL_BYTES).decode("utf-8", "replace").splitlines()
    except (OSError, SnapbackError):
        return []
