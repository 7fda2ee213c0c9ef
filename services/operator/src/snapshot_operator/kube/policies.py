"""The ValidatingAdmissionPolicies by which the API server itself refuses foreign writers.

A right on `*` of our API group within one namespace includes the statuses there. The operator never
trusts a status (`core.authority`), and these policies keep others from writing one in the first
place. They need no running operator.

A policy allows users who have the right to `manage` all SnapshotContents. The verb is ours, and the
kind is in no namespace, so no right within a namespace contains it. The operator of each release
has it, and so have the Jobs of an uninstall and a cluster-admin, who may have to repair an object.
The garbage collector and the controller of namespaces do not need it, because they write neither a
status nor a finalizer of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from snapshot_api.kinds import KINDS
from snapshot_api.schema.definitions import PART_OF
from snapshot_api.well_known import OURS, POD_SPEC
from snapshot_operator.core.plan import FINALIZER
from snapshot_operator.kube.rbac import MANAGE, MANAGED

Document = dict[str, Any]

STATUSES, FINALIZERS, MADE, SPECS = "statuses", "finalizers", "made-objects", "pod-specs"
"""What the policies are about, with which their names begin."""

_OURS = [kind for kind in KINDS.values() if kind.is_ours]
_MAY = f"authorizer.group('{OURS}').resource('{MANAGED}').check('{MANAGE}').allowed()"
_WHO = f"only the operator of Snapback, or who may {MANAGE} {MANAGED}.{OURS} in the cluster"


def named(what: str, release: str = "snapback") -> str:
    """Return the name of a policy and of its binding, as a refusal shows it.

    Releases have policies of their own, which ask for the same right.
    """
    return f"{what}.{release}.nvidia.com"


def policies(release: str = "snapback") -> list[Document]:
    """Return the policies with their bindings, as `kubectl apply` takes them."""
    return [
        *_policy(
            named(STATUSES, release),
            [_rule([f"{kind.plural}/status" for kind in _OURS], "UPDATE")],
            _MAY,
            f"{_WHO}, writes a status",
        ),
        *_policy(
            named(FINALIZERS, release),
            [_rule([kind.plural for kind in _OURS], "UPDATE")],
            f"{_has_finalizer('object')} == {_has_finalizer('oldObject')} || {_MAY}",
            f"{_WHO}, adds or removes the finalizer {FINALIZER}",
        ),
        # A SnapshotRestore stands for a pod, and a SnapshotContent for an artifact.
        *_policy(
            named(MADE, release),
            [_rule([kind.plural for kind in _OURS if not kind.appliable], "CREATE")],
            _MAY,
            f"{_WHO}, creates a SnapshotContent or a SnapshotRestore; create a Snapshot, or a pod "
            "that names one to restore from",
        ),
        # `snapshotctl restore` creates a pod of it, with the rights of its user. It may be removed.
        *_policy(
            named(SPECS, release),
            [_rule(["snapshots"], "CREATE"), _rule(["snapshots"], "UPDATE")],
            f"{_spec_in('object')} in ['', {_spec_in('oldObject')}] || {_MAY}",
            f"{_WHO}, sets the annotation {POD_SPEC}",
        ),
    ]


def _spec_in(of: str) -> str:
    return f"({of} == null ? '' : {of}.metadata.?annotations[?'{POD_SPEC}'].orValue(''))"


def _has_finalizer(of: str) -> str:
    return f"('{FINALIZER}' in {of}.metadata.?finalizers.orValue([]))"


def _rule(resources: Sequence[str], operation: str) -> Document:
    return {
        "apiGroups": [OURS],
        "apiVersions": ["*"],
        "operations": [operation],
        "resources": [*resources],
    }


def _policy(
    name: str, rules: Sequence[Document], expression: str, message: str
) -> tuple[Document, Document]:
    version = "admissionregistration.k8s.io/v1"
    metadata = {"name": name, "labels": dict([PART_OF])}
    policy = {
        "apiVersion": version,
        "kind": "ValidatingAdmissionPolicy",
        "metadata": metadata,
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {"matchPolicy": "Equivalent", "resourceRules": [*rules]},
            "validations": [{"expression": expression, "message": message, "reason": "Forbidden"}],
        },
    }
    binding = {
        "apiVersion": version,
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": metadata,
        "spec": {"policyName": name, "validationActions": ["Deny"]},
    }
    return policy, binding
