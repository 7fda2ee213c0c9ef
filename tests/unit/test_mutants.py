"""The runner of one-line bugs says so when a bug survives, and when it has shown nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.mutants import sample
from tests.mutants.__main__ import LIST, ROOT, main
from tests.mutants.trials import read_list

PRODUCT = """\
def limit(value):
    return min(value, 10)


def twice(value):
    return 2 * value
"""
TESTS = """\
from product import limit, twice


def test_a_small_value_stays():
    assert limit(3) == 3


def test_twice_is_more():
    assert twice(2) == 4
"""


@pytest.fixture(autouse=True)
def no_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each run of pytest load no plugin but that of its timeout: it starts in a fifth."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "pytest_timeout")


def bug(name: str, **changes: Any) -> dict[str, Any]:
    base = {
        "what": "twice is once",
        "file": "shared/src/product.py",
        "find": "return 2 * value",
        "replace": "return value",
        "caught_by": ["tests/test_product.py::test_twice_is_more"],
        "shows": "assert 2 == 4",
    }
    return {"name": name, **base, **changes}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small product with its tests."""
    root = tmp_path / "tree"
    for name, text in (("shared/src/product.py", PRODUCT), ("tests/test_product.py", TESTS)):
        path = root / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    (root / "pyproject.toml").write_text("")
    return root


def run(tree: Path, *bugs: dict[str, Any]) -> int:
    found = tree.parent / "bugs.toml"
    # A table of strings and of lists of them reads the same in TOML as in Python.
    lines = [f"{key} = {value!r}" for one in bugs for key, value in (("", ""), *one.items())]
    found.write_text("\n".join("[[mutant]]" if line == " = ''" else line for line in lines))
    return main(["--root", str(tree), "--list", str(found)])


SHOWS_NOTHING: dict[str, tuple[dict[str, Any], str]] = {
    "not-there": (
        {"find": "return 3 * value"},
        "shared/src/product.py has this text 0 times, not once: 'return 3 * value'",
    ),
    "many-places": (
        {"find": "value"},
        "shared/src/product.py has this text 4 times, not once: 'value'",
    ),
    "no-file": ({"file": "shared/src/gone.py"}, "shared/src/gone.py has this text 0 times"),
    "no-python": ({"replace": "return 2 *"}, "shared/src/product.py is no Python any more"),
    "not-collected": (
        {"find": "def twice(", "replace": "def thrice("},
        "its tests cannot be run: pytest ended with",
    ),
    "another-reason": ({"shows": "assert 5 == 4"}, "fails, but does not show 'assert 5 == 4'"),
}


