"""Fixtures for every folder of tests, the limit of CPU time, and what stays on one process."""

from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Fixtures of all folders, as the contract of the store is kept by a cluster, too.
from tests.cluster.target import definitions, kubeconfig, target  # noqa: F401
from tests.support.cuda_rig import CudaNode
from tests.support.cuda_rig import cuda_node as node_of_cuda
from tests.support.cuda_rig import library as compiled
from tests.support.limits import CPU_S, cpu_limit
from tests.support.nats_server import nats_server
from tests.support.turns import TURN, others

# Examples compute, so the CPU time of their test limits them, and never the clock.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Limit the CPU time of a test."""
    mark = item.get_closest_marker("cpu")
    with cpu_limit(mark.args[0] if mark else CPU_S):
        yield


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of other turns, of those that other options have left."""
    # Those that failed are of this turn.
    if not config.getoption("lf", default=False) and (left := {*others(items, TURN)}):
        config.hook.pytest_deselected(items=[*left])
        items[:] = [item for item in items if item not in left]


def pytest_itemcollected(item: pytest.Item) -> None:
    """Have tests that share a fixture run on one process, or each process would make its own."""
    for name in _shared_by(item):
        item.add_marker(pytest.mark.xdist_group(name))


def _shared_by(item: pytest.Item) -> set[str]:
    """Name the files and folders whose tests share a fixture that this test takes.

    What is shared by all folders is made once a process: it is cheap.
    """
    shared = set()
    for found in item._fixtureinfo.name2fixturedefs.values():  # type: ignore[attr-defined]
        if found[-1].scope == "module" and found[-1].baseid:
            shared.add(item.nodeid.partition("::")[0])
        elif found[-1].scope in ("package", "session") and found[-1].baseid not in ("", "tests"):
            shared.add(found[-1].baseid)
    return shared


@pytest.fixture(scope="session")
def cuda_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake of the CUDA driver, compiled once."""
    return compiled(tmp_path_factory.mktemp("libcuda"))


@pytest.fixture
def cuda_node(
    tmp_path: Path, cuda_library: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[CudaNode]:
    """A node of this test alone with a fake CUDA driver."""
    folder = tmp_path / "cuda"
    folder.mkdir()
    yield from node_of_cuda(folder, cuda_library, monkeypatch)


@pytest.fixture
def nats_url(tmp_path: Path) -> Iterator[str]:
    """Where a nats-server of this test alone listens, with an empty JetStream store."""
    with nats_server(tmp_path / "nats") as server:
        yield server.url


@pytest.fixture(scope="session")
def nats_url_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a nats-server of the whole run listens, for tests that name their own streams."""
    with nats_server(tmp_path_factory.mktemp("nats")) as server:
        yield server.url
