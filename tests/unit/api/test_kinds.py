"""A kind is what its folder says: tests/support/widget has two versions, a rule and a scale."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from docs.generate import kubernetes_api

from snapshot_api.kind import converted
from snapshot_api.manifests import parse
from snapshot_api.schema.definitions import SERVICE, definitions
from snapshot_api.schema.definitions import converted as converted_definitions
from snapshot_api.validate import problems, refused_by_definition
from snapshot_operator.kube import conversion
from snapshot_shared.errors import InvalidManifest
from snapshotctl import objects
from snapshotctl.domain.exits import WrongArguments
from tests.support.widget import KIND
from tests.support.widget.registered import document, register
from tests.support.widget.v1beta1 import Part, Widget

NEW, OLD = KIND.versions


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)


def test_its_definition_has_each_version_and_stores_the_hub() -> None:
    [found] = [each for each in definitions() if each["spec"]["names"]["kind"] == "Widget"]
    new, old = found["spec"]["versions"]
    assert (new["name"], new["storage"], old["name"], old["storage"]) == (
        *("v1beta1", True),
        *("v1alpha1", False),
    )
    assert "deprecated" not in new
    assert old["deprecated"]
    assert "use nvidia.com/v1beta1" in old["deprecationWarning"]
    assert new["subresources"]["scale"]["specReplicasPath"] == ".spec.replicas"
    assert [column["name"] for column in new["additionalPrinterColumns"]] == ["Replicas", "Age"]
    assert converted_definitions() == ["widgets.nvidia.com"]
    client = {"url": "https://198.51.100.7"}
    for webhook, wanted in ((client, client), (None, {"service": SERVICE})):
        specs = {each["metadata"]["name"]: each["spec"] for each in definitions(webhook=webhook)}
        conversion = specs["widgets.nvidia.com"]["conversion"]
        assert conversion["strategy"] == "Webhook"
        assert conversion["webhook"]["clientConfig"] == wanted
        # An API server needs none for a kind of one version.
        assert not any(
            "conversion" in specs[name] for name in specs.keys() - {"widgets.nvidia.com"}
        )


@pytest.mark.parametrize(
    ("given", "path", "text"),
    [
        (
            document(limit=5, parts=[{"name": "a", "weight": 6}]),
            "spec.parts",
            "no part of a widget may weigh more than its limit",
        ),
        (document(replicas=-1), "spec.replicas", "-1 is less than the minimum of 0"),
        (document(count=1), "spec.count", "unknown or unsupported field"),
        (document("v1alpha1", replicas=1), "spec.replicas", "unknown or unsupported field"),
    ],
)
def test_a_document_is_judged_by_its_own_version_in_both_worlds(
    given: dict[str, Any], path: str, text: str
) -> None:
    for found in (problems(given, "kubernetes"), problems(given, "standalone")):
        assert [each.path for each in found] == [path]
        assert text in found[0].text


def test_a_version_that_it_has_not_is_refused_with_those_that_it_has() -> None:
    [problem] = problems(document() | {"apiVersion": "nvidia.com/v1"}, "kubernetes")
    assert str(problem) == (
        "apiVersion: Widget is nvidia.com/v1beta1 or nvidia.com/v1alpha1, found 'nvidia.com/v1'"
    )


def test_a_field_that_is_marked_never_changes_and_the_others_do() -> None:
    old = document(maker={"name": "m"})
    for spec, path in (({"replicas": 3}, ()), ({"maker": {"name": "n"}}, ("spec.maker",))):
        new = document(**({"maker": {"name": "m"}} | spec))
        assert [each.path for each in refused_by_definition(KIND, new, old)] == [*path]
    assert [each.path for each in refused_by_definition(KIND, document(), old)] == ["spec.maker"]


def test_an_older_document_is_read_as_the_hub_and_written_in_either_version() -> None:
    old = document("v1alpha1", count=3, partNames=["a", "b"])
    value: Any = parse(old)
    assert isinstance(value, Widget)
    assert (value.spec.replicas, value.spec.parts) == (3, [Part(name="a"), Part(name="b")])
    new = converted(KIND, old, NEW)
    assert new["apiVersion"] == "nvidia.com/v1beta1"
    assert converted(KIND, new, NEW) is new
    assert converted(KIND, new, OLD) == old
    # Fields may be missing.
    assert converted(KIND, {"apiVersion": "nvidia.com/v1alpha1"}, NEW)["spec"] == {}
    assert objects.in_version(KIND, "v1alpha1")(value)["spec"] == old["spec"]
    with pytest.raises(WrongArguments, match="has no version 'v2'"):
        objects.in_version(KIND, "v2")
    with pytest.raises(InvalidManifest, match="has no version 'v2'"):
        converted(KIND, old | {"apiVersion": "v2"}, NEW)


def review(*objects: dict[str, Any], to: str = "nvidia.com/v1beta1") -> Any:
    request = {"uid": "u", "desiredAPIVersion": to, "objects": objects}
    return json.loads(conversion.answer(json.dumps({"request": request}).encode()))["response"]


def test_an_api_server_is_answered_with_objects_of_the_version_that_it_wants() -> None:
    old = document("v1alpha1", count=2)
    found = review(old, document())
    assert (found["uid"], found["result"]["status"]) == ("u", "Success")
    assert [each["apiVersion"] for each in found["convertedObjects"]] == 2 * ["nvidia.com/v1beta1"]
    assert found["convertedObjects"][0]["metadata"] == old["metadata"]
    failed = review(old | {"kind": "Gadget"})
    assert failed["result"] == {
        "status": "Failed",
        "message": "no Gadget of nvidia.com/v1beta1 is known",
    }
    assert review(old, to="nvidia.com/v9")["result"]["status"] == "Failed"


def test_the_reference_page_has_both_versions_and_the_text_of_each_field() -> None:
    page = kubernetes_api.page()
    assert "## Widget\n" in page
    assert "### Widget of v1alpha1\n" in page
    assert "| `spec.replicas` | integer (≥ 0, ≤ 100) | `1` | How many widgets there are. |" in page
    assert "- `spec.parts`: no part may weigh more than the limit" in page
    assert yaml.safe_load(json.dumps(definitions()))
