"""The API server of a test, in memory: what a driver of devices reads and writes there."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from gms.domain.claims import DRIVER, ResourceClaim
from gms.domain.slices import FoundSlice
from snapshot_shared.errors import Conflict, NotFound, StoreBusy


class MemoryApi:
    """Claims and slices by name. With `is_away` every call fails as when nothing answers."""

    def __init__(self) -> None:
        self.is_away = False
        self.calls: list[str] = []
        self.claims: dict[str, ResourceClaim] = {}
        self.stored: dict[str, Mapping[str, Any]] = {}
        self.changed = asyncio.Event()
        self._version = 0

    def allocate(self, name: str, uid: str, *devices: str, admin: bool = False) -> None:
        results = [
            {
                "request": "gpu",
                "driver": DRIVER,
                "pool": "n1",
                "device": device,
                "adminAccess": admin,
            }
            for device in devices
        ]
        found = {
            "metadata": {"uid": uid},
            "status": {"allocation": {"devices": {"results": results}}},
        }
        self.claims[name] = msgspec.convert(found, ResourceClaim)

    def touch(self) -> None:
        """End the watches, as a change does."""
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    async def has_claims(self) -> bool:
        self._called("has_claims")
        return True

    async def node_uid(self, node: str) -> str:
        self._called("node_uid")
        return "0a0a0a0a-0000-4000-8000-000000000001"

    async def claim(self, namespace: str, name: str) -> ResourceClaim:
        self._called("claim")
        if name not in self.claims:
            raise NotFound(f'resourceclaims "{name}" not found')
        return self.claims[name]

    async def slices(self, node: str) -> tuple[list[FoundSlice], str]:
        self._called("slices")
        return [msgspec.convert(each, FoundSlice) for each in self.stored.values()], "1"

    async def create_slice(self, body: Mapping[str, Any]) -> None:
        self._called("create")
        self._put(body["metadata"]["name"], body)

    async def replace_slice(self, name: str, body: Mapping[str, Any]) -> None:
        self._called("replace")
        found = self.stored[name]["metadata"]["resourceVersion"]
        if body["metadata"]["resourceVersion"] != found:
            raise Conflict("the object has been modified")
        self._put(name, body)

    async def delete_slice(self, name: str) -> None:
        self._called("delete")
        self.stored.pop(name, None)
        self.touch()

    async def slices_changed(self, node: str, version: str) -> None:
        self._called("watch")
        await self.changed.wait()

    def _put(self, name: str, body: Mapping[str, Any]) -> None:
        self._version += 1
        metadata = {**body["metadata"], "resourceVersion": str(self._version)}
        self.stored[name] = {**body, "metadata": metadata}
        self.touch()

    def _called(self, call: str) -> None:
        self.calls.append(call)
        if self.is_away:
            raise StoreBusy(f"{call}: connection refused")
