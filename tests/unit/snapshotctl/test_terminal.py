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


Shown = tuple[Terminal, io.StringIO, io.StringIO]
"""A terminal, and its two streams."""


def _terminal(output: OutputFormat = "table", stream: type[io.StringIO] = io.StringIO) -> Shown:
    out, err = stream(), stream()
    return Terminal(output, out, err), out, err


def test_a_table_is_aligned_and_plain_when_no_terminal_reads_it_and_wide_is_one() -> None:
    terminal, out, _ = _terminal()
    terminal.table(Table(("NAME", "AGE"), [("a", "1s"), ("long-name", "2s")]))
    assert out.getvalue() == "NAME        AGE\na           1s\nlong-name   2s\n"
    terminal, out, _ = _terminal("wide")
    assert (terminal.wants_table, terminal.wants_wide) == (True, True)
    terminal.line("x")
    assert out.getvalue() == "x\n"


def test_a_line_is_printed_as_it_is_and_on_a_terminal_what_a_worker_wrote() -> None:
    for text in ("x" * 500, "[red]x[/red] :smile:"):
        terminal, out, _ = _terminal()
        terminal.line(text)
        assert out.getvalue() == f"{text}\n"
    terminal, shown, _ = _terminal(stream=_Tty)
    text = "  two  words\t" * 50
    terminal.verbatim(text)
    assert shown.getvalue() == f"{text}\n"


@pytest.mark.parametrize(("output", "read"), [("json", json.loads), ("yaml", yaml.safe_load)])
def test_a_value_can_be_read_back(output: OutputFormat, read: object) -> None:
    terminal, out, _ = _terminal(output)
    value = [{"name": "é\u2028", "n": [1, None, True], "on": "yes"}]
    terminal.value(value)
    assert read(out.getvalue()) == value  # type: ignore[operator]


def test_lines_for_people_and_what_was_under_way_stay_out_of_values() -> None:
    terminal, out, _ = _terminal("json")
    terminal.line("hello")
    with terminal.activity() as activity:
        activity.show("capturing")
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
        "  spec.b: expected int",
        "next: correct them",
    ]


def test_parts_are_one_line_a_movement_when_no_terminal_reads() -> None:
    terminal, out, _ = _terminal()
    with terminal.parts() as parts:
        parts.show(PartProgress("gpu-0", 0, 100, 0.0, 0.0))
        parts.show(PartProgress("gpu-0", 90, 100, 0.0, 1.0))
        for _ in range(2):
            parts.show(PartProgress("gpu-0", 100, 100, 0.0, 1.0, is_final=True))
    assert out.getvalue().splitlines() == [
        "  gpu-0: 0 B of 100 B",
        "  gpu-0: 90 B of 100 B, 90 B/s",
        "  gpu-0: 100 B of 100 B, 100 B/s, in the manifest",
    ]


