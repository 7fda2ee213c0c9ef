"""NATS, in one place: nothing else imports `nats`.

`connection` keeps one connection up, `assets` keeps streams and buckets in existence, `streams`
publishes and consumes, `services` asks and answers. Everything that NATS holds can be rebuilt from
the object store and the journals.
"""

from __future__ import annotations

import sys

# nats imports aiohttp for WebSockets, which no service uses, and works without it. aiohttp takes a
# quarter of the time that a service needs to start, and 10 MiB of its memory.
if "aiohttp" not in sys.modules:
    sys.modules["aiohttp"] = None  # type: ignore[assignment]
    import nats.aio.transport  # noqa: F401

    del sys.modules["aiohttp"]

from snapshot_shared.bus.assets import BUCKETS, STREAMS, StreamState
from snapshot_shared.bus.connection import REQUEST_S
from snapshot_shared.bus.services import ASKED, Bus, Handler
from snapshot_shared.bus.streams import Delivery

__all__ = ["ASKED", "BUCKETS", "REQUEST_S", "STREAMS", "Bus", "Delivery", "Handler", "StreamState"]
