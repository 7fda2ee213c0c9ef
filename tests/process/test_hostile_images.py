"""Pods that want the rights of the helper: nothing of theirs is run or written to with them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.process.node import Node
from tests.support.agent_rig import fresh_uid

pytestmark = [pytest.mark.process, pytest.mark.waits]

# What every program that is started among these files loads before anything else.
_LOADED = """
#include <fcntl.h>
__attribute__((constructor)) static void loaded(void)
{
    open("%s", O_CREAT | O_WRONLY, 0600);
}
"""


def ran(*words: str) -> None:
    subprocess.run(words, check=True)


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
async def test_a_preloaded_library_of_an_image_is_never_loaded_by_what_dumps_and_restores(
    node: Node, tmp_path: Path
) -> None:
    canary = tmp_path / "loaded"
    source = await node.container("source")
    root = Path(f"/proc/{source.pid}/root")
    (tmp_path / "canary.c").write_text(_LOADED % canary)
    library = tmp_path / "canary.so"
    ran("cc", "-shared", "-fPIC", "-o", str(library), str(tmp_path / "canary.c"))
    shutil.copy(library, root / "canary.so")
    (root / "etc/ld.so.preload").write_text("/canary.so\n")
    artifact = await node.captured(source, fresh_uid())  # type: ignore[arg-type]
    target, order = await node.waiting(artifact)
    assert (await node.carry_out(order)).kind == "restored"
    await target.goes_on()
    inside = Path(f"/proc/{target.pid}/root")
    assert (inside / "etc/ld.so.preload").read_text() == "/canary.so\n"
    assert not canary.exists()
    assert not (inside / canary.relative_to("/")).exists()
    # It would have been loaded by any program of the image.
    ran("nsenter", f"--target={target.pid}", "--mount", "true")
    assert (inside / canary.relative_to("/")).exists()
    assert not canary.exists()


async def test_a_link_in_the_place_of_a_placeholders_folder_has_nothing_written_to_another_pod(
    node: Node,
) -> None:
    target, order = await node.waiting(await node.artifact())
    other = node.kubelet / "pods" / fresh_uid() / "volumes" / "kubernetes.io~empty-dir" / "data"
    other.mkdir(parents=True)
    (other / ".restored").write_text("of another pod\n")
    # As another container of its pod can, which mounts the volume without a subPath.
    target.init.rename(target.init.with_name("aside"))
    target.init.symlink_to(other)
    report = await node.carry_out(order)
    files = {path.name: path.read_text() for path in other.iterdir()}
    assert files == {".restored": "of another pod\n"}
    assert report.failure is not None
    assert report.failure.reason == "ControlFolderBroken"
    assert str(target.init) in report.failure.message
    await target.becomes("waits")
