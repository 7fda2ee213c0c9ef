"""A namespace's admin who writes statuses, on a real cluster: each wall is enough alone.

The admission policies are not there, so the statuses are stored. The test takes the wall of the
operator out of the running program, and then the nodes have to refuse.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from snapshot_api.well_known import RESTORE_CONTENT, RESTORE_DIGEST, RESTORE_UID
from snapshot_operator.core import content, restore, sharing
from snapshot_operator.core.ordering import status_of
from snapshot_operator.core.restore import RESTORED
from snapshot_operator.runtime import owned
from snapshot_shared.codec import encode_json
from snapshot_shared.orders import AbortOrder, DeleteOrder, Order, PodRef
from tests.cluster import agents
from tests.cluster.kubectl import Kubectl
from tests.cluster.rig import OURS, SHELL, Rig, polled
from tests.cluster.simulated import pod

pytestmark = [pytest.mark.cluster, pytest.mark.turns]


async def steal(rig: Rig, attacker: Kubectl) -> None:
    """Have a pod of the attacker wait for a restore, whose status names a stranger's content."""
    await rig.captured("secret", agents.source("--answer", "42"))
    found = await rig.get("dynamocheckpoints", "secret")
    forged = {"contentName": found["status"]["contentName"], "nodeName": "node-2"}
    name = await has_a_restore(rig, attacker)
    for _ in range(20):
        # The operator may write its own between two of these.
        await forge(attacker, name, forged)
        await asyncio.sleep(0.2)


async def has_a_restore(rig: Rig, attacker: Kubectl) -> str:
    """Have a pod of the attacker wait for a restore, and return the name of that."""
    rig.others.append(attacker.namespace)
    await asyncio.to_thread(attacker.apply, agents.placeholder("thief", "mine", "node-2"))
    restores = f"{OURS}/namespaces/{attacker.namespace}/snapshotrestores"

    async def names() -> list[str]:
        return [each["metadata"]["name"] for each in await rig.items(restores)]

    [name] = await polled(names)
    return name


async def forge(attacker: Kubectl, name: str, status: dict[str, Any]) -> None:
    """Write into the status of a restore of the attacker."""
    patch = ("--subresource=status", "--type=merge", f"--patch={json.dumps({'status': status})}")
    await asyncio.to_thread(attacker.run, "patch", "snapshotrestore", name, *patch)


async def failure_of(attacker: Kubectl) -> dict[str, Any]:
    """Return why the restore of the attacker failed; nothing as long as it has not."""
    [found] = await asyncio.to_thread(attacker.list, "snapshotrestores")
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
    assert (await failure_of(namespace)).get("reason") != "Rejected"
    [content] = await rig.items(f"{OURS}/snapshotcontents")
    assert "readers" not in content["status"]


async def test_no_annotation_names_what_is_of_another_namespace(
    rig: Rig, nodes: Kubectl, namespace: Kubectl
) -> None:
    rig.others.append(namespace.namespace)
    await rig.captured("secret", agents.source("--answer", "42"))
    found = await rig.get("dynamocheckpoints", "secret")
    [content] = await rig.items(f"{OURS}/snapshotcontents")
    pinned = {
        RESTORE_CONTENT: content["metadata"]["name"],
        RESTORE_DIGEST: content["status"]["committed"]["rootDigest"],
        RESTORE_UID: found["metadata"]["uid"],
    }
    for name, source, more in (
        ("by-name", "secret", {}),
        ("by-path", f"{rig.namespace}/secret", {}),
        ("by-pins", "secret", pinned),
    ):
        thief = agents.placeholder(name, source, "node-2")
        thief["metadata"]["annotations"] |= more
        await asyncio.to_thread(namespace.apply, thief)
    restores = f"{OURS}/namespaces/{namespace.namespace}/snapshotrestores"

    async def waiting() -> list[dict[str, Any]]:
        """Return the restores once both valid ones have conditions; none before."""
        found = await rig.items(restores)
        said = {
            each["spec"]["podRef"]["name"]
            for each in found
            if each.get("status", {}).get("conditions")
        }
        return found if {"by-name", "by-pins"} <= said else []

    for found in await polled(waiting):
        status = found.get("status", {})
        assert not status.get("contentName"), found
        rows = {(row["type"], row["status"]) for row in status.get("conditions", ())}
        assert rows <= {("Ready", "False")}, found
    for name in ("by-name", "by-path", "by-pins"):
        assert not [line for line in await agents.events_of(namespace, name) if "42" in line]


