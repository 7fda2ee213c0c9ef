"""With an OTLP endpoint set, spans go there too, over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from snapshot_shared.telemetry import Telemetry

PARENT = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


class Collector(HTTPServer):
    """Keeps what is posted."""

    def __init__(self) -> None:
        self.posts: list[tuple[str, bytes]] = []
        posts = self.posts

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                size = int(self.headers["Content-Length"])
                posts.append((self.path, self.rfile.read(size)))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_args: object) -> None:
                """Keep the output of the tests clean."""

        super().__init__(("127.0.0.1", 0), Handler)


@pytest.fixture
def collector() -> Iterator[Collector]:
    server = Collector()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_spans_reach_the_collector_with_service_name_and_trace(collector: Collector) -> None:
    endpoint = f"http://127.0.0.1:{collector.server_port}"
    telemetry = Telemetry("snap-agent", "node-1", "0.1.0", otlp_endpoint=endpoint)
    with telemetry.span("dump", parent=PARENT):
        pass
    telemetry.shutdown()
    ((path, body),) = collector.posts
    assert path == "/v1/traces"
    assert b"snap-agent" in body
    assert bytes.fromhex("a" * 32) in body


def test_a_collector_that_is_down_stops_nothing() -> None:
    telemetry = Telemetry("snap-agent", "node-1", "0.1.0", otlp_endpoint="http://127.0.0.1:9")
    with telemetry.span("dump", parent=PARENT):
        pass
    assert [span.name for span in telemetry._outbox.records] == ["dump"]
