"""Manifest files: bounded YAML to JSON documents, each problem with its file and line.

A manifest is hostile input. The depth is checked on the parser's events, because libyaml's
composer recurses on the C stack; the weight is counted on the composed nodes, where an alias
still is one node, so that a bomb of aliases is refused before it is expanded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import msgspec
import yaml

from snapshot_api.kinds import KINDS
from snapshot_shared.errors import InvalidManifest

MAX_FILE_BYTES = 1024 * 1024
MAX_DOCUMENTS = 100
MAX_DEPTH = 64
MAX_NODES = 100_000

_TIMESTAMP = "tag:yaml.org,2002:timestamp"
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_Base):  # type: ignore[misc]  # the base is chosen at run time
    """Safe, and as in Kubernetes: a date stays the text that was written."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _TIMESTAMP]
    for first, resolvers in _Base.yaml_implicit_resolvers.items()
}


def written(values: Sequence[Any]) -> str:
    """Return manifests as YAML, with `---` between them, and without the last line break."""
    return str(yaml.safe_dump_all(values, sort_keys=False, allow_unicode=True, width=100)).rstrip()


class Document(NamedTuple):
    """One manifest: its file and line, for people, and its value of JSON types.

    `node` is what it was made of, where it was read from a file.
    """

    where: str
    value: Any
    node: yaml.Node | None = None

    def placed(self, problem: object) -> str:
        """Return a problem `path: text` behind file and line of its field.

        What is missing has the line of that in which it is missing.
        """
        if self.node is None:
            return f"{self.where}: {problem}"
        found = _at(self.node, str(problem).partition(": ")[0])
        source = self.where.rpartition(":")[0]
        return f"{source}:{found.start_mark.line + 1}: {problem}"

    def encode(self) -> msgspec.Raw:
        """Return the JSON that goes to the operator."""
        try:
            return msgspec.Raw(msgspec.json.encode(self.value))
        except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
            raise _refused(self.where, f"cannot be written as JSON: {error}") from error


def in_namespace(document: Document, namespace: str) -> Document:
    """Return a document in a namespace, unless its kind has none. InvalidManifest for another."""
    value = document.value
    kind = KINDS.get(value.get("kind", "")) if isinstance(value, dict) else None
    meta = value.get("metadata", {}) if isinstance(value, dict) else None
    if not isinstance(meta, dict) or (kind is not None and not kind.namespaced):
        # What is wrong with it is said where it is read.
        return document
    found = meta.setdefault("namespace", namespace)
    if found != namespace:
        raise InvalidManifest(
            document.placed(f"metadata.namespace: it is {found!r}, and -n is {namespace!r}"),
            next_step="leave one of them out",
        )
    value["metadata"] = meta
    return document


def load(data: bytes, source: str) -> list[Document]:
    """Return the documents of a file that are not empty. InvalidManifest names the line."""
    if len(data) > MAX_FILE_BYTES:
        raise _refused(source, f"has {len(data)} bytes; at most {MAX_FILE_BYTES} are read")
    try:
        text = data.decode("utf-8-sig")
        _check_depth(text, source)
        found = list(_documents(text, source))
    except yaml.YAMLError as error:
        raise _refused(*_place(error, source)) from error
    except (ValueError, RecursionError) as error:
        raise _refused(source, f"is not YAML: {error}") from error
    if not found:
        raise _refused(source, "holds no document")
    return found


