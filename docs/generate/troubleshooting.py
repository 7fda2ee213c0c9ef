"""docs/troubleshooting.md: every reason that the product can show, and what to do."""

from __future__ import annotations

from snapshot_shared.reasons import SECTIONS

PAGE = "troubleshooting.md"

_HEAD = """\
# Troubleshooting

*Made from `shared/src/snapshot_shared/reasons.py` by `make docs`.*

Every error, condition and failed report has a **reason**: one word such as `DeviceTooSmall`. Ask
for the story of an object, or for what a reason means:

<!-- run: no, because demo-llm stands for an object of yours -->
```sh
snapshotctl explain demo-llm          # what was asked, what happened, where it is stuck, what to do
snapshotctl explain DeviceTooSmall    # what stands below, without a server
```

`snapshotctl events NAME` lists all that happened to an object, `snapshotctl describe KIND NAME` all
that is known of it, `snapshotctl trace NAME` where the time went.
"""


def page() -> str:
    """Write the page."""
    lines = [_HEAD]
    for title, reasons in SECTIONS.items():
        lines.append(f"## {title}\n")
        for name, reason in sorted(reasons.items()):
            lines.append(f"### {name}")
            lines.append(f"{reason.meaning}\n")
            lines.append(f"- **Why**: {reason.cause}")
            lines.append(f"- **What to do**: {reason.fix}\n")
    return "\n".join(lines)
