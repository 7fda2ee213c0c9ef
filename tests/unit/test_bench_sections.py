"""The benchmarks that write one section each: what counts as missed, and what the section says."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, cast

import nats
import pytest
from msgspec.structs import replace
from nats.aio.msg import Msg
from nats.js import JetStreamContext

from snapshot_shared.spans import SpanRecord
from tests.bench import agent, beside, bus, engines, operator_cluster, pause
from tests.bench.bus import ANSWER, BEGIN, REQUEST
from tests.bench.bus_server import carry_out, node_of, pulled
from tests.bench.common import MIB, ROOT, Judged
from tests.bench.operator_cluster import CAPTURES
from tests.bench.pause import RESTORE_STEPS, STEPS

MACHINE = {"cores": "2"}
MET, MISSED, UNCLEAR = "met", "missed", "inconclusive"


def verdicts(found: Iterable[Judged]) -> list[str]:
    return [line.verdict for line in found]


# Dumps and restores of processes.


def dumped(dump: float = 1.0, restore: float = 1.1, more: float = 0.0) -> agent.Turn:
    """Give a turn in which CRIU and fsync, CRIU's restore, and 0.7 of the disk take a second."""
    return agent.Turn(
        size=1024 * MIB,
        dump={"snapback": dump + more, "criu": 0.8, "criu, fsync": 1.0, "disk": 0.7},
        frozen={"snapback": 0.6, "criu": 0.5},
        cached={"snapback": restore + more, "criu": 1.0},
        cold={"snapback": restore + more, "criu": 1.0},
    )


def of_agent(*turns: agent.Turn, others: float = 0.0) -> agent.Results:
    return agent.Results(machine=MACHINE, heap=1024 * MIB, others=others, turns=list(turns))


SCATTERED = (0, -0.6, 0.7, -0.7, 0.8)


@pytest.mark.parametrize(
    ("dump", "restore", "more", "others", "wanted"),
    [
        (1.0, 1.1, (0, -0.001, -0.002, 0, -0.003), 0.0, [MET] * 4),
        (1.2, 1.1, (0,) * 5, 0.0, [MISSED, MISSED, MET, MET]),
        (1.0, 1.33, (0,) * 5, 0.0, [MET, MET, MISSED, MISSED]),
        (1.3, 1.4, (0,) * 5, 0.3, [UNCLEAR] * 4),
        (1.3, 1.4, SCATTERED, 0.0, [UNCLEAR] * 4),
    ],
)
def test_dumps_and_restores_are_compared_with_those_of_criu(
    dump: float, restore: float, more: Sequence[float], others: float, wanted: list[str]
) -> None:
    turns = [dumped(dump, restore, each) for each in more]
    assert verdicts(agent.judged(of_agent(*turns, others=others))) == wanted


def test_the_section_of_dumps_has_every_contender() -> None:
    text = agent.BENCH.section(of_agent(dumped()))
    assert "| dump | raw write limit | ≥ 0.7 x | 0.70 x | met |" in text
    assert "| dump, not durable | criu | 800 | 800 … 800 |" in text


# Weights beside a process.


def of_beside(weights: float, heap: float, both: Sequence[float]) -> beside.Results:
    def turns(totals: Sequence[float]) -> list[beside.Turn]:
        return [beside.Turn(total=total, verbs={"load": total, "restore": 0.1}) for total in totals]

    found = {
        beside.WEIGHTS: turns([weights] * 3),
        beside.HEAP: turns([heap] * 3),
        beside.BOTH: turns(both),
    }
    return beside.Results(machine=MACHINE, weights=1024 * MIB, heap=512 * MIB, turns=found)


