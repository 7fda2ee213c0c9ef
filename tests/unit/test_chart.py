"""The chart as helm renders it: rights, privileges, keys, and what its values may be."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from gms.main import GmsSettings
from snapshot_agent.guard_starter import StarterSettings
from snapshot_agent.helper.__main__ import HelperSettings
from snapshot_agent.main import AgentSettings
from snapshot_api.schema.definitions import definitions
from snapshot_operator.keys import CLUSTERS_OWN, KeysSettings
from snapshot_operator.kube import rbac
from snapshot_operator.kube.webhooks import Endpoint, configurations
from snapshot_operator.main import OperatorSettings
from snapshot_shared.reasons import REASONS
from snapshot_shared.service import VERSION
from snapshot_shared.settings import load
from tests.cluster import programs
from tests.support import helm

SCHEMA = json.loads((helm.CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((helm.CHART / "values.yaml").read_text())
SIMULATED = "--set=simulation.enabled=true"
CAPABILITIES = {
    "snapback-node/agent": ["CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL"],
    "snapback-node/guards": ["CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL"],
    "snapback-node/gms": ["DAC_OVERRIDE"],
}
HELPER = "--set=node.helper.enabled=true"
"""What reaches every process of a node."""
OWN_NATS = "--set=nats.url=nats://nats.example:4222"


def rendered(*words: str, **more: Any) -> list[Any]:
    """Render the chart, or skip the test where helm is not."""
    if helm.find() is None:
        pytest.skip(f"helm is missing: {programs.NEXT_STEP}")
    return helm.rendered(*words, **more)


def of_kind(documents: list[Any], kind: str) -> list[Any]:
    return [each for each in documents if each["kind"] == kind]


def found(documents: list[Any], kind: str, name: str) -> Any:
    [one] = [
        each for each in of_kind(documents, kind) if each["metadata"]["name"] == f"snapback-{name}"
    ]
    return one


def pod_of_nodes(documents: list[Any], name: str = "node") -> Any:
    return found(documents, "DaemonSet", name)["spec"]["template"]["spec"]


def by_name(rows: list[Any]) -> dict[str, Any]:
    named = {each["name"]: each for each in rows}
    assert len(named) == len(rows), "two have one name"
    return named


def containers_of(pod: Any) -> list[Any]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


def mounts_of(pod: Any) -> list[tuple[str, Any]]:
    """Return each mount with the name of its container."""
    return [(each["name"], mount) for each in containers_of(pod) for mount in each["volumeMounts"]]


def containers(documents: list[Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield each container with the name of its object and the spec of its pod."""
    for each in documents:
        template = each.get("spec", {}).get("template")
        if template:
            pod = template["spec"]
            for container in containers_of(pod):
                yield f"{each['metadata']['name']}/{container['name']}", container, pod


def environment(documents: list[Any], name: str) -> dict[str, str]:
    """Return the environment of a container as its process has it on node-1."""
    [container] = [each for where, each, _ in containers(documents) if where == name]
    fields = {"spec.nodeName": "node-1", "metadata.namespace": "snapback-system"}
    return {
        each["name"]: each["value"]
        if "value" in each
        else fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
        for each in container["env"]
    }


def test_the_chart_has_no_flaw_that_helm_lint_finds() -> None:
    assert rendered(SIMULATED, HELPER)
    helm.run("lint", "--strict", str(helm.CHART), SIMULATED, HELPER)


def test_the_logs_that_a_reason_names_are_those_of_a_container_of_the_chart() -> None:
    there = {
        (f"{key}={value}", container["name"])
        for each in of_kind(rendered(HELPER), "DaemonSet")
        for key, value in each["spec"]["template"]["metadata"]["labels"].items()
        for container in containers_of(each["spec"]["template"]["spec"])
    }
    texts = [" ".join(reason) for reason in REASONS.values()]
    named = [
        command
        for text in texts
        for command in re.findall(r"--selector (\S+) --container (\S+) --prefix", text)
    ]
    assert len(named) == 2
    assert set(named) <= there
    assert not any("app=" in text or "daemonset/" in text for text in texts)


