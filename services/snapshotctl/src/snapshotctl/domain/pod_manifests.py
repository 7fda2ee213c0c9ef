"""The objects that capture a pod or restore it, made from the pod or from its manifest."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

import msgspec

from snapshot_api.facts import FINISHED, HOSTNAME_LABEL, Pod
from snapshot_api.v1alpha1.checkpoint import DynamoCheckpoint, Framework
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.v1alpha1.snapshot import Snapshot
from snapshot_api.well_known import GROUP, RESTORE_FROM
from snapshot_shared.errors import InvalidManifest, NotEligible
from snapshot_shared.ids import short_hash
from snapshot_shared.orders import PLACEHOLDER_DRIVERS
from snapshot_shared.volumes import DEVICES, SAVER
from snapshotctl.domain.documents import Document
from snapshotctl.domain.exits import WrongArguments

MAX_NAME = 63
_OF_ONE_POD = ("nodeName", "ephemeralContainers")
"""Fields of the spec of a pod that is there, which no other pod is created with."""
_DYNAMO_MODULE = re.compile(rf"\bdynamo\.({'|'.join(get_args(Framework))})\b")


class PodManifest(NamedTuple):
    """A pod as written in a file: its name, its containers, and the whole document."""

    where: str
    name: str
    namespace: str | None
    containers: list[str]
    value: dict[str, Any]


def pod_manifest(documents: Sequence[Document]) -> PodManifest:
    """Return the one pod of a file. InvalidManifest when it holds anything else."""
    if len(documents) != 1:
        raise InvalidManifest(
            f"{documents[0].where}: the file holds {len(documents)} documents",
            next_step="give a file with one Pod",
        )
    where, value = documents[0].where, documents[0].value
    if not isinstance(value, dict) or value.get("kind", "Pod") != "Pod":
        kind = value.get("kind") if isinstance(value, dict) else type(value).__name__
        raise InvalidManifest(
            f"{where}: kind: {kind!r} is no Pod", next_step="give a file with one Pod"
        )
    meta, spec = value.get("metadata"), value.get("spec")
    name = meta.get("name") if isinstance(meta, dict) else None
    containers = spec.get("containers") if isinstance(spec, dict) else None
    listed = containers if isinstance(containers, list) else []
    names = [str(item["name"]) for item in listed if isinstance(item, dict) and "name" in item]
    if not isinstance(name, str) or not name:
        raise InvalidManifest(f"{where}: metadata.name: is required", next_step="name the pod")
    if not names or len(names) != len(listed):
        raise InvalidManifest(
            f"{where}: spec.containers: a pod needs containers with names",
            next_step="give the pod at least one container",
        )
    space = meta.get("namespace") if isinstance(meta, dict) else None
    return PodManifest(where, name, space if isinstance(space, str) else None, names, value)


def container(names: Sequence[str], wanted: str | None, whose: str) -> str:
    """Return the container to capture: `wanted`, or the only one. WrongArguments."""
    if wanted is None and len(names) == 1:
        return names[0]
    if wanted in names:
        return str(wanted)
    found = ", ".join(names)
    problem = "which container?" if wanted is None else f"there is no container {wanted!r}:"
    raise WrongArguments(
        f"{problem} {whose} has {found}", next_step=f"name one: --container {names[0]}"
    )


def framework(pod: PodManifest, target: str, wanted: Framework | None) -> Framework:
    """Return the framework of a container: `wanted`, or that of its command `-m dynamo.NAME`.

    Raise WrongArguments where the command names none or several.
    """
    if wanted is not None:
        return wanted
    [spec] = [item for item in pod.value["spec"]["containers"] if item["name"] == target]
    command = f"{spec.get('command')} {spec.get('args')}"
    found = sorted(set(_DYNAMO_MODULE.findall(command)))
    if len(found) != 1:
        named = f"names {' and '.join(found)}" if found else "runs no module dynamo.NAME"
        raise WrongArguments(
            f"which framework? the command of container {target} of pod {pod.name} {named}",
            next_step=f"name one of {', '.join(get_args(Framework))}: --framework vllm",
        )
    only: Framework = found[0]
    return only


def snapshot_of(
    pod: Pod, target: str, name: str | None, revision_of: str | None = None
) -> Document:
    """Return the Snapshot of a running pod. NotEligible when it cannot be captured any more.

    Without a name, that is derived from the pod's uid: a repeated command makes no second one.
    """
    meta = pod.metadata
    if meta.deletion_timestamp or pod.status.phase in FINISHED:
        state = "is being deleted" if meta.deletion_timestamp else f"has ended ({pod.status.phase})"
        raise NotEligible(
            f"pod {meta.name} {state} and cannot be captured",
            next_step="name a pod that runs: snapshotctl get pods",
        )
    found = name or f"{meta.name[: MAX_NAME - 6]}-{short_hash('snapshot', meta.uid, length=5)}"
    source = {"name": meta.name, "uid": meta.uid, "containers": [target]}
    spec: dict[str, Any] = {"source": {"podRef": source}, "sourcePolicy": "Resume"}
    if revision_of is not None:
        spec["revisionOf"] = revision_of
    value = {
        "apiVersion": GROUP,
        "kind": "Snapshot",
        "metadata": {"name": found, "namespace": meta.namespace},
        "spec": spec,
    }
    return Document(f"the snapshot of pod {meta.name}", value)


def checkpoint_of(
    pod: PodManifest, target: str, engine: Framework, name: str | None, namespace: str
) -> Document:
    """Return the DynamoCheckpoint that starts, captures and ends the worker of a manifest.

    A `name` is part of the identity, so that an earlier capture of the same manifest is not shared.
    A worker with the claim `snapback-devices` has a memory server, as a restored one has.
    """
    meta = pod.value["metadata"]
    template: dict[str, Any] = {"spec": pod.value["spec"]}
    kept = {key: meta[key] for key in ("labels", "annotations") if key in meta}
    if kept:
        template["metadata"] = kept
    identity: dict[str, Any] = {"model": pod.name, "backendFramework": engine}
    if name:
        identity["extraParameters"] = {"checkpointID": name}
    value: dict[str, Any] = {
        "apiVersion": GROUP,
        "kind": "DynamoCheckpoint",
        "metadata": {"name": name or pod.name, "namespace": namespace},
        "spec": {
            "identity": identity,
            "job": {
                "podTemplateSpec": template,
                "targetContainerName": target,
                "sourcePolicy": "Terminate",
            },
        },
    }
    if _shares_devices(pod, target):
        value["spec"]["gpuMemoryService"] = {"enabled": True}
    return Document(pod.where, value)


def _shares_devices(pod: PodManifest, target: str) -> bool:
    [spec] = [item for item in pod.value["spec"]["containers"] if item["name"] == target]
    # What is no such list is refused where the checkpoint is applied.
    with contextlib.suppress(KeyError, TypeError):
        return any(claim["name"] == DEVICES for claim in spec["resources"]["claims"])
    return False


def namespace_of(pod: PodManifest | None, wanted: str | None, default: str) -> str:
    """Return the namespace of the command line, of the manifest, or `default`."""
    return wanted or (pod.namespace if pod is not None else None) or default


class Source(NamedTuple):
    """The objects of the source of an artifact, those that still exist.

    `spec` is that of the captured pod in plain data: of the template of the checkpoint, of the pod
    itself, or, if it `is_kept` with the Snapshot, without the values of variables.
    """

    checkpoint: DynamoCheckpoint | None = None
    snapshot: Snapshot | None = None
    content: SnapshotContent | None = None
    spec: dict[str, Any] | None = None
    is_kept: bool = False

    @property
    def brings_process(self) -> bool:
        """Whether the process comes back with its environment, and is not started anew."""
        return self.content is not None and self.content.spec.driver in PLACEHOLDER_DRIVERS

    @property
    def container(self) -> str | None:
        """The container that was captured."""
        known = self.content or self.snapshot
        if known is not None:
            pod = known.spec.source.pod_ref
            return pod.containers[0] if pod is not None else None
        return self.checkpoint.spec.job.target_container_name if self.checkpoint else None


class _Named(msgspec.Struct):
    name: str
    env: list[_Named] = []


class _Spec(msgspec.Struct, rename="camel"):
    """What has to be there of the spec of a pod before it is changed."""

    containers: list[_Named]
    init_containers: list[_Named] = []


def kept_spec(text: str) -> dict[str, Any] | None:
    """Return the spec of a pod as it is kept with a Snapshot; None if the text is none."""
    try:
        msgspec.json.decode(text, type=_Spec)
    except msgspec.DecodeError:
        return None
    found: dict[str, Any] = msgspec.json.decode(text)
    return found


def restored(
    name: str,
    source: Source,
    manifest: PodManifest | None,
    *,
    namespace: str,
    suffix: str,
    target: str | None,
    variables: Mapping[str, str],
) -> Document:
    """Return the pod that is restored from what is called `name`.

    Without a manifest it is as the captured pod was, but may run on any node: an artifact is bound
    to none. `variables` replace values of that pod by name.

    Raise NotEligible if the spec of that pod is not known, or if a worker that starts anew would
    lack variables. Raise WrongArguments for a container that was not captured, or a variable that
    the pod does not have.
    """
    if manifest is not None:
        value = copy.deepcopy(manifest.value)
        value.setdefault("apiVersion", "v1")
        value["kind"] = "Pod"
        names = manifest.containers
    else:
        spec = _spec(name, source, variables)
        names = [item["name"] for item in spec["containers"]]
        pod_name = f"{name[: MAX_NAME - len(suffix) - 1]}-{suffix}"
        value = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": pod_name}, "spec": spec}
    _check_container(name, source.container, target, names)
    meta = value["metadata"]
    annotations = meta.get("annotations") or {}
    asked = annotations.get(RESTORE_FROM, name)
    if asked != name:
        raise WrongArguments(
            f"the manifest asks for {RESTORE_FROM}: {asked}, the command for {name}",
            next_step="name the same in both, or leave the annotation out",
        )
    meta["annotations"] = {**annotations, RESTORE_FROM: name}
    meta["namespace"] = namespace
    return Document(manifest.where if manifest else f"the pod restored from {name}", value)


def _spec(name: str, source: Source, variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the spec of the captured pod, without what belongs to that pod alone."""
    if source.spec is None:
        raise NotEligible(
            f"the pod that {name} was captured from is gone, and its spec was not kept",
            next_step=f"write it down: snapshotctl restore {name} --manifest FILE",
        )
    spec = copy.deepcopy(source.spec)
    for field in _OF_ONE_POD:
        spec.pop(field, None)
    spec.get("nodeSelector", {}).pop(HOSTNAME_LABEL, None)
    if "initContainers" in spec:
        spec["initContainers"] = [each for each in spec["initContainers"] if each["name"] != SAVER]
    _set_variables(spec, variables)
    lacking = _taken_variables(spec) if source.is_kept else []
    if lacking and not source.brings_process:
        given = " ".join(f"--env {variable}=VALUE" for variable in lacking)
        raise NotEligible(
            f"the worker of {name} starts with variables whose values were not kept: "
            f"{', '.join(lacking)}",
            next_step=f"snapshotctl restore {name} {given}",
        )
    return spec


