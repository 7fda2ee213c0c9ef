"""Programs whose artifact root can be made to hang, as `make chaos` does."""

import fcntl
import os
import select
import subprocess
import sys
from pathlib import Path

from tests.support import hanging

REPOSITORY = Path(__file__).resolve().parents[2]
PATIENCE_S = 60.0
LOOK_S = 0.5
PROGRAM = """\
import sys
from snapshot_shared.files import open_root, write_new
for folder in sys.argv[1:]:
    write_new(open_root(folder), "file", b"data")
    print(folder, flush=True)
"""


def test_calls_below_the_root_wait_while_it_is_locked_and_others_do_not(tmp_path: Path) -> None:
    root, elsewhere, lock = tmp_path / "root", tmp_path / "elsewhere", tmp_path / "lock"
    for folder in (root, elsewhere):
        folder.mkdir()
    lock.touch()
    environment = os.environ | {
        "PYTHONPATH": f"{hanging.PRELOAD}:{REPOSITORY}",
        hanging.ROOT: str(root),
        hanging.LOCK: str(lock),
    }
    command = [sys.executable, "-P", "-c", PROGRAM, str(elsewhere), str(root)]

    def has_said(within_s: float) -> bool:
        return bool(select.select([out], [], [], within_s)[0])

    with (
        lock.open() as held,
        subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, bufsize=0) as program,
    ):
        out = program.stdout
        assert out is not None
        fcntl.flock(held, fcntl.LOCK_EX)
        try:
            assert has_said(PATIENCE_S)
            assert out.readline() == f"{elsewhere}\n".encode()
            assert not has_said(LOOK_S)
            assert list(root.iterdir()) == []
            fcntl.flock(held, fcntl.LOCK_UN)
            assert has_said(PATIENCE_S)
            assert out.readline() == f"{root}\n".encode()
        finally:
            program.kill()
    assert (root / "file").read_bytes() == b"data"
