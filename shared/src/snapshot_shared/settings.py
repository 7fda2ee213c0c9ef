"""Settings from environment variables, checked once at start; errors name the variable."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from snapback_client.folders import check_folder
from snapshot_shared.errors import InvalidInput

if TYPE_CHECKING:
    from snapshot_shared.stripes import StripeRoots

Folder = Annotated[Path, Meta(description="An absolute path, as `check_folder` wants it.")]
"""The type of a setting that several processes are given: it may depend on none of them."""

T = TypeVar("T", bound=msgspec.Struct)

log = logging.getLogger(__name__)

_PREFIX = "SNAPBACK_"
_CLOSE = 0.93
"""How alike two names are of which one is taken for a slip, as difflib counts: about one letter."""


def load(type_: type[T], environment: Mapping[str, str] | None = None) -> T:
    """Fill a settings struct: field `nats_url` comes from `SNAPBACK_NATS_URL`.

    Numbers and booleans are written as text in the environment. InvalidInput names every variable
    that is missing or wrong. The log names a variable that is written nearly like one of them.
    """
    source = os.environ if environment is None else environment
    raw: dict[str, Any] = {}
    problems: list[str] = []
    for variable, meant in _misspelt(type_, source):
        log.warning("%s is set, and not read; did you mean %s?", variable, meant)
    for field in msgspec.structs.fields(type_):
        variable = _PREFIX + field.name.upper()
        if variable in source:
            try:
                if field.type == Folder:
                    check_folder(variable, source[variable])
                raw[field.name] = msgspec.convert(
                    source[variable], field.type, strict=False, dec_hook=_decode
                )
            except InvalidInput as error:
                problems.append(f"{error.message}: {error.next_step}")
            except msgspec.ValidationError as error:
                problems.append(f"{variable}={source[variable]!r}: {error}")
        elif field.required:
            problems.append(f"{variable} is not set")
    if problems:
        raise InvalidInput("; ".join(problems), next_step="set these environment variables")
    return type_(**raw)


def _misspelt(type_: type[msgspec.Struct], source: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield variables that are not read, each with the one that is written nearly like it.

    Others of our prefix are for other programs: Kubernetes sets some for each Service.
    """
    known = [_PREFIX + field.name.upper() for field in msgspec.structs.fields(type_)]
    for variable in sorted(source.keys() - set(known)):
        if variable.startswith(_PREFIX):
            for meant in difflib.get_close_matches(variable, known, 1, _CLOSE):
                yield variable, meant


def _decode(type_: type, value: Any) -> Any:
    if type_ is Path:
        return Path(value)
    raise NotImplementedError(type_)


class Common(msgspec.Struct, frozen=True, kw_only=True):
    """What every service needs to know.

    `run` marks all processes of one local cluster (`SNAPBACK_RUN`), so that leftovers are found.
    `nats_ca` is a file with the certificates by which the servers of NATS are known over TLS.
    `http_address` (host:port) is where health and metrics are served over HTTP; unset, nowhere.
    `health_address` is a port with health alone, for a kubelet, which others do not need to reach.
    """

    nats_url: str = "nats://127.0.0.1:4222"
    nats_credentials: str | None = None
    nats_ca: Path | None = None
    state_dir: Folder
    run: str = ""
    log_level: str = "INFO"
    otlp_endpoint: str | None = None
    http_address: str | None = None
    health_address: str | None = None


class NodeSettings(Common, frozen=True, kw_only=True):
    """What the services of a node need to know besides.

    `sim` (`SNAPBACK_SIM=1`) gives a service the fault switch of the simulation.
    `transfer_backend` moves the bytes of GPU memory. `object_storage` (a URL without credentials)
    is where the backend `object` has them; agents that know of it can seal, verify and delete.
    `stripe_roots` (`name=/folder:name2=/folder2`) are folders on other disks, over which the files
    of GPU memory are spread.
    `artifact_keys` is a folder with the keys of artifacts, as `snapshot_shared.keys` reads it;
    `kms_command` encrypts where that folder has no `encryption.key`, and decrypts what it has
    encrypted. With `require_signature` nothing is restored that no trusted key has signed.
    """

    node: str
    artifact_root: Folder
    socket_dir: Folder
    sim: bool = False
    transfer_backend: str = "posix-direct"
    object_storage: str = ""
    stripe_roots: str = ""
    artifact_keys: Path | None = None
    kms_command: str = ""
    require_signature: bool = False

    def __post_init__(self) -> None:
        """Refuse stripe roots that are written wrong. InvalidInput."""
        self.stripes()

    def stripes(self) -> StripeRoots:
        """Return the stripe roots."""
        # Only here: most programs that read settings move no bytes.
        from snapshot_shared.stripes import StripeRoots, parse_stripes  # noqa: PLC0415

        return StripeRoots(parse_stripes(self.stripe_roots, self.artifact_root))
