"""Who a process is after a restore: a clone has the memory of its source, and another place.

What the agent knows comes with `restore-complete`; host name and address are asked of the kernel
here, for the environment of a process that was restored is that of its source.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import sys
from collections.abc import Mapping
from typing import NamedTuple

from snapback_client.codec import encode_json
from snapback_client.control import Signal

_FAR_AWAY = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
"""Addresses of documentation (RFC 5737, RFC 3849), to which nothing is sent."""
_SEED_BYTES = 4
_SEEDED = {"random": "seed", "numpy.random": "seed", "torch": "manual_seed"}


class Identity(NamedTuple):
    """Where a restored process is, and from what it comes.

    `address` is the one from which it reaches others, empty without a route. `pod` is
    `namespace/name`; node, pod and `pod_uid` are empty where the agent is older than this client.
    `capture` is the uid of the content and `generation` that of the artifact. `seed` is another one
    for each restore, and the same for all processes of one: 32 bits, for generators of random
    numbers and not for secrets, since it can be computed from the rest. `context` has variables of
    this container, None if a variable is not set; it is empty unless a driver brought the process.
    """

    hostname: str
    address: str
    node: str
    pod: str
    pod_uid: str
    capture: str
    generation: int
    attempt: int
    seed: int
    context: Mapping[str, str | None] = {}

    def environment(self) -> dict[str, str | None]:
        """Return variables for a program, with None if a variable has to be unset.

        They are SNAPBACK_HOSTNAME, SNAPBACK_SEED and so on, and those of `context`.
        """
        said = self._asdict()
        del said["context"]
        own = {f"SNAPBACK_{name.upper()}": str(value) for name, value in said.items()}
        return {**self.context, **own}

    def reseed(self) -> None:
        """Seed the global generators of Python, numpy and PyTorch, as far as they are imported.

        Generators that a program has made for itself (`random.Random`, `numpy.random.default_rng`,
        `torch.Generator`) are its own to seed, and so is what an engine keeps for its requests.
        """
        for module, name in _SEEDED.items():
            if module in sys.modules:
                getattr(sys.modules[module], name)(self.seed)


def identity_of(said: Signal, context: Mapping[str, str | None] | None = None) -> Identity:
    """Return who this process is after the restore of which `restore-complete` speaks.

    `context` is what `restore-context.json` says.
    """
    unseeded = Identity(
        hostname=socket.gethostname(),
        address=_address(),
        node=said.node,
        pod=said.pod,
        pod_uid=said.pod_uid,
        capture=said.capture,
        generation=said.generation,
        attempt=said.attempt,
        seed=0,
    )
    digest = hashlib.sha256(encode_json(unseeded[:-1])).digest()
    return unseeded._replace(seed=int.from_bytes(digest[:_SEED_BYTES]), context=dict(context or {}))


def _address() -> str:
    for family, far in _FAR_AWAY:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.connect((far, 9))
            return str(asking.getsockname()[0])
    return ""
