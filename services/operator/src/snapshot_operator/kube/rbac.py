"""What the operator may do in a cluster, and no more: made from the table of what it does.

Agents and GMS have no rights on the Kubernetes API at all.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from snapshot_api.kinds import KINDS
from snapshot_api.well_known import OURS

Document = dict[str, Any]

NAME = "snapback-operator"
CERTIFICATE_SECRET = "snapback-webhook-certificate"

MANAGE, MANAGED = "manage", "snapshotcontents"
"""The right by which the policies know who writes statuses: a verb of ours, and its resource."""

_SEEN = ("get", "list", "watch")


class Rule(NamedTuple):
    """What is done to a resource of an API group. `why` is for people who review it.

    With `names` it is done to the objects of these names alone.
    """

    group: str
    resource: str
    verbs: tuple[str, ...]
    why: str
    names: tuple[str, ...] = ()


_DEFINITIONS = tuple(f"{kind.plural}.{OURS}" for kind in KINDS.values() if kind.is_ours)

RULES = (
    Rule(OURS, "dynamocheckpoints", (*_SEEN, "patch", "delete"), "finalizer, retention"),
    Rule(OURS, "snapshots", (*_SEEN, "create", "patch", "delete"), "those of checkpoints"),
    Rule(OURS, "snapshotcontents", (*_SEEN, "create", "patch", "delete"), "one a snapshot"),
    Rule(OURS, "snapshotrestores", (*_SEEN, "create", "patch"), "one a restored pod"),
    *(
        Rule(OURS, f"{plural}/status", ("update",), "the operator is the only writer of it")
        for plural in ("dynamocheckpoints", "snapshots", "snapshotcontents", "snapshotrestores")
    ),
    Rule(OURS, MANAGED, (MANAGE,), "the policies let it write statuses and finalizers"),
    Rule("batch", "jobs", (*_SEEN, "create", "delete"), "the workers of checkpoints"),
    Rule("resource.k8s.io", "resourceclaimtemplates", ("get", "create"), "their devices"),
    Rule("", "pods", _SEEN, "what is captured and restored"),
    Rule("", "pods/status", ("patch",), "the condition nvidia.com/Restored"),
    Rule("", "events", ("create",), "what happens to objects, and what the operator waits for"),
    Rule("", "nodes", (*_SEEN, "patch"), "which are cordoned; the label of those with an agent"),
    Rule("", "namespaces", ("list", "watch"), "those that SNAPBACK_NAMESPACE_SELECTOR selects"),
    Rule(
        "apiextensions.k8s.io",
        "customresourcedefinitions",
        ("get", "list", "watch", "create", "patch"),
        "those of our kinds, applied at the start; the path of what converts their versions",
        _DEFINITIONS,
    ),
    *(
        Rule(
            "admissionregistration.k8s.io",
            f"{kind}webhookconfigurations",
            ("get", "watch", "patch"),
            "which authorities the API server trusts, and by which path it is known",
            (NAME,),
        )
        for kind in ("mutating", "validating")
    ),
)

TENANT_RULES = {
    "edit": (
        Rule(
            OURS,
            "dynamocheckpoints",
            (*_SEEN, "create", "patch", "update", "delete", "deletecollection"),
            "what is captured of a worker that is made for it",
        ),
        Rule(
            OURS,
            "snapshots",
            (*_SEEN, "create", "patch", "update", "delete", "deletecollection"),
            "what is captured of a pod",
        ),
        Rule(OURS, "snapshotrestores", _SEEN, "how far a restored pod is"),
    ),
    "view": tuple(
        Rule(OURS, plural, _SEEN, "what is captured and restored")
        for plural in ("dynamocheckpoints", "snapshots", "snapshotrestores")
    ),
}
"""What the users of a namespace get with the roles of Kubernetes of these names."""

LEASE_RULES = (
    # What is to be created has no name yet for the rules.
    Rule("coordination.k8s.io", "leases", ("create",), "which operator is active"),
    Rule("coordination.k8s.io", "leases", ("get", "update"), "which operator is active", (NAME,)),
    Rule("", "secrets", ("create",), "the certificate and the path of the webhooks"),
    Rule("", "secrets", ("get", "watch", "update"), "its renewal", (CERTIFICATE_SECRET,)),
)


def cluster_role() -> Document:
    """Return the ClusterRole of the operator."""
    return _role("ClusterRole", {"name": NAME}, RULES)


def tenant_roles(release: str = "snapback") -> list[Document]:
    """Return the ClusterRoles by which `admin`, `edit` and `view` have rights on our kinds.

    A controller of Kubernetes adds their rules to the roles that their labels name.
    """
    aggregated = {"edit": ("admin", "edit"), "view": ("view",)}
    return [
        _role(
            "ClusterRole",
            {
                "name": f"{release}-{name}",
                "labels": {
                    "app.kubernetes.io/part-of": "snapback",
                    **{
                        f"rbac.authorization.k8s.io/aggregate-to-{role}": "true"
                        for role in aggregated[name]
                    },
                },
            },
            rules,
        )
        for name, rules in TENANT_RULES.items()
    ]


def lease_role(namespace: str) -> Document:
    """Return the Role of the operator in its own namespace."""
    return _role("Role", {"name": NAME, "namespace": namespace}, LEASE_RULES)


def _role(kind: str, metadata: Document, rules: tuple[Rule, ...]) -> Document:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": kind,
        "metadata": metadata,
        "rules": [
            {
                "apiGroups": [rule.group],
                "resources": [rule.resource],
                **({"resourceNames": list(rule.names)} if rule.names else {}),
                "verbs": list(rule.verbs),
            }
            for rule in rules
        ],
    }
