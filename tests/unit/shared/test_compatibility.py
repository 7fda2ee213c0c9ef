"""What a node has to have in common with the source of an artifact."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from snapshot_shared.artifact import Facts
from snapshot_shared.compatibility import FACTS, refusal, verdicts
from tests.unit.tables import each

SOURCE = Facts(
    driver="criu+cuda",
    arch="x86_64",
    kernel="6.12.8-cloud",
    python="3.11",
    criu="4.2",
    cpu=["avx2", "sse2"],
    cuda_driver="580.65.06",
    device_product="H100",
    devices=2,
    image="llm:1",
    image_digest="sha256:a",
    command=["serve", "--all"],
    protocol="waits",
)


def outcomes(here: Facts, source: Facts = SOURCE) -> dict[str, str]:
    return {verdict.fact.name: verdict.outcome for verdict in verdicts(source, here)}


def test_each_fact_has_one_row() -> None:
    assert sorted(fact.name for fact in FACTS) == sorted(Facts.__struct_fields__)


def test_a_node_like_the_source_is_the_same_in_all() -> None:
    assert set(outcomes(SOURCE).values()) == {"same"}
    assert refusal(SOURCE, SOURCE) is None


@each(
    ("here", "step"),
    [
        ({"driver": "cooperative"}, "driver of the artifact, criu+cuda"),
        ({"arch": "aarch64"}, "a node that has x86_64"),
        ({"kernel": "6.11.9"}, "Linux 6.12 or later"),
        ({"kernel": "5.15.0-91-generic"}, "Linux 6.12 or later"),
        ({"criu": "4.1.1"}, "CRIU 4.2 or later"),
        ({"cpu": ["sse2"]}, "processor of the source's kind"),
        ({"cuda_driver": "580.65.07"}, "the NVIDIA driver 580.65.06"),
        ({"device_product": "A100"}, "a node that has H100"),
        ({"devices": 1}, "a node with 2 GPUs"),
    ],
)
def test_a_node_that_does_not_fit_is_refused_with_both_values_and_the_next_step(
    here: dict[str, Any], step: str
) -> None:
    [name] = here
    node = replace(SOURCE, **here)
    error = refusal(SOURCE, node)
    assert error is not None
    assert error.reason == "Incompatible"
    assert step in error.next_step
    verdict = next(each for each in verdicts(SOURCE, node) if each.outcome == "refused")
    assert verdict.fact.name == error.values["fact"] == name
    assert error.values["expected"] == verdict.source
    assert error.values["found"] == verdict.here
    assert verdict.source != verdict.here


@each(
    ("here", "outcome"),
    [
        # The node is newer, or has more.
        ({"kernel": "6.12.1"}, "fits"),
        ({"kernel": "7.0.0"}, "fits"),
        ({"criu": "4.2.1"}, "fits"),
        ({"criu": "10.0"}, "fits"),
        ({"cpu": ["avx2", "avx512f", "sse2"]}, "fits"),
        ({"devices": 8}, "fits"),
        # The fact is only shown.
        ({"image": "llm:2"}, "differs"),
        ({"image_digest": "sha256:b"}, "differs"),
        ({"command": ["x"]}, "differs"),
        ({"python": "3.13"}, "differs"),
        ({"protocol": "answers"}, "differs"),
    ],
)
def test_what_is_newer_or_more_and_what_is_shown_alone_refuses_nothing(
    here: dict[str, Any], outcome: str
) -> None:
    node = replace(SOURCE, **here)
    assert {name: outcomes(node)[name] for name in here} == dict.fromkeys(here, outcome)
    assert refusal(SOURCE, node) is None


def test_a_fact_that_one_side_does_not_know_refuses_nothing() -> None:
    assert set(outcomes(Facts()).values()) == {"unknown"}
    assert set(outcomes(SOURCE, Facts(driver="criu+cuda")).values()) == {"same", "unknown"}
    # No version at all.
    assert refusal(replace(SOURCE, kernel="unknown"), SOURCE) is None


@pytest.mark.parametrize("driver", ["cooperative", "respawn"])
def test_a_process_that_starts_anew_does_not_depend_on_what_it_was_started_on(driver: str) -> None:
    source = replace(SOURCE, driver=driver)
    older = replace(source, kernel="5.4.0", criu="", cpu=[], cuda_driver="535.1")
    assert refusal(source, older) is None
    assert {"kernel", "criu", "cpu", "cuda_driver"}.isdisjoint(outcomes(older, source))


def test_the_driver_of_the_gpus_does_not_matter_to_a_process_without() -> None:
    source = replace(SOURCE, driver="criu")
    assert refusal(source, replace(source, cuda_driver="535.1")) is None


def test_the_facts_of_an_older_artifact_are_read() -> None:
    old = msgspec.json.decode(b'{"driver":"criu","kernel":"6.1"}', type=Facts)
    assert (old.criu, old.cpu, old.image_digest) == ("", [], "")
