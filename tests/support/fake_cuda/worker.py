"""A process that uses CUDA: `worker.py LIBRARY ORDINAL`. It answers each line, once it may.

With `child` as third argument it has a child that does the same, on the device after its own, and
prints the pid of both at first.
"""

import ctypes
import os
import subprocess
import sys


def main(library: str, ordinal: int) -> None:
    if sys.argv[3:] == ["child"]:
        command = [sys.executable, __file__, library, str(ordinal + 1)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert child.stdin
        assert child.stdout
        others = child.stdout.readline().strip()
    else:
        child, others = None, ""
    cuda, context = ctypes.CDLL(library), ctypes.c_void_p()
    assert cuda.cuInit(0) == 0
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), ordinal) == 0
    assert cuda.cuCtxPushCurrent_v2(context) == 0
    print(os.getpid(), others, flush=True)
    for line in sys.stdin:
        assert cuda.cuCtxSynchronize() == 0
        if child:
            child.stdin.write(line)
            child.stdin.flush()
            child.stdout.readline()
        print(line, end="", flush=True)


main(sys.argv[1], int(sys.argv[2]))
