"""How CRIU is called."""

from snapshot_agent.domain.criu_plan import (
    DumpPlan,
    RestorePlan,
    dump_arguments,
    external_mounts,
    inherited,
    restore_arguments,
)
from snapshot_agent.domain.mounts import mounts_in, upper_of

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
    assert external_mounts(mounts) == ["/dev", "/dev/shm", "/a b", "/proc/acpi"]
    assert upper_of(mounts) == "/var/lib/x/42/fs"


def test_a_dump_leaves_the_worker_running_and_locks_its_network() -> None:
    plan = DumpPlan(
        pid=4711,
        images="/proc/self/fd/5",
        work="/run/dump-1",
        script="/run/dump-1/script",
        network=4026532000,
        external=["/dev/shm", "/a b"],
        watched=["/data"],
    )
    assert dump_arguments(plan) == [
        *("dump", "--tree", "4711", "--leave-running"),
        *("--images-dir", "/proc/self/fd/5", "--work-dir", "/run/dump-1"),
        *("--log-file", "dump.log", "-v4", "--manage-cgroups=ignore", "--tcp-established"),
        *("--file-locks", "--link-remap", "--ghost-limit", "1G", "--force-irmap"),
        *("--network-lock", "nftables", "--external", "net[4026532000]:extNetNs"),
        *("--action-script", "/run/dump-1/script"),
        *("--external", "mnt[/dev/shm]:/dev/shm", "--external", "mnt[/a b]:/a b"),
        *("--irmap-scan-path", "/data"),
    ]


def test_a_network_that_others_use_is_not_locked() -> None:
    plan = DumpPlan(pid=1, images="i", work="w", script="s", network=2, external=[], locks=False)
    words = dump_arguments(plan)
    assert words[words.index("--network-lock") + 1] == "skip"


def test_a_restore_is_over_a_copy_of_the_targets_mounts_in_its_namespaces() -> None:
    plan = RestorePlan(
        images="/artifacts/ns/uid/gen-1/process",
        work="/run/restore-1",
        root="/run/restore-1/tree",
        pidfile="/run/restore-1/pid",
        network=7,
        external=["/dev/shm"],
        pipes={"pipe:[91]": 8},
    )
    assert restore_arguments(plan) == [
        *("restore", "--images-dir", "/artifacts/ns/uid/gen-1/process"),
        *("--work-dir", "/run/restore-1", "--log-file", "restore.log", "-v4"),
        *("--manage-cgroups=ignore", "--tcp-established", "--file-locks", "--link-remap"),
        *("--ghost-limit", "1G", "--force-irmap", "--network-lock", "skip"),
        *("--evasive-devices", "--restore-detached", "--root", "/run/restore-1/tree"),
        *("--pidfile", "/run/restore-1/pid", "--inherit-fd", "fd[7]:extNetNs"),
        *("--inherit-fd", "fd[8]:pipe:[91]"),
        *("--join-ns", "uts:/proc/1/ns/uts", "--join-ns", "ipc:/proc/1/ns/ipc"),
        *("--external", "mnt[/dev/shm]:/run/restore-1/tree/dev/shm"),
    ]


def test_each_pipe_of_the_standard_streams_is_inherited_once() -> None:
    links = ["/dev/null", "pipe:[91]", "pipe:[91]"]
    assert inherited(links, [4, 5, 6]) == {"pipe:[91]": 5}
