"""How CRIU is called, and how its log becomes a cause and a step that helps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from snapshot_agent.domain import criu_plan
from snapshot_agent.domain.criu_log import MAX_LINE_CHARS, MAX_LINES, failure
from snapshot_agent.domain.mounts import mounts_in, upper_of
from tests.unit.tables import each

MOUNTINFO = r"""
700 650 0:71 / / rw,relatime - overlay overlay rw,lowerdir=/l,upperdir=/var/lib/x/42/fs,workdir=/w
701 700 0:75 / /proc rw,nosuid - proc proc rw
702 700 0:76 / /dev rw,nosuid - tmpfs tmpfs rw,mode=755
703 702 0:77 / /dev/shm rw - tmpfs shm rw,size=65536k
704 700 8:1 /pods/u/volumes/data /a\040b rw,relatime master:1 - ext4 /dev/vda rw
705 701 0:75 /sys /proc/sys ro,nosuid - proc proc rw
706 701 0:78 / /proc/acpi ro - tmpfs tmpfs ro
""".lstrip()


def test_every_mount_but_the_root_and_those_of_proc_is_external() -> None:
    mounts = mounts_in(MOUNTINFO)
    assert criu_plan.external_mounts(mounts) == ["/dev", "/dev/shm", "/a b", "/proc/acpi"]
    assert upper_of(mounts) == "/var/lib/x/42/fs"


def test_a_dump_leaves_the_worker_running_and_locks_its_network() -> None:
    plan = criu_plan.DumpPlan(
        pid=4711,
        images="/proc/self/fd/5",
        work="/run/dump-1",
        script="/run/dump-1/script",
        network=4026532000,
        external=["/dev/shm", "/a b"],
        watched=["/data"],
    )
    assert criu_plan.dump_arguments(plan) == [
        *("dump", "--tree", "4711", "--leave-running"),
        *("--images-dir", "/proc/self/fd/5", "--work-dir", "/run/dump-1"),
        *("--log-file", "dump.log", "-v4", "--manage-cgroups=ignore", "--tcp-established"),
        *("--file-locks", "--link-remap", "--ghost-limit", "1G", "--force-irmap"),
        *("--network-lock", "nftables", "--external", "net[4026532000]:extNetNs"),
        *("--action-script", "/run/dump-1/script"),
        *("--external", "mnt[/dev/shm]:/dev/shm", "--external", "mnt[/a b]:/a b"),
        *("--irmap-scan-path", "/data"),
    ]
    # A network that others use is not locked.
    words = criu_plan.dump_arguments(plan._replace(locks=False))
    assert words[words.index("--network-lock") + 1] == "skip"


def test_a_restore_is_over_a_copy_of_the_targets_mounts_in_its_namespaces() -> None:
    plan = criu_plan.RestorePlan(
        images="/artifacts/ns/uid/gen-1/process",
        work="/run/restore-1",
        root="/run/restore-1/tree",
        pidfile="/run/restore-1/pid",
        network=7,
        external=["/dev/shm"],
        pipes={"pipe:[91]": 8},
        script="/run/restore-1/script",
    )
    assert criu_plan.restore_arguments(plan) == [
        *("restore", "--images-dir", "/artifacts/ns/uid/gen-1/process"),
        *("--work-dir", "/run/restore-1", "--log-file", "restore.log", "-v4"),
        *("--manage-cgroups=ignore", "--tcp-established", "--file-locks", "--link-remap"),
        *("--ghost-limit", "1G", "--force-irmap", "--network-lock", "skip"),
        *("--evasive-devices", "--restore-detached", "--root", "/run/restore-1/tree"),
        *("--pidfile", "/run/restore-1/pid", "--action-script", "/run/restore-1/script"),
        *("--inherit-fd", "fd[7]:extNetNs", "--inherit-fd", "fd[8]:pipe:[91]"),
        *("--join-ns", "uts:/proc/1/ns/uts", "--join-ns", "ipc:/proc/1/ns/ipc"),
        *("--external", "mnt[/dev/shm]:/run/restore-1/tree/dev/shm"),
    ]


def test_each_pipe_of_the_standard_streams_is_inherited_once() -> None:
    links = ["/dev/null", "pipe:[91]", "pipe:[91]"]
    assert criu_plan.inherited(links, [4, 5, 6]) == {"pipe:[91]": 5}


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


def line(text: str) -> str:
    return f"(00.124519) Error (criu/file.c:874): {text}\n"


def test_the_errors_of_a_restore_are_its_cause_without_time_place_and_what_is_harmless() -> None:
    cause = failure(RESTORE, "restore")
    assert cause.message == (
        "CRIU did not restore: inet: Can't bind inet socket (id 17): Cannot assign requested "
        "address; Unable to open fd=3 id=0x11"
    )
    assert "the address of its pod" in cause.next_step


@each(
    ("error", "step"),
    [
        ("sockets: Can't get 1:16 opt: Operation not supported", "CRIU 4.2"),
        ("Can't get rlimit 0: Operation not permitted", "SYS_RESOURCE"),
        ("unix: Can't dump half of stream unix connection. name: a; peer name: b", "unix sockets"),
        (
            "unix: External socket is used. Consider using --ext-unix-sk option.",
            "close its unix sockets",
        ),
        ("fsnotify: Can't dump that handle", "inotify"),
        ("send_fds failed (-22)", "io_uring"),
        ("files-reg: File data/counter.log has bad size 30 (expect 27)", "capture the worker"),
        ("files-reg: Can't open file data/counter.log: No such file", "capture the worker"),
        ("inet: Can't bind inet socket (id 34): Cannot assign requested address", "0.0.0.0"),
        ("inet: Can't bind inet socket (id 34): Address already in use", "another process"),
        ("inet: Unsupported proto 262 for socket 1a2b", "GODEBUG=multipathtcp=0"),
        ("inet: Unsupported proto 132 for socket 1a2b", "neither TCP nor UDP"),
        ("files-reg: Can't create ghost regfile: File exists", "into a new one"),
        ("timens: Unable to set a monotonic clock offset: Operation not permitted", "SYS_TIME"),
        ("Unable to set socket SO_SNDBUFFORCE/SO_RCVBUFFORCE: Not permitted", "NET_ADMIN"),
        ("mnt: pivot_root(., crtools-put-root.x) failed: Operation not permitted", "Unconfined"),
        ("mnt-v2: Failed to copy sharing from 12:/a to 13: Invalid argument", "mountPropagation"),
        ("22 killed by signal 9: Killed", "memory limit"),
        ("Can't write 4096 bytes: No space left on device", "free room"),
        ("Can't write 4096 bytes: File too large", "deadline"),
        ("Something new", "issues of CRIU"),
    ],
)
def test_an_error_is_said_as_it_is_with_what_to_do(error: str, step: str) -> None:
    for log in (line(error), line(error) + line("Dumping FAILED.")):
        message, next_step = failure(log, "dump")
        assert message == f"CRIU did not dump: {error}"
        assert step in next_step


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


@each(
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


@each("log", ["", "(00.1) all is well\n", line("Restoring FAILED."), RESTORE[:260]])
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


@each(
    ("log", "said"),
    [
        (line("Again") * 4, "Again"),
        (line("x" * 5000), f"{'x' * (MAX_LINE_CHARS - 3)}..."),
        (line("a\x1b[31mred\x00"), "a?[31mred?"),
    ],
)
def test_an_error_is_said_once_short_and_in_what_can_be_printed(log: str, said: str) -> None:
    assert failure(log, "dump").message == f"CRIU did not dump: {said}"


@given(st.lists(st.text().map(line) | st.text(), max_size=8))
def test_any_log_gives_a_bounded_message_of_one_line(lines: list[str]) -> None:
    message, next_step = failure("\n".join(lines), "dump")
    assert len(message) <= len("CRIU did not dump: ") + MAX_LINES * (MAX_LINE_CHARS + 2)
    assert message.isprintable()
    assert message
    assert next_step
