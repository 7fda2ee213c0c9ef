"""The saver and the loader as containers start them: environment and order file in, files out."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import snapback_client as client
from gms.containers import save_all
from gms.domain.containers import Outcome, read_settings
from snapshot_shared.codec import decode_json, encode_json
from snapshot_shared.errors import Failure
from snapshot_shared.orders import LoadOrder, SaveOrder
from tests.support.forks import forks
from tests.support.gms_rig import MIB, TransferThreads, committed, program
from tests.support.waiting import wait_until
from tests.support.weights import UID, flip, load_order, save_order


class Container:
    """One container's folders, with the service of the fixture."""

    def __init__(self, service: Any, root: Path) -> None:
        self.service = service
        self.generation = root / "default" / UID / "gen-1"
        self.generation.mkdir(parents=True)
        self.control = root / "control"
        self.control.mkdir()
        self.environment = {
            "GMS_SOCKET_DIR": str(service.folder),
            "GMS_CHECKPOINT_DIR": str(self.generation),
            "GMS_ORDER_FILE": str(self.control / "orders.json"),
        }

    def start(self, name: str, orders: Any, **environment: str) -> subprocess.Popen[str]:
        (self.control / "orders.json").write_bytes(encode_json(orders))
        return program(name, **self.environment | environment)

    def run(self, name: str, orders: Any, *, status: int = 0, **environment: str) -> Outcome:
        """Run a program in a fork, which starts at once."""
        (self.control / "orders.json").write_bytes(encode_json(orders))
        name = name.removeprefix("gms-")
        ended = forks("gms.containers").run(
            f"from gms.containers import {name}; {name}()",
            environment={**os.environ, **self.environment, **environment},
        )
        said = ended.stderr.decode()
        assert ended.returncode == status, said
        assert "Traceback" not in said
        return self.outcome()

    def saved(self) -> Outcome:
        """Save as a saver does, in this process."""
        settings = read_settings(self.environment)
        parts = asyncio.run(save_all(settings, self.save_orders(), TransferThreads()))
        return Outcome(verb="save", parts=parts)

    def refused(self, name: str, orders: Any, **environment: str) -> Failure:
        """Run a program, which refuses."""
        self.run(name, orders, status=1, **environment)
        return self.failure()

    def failure(self) -> Failure:
        found = self.outcome().failure
        assert found is not None
        return found

    def outcome(self) -> Outcome:
        """What stands there: `done` or `failed`, never both."""
        (path,) = (p for p in self.control.iterdir() if p.name != "orders.json")
        found = decode_json(path.read_bytes(), Outcome)
        assert path.name == ("failed" if found.failure else "done")
        return found

    def save_orders(self) -> list[SaveOrder]:
        return [save_order(self.service.layout(index), part=f"gpu-{index}") for index in range(2)]

    def load_orders(self, saved: Outcome, **changes: Any) -> list[LoadOrder]:
        return [
            load_order(
                part=part.part,
                part_digest=part.digest,
                device=part.device,
                layout_id=part.layout.layout_id,
                structure_hash=part.layout.structure_hash,
                **changes,
            )
            for part in saved.parts
        ]


@pytest.fixture
def container(service: Any, tmp_path: Path) -> Container:
    for index in range(2):
        with client.connect(index, lock="RW") as pool:
            pool.allocate("w", 3 * MIB, "u1")[:] = np.arange(3 * MIB, dtype="u1") + index
            pool.commit()
    return Container(service, tmp_path)


def bytes_are_there() -> bool:
    found = []
    for index in range(2):
        with client.connect(index, lock="RO", deadline_s=5) as pool:
            found.append(
                np.array_equal(pool["w"], np.arange(3 * MIB, dtype="u1") + np.uint8(index))
            )
    return all(found)