def test_parts_are_bars_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal, out, _ = _terminal(stream=_Tty)
    with terminal.parts() as parts:
        parts.show(PartProgress("gpu-0", 1024, 2048, 0.0, 1.0))
    assert "gpu-0" in out.getvalue()
    assert "━" in out.getvalue()


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> Shown:
    """A terminal with 40 columns."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")
    return _terminal(stream=_Tty)


WIDE = Table(
    ("NAME", "STATUS", "WHY", "DIGEST"),
    [("worker-1", "Ready", "nothing is wrong with it at all", "sha256:" + "a" * 64)],
)


def test_a_table_fits_a_terminal_and_no_word_is_broken(narrow: Shown) -> None:
    terminal, out, err = narrow
    terminal.table(WIDE, indent="  ")
    lines = _plain(out).splitlines()
    assert max(map(len, lines)) <= 40
    words = {word for line in lines for word in line.split() if "…" not in word}
    assert {"worker-1", "Ready", "nothing", "wrong"} <= words
    assert words <= {*WIDE.columns, "worker-1", "Ready", *WIDE.rows[0][2].split()}
    assert any(
        word.startswith("sha256:") and word.endswith("…") for word in " ".join(lines).split()
    )
    assert "-o wide shows all" in _plain(err)


@pytest.mark.usefixtures("narrow")
def test_all_of_a_table_is_shown_where_that_is_asked_for_and_where_a_program_reads() -> None:
    for terminal, out, err in (_terminal("wide", _Tty), _terminal()):
        terminal.table(WIDE)
        head, line = _plain(out).splitlines()
        assert head.split() == list(WIDE.columns)
        assert line.endswith("   nothing is wrong with it at all   sha256:" + "a" * 64)
        assert err.getvalue() == ""


def test_columns_that_can_be_spared_are_left_out_before_anything_is_cut(narrow: Shown) -> None:
    terminal, out, err = narrow
    rows = [("a" * 12, "b" * 12, "c" * 12, "d")]
    terminal.table(Table(("NAME", "ONE", "TWO", "ONE"), rows, ("TWO", "NAME")))
    assert [line.split() for line in _plain(out).splitlines()] == [
        ["NAME", "ONE", "ONE"],
        ["a" * 12, "b" * 12, "d"],
    ]
    assert "-o wide" in _plain(err)


@pytest.mark.usefixtures("narrow")
def test_a_table_that_fits_is_not_called_cut_also_with_less_between_its_columns() -> None:
    for row, shown in (
        (("a", "1s"), "NAME   AGE\na      1s\n"),
        (("a" * 18, "b" * 20), f"NAME{' ' * 16}AGE\n{'a' * 18}  {'b' * 20}\n"),
    ):
        terminal, out, err = _terminal(stream=_Tty)
        terminal.table(Table(("NAME", "AGE"), [row]))
        assert [line.rstrip() for line in _plain(out).splitlines()] == shown.splitlines()
        assert err.getvalue() == ""


def test_a_long_line_is_broken_between_words_on_a_terminal(narrow: Shown) -> None:
    terminal, out, err = narrow
    terminal.line("  a line that is too long for the columns of this terminal")
    terminal.note("remarks are broken between their words as well")
    assert _plain(out).splitlines() == [
        "  a line that is too long for the",
        "    columns of this terminal",
    ]
    assert _plain(err).splitlines() == ["remarks are broken between their words", "  as well"]


def _plain(stream: io.StringIO) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())


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
    wrong = Failure(reason="X", message="wrong")
    terminal, _, err = _terminal(stream=_Tty)
    terminal.failure(wrong)
    assert "error: wrong" in err.getvalue()
    assert bool(COLOUR.search(err.getvalue())) == is_coloured
    terminal, _, piped = _terminal()
    terminal.failure(wrong)
    assert piped.getvalue() == "error: wrong\n"


def test_what_is_under_way_is_a_line_now_and_then_when_no_terminal_reads() -> None:
    terminal, out, _ = _terminal()
    with terminal.activity() as activity:
        activity.show("    capturing: 5 s so far")
        activity.show("    capturing: 10 s so far")
    assert out.getvalue() == "    capturing: 5 s so far\n    capturing: 10 s so far\n"
    assert activity.interval_s >= 5


def test_what_is_under_way_is_shown_in_place_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    terminal, out, _ = _terminal(stream=_Tty)
    with terminal.activity() as activity:
        activity.show("    capturing: 1 s so far")
    terminal.line("captured")
    *shown, last = out.getvalue().split("\x1b[2K")
    assert "capturing: 1 s so far" in "".join(shown)
    assert last == "captured\n"


class _WithoutReader(io.StringIO):
    def write(self, _text: str) -> int:
        raise BrokenPipeError


def test_a_reader_that_has_ended_is_reported_and_ends_no_program() -> None:
    terminal, *_ = _terminal(stream=_WithoutReader)
    with pytest.raises(BrokenPipeError):
        terminal.line("x")
