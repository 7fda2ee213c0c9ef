"""Draw small mutations of the pure modules and see how many of them no test notices.

`python -m tests.mutants.sample [--count N] [--seed N] [--jobs N]`. The same seed draws the same
mutations of the same sources. Status 1 if the share of survivors is 5 % or more; `--most` gives
another share, because one survivor of a small sample is more than 5 %.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import random
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from tests.mutants.trials import Ran, copy_sources, run_tests, write_source

ROOT = Path(__file__).resolve().parents[2]
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
TOO_MANY = 0.05
LIMIT_S = 600.0
"""How long one run of tests may take, in seconds; several times what it takes."""
LIMIT_OF_ONE_S = 180.0
"""How long one test may take: whatever hangs in it hangs for ever."""

_SCENARIOS = ["tests/scenario/test_scenarios.py", "-k", "calm or test_no_rule_is_broken"]
_NUMBERS = "tests/golden/test_numbers.py"
_PURE = {
    "snapshot_api": ("identity", "manifests"),
    "snapshot_shared": (
        *("ledger", "orders", "ids", "transitions"),
        *("subjects", "artifact", "frames", "codec"),
    ),
}
SOURCES: dict[str, list[list[str]]] = {
    "services/operator/src/snapshot_operator/core/*.py": [["tests/unit/operator"], _SCENARIOS],
    "services/gms/src/gms/domain/*.py": [
        ["tests/unit/gms", _NUMBERS],
        _SCENARIOS,
        ["tests/integration/gms/test_command_line.py", "tests/contract/test_transfer_backends.py"],
    ],
    "services/snapshot-agent/src/snapshot_agent/domain/*.py": [
        ["tests/unit/agent", _NUMBERS],
        _SCENARIOS,
        ["tests/contract/test_process_drivers.py"],
    ],
    **{
        f"shared/src/{package}/{name}.py": [
            ["tests/unit/api", "tests/unit/shared", "tests/golden"],
            ["tests/unit/gms", "tests/unit/agent", "tests/unit/operator"],
            _SCENARIOS,
        ]
        for package, names in _PURE.items()
        for name in names
    },
}
"""The pure modules, and what is run on a mutation of each until something fails."""

_PAIRS = (
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq)),
    *((ast.In, ast.NotIn), (ast.Is, ast.IsNot)),
)
_COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = dict(
    (*_PAIRS, *(pair[::-1] for pair in _PAIRS))
)
_TYPES = {"Annotated", "Literal", "TypeVar", "TransitionTable"}


class Mutation(NamedTuple):
    """One change of one expression or statement. `before` and `after` show it with its context."""

    file: str
    line: int
    before: str
    after: str
    text: str
    """The whole file after the change."""
    stages: list[list[str]]

    @property
    def shown(self) -> str:
        """Say where it is and what it is."""
        return f"{self.file}:{self.line}: {self.before} -> {self.after}"


class Harmed(Exception):
    """The tests do not pass on what is not mutated; with their output."""


class Equivalent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A mutation that changes nothing which anybody could notice."""

    file: str
    before: str
    after: str
    reason: Annotated[str, Meta(min_length=10)]


class _Equivalents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    mutation: list[Equivalent]


def mutations(root: Path) -> list[Mutation]:
    """Give every mutation that can be drawn, in the order of files and lines."""
    return [
        found
        for pattern, stages in SOURCES.items()
        for path in sorted(root.glob(pattern))
        for found in _of_file(path, path.relative_to(root).as_posix(), stages)
    ]


def draw(root: Path, count: int, seed: int, only: Sequence[str] = ("",)) -> list[Mutation]:
    """Draw from the mutations of the files with one of these texts in their names."""
    every = [one for one in mutations(root) if any(text in one.file for text in only)]
    return random.Random(seed).sample(every, min(count, len(every)))


def _of_file(path: Path, name: str, stages: list[list[str]]) -> Iterator[Mutation]:
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        return (
            starts[node.lineno - 1] + node.col_offset,
            starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0),
        )

    for node, shown in _nodes(ast.parse(source), None):
        (begin, end), (first, last) = span(node), span(shown)
        for new in _changed(node):
            text = (source[:begin] + new.encode() + source[end:]).decode()
            before = source[first:last].decode()
            after = (source[first:begin] + new.encode() + source[end:last]).decode()
            yield Mutation(name, node.lineno, _flat(before), _flat(after), text, stages)


def _nodes(
    tree: ast.AST, shown: ast.expr | ast.stmt | None
) -> Iterator[tuple[ast.expr | ast.stmt, ast.expr | ast.stmt]]:
    """Give the nodes that may be changed, each with what is to be shown of its context."""
    for child in ast.iter_child_nodes(tree):
        if _says_nothing(tree, child):
            continue
        context = shown
        if isinstance(child, ast.stmt):
            context = None if hasattr(child, "body") or isinstance(child, ast.Match) else child
        elif isinstance(child, ast.expr) and (shown is None or not isinstance(child, ast.Constant)):
            context = child
        if isinstance(child, ast.expr | ast.stmt):
            is_in_branch = isinstance(tree, ast.If) and child in tree.body
            if not isinstance(child, ast.Return) or is_in_branch:
                yield child, context or child
        yield from _nodes(child, context)


def _says_nothing(parent: ast.AST, child: ast.AST) -> bool:
    """Whether a node is a type, a text or the log, or only says how a class is made."""
    if isinstance(child, ast.JoinedStr | ast.Raise | ast.Assert):
        return True
    if isinstance(parent, ast.arg | ast.AnnAssign) and child is parent.annotation:
        return True
    if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        made_by = [*parent.decorator_list, getattr(parent, "returns", None)]
        return child in made_by or isinstance(child, ast.keyword)
    if isinstance(child, ast.keyword):
        return child.arg == "strict"
    if isinstance(child, ast.Call | ast.Subscript):
        name = ast.unparse(child.func if isinstance(child, ast.Call) else child.value)
        return name.startswith("log.") or name in _TYPES
    return isinstance(parent, ast.If) and ast.unparse(parent.test) == "TYPE_CHECKING"


