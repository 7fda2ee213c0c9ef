"""The cluster behind docs/inspect.md; run as a program it writes the answers into the page.

python -m tests.docs.inspect_page        (make inspect-docs)
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from tests.cluster.programs import find
from tests.docs.pages import ROOT, Block, Said, Shell, blocks, play

PAGE = ROOT / "docs/inspect.md"
NODES = {"demo-broken": "node-2", "demo-slow": "node-3"}
POISON = "dump-00000000-0000-4000-8000-00000000dead"
LINES = 18
ENDING = 4
WIDTH = 240
TRIES = 60

_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_PATTERNS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\b20\d\d-\d\d-\d\d([ T])\d\d:\d\d:\d\d"), r"2026-01-01\g<1>12:00:00"),
    (re.compile(r"\b\d\d:\d\d:\d\d\b"), "12:00:00"),
    (re.compile(r"\b20\d\d-\d\d-\d\d\b"), "2026-01-01"),
    (re.compile(r"\b[0-9a-f]{8}…"), "1a2b3c4d…"),
    (re.compile(r"(?<=:00)\.(\d{3})\d*(?=\b|Z)"), ".000"),
    (re.compile(r'("(?:at|deadline|endedAt|\w+_at)": ?)\d{10}(\.\d+)?'), r"\g<1>1767268800.0"),
    (re.compile(r"(\d{10})\.\d{4,7}\b"), "1767268800.0"),
    (re.compile(r"nats://127\.0\.0\.1:\d+"), "nats://127.0.0.1:4222"),
    (re.compile(r"\b[0-9a-f]{64}\b"), "ab" * 32),
    (re.compile(r"\b[0-9a-f]{32}\b"), "ab" * 16),
    (re.compile(r"(\.\d+\.\d+)\.[0-9a-f]{16}\b"), r"\g<1>.abababababababab"),
    (re.compile(r"-[0-9a-f]{16}-01\b"), "-abababababababab-01"),
    (re.compile(r"\b(demo-[a-z]+)-[0-9a-f]{5}\b"), r"\g<1>-1a2b3"),
)


def scene(shell: Shell) -> None:
    """Bring a cluster into the state that the page tells of."""
    _typed(shell, "snapshotctl up --nodes 3 --gpus 3")
    example = (shell.root / "deploy/examples/checkpoint.yaml").read_text(encoding="utf-8")
    for name, node in NODES.items():
        text = example.replace("demo-llm", name).replace("nvidia.com/gpu: 2", "nvidia.com/gpu: 1")
        text = text.replace("hostname: node-1", f"hostname: {node}")
        # Another model, or it would share the artifact of demo-llm.
        text = text.replace("model: example/integer-network", f"model: example/{name}")
        (shell.root / f"{name}.yaml").write_text(text, encoding="utf-8")
    _typed(shell, "snapshotctl sim fail node-2 --at write")
    _typed(shell, "snapshotctl apply -f demo-broken.yaml")
    shell.type("snapshotctl wait dynamocheckpoint/demo-broken")
    keys = "~/.local/state/snapback/default/keys"
    nats = "nats --context snapback-default"
    operator = f"{nats} --nkey {keys}/operator.nk --inbox-prefix _INBOX.operator"
    poison = f"snap.order.node-1.agent.{POISON}"
    _typed(shell, f"""{operator} pub {poison} '{{"type": "snapback.v2.dump_order"}}'""")
    # Nobody delivers its save, so the worker is held and its device fenced for minutes.
    _typed(shell, f"{nats} consumer pause ORDERS gms-node-3 1h --force")
    _typed(shell, "snapshotctl apply -f demo-slow.yaml")
    order = _queued(shell)
    broken = _content_of(shell, "demo-broken")
    _typed(shell, f"export NODE=node-3 ORDER={order}")
    _typed(shell, f"export BROKEN={broken} FAILED=save-{broken}-gpu-0")


def _typed(shell: Shell, command: str) -> str:
    said = shell.type(command)
    assert said.code == 0, f"{command}\n{said.text}"
    return said.text


def _content_of(shell: Shell, name: str) -> str:
    found = msgspec.json.decode(_typed(shell, "snapshotctl get snapshotcontents -o json"))
    items = found["items"] if isinstance(found, dict) else found
    return next(
        str(item["metadata"]["uid"])
        for item in items
        if item["spec"]["snapshotRef"]["name"] == name
    )


def _queued(shell: Shell) -> str:
    """Wait until the dump of demo-slow is done and its save is queued; give the id of the save."""
    for _ in range(TRIES):
        rows = msgspec.json.decode(_typed(shell, "snapshotctl orders node-3 -o json"))
        orders = [str(row["order"]) for row in rows]
        if len(orders) == 1 and orders[0].startswith("save-"):
            return orders[0]
    raise AssertionError("the save of demo-slow is not all that is waited for")


class Stable:
    """Replaces what differs each time: ids by numbered ones, in the order of their appearance."""

    def __init__(self, home: Path) -> None:
        self._home = str(home)
        self._ids: dict[str, str] = {}
        self._names: dict[str, str] = {}

    def __call__(self, text: str) -> str:
        text = text.replace(self._home, "/home/you")
        for pattern, instead in _PATTERNS:
            text = pattern.sub(instead, text)
        text = _UUID.sub(self._id, text)
        return re.sub(
            r"\b(?=[A-Za-z0-9]*\d)(?=[A-Za-z0-9]*[a-z])[A-Za-z0-9]{22}\b", self._name, text
        )

    def _id(self, match: re.Match[str]) -> str:
        if match[0] in POISON:
            return match[0]
        number = len(self._ids) + 1
        return self._ids.setdefault(match[0], f"{number:08x}-0000-4000-8000-{number:012x}")

    def _name(self, match: re.Match[str]) -> str:
        number = len(self._names) + 1
        return self._names.setdefault(match[0], f"{number:022d}")


def shown(said: Sequence[Said], stable: Stable) -> list[str]:
    """Give the lines of an answer as the page has them: stable, and cut where they are long."""
    lines = [
        line.rstrip()
        for answer in said
        for line in stable(answer.text).splitlines()
        if line.strip() and "Subscribing" not in line
    ]
    cut = [line if len(line) <= WIDTH else line[: WIDTH - 1] + "…" for line in lines]
    return cut if len(cut) <= LINES else [*cut[: LINES - ENDING], "…", *cut[-ENDING:]]


def answered(page: Path, shell: Shell) -> Iterator[tuple[Block, list[Said]]]:
    """Type all commands of the page."""
    for block in blocks(page):
        yield block, play(block, shell)


def main() -> int:
    """Write the answers into the page."""
    if find("nats") is None:
        sys.stderr.write("there is no nats CLI here; run: make tools\n")
        return 1
    with tempfile.TemporaryDirectory(prefix="snapback-inspect-") as folder:
        shell = Shell(Path(folder))
        stable = Stable(Path(folder))
        answers: dict[int, list[str]] = {}
        try:
            scene(shell)
            for block, said in answered(PAGE, shell):
                answers[block.line] = shown(said, stable)
        finally:
            shell.type("snapshotctl down --purge")
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), answers), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


def written(text: str) -> dict[int, list[str]]:
    """Give the answers that the page has, by the lines of the fences of their commands."""
    lines = text.splitlines()
    found: dict[int, list[str]] = {}
    commands = 0
    for number, line in enumerate(lines):
        if line == "```sh":
            commands = number + 1
        elif line == "```text":
            found[commands] = lines[number + 1 : lines.index("```", number)]
    return found


def filled(text: str, answers: dict[int, list[str]]) -> str:
    """Put the answers of the blocks, by the lines of their fences, into the blocks after them."""
    lines = text.splitlines()
    result: list[str] = []
    answer: list[str] | None = None
    number = 0
    while number < len(lines):
        line = lines[number]
        result.append(line)
        answer = answers.get(number + 1, answer)
        if line == "```text" and answer is not None:
            result += answer
            answer = None
            number = lines.index("```", number)
            continue
        number += 1
    return "\n".join(result) + "\n"


if __name__ == "__main__":
    sys.exit(main())
