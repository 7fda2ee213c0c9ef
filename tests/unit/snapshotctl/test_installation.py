"""What the doctor says of an installation of the chart and of clones: each trouble has its fix."""

from __future__ import annotations

from typing import Any

from snapshot_operator.kube.policies import policies
from snapshot_shared.errors import Failure
from snapshotctl.views.clones import clone_findings
from snapshotctl.views.finding import Finding
from snapshotctl.views.installation import (
    DEFINITIONS,
    KEYS,
    Asked,
    SeenInstallation,
    artifact_claim,
    home,
    installation_findings,
    policy_names,
)
from tests.unit.snapshotctl.conftest import assert_trouble
from tests.unit.tables import each

SPACE, NAME = "snapback-system", "snapback"
FORBIDDEN = Asked(failure=Failure(reason="NotPermitted", message="ada may not"))


def labels(component: str) -> dict[str, str]:
    return {"app.kubernetes.io/part-of": "snapback", "app.kubernetes.io/component": component}


def definition(name: str, *, owner: str = "snapback", established: str = "True") -> dict[str, Any]:
    rows = [
        {"type": "NamesAccepted", "status": "True", "message": "names are in use"},
        {"type": "Established", "status": established},
    ]
    named = {"app.kubernetes.io/part-of": owner} if owner else {}
    return {"metadata": {"name": name, "labels": named}, "status": {"conditions": rows}}


def workload(kind: str, component: str, *, replicas: int = 1, **status: Any) -> dict[str, Any]:
    meta = {"namespace": SPACE, "name": f"{NAME}-{component}", "labels": labels(component)}
    good = {"readyReplicas": replicas, "updatedReplicas": replicas, "observedGeneration": 2}
    return {
        "kind": kind,
        "metadata": {**meta, "generation": 2},
        "spec": {"replicas": replicas},
        "status": {**good, **status},
    }


def daemon_set(
    volume: dict[str, Any] | None = None, *, helper: bool = True, **status: Any
) -> dict[str, Any]:
    good = {"desiredNumberScheduled": 2, "numberReady": 2, "updatedNumberScheduled": 2}
    found = workload("DaemonSet", "node", **{**good, **status})
    names = ["agent", "guards", *(["helper"] if helper else []), "gms"]
    artifacts = volume or {"hostPath": {"path": "/var/lib/snapback/artifacts"}}
    found["spec"] = {
        "template": {
            "spec": {
                "containers": [{"name": name} for name in names],
                "volumes": [{"name": "tmp"}, {"name": "artifacts", **artifacts}],
            }
        }
    }
    return found


def pod(*rows: dict[str, Any], node: str = "node-1", **status: Any) -> dict[str, Any]:
    return {
        "kind": "Pod",
        "metadata": {"namespace": SPACE, "name": "p", "labels": labels("node")},
        "spec": {"nodeName": node} if node else {},
        "status": {"containerStatuses": list(rows), **status},
    }


def container(waiting: str = "", said: str = "", ended: str = "") -> dict[str, Any]:
    return {
        "name": "helper",
        "state": {"waiting": {"reason": waiting, "message": said}} if waiting else {"running": {}},
        "lastState": {"terminated": {"reason": ended}} if ended else {},
    }


def claim(*modes: str, phase: str = "Bound") -> dict[str, Any]:
    spec = {"accessModes": list(modes)}
    return {"metadata": {"name": "shared"}, "spec": spec, "status": {"phase": phase}}


UNPLACED = {"type": "PodScheduled", "status": "False"}
ON_CLAIM = {"persistentVolumeClaim": {"claimName": "shared"}}
OPERATOR = workload("Deployment", "operator")
NATS = workload("StatefulSet", "nats")
WORKLOADS = (daemon_set(), OPERATOR, NATS, pod(container()))
HOOK = {"name": "objects.snapback.nvidia.com", "clientConfig": {"caBundle": "LS0t"}}
POLICY = [
    {"kind": kind, "metadata": {"name": name}, "spec": {"validationActions": ["Deny"]}}
    for name in policy_names(NAME)
    for kind in ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
]
WARNS = {**POLICY[5], "spec": {"validationActions": ["Warn"]}}
SEEN = SeenInstallation(
    policies=Asked(POLICY),
    definitions=Asked([definition(name) for name in DEFINITIONS]),
    webhooks=Asked([{"webhooks": [HOOK]}]),
    workloads=Asked(WORKLOADS),
    keys=Asked([{"metadata": {"name": f"{NAME}-nats-{word}"}} for word in KEYS]),
)


def of(**changes: Asked) -> list[Finding]:
    return list(installation_findings(SEEN._replace(**changes)))


