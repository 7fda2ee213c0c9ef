"""The pods of a node by what its kubelet wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from snapshot_shared.errors import NotEligible, StalePodReference
from snapshot_shared.orders import PodRef
from snapshot_shared.pod_logs import check_pod

UID = "00000000-0000-4000-8000-000000000001"
POD = PodRef(namespace="team-a", name="worker-0.llm", uid=UID)


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    for name in (f"team-a_worker-0.llm_{UID}", "victim_worker_2", "lost+found"):
        (tmp_path / name).mkdir()
    return tmp_path


def test_a_pod_is_known_by_its_namespace_name_and_uid(logs: Path) -> None:
    check_pod(POD, logs)
    for other in ({"namespace": "team-b"}, {"name": "worker-1"}, {"uid": UID[:-1] + "2"}):
        with pytest.raises(StalePodReference) as refused:
            check_pod(replace(POD, **other), logs)
        # The refusal is read in the namespace of the order, so it says nothing of the other pod.
        assert "victim" not in str(refused.value.to_failure())
    with pytest.raises(StalePodReference) as refused:
        check_pod(replace(POD, uid=UID, namespace="team-b"), logs)
    assert "team-a" not in str(refused.value.to_failure())


def test_without_the_folder_of_the_kubelet_no_pod_is_touched(tmp_path: Path) -> None:
    with pytest.raises(NotEligible, match="SNAPBACK_POD_LOGS_DIR"):
        check_pod(POD, tmp_path / "absent")
