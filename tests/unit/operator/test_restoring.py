"""A pod that is to be restored: what its admission changes, and what it leaves as it was."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from snapshot_api.validate import restore_problems
from snapshot_api.well_known import STANDBY_VARIABLES
from snapshot_operator.core.checkpoint import _job
from snapshot_operator.kube.restoring import (
    Images,
    capturable_patch,
    placeholder_problems,
    standby_patch,
    startup_probe,
)
from snapshot_operator.kube.shaping import job_manifest, with_agent_affinity
from tests.support.json_patch import applied
from tests.support.objects import checkpoint, checkpoint_document
from tests.unit.tables import each

FROM = "nvidia.com/restore-from"
CONTAINER = "nvidia.com/restore-container"
MAIN: dict[str, Any] = {
    "name": "main",
    "image": "m",
    "command": ["serve"],
    "env": [{"name": "Z", "value": "1"}, {"name": "A", "value": "2"}],
    "volumeMounts": [{"name": "models", "mountPath": "/models"}],
    "readinessProbe": {"httpGet": {"port": 8000}},
    "tty": True,
}
SIDECAR: dict[str, Any] = {"name": "sidecar", "image": "s"}
MODELS = {"name": "models", "persistentVolumeClaim": {"claimName": "models"}}
TIMING = {"periodSeconds": 1, "successThreshold": 1, "failureThreshold": 86_400 + 7_746}
IMAGES = Images("registry.example/gms:1", "registry.example/agent:1")
PROGRAM = "/snapback/snapback-init"
STANDBY = [
    {"name": "SNAPSHOT_CONTROL_DIR", "value": "/snapshot-control"},
    {"name": "DYN_SNAPSHOT_CONTROL_DIR", "value": "/snapshot-control"},
    {"name": "SNAPSHOT_RESTORE_STANDBY", "value": "1"},
    {"name": "DYN_SNAPSHOT_RESTORE_STANDBY", "value": "1"},
]


def pod(*containers: dict[str, Any], volumes: Any = (MODELS,), **annotations: str) -> Any:
    marks = {f"nvidia.com/{key.replace('_', '-')}": text for key, text in annotations.items()}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": "llm-",
            "annotations": {"team": "a", FROM: "llm", **marks},
        },
        "spec": {
            "nodeSelector": {"gpu": "yes"},
            "volumes": list(volumes),
            "containers": list(containers or (MAIN, SIDECAR)),
        },
    }


def patched(document: Any, driver: str = "", shared: Any = None) -> Any:
    """Return a pod as admission leaves it."""
    return applied(document, standby_patch(document, IMAGES, driver, shared))


def main_of(document: Any) -> Any:
    return next(each for each in patched(document)["spec"]["containers"] if each["name"] == "main")


def test_the_patch_of_a_pod_changes_its_worker_and_nothing_else() -> None:
    changed = patched(pod())
    expected = pod(
        {
            **MAIN,
            "env": [*MAIN["env"], *STANDBY],
            "volumeMounts": [
                *MAIN["volumeMounts"],
                {"name": "snapshot-control", "mountPath": "/snapshot-control", "subPath": "main"},
            ],
            "startupProbe": {"httpGet": {"port": 8000}, **TIMING},
        },
        SIDECAR,
        volumes=[MODELS, {"name": "snapshot-control", "emptyDir": {}}],
        restore_container="main",
    )
    with_agent_affinity(expected["spec"])
    assert changed == expected
    # Equal dicts may differ in their order: that of the user's fields is kept, too.
    (main, _) = changed["spec"]["containers"]
    assert [*main][: len(MAIN)] == [*MAIN]


def test_a_pod_that_is_ready_for_its_restore_gets_an_empty_patch() -> None:
    assert standby_patch(patched(pod())) == []
    assert standby_patch(patched(patched(pod(SIDECAR, MAIN)))) == []


def test_without_an_annotation_the_first_container_is_restored_and_is_written_down() -> None:
    changed = patched(pod(SIDECAR, MAIN))
    assert changed["metadata"]["annotations"][CONTAINER] == "sidecar"
    assert changed["spec"]["containers"][1] == MAIN
    # A webhook that is called later puts its own container first.
    changed["spec"]["containers"].insert(0, {"name": "proxy"})
    assert standby_patch(changed) == []


def test_the_container_that_is_named_is_restored() -> None:
    first, second = patched(pod(SIDECAR, MAIN, restore_container="main"))["spec"]["containers"]
    assert first == SIDECAR
    assert {"name": "SNAPSHOT_RESTORE_STANDBY", "value": "1"} in second["env"]


def test_a_pod_that_is_to_be_capturable_gets_what_a_worker_has_and_keeps_its_probes() -> None:
    claims = {"claims": [{"name": "snapback-devices"}]}
    asked = pod({**MAIN, "resources": claims}, capturable="true")
    del asked["metadata"]["annotations"][FROM]
    profile = "profiles/block-iouring.json"
    changed = applied(asked, capturable_patch(asked, profile=profile))
    (main,) = changed["spec"]["containers"]
    assert {variable["name"] for variable in main["env"]} >= {
        "SNAPSHOT_CONTROL_DIR",
        "GMS_SOCKET_DIR",
    }
    assert not any("STANDBY" in variable["name"] for variable in main["env"])
    assert [each["name"] for each in changed["spec"]["initContainers"]] == ["gms-server"]
    assert main["securityContext"]["seccompProfile"]["localhostProfile"] == profile
    probes = ("startupProbe", "livenessProbe", "readinessProbe")
    assert {name: main.get(name) for name in probes} == {name: MAIN.get(name) for name in probes}
    assert capturable_patch(changed, profile=profile) == []


def test_settings_of_the_user_that_contradict_a_restore_are_replaced_in_their_place() -> None:
    env = [
        {"name": "SNAPSHOT_RESTORE_STANDBY", "value": "0"},
        {"name": "MINE", "value": "1"},
        {"name": "DYN_SNAPSHOT_RESTORE_STANDBY", "valueFrom": {"fieldRef": {"fieldPath": "x"}}},
        {"name": "SNAPSHOT_CONTROL_DIR", "value": "/elsewhere"},
        {"name": "SNAPSHOT_RESTORE_STANDBY", "value": "0"},
    ]
    mounts = [{"name": "models", "mountPath": "/snapshot-control"}]
    found = main_of(pod({**MAIN, "env": env, "volumeMounts": mounts}))
    assert found["env"] == [STANDBY[2], env[1], STANDBY[3], STANDBY[0], STANDBY[1]]
    (mount,) = found["volumeMounts"]
    assert mount["name"] == "snapshot-control"


STARTUP = {"exec": {"command": ["a"]}, "timeoutSeconds": 3}
LIVENESS = {"httpGet": {"port": 1}}
READINESS = {"grpc": {"port": 2}}


@each(
    ("probes", "kept"),
    [
        ({"startupProbe": STARTUP, "livenessProbe": LIVENESS}, STARTUP),
        (
            {
                "livenessProbe": {**LIVENESS, "initialDelaySeconds": 60},
                "readinessProbe": {"httpGet": {"port": 2}},
            },
            LIVENESS,
        ),
        ({"readinessProbe": {**READINESS, "successThreshold": 3}}, READINESS),
    ],
)
def test_the_startup_probe_is_the_first_probe_of_the_container_asked_every_second(
    probes: dict[str, Any], kept: dict[str, Any]
) -> None:
    assert startup_probe({"name": "main", **probes}) == {**kept, **TIMING}


def test_the_probe_of_a_worker_without_one_says_what_it_waits_for(tmp_path: Path) -> None:
    probe = startup_probe({"name": "main"})
    assert probe.items() >= TIMING.items()
    *shell, script = probe["exec"]["command"]
    assert "/snapshot-control/restored" in script

    def run() -> subprocess.CompletedProcess[str]:
        words = [*shell, script.replace("/snapshot-control", str(tmp_path))]
        return subprocess.run(words, capture_output=True, text=True, check=False)

    failed = run()
    assert (failed.returncode, failed.stderr) == (1, "")
    assert failed.stdout == ("the worker has not been restored yet: kubectl get snapshotrestores\n")
    (tmp_path / "restored").write_text("{}")
    assert run().returncode == 0


def test_the_file_that_is_probed_is_the_one_that_the_control_directory_has() -> None:
    control = Path(__file__).parents[3] / "services/gms-client/src/snapback_client/control.py"
    assert 'RESTORED = "restored"' in control.read_text()


@each(
    ("document", "path", "text"),
    [
        (
            pod(restore_container="engine"),
            f"metadata.annotations[{CONTAINER}]",
            "'engine' is no container of the pod (found main, sidecar)",
        ),
        (
            pod(restore_policy="Never"),
            "metadata.annotations[nvidia.com/restore-policy]",
            "'Never' is not one of WaitForCheckpoint, Immediate",
        ),
        (
            pod(capturable="yes"),
            "metadata.annotations[nvidia.com/capturable]",
            "'yes' is not one of true, false",
        ),
        (
            pod(volumes=[MODELS, {**MODELS, "name": "snapshot-control"}]),
            "spec.volumes[1]",
            "snapshot-control is the name of the control directory; rename this volume",
        ),
        (
            pod(volumes=[{**MODELS, "name": "snapback-init"}]),
            "spec.volumes[0]",
            "snapback-init is the name of the volume of the first process; rename this volume",
        ),
        (
            pod(restore_driver="podman"),
            "metadata.annotations[nvidia.com/restore-driver]",
            "'podman' is not one of cooperative, respawn, criu, criu+cuda",
        ),
        (
            pod(capture_driver="podman"),
            "metadata.annotations[nvidia.com/capture-driver]",
            "'podman' is not one of cooperative, respawn, criu, criu+cuda",
        ),
    ],
)
def test_a_pod_that_cannot_be_restored_as_it_asks_is_refused_by_path(
    document: Any, path: str, text: str
) -> None:
    assert [*restore_problems(document)] == [(path, text)]


def test_a_pod_without_contradictions_has_no_problems() -> None:
    own = {"name": "snapshot-control", "emptyDir": {"medium": "Memory"}}
    assert [*restore_problems(pod(volumes=[own], restore_policy="Immediate"))] == []


def test_the_loader_that_a_template_asks_for_is_completed_once() -> None:
    document = pod({**MAIN, "resources": {"claims": [{"name": "snapback-devices"}]}}, SIDECAR)
    own = {"name": "gms-loader", "image": "mine:2", "env": [{"name": "A", "value": "1"}]}
    document["spec"]["initContainers"] = [{"name": "fetch"}, own]
    once = patched(document)
    server, loader, fetch = once["spec"]["initContainers"]
    assert [server["name"], loader["name"], fetch["name"]] == ["gms-server", "gms-loader", "fetch"]
    assert server["resources"]["claims"] == [{"name": "snapback-devices"}]
    assert {"name": "GMS_SOCKET_DIR", "value": "/gms-sockets"} in main_of(document)["env"]
    assert (loader["image"], loader["restartPolicy"]) == ("mine:2", "Always")
    assert loader["env"][0] == {"name": "A", "value": "1"}
    assert {"name": "GMS_ORDER_DIR", "value": "/gms-checkpoint"} in loader["env"]
    assert {"name": "gms-loader", "emptyDir": {}} in once["spec"]["volumes"]
    assert standby_patch(once) == []


@pytest.mark.parametrize("name", ["../../other/snapshots/llm", "a/b", "a?b", "LLM"])
def test_a_source_that_is_no_name_is_refused_before_it_is_looked_up(name: str) -> None:
    [problem] = restore_problems(pod(restore_from=name))
    assert problem.path == f"metadata.annotations[{FROM}]"


@pytest.mark.parametrize("driver", ["criu", "criu+cuda"])
def test_a_container_into_which_a_process_is_brought_begins_as_nothing_of_its_image(
    driver: str,
) -> None:
    main = {
        **MAIN,
        "args": ["--port", "8000"],
        "stdin": True,
        "stdinOnce": True,
        "startupProbe": {"httpGet": {"port": 8000}, "timeoutSeconds": 9},
        "livenessProbe": {"tcpSocket": {"port": 8000}},
        "lifecycle": {"postStart": {"exec": {"command": ["warm"]}}, "preStop": {"sleep": {}}},
        "securityContext": {"runAsUser": 1000, "privileged": False},
    }
    changed = patched(pod(main, SIDECAR), driver)
    place = {"name": "snapback-init", "mountPath": "/snapback", "subPath": "main"}
    control = {"name": "snapshot-control", "mountPath": "/snapshot-control", "subPath": "main"}
    assert changed["spec"]["containers"] == [
        {
            "name": "main",
            "image": "m",
            "command": [PROGRAM, "--", *MAIN["command"]],
            "args": main["args"],
            "env": [*MAIN["env"], *STANDBY],
            "volumeMounts": [*MAIN["volumeMounts"], control, place],
            "readinessProbe": MAIN["readinessProbe"],
            "livenessProbe": main["livenessProbe"],
            "startupProbe": {"exec": {"command": [PROGRAM, "--restored"]}, **TIMING},
            "lifecycle": {"preStop": {"sleep": {}}},
            "securityContext": main["securityContext"],
        },
        SIDECAR,
    ]
    amounts = {"cpu": "100m", "memory": "64Mi"}
    assert changed["spec"]["initContainers"] == [
        {
            "name": "snapback-init",
            "image": "registry.example/agent:1",
            "command": ["/opt/snapback/snapback-init", "--install", PROGRAM],
            "volumeMounts": [place],
            "resources": {"requests": amounts, "limits": amounts},
            "securityContext": {
                "runAsUser": 1000,
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "seccompProfile": {"type": "RuntimeDefault"},
                "readOnlyRootFilesystem": True,
            },
        }
    ]
    assert {"name": "snapback-init", "emptyDir": {}} in changed["spec"]["volumes"]
    assert changed["metadata"]["annotations"]["nvidia.com/restore-driver"] == driver


def with_defaults(document: Any) -> Any:
    """Add what an API server adds between two calls of its webhooks."""
    filled = copy.deepcopy(document)
    for container in (*filled["spec"].get("initContainers", ()), *filled["spec"]["containers"]):
        container |= {"terminationMessagePath": "/dev/termination-log", "imagePullPolicy": "Always"}
        if probe := container.get("startupProbe"):
            probe |= {"timeoutSeconds": 1}
    return filled


@pytest.mark.parametrize("shared", [None, {}, {"size": "1Gi"}])
def test_a_placeholder_is_changed_no_further_also_where_its_source_has_gone(shared: Any) -> None:
    claims = {"claims": [{"name": "snapback-devices"}]}
    for main in (MAIN, {**MAIN, "lifecycle": {"postStart": {"exec": {}}}}):
        once = with_defaults(patched(pod(main, SIDECAR), "criu", shared))
        assert standby_patch(once, IMAGES, "criu", shared) == []
        assert standby_patch(once, IMAGES) == []
    once = patched(pod({**MAIN, "resources": claims}, SIDECAR), "criu", shared)
    assert standby_patch(once, IMAGES, "criu", shared) == []


@each("shared", [{}, {"size": "1Gi"}, {"disabled": True}])
def test_a_placeholder_has_the_mounts_of_the_worker_of_its_checkpoint_and_one_more(
    shared: Any,
) -> None:
    document = checkpoint_document(driver="criu")
    spec = document["spec"]["job"]["podTemplateSpec"]["spec"]
    spec["containers"][0]["resources"] = {"claims": [{"name": "snapback-devices"}]}
    document["spec"]["job"]["sharedMemory"] = shared
    document["spec"]["gpuMemoryService"] = {"enabled": True}
    source = job_manifest(_job(checkpoint()), document)["spec"]["template"]["spec"]
    found = patched(pod(spec["containers"][0]), "criu", shared)["spec"]

    def mounted(spec: Any) -> dict[str, Any]:
        volumes = {each["name"]: each for each in spec["volumes"]}
        mounts = spec["containers"][0]["volumeMounts"]
        return {row["mountPath"]: volumes[row["name"]] for row in mounts}

    own = {"/snapback": {"name": "snapback-init", "emptyDir": {}}}
    assert mounted(found) == mounted(source) | own


def test_without_a_checkpoint_the_shared_memory_of_a_placeholder_is_what_its_pod_says() -> None:
    mounts = patched(pod(), "criu")["spec"]["containers"][0]["volumeMounts"]
    assert "/dev/shm" not in {row["mountPath"] for row in mounts}


def test_a_pod_may_name_the_driver_of_a_source_that_is_not_there_yet() -> None:
    document = pod(restore_driver="criu")
    assert patched(document) == patched(pod(), "criu")
    assert patched(pod(restore_driver="cooperative"))["spec"] == patched(pod())["spec"]


@pytest.mark.parametrize("field", ["hostPID", "shareProcessNamespace"])
def test_a_pod_whose_containers_share_their_processes_takes_no_process(field: str) -> None:
    document = pod()
    document["spec"][field] = True
    assert [each.path for each in placeholder_problems(document, "criu")] == [f"spec.{field}"]
    assert [*placeholder_problems(document, "cooperative")] == []
    document["metadata"]["annotations"]["nvidia.com/restore-driver"] = "criu"
    assert f"spec.{field}" in render(document)


def render(*documents: Any, words: tuple[str, ...] = ()) -> Any:
    """Return what `snapshot_operator.render` prints, or what it says if it refuses."""
    done = subprocess.run(
        [sys.executable, "-m", "snapshot_operator.render", *words],
        input=json.dumps(documents).encode(),
        env=os.environ | {"SNAPBACK_GMS_IMAGE": IMAGES.gms, "SNAPBACK_AGENT_IMAGE": IMAGES.agent},
        capture_output=True,
        check=False,
    )
    assert done.returncode in (0, 1)
    assert done.returncode == bool(done.stderr)
    return done.stderr.decode() if done.returncode else json.loads(done.stdout)


def test_pods_and_templates_are_printed_as_admission_has_them_stored() -> None:
    waits, brought = pod(), pod(restore_driver="criu")
    template = {name: waits[name] for name in ("metadata", "spec")}
    deployment = {"kind": "Deployment", "spec": {"replicas": 2, "template": template}}
    plain = {"kind": "Pod", "metadata": {"name": "p"}, "spec": {"containers": [MAIN]}}
    others = [plain, {"kind": "ConfigMap", "data": {}}, {"kind": "Service", "spec": None}]
    found = render(waits, brought, deployment, *others)
    assert found[:2] == [patched(waits), patched(brought)]
    changed = {name: patched(waits)[name] for name in ("metadata", "spec")}
    assert found[2] == {"kind": "Deployment", "spec": {"replicas": 2, "template": changed}}
    assert found[3:] == others
    assert render(*found) == found
    refused = render(pod(restore_policy="Never"))
    assert refused.startswith("metadata.annotations[nvidia.com/restore-policy]: 'Never' is not one")
    assert render("text", None, {"spec": {"template": []}}) == [
        "text",
        None,
        {"spec": {"template": []}},
    ]
    for spec in ({}, {"containers": []}, {"containers": "main"}, []):
        said = render(waits | {"spec": spec})
        assert said.startswith("spec: it is none of a pod")
        assert "Traceback" not in said
    template["metadata"]["annotations"]["nvidia.com/restore-policy"] = "Never"
    assert render(deployment).startswith("spec.template.metadata.annotations")


def test_a_pod_that_does_not_wait_has_what_a_cold_start_needs_and_runs_anywhere() -> None:
    claims = {"claims": [{"name": "snapback-devices"}]}
    document = pod(MAIN | {"resources": claims}, restore_policy="Immediate")
    (found,) = render(document, words=("immediate",))
    main = found["spec"]["containers"][0]
    variables = {row["name"] for row in main["env"]}
    assert {"SNAPSHOT_CONTROL_DIR", "GMS_SOCKET_DIR"} <= variables
    assert not variables & set(STANDBY_VARIABLES)
    assert [each["name"] for each in found["spec"]["initContainers"]] == ["gms-server"]
    assert "affinity" not in found["spec"]
    assert main.get("startupProbe") == MAIN.get("startupProbe")
    # Where its source is captured, it waits after all.
    assert render(document) == [patched(document)] == render(found)


def test_a_container_that_runs_what_its_image_says_has_nothing_to_start_again() -> None:
    main = {name: value for name, value in MAIN.items() if name != "command"} | {"args": ["-x"]}
    changed = patched(pod(main), "criu")["spec"]["containers"][0]
    assert changed["command"] == [PROGRAM]
    assert "args" not in changed
