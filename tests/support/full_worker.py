"""A worker with all that a process may hold, which saves nothing: its process is dumped.

It prints one line of JSON for each count: what it has heard through its pipe, its pair of sockets,
a TCP connection to itself, memory that it shares with its child, its files and its watch. It keeps
the protocol of the control directory: quiet, it counts on, so that a test sees what it missed.
"""

import argparse
import ctypes
import fcntl
import hashlib
import json
import mmap
import os
import signal
import socket
import struct
import threading
import time
from pathlib import Path

CONTROL = Path(os.environ["SNAPSHOT_CONTROL_DIR"])
NUMBER = struct.Struct("<Q")
IN_CREATE = 0x100
IO_URING_SETUP = 425


_read: dict[str, tuple[tuple[int, int], int]] = {}


def attempt_in(name: str) -> int | None:
    # A file of the control directory that is open while CRIU dumps is missed at the restore.
    path = CONTROL / name
    try:
        status = path.stat()
        identity = status.st_ino, status.st_mtime_ns
        if name not in _read or _read[name][0] != identity:
            _read[name] = identity, int(json.loads(path.read_text())["attempt"])
        return _read[name][1]
    except FileNotFoundError:
        return None


def put(name: str, attempt: int) -> None:
    temporary = CONTROL / f".{name}.worker"
    temporary.write_text(json.dumps({"attempt": attempt}))
    temporary.rename(CONTROL / name)


class Protocol:
    """The worker's side of the control directory."""

    def __init__(self, *, waits: bool) -> None:
        """Be ready. One that waits is not asked to be quiet, for it is."""
        self.quiet: int | None = None
        self.waits = waits
        if waits:
            (CONTROL / "ready-for-snapshot").touch()
        else:
            put("ready-for-snapshot", 0)

    def look(self) -> str:
        """Do what a file asks for; return what was done, or nothing."""
        wanted = attempt_in("quiesce")
        if self.waits:
            done = [name for name in ("snapshot-complete", "restore-complete") if attempt_in(name)]
            self.waits = not done
            if done == ["restore-complete"]:
                put("restored", attempt_in(done[0]) or 0)
            return "".join(done)
        if self.quiet is None:
            if wanted is None:
                return ""
            self.quiet = wanted
            put("quiesced", wanted)
            return f"quiesced {wanted}"
        for name in ("snapshot-complete", "snapshot-aborted"):
            if attempt_in(name) == self.quiet:
                self.quiet = None
                return name
        restored = attempt_in("restore-complete")
        if restored is None:
            return ""
        self.quiet = None
        put("restored", restored)
        put("ready-for-snapshot", 0)
        return f"restored {restored}"


class Held:
    """Everything that a dump has to carry."""

    def __init__(self, folder: Path, heap_mib: int) -> None:
        folder.mkdir(exist_ok=True)
        block = hashlib.shake_256(b"heap").digest(2**20)
        self.heap = bytearray(block) * heap_mib
        for index in range(heap_mib):
            NUMBER.pack_into(self.heap, index << 20, index)
        self.digest = self.heap_digest()
        self.log = (folder / "counts").open("a+")
        self.ghost = (folder / "ghost").open("w+")
        self.ghost.write("still here")
        self.ghost.flush()
        (folder / "ghost").unlink()
        self.lock = (folder / "lock").open("w")
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        shared = os.open("/dev/shm/full-worker", os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(shared, mmap.PAGESIZE)
        self.named = mmap.mmap(shared, mmap.PAGESIZE)
        self.anonymous = mmap.mmap(-1, mmap.PAGESIZE)
        libc = ctypes.CDLL(None)
        self.watch = libc.inotify_init1(os.O_NONBLOCK)
        libc.inotify_add_watch(self.watch, os.fsencode(folder), IN_CREATE)
        self.folder = folder
        self.events = 0
        self.threads = 0
        self.alarms = 0

    def heap_digest(self) -> str:
        return hashlib.blake2b(self.heap, digest_size=8).hexdigest()

    def seen_by_watch(self, count: int) -> int:
        """Make a file, and return how many were seen so far."""
        (self.folder / f"made-{count}").touch()
        (self.folder / f"made-{count}").unlink()
        self.events += len(os.read(self.watch, 4096)) > 0
        return self.events


def echo(read: int, pair: socket.socket, held: Held) -> None:
    """Be the child: send back what comes through the pipe."""
    while data := os.read(read, NUMBER.size):
        for memory in (held.named, held.anonymous):
            memory[: NUMBER.size] = data
        pair.sendall(data)


def serve(listener: socket.socket) -> None:
    caller, _ = listener.accept()
    while data := caller.recv(NUMBER.size):
        caller.sendall(data)


def is_reached(listener: socket.socket, path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        if client.connect_ex(path):
            return False
        listener.accept()[0].close()
        return True


def make_ring() -> None:
    """Make an io_uring and keep it, as libuv does; go on without if the kernel refuses."""
    parameters = ctypes.create_string_buffer(120)
    ctypes.CDLL(None).syscall(IO_URING_SETUP, 4, parameters)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--heap-mib", type=int, default=16)
    parser.add_argument("--folder", type=Path, default=Path("/data"))
    parser.add_argument("--exit", type=int, default=7)
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--waits", action="store_true")
    parser.add_argument("--ring", action="store_true")
    arguments = parser.parse_args()
    if arguments.ring:
        make_ring()
    held = Held(arguments.folder, arguments.heap_mib)
    read, write = os.pipe()
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        ours.close()
        os.close(write)
        echo(read, theirs, held)
        os._exit(0)
    theirs.close()
    os.close(read)
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve, args=(listener,), daemon=True).start()
    tcp = socket.create_connection(listener.getsockname())
    _public = socket.create_server(("0.0.0.0", arguments.port))
    local = socket.socket(socket.AF_UNIX)
    local.bind(str(arguments.folder / ".local.sock"))
    local.listen()
    # As servers do whose clients wait for the name.
    name = (arguments.folder / ".local.sock").rename(arguments.folder / "local.sock")

    def spin() -> None:
        while True:
            time.sleep(0.05)
            held.threads += 1

    threading.Thread(target=spin, daemon=True).start()

    def alarm(*_: object) -> None:
        held.alarms += 1

    signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    is_ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: is_ended.set())
    protocol = Protocol(waits=arguments.waits)
    count = 0
    while not is_ended.wait(0.05):
        count += 1
        data = NUMBER.pack(count)
        os.write(write, data)
        [heard] = NUMBER.unpack(ours.recv(NUMBER.size))
        tcp.sendall(data)
        [looped] = NUMBER.unpack(tcp.recv(NUMBER.size))
        held.log.write(f"{count}\n")
        held.log.flush()
        held.ghost.seek(0)
        print(
            json.dumps(
                {
                    "count": count,
                    "child": heard,
                    "tcp": looped,
                    "named": NUMBER.unpack_from(held.named)[0],
                    "anonymous": NUMBER.unpack_from(held.anonymous)[0],
                    "ghost": held.ghost.read(),
                    "watched": held.seen_by_watch(count),
                    "heap": held.digest == held.heap_digest() if count % 20 == 1 else None,
                    "threads": held.threads,
                    "alarms": held.alarms,
                    "host": socket.gethostname(),
                    "renamed": is_reached(local, str(name)),
                    "did": protocol.look(),
                }
            ),
            flush=True,
        )
    os.kill(child, signal.SIGKILL)
    os._exit(arguments.exit)


if __name__ == "__main__":
    main()
