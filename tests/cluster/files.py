"""What the components of a cluster read: their configuration, as text."""

from __future__ import annotations

import json
from typing import Any

CONTROL = "control-plane"
API_ADDRESS = "10.250.0.1"
API_PORT = 6443
SERVICES = "10.96.0.0/16"
DNS_ADDRESS = "10.96.0.10"
PODS = "10.244.0.0/16"
MAX_NODES = 200
PAUSE_IMAGE = "snapback.local/pause:1"
USERS = {
    "admin": ("admin", "system:masters"),
    "controllers": ("system:kube-controller-manager", ""),
    "dns": ("system:coredns", ""),
    "proxy": ("system:kube-proxy", ""),
    "scheduler": ("system:kube-scheduler", ""),
}
"""The users of the API server beside the nodes, with their names and groups there."""
OPENSSL = "[req]\ndistinguished_name=name\n[name]\n"
"""The configuration of openssl: what it reads otherwise adds extensions."""


def node_address(number: int) -> str:
    """Return the address of a node on the network of the machines."""
    return f"10.250.0.{10 + number}"


def pod_subnet(number: int) -> str:
    """Return the addresses of the pods of a node."""
    return f"10.244.{number}.0/24"


def server_names(address: str) -> str:
    """Return the names of the API server's certificate; `address` is where the host reaches it."""
    service = "kubernetes.default.svc"
    names = ("kubernetes", "kubernetes.default", service, f"{service}.cluster.local")
    # The first address of the services is that of the API server.
    addresses = (API_ADDRESS, "10.96.0.1", address)
    return ",".join([*(f"DNS:{name}" for name in names), *(f"IP:{each}" for each in addresses)])


def tokens(secrets: dict[str, str]) -> str:
    """Return the token file of the API server, of the tokens by the names of their users."""
    lines = []
    for user, token in secrets.items():
        name, groups = USERS.get(user, (f"system:node:{user}", "system:nodes"))
        lines.append(f'{token},{name},{user},"{groups}"' if groups else f"{token},{name},{user}")
    return "\n".join(lines) + "\n"


def kubeconfig(server: str, authority: str, token: str) -> str:
    """Return a kubeconfig; `authority` is the path of the certificate of the authority."""
    return _yaml(
        apiVersion="v1",
        kind="Config",
        clusters=[
            {"name": "snapback", "cluster": {"server": server, "certificate-authority": authority}}
        ],
        users=[{"name": "user", "user": {"token": token}}],
        contexts=[{"name": "snapback", "context": {"cluster": "snapback", "user": "user"}}],
        **{"current-context": "snapback"},
    )


def containerd() -> str:
    """Return the configuration of containerd, which has its usual folders.

    It is of the version that containerd 1.x reads, and 2.x as well.
    """
    return f"""version = 2
oom_score = 0
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  # A host may not let even root lower an OOM score.
  restrict_oom_score_adj = true
  disable_apparmor = true
  enable_cdi = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
"""


