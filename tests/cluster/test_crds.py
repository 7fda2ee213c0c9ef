"""A real API server takes the definitions, and refuses by its path what breaks each rule."""

from __future__ import annotations

import copy
import json
import re
import secrets
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import msgspec
import pytest
import yaml

from snapshot_api.kinds import KINDS
from snapshot_api.schema.definitions import object_schema
from snapshot_api.schema.rules import as_stored, broken
from snapshot_api.validate import refused_by_definition
from tests.cluster.kubectl import Kubectl
from tests.cluster.programs import CRDS, REPOSITORY
from tests.cluster.target import Target
from tests.support.crd_samples import (
    IMMUTABLE,
    at,
    document,
    fixed_paths,
    mutated,
    other_values,
    rules,
    sample,
    schema_at,
)

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("crds")]

NAMES = [path.stem for path in sorted(CRDS.iterdir())]
KINDS_OF_OURS = [kind.name for kind in KINDS.values() if kind.is_ours]
EXAMPLES = [
    found
    for path in (
        REPOSITORY / "tests/cluster/data/checkpoints.yaml",
        REPOSITORY / "deploy/examples/checkpoint.yaml",
    )
    for found in yaml.safe_load_all(path.read_text("utf-8"))
]
STATUS = ("is never changed once it is set", "never falls")


class Kube(Kubectl):
    """A namespace of a cluster, in which objects are given to kubectl."""

    def done(self, *words: str, given: Any = None) -> str:
        """What kubectl prints; it neither fails nor warns."""
        result = self.try_(*words, given=json.dumps(given))
        assert (result.returncode, result.stderr) == (0, ""), result
        return result.stdout

    def refused(self, *words: str, given: Any = None) -> dict[str, str]:
        """The message of each path that the API server refuses."""
        result = self.try_(*words, given=json.dumps(given))
        assert result.returncode, result
        text = re.sub(r"^The .*? is invalid: ", "* ", result.stderr)
        found = dict(re.findall(r"^\* ([^\s:]+): (.*)$", text, re.MULTILINE))
        # Beside a value of a wrong type: the rules were not looked at.
        found.pop("<nil>", None)
        return found

    def create(self, found: dict[str, Any]) -> Any:
        """An object as it is stored, with its status."""
        stored = self.done("create", "-f", "-", "-o", "json", given=found)
        if "status" in found:
            stored = self.done(
                *("patch", found["kind"], found["metadata"]["name"], "--subresource=status"),
                *("--type=merge", "-o", "json", "-p", json.dumps({"status": found["status"]})),
            )
        return json.loads(stored)


