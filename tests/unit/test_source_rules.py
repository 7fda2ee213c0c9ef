"""Rules about the sources that neither the linter nor the type checker can say."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.unit.tables import each

ROOT = Path(__file__).resolve().parents[2]
SOURCE_FOLDERS = (ROOT / "shared" / "src", *sorted(ROOT.glob("services/*/src")))
SOURCES = sorted(file for folder in SOURCE_FOLDERS for file in folder.rglob("*.py"))
EXAMPLES = sorted(ROOT.glob("deploy/examples/*.py"))

# Files that may wait for time alone to pass, by their path in the repository.
ALLOWED_SLEEPS = frozenset(
    {
        # What it calls is how vLLM lets its device go, with the level as argument.
        "services/gms-client/src/snapback_client/vllm.py"
    }
)
MAX_ALLOWED_SLEEPS = 2

# What may wait for a disk or a server.
BLOCKING_MODULES = {
    "os": {
        "close", "fdatasync", "fstatvfs", "fsync", "ftruncate", "link", "listdir", "lstat",
        "makedirs", "mkdir", "open", "pread", "preadv", "pwrite", "read", "remove", "rename",
        "replace", "rmdir", "scandir", "stat", "statvfs", "symlink", "truncate", "unlink", "write",
    },
    "shutil": {"copyfile", "copytree", "disk_usage", "move", "rmtree", "which"},
    "socket": {"create_connection", "getaddrinfo", "gethostbyname"},
    "subprocess": {"call", "check_call", "check_output", "run"},
    "time": {"sleep"},
}  # fmt: skip
BLOCKING_METHODS = {
    "exists", "glob", "is_dir", "is_file", "iterdir", "mkdir", "open", "read_bytes", "read_text",
    "readlink", "rglob", "rmdir", "touch", "unlink", "write_bytes", "write_text",
}  # fmt: skip
PURE_HELPERS = {"check_component", "check_space", "translated"}

A_COMMAND = "services/snapshotctl/src/"  # Nobody else's work waits in its event loop.
AT_THE_START = "nothing else runs yet"
IN_MEMORY = "a file in memory, for what reads files alone"
NODES_OWN = "a small file on a disk of the node, which is not made durable"

# Functions that block the event loop all the same, and why they may.
ALLOWED_BLOCKS = {
    "services/gms/src/gms/adapters/grpc_api.py:start": AT_THE_START,
    "services/gms/src/gms/adapters/grpc_api.py:close": NODES_OWN,
    "services/gms/src/gms/adapters/lease_socket.py:close": NODES_OWN,
    **{
        f"services/gms/src/gms/containers.py:{name}": "a process that moves one pod's weights"
        for name in ("_carry_out", "_follow", "_ordered", "_reported", "_transfer")
    },
    "services/gms/src/gms/main.py:serve": AT_THE_START,
    "services/gms/src/gms/main.py:serve_device": AT_THE_START,
    "services/operator/src/snapshot_operator/kube/webhook_tls.py:_first": IN_MEMORY,
    "services/operator/src/snapshot_operator/kube/webhook_tls.py:_keep": IN_MEMORY,
    "services/operator/src/snapshot_operator/kube/webhook_tls.py:_take": IN_MEMORY,
    "services/operator/src/snapshot_operator/local/lock.py:held": AT_THE_START,
    "services/operator/src/snapshot_operator/main.py:_standalone": AT_THE_START,
    "services/page/src/snapshot_page/main.py:serve": AT_THE_START,
    "services/snapshot-agent/src/snapshot_agent/adapters/control_dir.py:appears": NODES_OWN,
    "services/snapshot-agent/src/snapshot_agent/adapters/guards.py:adopt": NODES_OWN,
    "services/snapshot-agent/src/snapshot_agent/adapters/guards.py:kill": NODES_OWN,
    "services/snapshot-agent/src/snapshot_agent/adapters/guards.py:_started": NODES_OWN,
    "services/snapshot-agent/src/snapshot_agent/guard_starter.py:close": NODES_OWN,
    "shared/src/snapshot_shared/bus/connection.py:_open": "nats-py reads the key in the loop, too",
}

HOME_PATH = re.compile(r"/(?:root|(?:home|Users)/[\w.-]+)/")


def _name(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


@cache
def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_bytes(), str(file))


@cache
def _with(word: str) -> list[Path]:
    """List the sources that hold a word; parsing all of them takes seconds."""
    return [file for file in SOURCES if word in file.read_text("utf-8")]


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


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Walk through what a function does itself: not what it defines for others to call."""
    todo = list(ast.iter_child_nodes(function))
    while todo:
        node = todo.pop()
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield node
            todo += ast.iter_child_nodes(node)


def _blocks(call: ast.Call, helpers: set[str]) -> bool:
    match call.func:
        case ast.Name(id=name):
            return name == "open" or name in helpers
        case ast.Attribute(value=ast.Name(id="files"), attr=name):
            return name not in PURE_HELPERS
        case ast.Attribute(value=ast.Name(id=module), attr=name) if module in BLOCKING_MODULES:
            return name in BLOCKING_MODULES[module]
        case ast.Attribute(attr=name):
            return name in BLOCKING_METHODS
    return False


def _called(call: ast.Call) -> str | None:
    """Name the function of the same module that is called."""
    match call.func:
        case ast.Name(id=name) | ast.Attribute(value=ast.Name(id="self"), attr=name):
            return name
    return None


