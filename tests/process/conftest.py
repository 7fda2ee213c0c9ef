"""The CRIU of these tests."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

CRIU = Path(__file__).parents[2] / ".tools" / "criu" / "criu"


@pytest.fixture
def criu() -> Path:
    """The program of CRIU, where this machine can run it."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    if missing := [name for name in ("ip", "unshare") if shutil.which(name) is None]:
        pytest.skip(f"{' and '.join(missing)} missing: install iproute2 and util-linux")
    if not CRIU.exists():
        pytest.skip("CRIU is missing: run `make criu`")
    return CRIU