@pytest.mark.parametrize("words", [(), (SIMULATED,), (OWN_NATS,)])
def test_no_container_has_more_than_it_needs(words: tuple[str, ...]) -> None:
    there = list(containers(rendered(*words)))
    assert len(there) >= 4
    for name, container, pod in there:
        context = pod["securityContext"] | container["securityContext"]
        assert context["readOnlyRootFilesystem"], name
        assert not context["allowPrivilegeEscalation"], name
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not container.get("privileged"), name
        assert context["capabilities"]["drop"] == ["ALL"], name
        added = context["capabilities"].get("add", [])
        assert added == CAPABILITIES.get(name, []), name
        if not name.startswith("snapback-node"):
            assert (context["runAsNonRoot"], context["runAsUser"]) == (True, 65532), name
            assert not any("hostPath" in volume for volume in pod["volumes"]), name


def test_the_operator_has_the_rights_of_its_table_and_no_others() -> None:
    documents = rendered()
    role = found(documents, "ClusterRole", "operator")
    assert role["rules"] == rbac.cluster_role()["rules"]
    within = found(documents, "Role", "operator")
    assert within["rules"] == rbac.lease_role("")["rules"]
    for kind in ("ClusterRoleBinding", "RoleBinding"):
        binding = found(documents, kind, "operator")
        assert binding["subjects"] == [
            {"kind": "ServiceAccount", "name": "snapback-operator", "namespace": "snapback-system"}
        ]


@pytest.mark.parametrize("release", ["snapback", "other"])
@pytest.mark.parametrize("url", ["", "https://198.51.100.7:9443"])
def test_the_webhooks_are_those_that_the_operator_serves_by_the_names_of_the_release(
    release: str, url: str
) -> None:
    documents = rendered(f"--set=webhooks.enabled=true,webhooks.url={url}", release=release)
    name = "snapback" if release == "snapback" else "other-snapback"
    given = environment(documents, f"{name}-operator/operator")
    settings = load(OperatorSettings, given | {"SNAPBACK_STATE_DIR": "/tmp"})
    [deployment] = of_kind(documents, "Deployment")
    account = deployment["spec"]["template"]["spec"]["serviceAccountName"]
    service, url = settings.webhook_service, settings.webhook_url
    endpoint = Endpoint(settings.namespace, service, url=url, account=account)
    for expected in configurations(endpoint):
        [one] = of_kind(documents, expected["kind"])
        assert one["metadata"]["name"] == expected["metadata"]["name"]
        assert one["webhooks"] == expected["webhooks"]
    assert service in {each["metadata"]["name"] for each in of_kind(documents, "Service")}


def test_the_nodes_have_no_rights_without_simulation_and_the_agent_never_has_a_token() -> None:
    bare, simulated = rendered(), rendered(SIMULATED)

    def bound(documents: list[Any]) -> set[str]:
        return {
            each["roleRef"]["name"]
            for each in documents
            if each["kind"].endswith("Binding")
            and any(subject["name"] == "snapback-node" for subject in each.get("subjects", ()))
        }

    assert bound(bare) == set()
    assert bound(simulated) == {"snapback-simulation"}
    pod = pod_of_nodes(simulated)
    assert pod["automountServiceAccountToken"] is False
    assert {name for name, mount in mounts_of(pod) if mount["name"] == "token"} == {"gms"}


def test_the_keys_of_a_node_are_in_no_secret_and_each_service_mounts_its_own_alone() -> None:
    documents = rendered(HELPER)
    for name in ("node", "node-keys"):
        assert not any("secret" in each for each in pod_of_nodes(documents, name)["volumes"])
    pod = pod_of_nodes(documents)
    volumes = by_name(pod["volumes"])
    for container in pod["containers"]:
        mounts = {
            volumes[mount["name"]]["hostPath"]["path"]: mount
            for mount in container["volumeMounts"]
            if "keys" in mount["name"]
        }
        own = [f"/var/lib/snapback/keys/{container['name']}"]
        assert list(mounts) == ([] if container["name"] in ("guards", "helper") else own)
        assert all(mount["readOnly"] for mount in mounts.values())


