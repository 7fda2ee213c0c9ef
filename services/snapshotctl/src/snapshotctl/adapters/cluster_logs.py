"""The logs of a local cluster: of its services, and of the workers on its nodes."""

from __future__ import annotations

import os
from pathlib import Path

from snapshotctl.domain.cluster import ClusterRecord, Places

TAIL_BYTES = 4 * 1024 * 1024
"""How much of the end of a log is read."""

WORKER_LINES = 8


class ClusterLogs:
    """Reads the logs of one local cluster."""

    def __init__(self, record: ClusterRecord) -> None:
        """Use what is recorded of the cluster."""
        self._places = Places(Path(record.state_dir), Path(record.socket_dir))

    @property
    def folder(self) -> str:
        return str(self._places.logs)

    def lines(self) -> list[tuple[str, str]]:
        return [
            (log.stem, line)
            for log in sorted(self._places.logs.glob("*.log"))
            if log.stem != "nats-server"
            for line in _tail(log)
        ]

    def worker(self, node: str, pod_uid: str) -> list[tuple[str, str]]:
        folder = self._places.node(node, "agent") / "pods" / pod_uid
        return [
            (log.parent.name, line)
            for log in sorted(folder.glob("*/log"))
            for line in _tail(log)[-WORKER_LINES:]
        ]


def _tail(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
