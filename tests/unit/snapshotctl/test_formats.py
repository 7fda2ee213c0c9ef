"""Numbers as people write and read them."""

import pytest

from snapshotctl.domain import formats
from snapshotctl.domain.exits import WrongArguments
from tests.unit.tables import each


@each(
    ("text", "seconds"),
    [("90s", 90), ("5m", 300), ("1h30m", 5400), ("250ms", 0.25), ("1.5s", 1.5), ("7d", 604_800)],
)
def test_a_duration_is_read_in_seconds(text: str, seconds: float) -> None:
    assert formats.parse_duration(text) == pytest.approx(seconds)


@each("text", ["", "5", "m", "5x", "5m ", "-5m", "0s", "8d", "1h2", "\u0665m"])
def test_what_is_no_duration_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(WrongArguments) as refused:
        formats.parse_duration(text)
    assert text in refused.value.message


@each(
    ("text", "count"),
    [
        ("1024", 1024),
        ("4GiB", 4 * 1024**3),
        ("4Gi", 4 * 1024**3),
        ("512 MiB", 512 * 1024**2),
        ("1.5kB", 1500),
        ("2G", 2 * 10**9),
    ],
)
def test_a_size_is_read_in_bytes(text: str, count: int) -> None:
    assert formats.parse_size(text) == count


@each("text", ["", "MiB", "-1", "1XB", "1i", "1e9", "4GiBs"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(WrongArguments):
        formats.parse_size(text)


@each(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (268_435_456, "256 MiB"),
        (5 * 1024**5, "5120 TiB"),
    ],
)
def test_a_size_is_written_in_binary_units(count: int, text: str) -> None:
    assert formats.size(count) == text


@pytest.mark.parametrize(
    ("count", "seconds", "text"),
    [(2_500_000_000, 1.0, "2.5 GB/s"), (500, 1.0, "500 B/s"), (10, 0.0, "-"), (10, -1.0, "-")],
)
def test_a_rate_is_written_in_decimal_units(count: int, seconds: float, text: str) -> None:
    assert formats.rate(count, seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0004, "0.4 ms"), (0.012, "12 ms"), (1.239, "1.24 s"), (125.4, "2m 05s")],
)
def test_a_measured_time_is_written_with_its_unit(seconds: float, text: str) -> None:
    assert formats.span_time(seconds) == text


@each(
    ("seconds", "text"),
    [(-3, "0s"), (59, "59s"), (192, "3m12s"), (3600, "60m"), (7200, "2h"), (400_000, "4d")],
)
def test_an_age_has_two_units_at_most(seconds: float, text: str) -> None:
    assert formats.age(seconds) == text


def test_the_age_of_a_time_counts_from_now() -> None:
    assert formats.age_of("1970-01-01T00:01:00Z", 100) == "40s"


@pytest.mark.parametrize("text", ["", "yesterday", "1970-01-01T00:01:00"])
def test_what_is_no_time_with_a_zone_has_no_age(text: str) -> None:
    assert formats.age_of(text, 100) == "-"


def test_text_of_others_stays_on_its_line_and_sends_nothing_to_the_terminal() -> None:
    assert formats.plain("a\x1b[31m b\r\n\tc\x9b") == "a [31m b c"


@each(
    ("text", "lines"),
    [
        ("short", ["short"]),
        ("", [""]),
        ("x" * 30, ["x" * 30]),
        ("one two three four five six", ["one two three four", "  five six"]),
        ("  one two three four five six", ["  one two three four", "    five six"]),
        (
            "do this: `snapshotctl get pods -A -o wide`, then look",
            ["do this:", "  `snapshotctl get pods -A -o wide`,", "  then look"],
        ),
        (
            "next: snapshotctl down --cluster a && snapshotctl up",
            ["next:", "  snapshotctl down --cluster a && snapshotctl up"],
        ),
        ("a  b   aligned as it was before", ["a  b   aligned as it", "  was before"]),
    ],
)
def test_a_line_is_broken_between_words_and_never_in_a_command(text: str, lines: list[str]) -> None:
    assert formats.wrapped(text, 20) == lines
