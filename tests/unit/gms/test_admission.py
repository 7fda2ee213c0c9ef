"""Who may connect to the lease socket."""

from __future__ import annotations

import os
import socket

import pytest

from gms.adapters.admission import Admission, LeasePolicy, TooManySessions
from snapshot_shared.errors import Forbidden

NOBODY_HERE = 61_111


def test_a_user_who_is_neither_the_owner_nor_in_the_group_is_refused_and_not_counted() -> None:
    admission = Admission(LeasePolicy(group=NOBODY_HERE, max_connections=1))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        with pytest.raises(Forbidden) as refusal:
            admission.enter(ours, NOBODY_HERE)
        assert refusal.value.values == {"uid": NOBODY_HERE}
        admission.enter(ours, os.geteuid())
        with pytest.raises(TooManySessions):
            admission.enter(ours, os.geteuid())


def test_a_user_whose_group_is_the_shared_one_gets_in() -> None:
    admission = Admission(LeasePolicy(group=os.getgid()))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        admission.enter(ours, NOBODY_HERE)
