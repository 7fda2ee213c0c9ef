"""docs/compatibility.md: where an artifact can be restored, from the table that refuses by it."""

from __future__ import annotations

from snapshot_shared.compatibility import FACTS, Fact

PAGE = "compatibility.md"

_HEAD = """\
# Where an artifact can be restored

*Made from `shared/src/snapshot_shared/compatibility.py` by `make docs`.*

A capture records facts of its source in the root manifest. A restore compares them with those of
the node before anything is touched, and is refused as `Incompatible`, with both values and what to
do. What one side does not know is not compared, as with artifacts of earlier versions.

<!-- run: no, because demo-llm and node-2 stand for an artifact and a node of yours -->
```sh
snapshotctl artifacts show demo-llm                  # its facts
snapshotctl artifacts diff demo-llm --node node-2    # whether it would be restored there
snapshotctl artifacts diff demo-llm demo-llm-2       # how two of them differ
```

| fact | of a node it has to be | for artifacts of | comes from |
|---|---|---|---|
"""
_RULES = {
    "equal": "equal",
    "not older": "not older (the first two numbers count)",
    "at least": "as many or more",
    "all of": "all of the source's, and any more",
    "shown": "anything: it is shown, and refuses nothing",
}


def page() -> str:
    """Write the page."""
    rows = [
        f"| `{fact.name}`: {fact.title} | {_RULES[fact.rule]} | {_drivers(fact)} | {fact.origin} |"
        for fact in FACTS
    ]
    why = [f"- **{fact.title}**: {fact.why}" for fact in FACTS]
    rest = (
        "The helper of a node looks at more before it restores a process by CRIU: whether its CRIU "
        "is fit for\nits kernel at all, mounts and the limit of memory of the pod. A process keeps "
        "its user, its group and\nits seccomp filter, so that it is refused where the container "
        "allows it less: other users or groups\n(unless it may set them), fewer capabilities, a "
        "seccomp filter or `NoNewPrivs` that the source lacked. Which\ncalls two filters allow is "
        "not compared. A container with a user namespace of its own (`hostUsers: false`) is\n"
        "neither captured nor restored by CRIU.\n"
        "\nArrays of bfloat16 and the float8 types that this version of `snapback_client` writes "
        "cannot be\nopened by the version before it, which refuses them as `InvalidMessage`.\n"
    )
    return "\n".join([_HEAD + "\n".join(rows), "", rest, "## Why", "", *why, ""])


def _drivers(fact: Fact) -> str:
    return ", ".join(f"`{name}`" for name in fact.drivers) or "all drivers"
