"""vLLM as it is, on CPUs: captured and restored by CRIU (`make test-engines`).

Nothing of Snapback runs in it. It is three processes, with unix sockets of ZeroMQ between them and
shared memory, under `snapback-run`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from snapshotctl.adapters.machine import look_for_criu
from snapshotctl.domain import criu_host
from snapshotctl.domain.demo_engines import ENGINES, PORT_VARIABLE
from snapshotctl.domain.demo_script import with_variables
from tests.integration.snapshotctl.conftest import EXAMPLES, Cli
from tests.support.live_cluster import LiveCluster, Session, find
from tests.support.ports import free_port

# A plain process has the mounts of this machine, so that none may come or go meanwhile.
pytestmark = [pytest.mark.engines, pytest.mark.timeout(600), pytest.mark.xdist_group("mounts")]

VLLM = ENGINES["vllm"]
NODES = ("node-1", "node-2")
STREAMED = 480
"""The tokens of a request, as many as the engine has room for in the examples, nearly."""


@pytest.fixture
async def session(tmp_path: Path) -> AsyncIterator[Session]:
    """A cluster of two nodes with CRIU."""
    host = look_for_criu()
    criu_host.require(criu_host.checks(host), "make test-engines")
    cluster = LiveCluster(tmp_path, tools=Path(host.tools))
    await cluster.up(*NODES)
    try:
        async with cluster.session() as found:
            yield found
    finally:
        assert await cluster.down() == []


def test_the_demo_gets_the_same_tokens_from_the_other_node_after_its_own_was_lost(
    tmp_path: Path,
) -> None:
    cli = Cli(tmp_path)
    # vLLM starts twice: it compiles for a minute where other programs use the processors.
    cli.patience_s = 300.0
    shown = cli.ok("demo", "--engine", "vllm", "--driver", "criu", "-o", "json").value()
    answers = [answer["answer"] for answer in shown["answers"]]
    assert len(answers) == len(set(answers)) == len(VLLM.asked)
    assert shown["restoreSeconds"] < shown["coldSeconds"]


class Stream:
    """A completion that comes token by token."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.tokens: list[int] = []
        self.reason = ""

    async def read(self) -> None:
        body = {
            "model": "demo",
            "prompt": "A cold worker",
            "max_tokens": STREAMED,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "return_token_ids": True,
        }
        async with (
            aiohttp.ClientSession() as client,
            client.post(f"{self._url}/v1/completions", json=body) as response,
        ):
            async for line in response.content:
                text = line.decode().removeprefix("data: ").strip()
                if not text.startswith("{"):
                    continue
                [choice] = json.loads(text)["choices"]
                self.tokens += choice["token_ids"]
                self.reason = choice["finish_reason"] or self.reason


def example(name: str, port: int) -> Any:
    found = yaml.safe_load((EXAMPLES / name).read_text())
    return with_variables(found, {PORT_VARIABLE: str(port)})


async def test_requests_that_are_streamed_at_the_capture_go_on_and_the_copy_serves_the_next(
    session: Session,
) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    checkpoint = example(VLLM.checkpoint, port)
    await session.apply(checkpoint)
    captured = asyncio.Event()
    asking = asyncio.create_task(_ask_until(captured, url))
    await session.reaches("DynamoCheckpoint", "demo-vllm")
    captured.set()
    # One was under way at each moment of the capture.
    streams = await asking
    assert len(streams) > 1
    assert {(len(stream.tokens), stream.reason) for stream in streams} == {(STREAMED, "length")}
    assert len({tuple(stream.tokens) for stream in streams}) == 1
    await session.cluster.kill_node(NODES[0])
    await session.apply(example(VLLM.restore, port))
    await session.reaches("Pod", "demo-vllm-restored")
    again = Stream(url)
    async with asyncio.timeout(120):
        await again.read()
    assert again.tokens == streams[0].tokens
    assert find(await session.objects(), "Pod", "demo-vllm-restored").status.phase == "Running"


async def _ask_until(captured: asyncio.Event, url: str) -> list[Stream]:
    """Make one request after the other, from when the engine serves."""
    streams: list[Stream] = []
    while not captured.is_set():
        stream = Stream(url)
        try:
            async with asyncio.timeout(120):
                await stream.read()
            streams.append(stream)
        except aiohttp.ClientConnectorError:
            await asyncio.sleep(0.1)
    return streams
