"""Start and end clusters by hand: python -m tests.cluster COMMAND."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.cluster.cluster import Cluster
from tests.cluster.host import ClusterError, root
from tests.cluster.machine import ComponentError


def main(words: Sequence[str]) -> int:
    """Carry out one command and return the exit status of this program."""
    given = _parser().parse_args(words)
    cluster = Cluster(given.name)
    try:
        COMMANDS[given.command](cluster, given)
    except (ClusterError, ComponentError) as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("--name", default="dev", help="of the cluster (dev)")
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="start a cluster and leave it running")
    up.add_argument("--nodes", type=int, default=2)
    up.add_argument("--api-flag", action="append", default=[], help="a flag for kube-apiserver")
    load = commands.add_parser("load", help="import image archives into all nodes")
    load.add_argument("archives", nargs="+", type=Path)
    for command, what in (
        ("kill", "end a node at once, as a power cut does"),
        ("start", "boot a node again that was killed"),
    ):
        commands.add_parser(command, help=what).add_argument("machine")
    enter = commands.add_parser("enter", help="run a command, or a shell, on a machine")
    enter.add_argument("machine")
    enter.add_argument("words", nargs=argparse.REMAINDER)
    commands.add_parser("status", help="show the machines, and which component has ended")
    commands.add_parser("down", help="end the cluster and leave nothing of it")
    return parser


def _up(cluster: Cluster, given: argparse.Namespace) -> None:
    cluster.up(given.nodes, api_flags=given.api_flag)
    name = "" if given.name == "dev" else f" NAME={given.name}"
    print(f"\nexport KUBECONFIG={cluster.kubectl.kubeconfig}")
    print(f"export PATH={cluster.folder / 'bin'}:$PATH   # has kubectl")
    print("\nNext: kubectl get nodes,pods --all-namespaces")
    print(f"It runs until `make cluster-down{name}`; its logs are in {cluster.folder}/*/log.")


def _down(cluster: Cluster, given: argparse.Namespace) -> None:
    was = cluster.folder.exists()
    cluster.down()
    print(f"cluster {cluster.name} {'is down' if was else 'does not run'}")


def _enter(cluster: Cluster, given: argparse.Namespace) -> None:
    machine = cluster.machine(given.machine)
    words = machine.inside(*(given.words or ["bash"]))
    os.execvpe(words[0], words, os.environ | machine.environment())


def _status(cluster: Cluster, given: argparse.Namespace) -> None:
    if not cluster.folder.exists():
        others = [each.name for each in root().glob("*/")]
        found = f"clusters here: {', '.join(others)}" if others else "there is none"
        raise ClusterError(f"there is no cluster {cluster.name}; {found}")
    for machine in cluster.machines:
        state = f"runs as process {machine.pid}" if machine.pid else "is off"
        print(f"{machine.name}  {state}")
    cluster.check()


COMMANDS = {
    "down": _down,
    "enter": _enter,
    "kill": lambda cluster, given: cluster.kill(given.machine),
    "load": lambda cluster, given: cluster.load(*given.archives),
    "start": lambda cluster, given: cluster.start(given.machine),
    "status": _status,
    "up": _up,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
