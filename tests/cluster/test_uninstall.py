"""The programs that the chart runs around an uninstall, beside a running operator."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from tests.cluster.kubectl import Kubectl
from tests.cluster.programs import CRDS
from tests.cluster.rig import Rig, sleeper
from tests.cluster.simulated import until
from tests.cluster.target import Target, define

pytestmark = [pytest.mark.cluster, pytest.mark.turns]


@pytest.fixture
def _alone(target: Target) -> None:
    """Wait for the end of the namespaces of earlier tests: an uninstall looks at all of them."""

    def left() -> dict[str, list[str]]:
        """Return the messages of each namespace that is being deleted, by its name."""
        return {
            each["metadata"]["name"]: [
                row["message"] for row in each["status"].get("conditions", ())
            ]
            for each in target.kubectl.list("namespaces")
            if each["status"]["phase"] == "Terminating"
        }

    until(lambda: not left(), lambda: f"the end of the namespaces of earlier tests: {left()}")


def uninstall(part: str, kubectl: Kubectl, **settings: str) -> str:
    """Run one of the programs as an administrator, and return what it says."""
    environment = {
        "SNAPBACK_KUBECONFIG": str(kubectl.kubeconfig),
        "SNAPBACK_UNINSTALL_POLICY": "Delete",
        "SNAPBACK_NAMESPACE": str(kubectl.namespace),
        **settings,
    }
    done = subprocess.run(
        [sys.executable, "-m", "snapshot_operator.uninstall", *part.split()],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
    )
    assert "Traceback" not in done.stderr
    assert done.returncode == (0 if part in ("begin", "finish") else 1), done.stderr
    return done.stderr


@pytest.mark.usefixtures("_alone")
async def test_what_is_to_be_deleted_goes_with_its_artifacts_and_the_definitions(
    rig: Rig, nodes: Kubectl, target: Target
) -> None:
    await rig.apply("llm", sleeper())
    await rig.phase("llm", "Running")
    await asyncio.to_thread(uninstall, "begin", nodes)
    kinds = "dynamocheckpoints,snapshots,snapshotcontents"
    assert nodes.list(kinds, "--all-namespaces") == []
    try:
        assert "deleted" in await asyncio.to_thread(uninstall, "finish", nodes)
        # A second time there is nothing left to do, and nothing to complain about.
        await asyncio.to_thread(uninstall, "finish", nodes)
        assert target.kubectl.try_("get", "dynamocheckpoints").returncode != 0
    finally:
        define(target.kubectl)
        kinds = ",".join(file.stem for file in CRDS.iterdir())
        # Their storage is made anew, which takes a moment longer.
        until(lambda: target.kubectl.try_("get", kinds).returncode == 0, kinds)


@pytest.mark.usefixtures("_alone")
async def test_an_uninstall_that_nobody_answers_goes_on_after_its_deadline(
    rig: Rig, nodes: Kubectl
) -> None:
    await rig.apply("held", sleeper())
    held = {"finalizers": ["example.com/held"]}
    await rig.patch(rig.path("dynamocheckpoints", "held"), metadata=held)
    settings = {"SNAPBACK_UNINSTALL_DEADLINE_S": "3"}
    said = await asyncio.to_thread(uninstall, "begin", nodes, **settings)
    assert "dynamocheckpoint/held" in said
    assert "not ended within 3 s" in said


def test_wrong_words_are_refused_with_the_right_ones(target: Target) -> None:
    for words in ("", "end"):
        assert "begin|finish" in uninstall(words, target.kubectl)
