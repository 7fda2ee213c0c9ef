"""A namespace's admin who writes statuses, on a real cluster: each wall is enough alone.

The admission policies are not there, so the statuses are stored. The test takes the wall of the
operator out of the running program, and then the nodes have to refuse.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from snapshot_operator.core import content, restore, sharing
from snapshot_operator.core.restore import RESTORED
from snapshot_operator.runtime import owned
from tests.cluster import agents
from tests.cluster.kubectl import Kubectl
from tests.cluster.rig import Rig, polled
from tests.cluster.simulated import pod

pytestmark = [pytest.mark.cluster, pytest.mark.turns]


async def steal(rig: Rig, attacker: Kubectl) -> None:
    """Have a pod of the attacker wait for a restore, whose status names a stranger's content."""
    source = pod("source", agents.worker("--answer", "42"), nodeName="node-1")
    await rig.captured("secret", source["spec"])
    found = await rig.get("dynamocheckpoints", "secret")
    forged = {"contentName": found["status"]["contentName"], "nodeName": "node-2"}
    await asyncio.to_thread(attacker.apply, agents.placeholder("thief", "mine", "node-2"))
    restores = f"/apis/nvidia.com/v1alpha1/namespaces/{attacker.namespace}/snapshotrestores"

    async def names() -> list[str]:
        return [each["metadata"]["name"] for each in await rig.items(restores)]

    [name] = await polled(names)
    patch = ("--subresource=status", "--type=merge", f"--patch={json.dumps({'status': forged})}")
    for _ in range(20):
        # The operator may write its own between two of these.
        await asyncio.to_thread(attacker.run, "patch", "snapshotrestore", name, *patch)
        await asyncio.sleep(0.2)


async def failure_of(rig: Rig, attacker: Kubectl) -> dict[str, Any]:
    """Return why the restore of the attacker failed; nothing as long as it has not."""
    [found] = json.loads(
        await asyncio.to_thread(attacker.run, "get", "snapshotrestores", "--output=json")
    )["items"]
    return dict(found.get("status", {}).get("failure") or {})


async def has_stolen_nothing(attacker: Kubectl) -> None:
    found = await asyncio.to_thread(attacker.get, "pod", "thief")
    rows = found["status"].get("conditions", [])
    assert not [row for row in rows if (row["type"], row["status"]) == (RESTORED, "True")]
    # The state of the source is its answer, 42.
    assert not [line for line in await agents.events_of(attacker, "thief") if "42" in line]


async def test_the_operator_restores_no_content_of_another_namespace(
    rig: Rig, nodes: Kubectl, namespace: Kubectl
) -> None:
    await steal(rig, namespace)
    await has_stolen_nothing(namespace)
    assert (await failure_of(rig, namespace)).get("reason") != "Rejected"
    [content] = await rig.items("/apis/nvidia.com/v1alpha1/snapshotcontents")
    assert "readers" not in content["status"]


async def test_a_node_restores_no_artifact_of_another_namespace(
    rig: Rig, nodes: Kubectl, namespace: Kubectl, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (content, restore, sharing):
        monkeypatch.setattr(module, "serves", lambda found, _value: found is not None)
    monkeypatch.setattr(owned, "foreign", lambda _owner, _item: "")
    await steal(rig, namespace)
    failure = await polled(lambda: failure_of(rig, namespace))
    assert failure["reason"] == "Rejected"
    assert "the order reaches beyond its owner" in failure["message"]
    await has_stolen_nothing(namespace)
