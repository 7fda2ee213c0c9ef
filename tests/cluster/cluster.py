"""A cluster of machines on this host: etcd and the control plane on one, a kubelet on each other.

All that a cluster has is in its folder, in namespaces and in cgroups of its name. What a harness
that was killed has left is found by these names and removed before the next cluster begins.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import secrets
import shutil
import signal
import time
import urllib.parse
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.cluster import files, programs
from tests.cluster.host import ClusterError, connect, disconnect, ip, locked, root
from tests.cluster.kubectl import Kubectl, KubectlError
from tests.cluster.machine import ComponentError, Machine, end, marked, remove_cgroups
from tests.cluster.oci import write_image

START_S = 90.0
RETRY_S = 0.05
ANSWER_S = 2.0
FAILED = programs.REPOSITORY / ".cluster"
"""Where the logs of a cluster that did not start are kept."""


class Cluster:
    """The cluster `name`, whether it runs or not; `say` gets a line for each step."""

    def __init__(self, name: str, say: Callable[[str], object] = print) -> None:
        self.name = name
        self.folder = root() / name
        self.control = Machine(self.folder, files.CONTROL)
        self.kubectl = Kubectl(self.folder / "admin.kubeconfig", self.folder / "bin" / "kubectl")
        self._say = say
        self._began = time.monotonic()
        self._owned = contextlib.ExitStack()
        self._lifeline: int | None = None
        self._api_flags: Sequence[str] = ()

    @property
    def nodes(self) -> list[Machine]:
        """The machines of its nodes, running or not, in their order."""
        names = [path.name for path in self.folder.glob("node-*/")]
        return [Machine(self.folder, name) for name in sorted(names, key=_number)]

    @property
    def machines(self) -> list[Machine]:
        return [self.control, *self.nodes]

    @property
    def host_address(self) -> str:
        """The address of this host on its link to the cluster, which all pods reach."""
        config = json.loads(self.kubectl.kubeconfig.read_text())
        server = urllib.parse.urlsplit(config["clusters"][0]["cluster"]["server"])
        # The first of the two addresses of the link; the second is the API server's.
        return str(ipaddress.ip_address(server.hostname or "") - 1)

    @property
    def audit_log(self) -> Path:
        """Where the API server writes down requests, one a line, before it answers them."""
        return self.control.home / "log" / "audit.log"

    @property
    def kept(self) -> bool:
        """Whether it was left to run without a process that owns it."""
        return (self.folder / "kept").exists()

    def up(self, nodes: int = 2, *, owned: bool = False, api_flags: Sequence[str] = ()) -> None:
        """Start the cluster and wait until its nodes are ready.

        One that is `owned` ends with this process, however that ends. Raise ClusterError when it
        runs already, and ComponentError when a component of it fails.
        """
        if not 0 <= nodes <= files.MAX_NODES:
            raise ClusterError(f"a cluster of {nodes} nodes; give 0 to {files.MAX_NODES}")
        if why := programs.lacking():
            raise ClusterError(why)
        with contextlib.ExitStack() as held:
            with locked(root(), wait=True):
                _sweep(self._say)
                held.enter_context(locked(self.folder))
            self._began = time.monotonic()
            if self.kept:
                raise ClusterError(f"cluster {self.name} runs already; take it down first")
            if owned:
                self._own(held)
            self._api_flags = api_flags
            try:
                self._start_all(nodes)
            except BaseException:
                self._keep_logs()
                self._destroy()
                raise
            if owned:
                self._owned = held.pop_all()
            else:
                (self.folder / "kept").touch()

    def load(self, *archives: Path) -> None:
        """Import images into the nodes that run."""
        # An image is unpacked on a node when its first container is made there.
        words = ("ctr", "--namespace", "k8s.io", "images", "import", "--no-unpack", "-")
        for node in self.nodes:
            for archive in archives if node.pid else ():
                # Not by its name: a node does not see all folders of the host.
                with archive.open("rb") as content:
                    node.run(*words, given=content)

    def kill(self, name: str) -> None:
        """End a machine at once, with all that runs on it, as a power cut does."""
        self.machine(name).kill()

    def start(self, name: str) -> None:
        """Boot a node that was killed; what was on its disks is still there."""
        node = self.machine(name)
        self._boot_node(node)
        self._start_node(node)

    def back_up(self, folder: Path) -> None:
        """Copy what etcd has into a new folder; it stands still meanwhile."""
        self.control.send("etcd", signal.SIGSTOP)
        try:
            shutil.copytree(self.control.home / "etcd", folder)
        finally:
            self.control.send("etcd", signal.SIGCONT)

    def restore(self, folder: Path) -> None:
        """Put a copy of what etcd had in the place of what it has, as after a loss.

        All parts of the cluster start anew, as they have to; the containers go on. What else is
        connected with the API server is cut off.
        """
        parts = ("kube-apiserver", "etcd", "kube-controller-manager", "kube-scheduler", "coredns")
        self.control.stop(*parts)
        for node in self.nodes:
            node.stop("kubelet", "kube-proxy")
        shutil.rmtree(self.control.home / "etcd")
        shutil.copytree(folder, self.control.home / "etcd")
        self._began = time.monotonic()
        self._start_api()
        self._await("the API server answers", self._api_answers)
        self._start_controllers()
        for node in self.nodes:
            self._start_node(node)

    def machine(self, name: str) -> Machine:
        """Return a machine by its name; raise ClusterError when there is none."""
        for machine in self.machines:
            if machine.name == name:
                return machine
        known = ", ".join(machine.name for machine in self.machines)
        raise ClusterError(f"cluster {self.name} has no machine {name}; it has {known}")

    def check(self) -> None:
        """Raise ComponentError when a component of a machine that runs has ended."""
        for machine in self.machines:
            if machine.pid:
                machine.check()

    def down(self) -> None:
        """End the cluster and leave nothing of it, also where only a part of it is there.

        What is left of others that no process owns is removed, too.
        """
        if self._lifeline is not None:
            with self._owned:
                self._destroy()
            self._lifeline = None
        elif self.folder.exists():
            with locked(self.folder):
                self._destroy()
        sweep(self._say)

    def _own(self, stack: contextlib.ExitStack) -> None:
        """Open the pipe whose end the machines wait for."""
        self._lifeline, ours = os.pipe()
        for file in (self._lifeline, ours):
            stack.callback(os.close, file)

    def _start_all(self, nodes: int) -> None:
        programs.link(self.folder / "bin")
        self._make_images()
        for number in range(1, nodes + 1):
            Machine(self.folder, f"node-{number}").home.mkdir()
        self.control.boot(self._lifeline)
        self._connect_control_plane()
        self._start_api()
        for node in self.nodes:
            self._boot_node(node)
        self._progress(f"{len(self.machines)} machines have booted")
        self._await("the API server answers", self._api_answers)
        self._start_controllers()
        for node in self.nodes:
            self._start_node(node)
        self.kubectl.apply(*files.base_objects())
        self._await("DNS answers", self._dns_answers)
        for node in self.nodes:
            self._await_object(f"node/{node.name}", "create")
            self._await_object(f"node/{node.name}", "condition=Ready")
            self._progress(f"{node.name} is Ready")

    def _make_images(self) -> None:
        init, source = self.folder / "init", Path(__file__).with_name("init.c")
        words = ("gcc", "-static", "-O2", "-s", "-o", str(init), str(source))
        programs.said_by(*words, error=ClusterError)
        write_image(self.folder / "pause.tar", files.PAUSE_IMAGE, {"/pause": init}, ["/pause"])

    def _connect_control_plane(self) -> None:
        """Connect the control plane with the host, and make its credentials for its addresses."""
        pid = self.control.pid
        assert pid
        address = connect(self.name, pid)
        # A bridge takes the least address of its ports, unless it has one: without, the other nodes
        # would lose the API server for seconds whenever one is killed.
        ip(
            "link add nodes address 02:00:0a:fa:00:01 type bridge",
            f"address add {files.API_ADDRESS}/24 dev nodes",
            "link set nodes up",
            network_of=pid,
        )
        # Pods keep their addresses within the cluster; the host knows none of them.
        masquerade = "iptables -t nat -A POSTROUTING -o host -j MASQUERADE"
        forward = "echo 1 >/proc/sys/net/ipv4/ip_forward"
        self.control.run("sh", "-c", f"{masquerade} && {forward}")
        self._make_certificates(address)
        self._make_tokens(f"https://{address}:{files.API_PORT}")

    def _make_certificates(self, address: str) -> None:
        pki = self.folder / "pki"
        pki.mkdir(mode=0o700)
        (pki / "openssl.cnf").write_text(files.OPENSSL)
        key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        make = ("openssl", "req", "-x509", *key, "-days", "3650", "-config", f"{pki}/openssl.cnf")
        signed = ("-CA", f"{pki}/ca.crt", "-CAkey", f"{pki}/ca.key")

        def certificate(name: str, *words: str) -> None:
            out = ("-keyout", f"{pki}/{name}.key", "-out", f"{pki}/{name}.crt")
            programs.said_by(*make, *out, *words, error=ClusterError)

        certificate("ca", "-subj", "/CN=ca", "-addext", "basicConstraints=critical,CA:TRUE")
        names = f"subjectAltName={files.server_names(address)}"
        certificate("api", *signed, "-subj", "/CN=api", "-addext", names)
        certificate("kubelets", *signed, "-subj", "/O=system:masters/CN=api")
        certificate("tokens", "-subj", "/CN=tokens")

    def _make_tokens(self, server: str) -> None:
        """Make the kubeconfig of each user: that of the admin for the host, all others inside."""
        users = [*files.USERS, *(node.name for node in self.nodes)]
        made = {user: secrets.token_hex(16) for user in users}
        _write(self.folder / "tokens.csv", files.tokens(made))
        authority = f"{self.folder}/pki/ca.crt"
        inside = f"https://{files.API_ADDRESS}:{files.API_PORT}"
        for user, token in made.items():
            config = files.kubeconfig(server if user == "admin" else inside, authority, token)
            _write(self._kubeconfig(user), config)

    def _start_api(self) -> None:
        pki, policy = self.folder / "pki", self.control.home / "audit.yaml"
        policy.write_text(files.audit_policy())
        self.control.start(
            *("etcd", "etcd", "--data-dir", f"{self.control.home}/etcd"),
            *("--log-level", "warn", "--unsafe-no-fsync"),
        )
        self.control.start(
            *("kube-apiserver", "kube-apiserver", "--etcd-servers", "http://127.0.0.1:2379"),
            *("--secure-port", str(files.API_PORT), "--advertise-address", files.API_ADDRESS),
            *("--tls-cert-file", f"{pki}/api.crt", "--tls-private-key-file", f"{pki}/api.key"),
            *("--client-ca-file", f"{pki}/ca.crt"),
            *("--token-auth-file", f"{self.folder}/tokens.csv"),
            *("--kubelet-client-certificate", f"{pki}/kubelets.crt"),
            *("--kubelet-client-key", f"{pki}/kubelets.key"),
            *("--kubelet-preferred-address-types", "InternalIP"),
            *("--service-account-key-file", f"{pki}/tokens.crt"),
            *("--service-account-signing-key-file", f"{pki}/tokens.key"),
            *("--service-account-issuer", "https://kubernetes.default.svc"),
            *("--service-cluster-ip-range", files.SERVICES, "--allow-privileged"),
            *("--authorization-mode", "Node,RBAC"),
            *("--enable-admission-plugins", "NodeRestriction"),
            # Webhooks are reached at their pods: there is no kube-proxy on this machine.
            "--enable-aggregator-routing",
            *("--audit-policy-file", str(policy), "--audit-log-path", str(self.audit_log)),
            *self._api_flags,
        )

    def _start_controllers(self) -> None:
        common = ("--leader-elect=false", "--bind-address", "127.0.0.1")
        pki = self.folder / "pki"
        self.control.start(
            *("kube-controller-manager", "kube-controller-manager", *common),
            *("--kubeconfig", str(self._kubeconfig("controllers"))),
            *("--service-account-private-key-file", f"{pki}/tokens.key"),
            *("--root-ca-file", f"{pki}/ca.crt", "--use-service-account-credentials"),
            *("--node-monitor-grace-period", "10s", "--cert-dir", f"{pki}/controllers"),
        )
        self.control.start(
            *("kube-scheduler", "kube-scheduler", *common, "--cert-dir", f"{pki}/scheduler"),
            *("--kubeconfig", str(self._kubeconfig("scheduler"))),
        )
        corefile = self.control.home / "Corefile"
        corefile.write_text(files.corefile(str(self._kubeconfig("dns"))))
        self.control.start("coredns", "coredns", "-conf", str(corefile))

    def _boot_node(self, node: Machine) -> None:
        """Boot a node, connect it with the other machines, and start its containerd."""
        number = _number(node.name)
        node.boot(self._lifeline)
        node.make_cgroup()
        address = files.node_address(number)
        control, pid = self.control.pid, node.pid
        if not control or not pid:
            raise ComponentError(f"{node.name} or {self.control.name} does not run any more")
        ip(f"link add {node.name} netns {control} type veth peer name eth0 netns {pid}")
        ip(
            f"link set {node.name} master nodes up",
            f"route replace {files.pod_subnet(number)} via {address}",
            network_of=control,
        )
        ip(
            f"address add {address}/24 dev eth0",
            "link set eth0 up",
            f"route add default via {files.API_ADDRESS}",
            network_of=pid,
        )
        node.run("sh", "-c", "echo 1 >/proc/sys/net/ipv4/ip_forward")
        (node.home / "containerd.toml").write_text(files.containerd())
        (node.home / "cni" / "10-pods.conflist").write_text(files.cni(number))
        node.start("containerd", "containerd", "--config", f"{node.home}/containerd.toml")

    def _start_node(self, node: Machine) -> None:
        """Start what makes a machine with a containerd a node."""
        self._await(f"containerd of {node.name} answers", lambda: _answers(node, "ctr", "version"))
        with (self.folder / "pause.tar").open("rb") as content:
            node.run("ctr", "-n", "k8s.io", "images", "import", "-", given=content)
        (node.home / "resolv.conf").write_text(f"nameserver {files.API_ADDRESS}\n")
        authority, resolv_conf = f"{self.folder}/pki/ca.crt", f"{node.home}/resolv.conf"
        config = files.kubelet(node.cgroup, authority, resolv_conf)
        (node.home / "kubelet.yaml").write_text(config)
        proxy = files.proxy(node.name, str(self._kubeconfig("proxy")))
        (node.home / "kube-proxy.yaml").write_text(proxy)
        node.start(
            *("kubelet", "kubelet", "--config", f"{node.home}/kubelet.yaml"),
            *("--kubeconfig", str(self._kubeconfig(node.name)), "--hostname-override", node.name),
            *("--node-ip", files.node_address(_number(node.name))),
        )
        node.start("kube-proxy", "kube-proxy", "--config", f"{node.home}/kube-proxy.yaml")

    def _kubeconfig(self, user: str) -> Path:
        return self.folder / f"{user}.kubeconfig"

    def _api_answers(self) -> bool:
        words = ("get", "--raw", "/readyz", f"--request-timeout={ANSWER_S:g}s")
        return self.kubectl.try_(*words).returncode == 0

    def _dns_answers(self) -> bool:
        return _answers(self.control, "bash", "-c", f"exec 3<>/dev/tcp/{files.API_ADDRESS}/53")

    def _await(self, what: str, test: Callable[[], bool]) -> None:
        """Try until it succeeds, a component has ended, or START_S is over."""
        deadline = time.monotonic() + START_S
        while not test():
            self.check()
            if time.monotonic() > deadline:
                logs = ", ".join(f"{machine.home}/log" for machine in self.machines)
                raise ComponentError(f"not within {START_S:g} s: {what}; the logs are in {logs}")
            time.sleep(RETRY_S)
        self._progress(what)

    def _await_object(self, name: str, until: str) -> None:
        try:
            self.kubectl.wait(name, until=until, within_s=START_S)
        except KubectlError:
            # A component that ended is the reason, and says more.
            self.check()
            raise

    def _progress(self, what: str) -> None:
        self._say(f"{time.monotonic() - self._began:5.1f} s  {what}")

    def _keep_logs(self) -> None:
        """Keep the logs of a cluster that did not start, as its folder is removed."""
        kept = FAILED / self.name
        self.keep_logs(kept)
        self._say(f"cluster {self.name} did not start; its logs are in {kept}")

    def keep_logs(self, folder: Path) -> None:
        """Copy the logs of the components into a folder, one folder a machine."""
        for machine in self.machines:
            if (logs := machine.home / "log").exists():
                shutil.copytree(logs, folder / machine.name, dirs_exist_ok=True)

    def _destroy(self) -> None:
        end(self.folder)
        disconnect(self.name)
        remove_cgroups(self.folder)
        shutil.rmtree(self.folder)


def sweep(say: Callable[[str], object] = print) -> None:
    """Remove what is left of clusters that no process owns any more and that were not kept."""
    with locked(root(), wait=True):
        _sweep(say)
        # There may be other clusters.
        with contextlib.suppress(OSError):
            root().rmdir()


def _sweep(say: Callable[[str], object]) -> None:
    """Do so while this process holds the folder of all, where no other can begin a cluster."""
    for folder in sorted(root().glob("*/")):
        cluster = Cluster(folder.name)
        # One that another process starts or owns is locked by it.
        with contextlib.suppress(ClusterError), locked(folder):
            if not (cluster.kept and marked(folder)):
                say(f"removing what is left of cluster {cluster.name}")
                cluster._destroy()


def _number(node: str) -> int:
    return int(node.partition("-")[2])


def _answers(machine: Machine, *words: str) -> bool:
    try:
        machine.run(*words)
    except ComponentError:
        return False
    return True


def _write(file: Path, content: str) -> None:
    """Write a file with a secret."""
    file.touch(mode=0o600)
    file.write_text(content)
