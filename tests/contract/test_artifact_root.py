"""What the artifact root promises on a disk, and on NFS by the rules of its clients and servers.

No kernel that has NFS is needed: its rules are those of a simulated disk that many nodes share.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec.structs import replace

from snapshot_agent.adapters.artifacts import ArtifactRoot
from snapshot_shared import files
from snapshot_shared.artifact import ROOT_MANIFEST, SIGNATURE, RootManifest
from snapshot_shared.errors import ArtifactExists, ArtifactMissing
from snapshot_shared.orders import ArtifactRef
from snapshot_shared.signing import Signing
from tests.scenario.crash_rig import mounted, run
from tests.scenario.crash_stories import UID, Capture
from tests.scenario.disk import SimDisk
from tests.scenario.sim_os import SimFcntl, SimOs


class NfsOs(SimOs):
    """The `os` of a client of NFS whose server squashes root."""

    def __init__(self, disk: SimDisk) -> None:
        super().__init__(disk)
        self._answered: set[str] = set()
        self._silly: dict[int, tuple[int, str]] = {}
        """Files without a name that are open: where they are until they are closed, by inode."""

    def link(self, src: Any, dst: Any, **where: Any) -> None:
        """Link; the answer is lost, and the request that is sent again finds the name taken."""
        super().link(src, dst, **where)
        if dst not in self._answered:
            self._answered.add(dst)
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(dst))

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        """Keep a file that this client has open by another name, as long as it has."""
        inode = self.find(path, dir_fd)
        node = self._disk.nodes[inode]
        if node.opens and node.links == 1 and inode not in self._silly:
            assert dir_fd is not None
            name = f".nfs{inode:04}"
            self._silly[inode] = (self.opened(dir_fd).inode, name)
            self.rename(path, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        else:
            super().unlink(path, dir_fd=dir_fd)

    def close(self, fd: int) -> None:
        is_ours = fd in self._table
        inode = self.opened(fd).inode if is_ours else 0
        super().close(fd)
        if inode in self._silly and not self._disk.nodes[inode].opens:
            folder, name = self._silly.pop(inode)
            self._disk.enter("unlink", (folder, name, None))

    def chown(self, *_: Any, **__: Any) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    fchown = lchown = chown


def nfs() -> SimDisk:
    disk = SimDisk()
    disk.os = NfsOs(disk)
    disk.fcntl = SimFcntl(disk.os)
    return disk


@pytest.fixture(params=[SimDisk, nfs], ids=["disk", "nfs"])
def capture(request: pytest.FixtureRequest) -> Iterator[Capture]:
    """A capture whose parts are staged, of a node that signs."""
    with mounted(request.param()):
        made = Capture()
        key = Ed25519PrivateKey.from_private_bytes(bytes(32))
        made.root = ArtifactRoot(made.artifacts, signing=Signing(key))
        made.prepare()
        made.stage_process()
        made.stage_gpu()
        yield made


def ref_of(capture: Capture) -> ArtifactRef:
    return ArtifactRef(
        namespace="default",
        content_uid=UID,
        generation=capture.generation,
        root_digest=capture.promises["sealed"],
    )


def names_in(capture: Capture) -> list[str]:
    with files.opened(files.open_root(capture.where())) as folder:
        return sorted(files.names_in(folder))


def sealed(capture: Capture) -> RootManifest:
    capture.seal()
    return run(capture.root.read_root(ref_of(capture)))


def test_a_sealed_generation_is_read_as_it_was_written_and_nothing_else_is_in_it(
    capture: Capture,
) -> None:
    root = sealed(capture)
    assert [row.part for row in root.parts] == ["gpu-0", "process"]
    capture.check_generation(capture.promises)
    assert names_in(capture) == ["gpu-0", "process", ROOT_MANIFEST, SIGNATURE]


def test_what_is_sealed_again_stays_and_is_not_replaced_by_another(capture: Capture) -> None:
    root = sealed(capture)
    assert run(capture.root.seal(root)) == capture.promises["sealed"]
    with pytest.raises(ArtifactExists):
        run(capture.root.seal(replace(root, bytes=1)))
    assert run(capture.root.read_root(ref_of(capture))) == root


def test_a_part_is_made_once(capture: Capture) -> None:
    with pytest.raises(ArtifactExists):
        capture.stage_process()


def test_a_generation_goes_whole_and_that_again_changes_nothing(capture: Capture) -> None:
    sealed(capture)
    for _ in range(2):
        capture.remove()
        assert not files.os.path.exists(capture.where())


def test_a_generation_that_is_being_read_is_no_artifact_any_more_once_its_removal_began(
    capture: Capture,
) -> None:
    sealed(capture)
    ref = ref_of(capture)
    place = capture.place

    async def removed() -> None:
        async with capture.root.open_part(place, "process") as part:
            reading = files.open_regular(part, "weights")
            # NFS keeps the folder of a file that is open.
            with contextlib.suppress(OSError):
                await capture.root.remove(place)
            files.os.close(reading)
        with pytest.raises(ArtifactMissing):
            await capture.root.read_root(ref)

    run(removed())
    capture.remove()
    assert not files.os.path.exists(capture.where())
