"""Whose the generations are that lie below an artifact root.

The agent lists its root first and the store is read after that. A content is in the store before
anything of it is on a disk, and its uid never comes again; so what is unknown now stays unknown,
unless it is imported: an artifact that is named while an agent moves it is missing then.
Only age speaks for what a store does not know: the store may be another one than that of the
artifacts, or have been lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_shared.api import FoundGeneration, InventoryReply, Verdict
from snapshot_shared.transitions import CAPTURE


class Policy(msgspec.Struct, frozen=True):
    """What is moved into quarantine, and for how many seconds it must not have changed before.

    `incomplete` generations have no root manifest: no reader will ever want them. `all` is sealed
    artifacts, too, among them those that `deletionPolicy: Retain` left, and what is no generation.
    """

    mode: Literal["off", "incomplete", "all"] = "incomplete"
    after_s: float = 7 * 86400.0


def reply(
    found: Sequence[FoundGeneration], contents: Iterable[SnapshotContent], policy: Policy
) -> InventoryReply:
    """Judge what an agent has listed, by the contents that were in the store after that."""
    by_uid: dict[str, list[SnapshotContent]] = {}
    for content in contents:
        by_uid.setdefault(content.artifact_uid, []).append(content)
    return InventoryReply(
        verdicts=[_verdict(item, by_uid.get(item.content_uid, ()), policy) for item in found],
        others="quarantine" if policy.mode == "all" else "tell",
        after_s=policy.after_s,
    )


def _verdict(item: FoundGeneration, contents: Iterable[SnapshotContent], policy: Policy) -> Verdict:
    is_known = any(_may_hold(content, item) for content in contents)
    if is_known or item.age_s < policy.after_s:
        return "keep"
    is_wanted = policy.mode == "all" or (policy.mode == "incomplete" and not item.sealed)
    return "quarantine" if is_wanted else "tell"


def _may_hold(content: SnapshotContent, item: FoundGeneration) -> bool:
    """Whether a generation is that of an attempt; there may be more until the capture ends."""
    if item.namespace != content.spec.source.namespace:
        return False
    if content.spec.source.artifact is not None:
        return item.generation == content.spec.source.artifact.generation
    return (
        content.status.capture not in CAPTURE.terminal()
        or item.generation <= content.status.attempt
    )
