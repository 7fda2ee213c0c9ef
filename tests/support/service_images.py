"""The images of deploy/images, built once for their content and kept as one archive.

`python -m tests.support.service_images` builds them, or says what this machine lacks. No
registry is needed: they stand on a Debian that debootstrap makes, and a Docker engine of the tests'
own builds them.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support.docker_engine import Engine, engine, lacking

REPOSITORY = Path(__file__).parents[2]
CACHE = REPOSITORY / ".tools" / "images"
INPUTS = (
    *(".dockerignore", ".env", ".tools/bin/nats", "requirements.lock", "requirements-cuda.lock"),
    *("deploy/examples", "deploy/images", "services", "shared"),
)
NOT_COPIED = {"__pycache__", "build", "dist", "wheels"}
NAMES = ("operator", "gms", "snapshot-agent", "snapshotctl", "page", "nats")
BUILD_S = 900.0


def image(name: str) -> str:
    """Return the name of an image, of one of NAMES."""
    [tag] = [
        line.partition("=")[2]
        for line in (REPOSITORY / ".env").read_text().splitlines()
        if line.startswith("SNAPBACK_TAG=")
    ]
    return f"snapback/{name}:{tag}"


def cached() -> Path | None:
    """Return the archive of the images of what is in this repository now, if it was made."""
    path = _path()
    return path if path.exists() else None


def archive() -> Path:
    """Return the archive of all images, for which an engine is started if need be.

    Raise CalledProcessError when an image cannot be built.
    """
    if (found := cached()) is None:
        with engine() as started:
            found = provide(started)
    return found


def provide(to: Engine) -> Path:
    """Have an engine hold all images, and return their archive."""
    path = _path()
    if path.exists():
        run(to, "docker", "load", "--quiet", "--input", str(path))
        return path
    # It says which image it builds: a first build takes ten minutes.
    subprocess.run(
        ["deploy/images/build.sh", "--no-registry"],
        check=True,
        timeout=BUILD_S,
        cwd=REPOSITORY,
        env=environment(to),
    )
    print("keeping the images in one archive", flush=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    run(to, "docker", "save", "--output", str(new), *map(image, NAMES))
    # An archive has hundreds of megabytes, and those of other contents are of no use any more.
    for old in CACHE.glob("*.tar"):
        old.unlink()
    new.rename(path)
    return path


def run(to: Engine, *words: str) -> str:
    """Run a command that uses an engine and return its standard output."""
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        check=False,
        timeout=BUILD_S,
        cwd=REPOSITORY,
        env=environment(to),
    )
    assert done.returncode == 0, f"{' '.join(words)}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def environment(to: Engine) -> dict[str, str]:
    """Return the environment in which docker uses an engine."""
    return os.environ | {
        "DOCKER_HOST": to.host,
        "DOCKER_CONFIG": str(REPOSITORY / ".tools" / "docker"),
    }


def _path() -> Path:
    content = hashlib.sha256()
    for file in _inputs():
        name = file.relative_to(REPOSITORY).as_posix()
        content.update(f"{name} {file.stat().st_mode:o}\n".encode())
        content.update(hashlib.sha256(file.read_bytes()).digest())
    return CACHE / f"{content.hexdigest()[:16]}.tar"


def _inputs() -> Iterator[Path]:
    """Yield the files that the images are made of."""
    for name in INPUTS:
        start = REPOSITORY / name
        for path in (start, *sorted(start.rglob("*"))):
            left_out = NOT_COPIED & {*path.relative_to(REPOSITORY).parts}
            if path.is_file() and not left_out:
                yield path


if __name__ == "__main__":
    print(cached() or lacking() or archive())
