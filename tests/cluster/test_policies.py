"""The admission policies on a real API server: what a namespace's admin is refused, and who is not.

No operator runs here, so all refusals are those of the API server alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from snapshot_api.well_known import POD_SPEC
from snapshot_operator.core.plan import FINALIZER
from snapshot_operator.kube import rbac
from snapshot_operator.kube.policies import FINALIZERS, MADE, SPECS, STATUSES, named, policies
from tests.cluster.kubectl import Kubectl
from tests.cluster.programs import REPOSITORY
from tests.cluster.simulated import until
from tests.cluster.target import Target
from tests.support.objects import checkpoint_document, snapshot_document

pytestmark = pytest.mark.cluster

GROUP = "nvidia.com"
NAME = "llm"
RESTORE = {
    "apiVersion": f"{GROUP}/v1alpha1",
    "kind": "SnapshotRestore",
    "metadata": {"name": NAME},
    "spec": {
        "podRef": {"name": NAME, "uid": "00000000-0000-0000-0000-000000000001"},
        "source": NAME,
    },
}
STATUS = {"contentName": "snapcontent-of-another-namespace"}


class Tenant(Kubectl):
    """kubectl for a ServiceAccount of the namespace."""

    def words(self, *words: str) -> list[str]:
        return super().words(f"--as=system:serviceaccount:{self.namespace}:tenant", *words)


@pytest.fixture(scope="module", autouse=True)
def _policies(target: Target, definitions: None) -> Iterator[None]:
    target.kubectl.apply(*policies())
    yield
    for document in reversed(policies()):
        target.kubectl.run("delete", document["kind"], document["metadata"]["name"])


@pytest.fixture
def tenant(namespace: Kubectl) -> Tenant:
    """A namespace's admin with each right on our API group that a Role can give."""
    namespace.run("create", "serviceaccount", "tenant")
    rule = {"apiGroups": [GROUP], "resources": ["*"], "verbs": ["*"]}
    version = "rbac.authorization.k8s.io/v1"
    role = {"apiVersion": version, "kind": "Role", "metadata": {"name": "tenant"}}
    namespace.apply(role | {"rules": [rule]})
    account = f"--serviceaccount={namespace.namespace}:tenant"
    namespace.run("create", "rolebinding", "tenant", "--role=tenant", account)
    found = Tenant(namespace.kubeconfig, namespace.program, namespace.namespace)
    # The API server takes a moment to obey policies and roles.
    until(
        lambda: named(MADE) in create(found, RESTORE, "--dry-run=server"), "the policies are obeyed"
    )
    return found


def create(kubectl: Kubectl, document: Any, *words: str) -> str:
    """Create an object; return the refusal, which is empty if there is none."""
    return kubectl.try_("create", "--filename=-", *words, given=json.dumps(document)).stderr


def objects(finalizers: tuple[str, ...] = ()) -> list[Any]:
    """Return a checkpoint, a snapshot and a restore."""
    found = [checkpoint_document(NAME), snapshot_document(NAME, NAME), RESTORE]
    return [each | {"metadata": {"name": NAME, "finalizers": [*finalizers]}} for each in found]


KINDS = ("dynamocheckpoint", "snapshot", "snapshotrestore")


def patch(kubectl: Kubectl, kind: str, *words: str, **body: Any) -> str:
    """Merge fields into an object; return the refusal, which is empty if there is none."""
    text = json.dumps(body)
    done = kubectl.try_("patch", kind, NAME, "--type=merge", f"--patch={text}", *words)
    return done.stderr


def test_a_tenant_makes_objects_and_writes_neither_a_status_nor_what_the_operator_makes(
    tenant: Tenant, namespace: Kubectl
) -> None:
    checkpoint, snapshot, restore = objects((FINALIZER,))
    tenant.apply(checkpoint, snapshot)
    refused = create(tenant, restore)
    assert named(MADE) in refused
    assert "create a Snapshot, or a pod" in refused
    namespace.apply(restore)
    for kind in KINDS:
        assert named(STATUSES) in patch(tenant, kind, "--subresource=status", status=STATUS), kind
        assert named(FINALIZERS) in patch(tenant, kind, metadata={"finalizers": None}), kind
        # The metadata of people stays theirs.
        assert patch(tenant, kind, metadata={"labels": {"team": "a"}}) == "", kind
        kept = [FINALIZER, "example.com/kept"]
        assert patch(tenant, kind, metadata={"finalizers": kept}) == "", kind
        assert not namespace.get(kind, NAME).get("status", {}).get("contentName"), kind
        # An administrator of the whole cluster may repair an object.
        assert patch(namespace, kind, metadata={"finalizers": None}) == "", kind


