"""A dump and a restore of a small process, which show whether CRIU works on this node.

CRIU needs more of a kernel, of its capabilities and of what confines it than `criu check` looks at.
As a program, `python -m snapshot_agent.helper.self_test CRIU FOLDER`, this is the first process of
namespaces of its own, so that nothing is left of it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from snapshot_agent.domain.criu_log import Verb, failure
from snapshot_agent.helper import syscalls
from snapshot_shared.errors import NotEligible
from snapshot_shared.files import opened

WITHIN_S = 10.0
"""How long both may take, in seconds, less than guards wait for a helper that starts.

It is 0.3 s where they work.
"""

_APART = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
_OPTIONS = ("-v4", "--manage-cgroups=ignore", "--network-lock", "skip")


def self_test(criu: Path, run: Path = Path("/run")) -> None:
    """Dump a process and restore it. NotEligible when this CRIU cannot, on this node.

    `run` is a folder in memory for a file or two.
    """
    with tempfile.TemporaryDirectory(prefix="self-test-", dir=run) as folder:
        program = [*_APART, sys.executable, "-P", "-m", __name__, str(criu), folder]
        said = f"CRIU did not end within {WITHIN_S:g} s"
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                program,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                timeout=WITHIN_S,
                preexec_fn=syscalls.end_with_parent,
                check=False,
                text=True,
            )
            if done.returncode == 0:
                return
            said = done.stdout
    message, _, next_step = said.partition("\n")
    raise NotEligible(
        f"CRIU does not work on this node: {message or 'it could not be started'}",
        next_step=next_step.strip() or "see the log of the container helper",
    )


def main(criu: str, folder: str) -> int:
    """Dump a process and restore it; write why that failed and what to do, a line each."""
    # A listener, for there are kernels whose sockets a CRIU cannot dump.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pid = _started(listener.fileno(), folder)
    verb: Verb
    for verb, options in ("dump", ["--tree", str(pid)]), ("restore", ["--restore-detached"]):
        log = Path(folder, "log")
        log.touch()
        words = [criu, verb, "--images-dir", folder, "--work-dir", folder, "--log-file", str(log)]
        if subprocess.run([*words, *_OPTIONS, *options], check=False).returncode:
            sys.stdout.write("\n".join(failure(log.read_text(errors="replace"), verb)))
            return 1
        if verb == "dump":
            os.waitpid(pid, 0)
    return 0


def _started(descriptor: int, folder: str) -> int:
    """Start a process with a descriptor; return its pid. It has a process namespace of its own.

    CRIU mounts the /proc of that below its working directory, for which `folder` can be written to.
    """
    with opened(os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)) as ours:
        syscalls.unshare(syscalls.CLONE_NEWPID)
        process = subprocess.Popen(
            ["sleep", "infinity"],  # noqa: S607 - of the image
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[descriptor],
            cwd=folder,
            start_new_session=True,
        )
        syscalls.setns(ours, syscalls.CLONE_NEWPID)
    return process.pid


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