@pytest.mark.waits
def test_bugs_that_survive_or_show_nothing_fail_the_run_and_the_others_are_still_tried(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bugs = [bug(name, **changes) for name, (changes, _) in SHOWS_NOTHING.items()]
    unseen = bug("unseen", find="min(value, 10)", replace="value")
    unseen["caught_by"] = ["tests/test_product.py::test_a_small_value_stays"]
    assert run(tree, *bugs, unseen, bug("once")) == 1
    shown = capsys.readouterr()
    rows = dict(line.split(maxsplit=1) for line in shown.out.splitlines())
    for name, (_, reason) in SHOWS_NOTHING.items():
        assert rows[name].startswith("broken")
        assert reason in rows[name]
    assert rows["unseen"].startswith("survived")
    assert "test_product: test_twice_is_more" in rows["once"]
    assert f"1 of {len(bugs) + 2} bugs were caught" in shown.out
    assert "unseen: twice is once" in shown.err


def test_tests_that_fail_without_any_bug_are_named(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / "shared/src/product.py").write_text(PRODUCT.replace("2 * value", "3 * value"))
    assert run(tree, bug("once", find="min(value, 10)", replace="value")) == 1
    assert "FAILED tests/test_product.py::test_twice_is_more" in capsys.readouterr().err


def _is_defined(test: str) -> bool:
    """Whether there is a file of tests, or a function or class in it: `tests/unit/test_x.py::y`."""
    file, *names = test.split("::")
    source = (ROOT / file).read_text("utf-8")
    return not names or any(f"{kind} {names[0]}(" in source for kind in ("def", "class"))


def test_all_that_is_listed_can_be_put_in_or_left_out_as_unnoticeable() -> None:
    mutants = read_list(LIST)
    assert len(mutants) >= 24
    files = {mutant.file: (ROOT / mutant.file).read_text("utf-8") for mutant in mutants}
    assert [m.name for m in mutants if files[m.file].count(m.find) != 1] == []
    named = {test.partition("[")[0] for mutant in mutants for test in mutant.caught_by}
    assert [test for test in sorted(named) if not _is_defined(test)] == []
    there = {(one.file, one.before, one.after) for one in sample.mutations(ROOT)}
    assert sample.read_equivalents(sample.EQUIVALENT) - there == set()


PURE = '''\
"""The ledger: 1 of many."""

LIMIT: Annotated[int, Meta(ge=1)] = 3


@dataclass(frozen=True)
class Row(Struct, forbid_unknown_fields=True):
    size: int = 0


def judge(value: Literal[1, 2], others: list[int]) -> bool:
    """Say 1."""
    if value < LIMIT and others:
        log.info("%d of %d", value, 1 + 1)
        return not others
    if value in others:
        raise ValueError(f"{value - 1} is no value")
    return all(a is b for a, b in zip(others, others[1:], strict=True))
'''
DRAWN = [
    "LIMIT: Annotated[int, Meta(ge=1)] = 3 -> LIMIT: Annotated[int, Meta(ge=1)] = 4",
    "size: int = 0 -> size: int = 1",
    "value < LIMIT and others -> (value < LIMIT or others)",
    "value < LIMIT -> (value <= LIMIT)",
    "return not others -> pass",
    "not others -> (others)",
    "value in others -> (value not in others)",
    "a is b -> (a is not b)",
    "1: -> 2:",
]


@pytest.fixture
def pure(tree: Path) -> Path:
    """A tree with one pure module, and a test of one line of it."""
    module = tree / "shared/src/snapshot_shared/ledger.py"
    module.parent.mkdir()
    module.write_text(PURE)
    for name in ("tests/unit/shared", "tests/golden"):
        (tree / name).mkdir(parents=True)
    return tree


def test_what_decides_is_changed_and_no_text_type_or_log(pure: Path) -> None:
    found = [f"{one.before} -> {one.after}" for one in sample.mutations(pure)]
    assert sorted(found) == sorted(DRAWN)


@pytest.mark.waits
def test_what_is_drawn_is_python_and_is_shown() -> None:
    drawn = sample.draw(ROOT, 100, 1)
    assert len(drawn) == 100
    for one in drawn:
        assert one.before != one.after
        compile(one.text, one.file, "exec")


@pytest.fixture
def tested(pure: Path) -> Path:
    """The same tree with all the tests that a mutation in it is tried out with."""
    sources = "from pathlib import Path\n"
    reads = "Path('shared/src/snapshot_shared/ledger.py').read_text()"
    seen = f"{sources}\n\ndef test_it():\n    assert 'value < LIMIT and' in {reads}\n"
    for name in ("unit/api", "unit/gms", "unit/agent", "unit/operator", "scenario"):
        (pure / "tests" / name).mkdir(parents=True)
    for path, text in (
        ("unit/shared/test_ledger.py", seen),
        ("unit/gms/test_gms.py", "def test_it():\n    pass\n"),
        ("scenario/test_scenarios.py", "def test_calm():\n    pass\n"),
    ):
        (pure / "tests" / path).write_text(text)
    return pure


@pytest.mark.waits
def test_what_survives_is_shown_with_its_place_and_too_many_fail_the_run(
    tested: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sample.main(["--root", str(tested), "--count", "2", "--seed", "1"]) == 1
    shown = capsys.readouterr()
    assert "of 2 survived" in shown.out
    assert "shared/src/snapshot_shared/ledger.py:" in shown.out


@pytest.mark.waits
def test_a_sample_whose_tests_fail_without_a_mutation_says_nothing(
    tested: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tested / "tests/unit/gms/test_gms.py").write_text("def test_it():\n    assert False\n")
    assert sample.main(["--root", str(tested), "--count", "1"]) == 1
    assert "FAILED tests/unit/gms/test_gms.py::test_it" in capsys.readouterr().out
