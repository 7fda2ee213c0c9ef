"""The log of CRIU becomes a cause and a step that helps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshot_agent.domain.criu_log import MAX_LINE_CHARS, MAX_LINES, failure
from tests.unit.tables import each

# Of real runs of CRIU 4.2.1.
RESTORE = """\
Warn  (criu/config.c:1063): --network-lock will be ignored in restore command
(00.000000) Version: 4.2.1 (gitid 0)
(00.073798) Error (criu/util.c:1534): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted
(00.083480)      6: \tRestore: family AF_INET    type SOCK_STREAM    proto IPPROTO_TCP
(00.083493)      6: Error (criu/sk-inet.c:1059): inet: Can't bind inet socket (id 17): Cannot assign requested address
(00.083508)      6: Error (criu/files.c:1221): Unable to open fd=3 id=0x11
(00.083553) Error (criu/cr-restore.c:2331): Restoring FAILED.
"""  # noqa: E501
DUMP = """\
(00.001384) Error (criu/tun.c:85): tun: Unable to create tun: No such file or directory
(00.084410) Error (criu/util.c:1534): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted
(00.124500) unix: \tRunaway socket: ino 383747 peer_ino 383746 family    1 type    1 state  1 name
(00.124519) Error (criu/sk-unix.c:874): unix: External socket is used. Consider using --ext-unix-sk option.
(00.124811) Error (criu/cr-dump.c:1975): Dumping FAILED.
"""  # noqa: E501


def line(text: str) -> str:
    return f"(00.124519) Error (criu/file.c:874): {text}\n"


def test_the_errors_of_a_restore_are_its_cause_without_time_place_and_what_is_harmless() -> None:
    cause = failure(RESTORE, "restore")
    assert cause.message == (
        "CRIU did not restore: inet: Can't bind inet socket (id 17): Cannot assign requested "
        "address; Unable to open fd=3 id=0x11"
    )
    assert "the address of its pod" in cause.next_step


def test_the_errors_of_a_dump_are_its_cause() -> None:
    message, next_step = failure(DUMP, "dump")
    assert message == (
        "CRIU did not dump: unix: External socket is used. Consider using --ext-unix-sk option."
    )
    assert "close its unix sockets" in next_step


@each(
    ("error", "step"),
    [
        ("sockets: Can't get 1:16 opt: Operation not supported", "CRIU 4.2"),
        ("Can't get rlimit 0: Operation not permitted", "SYS_RESOURCE"),
        ("unix: Can't dump half of stream unix connection. name: a; peer name: b", "unix sockets"),
        ("fsnotify: Can't dump that handle", "inotify"),
        ("send_fds failed (-22)", "io_uring"),
        ("files-reg: File data/counter.log has bad size 30 (expect 27)", "capture the worker"),
        ("files-reg: Can't open file data/counter.log: No such file", "capture the worker"),
        ("inet: Can't bind inet socket (id 34): Cannot assign requested address", "0.0.0.0"),
        ("files-reg: Can't create ghost regfile: File exists", "into a new one"),
        ("timens: Unable to set a monotonic clock offset: Operation not permitted", "SYS_TIME"),
        ("Unable to set socket SO_SNDBUFFORCE/SO_RCVBUFFORCE: Not permitted", "NET_ADMIN"),
        ("mnt: pivot_root(., crtools-put-root.x) failed: Operation not permitted", "Unconfined"),
        ("mnt-v2: Failed to copy sharing from 12:/a to 13: Invalid argument", "mountPropagation"),
        ("22 killed by signal 9: Killed", "memory limit"),
        ("Can't write 4096 bytes: No space left on device", "free room"),
        ("Can't write 4096 bytes: File too large", "deadline"),
    ],
)
def test_a_known_error_says_what_to_do(error: str, step: str) -> None:
    cause = failure(line(error) + line("Dumping FAILED."), "dump")
    assert cause.message == f"CRIU did not dump: {error}"
    assert step in cause.next_step


def test_an_unknown_error_is_said_as_it_is() -> None:
    message, next_step = failure(line("Something new"), "dump")
    assert message == "CRIU did not dump: Something new"
    assert "issues of CRIU" in next_step


@each(
    "prefix",
    ["", "(00.1) ", "(00.124519)     22: ", "(00.124519) pie: 22: ", "pie: 22: ", "  22: "],
)
def test_an_error_is_found_whichever_part_of_criu_wrote_it(prefix: str) -> None:
    log = f"{prefix}Error (criu/pie/restorer.c:42): \tsend_fds failed (-22)\n"
    message, next_step = failure(log, "dump")
    assert message == "CRIU did not dump: send_fds failed (-22)"
    assert "io_uring" in next_step


def test_what_is_killed_after_an_error_was_not_out_of_memory() -> None:
    log = line("Something new") + line("22 killed by signal 9: Killed")
    assert "memory" not in failure(log, "restore").next_step


@pytest.mark.parametrize(
    "harmless",
    [
        "rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted",
        "tun: Unable to create tun: No such file or directory",
        "cg: cgroupd: recv req error: No such file or directory",
    ],
)
def test_a_harmless_error_is_no_cause(harmless: str) -> None:
    message, _ = failure(line(harmless) + line("Something new") + line(harmless), "restore")
    assert message == "CRIU did not restore: Something new"


@pytest.mark.parametrize(
    "log", ["", "(00.1) all is well\n", line("Restoring FAILED."), RESTORE[:260]]
)
def test_a_log_without_an_error_says_so(log: str) -> None:
    message, next_step = failure(log, "restore")
    assert message == "CRIU did not restore, and its log has no error"
    assert "try again" in next_step


def test_the_first_known_error_stays_when_many_follow_it() -> None:
    later = "".join(line(f"consequence {number}") for number in range(9))
    cause = failure(line("Can't get rlimit 0: no") + later, "dump")
    assert cause.message == (
        "CRIU did not dump: Can't get rlimit 0: no; consequence 7; consequence 8"
    )
    assert "SYS_RESOURCE" in cause.next_step


def test_an_error_that_recurs_is_said_once() -> None:
    assert failure(line("Again") * 4, "dump").message == "CRIU did not dump: Again"


def test_a_long_error_is_shortened() -> None:
    message = failure(line("x" * 5000), "dump").message
    assert message == f"CRIU did not dump: {'x' * (MAX_LINE_CHARS - 3)}..."


def test_what_cannot_be_printed_is_replaced() -> None:
    assert failure(line("a\x1b[31mred\x00"), "dump").message == "CRIU did not dump: a?[31mred?"


@given(st.lists(st.text().map(line) | st.text(), max_size=8))
def test_any_log_gives_a_bounded_message_of_one_line(lines: list[str]) -> None:
    message, next_step = failure("\n".join(lines), "dump")
    assert len(message) <= len("CRIU did not dump: ") + MAX_LINES * (MAX_LINE_CHARS + 2)
    assert message.isprintable()
    assert message
    assert next_step
