"""Manifest files are hostile input."""

import json

import pytest

from snapshot_shared.errors import InvalidManifest
from snapshotctl.domain import documents
from snapshotctl.domain.documents import in_namespace, load
from tests.unit.tables import each


def _problem(text: str | bytes) -> str:
    data = text.encode() if isinstance(text, str) else text
    with pytest.raises(InvalidManifest) as refused:
        load(data, "f.yaml")
    return refused.value.message


def test_every_document_knows_the_line_where_it_begins() -> None:
    found = load(b"a: 1\n---\n---\nb: 2\n---\n# nothing\n", "f.yaml")
    assert [(d.where, d.value) for d in found] == [("f.yaml:1", {"a": 1}), ("f.yaml:4", {"b": 2})]


LISTS = """\
apiVersion: v1
kind: List
items:
- kind: Pod
  metadata: {name: a}
- kind: PodList
  items:
  - {kind: Pod, metadata: {name: b}}
- 7
---
kind: Pod
items: [1]
"""


def test_a_list_is_the_objects_in_it_each_with_its_line() -> None:
    found = load(LISTS.encode(), "f.yaml")
    assert [d.where for d in found] == ["f.yaml:4", "f.yaml:8", "f.yaml:9", "f.yaml:11"]
    assert [d.value for d in found[1:3]] == [{"kind": "Pod", "metadata": {"name": "b"}}, 7]
    assert found[0].placed("metadata.name: is wrong") == "f.yaml:5: metadata.name: is wrong"
    bare = load(b"- kind: Pod\n- kind: Node\n", "g.yaml")
    assert [(d.where, d.value["kind"]) for d in bare] == [("g.yaml:1", "Pod"), ("g.yaml:2", "Node")]
    many = json.dumps({"kind": "List", "items": [{}] * (documents.MAX_DOCUMENTS + 1)})
    assert "holds more than 100 documents" in _problem(many)


def test_an_empty_list_is_no_document() -> None:
    assert "holds no document" in _problem("{kind: List, items: []}")


VALUE = {"kind": "Pod", "n": [1, 2.5, None, True]}


@each(
    ("text", "value"),
    [
        (json.dumps(VALUE), VALUE),
        ("day: 2024-01-02\n", {"day": "2024-01-02"}),
        ("\ufeffa: 1\n", {"a": 1}),
        ("env: &e [1, 2]\nmore: *e\n", {"env": [1, 2], "more": [1, 2]}),
    ],
)
def test_json_is_yaml_a_date_a_text_and_an_alias_what_it_names(text: str, value: object) -> None:
    [found] = load(text.encode(), "f")
    assert found.value == json.loads(bytes(found.encode())) == value


def _bomb(level: str) -> str:
    """A document in which each of 30 levels has the one before it ten times."""
    lines = [level % (n, n, ", ".join([f"*l{n - 1}"] * 10)) for n in range(1, 30)]
    return "\n".join(["l0: &l0 {a: 1, b: 2}", *lines])


@each(
    ("text", "problem"),
    [
        *((text, "holds no document") for text in ("", "---\n", "# a remark\n", "\n---\n---\n")),
        ("a" * (documents.MAX_FILE_BYTES + 1), str(documents.MAX_FILE_BYTES)),
        ("a: 1\n---\n" * (documents.MAX_DOCUMENTS + 1), "documents"),
        (_bomb("l%s: &l%s [%s]"), "stands for more than"),
        (_bomb("l%s: &l%s {<<: [%s]}"), "stands for more than"),
        ("a: &a [*a]\n", "contains itself"),
        *(("[" * depth + "]" * depth, "nested") for depth in (documents.MAX_DEPTH + 1, 100_000)),
        ("a: 1\nb: 2\na: 3\n", "f.yaml:3: the key 'a' appears twice"),
        ("a: 1\nb: [1\nc: 2\n", "f.yaml:3"),
    ],
)
def test_what_is_over_a_limit_is_refused_before_it_is_expanded(text: str, problem: str) -> None:
    assert problem in _problem(text)


@each(
    "text",
    [
        "a: [1\n",
        "a: *missing\n",
        "? [1, 2]\n: 3\n",
        "a: !!python/object/apply:os.system [true]\n",
        "a: !!int nine\n",
        "a: " + "1" * 5000,
        "a: \x00",
        "\t- a",
        b"\xff\xfe\xff",
    ],
)
def test_what_is_no_plain_yaml_is_refused_by_file(text: str | bytes) -> None:
    assert _problem(text).startswith("f.yaml")


MANIFEST = b"""# a remark
kind: Pod
metadata:
  name: x
  annotations:
    nvidia.com/restore-from: ""
    nvidia.com/restore: x
spec:
  nodeSelector: {a: b,
    c.d: e}
  containers:
    - name: main
      env:
        - name: A

        - name: B
          value: 2
"""


@each(
    ("path", "line"),
    [
        ("kind", 2),
        ("metadata.name", 4),
        ("metadata.annotations[nvidia.com/restore-from]", 6),
        ("metadata.annotations.nvidia.com/restore", 7),
        ("spec.nodeSelector.c.d", 10),
        ("spec.containers[0]", 12),
        ("spec.containers[0].env[1].value", 17),
        ("spec.containers[0].env[1].valueFrom", 16),
        ("spec.containers[0].command", 12),
        ("spec.containers[7].command", 11),
        ("status", 2),
        ("(document)", 2),
    ],
)
def test_a_problem_has_the_line_of_its_field_or_of_where_that_is_missing(
    path: str, line: int
) -> None:
    [document] = load(MANIFEST, "f.yaml")
    assert document.placed(f"{path}: is wrong") == f"f.yaml:{line}: {path}: is wrong"


def test_a_problem_of_what_was_not_read_from_a_file_has_the_name_of_that() -> None:
    assert documents.Document("the pod", {}).placed("kind: wrong") == "the pod: kind: wrong"


def test_a_namespace_is_that_of_documents_that_name_none_and_another_is_refused() -> None:
    text = (
        b"kind: Pod\nmetadata: {name: a}\n---\nkind: Pod\nmetadata: {name: b, namespace: team}\n"
        b"---\nkind: SnapshotContent\nmetadata: {name: c}\n"
    )
    found = [in_namespace(document, "team").value["metadata"] for document in load(text, "f")]
    assert [meta.get("namespace") for meta in found] == ["team", "team", None]
    [document] = load(b"kind: Pod\nmetadata:\n  namespace: other\n", "f.yaml")
    with pytest.raises(InvalidManifest, match=r"f\.yaml:3: metadata\.namespace: it is 'other'"):
        in_namespace(document, "team")