@pytest.mark.parametrize(
    ("weights", "heap", "both", "verdict"),
    [
        (2.0, 1.0, [2.0 * beside.GOAL] * 3, MET),
        (1.0, 2.0, [2.1] * 3, MET),
        (2.0, 1.5, [3.5] * 3, MISSED),
        (2.0, 1.5, [1.0, 3.5, 9.0], UNCLEAR),
    ],
)
def test_weights_and_process_together_are_compared_with_the_longer_of_the_two(
    weights: float, heap: float, both: list[float], verdict: str
) -> None:
    assert verdicts(beside.judged(of_beside(weights, heap, both))) == [verdict]


def test_the_section_of_weights_has_the_goal_and_what_each_verb_took() -> None:
    text = beside.BENCH.section(of_beside(2.0, 1.0, [2.0, 2.5, 3.0]))
    assert "both together against the longer of them (weights) | ≤ 1.1 x | 1.25 x | missed" in text
    assert "| both | 2.50 (3.00 … 2.00) | - | 0.10 (0.10 … 0.10) | 2.50 (3.00 … 2.00) |" in text


# Orders and reports.


def of_bus(
    *,
    begins_s: float = 0.002,
    answer_s: float = 0.003,
    ours: tuple[float, ...] = (3500.0,) * 5,
    peer: float | None = 2000.0,
    others: float = 0.0,
) -> bus.Results:
    seconds = {REQUEST: 0.001, BEGIN: begins_s, ANSWER: answer_s}
    a_second = {"snapback": list(ours), **({bus.PEER: [peer] * 5} if peer else {})}
    return bus.Results(
        machine=MACHINE,
        calls=500,
        orders=3000,
        seconds={f"{row}, p99": {"snapback": [value] * 5} for row, value in seconds.items()},
        a_second=a_second,
        cpu={name: [0.0003] * 5 for name in a_second},
        others=others,
    )


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (of_bus(), [MET] * 4),
        (of_bus(begins_s=0.0026), [MISSED, MET, MET, MET]),
        (of_bus(answer_s=0.0041), [MET, MISSED, MET, MET]),
        (of_bus(ours=(2999.0,) * 5, peer=1000.0), [MET, MET, MISSED, MET]),
        (of_bus(peer=2800.0), [MET, MET, MET, MISSED]),
        (of_bus(peer=None), [MET, MET, MET, "not measured"]),
        (
            of_bus(begins_s=1.0, ours=(2500.0,) * 5, peer=1000.0, others=0.5),
            [UNCLEAR, MET, UNCLEAR, UNCLEAR],
        ),
        (
            of_bus(ours=(500.0, 600.0, 2000.0, 2900.0, 2950.0), peer=1000.0),
            [MET, MET, UNCLEAR, MET],
        ),
    ],
)
def test_each_goal_of_orders_can_be_missed_alone(found: bus.Results, wanted: list[str]) -> None:
    assert verdicts(bus.judged(found)) == wanted


def test_the_section_of_orders_names_every_contender() -> None:
    text = bus.BENCH.section(of_bus())
    assert "| snapback | 3,500 |" in text
    assert "| faststream | 2,000 |" in text


async def test_every_contender_answers_an_order_with_two_reports() -> None:
    published: list[str] = []

    async def publish(subject: str, _data: bytes) -> None:
        published.append(subject.rpartition(".")[2])

    _, data = bus.Orders().next(node_of("nats-py"))
    await carry_out("nats-py", data, publish)
    assert published == ["accepted", "verified"]


class Quiet:
    """A consumer of nats-py that has nothing twice, then one message."""

    def __init__(self, message: Msg) -> None:
        self._answers = [TimeoutError(), nats.errors.TimeoutError(), [message]]

    async def fetch(self, _batch: int, timeout: float) -> list[Msg]:
        match self._answers.pop(0):
            case BaseException() as error:
                raise error
            case messages:
                return messages


async def test_a_contender_goes_on_whichever_timeout_nats_py_raises() -> None:
    message = Msg(None, "order")  # type: ignore[arg-type]
    source = cast("JetStreamContext.PullSubscription", Quiet(message))
    assert await anext(pulled(source)) is message


# Engines.

