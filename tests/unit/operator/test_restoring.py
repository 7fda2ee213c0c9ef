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

from snapshot_operator.kube.restoring import standby_patch, startup_probe
from snapshot_operator.kube.shaping import with_agent_affinity
from snapshot_shared.validation import restore_problems

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
THRESHOLD = 86_400 + 7_740
STANDBY = [
    {"name": "SNAPSHOT_CONTROL_DIR", "value": "/snapshot-control"},
    {"name": "DYN_SNAPSHOT_CONTROL_DIR", "value": "/snapshot-control"},
    {"name": "SNAPSHOT_RESTORE_STANDBY", "value": "1"},
    {"name": "DYN_SNAPSHOT_RESTORE_STANDBY", "value": "1"},
]


def pod(*containers: dict[str, Any], volumes: Any = (MODELS,), **annotations: str) -> Any:
    named = {name.replace("_", "-"): text for name, text in annotations.items()}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": "llm-",
            "annotations": {
                "team": "a",
                FROM: "llm",
                **{f"nvidia.com/{key}": text for key, text in named.items()},
            },
        },
        "spec": {
            "nodeSelector": {"gpu": "yes"},
            "volumes": list(volumes),
            "containers": list(containers or (MAIN, SIDECAR)),
        },
    }


def patched(document: Any) -> Any:
    """Apply a patch as RFC 6902 has it; `add` is its only operation here."""
    changed = copy.deepcopy(document)
    for change in standby_patch(document):
        assert change["op"] == "add"
        *path, last = change["path"].strip("/").split("/")
        place = changed
        for name in path:
            place = place[int(name) if isinstance(place, list) else name]
        place[last] = change["value"]
    return changed


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
            "startupProbe": {
                "httpGet": {"port": 8000},
                "periodSeconds": 1,
                "successThreshold": 1,
                "failureThreshold": THRESHOLD,
            },
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


def test_the_pod_that_is_given_is_left_as_it_was() -> None:
    document = pod()
    before = copy.deepcopy(document)
    standby_patch(document)
    assert document == before


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


@pytest.mark.parametrize(
    ("probes", "kept"),
    [
        (
            {
                "startupProbe": {"exec": {"command": ["a"]}, "timeoutSeconds": 3},
                "livenessProbe": {"httpGet": {"port": 1}},
            },
            {"exec": {"command": ["a"]}, "timeoutSeconds": 3},
        ),
        (
            {
                "livenessProbe": {"httpGet": {"port": 1}, "initialDelaySeconds": 60},
                "readinessProbe": {"httpGet": {"port": 2}},
            },
            {"httpGet": {"port": 1}},
        ),
        ({"readinessProbe": {"grpc": {"port": 2}, "successThreshold": 3}}, {"grpc": {"port": 2}}),
        ({}, {"exec": {"command": ["cat", "/snapshot-control/restored"]}}),
    ],
)
def test_the_startup_probe_is_the_first_probe_of_the_container_asked_every_second(
    probes: dict[str, Any], kept: dict[str, Any]
) -> None:
    timing = {"periodSeconds": 1, "successThreshold": 1, "failureThreshold": THRESHOLD}
    assert startup_probe({"name": "main", **probes}) == {**kept, **timing}


def test_the_file_that_is_probed_is_the_one_that_the_control_directory_has() -> None:
    control = (
        Path(__file__)
        .parents[3]
        .joinpath("services/snapshot-agent/src/snapshot_agent/domain/control.py")
    )
    assert 'RESTORED = "restored"' in control.read_text()


@pytest.mark.parametrize(
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
            pod(volumes=[MODELS, {**MODELS, "name": "snapshot-control"}]),
            "spec.volumes[1]",
            "snapshot-control is the name of the control directory; rename this volume",
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
    assert (loader["image"], loader["restartPolicy"]) == ("mine:2", "Always")
    assert loader["env"][0] == {"name": "A", "value": "1"}
    assert {"name": "GMS_ORDER_DIR", "value": "/gms-checkpoint"} in loader["env"]
    assert {"name": "gms-loader", "emptyDir": {}} in once["spec"]["volumes"]
    assert standby_patch(once) == []


def test_a_worker_that_claims_devices_gets_a_memory_server_once() -> None:
    document = pod({**MAIN, "resources": {"claims": [{"name": "snapback-devices"}]}}, SIDECAR)
    once = patched(document)
    [server] = once["spec"]["initContainers"]
    assert (server["name"], server["resources"]["claims"]) == (
        "gms-server",
        [{"name": "snapback-devices"}],
    )
    assert {"name": "GMS_SOCKET_DIR", "value": "/gms-sockets"} in main_of(document)["env"]
    assert standby_patch(once) == []


def standby(document: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "snapshot_operator.standby"],
        input=json.dumps(document).encode(),
        env=os.environ | {"SNAPBACK_GMS_IMAGE": "snapback/gms:dev"},
        capture_output=True,
        check=False,
    )


def test_the_patch_of_a_pod_is_printed_for_clusters_without_webhooks() -> None:
    assert json.loads(standby(pod()).stdout) == standby_patch(pod())
    refused = standby(pod(restore_policy="Never"))
    assert refused.returncode == 1
    assert b"'Never' is not one of" in refused.stderr
    assert b"Traceback" not in refused.stderr
