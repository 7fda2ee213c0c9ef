"""Objects that many tests need, written as a user would write them."""

from __future__ import annotations

from typing import Any

from snapshot_api.manifests import parse
from snapshot_api.v1alpha1.checkpoint import DynamoCheckpoint
from snapshot_shared.errors import Failure
from snapshot_shared.orders import Presence, PresenceDevice, UnreadyDriver

GIB = 1024**3


def pod_template(**container: Any) -> dict[str, Any]:
    main = {"name": "main", "command": ["worker"], "resources": {"limits": {"nvidia.com/gpu": 2}}}
    return {"spec": {"containers": [{**main, **container}]}}


def checkpoint(name: str = "llm", *, model: str = "", **job: Any) -> DynamoCheckpoint:
    value = parse(checkpoint_document(name, model=model, **job))
    assert isinstance(value, DynamoCheckpoint)
    return value


def checkpoint_document(name: str = "llm", *, model: str = "", **job: Any) -> dict[str, Any]:
    """Return a checkpoint of a model of its own, or of one that is given."""
    return {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoCheckpoint",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "identity": {"model": model or f"example/{name}", "backendFramework": "vllm"},
            "job": {"podTemplateSpec": pod_template(), "sourcePolicy": "Resume", **job},
        },
    }


def restore_document(
    source: str = "llm", name: str = "restored", node: str | None = None, gpus: int = 2
) -> dict[str, Any]:
    spec = pod_template(resources={"limits": {"nvidia.com/gpu": gpus}})["spec"]
    if node:
        spec["nodeSelector"] = {"kubernetes.io/hostname": node}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "default",
            "annotations": {"nvidia.com/restore-from": source},
        },
        "spec": spec,
    }


def pod_document(name: str = "worker", **more: Any) -> dict[str, Any]:
    """Return a pod that is restored from nothing."""
    document = restore_document(name=name, **more)
    del document["metadata"]["annotations"]
    return document


def snapshot_document(name: str, pod: str = "", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "Snapshot",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"source": {"podRef": {"name": pod}}, **spec},
    }


def presence(node: str, *, gpus: int = 2, capacity: int = 4 * GIB) -> Presence:
    devices = [
        PresenceDevice(
            index=index, uuid=f"GPU-{node}-{index}", product="sim", capacity_bytes=capacity
        )
        for index in range(gpus)
    ]
    return Presence(node=node, boot_id="boot", version="0.1.0", devices=devices, at=0.0)


def unready(why: Failure, *drivers: str) -> list[UnreadyDriver]:
    return [UnreadyDriver(driver=driver, why=why) for driver in drivers]