def test_a_tenant_removes_the_spec_that_the_operator_kept_and_sets_none(
    tenant: Tenant, namespace: Kubectl
) -> None:
    forged = {"annotations": {POD_SPEC: "{}"}}
    snapshot = snapshot_document(NAME, NAME)
    assert named(SPECS) in create(tenant, snapshot | {"metadata": {"name": NAME, **forged}})
    tenant.apply(snapshot | {"metadata": {"name": NAME}})
    assert named(SPECS) in patch(tenant, "snapshot", metadata=forged)
    assert patch(namespace, "snapshot", metadata=forged) == ""
    assert patch(tenant, "snapshot", metadata={"labels": {"team": "a"}}) == ""
    changed = {"annotations": {POD_SPEC: '{"hostPID": true}'}}
    assert named(SPECS) in patch(tenant, "snapshot", metadata=changed)
    assert patch(tenant, "snapshot", metadata={"annotations": {POD_SPEC: None}}) == ""


def test_the_operator_writes_with_the_rights_of_its_table(namespace: Kubectl) -> None:
    role = rbac.cluster_role() | {"metadata": {"name": namespace.namespace}}
    namespace.apply(role)
    account = f"--serviceaccount={namespace.namespace}:tenant"
    name = str(namespace.namespace)
    namespace.run("create", "clusterrolebinding", name, f"--clusterrole={name}", account)
    operator = Tenant(namespace.kubeconfig, namespace.program, namespace.namespace)
    checkpoint, snapshot, restore = objects()
    namespace.apply(checkpoint, snapshot)
    try:
        assert create(operator, restore) == ""
        for kind in KINDS:
            assert patch(operator, kind, metadata={"finalizers": [FINALIZER]}) == "", kind
            # The API server refuses what is no status only after it has let the writer pass.
            document = namespace.get(kind, NAME) | {"status": {"phase": "Pending"}}
            given = json.dumps(document)
            operator.run("replace", "--subresource=status", "--filename=-", given=given)
            assert patch(operator, kind, metadata={"finalizers": None}) == "", kind
    finally:
        namespace.run("delete", "clusterrolebinding,clusterrole", name)


@pytest.mark.parametrize("cascade", ["foreground", "orphan"])
def test_the_garbage_collector_ends_objects_without_an_operator(
    tenant: Tenant, namespace: Kubectl, cascade: str
) -> None:
    checkpoint, snapshot, _ = objects()
    tenant.apply(checkpoint)
    meta = namespace.get("dynamocheckpoint", NAME)["metadata"]
    owner = {
        "apiVersion": f"{GROUP}/v1alpha1",
        "kind": "DynamoCheckpoint",
        "name": NAME,
        "uid": meta["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    namespace.apply(snapshot | {"metadata": {"name": NAME, "ownerReferences": [owner]}})
    tenant.run("delete", "dynamocheckpoint", NAME, f"--cascade={cascade}", "--wait=false")
    namespace.wait(f"dynamocheckpoint/{NAME}", until="delete")
    left = namespace.list("snapshots")
    assert [each["metadata"].get("ownerReferences") for each in left] == (
        [None] if cascade == "orphan" else []
    )


def test_a_namespace_ends_once_a_cluster_admin_takes_the_finalizers_off(
    namespace: Kubectl, target: Target
) -> None:
    space = f"{namespace.namespace}-b"
    namespace.run("create", "namespace", space)
    within = target.kubectl.within(space)
    within.apply(*objects((FINALIZER,)))
    target.kubectl.run("delete", "namespace", space, "--wait=false")
    for kind in KINDS:
        within.wait(f"{kind}/{NAME}", until="jsonpath={.metadata.deletionTimestamp}")
        assert patch(within, kind, metadata={"finalizers": None}) == "", kind
    target.kubectl.wait(f"namespace/{space}", until="delete")


PAGE = REPOSITORY / "docs/how-to/share-a-cluster.md"
ROW = re.compile(r"^\| `(\w+) ([a-z/]+)` \| (yes|no) \| (yes|no) \|$", re.MULTILINE)


def test_the_roles_of_kubernetes_have_the_rights_that_the_page_says(namespace: Kubectl) -> None:
    rows = ROW.findall(PAGE.read_text("utf-8"))
    assert len(rows) > 8
    namespace.apply(*rbac.tenant_roles())
    try:
        for role in ("admin", "edit", "view"):
            namespace.run("create", "rolebinding", role, f"--clusterrole={role}", f"--user={role}")

        def may(user: str, verb: str, resource: str) -> str:
            plural, _, part = resource.partition("/")
            words = ("auth", "can-i", verb, f"{plural}.{GROUP}", f"--as={user}")
            subresource = (f"--subresource={part}",) if part else ()
            return namespace.try_(*words, *subresource).stdout.strip()

        for user in ("admin", "edit", "view"):
            until(lambda: may(user, "list", "snapshots") == "yes", "roles have the rules")  # noqa: B023
        said = {
            (verb, resource, user): may(user, verb, resource)
            for verb, resource, *_ in rows
            for user in ("admin", "edit", "view")
        }
        for verb, resource, editors, viewers in rows:
            wanted = {"admin": editors, "edit": editors, "view": viewers}
            assert {user: said[verb, resource, user] for user in wanted} == wanted, (verb, resource)
    finally:
        names = [each["metadata"]["name"] for each in rbac.tenant_roles()]
        namespace.run("delete", "clusterrole", *names)
