"""The `gms` command: look at a GPU memory service, save, load and drop its memory, check parts.

It speaks to the gRPC socket of a service on this machine; `verify` and `diff` read the disk alone.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing, closing
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from gms.adapters.grpc_client import GmsCaller, fresh_token
from gms.adapters.part_files import part_folders, read_part, verify_part
from gms.adapters.session_bench import bench_sessions
from gms.conformance.run import check, open_rig
from gms.domain.parts import difference, differences, place_of
from gms.domain.showing import (
    bench_text,
    difference_text,
    differences_text,
    size_text,
    status_text,
)
from snapback_client.cuda import CudaUnavailable
from snapback_client.folders import check_folder
from snapback_client.frames import GenerationRef, MemoryDomain
from snapshot_shared.codec import encode_pretty
from snapshot_shared.errors import (
    Incompatible,
    Internal,
    InvalidInput,
    NotFound,
    SnapbackError,
    UnknownDevice,
    failure_of,
)
from snapshot_shared.frames import (
    MAX_EVENTS,
    DeviceStatus,
    LoadRequest,
    SaveRequest,
    StatusReply,
    TransferStage,
    TransferUpdate,
)
from snapshot_shared.ids import derived_uid
from snapshot_shared.orders import LayoutRef
from snapshot_shared.service import VERSION


class Output(StrEnum):
    """How a result is written."""

    TABLE = "table"
    JSON = "json"


class Kind(StrEnum):
    """The kind of a device."""

    SIMULATED = "simulated"
    CUDA = "cuda"


class Exit(IntEnum):
    """How a command ended."""

    OK = 0
    FAILED = 1
    USAGE = 2
    INTERRUPTED = 130


_EXITS = "\b\nExit codes:\n  0  done\n  1  failed, or two parts differ\n"
_EXITS += "  2  wrong arguments, or no such device\n130  interrupted; nothing was left"

app = typer.Typer(
    name="gms",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=_EXITS,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gms {VERSION}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Look at a GPU memory service, save, load and drop its memory, and check what was saved."""


SocketDir = Annotated[
    str | None,
    typer.Option(
        "--socket-dir",
        envvar=["GMS_SOCKET_DIR", "SNAPBACK_SOCKET_DIR"],
        metavar="PATH",
        help="Folder of the sockets of the service.",
    ),
]
Device = Annotated[str, typer.Option("--device", "-d", help="Index or uuid of the device.")]
Form = Annotated[Output, typer.Option("--output", "-o", help="Form of the result.")]
PartPath = Annotated[Path, typer.Argument(help="Folder of a part.")]


@app.command()
def status(
    socket_dir: SocketDir = None,
    output: Form = Output.TABLE,
    events: Annotated[
        int, typer.Option("--events", "-e", min=0, max=MAX_EVENTS, help="How many events to show.")
    ] = 10,
) -> None:
    """Show devices, who holds or waits for their memory, and what happened last."""

    async def work() -> Exit:
        async with _caller(socket_dir) as gms:
            reply = await gms.status(events=events)
        _show(output, reply, status_text)
        return Exit.OK

    _carry_out(work())


@app.command()
def save(
    socket_dir: SocketDir = None,
    device: Device = "0",
    root: Annotated[
        Path | None,
        typer.Option("--root", help="Artifact root.", show_default="that of the service"),
    ] = None,
    namespace: Annotated[str, typer.Option("--namespace", "-n")] = "default",
    uid: Annotated[
        str | None,
        typer.Option("--uid", help="Uid of the content.", show_default="one for each layout"),
    ] = None,
    attempt: Annotated[int, typer.Option("--attempt", min=1)] = 1,
    output: Form = Output.TABLE,
) -> None:
    """Write what is committed on a device as a part. The worker goes on meanwhile."""

    async def work() -> Exit:
        async with _caller(socket_dir) as gms:
            found = _device(await gms.status(events=0), device)
            layout = _committed(found)
            if layout is None:
                raise Incompatible(
                    f"nothing is committed on device {found.index} ({found.uuid})",
                    next_step="let a worker commit its weights first",
                )
            request = SaveRequest(
                device=found.uuid,
                namespace=namespace,
                content_uid=uid
                or derived_uid(layout.incarnation, layout.device, str(layout.generation)),
                attempt=attempt,
                root=str(root.absolute()) if root else None,
            )
            done = await _follow("saved", gms.save(request))
        _show(output, done, lambda update: f"{size_text(update.done)} in {update.path}")
        return Exit.OK

    _carry_out(work())


