"""Waiting for an object to become what is wanted: follow first, then read, then wait for news."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

from snapshot_shared.errors import BusUnavailable, DeadlineExceeded
from snapshot_shared.objects import AnyObject
from snapshotctl.domain.targets import Target
from snapshotctl.ports import Operator

T = TypeVar("T")
Decide = Callable[[AnyObject | None], T | None]


async def until(
    operator: Operator, target: Target, decide: Decide[T], *, within_s: float, what: str
) -> T:
    """Return what `decide` says of the object once it says something. DeadlineExceeded.

    It sees None when the object does not exist. A server that does not answer is waited for.
    """
    try:
        async with asyncio.timeout(within_s), operator.watching(target) as changes:
            while True:
                with contextlib.suppress(BusUnavailable):
                    answer = decide(await operator.get(target))
                    if answer is not None:
                        return answer
                await changes.wait()
    except TimeoutError:
        raise DeadlineExceeded(
            f"{what}: not within {within_s:g} s",
            next_step=f"see where it is: snapshotctl explain {target.typed}",
            step=what,
            budget_s=within_s,
        ) from None
