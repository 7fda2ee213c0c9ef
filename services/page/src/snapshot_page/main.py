"""Run the page: settings, the connection to NATS, the HTTP port."""

from __future__ import annotations

import asyncio
import sys
import uuid
from pathlib import Path

import msgspec

from snapshot_page.adapters.live_view import LiveView
from snapshot_page.handlers import Page
from snapshot_shared.bus import Bus
from snapshot_shared.http import MAX_CONNECTIONS, Guests, http_port
from snapshot_shared.metrics import Metrics
from snapshot_shared.permissions import User
from snapshot_shared.service import VERSION, run, system_clocks, until_stopped
from snapshot_shared.settings import load
from snapshot_shared.telemetry import log_to_stderr

SERVICE = "snap-page"
NODE = "page"


class PageSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of the page; `nats_credentials` is the seed of a viewer.

    `page_hosts` are the host names, with commas between them, that it answers to beside localhost
    and addresses, `nats_context` is the context in the commands that it shows, and `page_file` is
    where its address is written.
    """

    nats_url: str = "nats://127.0.0.1:4222"
    nats_credentials: str | None = None
    nats_ca: Path | None = None
    run: str = ""
    log_level: str = "INFO"
    otlp_endpoint: str | None = None
    http_address: str = "127.0.0.1:8080"
    page_hosts: str = ""
    page_file: Path | None = None
    nats_context: str = ""


async def serve(stop: asyncio.Event) -> None:
    """Serve until `stop` is set; also while NATS cannot be reached."""
    settings = load(PageSettings)
    log_to_stderr(SERVICE, NODE, settings.log_level)
    endpoint = settings.otlp_endpoint
    metrics = Metrics(SERVICE, NODE, VERSION, scraped=True, otlp_endpoint=endpoint)
    bus = Bus(
        settings.nats_url,
        SERVICE,
        credentials=settings.nats_credentials,
        ca=settings.nats_ca,
        inbox=User("viewer").inbox,
        metrics=metrics,
    )
    view = LiveView(bus, system_clocks(), uuid.uuid4().hex[:12], settings.nats_context)
    page = Page(view, filter(None, settings.page_hosts.replace(" ", "").split(",")))
    routes = [*page.routes(), *metrics.routes()]
    try:
        async with (
            # Behind `kubectl port-forward` all readers have one address.
            http_port(
                settings.http_address, bus.not_ready, routes, guests=Guests(of_peer=MAX_CONNECTIONS)
            ) as port,
            metrics.running(),
        ):
            host = settings.http_address.rpartition(":")[0]
            _write(settings.page_file, f"http://{host}:{port}/\n")
            try:
                await until_stopped(stop, _connected(bus))
            finally:
                page.close()
    finally:
        await bus.close()


def _write(file: Path | None, address: str) -> None:
    """Write the address, whole as soon as the file is there."""
    if file is not None:
        part = file.with_suffix(".part")
        part.write_text(address, "ascii")
        part.replace(file)


async def _connected(bus: Bus) -> None:
    await bus.connect()
    await asyncio.Event().wait()


def main() -> int:
    """Run the page."""
    return run(serve)


if __name__ == "__main__":
    sys.exit(main())
