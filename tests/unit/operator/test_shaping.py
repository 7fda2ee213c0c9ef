"""The Job of a checkpoint in a cluster: what is changed in a pod template, and what is not."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from snapshot_operator.core.checkpoint import _job
from snapshot_operator.core.sharing import identity_hash
from snapshot_operator.kube.shaping import (
    DriverNotInCluster,
    devices_template,
    find_container,
    job_manifest,
    source_template,
    with_memory_server,
)
from snapshot_shared.errors import InvalidManifest
from tests.support.objects import checkpoint, checkpoint_document

TEMPLATE: dict[str, Any] = {
    "metadata": {"labels": {"team": "a"}, "annotations": {"sidecar.istio.io/inject": "true"}},
    "spec": {
        "restartPolicy": "OnFailure",
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}],
        "containers": [
            {"name": "sidecar", "image": "s"},
            {
                "name": "main",
                "image": "m",
                "env": [
                    {"name": "Z"},
                    {"name": "A"},
                    {"name": "SNAPSHOT_CONTROL_DIR", "value": "/x"},
                ],
                "volumeMounts": [{"name": "models", "mountPath": "/models"}],
                "livenessProbe": {"httpGet": {"port": 8000}},
                "startupProbe": {"httpGet": {"port": 8000}},
                "readinessProbe": {"httpGet": {"port": 8000}},
            },
        ],
    },
}


def shaped(target: str = "main") -> dict[str, Any]:
    return source_template(TEMPLATE, target, {"nvidia.com/snapshot-checkpoint-id": "abc"})


def test_the_template_itself_is_left_as_it_was() -> None:
    before = copy.deepcopy(TEMPLATE)
    shaped()
    assert before == TEMPLATE


def test_what_is_not_named_passes_through_and_other_containers_are_left_alone() -> None:
    spec = shaped()["spec"]
    assert spec["tolerations"] == TEMPLATE["spec"]["tolerations"]
    assert spec["containers"][0] == {"name": "sidecar", "image": "s"}
    assert spec["volumes"][0] == TEMPLATE["spec"]["volumes"][0]


def test_the_worker_runs_once_and_without_a_service_mesh() -> None:
    template = shaped()
    assert template["spec"]["restartPolicy"] == "Never"
    assert template["metadata"]["annotations"] == {
        "nvidia.com/snapshot-artifact-version": "1",
        "sidecar.istio.io/inject": "false",
        "linkerd.io/inject": "disabled",
    }
    assert template["metadata"]["labels"] == {
        "team": "a",
        "nvidia.com/snapshot-checkpoint-id": "abc",
        "nvidia.com/snapshot-is-checkpoint-source": "true",
    }


def test_the_targets_readiness_is_that_it_may_be_captured_and_its_other_probes_go() -> None:
    main = find_container(shaped()["spec"], "main")
    command = ["cat", "/snapshot-control/ready-for-snapshot"]
    assert main["readinessProbe"]["exec"]["command"] == command
    assert not main.keys() & {"livenessProbe", "startupProbe"}


def test_the_control_directory_is_the_containers_own_and_the_environment_keeps_its_order() -> None:
    main = find_container(shaped()["spec"], "main")
    mount = {"name": "snapshot-control", "mountPath": "/snapshot-control", "subPath": "main"}
    assert main["volumeMounts"][-1] == mount
    names = ["Z", "A", "SNAPSHOT_CONTROL_DIR", "DYN_SNAPSHOT_CONTROL_DIR"]
    assert [row["name"] for row in main["env"]] == names
    assert main["env"][2]["value"] == "/snapshot-control"


def test_an_unknown_target_is_refused_with_the_containers_that_there_are() -> None:
    with pytest.raises(InvalidManifest, match=r"engine.*found sidecar, main"):
        shaped("engine")


def test_a_driver_that_replaces_the_process_gets_no_job() -> None:
    value = checkpoint(driver="respawn")
    with pytest.raises(DriverNotInCluster, match=r"spec\.job\.driver is respawn") as refused:
        job_manifest(_job(value), checkpoint_document(driver="respawn"))
    assert refused.value.reason == "DriverNotInCluster"


def test_the_job_is_owned_by_its_checkpoint_and_carries_what_was_decided() -> None:
    job = {"activeDeadlineSeconds": 120, "backoffLimit": 2, "sourcePolicy": "Terminate"}
    value = checkpoint(**job)
    manifest = job_manifest(_job(value), checkpoint_document(**job))
    assert manifest["metadata"]["ownerReferences"][0]["kind"] == "DynamoCheckpoint"
    labels = {"nvidia.com/snapshot-checkpoint-id": identity_hash(value)}
    assert manifest["metadata"]["labels"] == labels
    assert labels.items() <= manifest["spec"]["template"]["metadata"]["labels"].items()
    assert manifest["spec"]["backoffLimit"] == 0
    assert manifest["spec"]["activeDeadlineSeconds"] == 120


CLAIM = {"claims": [{"name": "gpu"}]}


def with_server(target: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    main = {"name": "main", "resources": CLAIM, **(target or {})}
    spec: dict[str, Any] = {"containers": [main], **changes}
    with_memory_server(spec, main, "gms:1")
    return spec


def test_a_memory_server_runs_before_the_worker_and_beside_it_with_the_devices_of_its_claim() -> (
    None
):
    spec = with_server(initContainers=[{"name": "fetch"}])
    server, fetch = spec["initContainers"]
    assert (server["name"], server["image"], fetch["name"]) == ("gms-server", "gms:1", "fetch")
    assert server["restartPolicy"] == "Always"
    assert server["resources"]["claims"] == CLAIM["claims"]
    [main] = spec["containers"]
    mount = {"name": "gms-sockets", "mountPath": "/gms-sockets"}
    assert mount in main["volumeMounts"]
    assert mount in server["volumeMounts"]
    assert {"name": "GMS_SOCKET_DIR", "value": "/gms-sockets"} in main["env"]
    assert {"name": "SNAPBACK_NATS_URL", "value": ""} in server["env"]


def test_a_memory_server_of_the_template_keeps_what_it_says() -> None:
    own = {
        "name": "gms-server",
        "image": "mine:2",
        "command": ["mine"],
        "volumeMounts": [{"name": "x", "mountPath": "/x"}],
        "resources": {"limits": {"cpu": "10m"}},
        "securityContext": {"runAsUser": 7},
    }
    [server] = with_server(initContainers=[own])["initContainers"]
    assert (server["image"], server["command"]) == ("mine:2", ["mine"])
    assert server["volumeMounts"][0]["mountPath"] == "/x"
    assert server["resources"] == {"limits": {"cpu": "10m"}, **CLAIM}
    assert server["securityContext"] == {"runAsUser": 7}


def test_a_memory_server_asks_for_little_and_is_restricted_as_the_user_of_the_worker() -> None:
    user = {"runAsNonRoot": True, "runAsUser": 1000, "privileged": True}
    [server] = with_server({"securityContext": user})["initContainers"]
    assert server["resources"]["requests"] == {"cpu": "50m", "memory": "128Mi"}
    assert server["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def test_a_memory_server_serves_workers_of_the_group_of_the_volumes() -> None:
    [server] = with_server(securityContext={"fsGroup": 2000})["initContainers"]
    assert {"name": "SNAPBACK_LEASE_GROUP", "value": "2000"} in server["env"]


def test_a_worker_that_claims_no_devices_has_no_memory_server() -> None:
    claimless = {"resources": {"limits": {"cpu": "1"}}}
    assert with_server(claimless) == {"containers": [{"name": "main", **claimless}]}


def of_gms(target: dict[str, Any] | None = None, **gms: Any) -> dict[str, Any]:
    document = checkpoint_document()
    identity = {"model": "m", "backendFramework": "vllm", "tensorParallelSize": 2}
    main = {"name": "main", "image": "m", **(target or {})}
    template = {"spec": {"containers": [main]}}
    document["spec"] |= {"gpuMemoryService": gms, "identity": identity}
    document["spec"]["job"] = {"podTemplateSpec": template}
    return document


JOB = _job(checkpoint())


def pod_spec(document: dict[str, Any]) -> Any:
    """Return the spec of the pods of a checkpoint's Job."""
    return job_manifest(JOB, document, "gms:1")["spec"]["template"]["spec"]


