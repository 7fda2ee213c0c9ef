"""Files are opened beneath a folder by openat2, and a node that lacks it is refused."""

from __future__ import annotations

import errno
import platform
import subprocess
import sys

import pytest

from snapshot_agent.helper.beneath import check_kernel

# A filter of seccomp(2): load the number of the call; if it is openat2 answer an error, else allow.
REFUSING = """
import ctypes, struct, sys
OPENAT2, ERRNO, ALLOW = 437, 0x0005_0000 | int(sys.argv[1]), 0x7FFF_0000
rows = (0x20, 0, 0, 0), (0x15, 0, 1, OPENAT2), (0x06, 0, 0, ERRNO), (0x06, 0, 0, ALLOW)
filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *row) for row in rows))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(rows), ctypes.addressof(filters)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
assert libc.prctl(22, 2, program, 0, 0) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
from snapshot_agent.helper.beneath import check_kernel
from snapshot_shared.errors import NotEligible
try:
    check_kernel()
except NotEligible as error:
    print(error.message, error.next_step)
"""


def test_a_kernel_with_openat2_is_fit() -> None:
    check_kernel()


@pytest.mark.skipif(sys.maxsize < 2**32, reason="the filter is for 64 bits")
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM])
def test_a_node_is_refused_where_openat2_is_missing_or_forbidden(number: int) -> None:
    command = [sys.executable, "-c", REFUSING, str(number)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert platform.release() in said
    assert "Linux 5.6" in said
    assert "Unconfined" in said