def test_what_makes_keys_is_a_hook_that_may_touch_the_secrets_of_its_program_alone() -> None:
    documents = rendered()
    names = ("snapback-keys", "snapback-node-keys")
    hooks = [each for each in documents if each["metadata"]["name"] in names]
    assert {each["kind"] for each in hooks} == {
        *("ClusterRole", "ClusterRoleBinding", "DaemonSet", "Job"),
        *("Role", "RoleBinding", "ServiceAccount"),
    }
    for each in hooks:
        notes = each["metadata"]["annotations"]
        assert notes["helm.sh/hook"] == "pre-install,pre-upgrade"
        assert notes["helm.sh/hook-delete-policy"] == "before-hook-creation,hook-succeeded"
    settings = load(KeysSettings, environment(documents, "snapback-keys/keys"))
    assert settings.keys_daemon_set == "snapback-node-keys"
    rules = {
        (rule["resources"][0], verb): rule.get("resourceNames")
        for rule in found(documents, "Role", "keys")["rules"]
        for verb in rule["verbs"]
    }
    secrets = [f"{settings.keys_prefix}-{each}" for each in (*CLUSTERS_OWN, "accounts")]
    assert rules == {
        ("daemonsets", "watch"): [settings.keys_daemon_set],
        ("pods", "list"): None,
        ("secrets", "create"): None,
        ("secrets", "get"): secrets,
        ("secrets", "update"): secrets,
    }
    assert found(documents, "ClusterRole", "keys")["rules"] == [
        {"apiGroups": [""], "resources": ["nodes"], "verbs": ["list"]}
    ]


def test_images_with_the_cuda_bindings_are_named_where_they_are_asked_for() -> None:
    documents = rendered("--set=image.cuda=true", HELPER)
    images = {name: container["image"] for name, container, _ in containers(documents)}
    assert images["snapback-node/gms"] == f"snapback/gms:{VERSION}-cuda"
    assert images["snapback-node/helper"] == f"snapback/snapshot-agent:{VERSION}-cuda"
    assert images["snapback-operator/operator"] == f"snapback/operator:{VERSION}"
    given = environment(documents, "snapback-operator/operator")
    assert given["SNAPBACK_GMS_IMAGE"] == f"snapback/gms:{VERSION}-cuda"


def test_the_settings_of_each_service_are_those_that_it_reads() -> None:
    documents = rendered(SIMULATED, "--set-string=operator.env.SNAPBACK_KEEP_COUNT=5")
    # The image names it.
    given = environment(documents, "snapback-operator/operator")
    operator = load(OperatorSettings, given | {"SNAPBACK_STATE_DIR": "/tmp"})
    assert (operator.world, operator.namespace) == ("kubernetes", "snapback-system")
    assert (operator.keep_count, operator.gms_image) == (5, f"snapback/gms:{VERSION}")
    assert operator.agent_image == f"snapback/snapshot-agent:{VERSION}"
    assert operator.nats_url == "nats://snapback-nats.snapback-system.svc:4222"
    agent = load(AgentSettings, environment(documents, "snapback-node/agent"))
    gms = load(GmsSettings, environment(documents, "snapback-node/gms"))
    assert agent.node == gms.node == "node-1"
    assert agent.world == gms.world == "kubernetes"
    assert agent.kubelet_dir == gms.kubelet_dir == Path("/var/lib/kubelet")
    assert (agent.socket_dir, agent.artifact_root) == (gms.socket_dir, gms.artifact_root)
    assert agent.state_dir != gms.state_dir
    starter = load(StarterSettings, environment(documents, "snapback-node/guards"))
    assert (starter.state_dir, starter.guard_starter) == (agent.state_dir, agent.guard_starter)
    addresses = [each for it in (agent, gms) for each in (it.http_address, it.health_address)]
    assert len(set(addresses)) == 4
    assert (gms.gms_device, gms.devices, gms.device_bytes) == ("simulated", 2, 2**30)
    assert gms.kubelet_plugin == "auto"
    without = load(GmsSettings, environment(rendered(), "snapback-node/gms"))
    assert (without.gms_device, without.kubelet_plugin) == ("cuda", "off")


def test_folders_that_the_kubelet_and_the_runtime_read_have_the_same_path_inside() -> None:
    folders = "kubelet.dir=/data/kubelet,kubelet.podLogsDir=/data/logs,simulation.cdiDir=/etc/cdi"
    documents = rendered(SIMULATED, f"--set={folders}")
    pod = pod_of_nodes(documents)
    paths = {
        each["name"]: each["hostPath"]["path"] for each in pod["volumes"] if "hostPath" in each
    }
    for container in pod["containers"]:
        mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        read = ("plugins", "plugins-registry", "cdi") if container["name"] == "gms" else ()
        for name in ("pods", *read):
            assert mounts[name] == paths[name]
        given = environment(documents, f"snapback-node/{container['name']}")
        if container["name"] in ("agent", "gms"):
            where = mounts["pod-logs"], paths["pod-logs"], given["SNAPBACK_POD_LOGS_DIR"]
            assert where == ("/data/logs",) * 3
        # A guard gets the path of a control directory from its agent.
        if container["name"] != "guards":
            assert given["SNAPBACK_KUBELET_DIR"] == "/data/kubelet"
    assert paths["plugins"] == "/data/kubelet/plugins"
    assert paths["pods"] == "/data/kubelet/pods"