def _check_depth(text: str, source: str) -> None:
    depth = 0
    for event in yaml.parse(text, _Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            raise _refused(_line(source, event), f"is nested more than {MAX_DEPTH} deep")


def _documents(text: str, source: str) -> Iterator[Document]:
    loader = _Loader(text)
    count = 0
    try:
        while loader.check_node():
            node = loader.get_node()
            _weigh(node, source, {})
            value = loader.construct_document(node)
            if value is None:
                continue
            for found in _members(value, node, source):
                count += 1
                if count > MAX_DOCUMENTS:
                    raise _refused(source, f"holds more than {MAX_DOCUMENTS} documents")
                yield found
    finally:
        loader.dispose()


def _members(value: Any, node: yaml.Node, source: str) -> Iterator[Document]:
    """Yield the objects of a list, or the document itself.

    A list is a List, as `kubectl get -o yaml` writes it, or a sequence, as `snapshotctl get` does.
    """
    is_list = isinstance(value, dict) and str(value.get("kind", "")).endswith("List")
    items = value.get("items") if is_list else value
    if not isinstance(items, list):
        yield Document(_line(source, node), value, node)
        return
    listed = _below(node, "items") if is_list else ("", node)
    nodes = listed[1].value if listed and isinstance(listed[1], yaml.SequenceNode) else []
    for item, below in zip_longest(items, nodes[: len(items)]):
        # An object of a List of its own, which may leave out what the List says of all.
        yield from _members(item, node if below is None else below, source)


def _weigh(node: yaml.Node, source: str, known: dict[int, int]) -> int:
    """Return how many nodes a node stands for once its aliases are expanded."""
    found = known.get(id(node))
    if found is not None:
        if found == 0:
            raise _refused(_line(source, node), "contains itself through an alias")
        return found
    # A node that is met again while it is weighed contains itself.
    known[id(node)] = 0
    weight = 1
    if isinstance(node, yaml.MappingNode):
        _check_keys(node, source)
        for key, value in node.value:
            weight += _weigh(key, source, known) + _weigh(value, source, known)
    elif isinstance(node, yaml.SequenceNode):
        weight += sum(_weigh(item, source, known) for item in node.value)
    if weight > MAX_NODES:
        raise _refused(_line(source, node), f"stands for more than {MAX_NODES} values")
    known[id(node)] = weight
    return weight


def _check_keys(node: yaml.MappingNode, source: str) -> None:
    seen: set[str] = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise _refused(_line(source, key), "a key must be a word")
        if key.value in seen and key.value != "<<":
            raise _refused(_line(source, key), f"the key {key.value!r} appears twice")
        seen.add(key.value)


def _at(node: yaml.Node, path: str) -> yaml.Node:
    """Return the key, or the item of a list, at a path such as `spec.env[1].name`.

    Where the whole path is not there, that of its longest beginning.
    """
    marked = node
    while path:
        below = _below(node, path)
        if below is None:
            break
        marked, node, path = below
        path = path.removeprefix(".")
    return marked


def _below(node: yaml.Node, path: str) -> tuple[yaml.Node, yaml.Node, str] | None:
    """Return what is marked for the first step of a path, what it leads to, and the other steps."""
    inner, _, rest = path.removeprefix("[").partition("]")
    if isinstance(node, yaml.SequenceNode):
        is_there = path.startswith("[") and inner.isdecimal() and int(inner) < len(node.value)
        return (node.value[int(inner)], node.value[int(inner)], rest) if is_there else None
    if not isinstance(node, yaml.MappingNode):
        return None
    # A name may have dots of its own; of two that fit, the longer one is meant.
    for key, value in sorted(node.value, key=lambda pair: -len(pair[0].value)):
        if path.startswith("[") and key.value == inner:
            return key, value, rest
        if path == key.value or path.startswith((f"{key.value}.", f"{key.value}[")):
            return key, value, path.removeprefix(key.value)
    return None


def _place(error: yaml.YAMLError, source: str) -> tuple[str, str]:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
    return (f"{source}:{mark.line + 1}" if mark else source), str(problem)


def _line(source: str, place: Any) -> str:
    return f"{source}:{place.start_mark.line + 1}"


def _refused(where: str, problem: str) -> InvalidManifest:
    return InvalidManifest(
        f"{where}: {problem}", next_step="correct the file and apply again; nothing was stored"
    )
