"""What the doctor says of what was observed: each trouble is named, with its fix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from snapback_client.frames import Access, MemoryDomain
from snapshot_api.facts import Node
from snapshot_api.meta import Condition
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_shared.api import HealthReply
from snapshot_shared.errors import Failure
from snapshot_shared.frames import (
    DeviceStatus,
    DomainStatus,
    FenceStatus,
    SessionStatus,
    StatusReply,
)
from snapshot_shared.orders import LayoutRef, Presence
from snapshotctl.views import finding as views
from snapshotctl.views.finding import Finding, line, summary
from snapshotctl.views.findings import (
    Observed,
    ObservedCluster,
    ObservedMachine,
    ObservedNode,
    Stream,
    examine,
)
from tests.support import builders, objects
from tests.support.builders import row
from tests.support.objects import GIB, unready
from tests.unit.snapshotctl.conftest import assert_trouble
from tests.unit.tables import each

NOW = 1000.0


def stream(name: str, **changes: Any) -> Stream:
    durables = {
        "ORDERS": {
            "agent-node-1": "snap.order.node-1.agent.*",
            "gms-node-1": "snap.order.node-1.gms.*",
        },
        "REPORTS": {"operator": "snap.report.>"},
    }
    return Stream(name, True, (), 3, 300, 0.1, durables.get(name, {}))._replace(**changes)


def node(*, unschedulable: bool = False, **conditions: str) -> Node:
    rows = [row(kind, status, "r") for kind, status in (conditions or {"Ready": "True"}).items()]
    return builders.with_spec(builders.node(conditions=rows), unschedulable=unschedulable)


def presence(**changes: Any) -> Presence:
    there = {"artifact_root": "/artifacts", "free_bytes": 10 * GIB, "at": NOW, "version": "1.0"}
    return replace(objects.presence("node-1", gpus=1, capacity=GIB), **{**there, **changes})


def gms(
    *, devices: int = 1, fence: FenceStatus | None = None, domains: Sequence[DomainStatus] = ()
) -> StatusReply:
    sizes: dict[str, Any] = {"capacity": GIB, "used": 0, "free": GIB, "retired": 0}
    device = DeviceStatus(
        uuid="GPU-0",
        index=0,
        product="p",
        endpoint="node-1-gpu0",
        domains=[*domains],
        fence=fence,
        **sizes,
    )
    return StatusReply(node="node-1", incarnation="i", devices=[device] * devices)


def content(*conditions: Condition) -> SnapshotContent:
    return builders.content(committed=builders.committed(bytes=GIB), conditions=[*conditions])


SEEN = ObservedNode("node-1", node(), presence(), 0.01, True, gms(), "1.0")
CLUSTER = ObservedCluster(
    server="nats://a:1 (--server)",
    server_version="2.15.1",
    jetstream=None,
    streams=[stream("ORDERS"), stream("REPORTS"), stream("KV_snap_nodes")],
    health=HealthReply(version="1.0", swept_at=NOW - 10),
    operators=["1.0"],
    nodes=[SEEN],
    contents=[content()],
    dead=0,
)
LOCAL = ObservedMachine((3, 11), "2.15.1", [])


def failure(message: str, reason: str = "BusUnavailable", next_step: str = "") -> Failure:
    return Failure(reason=reason, message=message, next_step=next_step)


FORBIDDEN = failure("viewer may not", "NotPermitted")
TOO_OLD = failure("this node has CRIU 4.1", "NotEligible", "update the helper's image")


def found(
    local: ObservedMachine = LOCAL,
    cluster: ObservedCluster | None = CLUSTER,
    unreachable: Failure | None = None,
) -> list[Finding]:
    return examine(Observed(NOW, "1.0", local, unreachable, cluster))


def of(**changes: Any) -> list[Finding]:
    return found(cluster=CLUSTER._replace(**changes))


def of_orders(**changes: Any) -> list[Finding]:
    """Give what is said where the stream of orders is like this."""
    return of(streams=[stream("ORDERS", **changes), stream("REPORTS")])


def of_node(**changes: Any) -> list[Finding]:
    return of(nodes=[SEEN._replace(**changes)])


def of_presence(**changes: Any) -> list[Finding]:
    return of_node(presence=presence(**changes))


def test_a_cluster_that_is_well_has_nothing_but_ok_also_while_a_capture_fences_it() -> None:
    everything = found()
    assert [finding for finding in everything if finding.level != "ok"] == []
    assert summary(everything) == f"{len(everything)} ok, 0 warn, 0 fail"
    fenced = of_node(gms=gms(fence=FenceStatus(phase="saving", ends_in_s=9.0)))
    [shown] = [f for f in fenced if "fenced for a capture: node-1-gpu0" in f.what]
    assert shown.level == "ok"


@each(
    ("findings", "said"),
    [
        (found(LOCAL._replace(python=(3, 10))), "fail  Python 3.10 → apt install python3.11"),
        (found(LOCAL._replace(nats_server="")), "warn  no nats-server → make setup"),
        (found(LOCAL._replace(leftovers=["a"])), "warn  1 leftover of → snapshotctl leftovers"),
        (
            found(LOCAL._replace(cluster="big", ended=["node-1-gms"])),
            "fail  node-1-gms ended → snapshotctl sim restart node-1 --service gms --cluster big",
        ),
        (
            found(LOCAL._replace(cluster="big", ended=["operator"])),
            "fail  operator ended → snapshotctl sim restart operator --cluster big",
        ),
        (
            found(cluster=None, unreachable=failure("cannot")),
            "fail  connection: cannot → snapshotctl up",
        ),
        (of(server_version="2.10.3"), "fail  2.11 is needed → upgrade nats-server"),
        (of(jetstream=failure("off"), streams=[]), "fail  JetStream: off → nats account info"),
        (
            of(unstored=failure("disk is full")),
            "fail  NATS does not store what is written: disk is full → space",
        ),
        (
            of(unstored=FORBIDDEN),
            "warn  whether NATS stores what is written cannot be tried: viewer may not → NATS_NKEY",
        ),
        (
            of_orders(exists=False, durables={}),
            "fail  stream ORDERS is missing → restart the operator",
        ),
        (
            of(streams=[*CLUSTER.streams, stream("KV_x", differs=("max_age",))]),
            "warn  bucket x has other settings: max_age → restart the operator",
        ),
        (
            of_orders(durables={}),
            "fail  durable gms-node-1 of ORDERS is missing → restart the gms of node-1",
        ),
        (
            of(streams=[stream("ORDERS"), stream("REPORTS", durables={"operator": "x"})]),
            "fail  durable operator of REPORTS takes x → restart the operator",
        ),
        (of_orders(fill=0.8), "fail  80% full (3 orders): nothing new begins → snapshotctl orders"),
        (of_orders(fill=0.5), "warn  50% full → snapshotctl orders"),
        (
            of_orders(paused=frozenset({"agent-node-1"})),
            (
                "warn  durable agent-node-1 of ORDERS is paused"
                " → nats consumer resume ORDERS agent-node-1"
            ),
        ),
        (of(health=None), "fail  no operator answers → docs/architecture.md"),
        (
            found(LOCAL._replace(cluster="big"), CLUSTER._replace(health=None)),
            "fail  no operator answers → snapshotctl sim restart operator --cluster big",
        ),
        (
            of(health=None, refused=FORBIDDEN),
            "warn  the health of the operator cannot be requested: viewer may not → NATS_NKEY",
        ),
        (of(operators=["1.0", "0.9"]), "warn  version 0.9 is used → same version"),
        (of(health=HealthReply(version="1.0")), "warn  has not swept → snapshotctl doctor"),
        (
            of(health=HealthReply(version="1.0", swept_at=NOW, ahead_s=-172_800.0)),
            "warn  operator's machine is 172800.0 s behind the API server's → set-ntp",
        ),
        (
            of(health=HealthReply(version="1.0", swept_at=NOW - 91)),
            "fail  the last sweep was 91s ago → operator's log",
        ),
        (of(nodes=[]), "warn  there are no nodes → snapshotctl up"),
        (
            of_node(presence=None, node=node(Ready="False", Lost="True")),
            "fail  node-1 is not there (Lost) → snapshotctl delete node node-1",
        ),
        (of_node(node=node(unschedulable=True)), "warn  cordoned → snapshotctl uncordon node-1"),
        (of_node(node=None), "warn  unknown to the operator → snapshotctl explain node/node-1"),
        (of_node(skew_s=-2.5), "warn  is 2.5 s behind the server's → timedatectl set-ntp"),
        (of_node(skew_s=60.0), "fail  is 60.0 s ahead of the server's → timedatectl set-ntp"),
        (of_presence(free_bytes=1), "fail  1 B free below /artifacts → delete"),
        (of_presence(free_bytes=GIB - 1), "fail  the largest snapshot → delete"),
        (of_presence(free_bytes=GIB), "warn  room for one more → delete"),
        (
            of(contents=[], nodes=[SEEN._replace(presence=presence(free_bytes=0))]),
            "fail  0 B free below /artifacts: no capture fits there → free space",
        ),
        (
            of(contents=[], nodes=[SEEN._replace(presence=presence(free_bytes=GIB // 2))]),
            "warn  512 MiB free below /artifacts, a GPU there has 1 GiB → free space",
        ),
        (of_presence(schemas=[9]), "fail  understands messages [9] → upgrade"),
        (of_presence(version="0.9"), "warn  agent of node-1 is 0.9 → install 1.0"),
        (
            of_presence(unready=unready(TOO_OLD, "criu", "criu+cuda")),
            (
                "fail  node-1 cannot use the process driver criu or criu+cuda: "
                "this node has CRIU 4.1 → update the helper's image"
            ),
        ),
        (
            of_presence(unready=unready(failure("mute"), "criu")),
            "fail  criu: mute → see the log of the helper on node-1",
        ),
        (of_node(gms_version="2.0"), "warn  GMS of node-1 is 2.0 → install 1.0 on node-1"),
        (of_node(agent_answers=False), "fail  agent of node-1 does not answer → restart"),
        (of_node(gms=None), "fail  GMS of node-1 does not answer → restart the GMS"),
        (of_node(gms=gms(devices=2)), "warn  has 2 GPUs, the agent 1 → wait 10 s"),
        (
            of(contents=[content(row("Quarantined", "True", "ArtifactCorrupt"))]),
            (
                "warn  artifact of snapshot default/snap is quarantined: ArtifactCorrupt"
                " → snapshotctl verify snapshotcontent/snap"
            ),
        ),
        (of(dead=2), "warn  2 dead letters → snapshotctl dead ls"),
    ],
)
def test_each_trouble_is_named_with_its_fix(findings: list[Finding], said: str) -> None:
    assert_trouble(findings, said)
    assert [finding for finding in findings if finding.level != "ok" and not finding.fix] == []


def test_memory_that_no_pod_has_is_named_where_this_machine_can_free_it() -> None:
    layout = LayoutRef(
        device="GPU-0", incarnation="i", generation=1, layout_id="l", structure_hash="s", bytes=1
    )
    domain = DomainStatus(domain=MemoryDomain.WEIGHTS, lock="committed", layout=layout)
    session = SessionStatus(session=1, access=Access.RO, client="c", pid=1, state="active")
    of_cluster = LOCAL._replace(cluster="c", sockets="/sockets")

    def left(
        local: ObservedMachine = of_cluster, domain: DomainStatus = domain, **more: Any
    ) -> Any:
        seen = SEEN._replace(gms=gms(domains=[domain]))
        said = found(local, CLUSTER._replace(nodes=[seen], **more))
        return [each for each in said if "that no pod has" in each.what]

    [finding] = left()
    assert finding.level == "warn"
    assert finding.fix == "gms drop --device GPU-0 --socket-dir /sockets/node-1"
    assert left(held=frozenset({"GPU-0"})) == []
    assert left(domain=replace(domain, sessions=[session])) == []
    assert left(domain=replace(domain, layout=None)) == []
    # In a cluster the memory servers of pods have the devices.
    assert left(local=LOCAL) == []


def test_a_node_without_nvidias_driver_is_well_and_says_what_it_captures_with() -> None:
    none = Failure(reason="NotEligible", message="none is loaded", values={"found": "none"})
    findings = of_presence(drivers=["criu"], criu="4.2", unready=unready(none, "criu+cuda"))
    assert [finding.what for finding in findings if "CRIU" in finding.what] == [
        "node-1 captures and restores processes with CRIU 4.2"
    ]
    assert [finding for finding in findings if finding.level != "ok"] == []


def test_a_finding_is_one_line_that_ends_with_its_fix() -> None:
    assert line(views.ok("well")) == "ok    well"
    assert line(views.fail("ill", "do this")) == "fail  ill  → do this"
    findings = found(cluster=None, unreachable=failure("a\nb\x1b[2J"))
    [shown] = [finding for finding in findings if "connection" in finding.what]
    assert "\n" not in line(shown)
    assert "\x1b" not in line(shown)
