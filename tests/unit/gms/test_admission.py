"""Who may connect to the lease socket, and how much of it one may take."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from gms.adapters.admission import Admission, LeasePolicy, pod_in
from gms.domain.sessions import Peer
from gms.domain.shares import TooManySessions
from snapshot_shared.errors import Forbidden
from tests.unit.tables import each

UNUSED_ID = 61_111
POD, OTHER_POD = "3c8a1f5e-0d6b-4a63-9a39-0f1c3f6f9b01", "3c8a1f5e-0d6b-4a63-9a39-0f1c3f6f9b02"


@pytest.fixture
def sock() -> Iterator[socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours


def peer(pid: int, pod: str = "", uid: int = os.geteuid()) -> Peer:
    return Peer(pid=pid, uid=uid, pod=pod)


def test_a_user_who_is_neither_the_owner_nor_in_the_group_is_refused_and_not_counted(
    sock: socket.socket,
) -> None:
    admission = Admission(LeasePolicy(group=UNUSED_ID, max_connections=1))
    with pytest.raises(Forbidden) as refusal:
        admission.enter(sock, peer(1, uid=UNUSED_ID))
    assert refusal.value.values == {"uid": UNUSED_ID}
    admission.enter(sock, peer(1))
    with pytest.raises(TooManySessions):
        admission.enter(sock, peer(1))


def test_what_one_gives_back_of_several_leaves_the_others_counted(sock: socket.socket) -> None:
    admission = Admission(LeasePolicy(max_of_process=3))
    for _ in range(3):
        admission.enter(sock, peer(1))
    admission.leave(peer(1))
    admission.enter(sock, peer(1))
    with pytest.raises(TooManySessions):
        admission.enter(sock, peer(1))


def test_a_user_whose_group_is_the_shared_one_gets_in(sock: socket.socket) -> None:
    admission = Admission(LeasePolicy(group=os.getgid()))
    admission.enter(sock, peer(1, uid=UNUSED_ID))


def test_a_process_that_holds_all_it_may_leaves_room_for_another_of_its_user(
    sock: socket.socket,
) -> None:
    admission = Admission(LeasePolicy(max_of_process=2))
    admission.enter(sock, peer(1))
    admission.enter(sock, peer(1))
    with pytest.raises(TooManySessions) as refusal:
        admission.enter(sock, peer(1))
    assert refusal.value.values == {"limit": 2, "process": 1}
    admission.enter(sock, peer(2))
    admission.leave(peer(1))
    admission.enter(sock, peer(1))


def test_the_processes_of_a_pod_together_leave_room_for_other_pods(sock: socket.socket) -> None:
    admission = Admission(LeasePolicy(max_of_process=1, max_of_pod=2))
    for pid in (1, 2):
        admission.enter(sock, peer(pid, POD))
    with pytest.raises(TooManySessions) as refusal:
        admission.enter(sock, peer(3, POD))
    assert refusal.value.values == {"limit": 2, "pod": POD}
    admission.enter(sock, peer(4, OTHER_POD))


def test_processes_that_we_cannot_see_are_not_taken_for_one(sock: socket.socket) -> None:
    admission = Admission(LeasePolicy(max_of_process=1, max_of_user=2))
    admission.enter(sock, peer(0))
    admission.enter(sock, peer(0))
    with pytest.raises(TooManySessions) as refusal:
        admission.enter(sock, peer(0))
    assert refusal.value.values == {"limit": 2, "user": os.geteuid()}


def test_what_the_service_started_gets_in_when_others_hold_all(sock: socket.socket) -> None:
    admission = Admission(LeasePolicy(max_connections=1))
    admission.enter(sock, peer(1))
    ours = Peer(pid=2, uid=os.geteuid(), is_ours=True)
    admission.enter(sock, ours)
    admission.leave(ours)
    with pytest.raises(TooManySessions):
        admission.enter(sock, peer(3))


@each(
    ("text", "pod"),
    [
        (f"0::/kubepods/burstable/pod{POD}/1f2e\n", POD),
        (
            "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod"
            + POD.replace("-", "_")
            + ".slice/cri-containerd-1f2e.scope\n",
            POD,
        ),
        (f"12:cpu:/kubepods/pod{POD}/1f2e\n0::/\n", POD),
        (f"0::/../../pod{POD}/1f2e\n", POD),
        ("0::/user.slice/user-1000.slice/session-2.scope\n", ""),
        ("0::/podman/pods\n", ""),
        ("", ""),
    ],
)
def test_the_pod_of_a_process_stands_in_its_control_group(text: str, pod: str) -> None:
    assert pod_in(text) == pod
