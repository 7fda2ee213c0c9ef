"""What a machine needs for local clusters whose nodes have the driver `criu`, as values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from snapshotctl.domain.demo_script import Check
from snapshotctl.domain.exits import Unready, WrongArguments

DRIVERS = ("cooperative", "criu")


class CriuHost(NamedTuple):
    """What was found: `missing` are programs that are not on PATH, `tools` is where CRIU is."""

    system: str
    is_root: bool
    missing: Sequence[str]
    tools: str
    has_criu: bool
    has_init: bool
    has_loopback: bool


def checks(host: CriuHost) -> list[Check]:
    """Return all checks."""
    programs = ", ".join(host.missing)
    return [
        Check(f"CRIU is for Linux; this is {host.system}", host.system == "Linux", "use Linux"),
        Check(
            "CRIU needs root" if host.is_root else "CRIU needs root, and this is another user",
            host.is_root,
            "run the same command with sudo",
        ),
        Check(
            f"programs that CRIU's workers are started by: {programs or 'all'} "
            f"{'missing' if host.missing else 'there'}",
            not host.missing,
            "install util-linux and mount",
        ),
        Check("a connection on 127.0.0.1", host.has_loopback, "run: ip link set lo up"),
        Check(f"CRIU in {host.tools}", host.has_criu, "run: make criu"),
        Check(f"snapback-init in {host.tools}", host.has_init, "run: make init"),
    ]


def check_driver(driver: str) -> bool:
    """Return whether a driver needs CRIU. WrongArguments when it is none of `DRIVERS`."""
    if driver not in DRIVERS:
        raise WrongArguments(f"--driver {driver} is not one of {', '.join(DRIVERS)}")
    return driver == "criu"


def require(found: Sequence[Check], what: str) -> None:
    """Raise Unready with everything that is missing for `what`, each with its fix."""
    missing = [check for check in found if not check.ok]
    if missing:
        raise Unready(
            f"this machine lacks {len(missing)} of the things that {what} needs",
            next_step="; ".join(check.fix for check in missing),
            problems=[f"{check.what}: {check.fix}" for check in missing],
        )
