"""One operator of a cluster is the active one: the one that holds a Lease of Kubernetes.

It renews the Lease on the monotonic clock and stops its work before the Lease can be taken by
another. An operator that was paused for longer may still write for a moment; each of its writes
names a resourceVersion, and each order an attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any

import msgspec

from snapshot_shared.clocks import Clocks
from snapshot_shared.errors import AlreadyExists, Conflict, NotFound, SnapbackError, StoreBusy
from snapshot_shared.kube_client import KubeClient, decoded
from snapshot_shared.kube_watch import StoreRewound
from snapshot_shared.tasks import any_set, end_all

log = logging.getLogger(__name__)

LASTS_S = 15
"""How long the Lease is held without a renewal, in seconds, as in client-go."""


class LeaseSpec(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """The spec of a Lease; times are RFC 3339 with microseconds."""

    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int = 0


class Lease(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A coordination.k8s.io/v1 Lease; its metadata is written back as it was read."""

    api_version: str = "coordination.k8s.io/v1"
    kind: str = "Lease"
    metadata: dict[str, Any]
    spec: LeaseSpec = LeaseSpec()

    @property
    def version(self) -> str:
        """The version that was read; empty for a Lease that is to be created."""
        return str(self.metadata.get("resourceVersion", ""))


_LEASE = msgspec.json.Decoder(Lease)


def is_free(lease: Lease, unchanged_s: float) -> bool:
    """Whether a Lease may be taken that has not changed for `unchanged_s` seconds.

    That time is counted here: the clock that wrote `renewTime` may be another one.
    """
    spec = lease.spec
    return not spec.holder_identity or unchanged_s >= (spec.lease_duration_seconds or 0)


class KubeLease:
    """The `Leadership` port over a Lease of Kubernetes."""

    def __init__(
        self,
        client: KubeClient,
        place: tuple[str, str],
        identity: str,
        clocks: Clocks,
        jitter: Callable[[], float],
        lasts_s: int = LASTS_S,
    ) -> None:
        """Use the Lease at `place`, its namespace and name. No two processes share an identity."""
        self._client = client
        self._namespace, self._name = place
        self._identity = identity
        self._clocks = clocks
        self._jitter = jitter
        self._lasts_s = lasts_s

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[asyncio.Event]:
        """Wait for the Lease and renew it for the length of the block, then give it back."""
        taken, asked_at = await self._acquired()
        log.info("this operator (%s) is the active one", self._identity)
        lost = asyncio.Event()
        renewing = asyncio.ensure_future(self._renew(taken, asked_at, lost))
        try:
            yield lost
        finally:
            is_lost = lost.is_set()
            await end_all(renewing)
            if not is_lost:
                await self._release()

    async def _acquired(self) -> tuple[Lease, float]:
        """Return the Lease as it was stored once it was this operator's, and when that was asked.

        An answer that comes when others may have taken the Lease already is of no use.
        """
        seen, since, is_waiting = "", 0.0, False
        while True:
            try:
                found = await self._found()
                asked_at = self._clocks.monotonic()
                if found is not None and found.version != seen:
                    seen, since = found.version, asked_at
                if found is None or is_free(found, asked_at - since):
                    async with asyncio.timeout(self._kept_s):
                        return await self._store(self._taken(found)), asked_at
                if not is_waiting:
                    log.info("%s is active: this one stands by", found.spec.holder_identity)
                    is_waiting = True
            except (AlreadyExists, Conflict, NotFound):
                log.info("another operator has taken the lease")
            except TimeoutError:
                log.warning("the lease was not stored in time: the API server is slow")
            except SnapbackError as error:
                log.warning("the lease cannot be read or written: %s", error)
            await any_set(self._pause_s)

    @property
    def _pause_s(self) -> float:
        return self._lasts_s / 7.5 * (1 + 0.2 * self._jitter())

    @property
    def _kept_s(self) -> float:
        """How long this operator works without a renewal: two thirds of what the Lease lasts."""
        return self._lasts_s * 2 / 3

    async def _renew(self, taken: Lease, asked_at: float, lost: asyncio.Event) -> None:
        """Renew until that has failed for too long; however it ends, the Lease is lost then."""
        lease, renewed_at = taken, asked_at
        try:
            while True:
                await any_set(self._pause_s)
                # What counts is when it was asked for: the answer may have been under way for long.
                asked_at = self._clocks.monotonic()
                async with asyncio.timeout(max(renewed_at + self._kept_s - asked_at, 0.0)):
                    lease, is_renewed = await self._renewed(lease)
                if is_renewed:
                    renewed_at = asked_at
        except (TimeoutError, SnapbackError) as error:
            log.warning("the lease is lost: %s", error or "it could not be renewed in time")
        finally:
            lost.set()

    async def _renewed(self, lease: Lease) -> tuple[Lease, bool]:
        """Return the Lease as stored, and whether it was renewed. Conflict when it is lost.

        StoreRewound when etcd was restored from a backup that is older than the last renewal. The
        versions of other objects may be as new as they were by the time they are looked at.
        """
        try:
            try:
                return await self._store(self._prolonged(lease)), True
            except (Conflict, NotFound):
                # The write before this one may have been stored although no answer came.
                found = await self._found()
                if found is None or found.spec.holder_identity != self._identity:
                    raise
                if int(found.version) < int(lease.version):
                    message = f"the lease is at version {found.version} and was at {lease.version}"
                    raise StoreRewound(message) from None
                return await self._store(self._prolonged(found)), True
        except StoreBusy as error:
            log.warning("the lease is not renewed: %s", error)
            return lease, False

    def _prolonged(self, lease: Lease) -> Lease:
        spec = msgspec.structs.replace(lease.spec, renew_time=self._now())
        return msgspec.structs.replace(lease, spec=spec)

    async def _release(self) -> None:
        """Let the next operator begin at once; without this it waits for the Lease to expire."""
        with contextlib.suppress(SnapbackError, TimeoutError):
            async with asyncio.timeout(self._lasts_s / 3):
                found = await self._found()
                if found is not None and found.spec.holder_identity == self._identity:
                    spec = msgspec.structs.replace(found.spec, holder_identity="")
                    await self._store(msgspec.structs.replace(found, spec=spec))

    def _taken(self, found: Lease | None) -> Lease:
        now = self._now()
        before = found.spec.lease_transitions if found is not None else -1
        new = {"name": self._name, "namespace": self._namespace}
        meta = found.metadata if found is not None else new
        spec = LeaseSpec(self._identity, self._lasts_s, now, now, before + 1)
        return Lease(metadata=meta, spec=spec)

    def _now(self) -> str:
        stamp = datetime.fromtimestamp(self._clocks.wall(), UTC)
        return stamp.strftime("%Y-%m-%dT%H:%M:%S.%fZ")

    @property
    def _path(self) -> str:
        return f"/apis/coordination.k8s.io/v1/namespaces/{self._namespace}/leases"

    async def _found(self) -> Lease | None:
        try:
            return decoded(_LEASE, await self._client.request("GET", f"{self._path}/{self._name}"))
        except NotFound:
            return None

    async def _store(self, lease: Lease) -> Lease:
        """Create or replace the Lease: one that was read has a version, which has to be current."""
        is_new = not lease.version
        verb, path = ("POST", self._path) if is_new else ("PUT", f"{self._path}/{self._name}")
        body: Any = lease
        return decoded(_LEASE, await self._client.request(verb, path, body=body))
