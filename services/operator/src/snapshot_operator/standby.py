"""Prints how a Pod has to be changed to wait for its restore: a Pod in, a JSON Patch out.

It is what the operator's webhook answers, for clusters that have none. Both are JSON.
"""

from __future__ import annotations

import os
import sys

import msgspec

from snapshot_operator.kube.restoring import (
    Images,
    placeholder_problems,
    restore_request,
    standby_patch,
)
from snapshot_operator.kube.shaping import AGENT_IMAGE, GMS_IMAGE
from snapshot_shared.validation import restore_problems


def main() -> int:
    """Read a Pod from standard input; the status is 1, with the reasons, where it cannot wait."""
    pod = msgspec.json.decode(sys.stdin.buffer.read())
    if wrong := [*restore_problems(pod), *placeholder_problems(pod)]:
        sys.stderr.write("; ".join(map(str, wrong)) + "\n")
        return 1
    images = Images(
        os.environ.get("SNAPBACK_GMS_IMAGE", GMS_IMAGE),
        os.environ.get("SNAPBACK_AGENT_IMAGE", AGENT_IMAGE),
    )
    patch = standby_patch(pod, images) if restore_request(pod).source else []
    sys.stdout.buffer.write(msgspec.json.encode(patch))
    return 0


if __name__ == "__main__":
    sys.exit(main())
