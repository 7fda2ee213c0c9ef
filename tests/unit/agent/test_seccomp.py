"""The seccomp profile that a helper installs on its node, and when workers may be given it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from snapshot_agent.helper.seccomp import PROFILE, REFUSED, install, refuses_io_uring
from snapshot_shared.errors import InvalidMessage
from tests.unit.tables import each

NAME = "profiles/block-iouring.json"
ERRNO, ALLOW, KILL = "SCMP_ACT_ERRNO", "SCMP_ACT_ALLOW", "SCMP_ACT_KILL_PROCESS"


def profile(default: str, *rules: tuple[list[str], str]) -> dict[str, Any]:
    syscalls = [{"names": names, "action": action, "args": []} for names, action in rules]
    return {"defaultAction": default, "architectures": ["SCMP_ARCH_X86_64"], "syscalls": syscalls}


@each(
    ("document", "refuses"),
    [
        (PROFILE, True),
        (profile(ERRNO, (["read"], ALLOW)), True),
        (profile(ALLOW, ([*REFUSED[:1]], ERRNO)), False),
        (profile(ALLOW, ([*REFUSED], KILL)), False),
        (profile(ALLOW, ([*REFUSED], ERRNO), (["io_uring_setup"], ALLOW)), False),
        (profile(ALLOW), False),
        (profile(ERRNO, ([*REFUSED], ALLOW)), False),
        ({"defaultAction": ALLOW}, False),
    ],
)
def test_a_profile_refuses_io_uring_if_each_call_gets_an_error(
    document: Any, refuses: bool
) -> None:
    assert refuses_io_uring(json.dumps(document).encode()) == refuses


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"defaultAction": 1}'])
def test_what_is_no_profile_is_refused(text: bytes) -> None:
    with pytest.raises(InvalidMessage):
        refuses_io_uring(text)


def test_a_profile_is_installed_once_and_announced_each_time(tmp_path: Path) -> None:
    assert install(tmp_path, NAME, None) == NAME
    path = tmp_path / NAME
    written = path.stat()
    assert refuses_io_uring(path.read_bytes())
    assert install(tmp_path, NAME, None) == NAME
    assert path.stat() == written
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@each(
    ("there", "announced"),
    [
        (profile(ERRNO, (["read"], ALLOW)), NAME),
        (profile(ALLOW), ""),
        ([], ""),
    ],
)
def test_a_file_that_is_there_is_left_as_it_is(
    tmp_path_factory: pytest.TempPathFactory, there: Any, announced: str
) -> None:
    folder = tmp_path_factory.mktemp("seccomp")
    path = folder / NAME
    path.parent.mkdir()
    path.write_text(json.dumps(there))
    assert install(folder, NAME, None) == announced
    assert json.loads(path.read_text()) == there


@each(
    ("status", "announced"),
    [
        ("Name:\tcp\nSeccomp:\t0\nSeccomp_filters:\t0\n", NAME),
        ("Name:\tcp\nSeccomp:\t2\nSeccomp_filters:\t1\n", ""),
    ],
)
def test_a_node_whose_kubelet_confines_each_container_announces_none(
    tmp_path_factory: pytest.TempPathFactory, status: str, announced: str
) -> None:
    folder = tmp_path_factory.mktemp("seccomp")
    (folder / "status").write_text(status)
    assert install(folder, NAME, folder / "status") == announced
    assert (folder / NAME).exists() == bool(announced)


def test_a_node_without_the_folder_announces_none(tmp_path: Path) -> None:
    assert install(tmp_path / "missing", NAME, None) == ""
    assert install(tmp_path, NAME, tmp_path / "missing") == ""
    (tmp_path / "profiles").symlink_to("/")
    assert install(tmp_path, NAME, None) == ""
