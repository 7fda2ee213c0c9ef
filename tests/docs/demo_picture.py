"""Takes the picture of `snapshotctl demo` for README.md: `python -m tests.docs.demo_picture`.

A real run is recorded in a terminal of 80 columns and written as SVG, in which the lines are text.
"""

from __future__ import annotations

import html
import io
import os
import pty
import re
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from snapshotctl.domain.demo_story import WIDTH

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "images" / "demo.svg"
COMMAND = "snapshotctl demo"
MAX_BYTES = 100 * 1024
FONTS = "ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace"
# All but colours, such as those that hide the cursor.
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-ln-z]")
_TEXT = re.compile(r'<text class="demo-[^"]*" x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]*)</text>')


def recorded(*options: str) -> str:
    """Run the demo in a terminal; return what it prints. Raise SystemExit where it fails."""
    out = io.BytesIO()

    def read(terminal: int) -> bytes:
        found = os.read(terminal, 4096)
        out.write(found)
        return found

    with tempfile.TemporaryDirectory() as home:
        # What is shown in place, and goes again, is left out.
        os.environ |= {
            "COLUMNS": str(WIDTH),
            "TERM": "xterm-256color",
            "TTY_INTERACTIVE": "0",
            "XDG_STATE_HOME": f"{home}/state",
            "XDG_CONFIG_HOME": f"{home}/config",
        }
        ended = pty.spawn([sys.executable, "-m", *COMMAND.split(), *options], read)
    if ended:
        raise SystemExit(f"{COMMAND} ended with {os.waitstatus_to_exitcode(ended)}")
    return _CONTROL.sub("", out.getvalue().decode()).replace("\r\n", "\n")


def svg_of(printed: str) -> str:
    """Return the picture of what was printed; it names no font of another site."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(Text(f"$ {COMMAND}", style="bold green"))
    console.print(Text.from_ansi(printed.strip()), soft_wrap=True)
    template = re.sub(r"@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    template = template.replace("Fira Code, monospace", FONTS)
    made = console.export_svg(title=COMMAND, code_format=template, unique_id="demo")
    return "\n".join(line.rstrip() for line in made.splitlines()) + "\n"


def lines_of(svg: str) -> list[str]:
    """Return the lines of text in a picture, from top to bottom."""
    rows: dict[float, list[tuple[float, str]]] = defaultdict(list)
    for x, y, text in _TEXT.findall(svg):
        rows[float(y)].append((float(x), html.unescape(text).replace("\xa0", " ")))
    return ["".join(text for _, text in sorted(rows[y])).rstrip() for y in sorted(rows)]


def main() -> int:
    """Take it; 1 when it is too big."""
    made = svg_of(recorded(*sys.argv[1:]))
    PICTURE.write_text(made)
    sys.stdout.write(f"{PICTURE}: {len(made)} bytes\n")
    return int(len(made) > MAX_BYTES)


if __name__ == "__main__":
    sys.exit(main())
