"""What an upgrade would meet: what is under way, and nodes that it does not reach."""

from __future__ import annotations

from typing import Any

from snapshot_api.facts import Node
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.v1alpha1.restore import SnapshotRestore
from snapshot_shared.orders import SCHEMAS
from snapshot_shared.transitions import Capture, Restore
from snapshotctl.views.upgrade import upgrade_findings
from tests.support import builders
from tests.unit.tables import each

READY = builders.row("Ready", "True", "AgentPresent")


def node(**status: Any) -> Node:
    return builders.node(**{"schemas": list(SCHEMAS), "conditions": [READY], **status})


def capture(state: Capture) -> SnapshotContent:
    return builders.content(capture=state)


def restore(state: Restore) -> SnapshotRestore:
    return builders.restore(state=state)


@each(
    ("objects", "level", "said"),
    [
        ([], "ok", "all 0 nodes answer"),
        ([node()], "ok", "all 1 nodes answer, and read the messages of this release"),
        ([node(conditions=[])], "fail", "node-1 is Unknown"),
        ([node(schemas=[99])], "fail", "reads no message of this release: it knows"),
        ([capture(Capture.STAGING)], "warn", "begins again"),
        ([capture(Capture.READY), capture(Capture.FAILED)], "ok", "no capture is under way"),
        ([restore(Restore.RESTORING)], "warn", "the new agent goes on with it"),
        ([restore(Restore.RESTORED)], "ok", "no restore is under way"),
    ],
)
def test_what_an_upgrade_meets_is_named(objects: Any, level: str, said: str) -> None:
    found = list(upgrade_findings(objects))
    assert [one.level for one in found if said in one.what] == [level]
    assert all(one.fix for one in found if one.level != "ok")
