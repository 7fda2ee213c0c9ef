"""What a saver and a loader in a container read off their environment."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from gms.domain.containers import Settings, container_load, container_save, read_settings
from gms.domain.tasks import SHARD_BYTES, TransferOptions, save_task
from gms.main import GmsSettings, transfer_options
from snapshot_shared.errors import InvalidInput
from snapshot_shared.orders import SaveOrder
from snapshot_shared.settings import load
from tests.support import builders, weights
from tests.support.builders import DIGEST, UID
from tests.unit.tables import each

NEEDED = {"GMS_SOCKET_DIR": "/run/gms", "GMS_CHECKPOINT_DIR": "/store"}
PLAIN = {
    "socket_dir": "/run/gms",
    "checkpoint_dir": "/store",
    "order_file": "/store/order.json",
    "order_dir": "",
    "traceparent": "",
    "shard_bytes": None,
    "lock_s": None,
    "options": TransferOptions("posix-direct", "", 16, 16),
}


@each(
    ("given", "found"),
    [
        ({}, {}),
        ({"GMS_ORDER_FILE": "/order"}, {"order_file": "/order"}),
        ({"GMS_ORDER_DIR": "/orders"}, {"order_dir": "/orders"}),
        (
            {"GMS_SAVE_WORKERS": "64", "GMS_LOAD_WORKERS": "1"},
            {"options": TransferOptions(save_threads=64, load_threads=1)},
        ),
        (
            {"GMS_SAVE_WORKERS": "65", "GMS_LOAD_WORKERS": "65"},
            {"options": TransferOptions(save_threads=64, load_threads=64)},
        ),
        ({"GMS_SHARD_SIZE_BYTES": str(2**50 - 1)}, {"shard_bytes": 2**50 - 1}),
        ({"GMS_SAVE_LOCK_TIMEOUT_MS": "1500"}, {"lock_s": 1.5}),
    ],
)
def test_what_is_not_set_has_its_default(given: dict[str, str], found: dict[str, object]) -> None:
    assert read_settings(NEEDED | given) == Settings(**PLAIN | found)  # type: ignore[arg-type]


@each("text", ["0", "-1", "1.5", "many", str(2**50), "\u0663"])
def test_a_number_that_is_none_is_named(text: str) -> None:
    with pytest.raises(InvalidInput, match="GMS_SAVE_WORKERS"):
        read_settings(NEEDED | {"GMS_SAVE_WORKERS": text})


@each("name", ["GMS_SOCKET_DIR", "GMS_CHECKPOINT_DIR", "GMS_ORDER_DIR"])
@each("value", ["store", "/a/../b", "/a/./b", " /a", "/a "])
def test_a_folder_that_depends_on_something_else_is_named(name: str, value: str) -> None:
    with pytest.raises(InvalidInput, match=name) as caught:
        read_settings(NEEDED | {name: value})
    assert repr(value) in caught.value.message
    assert f"set {name} to the absolute path" in caught.value.message


ORDER: dict[str, Any] = {"uid": UID, "deadline_s": 60.0, "traceparent": "of the order"}


def save_order(**changes: Any) -> SaveOrder:
    return weights.save_order(builders.layout(), attempt=2, **ORDER, **changes)


def settings(**changes: str) -> Settings:
    folder = f"/store/default/{UID}/gen-2"
    return read_settings({**NEEDED, "GMS_CHECKPOINT_DIR": folder, **changes})


def test_a_save_is_what_its_order_and_the_environment_say() -> None:
    task = container_save(settings(), save_order())
    assert (task.root, task.namespace, task.generation) == ("/store", "default", 2)
    assert (task.deadline_s, task.threads, task.fence_token) == (60.0, 16, None)
    assert (task.traceparent, task.shard_bytes) == ("of the order", SHARD_BYTES)


@pytest.mark.parametrize(("lock_ms", "deadline_s"), [("1500", 1.5), ("90000", 60.0)])
def test_a_save_may_be_given_less_time_and_other_shards(lock_ms: str, deadline_s: float) -> None:
    given = settings(
        GMS_SAVE_LOCK_TIMEOUT_MS=lock_ms, GMS_SHARD_SIZE_BYTES="8192", TRACEPARENT="of the pod"
    )
    task = container_save(given, save_order(fence_token="f"))
    assert (task.deadline_s, task.shard_bytes, task.fence_token) == (deadline_s, 8192, "f")
    assert task.traceparent == "of the pod"


@pytest.mark.parametrize(("trace", "expected"), [("", "of the order"), ("of the pod",) * 2])
def test_a_load_is_what_its_order_and_the_environment_say(trace: str, expected: str) -> None:
    order = weights.load_order(
        owner=UID,
        generation=2,
        attempt=5,
        part_digest=DIGEST,
        device="GPU-2",
        layout_id="l",
        structure_hash="h",
        load_token="of the order",
        **ORDER,
    )
    task = container_load(settings(TRACEPARENT=trace), order, load_token="t")
    assert (task.root, task.namespace) == ("/store", "default")
    assert (task.content_uid, task.generation) == (UID, 2)
    assert (task.device, task.part, task.part_digest) == ("GPU-2", "gpu-0", DIGEST)
    assert (task.layout_id, task.structure_hash, task.load_token) == ("l", "h", "t")
    assert (task.deadline_s, task.threads, task.traceparent) == (60.0, 16, expected)


def test_the_threads_of_the_service_are_those_of_its_orders() -> None:
    environment = {
        "SNAPBACK_STATE_DIR": "/state",
        "SNAPBACK_NODE": "node-1",
        "SNAPBACK_ARTIFACT_ROOT": "/store",
        "SNAPBACK_SOCKET_DIR": "/run/gms",
    }
    plain = transfer_options(load(GmsSettings, environment))
    assert (plain.of_save()["threads"], plain.of_load()["threads"]) == (16, 16)
    numbers = {"SNAPBACK_SAVE_THREADS": "6", "SNAPBACK_LOAD_THREADS": "32"}
    given = transfer_options(load(GmsSettings, environment | numbers))
    saved = save_task(save_order(), given, socket_dir="/run/gms", root="/store", deadline_s=1.0)
    assert (saved.threads, given.of_load()["threads"]) == (6, 32)


def test_an_order_about_another_generation_is_refused() -> None:
    with pytest.raises(InvalidInput, match="gen-3"):
        container_save(settings(), replace(save_order(), attempt=3))
