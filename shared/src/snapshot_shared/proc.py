"""Lines of /proc/<pid>, taken apart (proc_pid_stat(5), proc_pid_cgroup(5))."""

from __future__ import annotations

from typing import NoReturn

from snapshot_shared.errors import ProcMalformed

_START = 19
_NUMBERS = (1, 3, 4, _START)


def stat_words(line: bytes, path: str) -> list[bytes]:
    """Return the words of /proc/<pid>/stat from the third on, which is the state of the process.

    The parent, the session, the terminal and the start time, words 1, 3, 4 and 19, are numbers.
    ProcMalformed with `path` when the kernel cannot have written the line.
    """
    # The name is in parentheses and may contain any character, parentheses included.
    _, bracket, rest = line.rpartition(b")")
    words = rest.split()
    is_whole = bool(bracket) and len(words) > _START
    if not is_whole or not all(words[at].lstrip(b"-").isdigit() for at in _NUMBERS):
        malformed(path, line.decode(errors="replace"))
    return words


def cgroups_in(text: str, path: str) -> list[tuple[str, str]]:
    """Return the controllers and the path of each line of /proc/<pid>/cgroup. ProcMalformed."""
    found = []
    for line in text.splitlines():
        words = line.split(":", 2)
        if len(words) < 3:
            malformed(path, line)
        found.append((words[1], words[2]))
    return found


def malformed(path: str, line: str) -> NoReturn:
    """Raise ProcMalformed about a line of a file of /proc."""
    raise ProcMalformed(
        f"{path}: the line {line[:80]!r} is not as the kernel writes it", path=path, line=line[:80]
    )
