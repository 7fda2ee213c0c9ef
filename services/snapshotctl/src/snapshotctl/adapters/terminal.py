"""The terminal: colours and bars for people, plain lines for a program."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

import rich.table
import yaml
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
from rich.status import Status
from rich.text import Text

from snapshot_shared.errors import Failure
from snapshotctl.domain import formats
from snapshotctl.domain.formats import OutputFormat
from snapshotctl.views.progress import PartProgress
from snapshotctl.views.tables import Table

PLAIN_WIDTH = 120
GAP = "   "
"""Stands between two columns of a table."""
NARROW_GAP = "  "
"""The same where a table does not fit otherwise."""
_NAMES = ("NAMESPACE", "NAME", "NODE", "POD", "OBJECT")


class _Console(Console):
    """A console whose errors are those of its streams."""

    def on_broken_pipe(self) -> None:
        # rich would exit here, and what has to be ended first would not know why.
        raise  # noqa: PLE0704 - called where the BrokenPipeError is handled


class Terminal:
    """The `Screen` port over two text streams."""

    def __init__(self, output: OutputFormat, stdout: TextIO, stderr: TextIO) -> None:
        """Print results to `stdout` in the given form, everything else to `stderr`."""
        self._output = output
        self._out = stdout
        # Never wrapped: programs read lines, and a terminal wraps by itself.
        self._console = _Console(file=stdout, highlight=False, soft_wrap=True, markup=False)
        self._errors = _Console(file=stderr, highlight=False, soft_wrap=True, markup=False)

    @property
    def wants_table(self) -> bool:
        return self._output in ("table", "wide")

    @property
    def wants_wide(self) -> bool:
        return self._output == "wide"

    @property
    def has_colours(self) -> bool:
        return self._console.is_terminal and not self._console.no_color

    @property
    def width(self) -> int:
        return self._console.width if self._console.is_terminal else PLAIN_WIDTH

    def line(self, text: str = "", *, strong: bool = False) -> None:
        if self.wants_table:
            _print(self._console, text, "bold" if strong else "")
            # The reader of a pipe gets each line as it is printed.
            self._out.flush()

    def verbatim(self, text: str) -> None:
        if self.wants_table:
            self._out.write(f"{text}\n")
            self._out.flush()

    def table(self, table: Table, *, indent: str = "") -> None:
        widths = [
            max(len(row[index]) for row in (table.columns, *table.rows))
            for index in range(len(table.columns))
        ]
        needed = len(indent) + sum(widths) + len(GAP) * (len(widths) - 1)
        if self._console.is_terminal and not self.wants_wide and needed > self._console.width:
            self._fit(table, indent)
            return
        for number, row in enumerate((table.columns, *table.rows)):
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            self._console.print(
                Text(indent + GAP.join(cells).rstrip(), style="" if number else "bold")
            )
        self._out.flush()

    def _fit(self, table: Table, indent: str) -> None:
        """Print a table that is wider than the terminal: words are wrapped, long ones cut."""
        width = self._console.width
        shown = rich.table.Table(box=None, padding=(0, len(NARROW_GAP), 0, 0), pad_edge=False)
        columns = [list(cells) for cells in zip(table.columns, *table.rows, strict=True)]
        kept = _kept(columns, table.spare, width - len(indent))
        for name, *cells in kept:
            # What names a row is cut last: people copy it.
            is_name = name in _NAMES and max(map(len, cells), default=0) <= width // 3
            shown.add_column(name, no_wrap=is_name, overflow="ellipsis")
        for row in list(zip(*kept, strict=True))[1:]:
            shown.add_row(*map(Text, row))
        with self._console.capture() as captured:
            self._console.print(Padding(shown, (0, 0, 0, len(indent))), soft_wrap=False)
        text = captured.get()
        self._out.write(text)
        self._out.flush()
        if "…" in text or len(kept) < len(columns):
            self.note(f"cut to {width} columns; -o wide shows all of it")

    def value(self, value: Any) -> None:
        if self._output == "yaml":
            text = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=100)
        else:
            text = json.dumps(value, indent=2) + "\n"
        self._out.write(text)
        self._out.flush()

    def entry(self, value: Any) -> None:
        if self._output == "yaml":
            text = yaml.safe_dump([value], sort_keys=False, allow_unicode=True, width=100)
        else:
            text = json.dumps(value) + "\n"
        self._out.write(text)
        self._out.flush()

    def note(self, text: str) -> None:
        _print(self._errors, text, "dim" if self._errors.is_terminal else "")

    def failure(self, failure: Failure) -> None:
        _print(self._errors, f"error: {formats.plain(failure.message)}", "bold red")
        for key in ("problems", "lines"):
            found = failure.values.get(key)
            for item in found if isinstance(found, list) else []:
                _print(self._errors, f"  {formats.plain(str(item))}")
        if failure.next_step:
            _print(self._errors, f"next: {formats.plain(failure.next_step)}")

    @contextlib.contextmanager
    def parts(self) -> Iterator[PlainParts | BarParts]:
        if not self._console.is_terminal:
            yield PlainParts(self)
            return
        with Progress(
            TextColumn("  {task.description:<8}"),
            BarColumn(bar_width=40),
            DownloadColumn(binary_units=True),
            TextColumn("{task.fields[note]}"),
            console=self._console,
        ) as bars:
            yield BarParts(bars)

    @contextlib.contextmanager
    def activity(self) -> Iterator[PlainActivity | StatusActivity]:
        if not (self._console.is_terminal and self.wants_table):
            yield PlainActivity(self)
            return
        with self._console.status("") as status:
            yield StatusActivity(status)


def _kept(columns: list[list[str]], spare: Sequence[str], width: int) -> list[list[str]]:
    """Return the columns that are shown in a width: all, or those that are not left out for it."""
    kept = columns
    for name in spare:
        cells = sum(max(map(len, column)) for column in kept)
        if cells + len(NARROW_GAP) * (len(kept) - 1) <= width:
            break
        kept = [column for column in kept if column[0] != name]
    return kept


def _print(console: Console, text: str, style: str = "") -> None:
    """Print a line; on a terminal in several, where it is too wide for one."""
    lines = formats.wrapped(text, console.width) if console.is_terminal else [text]
    for line in lines:
        console.print(Text(line, style=style))


class PlainParts:
    """One line a movement."""

    def __init__(self, terminal: Terminal) -> None:
        """Print to `terminal`."""
        self._terminal = terminal
        self._shown: dict[str, int] = {}

    def show(self, part: PartProgress) -> None:
        # One line for every tenth of a part is enough for a log.
        shown = self._shown.get(part.part, -1)
        is_end = part.done >= part.total and part.done > shown
        if shown < 0 or is_end or part.done - shown >= max(1, part.total // 10):
            self._shown[part.part] = part.done
            self._terminal.line(f"  {part.line()}")


class BarParts:
    """One bar a part."""

    def __init__(self, bars: Progress) -> None:
        """Draw among `bars`."""
        self._bars = bars
        self._tasks: dict[str, Any] = {}

    def show(self, part: PartProgress) -> None:
        if part.part not in self._tasks:
            self._tasks[part.part] = self._bars.add_task(part.part, total=part.total, note="")
        self._bars.update(
            self._tasks[part.part], completed=part.done, total=part.total, note=part.note
        )


class PlainActivity:
    """A line now and then."""

    interval_s = 5.0

    def __init__(self, terminal: Terminal) -> None:
        """Print to `terminal`."""
        self._terminal = terminal

    def show(self, text: str) -> None:
        self._terminal.line(text)


class StatusActivity:
    """One line in place, which is gone afterwards."""

    interval_s = 1.0

    def __init__(self, status: Status) -> None:
        """Show it as this status."""
        self._status = status

    def show(self, text: str) -> None:
        self._status.update(Text(text.strip()))