@pytest.fixture(scope="module")
def kube(target: Target, definitions: None) -> Iterator[Kube]:
    name, kubectl = f"crds-{secrets.token_hex(4)}", target.kubectl
    kubectl.run("create", "namespace", name)
    found = Kube(kubectl.kubeconfig, kubectl.program, name)
    yield found
    for kind in KINDS_OF_OURS:
        scope = [] if KINDS[kind].namespaced else ["-l", f"test={name}"]
        found.try_("delete", kind, *(scope or ["--all"]), "--wait=false")
    kubectl.try_("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="module")
def stored(kube: Kube) -> dict[str, dict[str, Any]]:
    """One object of each kind with every field that it may have, as the API server stores it."""
    made = {kind: document(kind) for kind in KINDS_OF_OURS}
    for found in made.values():
        found["metadata"]["labels"] = {"test": kube.namespace}
    return {kind: kube.create(found) for kind, found in made.items()}


def test_the_definitions_are_structural_and_established(kube: Kube) -> None:
    for item in json.loads(kube.done("get", "crd", *NAMES, "-o", "json"))["items"]:
        held = {row["type"]: row["status"] for row in item["status"]["conditions"]}
        assert held["Established"] == held["NamesAccepted"] == "True"
        assert held.get("NonStructuralSchema", "False") == "False"


def test_applying_them_again_changes_nothing(kube: Kube) -> None:
    def versions() -> str:
        path = "jsonpath={.items[*].metadata.resourceVersion}"
        return kube.done("get", "crd", *NAMES, "-o", path)

    before = versions()
    kube.done("apply", "--server-side", "-f", str(CRDS))
    assert versions() == before


@pytest.mark.parametrize("found", EXAMPLES, ids=lambda found: found["metadata"]["name"])
def test_an_object_that_is_right_is_stored_as_the_struct_reads_it(
    kube: Kube, found: dict[str, Any]
) -> None:
    given = copy.deepcopy(found)
    for _ in range(2):
        kube.done("apply", "-f", "-", given=given)
    result = json.loads(kube.done("get", found["kind"], found["metadata"]["name"], "-o", "json"))
    assert "status" not in result
    assert result["metadata"]["generation"] == 1
    template = given["spec"].get("job", {}).pop("podTemplateSpec", None)
    if template is not None:
        template.get("metadata", {}).pop("creationTimestamp", None)
        held = result["spec"]["job"].pop("podTemplateSpec")
        held.get("metadata", {}).pop("creationTimestamp", None)
        assert held == template
        plain = {"spec": {"containers": [{"name": "main", "command": ["x"]}]}}
        result["spec"]["job"]["podTemplateSpec"] = given["spec"]["job"]["podTemplateSpec"] = plain
    type_ = KINDS[found["kind"]].type
    assert msgspec.convert(result, type_).spec == msgspec.convert(given, type_).spec


@pytest.mark.parametrize("kind", KINDS_OF_OURS)
def test_no_field_of_an_object_is_dropped(
    kube: Kube, stored: dict[str, dict[str, Any]], kind: str
) -> None:
    wanted = document(kind)
    assert {part: stored[kind][part] for part in ("spec", "status")} == {
        part: wanted[part] for part in ("spec", "status")
    }
    value = msgspec.json.decode(json.dumps(stored[kind]), type=KINDS[kind].type)
    assert value.metadata.uid == stored[kind]["metadata"]["uid"]


FIXED = [(kind, path) for kind in KINDS_OF_OURS for path in fixed_paths(kind)]


@pytest.mark.turns
@pytest.mark.parametrize(("kind", "path"), FIXED)
def test_a_field_of_a_spec_is_never_changed(
    kube: Kube, stored: dict[str, dict[str, Any]], kind: str, path: str
) -> None:
    for change in other_values(kind, path):
        found = copy.deepcopy(stored[kind])
        change(found)
        if found["spec"] == stored[kind]["spec"]:
            assert path == "spec.source.artifact", "nothing to remove, as there is a pod"
            continue
        refused = kube.refused("replace", "--dry-run=server", "-f", "-", given=found)
        assert path in refused, refused


def test_a_field_that_was_left_out_is_never_added(kube: Kube) -> None:
    found = document("DynamoCheckpoint")
    found["metadata"]["name"] = "bare"
    del found["spec"]["identity"]["dtype"], found["spec"]["job"]["sharedMemory"]
    del found["spec"]["gpuMemoryService"]["checkpoint"]
    bare = kube.create(found)
    added = document("DynamoCheckpoint")["spec"]
    refused = kube.refused("replace", "--dry-run=server", "-f", "-", given=bare | {"spec": added})
    assert set(refused) == {
        *("spec.identity.dtype", "spec.job.sharedMemory", "spec.gpuMemoryService")
    }


def changed(where: str, **fields: Any) -> Callable[[dict[str, Any]], object]:
    """Change fields of the object at a path below the spec; without fields, remove it."""

    def change(spec: dict[str, Any]) -> None:
        parent, last = at({"spec": spec}, f"spec.{where}")
        if fields:
            parent[last].update(fields)
        else:
            del parent[last]

    return change


def _two_sources(spec: dict[str, Any]) -> None:
    kind = "Snapshot" if "snapshotRef" not in spec else "SnapshotContent"
    spec["source"]["artifact"] = sample(schema_at(kind, "spec.source.artifact"))


def _two_containers(spec: dict[str, Any]) -> None:
    spec["job"]["podTemplateSpec"]["spec"]["containers"].append({"name": "main"})


SAVER = {"saver": {"image": "saver:1"}}
DOUBLE = [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]
MOUNTS = [{"name": "a", "mountPath": "/a"}, {"name": "b", "mountPath": "/a"}]
Wrong = tuple[str, str, Callable[[dict[str, Any]], object]]


def of_memory(path: str, **fields: Any) -> Wrong:
    path = f"spec.gpuMemoryService.{path}"
    return "DynamoCheckpoint", path, changed("gpuMemoryService", **fields)


def of_checkpoint(path: str, where: str, **fields: Any) -> Wrong:
    return "DynamoCheckpoint", f"spec.{path}", changed(where, **fields)


BROKEN: list[Wrong] = [
    # Kind, path, what breaks its rule.
    of_memory("checkpoint.loader", checkpoint={"loader": {"image": "loader:1"}}),
    of_memory("checkpoint.loader", checkpoint={"loader": {}, **SAVER}),
    of_memory("mode", mode="interPod"),
    of_memory("checkpoint.saver", enabled=False, extraClientContainers=[], checkpoint=SAVER),
    of_memory("extraClientContainers", enabled=False, extraClientContainers=["a"], checkpoint={}),
    of_checkpoint("job.sharedMemory.size", "job", sharedMemory={"disabled": True, "size": "1Gi"}),
    of_checkpoint("job.targetContainerName", "job", targetContainerName="engine"),
    ("Snapshot", "spec.source", _two_sources),
    ("Snapshot", "spec.source", changed("source.podRef")),
    ("SnapshotContent", "spec.source", _two_sources),
    ("SnapshotContent", "spec.source.nodeName", changed("source.nodeName")),
]
MALFORMED: list[Wrong] = [
    of_memory("checkpoint.saver.envs[1]", checkpoint={"saver": {"envs": DOUBLE}}),
    of_memory("checkpoint.saver.volumeMounts[1]", checkpoint={"saver": {"volumeMounts": MOUNTS}}),
    of_memory("extraClientContainers[1]", extraClientContainers=["a", "a"]),
    ("DynamoCheckpoint", "spec.job.podTemplateSpec.spec.containers[1]", _two_containers),
    of_checkpoint("identity.backendFramework", "identity", backendFramework="other"),
    of_checkpoint("identity.tensorParallelSize", "identity", tensorParallelSize=-1),
    of_checkpoint("job.sharedMemory.size", "job", sharedMemory={"size": "much"}),
    ("Snapshot", "spec.source.podRef.name", changed("source.podRef", name="a..b")),
    ("Snapshot", "spec.source.podRef.name", changed("source.podRef", name="a\n")),
]


@pytest.mark.turns
@pytest.mark.parametrize(("kind", "path", "broken"), BROKEN + MALFORMED)
def test_an_object_that_breaks_a_rule_is_refused_by_the_path_of_the_field(
    kube: Kube, kind: str, path: str, broken: Callable[[dict[str, Any]], object]
) -> None:
    found = document(kind)
    found["metadata"]["name"] = "broken"
    broken(found["spec"])
    refused = kube.refused("create", "--dry-run=server", "-f", "-", given=found)
    assert list(refused) == [path]


@pytest.mark.turns
@pytest.mark.parametrize("seed", range(50))
@pytest.mark.parametrize("kind", KINDS_OF_OURS)
def test_python_judges_an_object_as_the_api_server_does(
    kube: Kube, stored: dict[str, dict[str, Any]], kind: str, seed: int
) -> None:
    changed = mutated(kind, Random(seed))
    del changed["status"]
    schema = object_schema(KINDS[kind], KINDS[kind].hub)
    for verb in ("create", "replace"):
        given = copy.deepcopy(changed)
        if verb == "create":
            given["metadata"]["name"] = "judged"
        old = stored[kind] if verb == "replace" else None
        found = refused_by_definition(KINDS[kind], given, old)
        result = kube.try_(verb, "--dry-run=server", "-f", "-", given=json.dumps(given))
        assert bool(found) == bool(result.returncode), (found, given, result)
        rules = {tuple(each) for each in broken(schema, as_stored(schema, given), old)}
        # With a wrong type the API server does not look at its rules.
        if found and {tuple(each) for each in found} <= rules:
            refused = kube.refused(verb, "--dry-run=server", "-f", "-", given=given)
            assert set(refused) == {each.path for each in found}
            # More than one rule may name a path.
            assert all(each.text in result.stderr for each in found), result


def test_all_that_is_wrong_is_named_at_once(kube: Kube) -> None:
    found = document("DynamoCheckpoint")
    found["spec"]["gpuMemoryService"]["checkpoint"] |= {"loader": {}}
    found["spec"]["job"] |= {"targetContainerName": "engine"}
    refused = kube.refused("create", "--dry-run=server", "-f", "-", given=found)
    assert set(refused) == {
        *("spec.gpuMemoryService.checkpoint.loader", "spec.job.targetContainerName")
    }


@pytest.mark.parametrize(
    ("kind", "path", "changed"),
    [
        ("Snapshot", "status.boundSnapshotContentName", {"boundSnapshotContentName": "other"}),
        ("Snapshot", "status.boundSnapshotContentName", {"boundSnapshotContentName": None}),
        ("SnapshotContent", "status.committed", {"committed": {"generation": 7}}),
        ("SnapshotContent", "status.committed", {"committed": None}),
        ("SnapshotContent", "status.attempt", {"attempt": 0}),
        ("SnapshotRestore", "status.attempt", {"attempt": None}),
    ],
)
def test_a_status_keeps_what_was_promised(
    kube: Kube, stored: dict[str, dict[str, Any]], kind: str, path: str, changed: dict[str, Any]
) -> None:
    name = stored[kind]["metadata"]["name"]
    words = ("patch", kind, name, "--subresource=status", "--type=merge", "--dry-run=server")
    assert list(kube.refused(*words, "-p", json.dumps({"status": changed}))) == [path]
    kube.done(*words, "-p", json.dumps({"status": {"phase": "Other"}}))


def test_every_rule_of_every_kind_is_broken_here() -> None:
    broken = {(kind, path) for kind, path, _ in BROKEN}
    for kind in KINDS_OF_OURS:
        for path, message in rules(kind):
            is_checked = message.startswith(IMMUTABLE) or message in STATUS
            assert is_checked or (kind, path) in broken, (kind, path)


COLUMNS = {
    "DynamoCheckpoint": "NAME MODEL BACKEND PHASE SIZE REASON AGE",
    "Snapshot": "NAME POD PHASE SIZE REASON AGE",
    "SnapshotContent": "NAME PHASE PROGRESS SIZE NODE REASON AGE NAMESPACE SNAPSHOT",
    "SnapshotRestore": "NAME POD SOURCE PHASE PROGRESS NODE REASON AGE",
}
WIDE = {
    "DynamoCheckpoint": "CHECKPOINTID DRIVER ARTIFACT TRACE",
    "Snapshot": "DRIVER REVISION-OF ARTIFACT TRACE",
    "SnapshotContent": "PAUSED(S) TOOK(S) DRIVER ARTIFACT TRACE",
    "SnapshotRestore": "TOOK(S) DRIVER ARTIFACT TRACE",
}


@pytest.mark.parametrize("kind", KINDS_OF_OURS)
def test_kubectl_shows_the_columns(
    kube: Kube, stored: dict[str, dict[str, Any]], kind: str
) -> None:
    name = stored[kind]["metadata"]["name"]
    ready = {"type": "Ready", "status": "False", "reason": "Captured"}
    shown = {
        "phase": "Ready",
        "progress": "2/3",
        "size": "1.5GiB",
        "conditions": [ready],
        "traceparent": "trace",
        "nodeName": "node-1",
        "pausedSeconds": 0.25,
        "capturedSeconds": 2.5,
        "restoredSeconds": 1.5,
    }
    fields = schema_at(kind, "status")["properties"]
    status = {field: value for field, value in shown.items() if field in fields}
    words = ("--type=merge", "-p", json.dumps({"status": status}))
    kube.done("patch", kind, name, "--subresource=status", *words)
    trace = "nvidia.com/traceparent=trace"
    kube.done("annotate", kind, name, trace, "--overwrite")
    plain = kube.done("get", kind, name).splitlines()
    wide = kube.done("get", kind, name, "-o", "wide").splitlines()
    assert plain[0].split() == COLUMNS[kind].split()
    assert wide[0].split() == (COLUMNS[kind] + " " + WIDE[kind]).split()
    assert len(wide[1].split()) == len(wide[0].split()), "no column is empty"
    cells = dict(zip(wide[0].split(), wide[1].split(), strict=True))
    assert (cells["PHASE"], cells["REASON"], cells["TRACE"]) == ("Ready", "Captured", "trace")


def test_all_kinds_are_found_by_their_short_names_and_in_one_list(
    kube: Kube, stored: dict[str, dict[str, Any]]
) -> None:
    for kind in KINDS_OF_OURS:
        name = stored[kind]["metadata"]["name"]
        assert name in kube.done("get", KINDS[kind].short, "-o", "name")
        assert name in kube.done("get", "snapback", "-o", "name")
