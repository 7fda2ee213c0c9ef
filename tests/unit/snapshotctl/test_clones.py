"""What the doctor says of workers that were brought back with the memory of their source."""

from __future__ import annotations

from typing import Any

import pytest

from snapshot_shared.errors import Failure
from snapshotctl.views.clones import brought_back, clone_findings
from snapshotctl.views.finding import Finding
from snapshotctl.views.installation import Asked
from tests.unit.snapshotctl.test_installation import of


def restore(driver: str = "criu", state: str = "Restored", uid: str = "u1") -> dict[str, Any]:
    return {
        "metadata": {"namespace": "llm", "name": f"restore-{uid}"},
        "spec": {"podRef": {"name": "clone", "uid": uid, "container": "engine"}, "source": "s"},
        "status": {"state": state, "driver": driver},
    }


def env(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


POD_IP = env("POD_IP", "status.podIP")
LIMIT = {"name": "LIMIT", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}}


def pod(*rows: dict[str, Any], uid: str = "u1", container: str = "engine") -> dict[str, Any]:
    return {
        "metadata": {"namespace": "llm", "name": "clone", "uid": uid},
        "spec": {"containers": [{"name": "proxy"}, {"name": container, "env": list(rows)}]},
    }


def found(restores: list[dict[str, Any]], pods: list[dict[str, Any]]) -> list[Finding]:
    return list(clone_findings(restores, pods))


@pytest.mark.parametrize("driver", ["criu", "criu+cuda"])
def test_variables_that_are_those_of_the_source_are_named(driver: str) -> None:
    rows = (POD_IP, {"name": "MODE", "value": "fast"}, LIMIT, env("NODE", "spec.nodeName"))
    (only,) = found([restore(driver)], [pod(*rows)])
    assert only.level == "warn"
    assert f"llm/clone: its process was brought back by {driver}" in only.what
    assert only.what.endswith("with its source's POD_IP, NODE")
    assert "docs/how-to/after-a-restore.md" in only.fix


@pytest.mark.parametrize(
    "restored",
    [
        restore("cooperative"),
        restore("respawn"),
        restore(state="Restoring"),
        restore(state="Failed"),
    ],
)
def test_a_program_that_starts_anew_or_was_not_restored_has_nothing_of_its_source(
    restored: dict[str, Any],
) -> None:
    assert brought_back([restored]) == {}
    assert found([restored], [pod(POD_IP)]) == []


@pytest.mark.parametrize(
    "other",
    [
        pod(POD_IP, uid="u2"),
        pod(POD_IP, container="sidecar"),
        pod(env("ZONE", "metadata.labels['zone']")),
        pod(LIMIT),
        pod(),
    ],
)
def test_another_pod_container_or_field_is_none_of_it(other: dict[str, Any]) -> None:
    assert [each.level for each in found([restore()], [other])] == ["ok"]


def test_without_a_restore_nothing_is_said() -> None:
    assert found([], []) == []


def test_what_may_not_be_read_is_said() -> None:
    forbidden = Asked(failure=Failure(reason="NotPermitted", message="ada may not"))
    asked = Asked([restore()])
    for seen in (of(restores=forbidden), of(restores=asked, clones=forbidden)):
        (unread,) = [each.what for each in seen if each.level == "warn"]
        assert unread.endswith("ada may not")
    (said,) = [
        each for each in of(restores=asked, clones=Asked([pod(POD_IP)])) if each.level == "warn"
    ]
    assert "POD_IP" in said.what