async def test_a_node_restores_no_artifact_of_another_namespace(
    rig: Rig, nodes: Kubectl, namespace: Kubectl, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (content, restore, sharing):
        monkeypatch.setattr(module, "serves", lambda found, _value: found is not None)
    monkeypatch.setattr(owned, "foreign", lambda _owner, _item: "")
    await steal(rig, namespace)
    failure = await polled(lambda: failure_of(namespace))
    assert failure["reason"] == "Rejected"
    assert "the order reaches beyond its owner" in failure["message"]
    await has_stolen_nothing(namespace)


@pytest.mark.parametrize("has_wall", [True, False], ids=["with the wall", "without any wall"])
async def test_the_operator_deletes_no_artifact_and_ends_no_pod_of_another_namespace(
    rig: Rig,
    nodes: Kubectl,
    namespace: Kubectl,
    artifacts: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    has_wall: bool,
) -> None:
    """Nodes have no wall here: nothing of theirs says for whom a delete or an abort is."""
    if not has_wall:
        monkeypatch.setattr(owned, "foreign", lambda _owner, _item: "")
    await rig.captured("secret", agents.source("--answer", "42"))
    sleeps = {"name": "main", "image": SHELL, "command": ["sleep", "600"]}
    good = pod("good", sleeps, nodeName="node-1")
    await asyncio.to_thread(nodes.apply, good)
    await asyncio.to_thread(nodes.wait, "pod/good", until="condition=Ready")
    victim = await asyncio.to_thread(nodes.get, "pod", "good")
    [part] = artifacts.glob(f"{rig.namespace}/*/gen-*/root.json")
    content, generation = part.parts[-3], int(part.parts[-2].removeprefix("gen-"))
    name = await has_a_restore(rig, namespace)
    common: dict[str, Any] = {
        "attempt": 1,
        "node": "node-1",
        # Nodes refuse an order that is not of its content, so the content is said to own it.
        "owner": content,
        "deadline_s": 60.0,
    }
    orders: list[Order] = [
        DeleteOrder(
            order=f"delete-{content}-gen-{generation}",
            namespace=rig.namespace,
            content_uid=content,
            generation=generation,
            **common,
        ),
        AbortOrder(
            order=f"abort-{content}",
            content_uid=content,
            pod=PodRef(
                namespace=rig.namespace,
                name="good",
                uid=victim["metadata"]["uid"],
                container="main",
            ),
            on_failure="Kill",
            **common,
        ),
    ]
    forged = [json.loads(encode_json(status_of(each, "agent", time.time()))) for each in orders]

    async def is_done() -> bool:
        found = await asyncio.to_thread(nodes.get, "pod", "good")
        [row] = found["status"]["containerStatuses"]
        return not part.exists() and row["restartCount"] + ("terminated" in row["state"]) > 0

    async def is_refused() -> bool:
        return "ForeignOrders" in caplog.text

    await forge(namespace, name, {"orders": forged})
    await polled(is_refused if has_wall else is_done)
    if has_wall:
        # A sweep publishes what no report has answered.
        await asyncio.sleep(30.0)
        assert part.exists()
        found = await asyncio.to_thread(nodes.get, "pod", "good")
        [row] = found["status"]["containerStatuses"]
        assert (row["restartCount"], [*row["state"]]) == (0, ["running"])
