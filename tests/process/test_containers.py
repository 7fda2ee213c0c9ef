"""What a pod, its image and its runtime decide of a container, as CRIU and the helper meet it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from snapshot_agent.helper.settling import Records
from tests.process.killing import restore_in
from tests.process.node import CRIU, Node, children_of
from tests.support.agent_rig import failure_of, fresh_uid
from tests.support.waiting import until


async def test_a_restored_process_has_the_cgroups_of_its_placeholder_and_its_sockets_their_names(
    node: Node,
) -> None:
    halted = await restore_in(node, "resumed")
    # CRIU waits after it has let the process run.
    await until(lambda: len(halted.container.lines()) > 2, "lines of the restored process")
    halted.go_on()
    report = await halted.answered()
    assert report.kind == "restored", report
    assert {line["renamed"] for line in halted.container.lines()} == {True}
    placeholder = halted.container.pid
    [restored] = children_of(placeholder)

    def cgroups(pid: int) -> tuple[int, str]:
        namespace = os.stat(f"/proc/{pid}/ns/cgroup").st_ino  # noqa: PTH116 - no such path
        return namespace, Path(f"/proc/{pid}/cgroup").read_text()

    assert cgroups(restored.pid) == cgroups(placeholder)
    # It sees no others.
    assert cgroups(placeholder)[0] != cgroups(os.getpid())[0]


async def test_a_worker_is_refused_whose_files_the_helper_does_not_have(node: Node) -> None:
    worker = await node.container("worker")
    worker.upper.rename(worker.home / "elsewhere")
    order = node.prepare_order(worker, fresh_uid())  # type: ignore[arg-type]
    failure = failure_of(await node.carry_out(order), "NotEligible")
    assert str(worker.upper) in failure.message
    assert "node.runtimeDir" in (failure.next_step or "")
    await worker.goes_on()


async def test_a_container_that_gains_no_privileges_gets_no_process_that_may(node: Node) -> None:
    worker = await node.container("worker")
    artifact = await node.captured(worker, fresh_uid())  # type: ignore[arg-type]
    target = await node.container("target", waits=True, no_new_privs=True)
    report = await node.carry_out(node.restore_order(target, artifact))  # type: ignore[arg-type]
    assert "NoNewPrivs" in failure_of(report, "Incompatible").message
    await target.becomes("waits")
    again = await node.container("again", no_new_privs=True)
    artifact = await node.captured(again, fresh_uid())  # type: ignore[arg-type]
    await node.done(node.restore_order(target, artifact, attempt=2), "restored")  # type: ignore[arg-type]
    await target.goes_on()


async def test_the_tables_of_criu_are_removed_and_those_of_others_stay(
    node: Node, tmp_path: Path
) -> None:
    worker = await node.container("worker")
    for family, name in (("inet", "CRIU-7f3a"), ("ip6", "CRIU-1"), ("inet", "of-the-pod")):
        worker.in_network(str(CRIU / "nft"), "add", "table", family, name)
    assert worker.tables().count("CRIU-") == 2
    network = os.stat(f"/proc/{worker.pid}/ns/net").st_ino  # noqa: PTH116 - no such path
    Records(tmp_path / "dumps", CRIU / "nft").open_network(network)
    assert worker.tables() == "table inet of-the-pod\n"
    await worker.goes_on()


# Pods that want the rights of the helper: nothing of theirs is run or written to with them.

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
    await node.done(order, "restored")
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
    assert str(target.init) in failure_of(report, "ControlFolderBroken").message
    await target.becomes("waits")
