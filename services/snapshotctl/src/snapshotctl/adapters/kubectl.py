"""The Snapback of a Kubernetes cluster, by the user's own kubectl, which knows how to log in.

Its NATS is reached by a forwarded port, with the key that the chart keeps in a Secret. What is
applied goes through the API server, so that the rights and the name of the user count.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import operator
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, get_args

import msgspec

from snapshot_api.meta import TRACEPARENT
from snapshot_api.well_known import GROUP, RESTORE_FROM
from snapshot_shared.api import Action, Applied
from snapshot_shared.errors import (
    BusUnavailable,
    InvalidManifest,
    NotFound,
    NotPermitted,
    SnapbackError,
)
from snapshot_shared.permissions import Role, User
from snapshotctl.adapters.local_workers import answered, ended
from snapshotctl.adapters.processes import ending_with_us
from snapshotctl.domain.exits import WrongArguments
from snapshotctl.domain.kubernetes import (
    KUBE_PARTS,
    NatsService,
    api_path,
    nats_services,
    operator_variables,
    problem_in,
)
from snapshotctl.domain.servers import Server
from snapshotctl.domain.sources import OF_NODES, ServiceNamed
from snapshotctl.domain.targets import Target
from snapshotctl.ports import Ran
from snapshotctl.views.clones import brought_back
from snapshotctl.views.installation import (
    DEFINITIONS,
    KEYS,
    WEBHOOKS,
    Asked,
    SeenInstallation,
    artifact_claim,
    home,
    policy_names,
)

COMMAND_S = 60.0
# -P: the working directory is the user's and may hold modules of any name.
PYTHON = (sys.executable, "-P", "-m")
ROLES: tuple[Role, ...] = ("snapshotctl", "viewer")
"""Whose keys are tried: one who may not read the first may be given the second."""

_ENDED = re.compile(r"^command terminated with exit code \d+\n?", re.MULTILINE)
_ERRORS = {
    "arguments": WrongArguments,
    "forbidden": NotPermitted,
    "missing": NotFound,
    "refused": InvalidManifest,
    "unreachable": BusUnavailable,
}


def rendered(documents: Sequence[Any], variables: Mapping[str, str], *words: str) -> list[Any]:
    """Return manifests as admission would have them stored. InvalidManifest.

    `variables` are the environment of the operator, and `words` are for `snapshot_operator.render`.
    """
    done = subprocess.run(
        (*PYTHON, "snapshot_operator.render", *words),
        input=json.dumps(documents),
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise InvalidManifest(f"a pod cannot be changed as it asks: {done.stderr.strip()}")
    found: list[Any] = json.loads(done.stdout)
    return found


class Kubernetes:
    """A cluster that kubectl reaches; `close` ends what was begun for it."""

    def __init__(
        self, kubeconfig: str | None, context: str | None, *, are_shaped_here: bool = False
    ) -> None:
        """Use a context of a kubeconfig; the current one, and that of kubectl, where not named.

        With `are_shaped_here` restored pods are made to wait here, and not by the operator.
        """
        self._are_shaped_here = are_shaped_here
        named = {"--kubeconfig": kubeconfig, "--context": context}
        self._options = [word for key, value in named.items() if value for word in (key, value)]
        self.name = f"context {context}" if context else f"kubeconfig {kubeconfig}"
        if not (context or kubeconfig):
            self.name = "the current context of kubectl"
        self._open = contextlib.ExitStack()
        self._server: Server | None = None

    def close(self) -> None:
        """End the forwarding, and remove the key."""
        self._open.close()
        self._server = None

    @cached_property
    def namespace(self) -> str:
        """The namespace of the context; `default` where it has none."""
        path = "--output=jsonpath={.contexts[0].context.namespace}"
        return self._run("config", "view", "--minify", path).strip() or "default"

    def server(self) -> Server:
        """Return where its NATS is reached, until `close`."""
        if self._server is None:
            service = self._service
            role, seed = self._key(service)
            url = self._forwarded(service)
            self._server = Server(url, self.name, self._kept(seed), User(role).inbox)
        return self._server

    def operator_settings(self) -> dict[str, str]:
        """Return the environment of an operator that runs here, until `close`. NotPermitted.

        What the chart sets for the operator of the cluster, which may have no pod, counts here.
        """
        config = ("config", "view", "--raw", "--minify", "--flatten", "--output=json")
        return self._deployed | {
            "SNAPBACK_WORLD": "kubernetes",
            "SNAPBACK_NAMESPACE": self._service.namespace,
            "SNAPBACK_KUBECONFIG": self._kept(self._run(*config)),
            "SNAPBACK_NATS_URL": self.server().url,
            "SNAPBACK_NATS_CREDENTIALS": self._kept(self._seed(self._service, "operator")),
        }

    def apply(
        self, documents: Sequence[msgspec.Raw], traceparent: str, *, dry_run: bool = False
    ) -> list[Applied]:
        """Apply manifests, all or none, as this user. InvalidManifest, NotPermitted.

        With `dry_run` the API server checks them, and says what it would do.
        """
        if self._are_shaped_here:
            documents = [self._standing_by(document) for document in documents]
        items = [msgspec.json.decode(document) for document in documents]
        for item in items:
            item.setdefault("metadata", {}).setdefault("namespace", self.namespace)
        given = _traced(items, traceparent, {})
        apply = ("apply", "--filename", "-")
        said = self._run(*apply, "--dry-run=server", given=given).splitlines()
        if any(line.endswith(" configured (server dry run)") for line in said):
            # Perhaps by the new trace alone: what is there keeps its own.
            there = self._run("get", "--output=json", "--ignore-not-found", *apply[1:], given=given)
            given = _traced(items, traceparent, _traces_in(json.loads(there or "{}")))
            if dry_run:
                said = self._run(*apply, "--dry-run=server", given=given).splitlines()
        if dry_run:
            return [_applied(item, line) for item, line in zip(items, said, strict=True)]
        said = self._run(*apply, given=given).splitlines()
        stored = json.loads(self._run("get", "--output=json", "--filename", "-", given=given))
        found = stored.get("items", [stored])
        return [_applied(item, line) for item, line in zip(found, said, strict=True)]

    # Workers and logs.

    @property
    def python(self) -> str:
        return "python3"

    async def run(
        self, namespace: str, pod: str, container: str | None, program: Sequence[str]
    ) -> int:
        terminal = ["--stdin", *(["--tty"] if sys.stdin.isatty() and sys.stdout.isatty() else [])]
        return await self.show(
            "exec", pod, "--namespace", namespace, *terminal, *_within(container), "--", *program
        )

    async def answer(
        self, namespace: str, pod: str, container: str | None, program: Sequence[str]
    ) -> Ran:
        words = ("exec", pod, "--namespace", namespace, *_within(container), "--", *program)
        pipe = asyncio.subprocess.PIPE
        nowhere = asyncio.subprocess.DEVNULL
        ran = await answered(await self._started(words, stdin=nowhere, stdout=pipe, stderr=pipe))
        # The last words of kubectl would hide those of the program.
        return ran._replace(err=_ENDED.sub("", ran.err))

    async def show(self, *words: str) -> int:
        """Run kubectl with this terminal; return its exit code. WrongArguments without kubectl."""
        return await ended(self._started(words))

    async def _started(self, words: Sequence[str], **streams: Any) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(*self._words(*words), **streams)
        except FileNotFoundError:
            raise _no_kubectl() from None

    def log_of(self, service: ServiceNamed) -> list[str]:
        """Return the words by which kubectl shows the log of a service. NotFound."""
        component, container = KUBE_PARTS[service.service]
        part = f"app.kubernetes.io/part-of=snapback,app.kubernetes.io/component={component}"
        on = f",spec.nodeName={service.node}" if service.node else ""
        words = ("pods", "--all-namespaces", f"--selector={part}", "--output=json")
        found = json.loads(self._run("get", *words, f"--field-selector=status.phase!=Pending{on}"))
        pods = [
            (item["metadata"]["namespace"], item["metadata"]["name"], item["spec"].get("nodeName"))
            for item in found["items"]
        ]
        if not pods:
            raise NotFound(
                f"there is no pod of {service} in the cluster of {self.name}",
                next_step="see those that there are: kubectl get pods --all-namespaces "
                "--selector=app.kubernetes.io/part-of=snapback",
            )
        if len(pods) > 1 and service.service in OF_NODES:
            each = " or ".join(f"{service.service}@{node}" for _, _, node in pods)
            raise WrongArguments(f"the {service} of which node?", next_step=f"name {each}")
        namespace, pod, _ = pods[0]
        where = ["--namespace", namespace, f"--container={container}"]
        if len(pods) > 1:
            return ["logs", f"--selector={part}", *where, "--prefix"]
        return ["logs", pod, *where]

    def cordon(self, node: str, *, unschedulable: bool) -> bool:
        """Cordon a node, or uncordon it; return whether it was not so already."""
        said = self._run("cordon" if unschedulable else "uncordon", node)
        return " already " not in said

    def delete(self, target: Target, uid: str) -> bool:
        """Mark the incarnation with this uid for deletion. True when it is gone already."""
        condition = {"uid": uid} if uid else {}
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": condition}
        # The only form of `kubectl delete` that takes a uid.
        words = ("delete", "--raw", api_path(target), "--filename", "-")
        try:
            self._run(*words, given=json.dumps(options))
        except NotFound:
            return True
        return False

    def manifest(self, target: Target) -> dict[str, Any] | None:
        """Return the whole of an object as the API server has it; None when it does not exist."""
        try:
            found: dict[str, Any] = json.loads(self._run("get", "--raw", api_path(target)))
        except NotFound:
            return None
        return found

    def installation(self) -> SeenInstallation:
        """Return what this user may see of what the chart has installed."""
        named = "--ignore-not-found"
        part = "--selector=app.kubernetes.io/part-of=snapback"
        kinds = "daemonsets,deployments,statefulsets,pods"
        hooks = "mutatingwebhookconfigurations,validatingwebhookconfigurations"
        seen = SeenInstallation(
            definitions=self._listed("customresourcedefinitions", *DEFINITIONS, named),
            webhooks=self._listed(hooks, WEBHOOKS, named),
            workloads=self._listed(kinds, "--all-namespaces", part),
        )
        found = home(seen.workloads.items)
        if found is None:
            return seen
        namespace, name = found
        within = ("--namespace", namespace)
        keys = [f"{name}-nats-{word}" for word in KEYS]
        policies = "validatingadmissionpolicies,validatingadmissionpolicybindings"
        claim = artifact_claim(seen.workloads.items)
        restores = self._listed("snapshotrestores.nvidia.com", "--all-namespaces")
        return seen._replace(
            policies=self._listed(policies, *policy_names(name), named),
            restores=restores,
            clones=self._pods(brought_back(restores.items)),
            # The other installations of the cluster are not looked at.
            workloads=Asked(
                [
                    item
                    for item in seen.workloads.items
                    if item["metadata"]["namespace"] == namespace
                ]
            ),
            keys=self._named("secrets", *keys, named, *within),
            claims=self._listed("persistentvolumeclaims", *within) if claim else Asked(),
            tried=self._tried(),
        )

    def _listed(self, *words: str) -> Asked:
        try:
            said = self._run("get", *words, "--output=json")
        except SnapbackError as error:
            return Asked(failure=error.to_failure())
        # There is no list of one object, and of none nothing at all.
        found = json.loads(said) if said.strip() else {"items": []}
        return Asked(found.get("items", [found]))

    def _pods(self, names: Iterable[tuple[str, str]]) -> Asked:
        """Return pods by namespace and name; those that are gone are left out."""
        found: list[Any] = []
        rows = itertools.groupby(sorted(names), key=operator.itemgetter(0))
        for namespace, pods in rows:
            within = ("--namespace", namespace, "--ignore-not-found")
            asked = self._listed("pods", *within, *(name for _, name in pods))
            if asked.failure is not None:
                return asked
            found += asked.items
        return Asked(found)

    def _named(self, *words: str) -> Asked:
        """Return objects without what is in them."""
        try:
            said = self._run("get", *words, "--output=name")
        except SnapbackError as error:
            return Asked(failure=error.to_failure())
        return Asked([{"metadata": {"name": row.partition("/")[2]}} for row in said.split()])

    def _tried(self) -> Asked:
        """Ask for an object of ours that is not stored, which its webhook has to see."""
        given = json.dumps(
            {
                "apiVersion": GROUP,
                "kind": "Snapshot",
                "metadata": {"name": "snapback-doctor", "namespace": "default"},
                "spec": {"source": {"podRef": {"name": "snapback-doctor"}}},
            }
        )
        try:
            self._run("create", "--dry-run=server", "--filename", "-", given=given)
        except SnapbackError as error:
            return Asked(failure=error.to_failure())
        return Asked()

    def _standing_by(self, document: msgspec.Raw) -> msgspec.Raw:
        """Return a manifest as the operator's webhook has it stored. InvalidManifest."""
        if RESTORE_FROM.encode() not in bytes(document):
            return document
        (found,) = rendered([msgspec.json.decode(document)], self._deployed)
        return msgspec.Raw(msgspec.json.encode(found))

    def render(self, documents: Sequence[Any]) -> list[Any]:
        """Return manifests with the images of this installation. InvalidManifest."""
        return rendered(documents, self._deployed, "immediate")

    @cached_property
    def _deployed(self) -> dict[str, str]:
        """What the chart sets for the operator of the cluster."""
        name = f"{self._service.name.removesuffix('-nats')}-operator"
        words = ("--namespace", self._service.namespace, "get", "deployments", "--output=json")
        return operator_variables(json.loads(self._run(*words)), name)

    @cached_property
    def _service(self) -> NatsService:
        selector = "--selector=app.kubernetes.io/part-of=snapback,app.kubernetes.io/component=nats"
        words = ("get", "services", "--all-namespaces", selector, "--output=json")
        found = nats_services(json.loads(self._run(*words)))
        if not found:
            raise NotFound(
                f"there is no NATS of Snapback in the cluster of {self.name}",
                next_step="install the chart (docs/kubernetes.md); name a NATS of your own with "
                "--server",
            )
        if len(found) > 1:
            names = ", ".join(f"{each.namespace}/{each.name}" for each in found)
            raise WrongArguments(
                f"the cluster of {self.name} has several: {names}",
                next_step="forward a port of one of them; name it with --server and NATS_NKEY",
            )
        return found[0]

    def _key(self, service: NatsService) -> tuple[Role, str]:
        """Return the seed of the first role whose Secret this user may read. NotPermitted."""
        refused: NotPermitted | None = None
        for role in ROLES:
            try:
                return role, self._seed(service, role)
            except NotPermitted as error:
                refused = refused or error
        raise refused or NotPermitted("no key can be read")

    def _seed(self, service: NatsService, role: Role) -> str:
        secret = ("get", "secret", f"{service.name}-{role}")
        seed = '--output=go-template={{index .data "seed.nk" | base64decode}}'
        return self._run("--namespace", service.namespace, *secret, seed)

    def _kept(self, text: str) -> str:
        """Write a text into a file of this user alone, until `close`, and return its path."""
        file = self._open.enter_context(tempfile.NamedTemporaryFile("w"))  # noqa: SIM115
        file.write(text)
        file.flush()
        return file.name

    def _forwarded(self, service: NatsService) -> str:
        words = ("port-forward", f"service/{service.name}", ":4222")
        # Its errors go with its end; what it logs for each connection is of no use.
        errors = self._open.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115
        process = self._open.enter_context(
            subprocess.Popen(
                [*ending_with_us(), *self._words("--namespace", service.namespace, *words)],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                # Ctrl-C goes to this program alone, which needs the connection to clean up.
                start_new_session=True,
            )
        )
        self._open.callback(process.terminate)
        line = process.stdout.readline() if process.stdout else ""
        if found := re.search(r"127\.0\.0\.1:(\d+)", line):
            return f"nats://127.0.0.1:{found[1]}"
        errors.seek(0)
        raise self._error(words, errors.read())

    def _words(self, *words: str) -> list[str]:
        return ["kubectl", *self._options, *words]

    def _run(self, *words: str, given: str = "") -> str:
        try:
            done = subprocess.run(
                self._words(*words),
                input=given,
                capture_output=True,
                text=True,
                check=False,
                timeout=COMMAND_S,
            )
        except FileNotFoundError:
            raise _no_kubectl() from None
        except subprocess.TimeoutExpired:
            raise BusUnavailable(
                f"kubectl {words[0]} took longer than {COMMAND_S:g} s ({self.name})"
            ) from None
        if done.returncode:
            raise self._error(words, done.stderr)
        return done.stdout

    def _error(self, words: Sequence[str], said: str) -> Exception:
        problem = problem_in(said)
        values: dict[str, Any] = {"next_step": problem.next_step} if problem.next_step else {}
        return _ERRORS[problem.kind](f"{problem.message} ({self.name})", **values)


