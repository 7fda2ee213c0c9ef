"""Weights that containers of their pod move, of checkpoints that were written for Dynamo."""

from __future__ import annotations

import asyncio
import copy
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from snapshot_operator.kube import restoring, shaping
from tests.cluster import oci
from tests.cluster.agents import EXAMPLE, READER, with_weights
from tests.cluster.kubectl import Kubectl
from tests.cluster.rig import Rig
from tests.cluster.simulated import ROOT, container, pod
from tests.cluster.target import Target
from tests.support.json_patch import applied

pytestmark = [pytest.mark.cluster, pytest.mark.turns]

EXAMPLES = [*yaml.safe_load_all((ROOT / "tests/cluster/data/checkpoints.yaml").read_text())][:3]
SAVE = f"""#!/bin/sh
echo "I am $0 with $GMS_TRANSFER_BACKEND, $TOKEN and $(cat /etc/gms-save/settings)"
exec {sys.executable} -c 'from gms.containers import saver; saver()'
"""


@pytest.fixture(scope="session")
def images(target: Target, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The images that the examples name: a worker, and a saver with a program of its own."""
    folder = tmp_path_factory.mktemp("images")
    program = folder / "gms-save"
    program.write_text(SAVE)
    program.chmod(program.stat().st_mode | stat.S_IXUSR | stat.S_IXOTH)
    shell = Path("/bin/sh").resolve()
    files = {"/bin/gms-save": program, "/bin/gms-saver": program, "/bin/sh": shell}
    for name, found, entry in (
        ("my-vllm-worker", {"/bin/sh": shell}, [sys.executable, str(EXAMPLE)]),
        ("my-gms-saver", files, ["/bin/gms-save"]),
    ):
        named = f"docker.io/library/{name}:1"
        target.images.provide(oci.write_image(folder / f"{name}.tar", named, found, entry), named)


def adapted(example: dict[str, Any]) -> list[dict[str, Any]]:
    """Return an example, and what this cluster and its user add to it."""
    found = copy.deepcopy(example)
    runs_here = container("any")["volumeMounts"]
    config = {"name": "extra-save-config", "configMap": {"name": "extra-save-config"}}
    worker = found["spec"]["job"]["podTemplateSpec"]["spec"]
    worker["volumes"] = [*pod("any")["spec"]["volumes"], config]
    worker["initContainers"] = [container("gms-server", sys.executable, "-m", "gms.main")]
    worker["containers"][0] |= {"image": "my-vllm-worker:1", "volumeMounts": runs_here}
    saver = found["spec"]["gpuMemoryService"]["checkpoint"]["saver"]
    saver |= {
        "image": "my-gms-saver:1",
        "volumeMounts": [*saver.get("volumeMounts", []), *runs_here],
    }
    secret = {"kind": "Secret", "metadata": {"name": "gms-save-secret"}}
    settings = {"kind": "ConfigMap", "metadata": {"name": "extra-save-config"}}
    return [
        {"apiVersion": "v1", "stringData": {"TOKEN": "hunter2"}, **secret},
        {"apiVersion": "v1", "data": {"settings": "mine"}, **settings},
        found,
    ]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda each: each["metadata"]["name"])
async def test_a_checkpoint_with_a_saver_of_its_own_is_ready(
    rig: Rig, memory: Kubectl, images: None, artifacts: Path, example: Any
) -> None:
    name = example["metadata"]["name"]
    memory.apply(*adapted(example))
    await rig.condition("dynamocheckpoints", name, "Ready", "True")
    assert len(list(artifacts.glob("*/*/gen-1/gpu-0/part.json"))) == 1
    [found] = memory.list("pods", f"--selector=job-name={name}")
    init = {each["name"]: each for each in found["spec"]["initContainers"]}
    asked = example["spec"]["gpuMemoryService"]["checkpoint"]["saver"]
    saver = init["gms-saver"]
    assert saver["command"] == asked.get("command", ["gms-saver"])
    assert [each for each in saver["env"] if each in asked.get("envs", [])] == asked.get("envs", [])
    said = await asyncio.to_thread(
        memory.run, "logs", found["metadata"]["name"], "--container", "gms-saver"
    )
    if "envs" in asked:
        assert "I am /bin/gms-save with nixl-gds, hunter2 and mine" in said
    assert "save of gpu-0 is done" in said


async def test_a_loader_of_the_template_brings_the_weights_of_a_restored_pod(
    rig: Rig, memory: Kubectl
) -> None:
    await rig.captured("llm", with_weights("node-1")["spec"], gms={})
    again = with_weights("node-2")
    again["metadata"] = {"name": "again", "annotations": {"nvidia.com/restore-from": "llm"}}
    code = "from gms.containers import loader; loader()"
    again["spec"]["initContainers"].append(container("gms-loader", sys.executable, "-c", code))
    shaping.with_devices(again["spec"], again["spec"]["containers"][0], shaping.devices_name("llm"))
    patched = restoring.standby_patch(again, restoring.Images(gms="none"))
    memory.apply(applied(again, patched))
    await rig.restored("again")
    words = ("exec", "again", "--container", "main", "--", sys.executable, "-c", READER)
    assert await asyncio.to_thread(memory.run, *words) == "1.5 1.5 (1024, 1024)\n"
    said = await asyncio.to_thread(memory.run, "logs", "again", "--container", "gms-loader")
    assert "load of gpu-0 is done" in said
