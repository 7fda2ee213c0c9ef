"""What is on disk of prepared claims: a folder each, and the specification for the runtime.

    <plugin folder>/claims/<uid>/claim.json     what is prepared
    <plugin folder>/claims/<uid>/<ordinal>/     mounted into containers
    <CDI folder>/<driver>-claim_<uid>.json      read by the container runtime at every start

The last lives on a tmpfs as a rule; a driver that starts writes it again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from gms.domain.claims import (
    MAX_PREPARED,
    MAX_RECORD_BYTES,
    ClaimableDevice,
    PreparedClaim,
    cdi_file,
    cdi_spec,
    decode_record,
)
from snapshot_shared.codec import encode_pretty
from snapshot_shared.errors import ArtifactMissing, SnapbackError
from snapshot_shared.files import (
    make_folder,
    open_root,
    opened,
    read_bounded,
    remove_tree,
    write_replacing,
)
from snapshot_shared.ids import check_uid

log = logging.getLogger(__name__)

RECORD = "claim.json"


class ClaimFiles:
    """Keeps prepared claims. Methods block."""

    def __init__(self, plugin_dir: Path, cdi_dir: Path, devices: Sequence[ClaimableDevice]) -> None:
        """Keep claims on `devices` below a folder of the kubelet's."""
        self._claims = plugin_dir / "claims"
        self._cdi = cdi_dir
        self._devices = devices

    def folder(self, uid: str) -> Path:
        """Return the folder of a claim."""
        return self._claims / check_uid(uid)

    def load(self) -> list[PreparedClaim]:
        """Return what an earlier run has prepared; a record that is damaged is logged and left.

        Unpreparing such a claim removes it, preparing it replaces it.
        """
        make_folder(self._claims)
        found = []
        for name in sorted(each.name for each in self._claims.iterdir())[:MAX_PREPARED]:
            try:
                with opened(open_root(self.folder(name))) as folder:
                    data = read_bounded(folder, RECORD, MAX_RECORD_BYTES)
                found.append(decode_record(data, name))
            except ArtifactMissing:
                # Ended between making the folder and writing the record, or removing them.
                continue
            except (SnapbackError, OSError) as error:
                log.warning("the record of the prepared claim %s cannot be used: %s", name, error)
        return found

    def save(self, claim: PreparedClaim) -> None:
        """Keep a claim that is to be prepared."""
        folder = self.folder(claim.uid)
        make_folder(folder)
        with opened(open_root(folder)) as directory:
            write_replacing(directory, RECORD, encode_pretty(claim))

    def publish(self, claim: PreparedClaim) -> None:
        """Have the container runtime find the devices of a claim."""
        spec = cdi_spec(claim, str(self.folder(claim.uid)), self._devices)
        self._cdi.mkdir(mode=0o755, parents=True, exist_ok=True)
        with opened(open_root(self._cdi)) as directory:
            # Not durable: what an outage takes is written again at the next start. The temporary
            # file has no name that runtimes read.
            write_replacing(
                directory, cdi_file(claim.uid), encode_pretty(spec), mode=0o644, durable=False
            )

    def remove(self, uid: str) -> None:
        """Remove all of a claim, known or not."""
        folder = self.folder(uid)
        (self._cdi / cdi_file(uid)).unlink(missing_ok=True)
        make_folder(self._claims)
        with opened(open_root(self._claims)) as claims:
            remove_tree(claims, folder.name)