def of_definitions(**changes: str) -> list[Finding]:
    """What is said where each of our kinds is defined like this."""
    return of(definitions=Asked([definition(name, **changes) for name in DEFINITIONS]))


def of_workloads(*items: dict[str, Any]) -> list[Finding]:
    """What is said of these in place of those that have their kind."""
    kinds = {(item["kind"], item["metadata"]["name"]) for item in items}
    kept = [item for item in WORKLOADS if (item["kind"], item["metadata"]["name"]) not in kinds]
    return of(workloads=Asked([*kept, *items]))


def on_claim(*claims: dict[str, Any]) -> list[Finding]:
    workloads = Asked([daemon_set(ON_CLAIM), *WORKLOADS[1:]])
    return of(workloads=workloads, claims=Asked(claims))


def test_the_policies_are_those_that_the_operator_declares() -> None:
    declared = {each["metadata"]["name"] for each in policies("other")}
    assert declared == {*policy_names("other")}


def test_an_installation_that_is_well_or_begins_has_nothing_but_ok() -> None:
    for found in (of(), of_workloads(daemon_set(helper=False)), on_claim(claim("ReadWriteMany"))):
        assert [finding for finding in found if finding.level != "ok"] == []
        assert len(found) == 9
    begins = pod(container("ContainerCreating"), container("PodInitializing"))
    assert [finding for finding in of_workloads(begins) if finding.level != "ok"] == []


@each(
    ("found", "said"),
    [
        (of(definitions=Asked()), "fail  snapshots.nvidia.com is not defined → deploy/crds"),
        (
            of_definitions(owner="dynamo"),
            "fail  snapshots.nvidia.com belongs to dynamo → crds.install=adopt",
        ),
        (
            of_definitions(owner=""),
            "fail  snapshots.nvidia.com belongs to another product → remove that product",
        ),
        (
            of_definitions(established="False"),
            (
                "fail  snapshots.nvidia.com is not served yet: names are in use"
                " → kubectl describe crd snapshots.nvidia.com"
            ),
        ),
        (of(definitions=FORBIDDEN), "warn  our kinds cannot be looked at: ada may not → can-i"),
        (
            of(policies=Asked(POLICY[1:])),
            "fail  statuses.snapback.nvidia.com is missing → helm upgrade",
        ),
        (
            of(policies=Asked([*POLICY[:5], WARNS, *POLICY[6:]])),
            "fail  made-objects.snapback.nvidia.com is missing or denies nothing → helm upgrade",
        ),
        (of(policies=FORBIDDEN), "warn  the admission policies cannot be looked at → can-i"),
        (of(webhooks=Asked()), "warn  there are no webhooks → webhooks.enabled"),
        (
            of(webhooks=Asked([{"webhooks": [{**HOOK, "clientConfig": {}}]}])),
            (
                "fail  no authority for objects.snapback.nvidia.com"
                " → kubectl logs --namespace snapback-system deployment/snapback-operator"
            ),
        ),
        (
            of(tried=Asked(failure=Failure(reason="InvalidManifest", message="failed calling"))),
            "fail  an object that is valid is refused: failed calling → port 9443",
        ),
        (of(tried=FORBIDDEN), "warn  whether the webhooks are reached cannot → can-i"),
        (of(workloads=Asked()), "fail  there is no DaemonSet → docs/kubernetes.md"),
        (of(workloads=FORBIDDEN), "warn  the pods of Snapback cannot be looked at → can-i"),
        (
            of_workloads(daemon_set(desiredNumberScheduled=0)),
            "fail  DaemonSet snapback-node is for no node → nodeSelector",
        ),
        (
            of_workloads(daemon_set(numberReady=1)),
            (
                "fail  DaemonSet snapback-node is ready on 1 of 2 nodes"
                " → kubectl rollout status --namespace snapback-system daemonset/snapback-node"
            ),
        ),
        (
            of_workloads(daemon_set(updatedNumberScheduled=1)),
            "warn  snapback-node is of this version on 1 of 2 nodes → rollout status",
        ),
        (
            of_workloads(workload("Deployment", "operator", replicas=0)),
            "warn  Deployment snapback-operator has no pods → --own-operator",
        ),
        (
            of_workloads(workload("StatefulSet", "nats", readyReplicas=0)),
            "fail  StatefulSet snapback-nats is ready on 0 of 1 pods → statefulset/snapback-nats",
        ),
        (
            of_workloads(pod(container("ImagePullBackOff"))),
            "fail  pod p on node-1: the image of helper is not there → image.tag",
        ),
        (
            of_workloads(pod(container("CrashLoopBackOff", "back-off 10s"))),
            (
                "fail  container helper does not run: back-off 10s"
                " → kubectl logs --namespace snapback-system p --container helper --previous"
            ),
        ),
        (
            of_workloads(pod(container("CreateContainerConfigError", "no such secret"))),
            (
                "fail  container helper does not run: no such secret"
                " → kubectl describe pod --namespace snapback-system p"
            ),
        ),
        (
            of_workloads(pod(container(ended="OOMKilled"))),
            "fail  container helper was over its limit of memory → resources of helper",
        ),
        (
            of_workloads(pod(node="", conditions=[{**UNPLACED, "message": "2 had a taint"}])),
            "fail  pod p is on no node: 2 had a taint → kubectl describe pod",
        ),
        (of(keys=Asked()), "fail  keys of NATS are missing: snapback-nats-accounts → upgrade"),
        (of(keys=FORBIDDEN), "warn  the Secrets with keys of NATS cannot be looked → can-i"),
        (on_claim(), "fail  claim shared of artifacts is missing → kubectl describe pvc shared"),
        (
            on_claim(claim("ReadWriteMany", phase="Pending")),
            "fail  claim shared of artifacts is Pending → kubectl describe pvc shared",
        ),
        (
            on_claim(claim("ReadWriteOnce")),
            "warn  is ReadWriteOnce: only one node can have it → storage.claim",
        ),
    ],
)
def test_each_trouble_is_named_with_its_fix(found: list[Finding], said: str) -> None:
    assert_trouble(found, said)
    assert [finding for finding in found if finding.level != "ok" and not finding.fix] == []


