"""One set of rules says whether a manifest is right, in standalone mode and for a cluster."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from snapshot_api.facts import GPU_RESOURCE
from snapshot_api.manifests import message_schemas, parse, parse_identity
from snapshot_api.v1alpha1.checkpoint import LOADER_REFUSED
from snapshot_api.validate import (
    Problem,
    changes,
    problems,
    repetitions,
    unchecked,
    warnings,
    without_server_fields,
)
from snapshot_shared.errors import InvalidManifest
from tests.support import crd_samples
from tests.support.objects import checkpoint_document, restore_document
from tests.unit.tables import each

SAVER = {"image": "saver:1", "volumeMounts": [{"name": "models", "mountPath": "/models"}]}
ARTIFACT = {
    "contentUID": "00000000-0000-4000-8000-000000000001",
    "generation": 1,
    "rootDigest": "sha256:" + "0" * 64,
}


def in_cluster(**spec: Any) -> dict[str, Any]:
    """Return a checkpoint with what only a cluster honours in its template."""
    document = checkpoint_document()
    document["metadata"]["annotations"] = {"kubectl.kubernetes.io/last": "x" * 100_000}
    template = document["spec"]["job"]["podTemplateSpec"]
    template["spec"] |= {"restartPolicy": "Always", "tolerations": [{"operator": "Exists"}]}
    (container,) = template["spec"]["containers"]
    del container["command"]
    container["securityContext"] = {"runAsUser": 1}
    container["env"] = [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]
    document["spec"] |= spec
    return document


def found(document: Any) -> list[tuple[str, str]]:
    return [tuple(problem) for problem in problems(document, "kubernetes")]


def paths(document: Any) -> list[str]:
    return [path for path, _ in found(document)]


def test_a_cluster_takes_the_whole_pod_template_and_standalone_mode_what_it_honours() -> None:
    assert problems(in_cluster(), "kubernetes") == []
    refused = {problem.path for problem in problems(in_cluster(), "standalone")}
    where = "spec.job.podTemplateSpec.spec"
    assert {f"{where}.tolerations", f"{where}.restartPolicy"} <= refused
    assert f"{where}.containers[0].securityContext" in refused


@pytest.mark.parametrize("kind", ["DynamoCheckpoint", "Snapshot"])
def test_what_a_definition_takes_is_right(kind: str) -> None:
    assert problems(crd_samples.document(kind), "kubernetes") == []


def test_a_wrong_field_hides_no_rule_that_does_not_read_it() -> None:
    document = in_cluster(
        gpuMemoryService={
            "mode": "interPod",
            "extraClientContainers": ["main", "proxy"],
            "checkpoint": {"loader": {}},
        }
    )
    document["spec"]["identity"]["tensorParallelSize"] = -1
    job = document["spec"]["job"]
    job |= {"backoffLimit": "x", "targetContainerName": "engine", "extra": 1}
    job["sharedMemory"] = {"disabled": True, "size": "1Gi"}
    assert paths(document) == [
        "spec.identity.tensorParallelSize",
        "spec.job.extra",
        "spec.job.backoffLimit",
        "spec.gpuMemoryService.checkpoint.loader",
        "spec.gpuMemoryService.mode",
        "spec.job.targetContainerName",
        "spec.job.sharedMemory.size",
        "spec.gpuMemoryService.extraClientContainers[1]",
    ]


def test_a_rule_that_reads_a_wrong_field_is_left_out() -> None:
    document = in_cluster()
    document["spec"]["job"]["targetContainerName"] = 7
    assert paths(document) == ["spec.job.targetContainerName"]
    document = in_cluster()
    document["spec"]["job"]["podTemplateSpec"]["spec"]["containers"] = "main"
    assert paths(document) == ["spec.job.podTemplateSpec.spec.containers"]


BROKEN: dict[str, dict[str, Any]] = {
    "spec.gpuMemoryService.checkpoint.loader": {"checkpoint": {"loader": {"image": "l"}}},
    "spec.gpuMemoryService.mode": {"mode": "interPod"},
    "spec.gpuMemoryService.checkpoint.saver": {"enabled": False, "checkpoint": {"saver": SAVER}},
    "spec.gpuMemoryService.extraClientContainers": {
        "enabled": False,
        "extraClientContainers": ["main"],
    },
}


@pytest.mark.parametrize("path", BROKEN)
def test_a_rule_of_the_definition_is_kept_with_the_same_path_and_words(path: str) -> None:
    refused = found(in_cluster(gpuMemoryService=BROKEN[path]))
    assert [each for each, _ in refused] == [path]
    assert refused[0] in set(crd_samples.rules("DynamoCheckpoint"))


def test_an_item_of_a_list_whose_key_another_has_is_refused_by_its_place() -> None:
    saver = {
        "envs": [{"name": "A", "value": "1"}, {"name": "B"}, {"name": "A", "value": "2"}],
        "volumeMounts": [{"name": "a", "mountPath": "/a"}, {"name": "b", "mountPath": "/a"}],
    }
    document = in_cluster(gpuMemoryService={"checkpoint": {"saver": saver}})
    document["spec"]["job"]["podTemplateSpec"]["spec"]["containers"] *= 2
    assert found(document) == [
        ("spec.gpuMemoryService.checkpoint.saver.envs[2]", "'A' appears twice"),
        ("spec.gpuMemoryService.checkpoint.saver.volumeMounts[1]", "'/a' appears twice"),
        ("spec.job.podTemplateSpec.spec.containers[1]", "'main' appears twice"),
    ]


def test_a_null_is_a_field_left_out_but_for_a_field_that_is_unknown() -> None:
    document = in_cluster(deletionPolicy=None, unknown=None)
    document["spec"]["identity"]["dtype"] = None
    assert paths(document) == ["spec.unknown"]


@each(
    ("size", "text"),
    [
        (-5, "-5 is less than the minimum of 0"),
        (2**60, f"{2**60} is greater than the maximum of {2**50}"),
    ],
)
def test_a_size_that_no_program_could_read_is_refused(size: int, text: str) -> None:
    document = in_cluster()
    document["spec"]["job"]["sharedMemory"] = {"size": size}
    assert found(document) == [("spec.job.sharedMemory.size", text)]


@each(
    ("metadata", "expected"),
    [
        (None, [("metadata", "is required")]),
        ({"name": None}, [("metadata.name", "is required")]),
        ({"name": "a", "namespace": None, "labels": {"a": "b"}}, []),
        ({"name": "a", "namespace": 7}, [("metadata.namespace", "expected string, found 7")]),
    ],
)
def test_metadata_has_a_name_and_maybe_a_namespace(metadata: Any, expected: Any) -> None:
    assert found(in_cluster() | {"metadata": metadata}) == expected


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@each("value", [{}, [], [{"image": "a"}, {"image": "b"}], [{"name": nested(600)}]])
def test_a_rule_says_nothing_of_containers_that_are_none(value: Any) -> None:
    document = in_cluster()
    document["spec"]["job"]["podTemplateSpec"]["spec"]["containers"] = value
    refused = found(document)
    assert refused
    for path, text in refused:
        assert path.startswith("spec.job.podTemplateSpec.spec.containers")
        assert "appears twice" not in text


def test_a_list_that_is_too_long_is_not_read() -> None:
    document = in_cluster()
    (container,) = document["spec"]["job"]["podTemplateSpec"]["spec"]["containers"]
    container["env"] = [{"name": "A"}] * 6000
    assert [text for _, text in found(document)] == ["has 6000 items, at most 512 are allowed"]


def with_memory(memory: dict[str, Any], **job: Any) -> dict[str, Any]:
    document = checkpoint_document(**job)
    document["spec"]["gpuMemoryService"] = memory
    return document


def test_the_loader_of_a_checkpoint_is_refused_in_both_worlds_with_the_same_words() -> None:
    document = with_memory({"checkpoint": {"loader": {}}})
    expected = Problem("spec.gpuMemoryService.checkpoint.loader", LOADER_REFUSED)
    assert problems(document, "standalone") == problems(document, "kubernetes") == [expected]


@each("world", ["standalone", "kubernetes"])
@each(
    ("source", "number"),
    [({}, "neither"), ({"podRef": {"name": "p"}, "artifact": ARTIFACT}, "both")],
)
def test_a_snapshot_has_one_source_in_both_worlds(world: Any, source: Any, number: str) -> None:
    document = {"apiVersion": "nvidia.com/v1alpha1", "kind": "Snapshot", "metadata": {"name": "s"}}
    text = f"exactly one of podRef and artifact is needed, found {number}"
    refused = problems({**document, "spec": {"source": source}}, world)
    assert refused == [Problem("spec.source", text)]


@pytest.mark.parametrize(
    "document",
    [
        {"apiVersion": "v1", "kind": "ConfigMap", "data": {"a": 1}},
        {"apiVersion": "apps/v1", "kind": "Deployment"},
        {"apiVersion": "v1", "kind": "Pod", "spec": {"containers": [{"name": "a"}]}},
        {"apiVersion": "batch/v1", "kind": "Job"},
    ],
)
def test_a_kind_of_kubernetes_itself_is_left_to_kubernetes(document: Any) -> None:
    assert problems(document, "kubernetes") == []
    assert unchecked(document, "kubernetes").endswith(("Kubernetes checks it", "checks the rest"))


def test_the_pod_template_of_any_kind_is_checked_for_what_it_asks_of_snapback() -> None:
    wrong = restore_document()
    wrong["metadata"]["annotations"]["nvidia.com/restore-policy"] = "Never"
    document = {"apiVersion": "apps/v1", "kind": "Deployment", "spec": {"template": wrong}}
    (found,) = problems(document, "kubernetes")
    assert found.path == "spec.template.metadata.annotations[nvidia.com/restore-policy]"
    assert "only its annotations of Snapback" in unchecked(document, "kubernetes")


def test_words_and_values_of_a_template_that_are_no_texts_are_refused() -> None:
    document = in_cluster()
    (container,) = document["spec"]["job"]["podTemplateSpec"]["spec"]["containers"]
    container |= {"args": ["--port", 8000], "env": [{"name": "A", "value": True}, {"name": "B"}]}
    where = "spec.job.podTemplateSpec.spec.containers[0]"
    assert list(map(str, problems(document, "kubernetes"))) == [
        f"{where}.args[1]: expected string, found 8000; put it in quotes",
        f"{where}.env[0].value: expected string, found True; put it in quotes",
    ]
    assert unchecked(document, "kubernetes") == ""


@each(
    ("document", "path"),
    [
        (None, "(document)"),
        ({}, "kind"),
        ({"kind": ["Pod"]}, "kind"),
        ({"apiVersion": "nvidia.com/v1alpha1", "kind": "SnapshotJob"}, "kind"),
        ({"apiVersion": "nvidia.com/v1alpha1", "kind": "SnapshotRestore"}, "kind"),
        ({"apiVersion": "nvidia.com/v1", "kind": "Snapshot"}, "apiVersion"),
        ({"apiVersion": "v1", "kind": "Snapshot"}, "apiVersion"),
    ],
)
def test_a_kind_that_cannot_be_applied_is_refused(document: Any, path: str) -> None:
    assert paths(document) == [path]


@pytest.mark.parametrize("world", ["standalone", "kubernetes"])
def test_a_pod_that_cannot_be_restored_as_it_asks_is_refused_in_both_worlds(world: Any) -> None:
    document = restore_document()
    document["metadata"]["annotations"] |= {
        "nvidia.com/restore-container": "engine",
        "nvidia.com/restore-policy": "Never",
    }
    assert [problem.path for problem in problems(document, world)] == [
        "metadata.annotations[nvidia.com/restore-container]",
        "metadata.annotations[nvidia.com/restore-policy]",
    ]


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("Pod", "spec"),
        ("Job", "spec.template.spec"),
        ("DynamoCheckpoint", "spec.job.podTemplateSpec.spec"),
    ],
)
def test_an_image_is_named_where_nothing_is_made_from_it(kind: str, where: str) -> None:
    spec: Any = {"containers": [{"name": "a"}, {"name": "b", "image": "vllm:1"}]}
    for name in reversed(where.split(".")):
        spec = {name: spec}
    document = {"kind": kind, **spec}
    [found] = warnings(document, "standalone")
    assert str(found) == (
        f"{where}.containers[1].image: is not used: standalone mode starts the command as a "
        "process of the node"
    )
    assert warnings(document, "kubernetes") == []


def test_a_volume_that_the_template_does_not_have_is_a_warning_and_no_error() -> None:
    document = in_cluster(gpuMemoryService={"checkpoint": {"saver": SAVER}})
    spec = document["spec"]["job"]["podTemplateSpec"]["spec"]
    spec["volumes"] = [{"name": "cache", "emptyDir": {}}]
    mounts = [{"name": "cache", "mountPath": "/a"}, {"name": "keys", "mountPath": "/b"}]
    spec["containers"][0]["volumeMounts"] = mounts
    assert problems(document, "kubernetes") == []
    volumes = "spec.job.podTemplateSpec.spec.volumes"
    assert warnings(document, "kubernetes") == [
        Problem(
            "spec.gpuMemoryService.checkpoint.saver.volumeMounts[0].name",
            f"no volume is called 'models'; add it to {volumes}",
        ),
        Problem(
            "spec.job.podTemplateSpec.spec.containers[0].volumeMounts[1].name",
            f"no volume is called 'keys'; add it to {volumes}",
        ),
    ]


def test_a_document_about_an_object_that_another_one_has_is_named_by_its_place() -> None:
    def named(name: object, **meta: str) -> dict[str, Any]:
        return {"kind": "Snapshot", "metadata": {"name": name, **meta}}

    documents = [
        *(named("a"), None, named("a", namespace="team"), named("a", namespace="default")),
        *(named("a", namespace="team"), named(["a"]), {"kind": "Pod", "metadata": {"name": "a"}}),
    ]
    problem = Problem("metadata.name", "a appears twice")
    assert [*repetitions(documents)] == [(3, problem), (4, problem)]


def test_a_change_of_a_spec_is_named_at_every_field_that_differs() -> None:
    before = in_cluster()["spec"]
    after = copy.deepcopy(before)
    pod = after["job"]["podTemplateSpec"]["spec"]
    pod["tolerations"][0]["operator"] = "Equal"
    pod["hostNetwork"] = True
    pod["containers"].append({"name": "more"})
    del after["identity"]["backendFramework"]
    text = "is immutable; delete the object and apply it again"
    where = "spec.job.podTemplateSpec.spec"
    assert [*changes(before, after)] == [
        Problem("spec.identity.backendFramework", text),
        Problem(f"{where}.containers", text),
        Problem(f"{where}.hostNetwork", text),
        Problem(f"{where}.tolerations[0].operator", text),
    ]
    assert [*changes(before, copy.deepcopy(before))] == []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    *("job", "podTemplateSpec", "spec", "containers", "name", "resources"),
                    *("limits", GPU_RESOURCE, "gpuMemoryService", "checkpoint", "saver"),
                    *("extraClientContainers", "volumeMounts", "volumes", "source", "identity"),
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@example(spec={"containers": None}, meta=None, kind="Pod")
@given(spec=JSON, meta=JSON, kind=st.sampled_from(["DynamoCheckpoint", "Snapshot", "Pod", "Job"]))
def test_any_document_is_judged_and_none_raises(spec: Any, meta: Any, kind: str) -> None:
    version = {"Pod": "v1", "Job": "batch/v1"}.get(kind, "nvidia.com/v1alpha1")
    document = {"apiVersion": version, "kind": kind, "metadata": meta, "spec": spec}
    assert problems(document, "standalone")
    problems(document, "kubernetes")
    for world in ("standalone", "kubernetes"):
        warnings(document, world)  # type: ignore[arg-type]
    assert [*changes(spec, copy.deepcopy(spec))] == []
    assert without_server_fields(document)["kind"] == kind


def refused(document: Any) -> list[str]:
    with pytest.raises(InvalidManifest) as caught:
        parse(document)
    found: list[str] = caught.value.values["problems"]
    return found


CONTAINER = {"name": "a", "command": ["x"]}
GPUS = "spec.containers[0].resources.limits.nvidia.com/gpu: "


def pod(**spec: Any) -> dict[str, Any]:
    document = restore_document()
    document["spec"] |= spec
    return document


def with_gpus(count: object, **more: str) -> dict[str, Any]:
    return {**CONTAINER, "resources": {"limits": {"nvidia.com/gpu": count}}, **more}


def test_every_problem_is_named_at_once_by_its_path() -> None:
    document = checkpoint_document()
    document["metadata"]["name"] = "Bad_Name"
    document["spec"]["extra"] = 1
    document["spec"]["identity"] = {"model": 7}
    container = document["spec"]["job"]["podTemplateSpec"]["spec"]["containers"][0]
    container["securityContext"] = {}
    found = refused(document)
    where = "spec.job.podTemplateSpec.spec.containers[0].securityContext:"
    identity = ("spec.identity.backendFramework:", "spec.identity.model:")
    for path in ("metadata.name:", "spec.extra:", *identity, where):
        assert any(line.startswith(path) for line in found), (path, found)


@each(
    ("document", "found"),
    [
        (pod(containers=[]), "spec.containers: "),
        (pod(containers=[{"name": "main"}]), "spec.containers[0].command: "),
        (pod(containers=[{**CONTAINER, "name": "A"}]), "spec.containers[0].name: "),
        (pod(containers=[{**CONTAINER, "command": "x"}]), "spec.containers[0].command: "),
        (pod(containers=[CONTAINER, CONTAINER]), "spec.containers[1].name: 'a' appears twice"),
        (
            pod(containers=[{**CONTAINER, "workingDir": "here"}]),
            "spec.containers[0].workingDir: 'here' is not an absolute path",
        ),
        (
            pod(containers=[{**CONTAINER, "env": [{"name": "A", "value": "\0"}]}]),
            "spec.containers[0].env[0].value: ",
        ),
        (pod(containers=[with_gpus(-1)]), GPUS),
        (pod(containers=[with_gpus(-2)]), GPUS),
        (
            pod(containers=[with_gpus("two")]),
            f"{GPUS}'two' is not a quantity, such as 500m, 2 or 4Gi",
        ),
        (pod(containers=[with_gpus(65)]), "spec.containers: "),
        (
            pod(containers=[with_gpus(33), with_gpus(32, name="b")]),
            "spec.containers: nvidia.com/gpu must be a whole number up to 64",
        ),
        (pod(restartPolicy="Always"), "spec.restartPolicy: "),
        (pod(volumes=[]), "spec.volumes: "),
        (pod(nodeName="a_b"), "spec.nodeName: 'a_b' is not a name: lower-case letters"),
        (restore_document(name="a..b"), "metadata.name: "),
    ],
)
def test_a_pod_that_standalone_mode_cannot_run_is_refused_by_the_path_of_the_field(
    document: dict[str, Any], found: str
) -> None:
    (problem,) = refused(document)
    assert problem.startswith(found)


@each(
    ("field", "value", "problem"),
    [
        ("backoffLimit", "x", "expected integer, found 'x'"),
        ("backoffLimit", -1, "-1 is less than the minimum of 0"),
        ("targetContainerName", "A", "'A' is not a name: up to 63 lower-case letters"),
        ("driver", "none", "'none' is not one of ['cooperative'"),
        ("backoffLimit", "x" * 79, f"expected integer, found '{'x' * 76}..."),
        ("backoffLimit", "x" * 78, f"expected integer, found '{'x' * 78}'"),
        ("extra", 1, "unknown or unsupported field (known here: activeDeadlineSeconds, "),
    ],
)
def test_a_problem_says_what_was_expected_and_what_was_found(
    field: str, value: object, problem: str
) -> None:
    (found,) = refused(checkpoint_document(**{field: value}))
    assert found.startswith(f"spec.job.{field}: {problem}")


@each(
    ("document", "path"),
    [
        (with_memory({"deviceClassName": "own"}), "spec.gpuMemoryService.deviceClassName"),
        (
            with_memory({"extraClientContainers": ["a"]}),
            "spec.gpuMemoryService.extraClientContainers",
        ),
        (with_memory({"checkpoint": {"saver": SAVER}}), "spec.gpuMemoryService.checkpoint.saver"),
        (with_memory({}, sharedMemory={"size": "1Gi"}), "spec.job.sharedMemory"),
        (with_memory({}, ttlSecondsAfterFinished=300), "spec.job.ttlSecondsAfterFinished"),
    ],
)
def test_a_field_that_only_kubernetes_honours_is_refused_by_its_path(
    document: dict[str, Any], path: str
) -> None:
    assert refused(document) == [
        f"{path}: is honoured on Kubernetes alone; remove it, or apply this to a cluster"
    ]


@pytest.mark.parametrize("checkpoint", [{}, {"saver": {}}, {"saver": None}])
def test_an_empty_saver_is_none(checkpoint: dict[str, Any]) -> None:
    document = with_memory({"enabled": True, "checkpoint": checkpoint})
    assert parse(document).spec.gpu_memory_service.enabled


@pytest.mark.parametrize(
    "parameters", [{str(number): "" for number in range(257)}, {"a": "x" * 4097}]
)
def test_parameters_of_an_identity_are_bounded(parameters: dict[str, str]) -> None:
    document = checkpoint_document()
    document["spec"]["identity"]["extraParameters"] = parameters
    assert refused(document)[0].startswith("spec.identity.extraParameters")


def test_a_target_container_that_does_not_exist_is_refused_with_those_that_do() -> None:
    document = checkpoint_document(targetContainerName="engine")
    assert refused(document) == [
        "spec.job.targetContainerName: no container of podTemplateSpec is called engine"
    ]


@each("document", [None, [], "text", 7, {}, {"kind": "Secret"}, {"kind": []}])
def test_what_is_no_manifest_at_all_is_refused(document: Any) -> None:
    assert refused(document)


def test_as_many_gpus_as_a_node_may_have_can_be_asked_for() -> None:
    assert parse(pod(containers=[with_gpus(32, workingDir="/here"), with_gpus(32, name="b")]))


def test_no_more_than_fifty_problems_are_shown() -> None:
    unknown = {f"x{number}": 1 for number in range(51)}
    with pytest.raises(InvalidManifest, match="51 problems") as caught:
        parse(pod(**unknown), where="f: ")
    shown = caught.value.values["problems"]
    assert len(shown) == 50
    assert shown[0].startswith("f: spec.")


@each(
    ("spec", "found"),
    [
        (None, "spec.identity: expected a mapping, found nothing"),
        ({}, "spec.identity: expected a mapping, found nothing"),
        ({"identity": []}, "spec.identity: expected a mapping, found list"),
        ({"identity": {"model": "m"}}, "spec.identity.backendFramework: is required"),
    ],
)
def test_an_identity_is_read_of_a_checkpoint_whatever_the_rest_of_it_is(
    spec: object, found: str
) -> None:
    document = checkpoint_document()
    identity = parse_identity({**document, "spec": {"identity": document["spec"]["identity"]}})
    assert identity.model == "example/llm"
    with pytest.raises(InvalidManifest) as caught:
        parse_identity({**document, "spec": spec}, where="f: ")
    assert caught.value.values["problems"] == [f"f: {found}"]


def test_what_get_prints_can_be_applied_again() -> None:
    document = checkpoint_document()
    document["metadata"].update(uid="x", resourceVersion="7", creationTimestamp="then")
    document["status"] = {"phase": "Ready"}
    assert parse(document) == parse(checkpoint_document())


def test_every_request_reply_and_event_has_a_schema_as_orders_have() -> None:
    schemas = message_schemas()
    assert {"get_request.v1", "get_reply.v1", "object_event.v1", "sim_request.v1"} <= set(schemas)
    assert schemas["get_request.v1"]["$defs"]["GetRequest"]["required"] == ["kind"]
