"""The part of systemctl that the guides use, for machines whose first process is no systemd.

It reads the units and does what systemd.service(5) and systemd.exec(5) say of the settings in them,
but for `User=`: everything is root's. A service that ends is started again.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

UNITS = Path("/etc/systemd/system")
RUNNING = Path("/run/units")
END_S = 20.0
KNOWN = {
    *("Description", "After", "Wants", "RequiresMountsFor", "User", "WantedBy", "Restart"),
    *("EnvironmentFile", "ExecStart", "ExecReload", "StateDirectory", "StateDirectoryMode"),
    *("RuntimeDirectory", "RuntimeDirectoryPreserve", "LimitNOFILE", "LimitMEMLOCK"),
    *("KillMode", "RestartSec"),
}


def settings_of(unit: str) -> dict[str, str]:
    """Return the settings of a unit; KeyError for one that is not known here."""
    found = {}
    for line in (UNITS / unit).read_text().splitlines():
        if "=" in line:
            name, _, value = line.partition("=")
            if name not in KNOWN:
                raise KeyError(name)
            found[name] = value
    return found


def words_of(command: str, main_pid: str = "") -> list[str]:
    words = [word.replace("$MAINPID", main_pid) for word in shlex.split(command)]
    return [word.replace("%%", "%").replace("$$", "$") for word in words]


def environment_of(settings: dict[str, str]) -> dict[str, str]:
    found = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
    if path := settings.get("EnvironmentFile"):
        for line in Path(path).read_text().splitlines():
            name, _, value = line.partition("=")
            found[name] = "".join(shlex.split(value))
    return found


def main_pid(unit: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        pid = int((RUNNING / unit).read_text())
        os.kill(pid, 0)
        return pid
    return None


def supervise(unit: str) -> None:
    """Run a service until it is stopped, and start it again whenever it ends."""
    settings = settings_of(unit)
    for line, below in (("StateDirectory", "/var/lib"), ("RuntimeDirectory", "/run")):
        if name := settings.get(line):
            Path(below, name).mkdir(parents=True, exist_ok=True)
    while not (RUNNING / f"{unit}.stopped").exists():
        with (RUNNING / f"{unit}.log").open("ab") as log:
            process = subprocess.Popen(
                words_of(settings["ExecStart"]),
                env=environment_of(settings),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        (RUNNING / unit).write_text(str(process.pid))
        process.wait()
        if settings.get("KillMode") != "process":
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        is_stopped = (RUNNING / f"{unit}.stopped").exists()
        (RUNNING / unit).unlink()
        # One that is started again at once has a supervisor of its own.
        if is_stopped:
            return
        time.sleep(float(settings["RestartSec"]))


def start(unit: str) -> None:
    RUNNING.mkdir(exist_ok=True)
    (RUNNING / f"{unit}.stopped").unlink(missing_ok=True)
    subprocess.Popen(
        [sys.executable, __file__, "supervise", unit],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def stop(unit: str) -> None:
    (RUNNING / f"{unit}.stopped").touch()
    until = time.monotonic() + END_S
    while (pid := main_pid(unit)) and time.monotonic() < until:
        os.kill(pid, signal.SIGTERM)
        time.sleep(0.2)
    if pid := main_pid(unit):
        raise SystemExit(f"{unit} (process {pid}) does not end on SIGTERM")


def main(verb: str, units: list[str]) -> None:
    for unit in units:
        match verb:
            case "enable" | "start":
                start(unit)
            case "stop":
                stop(unit)
            case "reload":
                command = settings_of(unit)["ExecReload"]
                subprocess.run(words_of(command, str(main_pid(unit))), check=True)
            case "supervise":
                supervise(unit)
            case _:
                raise SystemExit(f"{verb} is not done here")


if __name__ == "__main__":
    main(sys.argv[1], [word for word in sys.argv[2:] if not word.startswith("--")])
