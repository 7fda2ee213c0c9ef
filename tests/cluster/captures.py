"""Captures of workers in pods of real kubelets beside operators that are killed or paused."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from snapshot_operator.core.restore import RESTORED
from snapshot_operator.kube import rbac
from snapshot_shared.errors import NotFound, StoreBusy
from tests.cluster.agents import events_of, placeholder, source
from tests.cluster.kubectl import Kubectl
from tests.cluster.rig import OURS, SECONDS, Program, Rig, polled, started

DEATH_S = 30.0
CONTENTS = f"{OURS}/snapshotcontents"


class Captures(NamedTuple):
    """Checkpoints of workers, each in a pod of its own, and what became of them."""

    rig: Rig
    nodes: Kubectl
    artifacts: Path

    async def apply(self, name: str) -> None:
        """Ask for a capture on one node and for a restore from it on the other."""
        await self.rig.apply(name, {"spec": source("--answer", "42")})
        again = placeholder(f"{name}-again", name, "node-2")
        await asyncio.to_thread(self.nodes.apply, again)

    async def example(self) -> dict[str, Any]:
        """Capture and restore a worker while nothing goes wrong; return the outcome."""
        await self.apply("llm-00")
        wanted = await self.ended("llm-00")
        await self.end("llm-00")
        return wanted

    async def outcome(self, name: str) -> dict[str, Any]:
        """Return what is there of a checkpoint, without what differs from run to run."""
        items = self.rig.items
        checkpoint = await self.rig.get("dynamocheckpoints", name)
        snapshots, jobs, pods = [await items(each) for each in ("snapshots", "jobs", "pods")]
        restores = await items("snapshotrestores")
        contents = [
            item
            for item in await items(CONTENTS)
            if (item["spec"]["snapshotRef"]["namespace"], item["spec"]["snapshotRef"]["name"])
            == (self.rig.namespace, name)
        ]
        return {
            "checkpoint": [_shown(checkpoint), checkpoint.get("status", {}).get("phase")],
            "snapshots": [
                _shown(item) for item in snapshots if item["metadata"]["name"].startswith(name)
            ],
            "contents": [(_shown(item), _capture(item)) for item in contents],
            "generations": [
                path.name
                for item in contents
                for path in sorted(self.artifacts.glob(f"*/{item['metadata']['uid']}/*"))
            ],
            "jobs": len([job for job in jobs if job["metadata"]["name"].startswith(name)]),
            "workers": len([item for item in pods if _job_of(item).startswith(name)]),
            "restores": [
                (_shown(item), *map(item.get("status", {}).get, ("state", "attempt")))
                for item in restores
                if item["spec"]["source"] == name
            ],
            "restored": [
                _shown(item)["conditions"].get(RESTORED)
                for item in pods
                if item["metadata"]["name"] == f"{name}-again"
            ],
        }

    async def ended(self, name: str) -> dict[str, Any]:
        """Wait until it is captured and restored and nothing is owed; return the outcome."""

        async def settled() -> dict[str, Any]:
            try:
                found = await self.outcome(name)
            except StoreBusy:
                return {}
            is_released = [
                capture["orders"].get("release") == "released" and not capture["readers"]
                for _, capture in found["contents"]
            ]
            is_restored = found["restored"] == [("True", "RestoreSucceeded")]
            is_over = is_restored and found["checkpoint"][1] == "Ready"
            return found if is_over and is_released == [True] else {}

        return await polled(settled)

    async def reaches(self, name: str, wanted: dict[str, Any]) -> None:
        """Wait until the outcome of a checkpoint is as wanted, by whatever attempt.

        A worker that waits too long for the next order goes on, and its capture is tried again.
        """
        found: dict[str, Any] = {}
        try:
            async with asyncio.timeout(SECONDS):
                while _whatever_attempt(found) != _whatever_attempt(wanted):
                    await asyncio.sleep(0.2)
                    with contextlib.suppress(StoreBusy):
                        found = await self.outcome(name)
        except TimeoutError:
            # It shows where they differ.
            assert found == wanted

    async def end(self, name: str) -> None:
        """End the workers of a checkpoint, captured once and restored once.

        A worker whose release comes too late, because the operator is away, goes on by itself,
        with `snapshot-aborted`, also if the artifact is whole.
        """
        again = f"{name}-again"
        words = ("pods", f"--selector=job-name={name}")
        [found] = await asyncio.to_thread(self.nodes.list, *words)
        events = await events_of(self.nodes, found["metadata"]["name"])
        captures = _by_capture([event.split()[0] for event in events[1:]])
        complete, given_up = [("quiesced", f"snapshot-{how}") for how in ("complete", "aborted")]
        assert captures and {*captures} <= {complete, given_up}, events  # noqa: PT018 - one fact
        assert captures.count(complete) <= 1, events
        events = await events_of(self.nodes, again)
        assert events[-1:] == ["restored 42 1024"]
        names = (f"job/{name}", f"pod/{again}")
        await asyncio.to_thread(self.nodes.run, "delete", *names, "--wait=false")


def _by_capture(events: list[str]) -> list[tuple[str, ...]]:
    """Return the events of a worker by capture, each of which has two."""
    return [tuple(events[start : start + 2]) for start in range(0, len(events), 2)]


def _whatever_attempt(outcome: dict[str, Any]) -> dict[str, Any]:
    """Return an outcome without what another attempt changes."""
    if not outcome:
        return {}
    keys = ("capture", "readers", "orders")
    contents = [
        (shown, {key: capture[key] for key in keys}, capture["committed"] is not None)
        for shown, capture in outcome["contents"]
    ]
    return outcome | {"contents": contents, "generations": len(outcome["generations"])}


def _shown(item: dict[str, Any]) -> dict[str, Any]:
    rows = item.get("status", {}).get("conditions", [])
    return {
        "finalizers": item["metadata"].get("finalizers", []),
        "conditions": {row["type"]: (row["status"], row.get("reason")) for row in rows},
    }


def _job_of(item: dict[str, Any]) -> str:
    return str(item["metadata"].get("labels", {}).get("job-name", ""))


def _capture(content: dict[str, Any]) -> dict[str, Any]:
    status = content.get("status", {})
    keys = ("capture", "attempt", "retries", "generations", "failure", "readers")
    return {
        **{key: status.get(key) for key in keys},
        "committed": status.get("committed", {}).get("generation"),
        "orders": {item["verb"]: item.get("state") for item in status.get("orders", [])},
    }


class Crew:
    """Operators, which may be killed; none is left at the end."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.running: list[Program] = []

    async def start(self) -> Program:
        operator = await started(self.rig)
        self.running.append(operator)
        return operator

    async def gone(self, operator: Program) -> None:
        """Wait for the end of an operator."""
        async with asyncio.timeout(DEATH_S):
            await operator.process.wait()
        self.running.remove(operator)

    async def holder(self) -> str:
        """Return the identity of the active operator; nothing where there is none."""
        with contextlib.suppress(NotFound):
            lease = await self.rig.get("leases", rbac.NAME)
            return str(lease["spec"].get("holderIdentity") or "")
        return ""

    async def free_the_lease(self) -> None:
        """Let another operator be the active one at once."""
        await self.rig.delete("leases", rbac.NAME)

    async def end(self) -> None:
        self.rig.proxy.answered = lambda _: None
        for operator in [*self.running]:
            if operator.process.returncode is None:
                operator.process.kill()
            await self.gone(operator)


def after_writes(rig: Rig, acts: dict[int, Callable[[], None]], since: str = "") -> asyncio.Event:
    """Act when so many writes from now on have been answered; set what is returned at the first.

    `since` names the write that is counted as the first.
    """
    writes: list[str] = []
    reached = asyncio.Event()

    def answered(write: str) -> None:
        if not writes and since not in write:
            return
        writes.append(write)
        if act := acts.get(len(writes)):
            act()
            reached.set()

    rig.proxy.answered = answered
    return reached


async def first_of(*waits: Any) -> None:
    """Return when the first of some waits is over; one that fails fails this."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            await task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