@app.command()
def load(
    path: PartPath,
    socket_dir: SocketDir = None,
    device: Device = "0",
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace what is committed there.")
    ] = False,
    output: Form = Output.TABLE,
) -> None:
    """Read a part into a device, verified, and publish it. What is there already stays."""

    async def work() -> Exit:
        place = place_of(path.absolute())
        manifest, digest = await asyncio.to_thread(read_part, path.absolute())
        if manifest.layout is None:
            raise InvalidInput(f"{path} holds no GPU memory", next_step="name a part gpu-<ordinal>")
        async with _caller(socket_dir) as gms:
            found = _device(await gms.status(events=0), device)
            base = _generation(found) if replace else None
            request = LoadRequest(
                device=found.uuid,
                namespace=place.namespace,
                content_uid=place.content_uid,
                attempt=place.attempt,
                part=place.part,
                root=place.root,
                part_digest=digest,
                layout_id=manifest.layout.source.layout_id,
                structure_hash=manifest.layout.source.structure_hash,
                load_token=fresh_token("load"),
                publish=True,
                if_match=base,
            )
            done = await _follow("loaded", gms.load(request))
        _show(output, done, _loaded_text)
        return Exit.OK

    _carry_out(work())


@app.command()
def drop(
    socket_dir: SocketDir = None,
    device: Device = "0",
    layout_id: Annotated[
        str | None,
        typer.Option("--layout", metavar="ID", help="Drop only this layout, as status shows it."),
    ] = None,
    output: Form = Output.TABLE,
) -> None:
    """Free what is committed on a device. Refused while a session or a capture uses it."""

    async def work() -> Exit:
        async with _caller(socket_dir) as gms:
            found = _device(await gms.status(events=0), device)
            layout = _committed(found)
            named = layout_id or (layout.layout_id if layout else "")
            # With its id, so that a layout that was committed meanwhile stays.
            if layout is None or not await gms.drop_layout(found.uuid, named):
                raise NotFound(
                    f"nothing is committed on device {found.index} ({found.uuid})",
                    next_step="see what each device holds: gms status",
                )
            await gms.status(events=0)  # Its answer comes when the memory is free.
        _show(
            output,
            {"device": found.uuid, "layout": layout},
            lambda _: (
                f"{size_text(layout.bytes)} of device {found.index} are free: "
                f"layout {layout.layout_id}"
            ),
        )
        return Exit.OK

    _carry_out(work())


@app.command()
def verify(path: PartPath, output: Form = Output.TABLE) -> None:
    """Read every byte of a part, or of all parts of a generation, and compare every digest."""

    async def work() -> Exit:
        result = [await _verified(folder) for folder in part_folders(path)]
        lines = [
            f"{each['part']}: {size_text(each['bytes'])}, every digest matches" for each in result
        ]
        _show(output, result, lambda _: "\n".join(lines))
        return Exit.OK

    _carry_out(work())


@app.command()
def diff(
    first: Annotated[Path, typer.Argument(help="Folder of a part, or of a generation.")],
    second: Annotated[Path, typer.Argument(help="Folder of another one.")],
    output: Form = Output.TABLE,
) -> None:
    """Compare two parts, or all parts of two generations, by digests. Status 1 when they differ."""

    async def work() -> Exit:
        old, new = part_folders(first), part_folders(second)
        are_parts = [old == [first.absolute()], new == [second.absolute()]]
        if are_parts == [True, True]:
            found = difference(read_part(old[0])[0], read_part(new[0])[0])
            _show(output, found, difference_text)
            return Exit.OK if found.equal else Exit.FAILED
        if any(are_parts):
            raise InvalidInput(
                f"one of {first} and {second} is a part, the other a generation",
                next_step="name two parts or two generations",
            )
        rows = differences(*({p.name: read_part(p)[0] for p in each} for each in (old, new)))
        _show(output, rows, lambda _: differences_text(rows, str(first), str(second)))
        return Exit.OK if all(row.is_equal for row in rows) else Exit.FAILED

    _carry_out(work())


@app.command()
def bench(
    socket_dir: SocketDir = None,
    device: Device = "0",
    calls: Annotated[int, typer.Option("--calls", min=10, max=100_000)] = 1000,
    regions: Annotated[int, typer.Option("--regions", min=1, max=8192)] = 32,
    output: Form = Output.TABLE,
) -> None:
    """Measure calls and the hand-over of regions, in the domain kv, where no worker may be."""

    async def work() -> Exit:
        async with _caller(socket_dir) as gms:
            found = _device(await gms.status(events=0), device)
        folder = _folder(socket_dir)
        result = await asyncio.to_thread(
            bench_sessions, str(folder), found.uuid, calls=calls, regions=regions
        )
        _show(output, result, bench_text)
        return Exit.OK

    _carry_out(work())


@app.command()
def conformance(
    device: Annotated[
        Kind, typer.Option("--device", "-d", help="Kind of the device.")
    ] = Kind.SIMULATED,
    ordinal: Annotated[
        int, typer.Option("--ordinal", min=0, help="Which of the visible CUDA devices.")
    ] = 0,
) -> None:
    """Check that a device, and the service on it, keep every rule. It must not be in use."""
    try:
        rig = open_rig(device.value, ordinal)
    except (CudaUnavailable, UnknownDevice) as error:
        _failed(error)
        raise typer.Exit(Exit.USAGE) from None
    with closing(rig):
        info = rig.device.info
        sys.stdout.write(f"{info.uuid}  {info.product}\n")
        for name, value in info.capabilities.items():
            sys.stdout.write(f"  {name}: {value}\n")
        is_sound = check(rig, sys.stdout.write)
    raise typer.Exit(Exit.OK if is_sound else Exit.FAILED)