def _blocked_loops(tree: ast.Module) -> set[str]:
    """Name the coroutines that block, by themselves or by functions of their module."""
    blocking = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "snapshot_shared.files"
        for alias in node.names
    } - PURE_HELPERS
    helpers = set(blocking)

    calls = {
        function: [node for node in _own_nodes(function) if isinstance(node, ast.Call)]
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    }

    def blocked(kind: type[ast.FunctionDef | ast.AsyncFunctionDef]) -> set[str]:
        return {
            function.name
            for function, made in calls.items()
            if isinstance(function, kind)
            and any(_blocks(call, helpers) or _called(call) in blocking for call in made)
        }

    while more := blocked(ast.FunctionDef) - blocking:
        blocking |= more
    return blocked(ast.AsyncFunctionDef)


def _foreign_imports(tree: ast.Module) -> Iterator[str]:
    """Name what an example imports beyond the standard library, numpy and the client."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                modules = [alias.name for alias in names]
            case ast.ImportFrom(level=level) if level:
                modules = ["." * level + (node.module or "")]
            case ast.ImportFrom(module=str(module)):
                modules = [module]
            case _:
                continue
        yield from (module for module in modules if not _allowed_in_example(module))


def _allowed_in_example(module: str) -> bool:
    top = module.partition(".")[0]
    return top in sys.stdlib_module_names or top in ("numpy", "snapback_client")


def test_the_sources_of_all_packages_are_looked_at() -> None:
    packages = {
        file.relative_to(folder).parts[0]
        for folder in SOURCE_FOLDERS
        for file in SOURCES
        if file.is_relative_to(folder)
    }
    assert packages == {
        "gms",
        "snapback_client",
        "snapshot_agent",
        "snapshot_api",
        "snapshot_operator",
        "snapshot_page",
        "snapshot_shared",
        "snapshotctl",
    }


@each(
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
    # To put a client to sleep is none.
    assert not _sleeps(ast.parse("import gms\ndef f(client):\n    client.sleep()"))


def test_make_help_lists_every_target_once_below_a_title() -> None:
    lines = (ROOT / "Makefile").read_text().splitlines()
    [named] = [line.partition(": ")[2].split() for line in lines if line.startswith(".PHONY: help")]
    shown = subprocess.run(
        ["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    titles = [line for line in shown if line and not line.startswith(" ")]
    assert titles == sorted(set(titles), key=titles.index)
    assert titles[0] == "Try it"
    listed = [line.split()[0] for line in shown if line.startswith("  ")]
    # `moved` is for the other targets alone.
    assert sorted(listed) == sorted(set(named) - {"moved"})


def test_no_source_waits_by_sleeping_but_for_the_few_that_are_listed() -> None:
    offenders = [
        f"{_name(file)}:{line}"
        for file in _with("sleep")
        if _name(file) not in ALLOWED_SLEEPS
        for line in _sleeps(_parse(file))
    ]
    assert offenders == []
    assert len(ALLOWED_SLEEPS) <= MAX_ALLOWED_SLEEPS
    assert [name for name in ALLOWED_SLEEPS if not _sleeps(_parse(ROOT / name))] == []


@each("body", ["files.remove_tree(fd, 'x')", "remove_tree(fd, 'x')", "open('x')", "os.fsync(fd)"])
def test_a_blocked_event_loop_is_recognised(body: str) -> None:
    source = f"from snapshot_shared.files import remove_tree\nasync def found():\n    {body}\n"
    assert _blocked_loops(ast.parse(source)) == {"found"}


def test_nothing_that_can_block_runs_in_an_event_loop() -> None:
    found = {
        f"{_name(file)}:{name}"
        for file in _with("async")
        if not _name(file).startswith(A_COMMAND)
        for name in _blocked_loops(_parse(file))
    }
    assert sorted(found) == sorted(ALLOWED_BLOCKS)


def test_no_domain_module_is_asynchronous() -> None:
    offenders = [
        f"{_name(file)}:{node.lineno} {node.name}"
        for file in _with("async")
        if "domain" in file.relative_to(ROOT).with_suffix("").parts
        for node in ast.walk(_parse(file))
        if isinstance(node, ast.AsyncFunctionDef)
    ]
    assert offenders == []


ENGINES = {"onnx_worker.py": {"magika", "onnx", "onnxruntime"}, "torch_worker.py": {"torch"}}


@pytest.mark.parametrize("example", EXAMPLES, ids=_name)
def test_an_example_needs_only_the_standard_library_numpy_and_the_client(example: Path) -> None:
    # A program finds the others of its folder.
    beside = {other.stem for other in EXAMPLES}
    assert set(_foreign_imports(_parse(example))) - beside == ENGINES.get(example.name, set())


def test_no_file_names_a_path_in_somebodys_home() -> None:
    files = [
        *SOURCES,
        *sorted(ROOT.glob("tests/**/*.py")),
        *sorted(ROOT.glob("deploy/**/*.py")),
        *sorted(ROOT.glob("s*/**/pyproject.toml")),
        ROOT / "Makefile",
        *sorted(ROOT.glob("requirements*")),
        ROOT / ".ci" / "run",
    ]
    offenders = [
        f"{_name(file)}:{number}"
        for file in files
        for number, line in enumerate(file.read_text("utf-8").splitlines(), 1)
        if HOME_PATH.search(line)
    ]
    assert offenders == []
