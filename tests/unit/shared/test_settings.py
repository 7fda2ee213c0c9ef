"""Settings are checked once, at the start, and what is wrong with one is named."""

from __future__ import annotations

import pytest

from snapback_client.folders import check_folder
from snapshot_shared.errors import InvalidInput
from snapshot_shared.settings import NodeSettings, load
from tests.unit.tables import each

GOOD = {
    "SNAPBACK_STATE_DIR": "/var/lib/snapback/state",
    "SNAPBACK_ARTIFACT_ROOT": "/var/lib/snapback/artifacts",
    "SNAPBACK_SOCKET_DIR": "/run/snapback/",
    "SNAPBACK_NODE": "node-1",
}
BAD = ["", "artifacts", "./a", "/a/../b", "/a/..", "/a/./b", "/.", " /a", "/a ", "/a\n", "/a\x07b"]


@each("value", ["/", "/a", "/a/", "/a//b", "/a/..b/c.d", "/a b/ü"])
def test_a_folder_is_taken_as_it_is_written(value: str) -> None:
    assert check_folder("X", value) == value


@each("value", BAD)
@each("name", [name for name in GOOD if name != "SNAPBACK_NODE"])
def test_a_folder_that_depends_on_something_else_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        load(NodeSettings, GOOD | {name: value})
    assert f"{name}={value!r}" in caught.value.message
    assert f"set {name} to the absolute path" in caught.value.message
    with pytest.raises(InvalidInput, match=name):
        check_folder(name, value)


def test_all_folders_that_are_wrong_are_named_at_once() -> None:
    wrong = {name: "here" for name in GOOD if name != "SNAPBACK_NODE"}
    with pytest.raises(InvalidInput) as caught:
        load(NodeSettings, GOOD | wrong)
    assert all(name in caught.value.message for name in wrong)


def test_a_service_has_no_fault_switch_unless_its_environment_asks_for_one() -> None:
    assert not load(NodeSettings, GOOD).sim
    assert load(NodeSettings, GOOD | {"SNAPBACK_SIM": "1"}).sim
    with pytest.raises(InvalidInput, match="SNAPBACK_SIM"):
        load(NodeSettings, GOOD | {"SNAPBACK_SIM": "perhaps"})


def test_a_node_with_stripe_roots_that_are_written_wrong_does_not_start() -> None:
    found = load(NodeSettings, GOOD | {"SNAPBACK_STRIPE_ROOTS": "b=/b:a=/a"})
    assert list(found.stripes().folders) == ["a", "b"]
    assert not load(NodeSettings, GOOD).stripes().folders
    within = f"{GOOD['SNAPBACK_ARTIFACT_ROOT']}/a"
    with pytest.raises(InvalidInput, match=f"SNAPBACK_STRIPE_ROOTS='a={within}'"):
        load(NodeSettings, GOOD | {"SNAPBACK_STRIPE_ROOTS": f"a={within}"})


@each(
    ("variable", "said"),
    [
        ("SNAPBACK_STATE_DIRS", "DIRS is set, and not read; did you mean SNAPBACK_STATE_DIR?"),
        ("SNAPBACK_ARTEFACT_ROOT", "did you mean SNAPBACK_ARTIFACT_ROOT?"),
        ("SNAPBACK_NATS_SERVICE_HOST", ""),
        ("SNAPBACK_KEEP_COUNT", ""),
        ("NATS_URL", ""),
    ],
)
def test_a_variable_that_is_nearly_written_like_a_setting_is_named(
    variable: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.clear()
    load(NodeSettings, GOOD | {variable: "1"})
    assert said in caplog.text
    assert bool(caplog.text) == bool(said)
