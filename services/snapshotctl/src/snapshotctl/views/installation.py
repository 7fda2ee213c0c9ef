"""What is wrong with an installation of the chart, judged from what the API server has of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from snapshot_api.kinds import KINDS
from snapshot_shared.errors import Failure
from snapshotctl.views.clones import clone_findings
from snapshotctl.views.finding import Finding, fail, ok, warn

Document = Mapping[str, Any]

DEFINITIONS = tuple(f"{kind.plural}.nvidia.com" for kind in KINDS.values() if kind.is_ours)
"""The names of the definitions of our kinds."""
WEBHOOKS = "snapback-operator"
"""The name of both configurations of webhooks."""
POLICIES = ("statuses", "finalizers", "made-objects", "pod-specs")
"""What the admission policies are about, with which their names begin."""
KEYS = ("operator", "snapshotctl", "viewer", "accounts")
"""The last words of the names of the Secrets with keys of NATS."""

_COMPONENT = "app.kubernetes.io/component"
_PART_OF = "app.kubernetes.io/part-of"
_RIGHTS = "ask for the right to read this, or see yours: kubectl auth can-i --list"
_INSTALL = "install the chart: docs/kubernetes.md"
_IMAGES = {"ErrImagePull", "ErrImageNeverPull", "ImagePullBackOff", "InvalidImageName"}


class Asked(NamedTuple):
    """What the API server answered to a question: objects, or why there is no answer."""

    items: Sequence[Document] = ()
    failure: Failure | None = None


class SeenInstallation(NamedTuple):
    """What a user of kubectl sees of Snapback in a cluster.

    `policies` are its admission policies with their bindings, `workloads` its DaemonSets,
    Deployments, StatefulSets and pods, `claims` the volume claims of their namespace, `keys` the
    Secrets of NATS, without what is in them. `tried` is the answer to an object of ours that is
    valid, and is not stored. `restores` are all SnapshotRestores, `clones` the pods of those that
    have brought a process back.
    """

    definitions: Asked
    webhooks: Asked
    workloads: Asked
    claims: Asked = Asked()
    keys: Asked = Asked()
    tried: Asked = Asked()
    restores: Asked = Asked()
    clones: Asked = Asked()
    policies: Asked = Asked()


def home(workloads: Sequence[Document]) -> tuple[str, str] | None:
    """Return the namespace of the installation, and what the names of its objects begin with."""
    for item in workloads:
        if item["kind"] == "DaemonSet" and _component(item) == "node":
            return item["metadata"]["namespace"], item["metadata"]["name"].removesuffix("-node")
    return None


def artifact_claim(workloads: Sequence[Document]) -> str:
    """Return the volume claim in which nodes keep artifacts; empty where it is a folder."""
    return str(_artifacts(workloads).get("persistentVolumeClaim", {}).get("claimName", ""))


def installation_findings(seen: SeenInstallation) -> Iterator[Finding]:
    """Yield what was checked: definitions, policies, webhooks, pods, keys, and artifacts."""
    yield from _definitions(seen.definitions)
    found = home(seen.workloads.items)
    if seen.workloads.failure is not None:
        yield _unread("the pods of Snapback", seen.workloads.failure)
        return
    if found is None:
        yield fail("no node of the cluster has an agent: there is no DaemonSet of it", _INSTALL)
        return
    namespace, name = found
    yield _policies(seen.policies, name)
    yield from _webhooks(seen, namespace, name)
    for item in seen.workloads.items:
        if item["kind"] != "Pod":
            yield _rollout(item, namespace)
        else:
            yield from _pod(item, namespace)
    yield from _helper(seen.workloads.items, name, namespace)
    yield from _keys(seen.keys, name)
    yield from _storage(seen)
    yield from _clones(seen)


def _unread(what: str, failure: Failure) -> Finding:
    step = failure.next_step or _RIGHTS
    return warn(f"{what} cannot be looked at: {failure.message}", step)


def _component(item: Document) -> str:
    return str(item["metadata"].get("labels", {}).get(_COMPONENT, ""))


def _definitions(asked: Asked) -> Iterator[Finding]:
    if asked.failure is not None:
        yield _unread("the definitions of our kinds", asked.failure)
        return
    there = {item["metadata"]["name"]: item for item in asked.items}
    wrong = False
    for name in DEFINITIONS:
        if name not in there:
            wrong = True
            fix = "kubectl apply --server-side -f deploy/crds, or set crds.install of the chart"
            yield fail(f"{name} is not defined", fix)
            continue
        meta, status = there[name]["metadata"], there[name].get("status", {})
        owner = meta.get("labels", {}).get(_PART_OF)
        if owner != "snapback":
            wrong = True
            owner = owner or meta.get("annotations", {}).get("meta.helm.sh/release-name")
            yield fail(
                f"the definition {name} belongs to {owner or 'another product'}",
                "remove that product, or have its definitions taken over: crds.install=adopt of "
                "the chart",
            )
        rows = {row["type"]: row for row in status.get("conditions") or ()}
        if rows.get("Established", {}).get("status") != "True":
            wrong = True
            why = rows.get("NamesAccepted", {}).get("message", "")
            yield fail(f"{name} is not served yet: {why}", f"kubectl describe crd {name}")
    if not wrong:
        yield ok(f"all {len(DEFINITIONS)} kinds are defined, and are Snapback's")


def policy_names(name: str) -> list[str]:
    """Return the names of the admission policies of an installation, and of their bindings."""
    return [f"{what}.{name}.nvidia.com" for what in POLICIES]


def _policies(asked: Asked, name: str) -> Finding:
    if asked.failure is not None:
        return _unread("the admission policies", asked.failure)
    binding = "ValidatingAdmissionPolicyBinding"
    there = {
        (item["kind"], item["metadata"]["name"])
        for item in asked.items
        if item["kind"] != binding or "Deny" in item["spec"]["validationActions"]
    }
    kinds = ("ValidatingAdmissionPolicy", binding)
    wanted = {(kind, each) for each in policy_names(name) for kind in kinds}
    if missing := ", ".join(sorted({each for _, each in wanted - there})):
        return fail(
            f"the API server takes a status from others than the operator: {missing} is missing or "
            "denies nothing",
            "helm upgrade the chart, which has the policies: docs/kubernetes.md",
        )
    return ok("the API server refuses statuses and finalizers that the operator did not write")


def _webhooks(seen: SeenInstallation, namespace: str, name: str) -> Iterator[Finding]:
    if seen.webhooks.failure is not None:
        yield _unread("the webhooks", seen.webhooks.failure)
        return
    hooks = [hook for item in seen.webhooks.items for hook in item.get("webhooks") or ()]
    if not hooks:
        yield warn(
            "there are no webhooks: pods that ask for a restore start cold, and no object is "
            "checked before it is stored",
            "set webhooks.enabled and operator.replicas of the chart",
        )
        return
    logs = f"kubectl logs --namespace {namespace} deployment/{name}-operator"
    if bare := [hook["name"] for hook in hooks if not hook["clientConfig"].get("caBundle")]:
        yield fail(f"the API server has no authority for {' and '.join(bare)}", logs)
        return
    if (failure := seen.tried.failure) is None:
        yield ok("the API server reaches the webhooks of the operator")
    elif failure.reason == "NotPermitted":
        yield _unread("whether the webhooks are reached", failure)
    else:
        fix = f"see whether the operator runs, and what may reach its port 9443; {logs}"
        yield fail(f"an object that is valid is refused: {failure.message}", fix)


def _rollout(item: Document, namespace: str) -> Finding:
    spec, status, kind = item["spec"], item.get("status", {}), item["kind"]
    called = f"{kind} {item['metadata']['name']}"
    if kind == "DaemonSet":
        wanted, ready = status.get("desiredNumberScheduled", 0), status.get("numberReady", 0)
        updated, unit = status.get("updatedNumberScheduled", 0), "nodes"
    else:
        wanted, ready = spec.get("replicas", 1), status.get("readyReplicas", 0)
        updated, unit = status.get("updatedReplicas", wanted), "pods"
    follow = (
        f"kubectl rollout status --namespace {namespace} {kind.lower()}/"
        + (item["metadata"]["name"])
    )
    if wanted == 0 and kind == "DaemonSet":
        step = "see nodeSelector and tolerations of the chart: kubectl get nodes --show-labels"
        return fail(f"{called} is for no node", step)
    if wanted == 0:
        return warn(f"{called} has no pods", "set its replicas of the chart, or --own-operator")
    if ready < wanted:
        return fail(f"{called} is ready on {ready} of {wanted} {unit}", follow)
    if updated < wanted or status.get("observedGeneration", 0) < item["metadata"]["generation"]:
        return warn(f"{called} is of this version on {updated} of {wanted} {unit}", follow)
    return ok(f"{called} is ready on all {wanted} {unit}" if wanted > 1 else f"{called} is ready")


def _pod(item: Document, namespace: str) -> Iterator[Finding]:
    name, status = item["metadata"]["name"], item.get("status", {})
    where = item["spec"].get("nodeName")
    called = f"pod {name} on {where}" if where else f"pod {name}"
    in_it = f"--namespace {namespace} {name}"
    rows = [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]
    for row in rows:
        waiting = row.get("state", {}).get("waiting") or {}
        reason, container = waiting.get("reason", ""), row["name"]
        ended = row.get("lastState", {}).get("terminated") or {}
        if ended.get("reason") == "OOMKilled":
            fix = f"raise its limit of memory: resources of {container} in the chart's values"
            yield fail(f"{called}: container {container} was over its limit of memory", fix)
        elif reason in _IMAGES:
            fix = "see image.repository and image.tag of the chart, and image.pullSecrets"
            yield fail(f"{called}: the image of {container} is not there ({reason})", fix)
        elif reason not in ("", "ContainerCreating", "PodInitializing"):
            fix = f"kubectl logs {in_it} --container {container} --previous"
            if reason != "CrashLoopBackOff":
                fix = f"kubectl describe pod {in_it}"
            said = waiting.get("message") or reason
            yield fail(f"{called}: container {container} does not run: {said}", fix)
    for row in status.get("conditions") or ():
        if (row["type"], row["status"]) == ("PodScheduled", "False"):
            said = row.get("message", "no node has room for it")
            yield fail(f"{called} is on no node: {said}", f"kubectl describe pod {in_it}")


def _containers(workloads: Sequence[Document]) -> Iterator[Document]:
    for item in workloads:
        if item["kind"] == "DaemonSet" and _component(item) == "node":
            yield from item["spec"]["template"]["spec"]["containers"]


def _helper(workloads: Sequence[Document], name: str, namespace: str) -> Iterator[Finding]:
    if any(container["name"] == "helper" for container in _containers(workloads)):
        yield ok("the nodes have the container helper, for workers that need not help")
    else:
        # As the chart is by default: what runs in it reaches every process of its node.
        yield ok(
            f"the nodes have no container helper, so workers have to help: node.helper.enabled of "
            f"the chart {name} in {namespace}"
        )


def _keys(asked: Asked, name: str) -> Iterator[Finding]:
    if asked.failure is not None:
        yield _unread("the Secrets with keys of NATS", asked.failure)
        return
    there = {item["metadata"]["name"] for item in asked.items}
    missing = sorted({f"{name}-nats-{word}" for word in KEYS} - there)
    if missing:
        fix = "helm upgrade makes them; see the Job of keys where it does not"
        yield fail(f"keys of NATS are missing: {', '.join(missing)}", fix)
    else:
        yield ok("the keys of NATS are there")


def _clones(seen: SeenInstallation) -> Iterator[Finding]:
    for what, asked in (("restores", seen.restores), ("the pods of restores", seen.clones)):
        if asked.failure is not None:
            yield _unread(what, asked.failure)
            return
    yield from clone_findings(seen.restores.items, seen.clones.items)


def _artifacts(workloads: Sequence[Document]) -> Document:
    for item in workloads:
        if item["kind"] == "DaemonSet" and _component(item) == "node":
            for volume in item["spec"]["template"]["spec"].get("volumes") or ():
                if volume["name"] == "artifacts":
                    return dict(volume)
    return {}


def _storage(seen: SeenInstallation) -> Iterator[Finding]:
    claim = artifact_claim(seen.workloads.items)
    if not claim:
        path = _artifacts(seen.workloads.items).get("hostPath", {}).get("path", "")
        yield ok(
            f"artifacts are in {path} of each node; a restore on another node needs one that they "
            "share"
        )
        return
    if seen.claims.failure is not None:
        yield _unread(f"the volume claim {claim}", seen.claims.failure)
        return
    found = next((row for row in seen.claims.items if row["metadata"]["name"] == claim), None)
    phase = found.get("status", {}).get("phase") if found else "missing"
    modes = found["spec"].get("accessModes") or () if found else ()
    if phase != "Bound":
        fix = f"make it, or see why it is not bound: kubectl describe pvc {claim}"
        yield fail(f"the volume claim {claim} of artifacts is {phase}", fix)
    elif "ReadWriteMany" not in modes:
        yield warn(
            f"the volume claim {claim} of artifacts is {', '.join(modes)}: only one node can have "
            "it",
            "name a claim that is ReadWriteMany: storage.claim of the chart",
        )
    else:
        yield ok(f"artifacts are in the volume claim {claim}, which all nodes share")
