"""Start a program that can make no io_uring: `python confined.py PROGRAM [ARGUMENT ...]`.

CRIU 4.2 cannot dump an io_uring. A library such as libuv tries to make one, and uses epoll if the
kernel refuses. So the kernel refuses here: a filter of seccomp answers io_uring_setup,
io_uring_enter and io_uring_register with EPERM. A process may set a filter without rights if it
sets NoNewPrivs, too: setuid programs and file capabilities then have no effect in the worker.

The file is run by its path, and imports nothing but the standard library: it is the first thing
that a worker's process does.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2

# linux/bpf_common.h and linux/seccomp.h. A call has the same number on every architecture since
# Linux 5.1; x32 sets one more bit.
_LOAD, _AND, _AT_LEAST, _RETURN = 0x20, 0x54, 0x35, 0x06
_NOT_X32 = 0xBFFFFFFF
_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_EPERM = 1
_IO_URING_SETUP, _AFTER = 425, 428

_FILTER = (
    # code, jump if true, jump if false, value
    (_LOAD, 0, 0, 0),
    (_AND, 0, 0, _NOT_X32),
    (_AT_LEAST, 1, 0, _AFTER),
    (_AT_LEAST, 1, 0, _IO_URING_SETUP),
    (_RETURN, 0, 0, _ALLOW),
    (_RETURN, 0, 0, _ERRNO | _EPERM),
)


def confine() -> None:
    """Let this process, and what it starts, make no io_uring. OSError."""
    program = b"".join(struct.pack("HBBI", *each) for each in _FILTER)
    filled = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: the number of instructions and their address, aligned as a pointer is.
    described = struct.pack("HP", len(_FILTER), ctypes.addressof(filled))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = (ctypes.c_int, *(ctypes.c_ulong,) * 4)
    address = ctypes.cast(ctypes.c_char_p(described), ctypes.c_void_p).value
    for words in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, address, 0, 0),
    ):
        if libc.prctl(*words) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"prctl {words[0]}: {os.strerror(number)}")


def main() -> None:
    """Confine this process and become the program."""
    confine()
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606 - this process becomes it


if __name__ == "__main__":
    main()
