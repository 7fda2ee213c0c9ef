"""Writes the files of a machine below a folder, each whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

from snapshot_shared.errors import NotPermitted
from snapshotctl.adapters.folders import replace_file
from snapshotctl.domain.exits import WrongArguments
from snapshotctl.domain.units import File


class Installed(NamedTuple):
    """What became of a file."""

    path: Path
    what: Literal["written", "replaced", "unchanged", "kept"]

    def value(self) -> dict[str, str]:
        """Return what `-o json` prints."""
        return {"path": str(self.path), "what": self.what}


def read_given(source: Path) -> str:
    """Return a file that was given to be copied. WrongArguments."""
    try:
        return source.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise WrongArguments(
            f"{source} cannot be read: {why}",
            next_step="make the keys first: snapshotctl keys --folder keys --node NAME for every "
            "node; --keys is that folder",
        ) from error


def install_files(root: Path, files: Iterable[File]) -> list[Installed]:
    """Write files below `root`, and return what became of each. NotPermitted."""
    try:
        return [_install(root / file.path.relative_to("/"), file) for file in files]
    except PermissionError as error:
        raise NotPermitted(
            f"{error.filename} cannot be written by this user",
            next_step="run it as root, or write elsewhere with --root FOLDER",
        ) from error


def _install(path: Path, file: File) -> Installed:
    before = path.read_bytes() if path.exists() else None
    if before == file.text.encode():
        return Installed(path, "unchanged")
    if before is not None and file.is_theirs:
        return Installed(path, "kept")
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, file.text.encode())
    path.chmod(file.mode)
    return Installed(path, "written" if before is None else "replaced")
