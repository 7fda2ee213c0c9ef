"""The terminal: plain lines where a program reads."""

import io
import json
import re

import pytest
import yaml

from snapshot_shared.errors import Failure, InvalidManifest
from snapshotctl.adapters.terminal import Terminal
from snapshotctl.domain.formats import OutputFormat
from snapshotctl.views.progress import PartProgress
from snapshotctl.views.tables import Table


class _Tty(io.StringIO):
    def isatty(self) -> bool:
        return True


def _terminal(output: OutputFormat = "table") -> tuple[Terminal, io.StringIO, io.StringIO]:
    out, err = io.StringIO(), io.StringIO()
    return Terminal(output, out, err), out, err


def test_a_table_is_aligned_and_plain_when_no_terminal_reads_it() -> None:
    terminal, out, _ = _terminal()
    terminal.table(Table(("NAME", "AGE"), [("a", "1s"), ("long-name", "2s")]))
    assert out.getvalue() == "NAME        AGE\na           1s\nlong-name   2s\n"


def test_a_long_line_is_not_broken() -> None:
    terminal, out, _ = _terminal()
    terminal.line("x" * 500)
    assert out.getvalue() == "x" * 500 + "\n"


def test_what_looks_like_markup_is_printed_as_it_is() -> None:
    terminal, out, _ = _terminal()
    terminal.line("[red]x[/red] :smile:")
    assert out.getvalue() == "[red]x[/red] :smile:\n"


@pytest.mark.parametrize(("output", "read"), [("json", json.loads), ("yaml", yaml.safe_load)])
def test_a_value_can_be_read_back(output: OutputFormat, read: object) -> None:
    terminal, out, _ = _terminal(output)
    value = [{"name": "é\u2028", "n": [1, None, True], "on": "yes"}]
    terminal.value(value)
    assert read(out.getvalue()) == value  # type: ignore[operator]


def test_lines_for_people_stay_out_of_values() -> None:
    terminal, out, _ = _terminal("json")
    terminal.line("hello")
    terminal.value([])
    assert json.loads(out.getvalue()) == []


def test_a_failure_goes_to_standard_error_with_every_problem_and_what_to_do() -> None:
    terminal, out, err = _terminal("json")
    problems = ["spec.a: is required", "spec.b: \x1b[31mexpected int"]
    failure = InvalidManifest("2 problems", next_step="correct them", problems=problems)
    terminal.failure(failure.to_failure())
    assert out.getvalue() == ""
    assert err.getvalue().splitlines() == [
        "error: 2 problems",
        "  spec.a: is required",
        "  spec.b:  [31mexpected int",
        "next: correct them",
    ]


def test_parts_are_one_line_a_movement_when_no_terminal_reads() -> None:
    terminal, out, _ = _terminal()
    with terminal.parts() as parts:
        parts.show(PartProgress("gpu-0", 0, 100, 0.0, 0.0))
        parts.show(PartProgress("gpu-0", 90, 100, 0.0, 1.0))
        parts.show(PartProgress("gpu-0", 100, 100, 0.0, 1.0, is_final=True))
        parts.show(PartProgress("gpu-0", 100, 100, 0.0, 1.0, is_final=True))
    assert out.getvalue().splitlines() == [
        "  gpu-0: 0 of 100 bytes (0 B of 100 B, -)",
        "  gpu-0: 90 of 100 bytes (90 B of 100 B, 90 B/s)",
        "  gpu-0: 100 of 100 bytes (100 B of 100 B, 100 B/s, in the manifest)",
    ]


def test_parts_are_bars_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = _Tty()
    with Terminal("table", out, io.StringIO()).parts() as parts:
        parts.show(PartProgress("gpu-0", 1024, 2048, 0.0, 1.0))
    assert "gpu-0" in out.getvalue()
    assert "━" in out.getvalue()


COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-9]")


@pytest.mark.parametrize(
    ("settings", "is_coloured"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"NO_COLOR": ""}, True), ({"TERM": "dumb"}, False)],
)
def test_there_is_colour_on_a_terminal_unless_it_is_not_wanted(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], is_coloured: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in ({"TERM": "xterm-256color"} | settings).items():
        monkeypatch.setenv(name, value)
    err = _Tty()
    Terminal("table", io.StringIO(), err).failure(Failure(reason="X", message="wrong"))
    assert "error: wrong" in err.getvalue()
    assert bool(COLOUR.search(err.getvalue())) == is_coloured


def test_a_pipe_gets_no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal, _, err = _terminal()
    terminal.failure(Failure(reason="X", message="wrong"))
    assert err.getvalue() == "error: wrong\n"


def test_a_wide_result_is_a_table() -> None:
    terminal, out, _ = _terminal("wide")
    assert (terminal.wants_table, terminal.wants_wide) == (True, True)
    terminal.line("x")
    assert out.getvalue() == "x\n"
