"""A server that speaks S3, on a free loopback port, in a process of its own.

`python -m tests.support.s3_server` says where it listens and ends with its standard input.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class S3Server:
    """A running server with one bucket, `bucket`."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process = process
        self.endpoint = f"http://127.0.0.1:{port}"
        self.environment = {
            "AWS_ENDPOINT": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE",
            "AWS_SECRET_ACCESS_KEY": "the-secret",
        }

    def stop(self) -> None:
        """End it, as when the storage goes away."""
        if self.process.stdin:
            self.process.stdin.close()
        self.process.wait(10)


@contextlib.contextmanager
def s3_server(*, checked_after: int | None = None) -> Iterator[S3Server]:
    """Run a server. After `checked_after` requests it asks for keys that it has given out: none."""
    environment = dict(os.environ)
    if checked_after is not None:
        # The bucket is made with the first.
        environment["INITIAL_NO_AUTH_ACTION_COUNT"] = str(checked_after)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.s3_server"],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    server = S3Server(process, int(process.stdout.readline()))
    process.stdout.close()
    try:
        request = urllib.request.Request(f"{server.endpoint}/bucket", method="PUT")
        urllib.request.urlopen(request, timeout=30).close()
        yield server
    finally:
        server.stop()


def main() -> None:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    application = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, application, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.port, flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
