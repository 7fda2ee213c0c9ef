"""A real GPU keeps the rules: those of its driver, and those of the service on it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gms.adapters.cuda import open_devices
from snapback_client.cuda import CudaUnavailable


@pytest.mark.gpu
@pytest.mark.cpu(600)
@pytest.mark.timeout(600)
def test_every_visible_gpu_keeps_the_rules() -> None:
    try:
        devices = len(open_devices())
    except CudaUnavailable as error:
        pytest.skip(str(error))
    for ordinal in range(devices):
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "gms.cli",
                "conformance",
                "--device",
                "cuda",
                "--ordinal",
                str(ordinal),
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=500,
        )
        print(done.stdout)
        assert done.returncode == 0, done.stdout + done.stderr
