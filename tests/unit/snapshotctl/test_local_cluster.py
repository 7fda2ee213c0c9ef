"""A local cluster by its record alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from snapshot_shared.errors import Conflict
from snapshotctl.adapters import folders, processes
from snapshotctl.adapters.folders import Folders
from snapshotctl.adapters.local_cluster import LocalCluster
from snapshotctl.domain.cluster import ClusterRecord, NodeSpec
from snapshotctl.main import main


@pytest.fixture
def is_down(tmp_path: Path) -> LocalCluster:
    """A cluster that was ended: nothing of its record runs, and it has no address."""
    where = Folders({"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")})
    state = where.state("dev")
    state.mkdir(parents=True)
    record = ClusterRecord(
        name="dev",
        run="0badcafe",
        boot_id=processes.boot_id(),
        state_dir=str(state),
        socket_dir=str(tmp_path),
        nodes=[NodeSpec(name="node-1", gpus=1, gpu_memory=1024)],
    )
    folders.write_record(record)
    return LocalCluster(
        where, "dev", environment={}, workdir=tmp_path, say=lambda _: None, run="0badcafe"
    )


async def test_programs_of_a_cluster_that_is_down_are_not_started_one_by_one(
    is_down: LocalCluster,
) -> None:
    for name in ("operator", "page", "nats-server"):
        with pytest.raises(Conflict, match="'dev' is down") as refused:
            await is_down.restart_program(name)
        assert refused.value.next_step == "start all of it: snapshotctl up --cluster dev"
    with pytest.raises(Conflict, match="'dev' is down") as refused:
        await is_down.restart("node-1", ["agent", "gms"])
    assert refused.value.next_step == "start all of it: snapshotctl up --cluster dev"


@pytest.mark.parametrize("named", [("--cluster", "dev"), ()])
def test_the_log_of_a_service_is_read_when_nothing_runs(
    is_down: LocalCluster,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    named: tuple[str, ...],
) -> None:
    log = Path(is_down.record.state_dir) / "logs" / "node-1-agent.log"
    log.parent.mkdir()
    log.write_text("one\ntwo\n")
    for name in ("NATS_URL", "NATS_CONTEXT", "SNAPBACK_CLUSTER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    if not named:
        monkeypatch.setenv("SNAPBACK_CLUSTER", "dev")
    for word in ("agent", "agent@node-1", "node-1-agent"):
        monkeypatch.setattr(sys, "argv", ["snapshotctl", *named, "logs", word, "--tail", "1"])
        assert main() == 0
        assert capfd.readouterr().out == "two\n"
