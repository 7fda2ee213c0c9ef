"""Worlds of the simulator in the usual test run; `make scenarios` runs many more."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.scenario.faults import Fault, Settings, faults_of, settings_of
from tests.scenario.run import regressions, run_seed
from tests.scenario.world import World

CALM = Settings(
    applied=(
        (
            0.5,
            {
                "apiVersion": "nvidia.com/v1alpha1",
                "kind": "DynamoCheckpoint",
                "metadata": {"name": "a", "namespace": "default"},
                "spec": {
                    "identity": {"model": "example/a", "backendFramework": "example"},
                    "job": {
                        "sourcePolicy": "Resume",
                        "podTemplateSpec": {
                            "spec": {
                                "containers": [
                                    {
                                        "name": "main",
                                        "command": ["worker"],
                                        "resources": {"limits": {"nvidia.com/gpu": 1}},
                                    }
                                ]
                            }
                        },
                    },
                },
            },
        ),
        (
            20.0,
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": "b",
                    "namespace": "default",
                    "annotations": {"nvidia.com/restore-from": "a"},
                },
                "spec": {
                    "containers": [
                        {
                            "name": "main",
                            "command": ["worker"],
                            "resources": {"limits": {"nvidia.com/gpu": 1}},
                        }
                    ]
                },
            },
        ),
    )
)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Services log what befalls them; the diary of a world has it already."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_a_calm_world_captures_and_restores_and_leaves_nothing_behind() -> None:
    world = World(1, CALM, [])
    assert world.run() == []
    assert (world.rules.captures, world.rules.restores) == (1, 1)


def test_the_same_seed_tells_the_same_story() -> None:
    stories = []
    for _ in range(2):
        world = World(8, settings_of(8), faults_of(8))
        world.run()
        stories.append((world.notes, world.loop.steps))
    assert stories[0] == stories[1]


def test_a_worker_whose_agent_hangs_is_let_go_by_its_guard_at_the_deadline() -> None:
    world = World(1, CALM, [Fault(2.0, "pause", "node-0/agent", 0.99)])
    assert world.run() == []
    assert world.rules.restores == 1


@pytest.mark.parametrize("seed", regressions())
def test_a_seed_that_failed_once_does_not_fail_again(seed: int) -> None:
    assert run_seed(seed).broken == []


@pytest.mark.parametrize("seed", range(24))
def test_no_rule_is_broken(seed: int) -> None:
    assert run_seed(seed).broken == []