def test_what_a_saver_wrote_a_loader_brings_into_an_empty_service(container: Container) -> None:
    saved = container.run(
        "gms-saver", container.save_orders(), TRACEPARENT="00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    )
    assert [part.part for part in saved.parts] == ["gpu-0", "gpu-1"]
    names = {path.name for path in container.generation.iterdir()}
    assert names == {"gpu-0", "gpu-1"}
    container.service.restart()
    loaded = container.run("gms-loader", container.load_orders(saved))
    assert [part.layout.generation for part in loaded.parts] == [1, 1]
    assert not any(part.was_there for part in loaded.parts)
    assert bytes_are_there()


def test_a_saver_that_may_use_only_the_lease_socket_saves(container: Container) -> None:
    orders = container.save_orders()
    grpc = container.service.folder / "gms-grpc.sock"
    grpc.rename(grpc.with_suffix(".hidden"))
    try:
        saved = container.run("gms-saver", orders)
    finally:
        grpc.with_suffix(".hidden").rename(grpc)
    assert [part.part for part in saved.parts] == ["gpu-0", "gpu-1"]


def test_a_loader_that_finds_its_layouts_committed_leaves_them_alone(container: Container) -> None:
    before = [container.service.layout(index) for index in range(2)]
    saved = container.saved()
    with client.connect(0, lock="RO"):
        loaded = container.run("gms-loader", container.load_orders(saved))
    assert all(part.was_there for part in loaded.parts)
    assert [part.layout for part in loaded.parts] == before
    assert [container.service.layout(index) for index in range(2)] == before


def test_a_saver_that_runs_again_finds_what_it_wrote(container: Container) -> None:
    first = container.run("gms-saver", container.save_orders())
    assert container.run("gms-saver", container.save_orders()) == first


def test_a_saver_and_a_loader_know_object_storage(container: Container, tmp_path: Path) -> None:
    storage = {"SNAPBACK_OBJECT_STORAGE": (tmp_path / "store").as_uri()}
    saved = container.run(
        "gms-saver", container.save_orders(), SNAPBACK_TRANSFER_BACKEND="object", **storage
    )
    names = {path.name for path in (container.generation / "gpu-0").iterdir()}
    assert names == {"part.json", "objects.json"}
    container.service.restart()
    refused = container.refused("gms-loader", container.load_orders(saved))
    assert refused.reason == "ObjectStorageUnset"
    (container.control / "failed").unlink()
    container.run("gms-loader", container.load_orders(saved), **storage)
    assert bytes_are_there()


def test_when_one_part_is_damaged_no_device_gets_a_layout(container: Container) -> None:
    saved = container.saved()
    flip(container.generation / "gpu-1" / "shard-0000.bin", 77)
    container.service.restart()
    failure = container.refused("gms-loader", container.load_orders(saved))
    assert failure.reason == "ArtifactCorrupt"
    for index in range(2):
        device = container.service.device(index)
        assert (device.domains[0].layout, device.loads) == (None, [])
    wait_until(lambda: container.service.device(0).used == 0)


def test_when_one_layout_cannot_be_published_none_stays_visible(container: Container) -> None:
    saved = container.saved()
    service = container.service
    service.restart()
    with client.connect(0, lock="RW"):
        # The load of the first device waits for us, and that of the second is over before it.
        loader = container.start("gms-loader", container.load_orders(saved))
        wait_until(lambda: service.device(1).loads)
        with client.connect(1, lock="RW") as other:
            other.allocate("other", MIB, "u1")
            other.commit()
    with loader:
        loader.communicate(timeout=50)
    assert loader.returncode == 1
    assert container.failure().reason == "GenerationMismatch"
    assert service.device(0).domains[0].layout is None
    assert [service.device(index).loads for index in range(2)] == [[], []]
    with client.connect(1, lock="RO") as other:
        assert list(other.arrays()) == ["other"], "what another client committed stays"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", ""),
        (b"[]", "length >= 1"),
        (b'[{"type": "snapback.v1.load_order"}]', "$[0]"),
    ],
    ids=["nothing", "no-order", "an-order-without-fields"],
)
def test_an_order_file_that_makes_no_sense_is_refused(
    container: Container, content: bytes, says: str
) -> None:
    failure = container.refused("gms-saver", msgspec.Raw(content))
    assert failure.reason == "InvalidMessage"
    assert says in failure.message


def test_an_order_about_another_directory_is_refused_with_both_names(container: Container) -> None:
    other = container.generation.parent / "gen-2"
    orders = container.save_orders()
    failure = container.refused("gms-saver", orders, GMS_CHECKPOINT_DIR=str(other))
    assert failure.values["found"] == str(other)
    assert failure.values["expected"] == f"default/{UID}/gen-1"


def test_without_its_environment_it_names_every_variable(container: Container) -> None:
    environment = {"GMS_SOCKET_DIR": "", "GMS_CHECKPOINT_DIR": "", "GMS_SAVE_WORKERS": "many"}
    with container.start("gms-saver", [], **environment) as process:
        _, said = process.communicate(timeout=30)
    assert process.returncode == 1
    for words in ("GMS_SOCKET_DIR is not set", "GMS_CHECKPOINT_DIR is not set", "'many'"):
        assert words in said


def test_a_saver_that_is_terminated_leaves_no_half_part(launch: Any, tmp_path: Path) -> None:
    service = launch(capacities=(700 * MIB, 8 * MIB))
    committed(0, size=600 * MIB).close()
    committed(1).close()
    container = Container(service, tmp_path)
    with container.start("gms-saver", container.save_orders()[:1]) as process:
        wait_until((container.generation / "gpu-0").exists)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == 1
    assert container.failure().reason == "Aborted"
    assert list(container.generation.iterdir()) == []
