"""NATS, in one place: nothing else imports `nats`.

`connection` keeps one connection up, `assets` keeps streams and buckets in existence, `streams`
publishes and consumes, `services` asks and answers. Everything that NATS holds can be rebuilt from
the object store and the journals.
"""

from __future__ import annotations

from snapshot_shared.bus.assets import BUCKETS, STREAMS, StreamState
from snapshot_shared.bus.connection import REQUEST_S
from snapshot_shared.bus.services import ASKED, Bus, Handler
from snapshot_shared.bus.streams import Delivery

__all__ = ["ASKED", "BUCKETS", "REQUEST_S", "STREAMS", "Bus", "Delivery", "Handler", "StreamState"]
