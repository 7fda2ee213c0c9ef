"""A process that is none of ours and holds memory of a device: `foreign.py LIBRARY ORDINAL BYTES`.

It says when it has the memory, or the status of the driver, and frees it for a line of input.
"""

import ctypes
import sys


def main(library: str, ordinal: int, size: int) -> None:
    cuda = ctypes.CDLL(library)
    context, address = ctypes.c_void_p(), ctypes.c_ulonglong()
    assert cuda.cuInit(0) == 0
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), ordinal) == 0
    assert cuda.cuCtxPushCurrent_v2(context) == 0
    print(cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)), flush=True)
    for _ in sys.stdin:
        assert cuda.cuMemFree_v2(address) == 0
        print("freed", flush=True)


main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
