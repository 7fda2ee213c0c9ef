"""The wheel of the client: installed alone, it shares memory with msgspec and numpy."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).parents[3] / "services" / "gms-client"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")

ENGINE = """
import sys
sys.path.insert(0, sys.argv[1])
import snapback_client
with snapback_client.connect(sys.argv[3], lock="RW", socket_dir=sys.argv[2]) as pool:
    pool.allocate("a", 3, "int32")[:] = 7
    pool.commit()
    pool.sleep()
    pool.wake()
    print(pool["a"].sum(), sorted(
        {name.partition(".")[0] for name in sys.modules}
        & {"gms", "snapshot_shared", "grpc", "nats", "xxhash", "aiohttp"}
    ))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    options = ("--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder))
    subprocess.run([*PIP, "wheel", *options, str(SOURCE)], check=True, timeout=120)
    (found,) = folder.iterdir()
    return found


def test_an_engine_with_the_wheel_msgspec_and_numpy_alone_shares_memory(
    wheel: Path, tmp_path: Path, service: Any
) -> None:
    library = tmp_path / "library"
    options = ("--no-index", "--no-deps", "--no-compile", "--target", str(library))
    subprocess.run([*PIP, "install", *options, str(wheel)], check=True, timeout=120)
    for name in ("msgspec", "numpy"):
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None  # noqa: PT018 - both are installed
        package = Path(spec.origin).parent
        for found in (package, package.with_name(f"{name}.libs")):
            if found.exists():
                (library / found.name).symlink_to(found)
    # Isolated and without site: nothing else that is installed here can be imported.
    command = [sys.executable, "-I", "-S", "-c", ENGINE]
    done = subprocess.run(
        [*command, str(library), str(service.folder), service.uuids[0]],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "21 []\n"), done.stderr


def test_the_wheel_needs_msgspec_and_numpy_and_says_what_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        (name,) = (each for each in files.namelist() if each.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(files.read(name).decode())
    needed = [each for each in metadata.get_all("Requires-Dist", []) if "extra ==" not in each]
    assert needed == ["msgspec>=0.19", "numpy>=2.0"]
    assert (metadata["Name"], metadata["License-Expression"]) == ("snapback-client", "Apache-2.0")
    assert "snapback_client.connect" in str(metadata.get_payload())


def test_the_wheel_has_its_types_and_its_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
    assert "snapback_client/py.typed" in names
    assert [name for name in names if name.endswith("/LICENSE")]
    assert {name.partition("/")[0] for name in names} == {
        "snapback_client",
        "snapback_client-0.1.0.dist-info",
    }