GET = engines.Request("/", method="GET")
ENGINE = engines.Engine(
    "a", "", "criu", ["serve", "{port}"], GET, GET, ["wrap", "--"], {"PORT": "{port}"}
)


def answered(
    cold: float, restore: float, nap: float | None = None, weights: int = 0
) -> engines.Turn:
    return engines.Turn(
        alone=None if weights else 1.0,
        cold=cold,
        nap=nap,
        restore=restore,
        weights=weights,
        artifact=weights + MIB,
    )


def test_the_table_of_engines_has_medians_the_extremes_and_how_much_faster_a_restore_is() -> None:
    found = engines.Results(
        machine=MACHINE,
        models={"a, criu": "", "b, cooperative": "magika"},
        model_bytes=3 * MIB,
        turns={
            "a, criu": [answered(2.0, 0.5), answered(4.0, 0.4), answered(2.2, 9.0)],
            "b, cooperative": [answered(1.0, 2.0, nap=0.25, weights=3 * MIB)],
        },
        absent={"c, criu": "run: make criu"},
    )
    lines = engines.BENCH.section(found).splitlines()
    rows = [[cell.strip() for cell in line.split("|")] for line in lines if line.startswith("| ")]
    assert rows[1][1:10] == [
        *("a, criu", "none", "-", "1 MiB", "1 (1 … 1)"),
        *("2.2 (2 … 4)", "-", "0.5 (0.4 … 9)", "4.40 x as fast"),
    ]
    assert rows[2][1:10] == [
        *("b, cooperative", "magika, 3 MiB", "3 MiB", "4 MiB", "-"),
        *("1 (1 … 1)", "0.25 (0.25 … 0.25)", "2 (2 … 2)", "0.50 x as fast"),
    ]
    assert "- c, criu was not run: run: make criu" in lines


def test_an_engine_serves_on_its_port_and_a_restored_one_on_the_other_node() -> None:
    cold, restored = (
        engines.pod(ENGINE, name, ROOT, 81, of) for name, of in (("x", ""), ("y", "x"))
    )
    [container] = cold["spec"]["containers"]
    assert container["command"] == ["wrap", "--", "serve", "81"]
    assert container["env"] == [{"name": "PORT", "value": "81"}]
    assert "resources" not in container
    assert cold["metadata"]["annotations"] == {"nvidia.com/capture-driver": "criu"}
    assert restored["metadata"]["annotations"] == {"nvidia.com/restore-from": "x"}
    assert engines.TARGET in restored["spec"]["nodeSelector"].values()
    assert restored["spec"]["containers"] == cold["spec"]["containers"]


# The operator on an API server.


def of_operator(**changes: float) -> dict[str, list[float]]:
    good = {"mb": 180.0, "cpu_s": 0.5, "events_a_s": 30000.0, "reconciles_a_s": 5000.0}
    live = {"most_mb": 200.0, "event_checkpoint_s": 0.0001, "event_pod_s": 0.0002}
    return {what: [value] * 5 for what, value in {**good, **live, **changes}.items()}


def calls(unchanged: int = 0) -> operator_cluster.Calls:
    found = Counter({"POST jobs": CAPTURES}), Counter({"GET jobs": unchanged})
    return operator_cluster.Calls(*found)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({}, [MET] * 4),
        ({"mb": 181.0}, [MISSED, MET, MET, MET]),
        ({"cpu_s": 0.51}, [MET, MISSED, MET, MET]),
        ({"events_a_s": 29999.0}, [MET, MET, MISSED, MET]),
        ({"reconciles_a_s": 4999.0}, [MET, MET, MET, MISSED]),
    ],
)
def test_each_goal_of_the_operator_can_be_missed_alone(
    change: dict[str, float], wanted: list[str]
) -> None:
    assert verdicts(operator_cluster.judged(of_operator(**change), 10_000)) == wanted


def test_one_call_for_what_has_not_changed_is_too_many() -> None:
    assert verdicts(operator_cluster.judged_calls(calls())) == [MET, MET]
    assert verdicts(operator_cluster.judged_calls(calls(unchanged=1))) == [MET, MISSED]