def test_no_node_has_a_helper_or_its_folders_unless_it_is_asked_for() -> None:
    pod = pod_of_nodes(rendered())
    assert [each["name"] for each in pod["containers"]] == ["agent", "guards", "gms"]
    text = json.dumps(pod)
    assert not [word for word in ("helper", "/host/cgroup", "containerd") if word in text]


def test_the_helper_has_a_listed_set_of_capabilities_and_neither_keys_nor_a_token() -> None:
    more = "--set=node.helper.extraCapabilities={SYS_RAWIO}"
    pod = pod_of_nodes(rendered(more, SIMULATED, HELPER))
    helper = by_name(pod["containers"])["helper"]
    context = pod["securityContext"] | helper["securityContext"]
    assert context["runAsUser"] == 0
    assert context["readOnlyRootFilesystem"]
    assert "privileged" not in context
    for profile in ("seccompProfile", "appArmorProfile"):
        assert context[profile] == {"type": "Unconfined"}
    assert context["capabilities"]["drop"] == ["ALL"]
    added = context["capabilities"]["add"]
    assert {"SYS_ADMIN", "SYS_PTRACE", "SYS_RAWIO"} < {*added}
    assert not {"SYS_RESOURCE", "SYS_MODULE", "SYS_BOOT", "BPF"} & {*added}
    mounts = {each["mountPath"]: each for each in helper["volumeMounts"]}
    assert {each["name"] for each in mounts.values()}.isdisjoint(
        {"agent-keys", "gms-keys", "token"}
    )
    assert mounts["/var/lib/snapback/artifacts"]["readOnly"]


def test_the_helper_is_shown_the_gpus_of_its_node_where_they_are_real() -> None:
    name = "snapback-node/helper"
    shown = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
    assert shown.items() <= environment(rendered(HELPER), name).items()
    assert not shown.keys() & environment(rendered(SIMULATED, HELPER), name).keys()


def test_the_agent_and_its_helper_meet_at_a_socket_that_no_other_container_has() -> None:
    documents = rendered("--set=node.runtimeDir=/data/containerd,node.cgroupDir=/cgroup", HELPER)
    pod = pod_of_nodes(documents)
    volumes = by_name(pod["volumes"])
    sockets = {
        environment(documents, f"snapback-node/{name}")["SNAPBACK_HELPER"]
        for name in ("agent", "helper")
    }
    assert sockets == {"/run/helper/helper.sock"}
    mounts = {
        name: {row["mountPath"]: row for row in each["volumeMounts"]}
        for name, each in by_name(pod["containers"]).items()
    }
    where = {name for name, each in mounts.items() if "/run/helper" in each}
    assert where == {"agent", "guards", "helper"}
    assert volumes["helper"]["emptyDir"]["medium"] == "Memory"
    # The container runtime names the files of containers by their paths on the node.
    runtime = mounts["helper"]["/data/containerd"]
    assert volumes[runtime["name"]]["hostPath"]["path"] == "/data/containerd"
    assert runtime["readOnly"]
    cgroup = mounts["helper"][environment(documents, "snapback-node/helper")["SNAPBACK_CGROUP_DIR"]]
    assert volumes[cgroup["name"]]["hostPath"]["path"] == "/cgroup"
    assert "readOnly" not in cgroup


def test_criu_has_a_scratch_folder_that_the_helper_reads_and_the_agent_writes() -> None:
    scratch = "--set=node.scratch.use=always,node.scratch.medium=Memory,node.scratch.sizeLimit=8Gi"
    documents = rendered(scratch, HELPER)
    agent = load(AgentSettings, environment(documents, "snapback-node/agent"))
    helper = load(HelperSettings, environment(documents, "snapback-node/helper"))
    assert agent.scratch_dir == helper.scratch_dir
    assert agent.scratch == "always"
    pod = pod_of_nodes(documents)
    mounts = {
        name: mount.get("readOnly", False)
        for name, mount in mounts_of(pod)
        if mount["mountPath"] == str(agent.scratch_dir)
    }
    assert mounts == {"agent": False, "helper": True}
    limited = by_name(pod["volumes"])["scratch"]["emptyDir"]
    assert limited == {"medium": "Memory", "sizeLimit": "8Gi"}
    plain = by_name(pod_of_nodes(rendered(HELPER))["volumes"])["scratch"]["emptyDir"]
    assert plain == {}