def devices_claimed(document: dict[str, Any]) -> Any:
    """Return the one request of the claim of a checkpoint's pods."""
    claimed: Any = devices_template(JOB, document)
    [request] = claimed["spec"]["spec"]["devices"]["requests"]
    return request["exactly"]


@pytest.mark.parametrize(
    ("sizes", "count"), [({}, 1), ({"tensorParallelSize": 0}, 1), ({"pipelineParallelSize": 2}, 2)]
)
def test_a_parallel_size_of_zero_is_one_rank(sizes: dict[str, int], count: int) -> None:
    document = of_gms({"resources": {}})
    document["spec"]["identity"].pop("tensorParallelSize", None)
    document["spec"]["identity"] |= {"pipelineParallelSize": 0} | sizes
    assert devices_claimed(document)["count"] == count


@pytest.mark.parametrize(
    ("resources", "count"),
    [
        ({}, 2),
        (None, 2),
        ({"limits": None}, 2),
        ({"limits": {"nvidia.com/gpu": "4"}}, 4),
        ({"limits": {"nvidia.com/gpu": 1}}, 1),
    ],
)
def test_a_worker_claims_as_many_devices_as_its_limit_says_or_it_has_ranks(
    resources: Any, count: int
) -> None:
    document = of_gms({"resources": resources}, deviceClassName="gpu.example.com")
    wanted = {"deviceClassName": "gpu.example.com", "count": count}
    assert devices_claimed(document) == wanted
    meta: Any = (devices_template(JOB, document) or {})["metadata"]
    assert meta["ownerReferences"][0]["name"] == "llm"
    spec = pod_spec(document)
    assert spec["resourceClaims"] == [
        {"name": "snapback-devices", "resourceClaimTemplateName": meta["name"]}
    ]
    [main], [server] = spec["containers"], spec["initContainers"]
    assert main["resources"]["claims"] == [{"name": "snapback-devices"}]
    assert server["resources"]["claims"] == main["resources"]["claims"]
    assert "nvidia.com/gpu" not in (main["resources"].get("limits") or {})