def test_an_installation_is_where_its_nodes_are() -> None:
    assert home(WORKLOADS) == (SPACE, NAME)
    assert home([OPERATOR]) is None
    assert artifact_claim([daemon_set(ON_CLAIM)]) == "shared"
    assert artifact_claim([daemon_set()]) == ""


# Workers that were brought back with the memory of their source.


def restore(driver: str = "criu", state: str = "Restored", uid: str = "u1") -> dict[str, Any]:
    return {
        "metadata": {"namespace": "llm", "name": f"restore-{uid}"},
        "spec": {"podRef": {"name": "clone", "uid": uid, "container": "engine"}, "source": "s"},
        "status": {"state": state, "driver": driver},
    }


def env(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


POD_IP = env("POD_IP", "status.podIP")
LIMIT = {"name": "LIMIT", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}}


def clone(*rows: dict[str, Any], uid: str = "u1", container: str = "engine") -> dict[str, Any]:
    return {
        "metadata": {"namespace": "llm", "name": "clone", "uid": uid},
        "spec": {"containers": [{"name": "proxy"}, {"name": container, "env": list(rows)}]},
    }


@each("driver", ["criu", "criu+cuda"])
def test_variables_that_are_those_of_the_source_are_named(driver: str) -> None:
    rows = (POD_IP, {"name": "MODE", "value": "fast"}, LIMIT, env("NODE", "spec.nodeName"))
    (only,) = clone_findings([restore(driver)], [clone(*rows)])
    assert only.level == "warn"
    assert f"llm/clone: its process was brought back by {driver}" in only.what
    assert only.what.endswith("with its source's POD_IP, NODE")
    assert "docs/how-to/after-a-restore.md" in only.fix


@each(
    ("restores", "other", "levels"),
    [
        # A program that starts anew or was not restored has nothing of its source.
        ([restore("cooperative")], clone(POD_IP), []),
        ([restore("respawn")], clone(POD_IP), []),
        ([restore(state="Restoring")], clone(POD_IP), []),
        ([restore(state="Failed")], clone(POD_IP), []),
        ([], clone(POD_IP), []),
        # Another pod, container or field is none of it.
        ([restore()], clone(POD_IP, uid="u2"), ["ok"]),
        ([restore()], clone(POD_IP, container="sidecar"), ["ok"]),
        ([restore()], clone(env("ZONE", "metadata.labels['zone']")), ["ok"]),
        ([restore()], clone(LIMIT), ["ok"]),
        ([restore()], clone(), ["ok"]),
    ],
)
def test_what_has_nothing_of_a_source_is_no_trouble(
    restores: list[dict[str, Any]], other: dict[str, Any], levels: list[str]
) -> None:
    assert [each.level for each in clone_findings(restores, [other])] == levels


def test_what_may_not_be_read_is_said() -> None:
    asked = Asked([restore()])
    for seen in (of(restores=FORBIDDEN), of(restores=asked, clones=FORBIDDEN)):
        (unread,) = [each.what for each in seen if each.level == "warn"]
        assert unread.endswith("ada may not")
    assert_trouble(of(restores=asked, clones=Asked([clone(POD_IP)])), "warn  POD_IP")
