"""An engine with a trained model in pods: another node answers the same, once its own is lost."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from snapshotctl.domain.demo_engines import ENGINES
from tests.cluster.agents import running, standby_with_weights, with_weights
from tests.cluster.cluster import Cluster
from tests.cluster.kubectl import Kubectl
from tests.cluster.rig import Rig
from tests.cluster.simulated import ROOT

INSTALLED = ROOT / ENGINES["onnx"].installed
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(
        not INSTALLED.exists(), reason="no engines are installed: run `make engines`"
    ),
]

WORKER = ROOT / "deploy/examples/onnx_worker.py"
PORT = "8080"
ENVIRONMENT = [
    {"name": "PYTHONPATH", "value": str(INSTALLED.parent)},
    {"name": "HTTP_PORT", "value": PORT},
]
CLIENT = f"""
import json, pathlib, sys, urllib.request
answers = {{}}
for name in sys.argv[2:]:
    content = pathlib.Path(sys.argv[1], name).read_bytes()
    url = "http://127.0.0.1:{PORT}/identify"
    with urllib.request.urlopen(url, content) as answer:
        answers[name] = json.load(answer)
print(json.dumps(answers))
"""


async def asked(nodes: Kubectl, pod: str) -> dict[str, dict[str, object]]:
    """Return what the engine in a pod says of 20 files."""
    inside = ("exec", pod, "--container", "main", "--", sys.executable, "-c", CLIENT)
    said = await asyncio.to_thread(nodes.run, *inside, str(ROOT), *ENGINES["onnx"].asked)
    return dict(json.loads(said))


async def test_a_trained_model_answers_the_same_in_a_pod_of_another_node(
    rig: Rig, memory: Kubectl, artifacts: Path, own_cluster: Cluster
) -> None:
    await rig.captured("onnx", with_weights("node-1", WORKER, env=ENVIRONMENT)["spec"], gms={})
    before = await asked(memory, await running(memory, "onnx"))
    assert len(before) == 20
    assert before["Makefile"]["label"] == "makefile"
    assert list(artifacts.glob("*/*/gen-1/gpu-0"))
    own_cluster.kill("node-1")
    try:
        memory.apply(standby_with_weights("again", "onnx", "node-2", WORKER, ENVIRONMENT))
        await rig.restored("again")
        assert await asked(memory, "again") == before
    finally:
        await asyncio.to_thread(own_cluster.start, "node-1")