def _set_variables(spec: dict[str, Any], variables: Mapping[str, str]) -> None:
    unknown = dict(variables)
    for row in _variables(spec):
        if row["name"] in variables:
            row.pop("valueFrom", None)
            row["value"] = variables[row["name"]]
            unknown.pop(row["name"], None)
    if unknown:
        has = ", ".join(dict.fromkeys(row["name"] for row in _variables(spec))) or "none"
        raise WrongArguments(
            f"the captured pod has no variable {', '.join(unknown)}",
            next_step=f"it has {has}; a pod with others is restored by --manifest FILE",
        )


def _taken_variables(spec: dict[str, Any]) -> list[str]:
    """Take out the variables that have no value, and return each of their names once."""
    lacking = [row for row in _variables(spec) if not {"value", "valueFrom"} & row.keys()]
    for container in _containers(spec):
        if "env" in container:
            container["env"] = [row for row in container["env"] if row not in lacking]
    return list(dict.fromkeys(row["name"] for row in lacking))


def _variables(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for container in _containers(spec) for row in container.get("env", ())]


def _containers(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [*spec.get("initContainers", ()), *spec["containers"]]


def _check_container(
    name: str, captured: str | None, target: str | None, names: Sequence[str]
) -> None:
    wanted = target or captured
    if target is not None and captured is not None and target != captured:
        raise WrongArguments(
            f"{name} holds container {captured}, not {target}",
            next_step=f"leave --container out, or use --container {captured}",
        )
    if wanted is not None and wanted not in names:
        raise WrongArguments(
            f"{name} holds container {wanted}; the pod has {', '.join(names)}",
            next_step=f"call a container of the pod {wanted}",
        )
