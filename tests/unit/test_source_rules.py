"""Rules about the sources that neither the linter nor the type checker can say."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE_FOLDERS = (ROOT / "shared" / "src", *sorted(ROOT.glob("services/*/src")))
SOURCES = sorted(file for folder in SOURCE_FOLDERS for file in folder.rglob("*.py"))
EXAMPLES = sorted(ROOT.glob("deploy/examples/*.py"))

# Files that may wait for time alone to pass, by their path in the repository.
ALLOWED_SLEEPS: frozenset[str] = frozenset()
MAX_ALLOWED_SLEEPS = 2

HOME_PATH = re.compile(r"/(?:root|(?:home|Users)/[\w.-]+)/")


def _name(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_bytes(), str(file))


def _imported_names(tree: ast.Module) -> set[str]:
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))
    aliases = (alias for node in imports for alias in node.names)
    return {alias.asname or alias.name.partition(".")[0] for alias in aliases}


def _root_name(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _is_sleep(node: ast.AST, imported: set[str]) -> bool:
    """Whether the node waits for time: a sleep that is imported, or called with a duration.

    `client.sleep()` has no duration: it puts the client to sleep and waits for nothing.
    """
    match node:
        case ast.ImportFrom(names=names):
            return any(alias.name == "sleep" for alias in names)
        case ast.Call(func=ast.Name(id="sleep")):
            return True
        case ast.Call(func=ast.Attribute(attr="sleep"), args=args, keywords=keywords):
            return bool(args or keywords)
        case ast.Attribute(attr="sleep", value=value):
            return _root_name(value) in imported
    return False


def _sleeps(tree: ast.Module) -> list[int]:
    imported = _imported_names(tree)
    return sorted({node.lineno for node in ast.walk(tree) if _is_sleep(node, imported)})


def _foreign_imports(tree: ast.Module) -> Iterator[str]:
    """Name what an example imports beyond the standard library, numpy and gms.client."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                modules = [alias.name for alias in names]
            case ast.ImportFrom(level=level) if level:
                modules = ["." * level + (node.module or "")]
            case ast.ImportFrom(module="gms", names=names):
                modules = [f"gms.{alias.name}" for alias in names]
            case ast.ImportFrom(module=str(module)):
                modules = [module]
            case _:
                continue
        yield from (module for module in modules if not _allowed_in_example(module))


def _allowed_in_example(module: str) -> bool:
    top = module.partition(".")[0]
    return (
        top in sys.stdlib_module_names
        or top == "numpy"
        or module == "gms.client"
        or module.startswith("gms.client.")
    )


def test_the_sources_of_all_five_packages_are_looked_at() -> None:
    packages = {
        file.relative_to(folder).parts[0]
        for folder in SOURCE_FOLDERS
        for file in SOURCES
        if file.is_relative_to(folder)
    }
    assert packages == {
        "gms",
        "snapshot_agent",
        "snapshot_operator",
        "snapshot_shared",
        "snapshotctl",
    }


@pytest.mark.parametrize(
    "source",
    [
        "import time\ntime.sleep(1)",
        "import asyncio\nasync def f():\n    await asyncio.sleep(0)",
        "from time import sleep as pause\npause(1)",
        "import time as clock\nwait = clock.sleep",
        "from asyncio import tasks\ntasks.sleep(1)",
        "def f(clock):\n    clock.sleep(2)",
        "def f(clock):\n    clock.sleep(seconds=2)",
        "import functools, time\nfunctools.partial(time.sleep, 1)",
    ],
)
def test_a_wait_for_time_is_recognised_in_every_disguise(source: str) -> None:
    assert _sleeps(ast.parse(source))


def test_putting_a_client_to_sleep_is_not_a_wait() -> None:
    assert not _sleeps(ast.parse("import gms\ndef f(client):\n    client.sleep()"))


def test_no_source_waits_by_sleeping() -> None:
    offenders = [
        f"{_name(file)}:{line}"
        for file in SOURCES
        if _name(file) not in ALLOWED_SLEEPS
        for line in _sleeps(_parse(file))
    ]
    assert offenders == []


def test_the_list_of_allowed_sleeps_is_short_and_holds_only_files_that_sleep() -> None:
    assert len(ALLOWED_SLEEPS) <= MAX_ALLOWED_SLEEPS
    assert [name for name in ALLOWED_SLEEPS if not _sleeps(_parse(ROOT / name))] == []


def test_no_domain_module_is_asynchronous() -> None:
    offenders = [
        f"{_name(file)}:{node.lineno} {node.name}"
        for file in SOURCES
        if "domain" in file.relative_to(ROOT).with_suffix("").parts
        for node in ast.walk(_parse(file))
        if isinstance(node, ast.AsyncFunctionDef)
    ]
    assert offenders == []


@pytest.mark.parametrize("example", EXAMPLES, ids=_name)
def test_an_example_needs_only_the_standard_library_numpy_and_the_client(example: Path) -> None:
    assert list(_foreign_imports(_parse(example))) == []


@pytest.mark.parametrize(
    ("source", "foreign"),
    [
        ("import os, numpy as np\nimport gms.client", []),
        ("from gms.client import Client\nfrom gms import client", []),
        ("from gms import domain", ["gms.domain"]),
        ("import gms.clients", ["gms.clients"]),
        ("import gms", ["gms"]),
        ("def f():\n    import msgspec", ["msgspec"]),
        ("from . import sibling", ["."]),
        ("from snapshot_shared.ids import NodeName", ["snapshot_shared.ids"]),
    ],
)
def test_a_foreign_import_of_an_example_is_named(source: str, foreign: list[str]) -> None:
    assert list(_foreign_imports(ast.parse(source))) == foreign


def test_no_file_names_a_path_in_somebodys_home() -> None:
    files = [
        *SOURCES,
        *sorted(ROOT.glob("tests/**/*.py")),
        *sorted(ROOT.glob("deploy/**/*.py")),
        *sorted(ROOT.glob("s*/**/pyproject.toml")),
        ROOT / "Makefile",
        ROOT / "requirements.in",
        ROOT / "requirements.lock",
        ROOT / ".ci" / "run",
    ]
    offenders = [
        f"{_name(file)}:{number}"
        for file in files
        for number, line in enumerate(file.read_text("utf-8").splitlines(), 1)
        if HOME_PATH.search(line)
    ]
    assert offenders == []
