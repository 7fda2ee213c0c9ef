"""The configurations of the operator's webhooks: where they are, and what they are asked about.

If no operator answers, a pod that asks for a restore, or to be capturable, is refused. Without what
admission adds to it, its worker would end again and again. A controller creates a refused pod
again, ever more rarely. A pod with the policy Immediate says that it can start cold, so it is
stored as it is. Our own kinds are refused, rather than stored without a check that comes too late:
a spec never changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from snapshot_api.kinds import KINDS
from snapshot_api.well_known import CAPTURABLE, GROUP, IMMEDIATE, RESTORE_FROM, RESTORE_POLICY
from snapshot_operator.kube.rbac import NAME

Document = dict[str, Any]

PODS = "pods.snapback.nvidia.com"
IMMEDIATE_PODS = "immediate-pods.snapback.nvidia.com"
OBJECTS = "objects.snapback.nvidia.com"
DELETIONS = "deletions.snapback.nvidia.com"
CONVERSIONS = "conversions.snapback.nvidia.com"
"""The names of the webhooks, as a refusal and the metrics show them."""
PATHS = {
    PODS: "/restored-pods",
    IMMEDIATE_PODS: "/restored-pods",
    OBJECTS: "/objects",
    DELETIONS: "/deletions",
    CONVERSIONS: "/conversions",
}
"""The end of the path of each webhook; a secret of the operators comes first."""

MUTATING, VALIDATING = "mutatingwebhookconfigurations", "validatingwebhookconfigurations"
BASE = "/apis/admissionregistration.k8s.io/v1"

TIMEOUT_S = 5
SYSTEM_NAMESPACES = ("kube-system", "kube-public", "kube-node-lease")
_CHECKED = ("DynamoCheckpoint", "Snapshot")
"""The kinds that people apply."""


class Endpoint(NamedTuple):
    """Where the API server reaches the webhooks: at a Service of the operator, or at a URL.

    `account` is the ServiceAccount of the operator, whose own writes are not checked.
    A `url` such as `https://198.51.100.7:9443` is for API servers that cannot reach Services.
    """

    namespace: str
    service: str = "snapback-webhook"
    port: int = 443
    url: str = ""
    account: str = NAME

    @property
    def client_config(self) -> Document:
        """The `clientConfig` of each webhook, without what operators `introduce`."""
        if self.url:
            return {"url": self.url.rstrip("/")}
        named = {"namespace": self.namespace, "name": self.service}
        return {"service": {**named, "port": self.port}}

    @property
    def names(self) -> list[str]:
        """The names and addresses that the certificate has to have."""
        within = f"{self.service}.{self.namespace}.svc"
        own = [within, f"{self.service}.{self.namespace}", f"{within}.cluster.local"]
        host = urlsplit(self.url).hostname if self.url else None
        return [host, *own] if host else own


def configurations(
    endpoint: Endpoint,
    *,
    annotations: dict[str, str] | None = None,
    excluded: Sequence[str] = (),
) -> list[Document]:
    """Return the configurations of the webhooks, as `kubectl apply` takes them.

    `annotations` are for what injects the authorities, such as cert-manager. `excluded` are
    namespaces without restored pods, beside those of the system and the operator's own.
    """
    metadata = {
        "name": NAME,
        "labels": {"app.kubernetes.io/part-of": "snapback"},
        **({"annotations": annotations} if annotations else {}),
    }
    spaces = [*SYSTEM_NAMESPACES, endpoint.namespace, *excluded]
    version = "admissionregistration.k8s.io/v1"
    return [
        {
            "apiVersion": version,
            "kind": "MutatingWebhookConfiguration",
            "metadata": metadata,
            "webhooks": [
                _pods_webhook(endpoint, spaces, PODS),
                _pods_webhook(endpoint, spaces, IMMEDIATE_PODS),
            ],
        },
        {
            "apiVersion": version,
            "kind": "ValidatingWebhookConfiguration",
            "metadata": metadata,
            "webhooks": [_objects_webhook(endpoint), _deletions_webhook(endpoint)],
        },
    ]


def introduced(webhook: Document, secret: str, bundle: str = "") -> Document:
    """Return a webhook by which an API server finds the operators, and is known to them.

    Its path begins with a secret, because an API server has no other proof of who it is: those of
    managed clusters present no certificate. `bundle` is base64 of the PEM of the authorities that
    it has to trust, empty if others write them.
    """
    if webhook["name"] not in PATHS:
        return webhook
    found = addressed(webhook["clientConfig"], webhook["name"], secret, bundle)
    return {**webhook, "clientConfig": found}


def addressed(config: Document, name: str, secret: str, bundle: str = "") -> Document:
    """Return the `clientConfig` of a webhook with its path and the authorities to trust."""
    path = f"/{secret}{PATHS[name]}"
    if "service" in config:
        config = {**config, "service": {**config["service"], "path": path}}
    else:
        config = {**config, "url": urlsplit(config["url"])._replace(path=path).geturl()}
    return {**config, **({"caBundle": bundle} if bundle else {})}


_ANNOTATIONS = "object.metadata.annotations"
_ASKS = (
    f"has({_ANNOTATIONS})"
    f" && ('{RESTORE_FROM}' in {_ANNOTATIONS} || '{CAPTURABLE}' in {_ANNOTATIONS})"
)
_IS_IMMEDIATE = (
    f"has({_ANNOTATIONS}) && '{RESTORE_POLICY}' in {_ANNOTATIONS}"
    f" && {_ANNOTATIONS}['{RESTORE_POLICY}'] == '{IMMEDIATE}'"
)


def _pods_webhook(endpoint: Endpoint, spaces: Sequence[str], name: str) -> Document:
    is_immediate = name == IMMEDIATE_PODS
    policy = _IS_IMMEDIATE if is_immediate else f"!({_IS_IMMEDIATE})"
    names = {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": [*spaces]}
    return {
        "name": name,
        **_common(endpoint.client_config, "Ignore" if is_immediate else "Fail"),
        "rules": [_rule("", "v1", ["pods"], ["CREATE"])],
        "namespaceSelector": {"matchExpressions": [names]},
        "matchConditions": [
            {"name": "asks-for-something", "expression": _ASKS},
            {"name": "is-of-this-policy", "expression": policy},
        ],
        # A webhook that comes later may change the containers.
        "reinvocationPolicy": "IfNeeded",
    }


_IS_SERVICE = "request.userInfo.username.startsWith('system:serviceaccount:')"


def _objects_webhook(endpoint: Endpoint) -> Document:
    group, _, version = GROUP.partition("/")
    plurals = [KINDS[name].plural for name in _CHECKED]
    operator = f"system:serviceaccount:{endpoint.namespace}:{endpoint.account}"
    # Metadata has no rules, so that finalizers can be taken off while no operator is there.
    changes = (
        "request.operation == 'CREATE' || (object.spec != oldObject.spec"
        " && !has(object.metadata.deletionTimestamp))"
    )
    return {
        "name": OBJECTS,
        **_common(endpoint.client_config, "Fail"),
        "rules": [_rule(group, version, plurals, ["CREATE", "UPDATE"])],
        "matchConditions": [
            {
                "name": "not-of-the-operator",
                "expression": f"request.userInfo.username != '{operator}'",
            },
            {"name": "changes-a-spec", "expression": changes},
        ],
    }


def _deletions_webhook(endpoint: Endpoint) -> Document:
    group, _, version = GROUP.partition("/")
    plurals = [KINDS[name].plural for name in (*_CHECKED, "SnapshotContent")]
    return {
        "name": DELETIONS,
        # It only warns.
        **_common(endpoint.client_config, "Ignore"),
        "rules": [{**_rule(group, version, plurals, ["DELETE"]), "scope": "*"}],
        "matchConditions": [
            {"name": "not-of-a-controller", "expression": f"!({_IS_SERVICE})"},
        ],
    }


def _common(client_config: Document, policy: str) -> Document:
    return {
        "clientConfig": client_config,
        "admissionReviewVersions": ["v1"],
        "failurePolicy": policy,
        "matchPolicy": "Equivalent",
        "sideEffects": "None",
        "timeoutSeconds": TIMEOUT_S,
    }


def _rule(group: str, version: str, resources: list[str], operations: list[str]) -> Document:
    return {
        "apiGroups": [group],
        "apiVersions": [version],
        "resources": resources,
        "operations": operations,
        "scope": "Namespaced",
    }
