"""Saves and loads that a container of the pod carries out: here the parts are only copied.

Between the artifact root and the folder in which the container gets its order. What a saver has
written is foreign: each byte is verified, and the manifest has to be that of the order.
"""

from __future__ import annotations

import contextlib
import os

from gms.adapters.part_files import copy_files
from gms.adapters.staging import staged
from gms.domain.task_rules import handed_over, path_of
from gms.domain.tasks import CONTAINER, LoadTask, SaveTask, TransferDone, order_folder
from gms.transfer_child.load import read_manifest
from gms.transfer_child.save import saved_before
from gms.transfer_child.session import Emit, ProgressMeter
from snapshot_shared.artifact import PART_MANIFEST, PartManifest, check_part_manifest
from snapshot_shared.codec import MAX_MANIFEST_BYTES, decode_json, digest
from snapshot_shared.errors import InvalidInput, StaleLayout, pods_own
from snapshot_shared.files import (
    make_dir,
    open_artifact,
    open_dir,
    open_regular,
    open_root,
    opened,
    read_bounded,
    require_space,
    write_new,
)


def take(task: SaveTask, emit: Emit) -> TransferDone:
    """Copy the part that a saver has written into the artifact root. ArtifactCorrupt."""
    if task.encrypt:
        raise InvalidInput(
            "SNAPBACK_ENCRYPT_MEMORY=1, and the saver of the pod does not encrypt",
            next_step="leave the container gms-saver out of the template of the pod",
        )
    where = path_of(task)
    with opened(open_root(task.root, create=True)) as root:
        if (known := saved_before(root, task)) is not None:
            return known
        with (
            opened(open_root(task.staged)) as above,
            opened(open_dir(above, [order_folder(task.order, task.attempt), *where])) as source,
        ):
            data = read_bounded(source, PART_MANIFEST, MAX_MANIFEST_BYTES)
            manifest = decode_json(data, PartManifest, limit=MAX_MANIFEST_BYTES)
            _check(task, check_part_manifest(manifest))
            meter = ProgressMeter(manifest.bytes, emit)
            with staged(root, task) as staging:
                require_space(staging.directory, manifest.bytes, f"part {task.part}")
                copy_files(source, staging.directory, manifest, meter.advance)
                write_new(staging.directory, PART_MANIFEST, data)
                staging.finish()
    return TransferDone(
        bytes=manifest.bytes,
        digest=digest(data),
        layout=task.layout,
        moved=manifest.bytes,
        backend=CONTAINER,
    )


def _check(task: SaveTask, manifest: PartManifest) -> None:
    wanted = (task.namespace, task.content_uid, task.generation, task.part, task.order)
    found = (
        manifest.namespace,
        manifest.content_uid,
        manifest.generation,
        manifest.part,
        manifest.order,
    )
    if manifest.kind != "gms" or found != wanted:
        raise InvalidInput(
            f"the saver of the pod has written another part than {task.part}",
            next_step="have it carry out the order that it is given, with `gms-saver`",
            expected="/".join(map(str, wanted)),
            found="/".join(map(str, found)),
        )
    if manifest.objects:
        raise InvalidInput(
            "the saver of the pod has put the part into object storage",
            next_step="set no object storage in its environment",
        )
    if any(entry.stripe for entry in manifest.files):
        raise InvalidInput(
            f"the saver of the pod has put files of {task.part} into stripe roots",
            next_step="have it write all of them into the folder that it is given",
        )
    if manifest.layout is None or manifest.layout.source != task.layout:
        raise StaleLayout(
            "the layout that the saver of the pod has saved is not the one of the plan",
            next_step="start a new attempt",
            expected=task.layout.structure_hash,
            found=manifest.layout.source.structure_hash if manifest.layout else "none",
        )


def hand_out(task: LoadTask, emit: Emit) -> TransferDone:
    """Copy a part out of the artifact root, for a loader, whose user may be any."""
    where = path_of(task)
    with (
        opened(open_root(task.root)) as root,
        opened(open_artifact(root, where)) as source,
        opened(open_root(task.staged)) as above,
        contextlib.ExitStack() as stack,
    ):
        manifest = read_manifest(root, source, task)
        if manifest.objects:
            raise InvalidInput(
                f"{task.part} is in object storage, which no loader in a pod is given",
                next_step="leave the container gms-loader out of the template of the pod",
            )
        if any(entry.stripe for entry in manifest.files):
            raise InvalidInput(
                f"{task.part} is in stripe roots, which no loader in a pod is given",
                next_step="leave the container gms-loader out of the template of the pod",
            )
        if manifest.encryption:
            raise InvalidInput(
                f"{task.part} is encrypted, and no loader in a pod has keys",
                next_step="leave the container gms-loader out of the template of the pod",
            )
        meter = ProgressMeter(manifest.bytes, emit)
        path = [f".{order_folder(task.order, task.attempt)}", *where]
        with pods_own():
            target = stack.enter_context(opened(make_dir(above, path)))
        require_space(target, manifest.bytes, f"part {task.part}")
        copy_files(source, target, manifest, meter.advance, pods_own)
        data = read_bounded(source, PART_MANIFEST, MAX_MANIFEST_BYTES)
        with pods_own():
            write_new(target, PART_MANIFEST, data)
            for name in (*(entry.name for entry in manifest.files), PART_MANIFEST):
                with opened(open_regular(target, name)) as file:
                    os.fchmod(file, 0o444)
            for depth in range(1, len(path)):
                with opened(open_dir(above, path[: depth + 1])) as folder:
                    os.fchmod(folder, 0o755)
    return handed_over(task, manifest.bytes)
