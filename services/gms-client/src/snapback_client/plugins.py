"""What engines find by entry points, and call in every process that they start.

Nothing is imported for an engine that does not ask for it: an image may hold this package and not
use it.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
from typing import Any

from snapback_client.errors import UnsupportedVersion

log = logging.getLogger(__name__)

BACKEND = "snapback"


def vllm() -> None:
    """Name our sleep-mode back-end to vLLM (group `vllm.general_plugins`).

    vLLM imports it where it is chosen, and the rest where `--worker-cls` names the worker class.
    """
    try:
        sleeping: Any = importlib.import_module("vllm.device_allocator.sleep_mode_backend")
        register = sleeping.SleepModeBackendFactory.register_backend
    except (ImportError, AttributeError) as error:
        # What is raised here would end engines that have no use for it.
        log.warning("this vLLM cannot sleep with Snapback: %s", error)
        return
    with contextlib.suppress(ValueError):
        # It is registered already.
        register(BACKEND, "snapback_client.vllm", "SleepBackend")


def sglang() -> None:
    """Hook into SGLang where there is GPU memory to serve (group `sglang.srt.plugins`).

    SystemExit for a version that is not known to fit: SGLang logs what a plug-in raises, and would
    go on without it.
    """
    if not os.environ.get("GMS_SOCKET_DIR"):
        return
    try:
        importlib.import_module("snapback_client.sglang").register()
    except UnsupportedVersion as error:
        sys.exit(f"snapback_client.sglang: {error.to_failure()}")