def _changed(node: ast.expr | ast.stmt) -> Iterator[str]:
    match node:
        case ast.Compare():
            for index, op in enumerate(node.ops):
                ops = [*node.ops[:index], _COMPARED[type(op)](), *node.ops[index + 1 :]]
                yield f"({ast.unparse(ast.Compare(node.left, ops, node.comparators))})"
        case ast.BoolOp():
            swapped = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield f"({ast.unparse(ast.BoolOp(swapped, node.values))})"
        case ast.UnaryOp(op=ast.Not()):
            yield f"({ast.unparse(node.operand)})"
        case ast.BinOp(op=ast.Add() | ast.Sub()) if not _is_text_or_list(node.left):
            yield f"({ast.unparse(ast.BinOp(node.left, _turned(node.op), node.right))})"
        case ast.AugAssign(op=ast.Add() | ast.Sub()) if not _is_text_or_list(node.value):
            yield ast.unparse(ast.AugAssign(node.target, _turned(node.op), node.value))
        case ast.Constant(value=bool(value)):
            yield str(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield repr(value + 1)
        case ast.Return():
            yield "pass"


def _is_text_or_list(node: ast.expr) -> bool:
    return isinstance(node, ast.List | ast.Tuple | ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    )


def _turned(op: ast.operator) -> ast.operator:
    return ast.Sub() if isinstance(op, ast.Add) else ast.Add()


def _flat(text: str) -> str:
    return " ".join(text.split())


def read_equivalents(path: Path) -> set[tuple[str, str, str]]:
    """Read the mutations that nobody could notice, as file, before and after."""
    found = msgspec.toml.decode(path.read_bytes(), type=_Equivalents).mutation
    return {(one.file, one.before, one.after) for one in found}


async def verdict_on(mutation: Mutation, tree: Path) -> str:
    """Run the tests on a mutation. It is caught, too, when they take too long."""
    path = tree / mutation.file
    unharmed = path.read_text("utf-8")
    write_source(path, mutation.text)
    try:
        for stage in mutation.stages:
            if (ran := await _run(stage, tree)).status != 0:
                return "hangs" if ran.status is None else "caught"
    finally:
        write_source(path, unharmed)
    return "survived"


async def _run(stage: list[str], tree: Path) -> Ran:
    place = f"--basetemp={tree.parent / f'{tree.name}-tmp'}"
    options = ["-x", "--tb=no", f"--timeout={LIMIT_OF_ONE_S}", place]
    return await run_tests(tree, [*options, *stage], limit_s=LIMIT_S)


async def _check_unharmed(drawn: Sequence[Mutation], tree: Path) -> str:
    """Run every test without any mutation; return the output of a stage that fails twice."""
    stages = {tuple(stage): stage for mutation in drawn for stage in mutation.stages}
    for stage in stages.values():
        for is_last in (False, True):
            ran = await _run(stage, tree)
            if ran.status == 0:
                break
            # A test that races says nothing about the others.
            if is_last:
                return ran.output or f"{' '.join(stage)} takes more than {LIMIT_S:.0f} s"
    return ""


async def _try_out(drawn: Sequence[Mutation], root: Path, jobs: int) -> list[Mutation]:
    # So that an end by SIGTERM cleans up as one by ctrl-C does.
    if this := asyncio.current_task():
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    survivors: list[Mutation] = []
    left = list(enumerate(drawn, 1))[::-1]

    async def work(tree: Path) -> None:
        await asyncio.to_thread(copy_sources, root, tree)
        while left:
            number, mutation = left.pop()
            verdict = await verdict_on(mutation, tree)
            if verdict == "survived":
                survivors.append(mutation)
            print(
                f"[{number}/{len(drawn)}] {verdict:8} {mutation.shown}",
                file=sys.stderr,
                flush=True,
            )

    with tempfile.TemporaryDirectory(prefix="sample-", ignore_cleanup_errors=True) as folder:
        await asyncio.to_thread(copy_sources, root, Path(folder, "tree"))
        if output := await _check_unharmed(drawn, Path(folder, "tree")):
            raise Harmed(output)
        async with asyncio.TaskGroup() as group:
            for job in range(jobs):
                group.create_task(work(Path(folder, f"tree-{job}")))
    return sorted(survivors)


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw, try out and tell; the status of the program."""
    parser = argparse.ArgumentParser(prog="make mutants SAMPLE=", description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="how many to draw (200)")
    parser.add_argument("--seed", type=int, default=1, help="what the draw depends on (1)")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (2)")
    parser.add_argument("--only", nargs="+", default=[""], help="only files named like this")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree to copy")
    parser.add_argument("--most", type=float, default=TOO_MANY, help="the share that may survive")
    options = parser.parse_args(arguments)
    equivalent = read_equivalents(EQUIVALENT)
    drawn = draw(options.root, options.count, options.seed, options.only)
    drawn = [one for one in drawn if (one.file, one.before, one.after) not in equivalent]
    try:
        survivors = asyncio.run(_try_out(drawn, options.root, options.jobs))
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    except Harmed as error:
        print(f"{error}\nthese tests fail without any mutation, so they say nothing")
        return 1
    for mutation in survivors:
        print(mutation.shown)
    share = len(survivors) / max(len(drawn), 1)
    print(f"{len(survivors)} of {len(drawn)} survived, {share:.1%}")
    return 1 if share >= options.most else 0


if __name__ == "__main__":
    sys.exit(main())
