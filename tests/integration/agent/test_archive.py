"""Files of a container as an archive, and back, on real file systems; some need root."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import shutil
import socket
import stat
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from snapshot_agent.helper import syscalls
from snapshot_agent.helper.archive import pack, unpack
from snapshot_agent.helper.beneath import check_kernel, empty
from snapshot_shared.errors import ArtifactCorrupt, NoSpace, NotEligible, SnapbackError
from snapshot_shared.files import names_in, open_root, opened, read_all

pytestmark = pytest.mark.turns

LONG = "n" * 255
HAS_FILTERS = hasattr(tarfile, "data_filter")
RAW = os.fsdecode(b"raw-\xff\xfe\n=%41")
WHEN = 1_234_567_890_123_456_789

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def mount(where: Path, *words: str | Path) -> None:
    where.mkdir(exist_ok=True)
    made = subprocess.run(
        ["mount", *words, where], check=False, capture_output=True, text=True, env={"LC_ALL": "C"}
    )
    if made.returncode:
        pytest.skip(f"this machine mounts nothing: {made.stderr.strip()}")


@pytest.fixture
def mounted() -> Iterator[Callable[..., None]]:
    """Mount like the program, in a mount namespace that the test has for itself."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    here = Path.cwd()
    with opened(os.open("/proc/thread-self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)) as home:
        try:
            syscalls.unshare(syscalls.CLONE_NEWNS)
        except PermissionError as error:
            pytest.skip(f"this machine gives no mount namespace: {error}")
        try:
            syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_SLAVE)
            yield mount
        finally:
            syscalls.setns(home, syscalls.CLONE_NEWNS)
            os.chdir(here)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    return tmp_path / "source"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "target").mkdir()
    return tmp_path / "target"


def packed(
    source: Path, leave_out: Sequence[str] = (), *, is_upper: bool = False, **limits: int
) -> Path:
    archive = source.parent / f"{source.name}.tar"
    with opened(open_root(source)) as tree, archive.open("wb") as sink:
        written = pack(tree, sink.fileno(), leave_out=leave_out, is_upper=is_upper, **limits)
    assert written == archive.stat().st_size
    return archive


def unpacked(
    archive: Path,
    target: Path,
    leave_out: Sequence[str] = (),
    *,
    is_upper: bool = False,
    **limits: int,
) -> int:
    with opened(open_root(target)) as folder, archive.open("rb") as file:
        return unpack(file.fileno(), folder, leave_out=leave_out, is_upper=is_upper, **limits)


