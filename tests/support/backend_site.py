"""Folders in which Python finds transfer backends of other packages, and KvikIO."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from gms.adapters.backends import GROUP

VARIABLE = "SNAPBACK_KVIKIO"


def site_with_backends(folder: Path) -> Path:
    """Install the backend that reads into devices, as a package would be."""
    info = folder / "direct_backend-1.0.dist-info"
    info.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("direct_backend.py"), folder)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: direct-backend\nVersion: 1\n")
    point = "direct-example = direct_backend:DirectExample"
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{point}\n")
    return folder


def find_kvikio(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that SNAPBACK_KVIKIO names, and have it used as it is; skips without.

    In its compatibility mode: cuFile itself does not work on the fake of the driver.
    """
    folder = os.environ.get(VARIABLE)
    if not folder:
        pytest.skip(f"needs KvikIO: make test-gds sets {VARIABLE}")
    # KvikIO looks for libcufile where packages are installed, and then as any program does.
    libraries = {str(each.parent) for each in Path(folder).rglob("libcufile.so.0")}
    found = filter(None, [os.environ.get("LD_LIBRARY_PATH"), *libraries])
    monkeypatch.setenv("LD_LIBRARY_PATH", os.pathsep.join(found))
    monkeypatch.setenv("KVIKIO_COMPAT_MODE", "ON")
    return Path(folder)
