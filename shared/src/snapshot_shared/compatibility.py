"""What a node has to have in common with the source of an artifact: one table, and its verdicts.

The agent and its helper refuse a restore by it, `snapshotctl artifacts diff` shows what they would
say, and docs/compatibility.md is made from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, NamedTuple

from snapshot_shared.artifact import Facts
from snapshot_shared.errors import Incompatible
from snapshot_shared.orders import Driver

Rule = Literal["equal", "not older", "at least", "all of", "shown"]
"""How the fact of a node is compared with that of the source.

`not older` compares the first two numbers of versions, `at least` counts, `all of` sets. What is
`shown` is no reason to refuse anything.
"""
Outcome = Literal["same", "fits", "differs", "refused", "unknown"]

CRIU: tuple[Driver, ...] = ("criu", "criu+cuda")

WAITS = "waits"
"""The protocol of a worker that was quiet from its empty `ready-for-snapshot` on.

It reads `snapshot-complete` and `restore-complete` and writes no other control file. Workers of
Dynamo do so.
"""
ANSWERS = "answers"
"""The protocol of a worker that answers the agent by `quiesced` and `restored`."""


class Fact(NamedTuple):
    """A row of the table: a field of `Facts`, and what it means for a restore.

    With `drivers` it is compared for artifacts of these alone. `step` is what to do when a node
    does not fit; `{}` in it is what is needed.
    """

    name: str
    title: str
    rule: Rule
    origin: str
    why: str
    step: str = "restore on a node that has {}"
    drivers: tuple[Driver, ...] = ()


FACTS = (
    Fact(
        "driver",
        "process driver",
        "equal",
        "the capture",
        "Only the driver that has written the state of a process can read it.",
        "restore with the driver of the artifact, {}, on a node that has it: snapshotctl nodes",
    ),
    Fact(
        "arch",
        "architecture",
        "equal",
        "`uname -m` of the node",
        "The state of a process is that of its instructions.",
    ),
    Fact(
        "kernel",
        "Linux",
        "not older",
        "`uname -r` of the node",
        "Linux keeps what programs rely on from version to version, but a program that was started "
        "on a newer one may use what an older one lacks. It found that out when it began, and does "
        "not ask again; nor can CRIU set up on an older kernel what it has read from a newer one.",
        "restore on a node with Linux {} or later",
        CRIU,
    ),
    Fact(
        "criu",
        "CRIU",
        "not older",
        "`criu --version` in the container `helper`",
        "CRIU reads images of its own and of earlier versions.",
        "update the helper's image on this node to one with CRIU {} or later",
        CRIU,
    ),
    Fact(
        "cpu",
        "instructions of the processor",
        "all of",
        "`/proc/cpuinfo` of the node",
        "Libraries choose among their variants once, when a process starts.",
        "restore on a node with a processor of the source's kind or a later one",
        CRIU,
    ),
    Fact(
        "cuda_driver",
        "NVIDIA driver",
        "equal",
        "`/proc/driver/nvidia/version` of the node",
        "A process has the library of its driver mapped, which speaks to that one module only.",
        "restore on a node with the NVIDIA driver {}",
        ("criu+cuda",),
    ),
    Fact(
        "device_product",
        "GPU product",
        "equal",
        "the devices of the pod",
        "Kernels and layouts of memory are made for one product.",
    ),
    Fact(
        "devices",
        "number of GPUs",
        "at least",
        "the devices of the pod",
        "The worker has weights on each. A pod has to have exactly as many.",
        "restore on a node with {} GPUs",
    ),
    Fact(
        "image_digest",
        "image digest",
        "shown",
        "`status.containerStatuses[].imageID` of the pod; none in standalone mode",
        "The same image has other digests where it was pulled from elsewhere. CRIU itself refuses "
        "a process whose libraries are other ones in the new container.",
    ),
    Fact("image", "image", "shown", "the spec of the pod", "As above."),
    Fact(
        "command",
        "command",
        "shown",
        "the spec of the pod",
        "A restored process goes on where it was, whatever the command of its new container is.",
    ),
    Fact(
        "python",
        "Python of the agent",
        "shown",
        "the agent of the node",
        "Nothing of it is in an artifact.",
    ),
    Fact(
        "protocol",
        "protocol of the worker",
        "shown",
        "`ready-for-snapshot` of the worker",
        f"A worker that `{ANSWERS}` says by the file `restored` that it serves again. The restore "
        f"of a worker that `{WAITS}` ends with `restore-complete`, and the probes of its pod say "
        "when it serves.",
        drivers=CRIU,
    ),
)


class Verdict(NamedTuple):
    """What a fact of a source means for a node, with both values as text.

    `needed` is what the node would have to have for it not to be `refused`.
    """

    fact: Fact
    source: str
    here: str
    outcome: Outcome
    needed: str = ""


def verdicts(source: Facts, here: Facts) -> list[Verdict]:
    """Return a verdict for each row of the table that the driver of the source is concerned by.

    A fact that one side does not know is `unknown`, and never refused.
    """
    return [
        _verdict(fact, source, here)
        for fact in FACTS
        if not fact.drivers or source.driver in fact.drivers
    ]


def _verdict(fact: Fact, source: Facts, here: Facts) -> Verdict:
    there, found = getattr(source, fact.name), getattr(here, fact.name)
    texts = fact, shown(there), shown(found)
    if not there or not found:
        return Verdict(*texts, "unknown")
    if there == found:
        return Verdict(*texts, "same")
    if fact.rule == "shown":
        return Verdict(*texts, "differs")
    needed = _NEEDED[fact.rule](there, found)
    return Verdict(*texts, "refused" if needed else "fits", shown(needed))


def refusal(source: Facts, here: Facts) -> Incompatible | None:
    """Return why an artifact is not restored on a node, with both values, or None."""
    for fact, there, found, outcome, needed in verdicts(source, here):
        if outcome != "refused":
            continue
        message = f"the {fact.title} of the source was {there}, here it is {found}"
        if fact.rule == "all of":
            # All of both would be hundreds of words.
            message = f"the source had {needed} among the {fact.title}, which are missing here"
        return Incompatible(
            message, next_step=fact.step.format(needed), fact=fact.name, expected=there, found=found
        )
    return None


OF_THE_KERNEL = frozenset({"user_shstk", "xsaveerptr", "xsaves"})
"""Flags of a processor that no program uses as instructions, and that a newer kernel may hide."""


def shown(value: object) -> str:
    """Return a fact as text, empty when it is not known."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value or "")


def _version(text: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)", text)
    return tuple(map(int, found.groups())) if found else ()


def _newer(there: str, here: str) -> str:
    wanted, found = _version(there), _version(here)
    return ".".join(map(str, wanted)) if wanted and found and found < wanted else ""


_NEEDED: dict[Rule, Callable[..., object]] = {
    "equal": lambda there, _: there,
    "not older": _newer,
    "at least": lambda there, here: there if here < there else 0,
    "all of": lambda there, here: sorted({*there} - {*here} - OF_THE_KERNEL),
}
"""What two different values leave to be needed; empty when the second one will do."""
