"""Every reason that the product can show is explained, and nothing else is."""

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import gms
import snapshot_agent
import snapshot_operator
import snapshot_shared
import snapshotctl
from snapshot_shared.errors import RemoteFailure, SnapbackError
from snapshot_shared.objects import KINDS
from snapshot_shared.reasons import REASONS, explained

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = (gms, snapshot_agent, snapshot_operator, snapshot_shared, snapshotctl)
SOURCES = sorted(
    file
    for folder in (ROOT / "shared" / "src", *sorted(ROOT.glob("services/*/src")))
    for file in folder.rglob("*.py")
    if file.name != "reasons.py"
)
CAMEL = re.compile(r"(?:[A-Z][a-z0-9]+){2,}")
WORD = re.compile(r"[A-Z][A-Za-z0-9]+")

DECIDING = ("services/operator/", "services/snapshot-agent/")
"""Where every word of two humps is taken for a reason, wherever it stands."""

NO_REASONS = frozenset(KINDS) | {"PodScheduled"}
"""Words of that form which name kinds, and types of conditions."""


def _classes() -> Iterator[type[SnapbackError]]:
    for package in PACKAGES:
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    waiting = [SnapbackError]
    while waiting:
        found = waiting.pop()
        waiting += found.__subclasses__()
        if found.__module__.partition(".")[0] in {package.__name__ for package in PACKAGES}:
            yield found


class Sources:
    """All sources as trees, and where in their calls a reason stands."""

    def __init__(self, texts: dict[str, str]) -> None:
        self.trees = {name: ast.parse(text) for name, text in texts.items()}
        self.constants: dict[str, str] = {}
        self.places: dict[str, set[int]] = {}
        for tree in self.trees.values():
            for node in ast.walk(tree):
                self._learn(node)

    def _learn(self, node: ast.AST) -> None:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(text))):
                self.constants[name] = text
            case ast.FunctionDef(name=name, args=ast.arguments(args=found)):
                self._place(name, [argument.arg for argument in found])
            case ast.ClassDef(name=name, body=body):
                targets = [item.target for item in body if isinstance(item, ast.AnnAssign)]
                self._place(name, [t.id for t in targets if isinstance(t, ast.Name)])
            case _:
                pass

    def _place(self, name: str, arguments: list[str]) -> None:
        if "reason" in arguments:
            self.places.setdefault(name, set()).add(arguments.index("reason"))

    def reasons(self) -> Iterator[tuple[str, str]]:
        """Each reason with the file that it stands in."""
        for name, tree in self.trees.items():
            found = [text for node in ast.walk(tree) for text in self._of(node, tree)]
            if name.startswith(DECIDING):
                found += [text for text in _words(tree) if CAMEL.fullmatch(text)]
            yield from (
                (text, name) for text in found if WORD.fullmatch(text) and text not in NO_REASONS
            )

    def _of(self, node: ast.AST, tree: ast.AST) -> Iterator[str]:
        match node:
            case ast.Tuple(elts=[_, truth, reason, _]) if not _is_text(truth):
                yield from self._texts(reason, tree)
            case ast.Call(func=func, args=args, keywords=keywords):
                called = getattr(func, "id", getattr(func, "attr", ""))
                for place in self.places.get(called, ()):
                    if place < len(args):
                        yield from self._texts(args[place], tree)
                for keyword in keywords:
                    if keyword.arg == "reason":
                        yield from self._texts(keyword.value, tree)
            case _:
                return

    def _texts(self, value: ast.expr, tree: ast.AST) -> Iterator[str]:
        """The texts that an expression may have, names of constants and f-strings resolved."""
        match value:
            case ast.Constant(value=str(text)):
                yield text
            case ast.Name(id=name) | ast.Attribute(attr=name):
                yield from [self.constants[name]] if name in self.constants else []
            case ast.IfExp(body=one, orelse=other):
                yield from (*self._texts(one, tree), *self._texts(other, tree))
            case ast.BoolOp(values=values):
                for item in values:
                    yield from self._texts(item, tree)
            case ast.JoinedStr(
                values=[ast.FormattedValue(value=ast.Name(id=name)), ast.Constant(value=end)]
            ):
                yield from (f"{begin}{end}" for begin in _given(name, value, tree))
            case ast.JoinedStr():
                pytest.fail(f"a reason is put together in a way this test cannot read: {value}")
            case _:
                return


def _is_text(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _words(tree: ast.AST) -> Iterator[str]:
    """All texts that stand for themselves, not as a piece of a longer one."""
    pieces = {
        id(piece)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for piece in node.values
    }
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in pieces
        ):
            yield node.value


def _given(name: str, value: ast.expr, tree: ast.AST) -> Iterator[str]:
    """What the function around an expression is called with for its first argument `name`."""
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and value in ast.walk(node)
    ]
    for function in around:
        assert function.args.args[0].arg == name
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Name(id=called), args=[ast.Constant(value=str(text)), *_]):
                    if called == function.name:
                        yield text
                case _:
                    pass


def collected() -> dict[str, str]:
    """Every reason, and one place where it comes from."""
    classes = {
        found.reason: found.__module__
        for found in _classes()
        if found not in (SnapbackError, RemoteFailure)
    }
    texts = {str(file.relative_to(ROOT)): file.read_text() for file in SOURCES}
    return dict(Sources(texts).reasons()) | classes


def test_every_reason_has_an_entry() -> None:
    missing = {reason: where for reason, where in collected().items() if reason not in REASONS}
    assert missing == {}


def test_every_entry_is_a_reason_that_exists() -> None:
    assert sorted(set(REASONS) - set(collected())) == []


@pytest.mark.parametrize("name", sorted(REASONS))
def test_every_entry_says_what_it_means_why_and_what_to_do(name: str) -> None:
    found = REASONS[name]
    for text in found:
        assert len(text) > 20
        assert not text.startswith(" ")
        assert text.endswith((".", "`"))


@pytest.mark.parametrize(
    ("source", "reasons"),
    [
        ('Failure(reason="Mine", message="m")', {"Mine"}),
        ('Failure(reason="Mine" if x else "Other")', {"Mine", "Other"}),
        ('rows(("Ready", True, "Mine", "m"))', {"Mine"}),
        ('def wait(pod, reason): ...\nwait(pod, "Mine")', {"Mine"}),
        ('class Wait(NamedTuple):\n    reason: str\nthere.Wait("Mine")', {"Mine"}),
        ('REASON = "Mine"\nFailure(reason=place.REASON)', {"Mine"}),
        ('def gone(kind): return Failure(reason=f"{kind}Gone")\ngone("Job")', {"JobGone"}),
        ("Failure(reason=found.reason)", set()),
    ],
)
def test_a_reason_is_found_wherever_it_is_written(source: str, reasons: set[str]) -> None:
    assert {reason for reason, _ in Sources({"a.py": source}).reasons()} == reasons


def test_a_reason_is_found_in_any_case_and_a_word_that_is_none_is_not() -> None:
    assert explained("devicetoosmall") == ("DeviceTooSmall", REASONS["DeviceTooSmall"])
    assert explained("worker-7") is None
