"""Containers of a pod, found in what the kernel says of their processes."""

from __future__ import annotations

from snapshot_agent.domain import kubelet
from snapshot_agent.domain.control import Access
from tests.unit.tables import each

UID = "399155da-1bb0-4cc6-92bc-0c4711b56c76"
OTHER = "11111111-1bb0-4cc6-92bc-0c4711b56c76"
SYSTEMD = UID.replace("-", "_")


@each(
    ("line", "found"),
    [
        (f"0::/kubepods/besteffort/pod{UID}/57b43061", "57b43061"),
        (f"0::/kubepods/pod{UID}/57b43061/nested/unit.service", "57b43061"),
        (
            f"0::/kubepods.slice/a-b-pod{SYSTEMD}.slice/cri-containerd-5.scope",
            "cri-containerd-5.scope",
        ),
        (f"0::/kubepods.slice/kubepods-pod{SYSTEMD}.slice/crio-5.scope", "crio-5.scope"),
        (f"0::/../../pod{UID}/57b43061", "57b43061"),
        (f"9:name=systemd:/kubepods/pod{UID}/57b43061", "57b43061"),
        (f"0::/kubepods/besteffort/pod{OTHER}/57b43061", None),
        (f"0::/kubepods/besteffort/pod{UID}", None),
        (f"0::/system.slice/not-pod{SYSTEMD}.service/x", None),
        ("0::/", None),
    ],
)
def test_a_process_belongs_to_the_container_whose_cgroup_is_in_that_of_the_pod(
    line: str, found: str | None
) -> None:
    assert kubelet.container_in(f"3:cpu:/\n{line}\n", UID) == found


def mount(root: str, at: str = "/dev/termination-log") -> str:
    return f"253 233 0:27 {root} {at} rw,relatime - ext4 /dev/sda1 rw"


@each(
    ("root", "found"),
    [
        (f"/var/lib/kubelet/pods/{UID}/containers/main/ab12cd34", "main"),
        (f"/x/my\\040disk/kubelet/pods/{UID}/containers/main/ab12cd34", "main"),
        (f"/kubelet/pods/{OTHER}/containers/main/ab12cd34", None),
        (f"/kubelet/pods/{UID}/volumes/kubernetes.io~empty-dir/snapshot-control/main", None),
        (f"/kubelet/pods/{UID}/containers/main", None),
    ],
)
def test_a_container_has_the_name_of_the_folder_that_the_kubelet_mounts(
    root: str, found: str | None
) -> None:
    assert kubelet.name_in("\n".join([mount("/", "/"), mount(root)]), UID) == found


def test_the_first_process_of_a_container_is_the_one_that_began_first() -> None:
    seen = [
        kubelet.SeenProcess(30, 7, "a"),
        kubelet.SeenProcess(31, 5, "a"),
        kubelet.SeenProcess(9, 9, "a"),
        kubelet.SeenProcess(40, 6, "b"),
    ]
    assert set(kubelet.first_processes(seen)) == {seen[1], seen[3]}


def test_files_belong_to_the_user_that_the_process_acts_as_in_its_user_namespace() -> None:
    status = "Name:\tpython\nUid:\t0\t1000\t0\t1000\nGid:\t0\t2000\t0\t2000\n"
    same = "         0          0 4294967295\n"
    assert kubelet.access_of(status, same, same) == Access(1000, 2000)
    status = "Uid:\t66536\t66536\t66536\t66536\nGid:\t65536\t65536\t65536\t65536\n"
    mapped = "         0      65536      65536\n"
    assert kubelet.access_of(status, mapped, mapped) == Access(1000, 0)


def test_the_command_is_what_the_kernel_shows_of_it() -> None:
    assert kubelet.command_of(b"python\0-m\0worker\0") == ["python", "-m", "worker"]
    assert kubelet.command_of(b"") == []
