"""What a saver and a loader are given and leave: environment, order files, results; their tasks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from gms.domain.tasks import (
    DEFAULT_BACKEND,
    LOAD_THREADS,
    MAX_THREADS,
    SAVE_THREADS,
    LoadTask,
    SaveTask,
    TransferOptions,
    load_task,
    save_task,
)
from snapback_client.folders import check_folder
from snapshot_shared.artifact import generation_path
from snapshot_shared.errors import Failure, InvalidInput
from snapshot_shared.orders import Bytes, LayoutRef, LoadOrder, PartStr, SaveOrder

ORDER_FILE = "order.json"
DONE = "done"
FAILED = "failed"
EVENT = "event"
"""Beside the order file: the last event of a transfer that is under way, a `TransferEvent`."""


class PartOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """One part that is on disk or in memory. `was_there`: the device had this layout already."""

    part: PartStr
    device: str
    bytes: Bytes
    digest: str
    layout: LayoutRef
    was_there: bool = False


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in `done` (all parts) or in `failed` (why)."""

    verb: Literal["save", "load"]
    parts: list[PartOutcome] = []
    failure: Failure | None = None


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The environment: the names are those of Dynamo where they mean the same.

    `GMS_SOCKET_DIR`, `GMS_CHECKPOINT_DIR`, `GMS_ORDER_FILE` (by default `order.json` in the
    checkpoint directory), or in place of these two `GMS_ORDER_DIR`; `TRACEPARENT`;
    `GMS_SAVE_WORKERS` and `GMS_LOAD_WORKERS` (threads for each device), `GMS_SHARD_SIZE_BYTES`,
    `GMS_SAVE_LOCK_TIMEOUT_MS`; `SNAPBACK_TRANSFER_BACKEND` and `SNAPBACK_OBJECT_STORAGE` as for the
    service.
    """

    socket_dir: str
    checkpoint_dir: str
    order_file: str
    order_dir: str
    traceparent: str
    shard_bytes: int | None
    lock_s: float | None
    options: TransferOptions


_FOLDERS = ("GMS_SOCKET_DIR", "GMS_CHECKPOINT_DIR", "GMS_ORDER_DIR")
_NUMBERS = (
    "GMS_SAVE_WORKERS",
    "GMS_LOAD_WORKERS",
    "GMS_SHARD_SIZE_BYTES",
    "GMS_SAVE_LOCK_TIMEOUT_MS",
)


def read_settings(environment: Mapping[str, str]) -> Settings:
    """Read the environment. InvalidInput names every variable that is missing or wrong."""
    problems = [
        f"{name} is not set"
        for name in ("GMS_SOCKET_DIR", "GMS_CHECKPOINT_DIR")
        if not environment.get(name)
        and not (name == "GMS_CHECKPOINT_DIR" and environment.get("GMS_ORDER_DIR"))
    ]
    for name in _FOLDERS:
        try:
            check_folder(name, environment.get(name) or "/")
        except InvalidInput as error:
            problems.append(f"{error.message}: {error.next_step}")
    numbers: dict[str, int] = {}
    for name in _NUMBERS:
        text = environment.get(name)
        if not text:
            continue
        if text.isascii() and text.isdigit() and 0 < int(text[:20]) < 2**50:
            numbers[name] = int(text)
        else:
            problems.append(f"{name}={text!r} is not a positive number")
    if problems:
        raise InvalidInput("; ".join(problems), next_step="set these environment variables")
    folder = environment.get("GMS_CHECKPOINT_DIR", "")
    lock_ms = numbers.get("GMS_SAVE_LOCK_TIMEOUT_MS")
    return Settings(
        socket_dir=environment["GMS_SOCKET_DIR"],
        checkpoint_dir=folder,
        order_file=environment.get("GMS_ORDER_FILE") or str(PurePath(folder) / ORDER_FILE),
        order_dir=environment.get("GMS_ORDER_DIR", ""),
        traceparent=environment.get("TRACEPARENT", ""),
        shard_bytes=numbers.get("GMS_SHARD_SIZE_BYTES"),
        lock_s=lock_ms / 1000 if lock_ms is not None else None,
        options=TransferOptions(
            environment.get("SNAPBACK_TRANSFER_BACKEND") or DEFAULT_BACKEND,
            environment.get("SNAPBACK_OBJECT_STORAGE", ""),
            save_threads=min(MAX_THREADS, numbers.get("GMS_SAVE_WORKERS", SAVE_THREADS)),
            load_threads=min(MAX_THREADS, numbers.get("GMS_LOAD_WORKERS", LOAD_THREADS)),
        ),
    )


def in_order_folder(settings: Settings, folder: str, order: SaveOrder | LoadOrder) -> Settings:
    """Return the settings of an order that has a folder of its own: its generation is in that."""
    if isinstance(order, SaveOrder):
        generation = (order.namespace, order.content_uid, order.attempt)
    else:
        found = order.artifact
        generation = (found.namespace, found.content_uid, found.generation)
    return replace(
        settings, checkpoint_dir=str(PurePath(folder).joinpath(*generation_path(*generation)))
    )


def container_save(settings: Settings, order: SaveOrder) -> SaveTask:
    """Return the task of an order. InvalidInput when it is of another directory."""
    optional: dict[str, Any] = {}
    if settings.shard_bytes is not None:
        optional["shard_bytes"] = settings.shard_bytes
    return save_task(
        order,
        settings.options,
        socket_dir=settings.socket_dir,
        root=_root(settings, order.namespace, order.content_uid, order.attempt),
        deadline_s=min(order.deadline_s, settings.lock_s or order.deadline_s),
        traceparent=settings.traceparent or order.traceparent,
        # Without a fence the save reads beside the others: a committed layout does not change.
        fence_token=order.fence_token or None,
        **optional,
    )


def container_load(settings: Settings, order: LoadOrder, *, load_token: str) -> LoadTask:
    """Return the task of an order. InvalidInput when it is of another directory."""
    artifact = order.artifact
    return load_task(
        order,
        settings.options,
        device=order.device,
        socket_dir=settings.socket_dir,
        root=_root(settings, artifact.namespace, artifact.content_uid, artifact.generation),
        deadline_s=order.deadline_s,
        traceparent=settings.traceparent or order.traceparent,
        load_token=load_token,
    )


def _root(settings: Settings, namespace: str, content_uid: str, generation: int) -> str:
    wanted = generation_path(namespace, content_uid, generation)
    folder = PurePath(settings.checkpoint_dir)
    if folder.parts[-3:] != wanted:
        raise InvalidInput(
            f"GMS_CHECKPOINT_DIR is {folder}, the order is about a directory that ends in "
            f"{'/'.join(wanted)}",
            next_step="mount the artifact root, and name the generation in it",
            found=str(folder),
            expected="/".join(wanted),
        )
    return str(folder.parents[2])
