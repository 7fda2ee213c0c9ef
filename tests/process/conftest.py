"""The CRIU of these tests, and a node on which it is run."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import pytest

from tests.process import node as nodes
from tests.process.cuda_stage import Stage, staged
from tests.process.node import Node
from tests.support.cuda_rig import CudaNode


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark every test of this folder: it needs the real CRIU, and waits for it."""
    item.add_marker(pytest.mark.process)
    item.add_marker(pytest.mark.waits)


@pytest.fixture
def criu() -> Path:
    """The program of CRIU, where this machine can run it."""
    if why := nodes.lacking():
        pytest.skip(why)
    return nodes.CRIU / "criu"


@pytest.fixture
def stage(tmp_path: Path, criu: Path, cuda_node: CudaNode) -> Iterator[Stage]:
    """A node of its own with a helper and a CUDA driver, without an agent."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as layers:
        yield from staged(tmp_path, Path(layers), cuda_node)


@pytest.fixture
async def node(criu: Path, nats_url_session: str) -> AsyncIterator[Node]:
    """A node of its own with a helper and an agent, on the nats-server of the whole run."""
    async with nodes.opened(nats_url_session) as made:
        await made.process()
        yield made


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the logs of the node when a test fails."""
    report = yield
    node = getattr(item, "funcargs", {}).get("node")
    if report.failed and node is not None and report.when == "call":
        report.sections += [(path.name, path.read_text()[-4000:]) for path in node.logs()]
    return report