@pytest.mark.parametrize("document", [of_gms(enabled=False), of_gms({"resources": CLAIM})])
def test_no_devices_are_claimed_for_a_worker_without_gms_or_with_claims_of_its_own(
    document: dict[str, Any],
) -> None:
    assert devices_template(JOB, document) is None


def test_a_checkpoint_that_does_not_name_gms_has_no_memory_server_and_needs_no_claim() -> None:
    document = of_gms()
    del document["spec"]["gpuMemoryService"]
    assert devices_template(JOB, document) is None
    assert not {"initContainers", "resourceClaims"} & set(pod_spec(document))


SAVER: dict[str, Any] = {
    "image": "my-gms-saver:latest",
    "command": ["/bin/gms-save"],
    "envs": [
        {"name": "GMS_TRANSFER_BACKEND", "value": "nixl-gds"},
        {"name": "GMS_CHECKPOINT_DIR", "value": "/mine"},
        {"name": "GMS_SOCKET_DIR", "value": "/elsewhere"},
        {"name": "A"},
    ],
    "envFromSecret": "gms-save-secret",
    "volumeMounts": [{"name": "extra-save-config", "mountPath": "/etc/gms-save"}],
}


def pod_of(saver: dict[str, Any] | None, **template: Any) -> Any:
    """Return the pod of a checkpoint with a saver of this shape."""
    document = of_gms(checkpoint={"saver": saver})
    document["spec"]["job"]["podTemplateSpec"]["spec"] |= template
    return pod_spec(document)


