"""The blocks of commands in the documents, and a shell that types them.

Every ```sh and ```console block says in an HTML comment above it how it is run, or the page says it
for all of its blocks:

    <!-- run: cluster -->                        typed into a shell beside a local cluster
    <!-- run: here -->                           the same, without a cluster
    <!-- run: kubernetes -->                     beside a Kubernetes cluster, by tests/cluster
    <!-- run: cluster; exits 0 1 -->             the second command ends with 1
    <!-- run: cluster; until stopped -->         ended by ctrl-C once it has said something
    <!-- run: cluster; meanwhile COMMAND -->     while something happens
    <!-- run: where docker is; here -->          skipped, with the reason, where it is not
    <!-- run: no, because REASON -->             not typed; what it names must exist
    <!-- run every block: cluster --gpus 4 -->   for the page; what follows are options of `up`

The blocks of a page are one story, in their order, with one environment and one cluster. A command
that ends with & runs until the end of the story.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.cluster.programs import find

ROOT = Path(__file__).resolve().parents[2]

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[a-z]*)$")
_RUN = re.compile(r"<!-- run: (?P<how>.+?) -->")
_RUN_ALL = re.compile(r"<!-- run every block: (?P<how>.+?) -->")
_HEREDOC = re.compile(r"<<-?'?(\w+)'?")
_PERSONAL = ("HELM_", "KUBECONFIG", "NATS_", "SNAPBACK_", "XDG_")
_HASTE = ("--timeout 30s", "--timeout 12s")
LINE_S = 120.0
STOP_S = 10.0
LISTENS_S = 2.0


class How(NamedTuple):
    """What an annotation says."""

    mode: str
    """`cluster`, `here`, `kubernetes` or `no`."""

    options: tuple[str, ...] = ()
    because: str = ""
    needs: str = ""
    exits: tuple[int, ...] = ()
    until_stopped: bool = False
    meanwhile: str = ""


class Block(NamedTuple):
    """One block of commands; `line` is that of its fence, from 1."""

    page: Path
    line: int
    commands: tuple[str, ...]
    how: How | None

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def documents() -> list[Path]:
    """List every document that a person reads."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    return sorted([*found, *(ROOT / "deploy").rglob("*.md")])


def parse_how(text: str) -> How:
    """Read an annotation. ValueError says what is wrong with it."""
    how: How | None = None
    changes: dict[str, object] = {}
    for part in (part.strip() for part in text.split(";")):
        word, _, rest = part.partition(" ")
        match word:
            case "cluster" | "here" | "kubernetes":
                how = How(word, tuple(rest.split()))
            case "no," if rest.startswith("because ") and len(rest.split()) > 3:
                how = How("no", because=rest.removeprefix("because "))
            case "exits":
                changes["exits"] = tuple(int(code) for code in rest.split())
            case "until" if rest == "stopped":
                changes["until_stopped"] = True
            case "meanwhile":
                changes["meanwhile"] = rest
            case "where" if rest.endswith(" is"):
                changes["needs"] = rest.removesuffix(" is")
            case _:
                raise ValueError(f"{part!r} is not understood; see tests/docs/pages.py")
    if how is None:
        raise ValueError(f"{text!r} says neither cluster, here, kubernetes nor no")
    return how._replace(**changes)  # type: ignore[arg-type]


def blocks(page: Path) -> list[Block]:
    """Find the blocks of commands of a page."""
    lines = page.read_text(encoding="utf-8").splitlines()
    whole = next((m for line in lines if (m := _RUN_ALL.search(line))), None)
    default = parse_how(whole["how"]) if whole else None
    found: list[Block] = []
    number = 0
    while number < len(lines):
        fence = _FENCE.match(lines[number])
        if not fence:
            number += 1
            continue
        end = next(i for i in range(number + 1, len(lines)) if lines[i].strip() == "```")
        if fence["language"] in ("sh", "console", "bash", "shell"):
            above = next((line for line in reversed(lines[:number]) if line.strip()), "")
            own = _RUN.search(above)
            how = parse_how(own["how"]) if own else default
            inside = [line.removeprefix(fence["indent"]) for line in lines[number + 1 : end]]
            found.append(Block(page, number + 1, tuple(_commands(inside)), how))
        number = end + 1
    return found


def _commands(lines: list[str]) -> Iterator[str]:
    """Join what belongs together: lines that are continued, and here-documents."""
    waiting: list[str] = []
    ending = ""
    for line in lines:
        if not waiting and (not line.strip() or line.lstrip().startswith("#")):
            continue
        waiting.append(line)
        if ending:
            if line.strip() == ending:
                ending = ""
        elif document := _HEREDOC.search(line):
            ending = document[1]
        if not ending and not line.endswith("\\"):
            yield "\n".join(waiting)
            waiting = []


class Said(NamedTuple):
    """How a command ended, and what it said on both of its outputs."""

    code: int
    text: str


