"""The mounts of a container, as /proc/<pid>/mountinfo lists them (proc_pid_mountinfo(5))."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from snapshot_shared.proc import malformed

_ESCAPED = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """One mount: `root` is the path in its file system that is seen at `path` of the container."""

    id: int
    parent: int
    device: str
    root: str
    path: str
    options: Sequence[str]
    fs_type: str
    source: str
    super_options: Sequence[str]


def unescaped(text: str) -> str:
    r"""Return a word of a file of /proc without its escapes, such as `\040` for a space."""
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)), text)


def mounts_in(mountinfo: str) -> list[Mount]:
    """Return the mounts that a file `mountinfo` lists, in its order."""
    # A name may have what else ends a line for str.splitlines.
    lines = mountinfo.removesuffix("\n").split("\n") if mountinfo else ()
    return [_mount(line) for line in lines]


def _mount(line: str) -> Mount:
    # The optional fields before the dash are as many as the kernel likes.
    own, _, shared = line.partition(" - ")
    try:
        number, parent, device, root, path, options, *_ = own.split(" ")
        fs_type, source, super_options = shared.split(" ", 2)
        ids = int(number), int(parent)
    except ValueError:
        malformed("mountinfo", line)
    return Mount(
        *ids,
        device,
        unescaped(root),
        unescaped(path),
        options.split(","),
        fs_type,
        unescaped(source),
        super_options.split(","),
    )


def visible(mounts: Iterable[Mount]) -> dict[str, Mount]:
    """Return the mounts by path, of those at one path the last, which covers the others."""
    return {mount.path: mount for mount in mounts}


def upper_of(mounts: Iterable[Mount], on_node: Iterable[Mount] = ()) -> str | None:
    """Return the folder of the node with the files that a container has written in its root.

    `on_node` are the mounts of the node. None when its root is no overlay that can be written to,
    or its folder is not named whole and the node does not show where it is.
    """
    for mount in mounts:
        if mount.path == "/" and mount.fs_type == "overlay":
            for option in mount.super_options:
                name, _, value = option.partition("=")
                if name == "upperdir":
                    return _whole(PurePosixPath(unescaped(value)), mount, on_node)
    return None


def _whole(upper: PurePosixPath, root: Mount, on_node: Iterable[Mount]) -> str | None:
    if upper.is_absolute():
        return str(upper)
    # For an image of so many layers that their paths do not fit into one call, CRI-O mounts
    # <id>/diff at <id>/merged, both relative to a folder that no option names.
    merged = upper.with_name("merged")
    for mount in on_node:
        path = PurePosixPath(mount.path)
        if mount.device == root.device and path.parts[-len(merged.parts) :] == merged.parts:
            return str(path.with_name(upper.name))
    return None
