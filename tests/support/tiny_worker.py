"""A worker of the control directory's protocol, in the standard library alone.

It beats: it appends one line to `events` for everything that it does, and counts in `beats` while
it runs, so that a test sees whether it is stopped. What it shall do wrong is said by arguments.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

CONTROL = Path(os.environ["SNAPSHOT_CONTROL_DIR"])
STATE = CONTROL / "state"


def put(name: str, body: object) -> None:
    temporary = CONTROL / f".{name}.worker"
    temporary.write_text(json.dumps(body))
    temporary.rename(CONTROL / name)


def body_of(name: str) -> dict[str, object] | None:
    try:
        found: dict[str, object] = json.loads((CONTROL / name).read_text())
    except FileNotFoundError:
        return None
    return found


def attempt_in(name: str) -> int | None:
    body = body_of(name)
    return None if body is None else int(str(body["attempt"]))


def tell(event: str) -> None:
    with (CONTROL.parent / "events").open("a") as file:
        file.write(event + "\n")


def beat(count: int) -> int:
    (CONTROL.parent / "beats").write_text(str(count + 1))
    time.sleep(0.005)
    return count + 1


def save(arguments: argparse.Namespace, answer: str) -> None:
    (STATE / "answer.json").write_text(json.dumps({"answer": answer}))
    (STATE / "weights.bin").write_bytes(bytes(range(256)) * (arguments.state_bytes // 256))
    if arguments.odd_state:
        (STATE / "link").symlink_to("/etc/hostname")


def load(state: Path) -> tuple[str, int]:
    answer = json.loads((state / "answer.json").read_text())["answer"]
    return str(answer), (state / "weights.bin").stat().st_size


def resume(arguments: argparse.Namespace) -> tuple[str, dict[str, object] | None]:
    """Go on as the worker that was quiet, in the middle of its capture: its answer and request."""
    if arguments.exit_at_resume is not None:
        sys.exit(arguments.exit_at_resume)
    while arguments.hang_at_resume:
        beat(0)
    answer, size = load(arguments.resume_from)
    tell(f"resumed {answer} {size}")
    quiet = body_of("quiesce")
    put("quiesced", {"attempt": attempt_in("quiesce")})
    return answer, quiet


def restore(state: Path) -> str:
    tell("standby")
    count = 0
    while (attempt := attempt_in("restore-complete")) is None:
        if attempt_in("restore-failed") is not None:
            tell("restore-failed")
            sys.exit(4)
        count = beat(count)
    answer, size = load(state)
    tell(f"restored {answer} {size}")
    put("restored", {"attempt": attempt})
    return answer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--answer", default="nothing")
    parser.add_argument("--state-bytes", type=int, default=1024)
    parser.add_argument("--exit-at-start", type=int)
    parser.add_argument("--exit-at-quiesce", type=int)
    parser.add_argument("--never-ready", action="store_true")
    parser.add_argument("--never-quiet", action="store_true")
    parser.add_argument("--waits-for", help="show that the worker waits for this, and never answer")
    parser.add_argument("--refuses", help="answer each request to be quiet by this reason")
    parser.add_argument("--never-restored", action="store_true")
    parser.add_argument("--odd-state", action="store_true")
    parser.add_argument("--stubborn", action="store_true")
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--poll-s", type=float, default=0.0)
    parser.add_argument("--resume-from", type=Path)
    parser.add_argument("--exit-at-resume", type=int)
    parser.add_argument("--hang-at-resume", action="store_true")
    arguments = parser.parse_args()
    if arguments.stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if arguments.child:
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        (CONTROL.parent / "child").write_text(str(child.pid))
    tell("started " + " ".join(sys.argv[1:]))
    if arguments.exit_at_start is not None:
        sys.exit(arguments.exit_at_start)
    answer = arguments.answer
    quiet = None
    if os.environ.get("SNAPSHOT_RESTORE_STANDBY"):
        if (attempt := attempt_in("restore-failed")) is not None:
            tell("cold")
            put("restored", {"attempt": attempt})
            serve(arguments, answer, quiet)
        if arguments.never_restored:
            tell("standby")
            while True:
                beat(0)
        answer = restore(arguments.resume_from or STATE)
    elif arguments.resume_from:
        answer, quiet = resume(arguments)
    elif not arguments.never_ready:
        put("ready-for-snapshot", {"attempt": 0})
    serve(arguments, answer, quiet)


def serve(arguments: argparse.Namespace, answer: str, quiet: dict[str, object] | None) -> None:
    count = 0
    while True:
        count = beat(count)
        wanted = body_of("quiesce")
        if quiet and wanted and any(quiet.get(k) != wanted.get(k) for k in ("capture", "attempt")):
            # The end of the capture before came and went between two looks.
            tell(f"snapshot-{wanted.get('previous')} {quiet['attempt']}, missed")
            quiet = None
        if quiet is None and wanted is not None and arguments.waits_for:
            put("quiescing", wanted | {"message": arguments.waits_for})
        elif quiet is None and wanted is not None and arguments.refuses:
            put("quiesce-failed", wanted | {"message": arguments.refuses})
        elif quiet is None and wanted is not None and not arguments.never_quiet:
            if arguments.exit_at_quiesce is not None:
                sys.exit(arguments.exit_at_quiesce)
            save(arguments, answer)
            quiet = wanted
            put("quiesced", {"attempt": wanted["attempt"]})
            tell(f"quiesced {wanted['attempt']}")
        for name in ("snapshot-complete", "snapshot-aborted"):
            if quiet is not None and attempt_in(name) == quiet["attempt"]:
                tell(f"{name} {quiet['attempt']}")
                quiet = None
        if quiet is not None:
            time.sleep(arguments.poll_s)


if __name__ == "__main__":
    main()