def main() -> None:
    """Run the command line; errors are a line and a next step on standard error."""
    try:
        app()
    except SnapbackError as error:
        _failed(error)
        sys.exit(Exit.FAILED)


# How it is done.


def _folder(socket_dir: str | None) -> Path:
    if socket_dir is None:
        raise InvalidInput(
            "no folder of sockets is named",
            next_step="set GMS_SOCKET_DIR, or give --socket-dir, the folder of its sockets",
        )
    return Path(check_folder("--socket-dir", socket_dir))


def _caller(socket_dir: str | None) -> GmsCaller:
    return GmsCaller(_folder(socket_dir), traceparent=os.environ.get("TRACEPARENT", ""))


def _device(reply: StatusReply, wanted: str) -> DeviceStatus:
    for found in reply.devices:
        if wanted in (str(found.index), found.uuid):
            return found
    served = ", ".join(f"{found.index} ({found.uuid})" for found in reply.devices)
    raise InvalidInput(f"device {wanted} is not served here", next_step=f"name one of: {served}")


def _committed(device: DeviceStatus) -> LayoutRef | None:
    (weights,) = (each for each in device.domains if each.domain is MemoryDomain.WEIGHTS)
    return weights.layout


def _generation(device: DeviceStatus) -> GenerationRef | None:
    layout = _committed(device)
    if layout is None:
        return None
    return GenerationRef(incarnation=layout.incarnation, generation=layout.generation)


def _loaded_text(update: TransferUpdate) -> str:
    layout = update.layout
    generation = f"generation {layout.generation} of {layout.device}" if layout else ""
    if update.was_there:
        return f"{generation} is this layout already; nothing was read"
    return f"{size_text(update.done)} are {generation}"


async def _follow(verb: str, updates: AsyncGenerator[TransferUpdate, None]) -> TransferUpdate:
    progress = _Progress(verb, 0)
    async with aclosing(updates):
        async for update in updates:
            if update.stage is TransferStage.DONE:
                progress.end()
                return update
            if update.stage is TransferStage.PROGRESS:
                progress.reached(update.done, update.total)
    raise Internal("the transfer ended without a result")


class _Progress:
    """A progress line that is rewritten on a terminal; nothing where stderr is no terminal."""

    def __init__(self, verb: str, total: int) -> None:
        self._verb = verb
        self._total = total
        self._done = 0
        self._percent = -1
        self._is_shown = sys.stderr.isatty()

    def advance(self, size: int, stop: Callable[[], bool]) -> None:
        if stop():
            raise asyncio.CancelledError
        self.reached(self._done + size, self._total)

    def reached(self, done: int, total: int) -> None:
        self._done, self._total = done, total
        percent = 100 * done // total if total else 100
        if self._is_shown and percent != self._percent:
            self._percent = percent
            sys.stderr.write(f"\r{self._verb} {size_text(done)} of {size_text(total)}, {percent} %")
            sys.stderr.flush()

    def end(self) -> None:
        if self._is_shown and self._percent >= 0:
            sys.stderr.write("\r\033[K")


async def _verified(folder: Path) -> dict[str, Any]:
    manifest, digest = read_part(folder)
    progress = _Progress("verified", manifest.bytes)

    def work(is_over: Callable[[], bool]) -> None:
        verify_part(folder, manifest, lambda size: progress.advance(size, is_over))

    await _interruptible_thread(work)
    progress.end()
    return {"part": str(folder), "bytes": manifest.bytes, "digest": digest}


async def _interruptible_thread(work: Callable[[Callable[[], bool]], None]) -> None:
    """Run blocking work in a thread; it calls its argument to learn whether to stop."""
    is_over = False
    task = asyncio.create_task(asyncio.to_thread(work, lambda: is_over))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        is_over = True
        await asyncio.wait([task])
        raise


def _show(output: Output, result: Any, text: Callable[[Any], str]) -> None:
    if output is Output.JSON:
        sys.stdout.write(encode_pretty(result).decode())
    else:
        sys.stdout.write(text(result) + "\n")


def _failed(error: Exception) -> None:
    found = failure_of(error)
    sys.stderr.write(f"error: {found.reason}: {found.message}\n")
    if found.next_step:
        sys.stderr.write(f"next: {found.next_step}\n")


def _carry_out(work: Coroutine[Any, Any, Exit]) -> None:
    """Run a command. An interrupt cancels it and waits for its clean-up."""
    try:
        code = asyncio.run(_with_signals(work))
    except asyncio.CancelledError:
        sys.stderr.write("interrupted\n")
        code = Exit.INTERRUPTED
    except Exception as error:  # noqa: BLE001 - here every error becomes a line and a code
        _failed(error)
        code = Exit.FAILED
    raise typer.Exit(code)


async def _with_signals(work: Coroutine[Any, Any, Exit]) -> Exit:
    task = asyncio.ensure_future(work)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    return await task


if __name__ == "__main__":
    main()
