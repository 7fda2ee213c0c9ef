"""A worker with a heap of so many MiB. It counts on its output until no one can read it."""

import hashlib
import sys
import time

heap = bytearray(hashlib.shake_256(b"heap").digest(2**20)) * int(sys.argv[1])
for at in range(0, len(heap), 4096):
    heap[at : at + 8] = at.to_bytes(8, "little")
count = 0
while True:
    print(count, flush=True)
    count += 1
    time.sleep(0.5)