def test_the_keys_of_artifacts_are_those_of_the_agent_and_of_gms_alone() -> None:
    bare = load(AgentSettings, environment(rendered(), "snapback-node/agent"))
    assert (bare.artifact_keys, bare.require_signature) == (None, False)
    words = ("--set=storage.keys.secret=ours,storage.keys.requireSignature=true", HELPER)
    documents = rendered(*words)
    agent = load(AgentSettings, environment(documents, "snapback-node/agent"))
    assert agent.require_signature
    pod = pod_of_nodes(documents)
    mounts = [
        (name, mount["mountPath"], mount["readOnly"])
        for name, mount in mounts_of(pod)
        if mount["name"] == "artifact-keys"
    ]
    gms = load(GmsSettings, environment(documents, "snapback-node/gms"))
    assert gms.artifact_keys == agent.artifact_keys
    assert mounts == [(name, str(agent.artifact_keys), True) for name in ("agent", "gms")]
    assert gms.require_signature
    assert not gms.encrypt_memory
    encrypting = rendered(*words, "--set=storage.keys.encryptMemory=true")
    assert load(GmsSettings, environment(encrypting, "snapback-node/gms")).encrypt_memory
    secret = by_name(pod["volumes"])["artifact-keys"]["secret"]
    assert secret == {"secretName": "ours", "defaultMode": 0o400}


def test_with_a_nats_of_the_readers_the_chart_makes_keys_for_it_and_runs_none() -> None:
    documents = rendered(OWN_NATS)
    names = {f"{each['kind']}/{each['metadata']['name']}" for each in documents}
    assert not [each for each in names if each.startswith(("StatefulSet/", "ConfigMap/"))]
    assert "Service/snapback-nats" not in names
    assert "Job/snapback-keys" in names
    for name in ("operator/operator", "node/agent", "node/gms"):
        given = environment(documents, f"snapback-{name}")
        assert given["SNAPBACK_NATS_URL"] == "nats://nats.example:4222"


def test_a_claim_takes_the_place_of_the_folder_of_the_node_and_of_the_servers_memory() -> None:
    documents = rendered("--set=storage.claim=artifacts,nats.storage.claim=true")
    volume = by_name(pod_of_nodes(documents)["volumes"])["artifacts"]
    assert volume == {"name": "artifacts", "persistentVolumeClaim": {"claimName": "artifacts"}}
    server = found(documents, "StatefulSet", "nats")["spec"]
    assert "state" not in {each["name"] for each in server["template"]["spec"]["volumes"]}
    assert server["volumeClaimTemplates"][0]["metadata"]["name"] == "state"


def test_two_releases_share_no_name_but_those_of_the_device_class_and_the_webhooks() -> None:
    names = [
        {(each["kind"], each["metadata"]["name"]) for each in rendered(SIMULATED, release=name)}
        for name in ("a", "b")
    ]
    assert names[0] & names[1] == {
        ("DeviceClass", "gpu.nvidia.com"),
        ("MutatingWebhookConfiguration", "snapback-operator"),
        ("ValidatingWebhookConfiguration", "snapback-operator"),
    }


def test_helm_refuses_a_value_that_the_schema_does_not_know() -> None:
    with pytest.raises(helm.HelmError, match="simulatoin"):
        rendered("--set=simulatoin.enabled=true")


def test_the_version_and_the_definitions_of_the_chart_are_those_of_the_product() -> None:
    found = yaml.safe_load((helm.CHART / "Chart.yaml").read_text())
    assert found["version"] == found["appVersion"] == VERSION
    files = [yaml.safe_load(file.read_text()) for file in (helm.CHART / "crds").iterdir()]
    names = {each["metadata"]["name"] for each in files}
    assert names == {each["metadata"]["name"] for each in definitions()}


VALIDATOR = jsonschema.validators.validator_for(SCHEMA)(SCHEMA)


def leaves(schema: Any, path: str = "") -> Iterator[str]:
    """Yield the path of each value that has no values of its own."""
    for name, each in schema["properties"].items():
        if "properties" in each:
            yield from leaves(each, f"{path}{name}.")
        elif name != "global":
            yield f"{path}{name}"


def test_a_value_of_another_type_or_beside_the_known_ones_is_refused() -> None:
    taken = []
    for path in leaves(SCHEMA):
        *parents, last = path.split(".")
        for key, wrong in ((last, 1.5), (last + "X", "x")):
            values = copy.deepcopy(VALUES)
            folder = values
            for parent in parents:
                folder = folder[parent]
            folder[key] = wrong
            if VALIDATOR.is_valid(values):
                taken.append(f"{path}: {key}={wrong}")
    assert taken == []