def names(folder: Path | str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def build(root: Path, tree: dict[str, Any]) -> None:
    """Make a tree: a dictionary is a folder, bytes are a file, tuples and words are other kinds."""
    for name, what in tree.items():
        path = root / name
        match what:
            case dict():
                path.mkdir()
                build(path, what)
            case bytes():
                path.write_bytes(what)
            case ("holes", places):
                with path.open("wb") as file:
                    for place in places:
                        file.seek(place * 16384)
                        file.write(b"data" * 1000)
                    file.truncate(700_001)
            case ("link", to):
                path.symlink_to(to)
            case _:
                os.mkfifo(path)


def seen(root: Path) -> dict[str, Any]:
    """Return all there is to see in a tree, but where it is."""
    linked: dict[tuple[int, int], list[str]] = {}
    found: dict[str, Any] = {}
    for folder, below, files in os.walk(root):
        for name in [".", *below, *files]:
            path = Path(folder, name)
            if name in below and not path.is_symlink():
                continue
            shown = os.path.relpath(path, root)
            status = path.lstat()
            kind = stat.S_IFMT(status.st_mode)
            linked.setdefault((status.st_dev, status.st_ino), []).append(shown)
            found[shown] = {
                "mode": status.st_mode,
                "owner": (status.st_uid, status.st_gid),
                "mtime": status.st_mtime_ns,
                "atime": status.st_atime_ns if kind == stat.S_IFREG else None,
                "size": status.st_size if kind == stat.S_IFREG else None,
                "link": str(path.readlink()) if kind == stat.S_IFLNK else None,
                "xattrs": {
                    key: os.getxattr(path, key, follow_symlinks=False)
                    for key in os.listxattr(path, follow_symlinks=False)
                    if not key.startswith("trusted.")
                },
            }
    for shown, facts in found.items():
        if stat.S_ISREG(facts["mode"]):
            with opened(os.open(root / shown, os.O_RDONLY | os.O_NOATIME)) as fd:
                facts["content"] = read_all(fd)
    found["names"] = sorted(sorted(each) for each in linked.values() if len(each) > 1)
    return found


def change_as_a_container_does(root: Path) -> None:
    """Change a tree in each way that an overlay records."""
    for name in ("deleted", "kept/gone", "was-file", "was-link"):
        (root / name).unlink()
    for name in ("opaque", "was-folder"):
        shutil.rmtree(root / name)
    build(
        root,
        {
            "changed": b"new content",
            "opaque": {"only": b"only this"},
            "was-folder": b"a file now",
            "was-file": {"inside": b""},
            "was-link": {"inside": b"not in another place"},
            "new": {
                "one": b"shared" * 100,
                "link": ("link", "/etc/passwd"),
                "l" * 250: ("link", "t" * 300),
                LONG: b"long",
                RAW: b"raw",
                "d" * 200: {"e" * 200: {RAW: b""}},
                "big": os.urandom(300_001),
                "setuid": b"#!",
            },
        },
    )
    (root / "opaque").chmod(0o2751)
    new = root / "new"
    os.link(new / "one", root / "other-name")
    os.link(new / "one", new / "third")
    os.link(new / "link", new / "link-again", follow_symlinks=False)
    os.mkfifo(new / "fifo", 0o640)
    with (new / "sparse").open("wb") as file:
        file.seek(1 << 20)
        file.write(b"x" * 5000)
        file.truncate(64 << 20)
    with (new / "hole").open("wb") as file:
        file.truncate(12345)
    os.chown(new / "setuid", 4_000_000_000, 3_000_000)
    (new / "setuid").chmod(0o6755)
    os.setxattr(new / "setuid", "user.a=b%", b"\x00\xff\n")
    os.setxattr(new / "setuid", "user.empty", b"")
    os.setxattr(
        new / "setuid", "security.capability", bytes.fromhex("0100000202040000" + "00" * 12)
    )
    os.setxattr(new, "system.posix_acl_default", ACL)
    os.setxattr(new / "big", "system.posix_acl_access", ACL)
    os.chown(new / "link", 7, 8, follow_symlinks=False)
    (root / "kept").chmod(0o711)
    os.utime(new / "link", ns=(WHEN, WHEN + 1), follow_symlinks=False)
    os.utime(new / "fifo", ns=(WHEN, -1_500_000_000))
    os.utime(new / "one", ns=(WHEN + 5, WHEN + 6))
    os.utime(new, ns=(WHEN, WHEN + 2))
    os.utime(root, ns=(WHEN, WHEN + 3))


# rwx for the owner, r for user 12, rx for the group, mask rx, nothing for others.
ACL = bytes.fromhex(
    "0200000001000700ffffffff020004000c00000004000500ffffffff10000500ffffffff20000000ffffffff"
)


LOWER: dict[str, Any] = {
    "changed": b"changed",
    "deleted": b"deleted",
    "kept": {"gone": b"kept/gone", "stays": b"kept/stays"},
    "opaque": {"deep": {"file": b"opaque/deep/file"}},
    "was-folder": {"deep": {"file": b"was-folder/deep/file"}},
    "was-file": b"was-file",
    "was-link": ("link", "elsewhere"),
    "elsewhere": {},
}


@pytest.mark.root
@pytest.mark.parametrize("is_tmpfs", [True, False])
def test_the_changes_in_an_overlay_come_back_in_another_one(
    tmp_path: Path, mounted: Callable[..., None], is_tmpfs: bool
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if is_tmpfs:
        mounted(disk, "-t", "tmpfs", "tmpfs")
    build(disk, {"lower": LOWER, "upper-a": {}, "upper-b": {}, "work-a": {}, "work-b": {}})
    for name in "ab":
        options = f"lowerdir={disk}/lower,upperdir={disk}/upper-{name},workdir={disk}/work-{name}"
        mounted(tmp_path / name, "-t", "overlay", "overlay", "-o", options)
    change_as_a_container_does(tmp_path / "a")
    assert os.getxattr(disk / "upper-a" / "opaque", "trusted.overlay.opaque") == b"y"

    archive = packed(disk / "upper-a", is_upper=True)
    unpacked(archive, tmp_path / "b", is_upper=True)

    before = seen(tmp_path / "a")
    assert seen(tmp_path / "b") == before
    assert not (tmp_path / "b" / "elsewhere" / "inside").exists()
    for name in ("sparse", "hole"):
        assert (tmp_path / "b/new" / name).stat().st_blocks <= 256
    assert archive.stat().st_size < 1_000_000

    # Once more over what is there, as a second try does.
    unpacked(archive, tmp_path / "b", is_upper=True)
    assert seen(tmp_path / "b") == before


@needs_root
@pytest.mark.root
def test_whiteouts_that_are_attributes_are_whiteouts(source: Path, target: Path) -> None:
    build(source, {"d": {"gone": b""}})
    os.setxattr(source / "d", "trusted.overlay.opaque", b"x")
    os.setxattr(source / "d" / "gone", "trusted.overlay.whiteout", b"")
    os.link(source / "d" / "gone", source / "d" / "gone-too")
    build(target, {"d": {"gone": {"deep": {}}, "gone-too": b"", "stays": b""}})

    unpacked(packed(source, is_upper=True), target, is_upper=True)

    assert names(target / "d") == ["stays"]


@needs_root
@pytest.mark.root
@pytest.mark.parametrize(
    ("is_upper", "attribute"),
    [(True, "redirect"), (True, "metacopy"), (True, "char"), (False, "whiteout"), (True, "block")],
)
def test_what_no_archive_can_have_is_refused_by_its_path(
    source: Path, is_upper: bool, attribute: str
) -> None:
    odd = source / RAW
    if attribute == "char":
        os.mknod(odd, stat.S_IFCHR | 0o600, os.makedev(1, 3))
    elif attribute == "block":
        os.mknod(odd, stat.S_IFBLK | 0o600, os.makedev(0, 0))
    elif attribute == "whiteout":
        os.mknod(odd, stat.S_IFCHR | 0o600, os.makedev(0, 0))
    else:
        odd.mkdir()
        os.setxattr(odd, f"trusted.overlay.{attribute}", b"elsewhere")

    with pytest.raises(NotEligible, match=r"raw-\\udcff") as refusal:
        packed(source, is_upper=is_upper)
    str(refusal.value).encode()


def test_sockets_are_left_out(source: Path, target: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener, opened(open_root(source)) as fd:
        listener.bind(f"/proc/self/fd/{fd}/socket")
        unpacked(packed(source), target)

    assert names(target) == []


def test_paths_to_leave_out_are_left_out_on_both_sides(source: Path, target: Path) -> None:
    run = {"secret": {"token": b"source"}, "secret-not": {"token": b"source"}}
    build(source, {"run": run, "etc": {"hosts": b"source", "passwd": b"source"}})
    build(target, {"etc": {"passwd": b"target"}})

    unpacked(packed(source, ["run/secret", "etc/hosts"]), target, ["etc/passwd"])

    assert names(target / "run") == ["secret-not"]
    assert names(target / "etc") == ["passwd"]
    assert (target / "etc" / "passwd").read_bytes() == b"target"


def test_packing_leaves_no_trace_in_the_tree(source: Path) -> None:
    build(source, {"d": {"f": b"content"}})
    paths = [source, source / "d", source / "d" / "f"]
    for path in paths:
        os.utime(path, ns=(WHEN, WHEN))
    packed(source)

    assert [path.stat().st_atime_ns for path in paths] == [WHEN] * 3


def deep(root: Path) -> Iterator[int]:
    """Yield a folder and each folder `d` in the one before, from the top down."""
    fd = open_root(root)
    try:
        yield fd
        while "d" in names_in(fd):
            below = os.open("d", os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
            os.close(fd)
            fd = below
            yield fd
    finally:
        os.close(fd)


@pytest.fixture
def emptied(source: Path, target: Path) -> Iterator[None]:
    """Leave nothing in the folders that is too deep to be removed by other programs."""
    yield
    for folder in (source, target):
        with opened(open_root(folder)) as fd:
            empty(fd, ())
        assert names(folder) == []


def make_deep(root: Path, depth: int) -> None:
    for _, fd in zip(range(depth), deep(root), strict=False):
        if "d" not in names_in(fd):
            os.mkdir("d", dir_fd=fd)


def test_a_tree_as_deep_as_a_path_can_be_comes_back_and_a_deeper_one_is_refused(
    source: Path, target: Path, emptied: None
) -> None:
    make_deep(source, 2000)
    unpacked(packed(source), target)
    assert sum(1 for _ in deep(target)) == 2001
    make_deep(source, 2100)
    with pytest.raises(NotEligible, match="longer than 4095 bytes"):
        packed(source)


def test_more_files_than_the_limit_are_refused_on_both_sides(source: Path, target: Path) -> None:
    build(source, {name: {"f": b"12345"} for name in "abc"})

    with pytest.raises(NotEligible, match="too many files"):
        packed(source, limit_entries=5)
    archive = packed(source, limit_entries=6)
    with pytest.raises(ArtifactCorrupt, match="limit of 5 files"):
        unpacked(archive, target, limit_entries=5)
    with pytest.raises(ArtifactCorrupt, match="14 bytes"):
        unpacked(archive, target, limit_bytes=14)
    assert unpacked(archive, target, limit_bytes=15, limit_entries=6) == 15


def test_other_programs_can_read_an_archive(source: Path, target: Path) -> None:
    raw = RAW.replace("\n", "")
    build(source, {raw: b"raw", "d": {}})
    os.setxattr(source, "user.x", b"1")
    with (source / "d" / ("s" * 150)).open("wb") as file:
        file.seek(1 << 20)
        file.write(b"in the middle")
        file.truncate(3 << 20)
    archive = packed(source)

    with tarfile.open(archive) as file:
        file.extractall(target, **({"filter": "fully_trusted"} if HAS_FILTERS else {}))
    assert (target / "d" / ("s" * 150)).read_bytes() == (source / "d" / ("s" * 150)).read_bytes()
    shutil.rmtree(target / "d")
    if shutil.which("tar") is None:
        pytest.skip("there is no program `tar`")
    subprocess.run(["tar", "-C", target, "-xf", archive], check=True)
    assert (target / "d" / ("s" * 150)).read_bytes() == (source / "d" / ("s" * 150)).read_bytes()
    assert (target / raw).read_bytes() == b"raw"


def entry(
    name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"", link: str = "", **more: Any
) -> bytes:
    """Return an entry of an archive as any program can write it."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, more.pop("size", len(data))
    info.uid, info.gid = os.geteuid(), os.getegid()
    records = {"mtime": "1.000000000", "atime": "1.000000000", **more.pop("records", {})}
    info.pax_headers = {key: value for key, value in records.items() if value is not None}
    for key, value in more.items():
        setattr(info, key, value)
    head = info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
    return head + data + bytes(-len(data) % 512)


def record(text: bytes, size: int | None = None) -> bytes:
    """Return an extended header with bytes of our choice."""
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, len(text) if size is None else size
    return info.tobuf(tarfile.USTAR_FORMAT) + text + bytes(-len(text) % 512)


def sparse(lines: bytes, whole: int, data: bytes = b"", size: int | None = None) -> bytes:
    body = lines + bytes(-len(lines) % 512) + data
    records = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.name": "s",
        "GNU.sparse.realsize": str(whole),
    }
    return entry("x", data=body, size=len(body) if size is None else size, records=records)


DIR, LNK, HARD = tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE


def attribute(name: str, value: str = "y") -> dict[str, Any]:
    """Return what gives an entry an extended attribute."""
    return {"records": {f"SCHILY.xattr.{name}": value}}


def archive_of(folder: Path, *entries: bytes) -> Path:
    archive = folder / "x.tar"
    archive.write_bytes(b"".join(entries) + bytes(1024))
    return archive


HOSTILE: dict[str, dict[str, bytes]] = {
    "leads out": {
        "an absolute name": entry("/canary/new", data=b"x"),
        "an absolute name in a record": entry("x", records={"path": "/canary/new"}),
        "a name that climbs": entry("../canary/new", data=b"x"),
        "a name that climbs later": entry("a", DIR) + entry("a/../../canary/new"),
        "a name with a dot": entry("./x"),
        "an empty name": entry(""),
        "an empty part": entry("a", DIR) + entry("a//b"),
        "the root as a file": entry("."),
        "a name with a NUL": entry("x", records={"path": "a\0b"}),
        "a path that is too long": entry("/".join(["x" * 200] * 25)),
        "a hard link that climbs": entry("a", HARD, link="../canary/secret"),
        "an absolute hard link": entry("a", HARD, link="/etc/hostname"),
    },
    "File name too long": {"a name that is too long": entry("x" * 256)},
    "Not a directory": {
        "a name over a link out": entry("a", LNK, link="../canary") + entry("a/new", data=b"x"),
        "a name over an absolute link": entry("a", LNK, link="/tmp") + entry("a/new", data=b"x"),
        "a name over a link inside": entry("a", DIR)
        + entry("b", LNK, link="a")
        + entry("b/new", data=b"x"),
        "a name over a link that was there": entry("out/new", data=b"x"),
        "a name over a file": entry("a") + entry("a/b"),
        "a hard link through a link": entry("a", HARD, link="out/secret"),
    },
    "Too many levels of symbolic links": {
        "a name over a link further up": entry("a", DIR)
        + entry("a/c", DIR)
        + entry("b", LNK, link="a")
        + entry("b/c/new")
    },
    "No such file or directory": {
        "a name in no folder": entry("a/b"),
        "a hard link to nothing": entry("a", HARD, link="b"),
        "a hard link to itself": entry("a", HARD, link="a"),
        "a link to nothing": entry("a", LNK),
    },
    "is another name of a folder": {
        "a hard link to a folder": entry("a", DIR) + entry("b", HARD, link="a")
    },
    "is left out": {"a hard link to what is left out": entry("z", HARD, link="left/out")},
    "is a device": {"a character device": entry("a", tarfile.CHRTYPE, devmajor=1, devminor=3)},
    "of a kind that is not allowed": {
        "a block device": entry("a", tarfile.BLKTYPE, devmajor=1, devminor=3),
        "a block device 0/0": entry("a", tarfile.BLKTYPE),
        "a contiguous file": entry("a", b"7"),
        "a GNU sparse file": entry("a", tarfile.GNUTYPE_SPARSE),
        "a global record": entry("a", tarfile.XGLTYPE),
    },
    "would take the place": {
        "a whiteout of what a mount is in": entry("left", tarfile.CHRTYPE),
        "a file over what a mount is in": entry("left"),
        "a link over what a mount is in": entry("left", LNK, link="../canary"),
    },
    "comes twice": {
        "a duplicate": entry("a") + entry("a"),
        "a folder as a duplicate": entry("a", DIR) + entry("b") + entry("a", LNK, link="../canary"),
        "a folder that becomes a link": entry("a", DIR) + entry("a", LNK, link="../canary"),
        "another order": entry("b") + entry("a"),
    },
    "though it is no file": {
        "a GNU long name": entry("a", tarfile.GNUTYPE_LONGNAME, b"../canary/new\0"),
        "a folder with bytes": entry("a", DIR, b"x"),
        "a link with bytes": entry("a", LNK, b"x", link="b"),
        "a record about a record": record(b"11 path=ab\n") + record(b"11 path=cd\n") + entry("a"),
    },
    "a bad record": {
        "a record with a bad length": record(b"99 path=ab\n") + entry("a"),
        "a record with no length": record(b"path=ab\n") + entry("a"),
        "a record of length 0": record(b"0 path=ab\n") + entry("a"),
        "a record without an end": record(b"11 path=abc") + entry("a"),
        "a record with a huge length": record(b"9" * 500 + b" path=ab\n") + entry("a"),
    },
    "an unknown record": {
        "a record twice": record(b"11 path=ab\n11 path=cd\n") + entry("a"),
        "an unknown record": entry("a", records={"GNU.sparse.map": "0,1"}),
    },
    "has too many records": {"records that are too many": record(b"", 1 << 30)},
    "has a bad time": {
        "no time": entry("a", records={"mtime": None}),
        "a bad time": entry("a", records={"mtime": "inf"}),
        "a huge time": entry("a", records={"mtime": f"{'9' * 13}.000000000"}),
    },
    "has a bad number": {
        "a bad size": entry("a", records={"size": "-1"}),
        "a huger size": entry("a", records={"size": "9" * 30}),
        "a bad owner": entry("a", records={"gid": "root"}),
    },
    "ends within an entry": {
        "a huge size": entry("a", records={"size": "9" * 18}),
        "bytes that are cut off": entry("a", data=b"x" * 512, size=5000),
        "a header that is cut off": b"x" * 100,
        "no end": entry("a"),
    },
    "has a bad owner": {"the owner -1": entry("a", records={"uid": str(2**32 - 1)})},
    "has the attribute": {
        "an attribute of the kernel": entry("a", **attribute("trusted.overlay.redirect", "/")),
        "an attribute of SELinux": entry("a", **attribute("security.selinux", "x")),
        "an attribute with a NUL": entry("a", **attribute("user.%00")),
        "an attribute of a link": entry("a", LNK, link="b", **attribute("user.x")),
    },
    "hides what nothing can hide": {
        "an opaque file": entry("a", **attribute("trusted.overlay.opaque")),
        "an opaque root": entry(".", DIR, **attribute("trusted.overlay.opaque")),
    },
    "Invalid argument": {"a bad ACL": entry("a", **attribute("system.posix_acl_access"))},
    "a bad map": {
        "a map that is no map": sparse(b"x\n", 10),
        "a map without an end": sparse(b"2\n0\n1\n", 10, b"x"),
        "a map with a long line": sparse(b"1" * 400 + b"\n", 10),
    },
    "more than 1048576 extents": {"a map that is too long": sparse(b"9999999\n", 10)},
    "has a map of holes that is out of order": {
        "a map that goes back": sparse(b"2\n5\n1\n0\n1\n", 10, b"xx")
    },
    "does not fit its sizes": {
        "a map beyond the file": sparse(b"1\n5\n6\n", 10, b"x" * 6),
        "a map of more than there is": sparse(b"1\n0\n600\n", 600, b"x"),
        "a map beyond its entry": sparse(b"1\n0\n600\n", 600, b"x" * 600, size=512),
    },
    "bad header": {"a bad checksum": b"x" * 512},
}
"""Archives by why they are refused."""
ENDLESS = {"bytes that are cut off", "a header that is cut off", "no end"}


@pytest.mark.parametrize(("why", "name"), [(why, name) for why in HOSTILE for name in HOSTILE[why]])
def test_a_hostile_archive_is_refused_and_touches_nothing_outside(
    tmp_path: Path, target: Path, why: str, name: str
) -> None:
    canary = tmp_path / "canary"
    build(tmp_path, {"canary": {"secret": b"secret"}})
    build(target, {"out": ("link", "../canary"), "left": {"out": {"mount": b"mount"}}})
    kept = [canary, canary / "secret", target / "left" / "out" / "mount"]
    before = [as_it_is(path) for path in kept]
    archive = tmp_path / "hostile.tar"
    archive.write_bytes(HOSTILE[why][name] + (b"" if name in ENDLESS else bytes(1024)))

    with pytest.raises(ArtifactCorrupt, match=why) as refusal:
        unpacked(archive, target, ["left/out"], is_upper=True)

    str(refusal.value).encode()
    assert names(canary) == ["secret"]
    assert [as_it_is(path) for path in kept] == before


def as_it_is(path: Path) -> tuple[object, ...]:
    found = path.stat()
    data = path.read_bytes() if path.is_file() else b""
    return found.st_mtime_ns, found.st_nlink, found.st_ino, found.st_mode, data


@pytest.mark.root
def test_an_opaque_folder_keeps_the_mounts_in_it(
    tmp_path: Path, target: Path, mounted: Callable[..., None]
) -> None:
    build(target, {"run": {"a": {"mount": {}, "beside": b""}, "b": {"c": {}}}})
    mounted(target / "run/a/mount", "-t", "tmpfs", "tmpfs")
    (target / "run/a/mount/inside").write_bytes(b"")
    archive = archive_of(tmp_path, entry("run", DIR, **attribute("trusted.overlay.opaque")))

    unpacked(archive, target, ["run/a/mount"], is_upper=True)

    assert names(target / "run") == ["a"]
    assert names(target / "run/a") == ["mount"]
    assert names(target / "run/a/mount") == ["inside"]


@pytest.mark.root
@pytest.mark.parametrize(
    "entries",
    [
        [entry("m", DIR), entry("m/new")],
        [entry("m", DIR)],
        [entry("m", DIR, **attribute("trusted.overlay.opaque"))],
        [entry("m", tarfile.CHRTYPE)],
        [entry("m")],
        [entry("m", LNK, link="x")],
        [entry("n", HARD, link="m/inside")],
        [entry(".", DIR), entry("m/inside")],
    ],
)
def test_a_mount_that_is_not_left_out_is_neither_entered_nor_replaced(
    tmp_path: Path, source: Path, target: Path, mounted: Callable[..., None], entries: list[bytes]
) -> None:
    """It is a bind mount on the same file system, which only the kernel can tell."""
    (source / "inside").write_bytes(b"kept")
    before = seen(source)
    mounted(target / "m", "--bind", source)

    with pytest.raises(ArtifactCorrupt):
        unpacked(archive_of(tmp_path, *entries), target, is_upper=True)

    assert seen(source) == before


@pytest.mark.root
def test_a_mount_in_a_tree_is_refused_when_it_is_packed(
    source: Path, target: Path, mounted: Callable[..., None]
) -> None:
    mounted(source / "m", "--bind", target)

    with pytest.raises(NotEligible, match="'m'"):
        packed(source)
    packed(source, ["m"])


@pytest.mark.root
def test_a_full_disk_says_so_on_both_sides(
    source: Path, target: Path, mounted: Callable[..., None]
) -> None:
    (source / "big").write_bytes(b"x" * (2 << 20))
    mounted(target, "-t", "tmpfs", "-o", "size=1m", "tmpfs")

    archive = packed(source)
    with pytest.raises(NoSpace, match="big"):
        unpacked(archive, target)
    (target / "big").unlink()
    with (
        opened(open_root(source)) as tree,
        (target / "x.tar").open("wb") as sink,
        pytest.raises(NoSpace),
    ):
        pack(tree, sink.fileno(), leave_out=(), is_upper=False)


@needs_root
@pytest.mark.root
def test_unpacking_needs_nothing_of_the_root_that_it_has(source: Path, target: Path) -> None:
    """The process has entered a root with no /proc and no files of Python."""
    change_only_new(source)
    archive = packed(source)
    program = (
        "import os, sys\n"
        "from snapshot_agent.helper.archive import unpack\n"
        "from snapshot_shared.errors import ArtifactCorrupt\n"
        "good, bad = (os.open(path, os.O_RDONLY) for path in sys.argv[1:3])\n"
        "os.chroot(sys.argv[3]); os.chdir('/')\n"
        "root = os.open('/', os.O_RDONLY | os.O_DIRECTORY)\n"
        "before = set(sys.modules)\n"
        "unpack(good, root, leave_out=(), is_upper=True)\n"
        "try: unpack(bad, root, leave_out=(), is_upper=True)\n"
        "except ArtifactCorrupt as error: print(error)\n"
        "print(sorted(set(sys.modules) - before))\n"
    )
    bad = archive_of(source.parent, entry("a", LNK, link="/"), entry("a/b"))

    done = subprocess.run(
        [sys.executable, "-c", program, archive, bad, target],
        check=False,
        capture_output=True,
        text=True,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "[]"
    assert "'a/b'" in done.stdout
    (target / "a").unlink()
    found, wanted = seen(target), seen(source)
    del found["."]["mtime"], wanted["."]["mtime"]
    assert found == wanted


def change_only_new(source: Path) -> None:
    build(source, {RAW: b"raw", "d": {LONG: b"long"}, "link": ("link", RAW), "fifo": "fifo"})
    os.link(source / RAW, source / "d" / "again")
    os.setxattr(source / "d", "user.x", b"\xff")
    with (source / "sparse").open("wb") as file:
        file.seek(1 << 20)
        file.write(b"x")


@pytest.mark.root
def test_each_block_that_is_all_zero_becomes_a_hole(
    source: Path, target: Path, mounted: Callable[..., None]
) -> None:
    mounted(target, "-t", "tmpfs", "-o", "huge=never", "tmpfs")
    content = (b"x" + bytes(4095) + bytes(4096)) * 64 + bytes(4096) + b"y" * 5000 + bytes(3000)
    (source / "f").write_bytes(content)

    unpacked(packed(source), target)

    assert (target / "f").read_bytes() == content
    assert (target / "f").stat().st_blocks * 512 == (64 + 2) * 4096


def test_attributes_of_folders_are_not_kept_in_memory_until_their_end(target: Path) -> None:
    """Else a small tree of folders in one another takes gigabytes."""
    # More than any file system takes.
    long = attribute("user.x", "x" * 500_000)
    archive = archive_of(target.parent, entry("a", DIR, **long), entry("a/b", DIR, **long))

    with pytest.raises(ArtifactCorrupt, match="'a' of the archive cannot be unpacked"):
        unpacked(archive, target)

    assert names(target / "a") == []


@pytest.fixture
def read_only(tmp_path: Path, mounted: Callable[..., None]) -> Path:
    """Return a read-only tree: `run/lock`, `etc/hosts` and nothing else."""
    disk = tmp_path / "read-only"
    mounted(disk, "-t", "tmpfs", "tmpfs")
    build(disk, {"run": {"lock": {}}, "etc": {"hosts": b"hosts"}})
    mounted(disk, "-o", "remount,ro")
    return disk


@pytest.mark.root
def test_folders_on_a_read_only_file_system_stay_as_they_are(read_only: Path) -> None:
    before = seen(read_only)
    archive = archive_of(
        read_only.parent,
        entry(".", DIR, mode=0o750, **attribute("user.x")),
        entry("etc", DIR),
        entry("etc/hosts", data=b"left out"),
        entry("run", DIR, mode=0o1777),
        entry("run/lock", DIR, **attribute("trusted.overlay.opaque")),
        entry("run/lock/gone", tarfile.CHRTYPE),
    )

    unpacked(archive, read_only, ["etc/hosts"], is_upper=True)

    assert seen(read_only) == before


@pytest.mark.root
@pytest.mark.parametrize(
    ("path", "entries"),
    [
        ("a", [entry("a")]),
        ("a", [entry("a", DIR)]),
        ("a", [entry("a", LNK, link="b")]),
        ("a", [entry("a", HARD, link="etc/hosts")]),
        ("a", [entry("a", tarfile.FIFOTYPE)]),
        ("etc", [entry("etc", tarfile.CHRTYPE)]),
        ("etc", [entry("etc", DIR, **attribute("trusted.overlay.opaque"))]),
        ("etc/hosts", [entry("etc", DIR), entry("etc/hosts")]),
        ("etc/hosts", [entry("etc", DIR), entry("etc/hosts", tarfile.CHRTYPE)]),
    ],
)
def test_what_a_read_only_file_system_cannot_take_is_named(
    read_only: Path, path: str, entries: list[bytes]
) -> None:
    archive = archive_of(read_only.parent, entry(".", DIR), *entries)

    with pytest.raises(NotEligible, match=f"'{path}' cannot be unpacked.*read-only"):
        unpacked(archive, read_only, is_upper=True)


def test_a_folder_that_was_there_gets_owner_mode_and_attributes(source: Path, target: Path) -> None:
    for root, mode in ((source, 0o1777), (target, 0o700)):
        (root / "d").mkdir()
        (root / "d").chmod(mode)
    os.setxattr(source / "d", "user.new", b"1")
    os.setxattr(target / "d", "user.old", b"1")
    (target / "d" / "stays").write_bytes(b"")

    unpacked(packed(source), target)

    assert stat.S_IMODE((target / "d").stat().st_mode) == 0o1777
    assert os.listxattr(target / "d") == ["user.new"]
    assert names(target / "d") == ["stays"]


def test_a_file_that_is_open_keeps_its_content_when_it_is_replaced(
    source: Path, target: Path
) -> None:
    (source / "f").write_bytes(b"new")
    (target / "f").write_bytes(b"old content")
    os.link(target / "f", target / "other-name")

    unpacked(packed(source), target)

    assert (target / "f").read_bytes() == b"new"
    assert (target / "other-name").read_bytes() == b"old content"


NAMES = (
    st.binary(min_size=1, max_size=40)
    .filter(lambda name: b"/" not in name and b"\0" not in name and name not in (b".", b".."))
    .map(os.fsdecode)
)
TREES: Any = st.recursive(
    st.one_of(
        st.binary(max_size=2000),
        st.tuples(st.just("holes"), st.lists(st.integers(0, 40), max_size=5)),
        st.tuples(st.just("link"), NAMES),
        st.just("fifo"),
    ),
    lambda below: st.dictionaries(NAMES, below, max_size=4),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(tree=st.dictionaries(NAMES, TREES, max_size=5))
def test_any_tree_comes_back(tree: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "source"), Path(folder, "target")
        build(Path(folder), {"source": tree, "target": {}})
        unpacked(packed(source), target)
        assert seen(target) == seen(source)


def summed(data: bytearray) -> bytes:
    """Return an archive with the checksums that its headers should have."""
    for at in range(0, len(data) - 511, 512):
        if data[at + 257 : at + 262] == b"ustar":
            data[at + 148 : at + 156] = b" " * 8
            data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])
    return bytes(data)


@settings(max_examples=300, deadline=None)
@given(
    changes=st.lists(
        st.tuples(st.integers(0, 9000), st.binary(min_size=1, max_size=9)), min_size=1, max_size=4
    )
)
def test_a_damaged_archive_is_unpacked_or_refused_and_nothing_else(
    changes: list[tuple[int, bytes]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "source"), Path(folder, "target")
        build(Path(folder), {"source": {}, "target": {}})
        change_only_new(source)
        archive = packed(source)
        data = bytearray(archive.read_bytes())
        for at, new in changes:
            data[at % len(data) : at % len(data) + len(new)] = new
        archive.write_bytes(summed(data))
        # An owner that only root may give is no fault of the archive.
        with contextlib.suppress(SnapbackError, PermissionError):
            unpacked(archive, target, is_upper=True, limit_bytes=1 << 24)
        assert names(folder) == ["source", "source.tar", "target"]


# A filter of seccomp(2): load the number of the call; if it is openat2 answer an error, else allow.
REFUSING = """
import ctypes, struct, sys
OPENAT2, ERRNO, ALLOW = 437, 0x0005_0000 | int(sys.argv[1]), 0x7FFF_0000
rows = (0x20, 0, 0, 0), (0x15, 0, 1, OPENAT2), (0x06, 0, 0, ERRNO), (0x06, 0, 0, ALLOW)
filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in rows))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(rows), ctypes.addressof(filters)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, program, 0, 0) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
from snapshot_agent.helper.beneath import check_kernel
from snapshot_shared.errors import NotEligible
try:
    check_kernel()
except NotEligible as error:
    print(error.message, error.next_step)
"""


def test_a_kernel_with_openat2_is_fit() -> None:
    check_kernel()


@pytest.mark.skipif(sys.maxsize < 2**32, reason="the filter is for 64 bits")
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM])
def test_a_node_is_refused_where_openat2_is_missing_or_forbidden(number: int) -> None:
    command = [sys.executable, "-c", REFUSING, str(number)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert platform.release() in said
    assert "Linux 5.6" in said
    assert "Unconfined" in said
