"""What the operator may do in a cluster, and no more: made from the table of what it does.

Agents and GMS have no rights on the Kubernetes API at all.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Document = dict[str, Any]

NAME = "snapback-operator"
CERTIFICATE_SECRET = "snapback-webhook-certificate"

_SEEN = ("get", "list", "watch")
_OURS = "nvidia.com"


class Rule(NamedTuple):
    """What is done to a resource of an API group, of these names where there are some.

    `why` is for people who review it.
    """

    group: str
    resource: str
    verbs: tuple[str, ...]
    why: str
    names: tuple[str, ...] = ()


RULES = (
    Rule(_OURS, "dynamocheckpoints", (*_SEEN, "patch", "delete"), "finalizer, retention"),
    Rule(_OURS, "snapshots", (*_SEEN, "create", "patch", "delete"), "those of checkpoints"),
    Rule(_OURS, "snapshotcontents", (*_SEEN, "create", "patch", "delete"), "one a snapshot"),
    Rule(_OURS, "snapshotrestores", (*_SEEN, "create", "patch"), "one a restored pod"),
    *(
        Rule(_OURS, f"{plural}/status", ("update",), "the operator is the only writer of it")
        for plural in ("dynamocheckpoints", "snapshots", "snapshotcontents", "snapshotrestores")
    ),
    Rule("batch", "jobs", (*_SEEN, "create", "delete"), "the workers of checkpoints"),
    Rule("", "pods", _SEEN, "what is captured and restored"),
    Rule("", "pods/status", ("patch",), "the condition nvidia.com/Restored"),
    Rule("", "nodes", _SEEN, "which there are, and which are cordoned"),
    *(
        Rule(
            "admissionregistration.k8s.io",
            f"{kind}webhookconfigurations",
            ("get", "watch", "patch"),
            "which authorities the API server trusts for the operator's webhooks",
            (NAME,),
        )
        for kind in ("mutating", "validating")
    ),
)

LEASE_RULES = (
    Rule("coordination.k8s.io", "leases", ("get", "create", "update"), "which operator is active"),
    # What is to be created has no name yet for the rules.
    Rule("", "secrets", ("create",), "the certificate of the webhooks"),
    Rule("", "secrets", ("get", "watch", "update"), "its renewal", (CERTIFICATE_SECRET,)),
)


def cluster_role() -> Document:
    """Return the ClusterRole of the operator."""
    return _role("ClusterRole", {"name": NAME}, RULES)


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
                "verbs": list(rule.verbs),
                **({"resourceNames": list(rule.names)} if rule.names else {}),
            }
            for rule in rules
        ],
    }