class Shell:
    """A shell in a copy of the repository whose examples are small and warm at once.

    A wait that the pages let run out is shorter, too. What commands export, and where they go to,
    stays for the next one. `programs` are folders whose programs are found before all others.
    """

    def __init__(self, folder: Path, *programs: Path) -> None:
        self._memory = folder / "shell"
        self._background: list[subprocess.Popen[bytes]] = []
        self.root = _small_copy(folder / "root")
        tool = find("nats")
        first = [*programs, ROOT / ".venv/bin", *([tool.parent] if tool else [])]
        paths = [*map(str, first), os.environ["PATH"]]
        self._environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(_PERSONAL)},
            "HOME": str(folder),
            # The nats CLI takes the home of the user, whatever HOME says.
            "XDG_CONFIG_HOME": str(folder / ".config"),
            "PATH": ":".join(paths),
            "COLUMNS": "100",
        }

    def type(self, command: str, *, timeout_s: float = LINE_S) -> Said:
        """Type one command and wait for its end."""
        done = subprocess.run(
            ["bash", "-c", self._script(command)],
            cwd=self.root,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        return Said(done.returncode, done.stdout)

    def watch(self, command: str, *, meanwhile: str = "", timeout_s: float = LINE_S) -> Said:
        """Type a command that has no end; when it has said something and is silent, stop it."""
        with self._start(command) as running:
            assert running.stdout is not None
            try:
                # Some say that they listen, with --raw they do not.
                ready, _, _ = select.select([running.stdout], [], [], LISTENS_S)
                said = os.read(running.stdout.fileno(), 65536) if ready else b""
                if meanwhile:
                    other = self.type(meanwhile, timeout_s=timeout_s)
                    assert other.code == 0, f"{meanwhile}\n{other.text}"
                os.killpg(running.pid, signal.SIGINT)
                try:
                    rest, _ = running.communicate(timeout=STOP_S)
                except subprocess.TimeoutExpired:
                    os.killpg(running.pid, signal.SIGKILL)
                    rest, _ = running.communicate()
                    # That commands of others end at ctrl-C is not ours to prove.
                    if command.startswith("snapshotctl"):
                        raise
            finally:
                if running.poll() is None:
                    os.killpg(running.pid, signal.SIGKILL)
        return Said(0, (said + rest).decode("utf-8", "replace"))

    def begin(self, command: str) -> Said:
        """Type a command that runs in the background; return when it has said something."""
        running = self._start(command.removesuffix("&").rstrip())
        self._background.append(running)
        assert running.stdout is not None
        ready, _, _ = select.select([running.stdout], [], [], LINE_S)
        said = os.read(running.stdout.fileno(), 65536) if ready else b""
        return Said(running.poll() or 0, said.decode("utf-8", "replace"))

    def close(self) -> None:
        """End what runs in the background."""
        for running in self._background:
            with running:
                if running.poll() is None:
                    os.killpg(running.pid, signal.SIGKILL)
        self._background.clear()

    def _start(self, command: str) -> subprocess.Popen[bytes]:
        """Start a command in a process group of its own."""
        return subprocess.Popen(
            ["bash", "-c", f"{self._recall()}exec {command}"],
            cwd=self.root,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _recall(self) -> str:
        return f"[[ ! -f {self._memory} ]] || . {self._memory}\n"

    def _script(self, command: str) -> str:
        keep = f'{{ export -p; printf "cd %q\\n" "$PWD"; }} >{self._memory}'
        typed = f"{self._recall()}set -o pipefail\n{command.replace(*_HASTE)}\n"
        return f"{typed}code=$?\n{keep}\nexit $code\n"


def _small_copy(root: Path) -> Path:
    shutil.copytree(ROOT / "deploy/examples", root / "deploy/examples")
    for name in (".venv", ".tools", "deploy/helm"):
        if (ROOT / name).exists():
            (root / name).symlink_to(ROOT / name)
    for manifest in (root / "deploy/examples").glob("*.yaml"):
        text = manifest.read_text(encoding="utf-8")
        text = text.replace('"512"', '"32"').replace('"10"', '"1"')
        manifest.write_text(text, encoding="utf-8")
    return root


def play(block: Block, shell: Shell, *, timeout_s: float = LINE_S) -> list[Said]:
    """Type the commands of a block; AssertionError when one ends as the page does not say."""
    assert block.how is not None
    heard = []
    codes = block.how.exits or (0,) * len(block.commands)
    assert len(codes) == len(block.commands), f"{block.where} has {len(block.commands)} commands"
    for command, code in zip(block.commands, codes, strict=True):
        if block.how.until_stopped or block.how.meanwhile:
            said = shell.watch(command, meanwhile=block.how.meanwhile, timeout_s=timeout_s)
        elif command.endswith("&"):
            said = shell.begin(command)
        else:
            said = shell.type(command, timeout_s=timeout_s)
        assert said.code == code, f"{block.where} ended with {said.code}:\n{command}\n{said.text}"
        heard.append(said)
    return heard
