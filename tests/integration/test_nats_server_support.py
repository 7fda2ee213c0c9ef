"""The server that the integration tests stand on."""

from pathlib import Path

import nats
import pytest

from tests.support.nats_server import NatsServer, nats_server_binary, running_nats_server


async def _publish(url: str, subject: str) -> int:
    connection = await nats.connect(url)
    try:
        stream = connection.jetstream()
        await stream.add_stream(name="S", subjects=["s.>"])
        return (await stream.publish(subject, b"1")).seq
    finally:
        await connection.close()


def test_the_server_comes_from_the_installed_wheel_and_not_from_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    assert nats_server_binary().is_file()


async def test_each_test_gets_a_jetstream_that_holds_nothing(nats_url: str) -> None:
    assert await _publish(nats_url, "s.a") == 1


async def test_a_fresh_server_again_holds_nothing(nats_url: str) -> None:
    assert await _publish(nats_url, "s.a") == 1


async def test_the_shared_server_differs_from_that_of_the_test(
    nats_url: str, nats_url_session: str
) -> None:
    assert nats_url != nats_url_session
    connection = await nats.connect(nats_url_session)
    await connection.close()


async def test_a_restarted_server_keeps_its_port_and_its_store(tmp_path: Path) -> None:
    async with running_nats_server(tmp_path / "nats") as server:
        url, pid = server.url, server.pid
        assert await _publish(url, "s.a") == 1
        server.stop()
        await server.start_async()
        assert (server.url, server.pid == pid) == (url, False)
        assert await _publish(url, "s.b") == 2


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "nats", arguments=["--config=/does/not/exist.conf"])
    with pytest.raises(RuntimeError, match="exist"):
        server.start()