def test_a_saver_runs_behind_the_memory_server_as_the_user_has_shaped_it() -> None:
    spec = pod_of(SAVER, initContainers=[{"name": "fetch"}])
    server, saver, fetch = spec["initContainers"]
    assert [server["name"], saver["name"], fetch["name"]] == ["gms-server", "gms-saver", "fetch"]
    assert (saver["image"], saver["command"]) == ("my-gms-saver:latest", ["/bin/gms-save"])
    assert saver["restartPolicy"] == "Always"
    assert saver["resources"]["claims"] == server["resources"]["claims"]
    # In place and in order; where the sockets and the orders are is ours to say.
    assert saver["env"] == [
        {"name": "GMS_CHECKPOINT_DIR", "value": "/mine"},
        {"name": "GMS_TRANSFER_BACKEND", "value": "nixl-gds"},
        {"name": "GMS_SOCKET_DIR", "value": "/gms-sockets"},
        {"name": "A"},
        {"name": "GMS_ORDER_DIR", "value": "/gms-checkpoint"},
    ]
    assert saver["envFrom"] == [{"secretRef": {"name": "gms-save-secret"}}]
    assert saver["volumeMounts"] == [
        {"name": "gms-sockets", "mountPath": "/gms-sockets"},
        {"name": "gms-saver", "mountPath": "/gms-checkpoint"},
        {"name": "extra-save-config", "mountPath": "/etc/gms-save"},
    ]
    assert {"name": "gms-saver", "emptyDir": {}} in spec["volumes"]


@pytest.mark.parametrize("saver", [None, {}])
def test_a_saver_of_which_nothing_is_said_is_none(saver: dict[str, Any] | None) -> None:
    assert [each["name"] for each in pod_of(saver)["initContainers"]] == ["gms-server"]


def test_a_saver_whose_shape_is_empty_is_ours() -> None:
    _, saver = pod_of({"envs": [{"name": "A"}], "command": [], "image": ""})["initContainers"]
    assert (saver["image"], saver["command"]) == ("gms:1", ["gms-saver"])
    assert "envFrom" not in saver


def test_a_saver_of_the_template_keeps_what_nobody_has_changed() -> None:
    own = {"name": "gms-saver", "image": "mine:2", "command": ["mine"], "args": ["--fast"]}
    _, kept = pod_of(None, initContainers=[copy.deepcopy(own)])["initContainers"]
    assert (kept["image"], kept["command"], kept["args"]) == ("mine:2", ["mine"], ["--fast"])
    _, changed = pod_of({"command": ["other"]}, initContainers=[own])["initContainers"]
    assert (changed["image"], changed["command"]) == ("mine:2", ["other"])
    assert "args" not in changed


@pytest.mark.parametrize(
    ("shared", "limit"), [(None, "8Gi"), ({}, "8Gi"), ({"size": "16Gi"}, "16Gi")]
)
def test_a_worker_has_shared_memory_of_the_size_that_is_named(
    shared: dict[str, Any] | None, limit: str
) -> None:
    document = of_gms(enabled=False)
    document["spec"]["job"]["sharedMemory"] = shared
    spec = pod_spec(document)
    memory = {"medium": "Memory", "sizeLimit": limit}
    assert {"name": "shared-memory", "emptyDir": memory} in spec["volumes"]
    mount = {"name": "shared-memory", "mountPath": "/dev/shm"}
    assert mount in spec["containers"][0]["volumeMounts"]


@pytest.mark.parametrize("is_disabled", [True, False])
def test_no_shared_memory_is_mounted_that_is_not_wanted_or_there(is_disabled: bool) -> None:
    own = [] if is_disabled else [{"name": "mine", "mountPath": "/dev/shm"}]
    document = of_gms({"volumeMounts": own}, enabled=False)
    document["spec"]["job"]["sharedMemory"] = {"disabled": is_disabled}
    assert "shared-memory" not in [each["name"] for each in pod_spec(document)["volumes"]]
