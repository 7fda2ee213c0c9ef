"""The steps of CI as one table, and which of them a landing runs.

CI has to end in half an hour, and the proofs take several. So a proof that takes long and rarely
finds anything new runs at every fourth landing, and each landing runs a quarter of these proofs.
The number of the landing says whose turn it is, and `.ci/landings` counts the landings. The number
of commits cannot say it, because a landing holds any number of them: whatever rule chose a proof by
the commits of a landing, some sequence of landings would never choose it, or each would choose all.

A step is one target of the Makefile. Two steps run at the same time, one of each lane. A lane is a
list that takes about half of the time: containers, clusters and CRIU, which need root; the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple

TURNS = 4
SEEDS = 500
"""How many seeds of `make scenarios` a landing runs."""
ROOMS = ("operator", "gms", "agent", "shared")
"""From which sources a landing draws bugs: all tests of a room run once without one before."""


class Lane(Enum):
    """Two lanes run side by side."""

    ROOT = "root"
    REST = "rest"


class When(Enum):
    """At which landings a step runs; the members with a number are turns."""

    FIRST, SECOND, THIRD, FOURTH = range(TURNS)
    ALWAYS = "each landing"
    PROOFS = "make proofs"


class Step(NamedTuple):
    """A target of the Makefile with its variables.

    `needs` names programs that the machine may lack: `cluster` or none. A step that `runs_again`
    after a failure runs only the tests of pytest that failed. A step without pytest has no list of
    failed tests, and some steps fail again in the same way.
    """

    name: str
    lane: Lane
    when: When = When.ALWAYS
    target: str = ""
    """The target, if the step has another name."""

    variables: Mapping[str, str] = {}
    """Variables of make and of its commands. `{count}` is the number of commits, `{first}` the
    first seed, `{turn}` the turn, from 1, `{covered}` is 1 if it is that of `cover`, and `{room}`
    one of ROOMS, the next at each fourth landing."""

    needs: str = ""
    runs_again: bool = True

    def words(self, landing: Landing) -> list[str]:
        """Return the arguments of make."""
        values = {
            "count": landing.commits,
            "first": landing.commits * SEEDS,
            "turn": landing.turn.value + 1,
            "room": ROOMS[landing.number // TURNS % len(ROOMS)],
            "covered": "1" if landing.turn is When.FIRST else "",
        }
        return [
            self.target or self.name,
            *(f"{name}={text.format(**values)}" for name, text in self.variables.items()),
        ]


class Landing(NamedTuple):
    """A push to main that CI passes: its number, the commit it began from, and how many it has."""

    number: int
    since: str
    commits: int
    """The number of all commits up to HEAD."""

    @property
    def turn(self) -> When:
        return When(self.number % TURNS)


_QUARTER = {"TURN": f"{{turn}}/{TURNS}"}
"""Of the tests that take turns (tests/support/turns.py), those of this landing."""

STEPS = (
    Step("check", Lane.REST, runs_again=False),
    # The images take 5 minutes beside these two, and 15 beside the tests.
    Step(
        "scenarios",
        Lane.REST,
        variables={"SEEDS": str(SEEDS), "FIRST": "{first}"},
        runs_again=False,
    ),
    Step("docs-test", Lane.REST, variables=_QUARTER),
    Step("test", Lane.REST, variables=_QUARTER | {"COVERED": "{covered}"}),
    # It runs what `test` leaves to it in this turn.
    Step("cover", Lane.REST, When.FIRST),
    Step("contract-servers", Lane.REST, When.FIRST),
    Step("test-wheels", Lane.REST, When.SECOND),
    Step("test-site", Lane.REST, When.SECOND),
    Step("test-browser", Lane.REST, When.SECOND),
    Step(
        "mutants-sample",
        Lane.REST,
        When.THIRD,
        target="mutants",
        # One of 12 mutants is 8 %, so only `make mutants SAMPLE=200` can judge by 5 %.
        variables={"SAMPLE": "12", "SEED": "{count}", "MOST": "0.3", "ONLY": "{room}"},
        runs_again=False,
    ),
    Step("flips", Lane.REST, When.THIRD),
    Step("test-slow", Lane.REST, When.FOURTH),
    Step("images", Lane.ROOT, needs="cluster"),
    Step("test-cluster", Lane.ROOT, variables=_QUARTER, needs="cluster"),
    Step("e2e", Lane.ROOT),
    Step("demo-cluster", Lane.ROOT, needs="cluster"),
    Step("test-process", Lane.ROOT, variables=_QUARTER),
    Step("mutants", Lane.REST, When.PROOFS, runs_again=False),
    Step("hostile", Lane.REST, When.PROOFS),
    Step("killed-clients", Lane.REST, When.PROOFS),
    Step("resume-saves", Lane.REST, When.PROOFS),
    Step("test-torch", Lane.REST, When.PROOFS),
    Step("test-gds", Lane.REST, When.PROOFS),
    Step("test-engines", Lane.ROOT, When.PROOFS),
    Step("chaos", Lane.REST, When.PROOFS, runs_again=False),
    Step("test-page", Lane.ROOT, When.PROOFS, needs="cluster"),
    Step("test-upgrades", Lane.ROOT, When.PROOFS, needs="cluster"),
)


class Due(NamedTuple):
    """The steps of a landing, and the steps that it leaves, each with the landing that runs it."""

    now: Sequence[Step]
    left: Sequence[tuple[Step, int]]


def due(landing: Landing) -> Due:
    """Return the steps of a landing."""
    turns = [step for step in STEPS if step.when not in (When.ALWAYS, When.PROOFS)]
    return Due(
        [step for step in STEPS if step.when in (When.ALWAYS, landing.turn)],
        [
            (step, landing.number + (step.when.value - landing.number) % TURNS)
            for step in turns
            if step.when is not landing.turn
        ],
    )


def landing_of(recorded: str, commits: int) -> Landing:
    """Read `.ci/landings`: a line for each landing, with the commit it began from.

    ValueError names the line that has something else.
    """
    lines = [line for line in recorded.splitlines() if line and not line.startswith("#")]
    for number, line in enumerate(lines, 1):
        if len(line) != 40 or set(line) - set("0123456789abcdef"):
            raise ValueError(f".ci/landings: landing {number} is {line!r}, not a whole commit id")
    if not lines:
        raise ValueError(".ci/landings has no landing: add the commit that this one began from")
    if len(set(lines)) < len(lines):
        raise ValueError(".ci/landings has a commit twice: each landing begins from another one")
    return Landing(len(lines), lines[-1], commits)


def lacking(need: str, environment: Mapping[str, str], root: Path) -> str:
    """Return why this machine cannot run what a step needs; nothing if it can."""
    if not need:
        return ""
    folders = [Path(environment.get("SNAPBACK_TOOLS", root / ".tools/bin")), root / ".tools/bin"]
    if environment.get("KUBECONFIG") or any((folder / "kube").exists() for folder in folders):
        return ""
    return "no programs of Kubernetes (SNAPBACK_TOOLS), nor Go to build them"