def _key(item: dict[str, Any]) -> tuple[str, str | None, str]:
    meta = item["metadata"]
    return item["kind"], meta.get("namespace"), meta.get("name", "")


def _traces_in(found: dict[str, Any]) -> dict[tuple[str, str | None, str], str]:
    """Return the trace of each object of an answer of `get`, which may be one or a list."""
    each = found.get("items", [found] if found else [])
    return {_key(item): item["metadata"].get("annotations", {}).get(TRACEPARENT) for item in each}


def _traced(
    items: Sequence[dict[str, Any]],
    traceparent: str,
    there: Mapping[tuple[str, str | None, str], str | None],
) -> str:
    """Return a list for kubectl: objects with the traces that they have or, if new, with this."""
    traced = []
    for item in items:
        trace = there.get(_key(item), traceparent)
        meta = item["metadata"]
        notes = {TRACEPARENT: trace} if trace is not None else {}
        traced.append(
            item | {"metadata": meta | {"annotations": notes | (meta.get("annotations") or {})}}
        )
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": traced})


def _applied(item: dict[str, Any], said: str) -> Applied:
    """Return what became of an object, from the line of kubectl."""
    meta, line = item["metadata"], said.removesuffix(" (server dry run)")
    known: tuple[Action, ...] = get_args(Action)
    return Applied(
        kind=item["kind"],
        namespace=meta.get("namespace"),
        name=meta["name"],
        uid=meta.get("uid", ""),
        action=next((action for action in known if line.endswith(f" {action}")), "unchanged"),
    )


def _within(container: str | None) -> list[str]:
    return [f"--container={container}"] if container else []


def _no_kubectl() -> WrongArguments:
    return WrongArguments(
        "kubectl is not on the PATH",
        next_step="install it: https://kubernetes.io/docs/tasks/tools/",
    )
