"""The programs that a cluster needs, and why a machine cannot run one."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
CRDS = REPOSITORY / "deploy" / "crds"
OURS = ("containerd", "containerd-shim-runc-v2", "coredns", "ctr", "etcd", "kube")
KUBE = (
    *("kube-apiserver", "kube-controller-manager", "kube-proxy"),
    *("kube-scheduler", "kubectl", "kubelet"),
)
"""The names by which the one binary `kube` is each program of Kubernetes."""
DEBIAN = {
    "gcc": "gcc",
    "ip": "iproute2",
    "iptables": "iptables",
    "mount": "mount",
    "nsenter": "util-linux",
    "openssl": "openssl",
    "runc": "runc",
    "unshare": "util-linux",
}
"""Programs of the machine, with the Debian package that has each."""
CNI = Path("/usr/lib/cni")
CGROUPS = Path("/sys/fs/cgroup")
NEXT_STEP = "run `make cluster-tools`, or name the folder that has them in SNAPBACK_TOOLS"


def find(program: str) -> Path | None:
    """Return the path of a program of SNAPBACK_TOOLS or `make cluster-tools`.

    Those on PATH are not taken, as they are of any version.
    """
    folders = [os.environ.get("SNAPBACK_TOOLS"), str(REPOSITORY / ".tools" / "bin")]
    found = shutil.which(program, path=os.pathsep.join(filter(None, folders)))
    # Not what a link leads to: `kube` is known by the name of the link.
    return Path(found).absolute() if found else None


def said_by(*words: str, error: type[Exception], **options: Any) -> str:
    """Run a command and return what it prints; raise the error with what it says if it fails."""
    done = subprocess.run(words, capture_output=True, text=True, check=False, **options)
    if done.returncode:
        raise error(f"{shlex.join(words)}: {(done.stderr or done.stdout).strip()}")
    return str(done.stdout)


def link(folder: Path) -> None:
    """Put links to the programs into a folder, those of Kubernetes by their names."""
    folder.mkdir(parents=True, exist_ok=True)
    for program in OURS:
        found = find(program)
        assert found, f"{program} is missing: {NEXT_STEP}"
        for name in KUBE if program == "kube" else (program,):
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to(found)


def lacking() -> str:
    """Return why no cluster can be started here; empty where one can."""
    if os.geteuid() != 0:
        return "only root can start a cluster; KUBECONFIG names one that runs"
    if missing := [program for program in OURS if not find(program)]:
        return f"{', '.join(missing)} is missing: {NEXT_STEP}"
    absent = {f"{name} (package {of})" for name, of in DEBIAN.items() if not shutil.which(name)}
    if not (CNI / "ptp").exists():
        absent.add(f"{CNI}/ptp (package containernetworking-plugins)")
    if not Path("/usr/include/stdlib.h").exists():
        absent.add("stdlib.h (package libc6-dev)")
    if absent:
        return f"{', '.join(sorted(absent))} is missing"
    if not os.access(CGROUPS, os.W_OK) or not hierarchies():
        return f"no cgroups can be made in {CGROUPS}"
    return ""


def hierarchies() -> list[Path]:
    """Return the folders below which a cgroup has to be made: one for version 2."""
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS]
    # `unified` has no controllers beside version 1; runc makes its own cgroups there.
    return sorted(each for each in CGROUPS.iterdir() if each.is_dir() and each.name != "unified")