def test_the_section_of_the_operator_says_which_contender_is_not_installed() -> None:
    samples = {"snapback": of_operator(), "kubernetes_asyncio": of_operator(cpu_s=3.0)}
    rows = operator_cluster.judged(samples["snapback"], 10_000)
    options = argparse.Namespace(count=10_000, rounds=5)
    text = operator_cluster.section(options, 0.1, rows, samples, calls())
    assert "| snapback | 0.50 | 180 | 200 | 100 | 200 |" in text
    assert "| kubernetes_asyncio | 3.00 |" in text
    assert "| kopf | not installed |" in text


# The pause of a worker.

SMALL, LARGE = 64 * MIB, 512 * MIB


def paused(pause_s: float, restore_s: float = 0.6, size: int = SMALL, **more: Any) -> pause.Turn:
    """Give a turn on a disk that reads the weights in 0.2 s."""
    found = pause.Turn(
        pause=pause_s,
        steps=dict.fromkeys(STEPS, pause_s / 10),
        saving=0.1,
        own_bytes=1000,
        restore=restore_s,
        answer=0.01,
        restore_steps=dict.fromkeys(RESTORE_STEPS, restore_s / 10),
        unmap=0.01,
        touch=0.0,
        read_limit=size / 0.2,
        write_limit=1e9,
    )
    return replace(found, **more)


def of_pause(*turns: list[pause.Turn]) -> pause.Results:
    return pause.Results(machine=MACHINE, turns=dict(zip((SMALL, LARGE), turns, strict=False)))


def similar(pause_s: float, restore_s: float = 0.6, size: int = SMALL) -> list[pause.Turn]:
    return [paused(pause_s + more / 1000, restore_s, size) for more in (0, 1, -1, 0, 2)]


STEADY = similar(0.1)


def changed(**more: Any) -> list[pause.Turn]:
    return [replace(turn, **more) for turn in STEADY]


@pytest.mark.parametrize(
    ("small", "large", "wanted"),
    [
        pytest.param(STEADY, STEADY, [MET] * 10, id="equal and short"),
        pytest.param(
            STEADY, similar(0.3, 0.9, LARGE), [MET] * 4 + [MISSED] * 6, id="grows with weights"
        ),
        pytest.param(
            STEADY,
            [paused(turn.pause + 0.03, unmap=0.04) for turn in STEADY],
            [MET] * 8 + [MISSED, MET],
            id="grows only by pages to give back",
        ),
        pytest.param(
            *[changed(restore=0.9, touch=0.4)] * 2,
            [MET, MISSED, *[MET] * 8],
            id="waits only for new memory",
        ),
        pytest.param(
            *[changed(restore=0.9, answer=0.4)] * 2,
            [MET, MISSED, MISSED, *[MET] * 7],
            id="answers late at any time",
        ),
        pytest.param(
            STEADY,
            [paused(each) for each in (0.05, 0.2, 0.3, 0.6, 0.9)],
            [MET] * 4 + [UNCLEAR, MET, MET, MET, MET, MET],
            id="scattered",
        ),
    ],
)
def test_what_makes_a_pause_or_a_restore_long_is_told_apart(
    small: list[pause.Turn], large: list[pause.Turn], wanted: list[str]
) -> None:
    assert verdicts(pause.judged(of_pause(small, large))) == wanted


def test_the_pause_is_from_the_wish_to_be_quiet_until_the_worker_is_let_go() -> None:
    steps = {"gate": (1, 5), "signal": (90, 95), "write": (80, 200), "quiesce": (10, 20)}
    spans = [
        SpanRecord(
            trace_id="a" * 32,
            span_id=name,
            name=name,
            service="s",
            node="n",
            start_ns=start,
            end_ns=end,
        )
        for name, (start, end) in steps.items()
    ]
    assert pause.pause(spans) == (10, 95)