def schemas(schema: Any, path: str) -> Iterator[tuple[str, Any]]:
    yield path, schema
    for name, each in schema.get("properties", {}).items():
        yield from schemas(each, f"{path}.{name}")
    for each in schema.get("anyOf", ()):
        yield from schemas(each, path)
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from schemas(schema[key], f"{path}.{key}")


ALL = [
    *schemas(SCHEMA, "values"),
    *(
        each
        for name in SCHEMA["definitions"]
        for each in schemas(SCHEMA["definitions"][name], name)
    ),
]


def is_bounded(schema: dict[str, Any]) -> bool:
    if {"$ref", "anyOf", "enum", "const"} & set(schema):
        return True
    match schema["type"]:
        case "object":
            return "maxProperties" in schema or schema["additionalProperties"] is False
        case "array":
            return {"maxItems", "items"} <= set(schema)
        case "string":
            return "maxLength" in schema
        case "integer" | "number":
            return {"minimum", "maximum"} <= set(schema)
        case kind:
            return kind == "boolean"


def test_the_schema_takes_the_defaults_and_every_value_has_a_type_and_a_bound() -> None:
    assert [path for path, schema in ALL if not is_bounded(schema)] == []
    jsonschema.validate(VALUES, SCHEMA)


def test_the_alerts_are_those_of_the_file_with_the_address_of_the_runbooks() -> None:
    page = "https://docs.example.com/latest/runbooks.html"
    documents = rendered(f"--set=monitoring.enabled=true,monitoring.runbooks={page}")
    [rule] = of_kind(documents, "PrometheusRule")
    alerts = (programs.REPOSITORY / "deploy/observability/alerts.yml").read_text()
    assert rule["spec"] == yaml.safe_load(alerts.replace("docs/runbooks.md", page))


def test_prometheus_is_led_to_every_port_with_metrics() -> None:
    documents = rendered("--set=monitoring.enabled=true,monitoring.labels.release=prometheus")
    [monitor] = of_kind(documents, "PodMonitor")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    serving = {
        port["name"]
        for _, container, _ in containers(documents)
        for port in container.get("ports", ())
        if port["name"].endswith("http")
    }
    assert {each["port"] for each in monitor["spec"]["podMetricsEndpoints"]} == serving
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    for name in ("operator", "node"):
        kind = "Deployment" if name == "operator" else "DaemonSet"
        labels = found(documents, kind, name)["spec"]["template"]["metadata"]["labels"]
        assert wanted <= labels.items()


def test_the_ports_of_probes_are_open_to_the_kubelet_alone_and_nats_to_the_release() -> None:
    source = "networkPolicy.metricsFrom[0].namespaceSelector.matchLabels.role=metrics"
    documents = rendered(f"--set={source}")
    policies = of_kind(documents, "NetworkPolicy")
    metrics = [{"namespaceSelector": {"matchLabels": {"role": "metrics"}}}]
    release = {"app.kubernetes.io/name": "snapback", "app.kubernetes.io/instance": "snapback"}
    own = [{"podSelector": {"matchLabels": release}}]
    opened = {
        port["port"]: rule.get("from")
        for policy in policies
        for rule in policy["spec"]["ingress"]
        for port in rule["ports"]
    }
    assert opened == {
        "webhooks": None,
        "http": metrics,
        "agent-http": metrics,
        "gms-http": metrics,
        "nats": own,
    }
    selected = [each["spec"]["podSelector"]["matchLabels"].items() for each in policies]
    for each in documents:
        template = each.get("spec", {}).get("template", {})
        if any(
            "ports" in container for container in template.get("spec", {}).get("containers", ())
        ):
            labels = template["metadata"]["labels"].items()
            assert sum(wanted <= labels for wanted in selected) == 1
    for _, container, _ in containers(documents):
        probed = {
            container[probe]["httpGet"]["port"]
            for probe in ("readinessProbe", "livenessProbe")
            if "httpGet" in container.get(probe, ())
        }
        assert not probed & {port["containerPort"] for port in container.get("ports", ())}
    assert not of_kind(rendered("--set=networkPolicy.enabled=false"), "NetworkPolicy")


def test_nothing_of_the_prometheus_operator_is_made_unless_it_is_asked_for() -> None:
    kinds = {each["kind"] for each in rendered()}
    assert not kinds & {"PrometheusRule", "PodMonitor"}
