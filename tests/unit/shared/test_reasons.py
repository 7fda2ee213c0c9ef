"""Every reason that the product can show is explained, and nothing else is."""

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import gms
import snapback_client
import snapshot_agent
import snapshot_operator
import snapshot_shared
import snapshotctl
from snapshot_api.kinds import KINDS
from snapshot_shared.errors import RemoteFailure, SnapbackError
from snapshot_shared.reasons import REASONS, explained

# What is collected once serves all of them.
pytestmark = pytest.mark.xdist_group("reasons")

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = (gms, snapback_client, snapshot_agent, snapshot_operator, snapshot_shared, snapshotctl)
SOURCES = sorted(
    file
    for folder in (ROOT / "shared" / "src", *sorted(ROOT.glob("services/*/src")))
    for file in folder.rglob("*.py")
    if file.name != "reasons.py"
)
CAMEL = re.compile(r"(?:[A-Z][a-z0-9]+){2,}")
WORD = re.compile(r"[A-Z][A-Za-z0-9]+")

DECIDING = ("services/operator/", "services/snapshot-agent/", "shared/src/snapshot_api/views.py")
"""Where every word of two humps is taken for a reason, wherever it stands."""

NO_REASONS = frozenset(KINDS) | {
    "ResourceClaimTemplate",
    *("CustomResourceDefinition", "PodScheduled", "ClusterRole", "BearerToken"),
    *("FieldValueForbidden", "FieldValueInvalid", "WaitForCheckpoint"),
    *(
        "AdmissionReview",
        "ConversionReview",
        "MutatingWebhookConfiguration",
        "ValidatingWebhookConfiguration",
    ),
    *("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"),
    *("IfNeeded", "NotIn", "OnFailure", "RuntimeDefault"),
    *("CreateContainerConfigError", "CreateContainerError", "InvalidImageName"),
    *("ErrImagePull", "RunContainerError"),
    *("CapBnd", "CapEff", "CapPrm", "HugetlbPages", "RssAnon", "SwapPss", "VmSwap", "NSpid"),
    "NoNewPrivs",
}
"""Words of that form which name kinds, types of conditions, in schemas kinds of errors, and what
kubelets say of containers, which has reasons of ours."""

LOOKED_AT = (
    *(ast.Assign, ast.Call, ast.ClassDef, ast.Constant),
    *(ast.FunctionDef, ast.JoinedStr, ast.Tuple),
)
"""The nodes of a tree that may hold a reason or say in which place of a call it stands."""

PLUGINS = {"snapback_client.sglang", "snapback_client.vllm"}
"""What imports the engine that it is for, and has no errors of its own."""


def _classes() -> Iterator[type[SnapbackError]]:
    for package in PACKAGES:
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__") and module.name not in PLUGINS:
                importlib.import_module(module.name)
    waiting = [SnapbackError]
    while waiting:
        found = waiting.pop()
        waiting += found.__subclasses__()
        if found.__module__.partition(".")[0] in {package.__name__ for package in PACKAGES}:
            yield found


class Sources:
    """All sources as trees, where in their calls a reason stands, and calls with a text first."""

    def __init__(self, texts: dict[str, str]) -> None:
        self.trees = {name: ast.parse(text) for name, text in texts.items()}
        self.nodes = {
            tree: [node for node in ast.walk(tree) if isinstance(node, LOOKED_AT)]
            for tree in self.trees.values()
        }
        self.constants: dict[str, str] = {}
        self.calls: list[tuple[str, str]] = []
        self.places: dict[str, set[int]] = {}
        self.own_places: dict[ast.AST, dict[str, set[int]]] = {}
        for tree, nodes in self.nodes.items():
            self.own_places[tree] = {}
            for node in nodes:
                self._learn(node, tree)

    def _learn(self, node: ast.AST, tree: ast.AST) -> None:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(text))):
                self.constants[name] = text
            case ast.FunctionDef(name=name, args=ast.arguments(args=found)):
                self._place(tree, name, [argument.arg for argument in found])
            case ast.ClassDef(name=name, body=body):
                targets = [item.target for item in body if isinstance(item, ast.AnnAssign)]
                self._place(tree, name, [t.id for t in targets if isinstance(t, ast.Name)])
            case ast.Call(func=ast.Name(id=called), args=[ast.Constant(value=str(text)), *_]):
                self.calls.append((called, text))
            case _:
                pass

    def _place(self, tree: ast.AST, name: str, arguments: list[str]) -> None:
        own = self.own_places[tree].setdefault(name, set())
        if "reason" in arguments:
            own.add(arguments.index("reason"))
            self.places.setdefault(name, set()).add(arguments.index("reason"))

    def _places_of(self, called: str, tree: ast.AST) -> set[int]:
        """Where the reason stands in a call; what the same file defines comes first."""
        own = self.own_places[tree].get(called)
        return self.places.get(called, set()) if own is None else own

    def reasons(self) -> Iterator[tuple[str, str]]:
        """Each reason with the file that it stands in."""
        for name, tree in self.trees.items():
            found = [text for node in self.nodes[tree] for text in self._of(node, tree)]
            if name.startswith(DECIDING):
                found += [text for text in _words(self.nodes[tree]) if CAMEL.fullmatch(text)]
            yield from (
                (text, name) for text in found if WORD.fullmatch(text) and text not in NO_REASONS
            )

    def _of(self, node: ast.AST, tree: ast.AST) -> Iterator[str]:
        match node:
            case ast.Tuple(elts=[type_, truth, reason, _]) if _is_row(type_, truth):
                yield from self._texts(reason, tree)
            case ast.Call(func=func, args=args, keywords=keywords):
                called = getattr(func, "id", getattr(func, "attr", ""))
                for place in self._places_of(called, tree):
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
                yield from (f"{begin}{end}" for begin in self._given(name, value, tree))
            case ast.JoinedStr():
                pytest.fail(
                    f"a reason is put together in a way this test cannot read: {ast.unparse(value)}"
                )
            case _:
                return

    def _given(self, name: str, value: ast.expr, tree: ast.AST) -> Iterator[str]:
        """What the function around an expression is called with for its first argument `name`."""
        around = [
            node
            for node in self.nodes[tree]
            if isinstance(node, ast.FunctionDef) and value in ast.walk(node)
        ]
        for function in around:
            assert function.args.args[0].arg == name
            yield from (text for called, text in self.calls if called == function.name)


def _is_text(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _is_row(type_: ast.expr, truth: ast.expr) -> bool:
    """Whether four values may be a row of conditions: its type, whether it holds, and why."""
    return (_is_text(type_) or isinstance(type_, ast.Name)) and not _is_text(truth)


def _words(nodes: list[ast.AST]) -> Iterator[str]:
    """All texts that stand for themselves, not as a piece of a longer one."""
    pieces = {
        id(piece) for node in nodes if isinstance(node, ast.JoinedStr) for piece in node.values
    }
    for node in nodes:
        match node:
            case ast.Constant(value=str(text)) if id(node) not in pieces:
                yield text
            case _:
                pass


@cache
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


def test_every_entry_says_what_it_means_why_and_what_to_do() -> None:
    wrong = {
        f"{name}.{field}": text
        for name, found in REASONS.items()
        for field, text in found._asdict().items()
        if len(text) <= 20 or text.startswith(" ") or not text.endswith((".", "`"))
    }
    assert wrong == {}


def test_a_reason_is_found_in_any_case_and_a_word_that_is_none_is_not() -> None:
    assert explained("devicetoosmall") == ("DeviceTooSmall", REASONS["DeviceTooSmall"])
    assert explained("worker-7") is None