def cni(number: int) -> str:
    """Return the configuration of the pod network of a node."""
    # Not `bridge`: iptables, and so Services, see what goes over a bridge only where the host has
    # loaded br_netfilter.
    pods = {
        "type": "ptp",
        "ipam": {
            "type": "host-local",
            "ranges": [[{"subnet": pod_subnet(number)}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return _yaml(cniVersion="0.4.0", name="pods", plugins=[pods, ports])


def kubelet(cgroup: str, authority: str, resolv_conf: str) -> str:
    """Return the configuration of a kubelet."""
    return _yaml(
        apiVersion="kubelet.config.k8s.io/v1beta1",
        kind="KubeletConfiguration",
        authentication={"anonymous": {"enabled": False}, "x509": {"clientCAFile": authority}},
        cgroupDriver="cgroupfs",
        cgroupRoot=cgroup,
        clusterDNS=[DNS_ADDRESS],
        clusterDomain="cluster.local",
        containerRuntimeEndpoint="unix:///run/containerd/containerd.sock",
        evictionHard={"nodefs.available": "1%", "imagefs.available": "1%"},
        # Version 1 of cgroups is refused otherwise.
        failCgroupV1=False,
        failSwapOn=False,
        # Without it the kubelet ends where it may not set what belongs to the whole host.
        featureGates={"KubeletInUserNamespace": True},
        makeIPTablesUtilChains=False,
        maxPods=100,
        nodeStatusUpdateFrequency="2s",
        oomScoreAdj=0,
        readOnlyPort=0,
        resolvConf=resolv_conf,
        # How soon a pod is tried again whose DRA driver was away: a minute or more by default.
        syncFrequency="5s",
    )


def proxy(node: str, kubeconfig_path: str) -> str:
    """Return the configuration of the kube-proxy of a node."""
    return _yaml(
        apiVersion="kubeproxy.config.k8s.io/v1alpha1",
        kind="KubeProxyConfiguration",
        clientConnection={"kubeconfig": kubeconfig_path},
        clusterCIDR=PODS,
        # The sizes of conntrack's tables belong to the whole host.
        conntrack={"maxPerCore": 0, "min": 0},
        hostnameOverride=node,
        mode="iptables",
    )


def corefile(kubeconfig_path: str) -> str:
    """Return the configuration of CoreDNS."""
    return f""".:53 {{
    bind {API_ADDRESS}
    errors
    kubernetes cluster.local in-addr.arpa {{
        kubeconfig {kubeconfig_path} snapback
    }}
    cache 5
}}
"""


def base_objects() -> list[dict[str, Any]]:
    """Return the objects by which kube-proxy and DNS work."""
    ports = [
        {"name": "dns", "port": 53, "protocol": "UDP"},
        {"name": "dns-tcp", "port": 53, "protocol": "TCP"},
    ]
    dns = {"name": "kube-dns", "namespace": "kube-system"}
    label = {"kubernetes.io/service-name": "kube-dns"}
    rule = {
        "apiGroups": ["", "discovery.k8s.io"],
        "resources": ["endpointslices", "namespaces", "pods", "services"],
        "verbs": ["list", "watch"],
    }
    rbac = "rbac.authorization.k8s.io/v1"
    return [
        {"apiVersion": rbac, "kind": "ClusterRole", "metadata": {"name": "dns"}, "rules": [rule]},
        _binding("dns", "dns", "system:coredns"),
        _binding("proxy", "system:node-proxier", "system:kube-proxy"),
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": dns,
            "spec": {"clusterIP": DNS_ADDRESS, "ports": ports},
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": dns | {"labels": label},
            "addressType": "IPv4",
            "endpoints": [{"addresses": [API_ADDRESS]}],
            "ports": ports,
        },
    ]


def audit_policy() -> str:
    """Return what the API server writes down of requests: not those of the cluster's own parts.

    Of the objects of our kinds it writes down all.
    """
    users = [name for name, groups in USERS.values() if not groups]
    own_parts: list[dict[str, Any]] = [
        {"users": [*users, "system:apiserver"]},
        {"userGroups": ["system:nodes", "system:serviceaccounts:kube-system"]},
        {"nonResourceURLs": ["/*"]},
    ]
    rules = [{"level": "None", **rule} for rule in own_parts]
    ours = {"level": "Metadata", "resources": [{"group": "nvidia.com"}]}
    return _yaml(
        apiVersion="audit.k8s.io/v1",
        kind="Policy",
        omitStages=["RequestReceived"],
        rules=[ours, *rules, {"level": "Metadata"}],
    )


def _binding(name: str, role: str, user: str) -> dict[str, Any]:
    group = "rbac.authorization.k8s.io"
    return {
        "apiVersion": f"{group}/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": role},
        "subjects": [{"apiGroup": group, "kind": "User", "name": user}],
    }


def _yaml(**document: Any) -> str:
    """Return a document as JSON, which is YAML."""
    return json.dumps(document, indent=1) + "\n"
