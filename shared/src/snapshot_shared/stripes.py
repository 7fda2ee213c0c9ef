"""Stripe roots: folders on other disks, over which the files of GPU memory are spread.

A manifest names a stripe root by a name, and each node maps names to folders. Below a stripe root
the folders are those of the artifact root. Before a part has a file in one, its folder below the
artifact root has a mark that names all of them, so that whatever removes the part finds them. A
mark has the id of each root as well: another disk, or none, at the same place is then noticed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import TypeVar

from snapback_client.folders import check_folder
from snapshot_shared.artifact import (
    MAX_STRIPES,
    FileEntry,
    PartManifest,
    SavedStripes,
    StripeRoot,
    part_path,
)
from snapshot_shared.codec import decode_json, encode_pretty
from snapshot_shared.errors import (
    ArtifactCorrupt,
    ArtifactError,
    ArtifactExists,
    ArtifactMissing,
    InvalidInput,
    InvalidMessage,
    InvalidName,
    SnapbackError,
)
from snapshot_shared.files import (
    create_file,
    make_dir,
    names_in,
    open_dir,
    open_regular,
    open_root,
    opened,
    remove_tree,
    secure,
    write_all,
    write_replacing,
)
from snapshot_shared.ids import check_label
from snapshot_shared.object_storage import ObjectStorage, remove_with_objects

T = TypeVar("T", SavedStripes, StripeRoot)

VARIABLE = "SNAPBACK_STRIPE_ROOTS"
MARK = "stripes.json"
"""The file in the folder of a part that names its stripe roots; made before any file in them."""
IDENTITY = "stripe-root.json"
"""The file in a stripe root that has its id; made when the root is first used."""

_LIMIT = 64 * 1024
_GENERATION_DEPTH = 3


class StripeMissing(SnapbackError):
    """A stripe root of a part is not on this node; `values`: stripe, setting."""


def parse_stripes(text: str, artifact_root: str | os.PathLike[str] | None = None) -> dict[str, str]:
    """Return folders by name, of `name=/folder:name2=/folder2`. InvalidInput names each mistake.

    `artifact_root` is None where it is not known.
    """
    above = [] if artifact_root is None else [("the artifact root", os.fspath(artifact_root))]
    found: dict[str, str] = {}
    problems: list[str] = []
    for item in text.split(":") if text else ():
        name, _, path = item.partition("=")
        try:
            check_label(name)
            check_folder(VARIABLE, path)
        except (InvalidName, InvalidInput) as error:
            problems.append(f"{item!r}: {error.message}")
            continue
        if name in found:
            problems.append(f"{item!r}: the name is there twice")
        problems += [
            f"{item!r}: the folder is that of {other}, or one is inside the other"
            for other, folder in [*above, *found.items()]
            if _are_nested(path, folder)
        ]
        found[name] = path
    if len(found) > MAX_STRIPES:
        problems.append(f"there are {len(found)}, the limit is {MAX_STRIPES}")
    if problems:
        raise InvalidInput(
            f"{VARIABLE}={text!r}: {'; '.join(problems)}",
            next_step="write name=/folder:name2=/folder2 with folders apart from each other and "
            "from the artifact root",
            setting=VARIABLE,
            found=text,
        )
    return found


def _are_nested(one: str, other: str) -> bool:
    first, second = PurePath(one), PurePath(other)
    return first.is_relative_to(second) or second.is_relative_to(first)


def check_apart(found: Mapping[str, os.stat_result]) -> None:
    """Raise InvalidInput where two of these are one folder, whose paths a link or a mount hides.

    They are stripe roots by their names; `""` is the artifact root.
    """
    names: dict[tuple[int, int], str] = {}
    for name, folder in found.items():
        first = names.setdefault((folder.st_dev, folder.st_ino), name)
        if first != name:
            both = [
                f"stripe root {each!r}" if each else "the artifact root"
                for each in sorted((first, name))
            ]
            raise InvalidInput(
                f"{' and '.join(both)} are one folder",
                next_step=f"name folders in {VARIABLE} that are apart from each other and from "
                "the artifact root, also behind links and mounts",
                setting=VARIABLE,
                found=both,
            )


class StripeRoots:
    """The stripe roots of a node. StripeMissing is raised for any that is not here."""

    def __init__(self, folders: Mapping[str, str]) -> None:
        """Use these folders by their names. They have to exist: no disk is mounted here."""
        self._folders = dict(sorted(folders.items()))

    @property
    def folders(self) -> Mapping[str, str]:
        """The folders by their names, sorted."""
        return self._folders

    def open(self, name: str) -> int:
        """Open a stripe root."""
        path = self._folders.get(name)
        if path is None:
            raise StripeMissing(
                f"stripe root {name!r} is needed, and {VARIABLE} of this node does not name it",
                next_step=f"add {name}=/its/folder to {VARIABLE} of GMS and agent",
                stripe=name,
                setting=VARIABLE,
            )
        try:
            return open_root(path)
        except OSError as error:
            raise self._missing(name, error.strerror or str(error)) from error

    def _missing(self, name: str, why: str) -> StripeMissing:
        path = self._folders[name]
        return StripeMissing(
            f"stripe root {name!r}: {path}: {why}",
            next_step=f"mount its disk at {path}, or correct {VARIABLE} of GMS and agent",
            stripe=name,
            setting=VARIABLE,
            path=path,
        )

    @contextlib.contextmanager
    def _known(self, name: str, wanted: str) -> Iterator[int]:
        """Open a stripe root that has to have this id."""
        with opened(self.open(name)) as root:
            found = _read(root, IDENTITY, StripeRoot)
            if found is None:
                raise self._missing(name, f"it has no {IDENTITY}, so that its disk is not mounted")
            if found.id != wanted:
                raise self._missing(name, f"it is stripe root {found.id}, wanted {wanted}")
            yield root

    @contextlib.contextmanager
    def reading(self, directory: int, manifest: PartManifest) -> Iterator[dict[str, int]]:
        """Open all folders that have files of a part, by the names of their stripe roots.

        That of `""` is `directory`, the folder of the part below the artifact root. ArtifactMissing
        and ArtifactCorrupt for a part whose mark does not name them.
        """
        folders = {"": directory}
        with contextlib.ExitStack() as stack:
            if needed := {entry.stripe for entry in manifest.files if entry.stripe}:
                mark = _read(directory, MARK, SavedStripes)
                if mark is None or not needed <= mark.roots.keys():
                    raise ArtifactCorrupt(
                        f"part {manifest.part} is in stripe roots that its {MARK} does not name",
                        file=MARK,
                        found=sorted(mark.roots) if mark else [],
                        expected=sorted(needed),
                    )
                place = (manifest.namespace, manifest.content_uid, manifest.generation)
                path = part_path(*place, manifest.part)
                for name in sorted(needed):
                    root = stack.enter_context(self._known(name, mark.roots[name]))
                    folders[name] = stack.enter_context(opened(open_dir(root, path)))
            yield folders

    @contextlib.contextmanager
    def writing(
        self, root: int, directory: int, path: Sequence[str], names: Iterable[str]
    ) -> Iterator[dict[str, int]]:
        """Make and open the folders of a part in these stripe roots, and mark its folder first.

        As `reading`. What an earlier save of the part has in other roots is removed. `root` is the
        artifact root; a block that fails takes the folders with it if the part is not there any
        more, as no mark names them then. ArtifactExists where one of them is there already and no
        mark names it, InvalidInput where two roots are one folder.
        """
        folders = {"": directory}
        with contextlib.ExitStack() as stack:
            roots = {
                name: stack.enter_context(opened(self.open(name))) for name in sorted(set(names))
            }
            check_apart({name: os.fstat(fd) for name, fd in [("", root), *roots.items()]})
            ids = {name: _identity(root) for name, root in roots.items()}
            before = _read(directory, MARK, SavedStripes)
            if before is not None and before.roots != ids:
                self._remove(before.roots.items(), path)
                os.unlink(MARK, dir_fd=directory)
                secure(directory, MARK)
            if before is None or before.roots != ids:
                # Before the mark, by which a removal would take them.
                self._require_none(roots, path)
            if ids:
                # Also an equal one: its writer may have ended before it was durable.
                write_replacing(directory, MARK, encode_pretty(SavedStripes(roots=ids)))
            try:
                for name, stripe in roots.items():
                    folders[name] = stack.enter_context(opened(make_dir(stripe, path)))
                yield folders
            except BaseException:
                with contextlib.suppress(SnapbackError, OSError):
                    if not _is_at(root, path, directory):
                        _remove_opened(roots, path, folders)
                raise

    def _require_none(self, roots: Mapping[str, int], path: Sequence[str]) -> None:
        where = "/".join(path)
        for name, root in roots.items():
            with contextlib.suppress(ArtifactMissing), opened(open_dir(root, path)):
                raise ArtifactExists(
                    f"stripe root {name!r} has {where} already, of a part below another artifact "
                    "root, or of one whose folder was removed by hand",
                    next_step="save it with another content uid or generation, or remove "
                    f"{self._folders[name]}/{where} if nothing needs it",
                    stripe=name,
                    path=where,
                )

    def remove(self, parent: int, path: Sequence[str]) -> None:
        """Remove what a part or a generation, the last of `path`, has in stripe roots.

        Its folder is beneath `parent` and stays, with its marks.
        """
        # Parts that were written on several nodes may have several ids for one name.
        self._remove({item for mark in _marks(parent, path[-1]) for item in mark.items()}, path)
        if len(path) == _GENERATION_DEPTH:
            self._prune(path)

    def _remove(self, ids: Iterable[tuple[str, str]], path: Sequence[str]) -> None:
        with contextlib.ExitStack() as stack:
            # Nothing is removed until all are found.
            roots = [stack.enter_context(self._known(*item)) for item in sorted(ids)]
            for root in roots:
                with (
                    contextlib.suppress(ArtifactMissing),
                    opened(open_dir(root, path[:-1])) as parent,
                ):
                    remove_tree(parent, path[-1])

    def _prune(self, path: Sequence[str]) -> None:
        """Remove the empty folders of a generation: a part that failed leaves those above it."""
        for name in self._folders:
            with (
                contextlib.suppress(SnapbackError, OSError),
                opened(self.open(name)) as root,
                opened(open_dir(root, path[:1])) as space,
            ):
                with (
                    contextlib.suppress(SnapbackError, OSError),
                    opened(open_dir(space, path[1:2])) as content,
                ):
                    os.rmdir(path[2], dir_fd=content)
                # Fails while other generations of the content are there.
                os.rmdir(path[1], dir_fd=space)


NO_STRIPES = StripeRoots({})


def folder_of(folders: Mapping[str, int], entry: FileEntry) -> int:
    """Return the folder that has a file, of those that `reading` gives."""
    return folders[entry.stripe or ""]


def check_files(folders: Mapping[str, int], manifest: PartManifest) -> None:
    """Compare the sizes of all files of a part in its folders, without reading any.

    ArtifactMissing and ArtifactCorrupt name the file.
    """
    is_shared = manifest.kind == "gms"
    for entry in manifest.files:
        folder = folder_of(folders, entry)
        os.close(open_regular(folder, entry.name, size=entry.size, shared=is_shared))


def remove_stored(
    parent: int, path: Sequence[str], storage: Callable[[], ObjectStorage], stripes: StripeRoots
) -> None:
    """Remove a part or a generation, the last of `path`, beneath its folder `parent`.

    What it has in stripe roots and as objects goes first: as long as there is any, its folder says
    so. StripeMissing leaves the folder as it is.
    """
    stripes.remove(parent, path)
    remove_with_objects(parent, path, storage)


def _identity(root: int) -> str:
    """Return the id of a stripe root, which is made when it has none."""
    found = _read(root, IDENTITY, StripeRoot)
    if found is None:
        # Several saves may begin here at once: each has its own name, and the first link stays.
        found = StripeRoot(id=os.urandom(16).hex())
        temporary = f".{IDENTITY}.{found.id}"
        with opened(create_file(root, temporary)) as fd:
            write_all(fd, encode_pretty(found))
            secure(fd, IDENTITY)
        # Another save, which has an identity, may have taken the temporary name away.
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            os.link(temporary, IDENTITY, src_dir_fd=root, dst_dir_fd=root, follow_symlinks=False)
        found = _read(root, IDENTITY, StripeRoot) or found
    for name in names_in(root):
        # Also those of processes that were killed.
        if name.startswith(f".{IDENTITY}."):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=root)
    # Also an identity that was there: its maker may have ended before that.
    secure(root, IDENTITY)
    return found.id


def _read(directory: int, name: str, type_: type[T]) -> T | None:
    """Read a mark or an identity; None where there is none. ArtifactCorrupt."""
    try:
        # The identity has a second name while it is made.
        with opened(open_regular(directory, name, shared=True)) as fd:
            return decode_json(os.pread(fd, _LIMIT + 1, 0), type_, limit=_LIMIT)
    except ArtifactMissing:
        return None
    except InvalidMessage as error:
        raise ArtifactCorrupt(
            f"{name}: {error.message}",
            next_step="look at the files of this part in the stripe roots, and remove them by hand",
            file=name,
        ) from error


def _is_at(root: int, path: Sequence[str], folder: int) -> bool:
    """Whether an open folder is the one at a path."""
    try:
        with opened(open_dir(root, path)) as found:
            return os.path.sameopenfile(found, folder)
    except ArtifactMissing:
        return False


def _remove_opened(
    roots: Mapping[str, int], path: Sequence[str], folders: Mapping[str, int]
) -> None:
    """Remove the folders at a path that are still these; others may have made them again."""
    for name, root in roots.items():
        if name in folders and _is_at(root, path, folders[name]):
            with opened(open_dir(root, path[:-1])) as parent:
                remove_tree(parent, path[-1])


def _marks(parent: int, name: str) -> Iterator[dict[str, str]]:
    """Yield the ids, by name, of the marks in a folder and in those below it. ArtifactCorrupt."""
    try:
        folder = open_dir(parent, (name,))
    except ArtifactError:
        return
    with opened(folder):
        for each in ("", *names_in(folder)):
            try:
                below = open_dir(folder, (each,) if each else ())
            except (ArtifactError, InvalidName):
                continue
            with opened(below):
                mark = _read(below, MARK, SavedStripes)
            if mark is not None:
                yield mark.roots
