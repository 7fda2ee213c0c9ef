"""Where PyTorch is for the tests: in this environment, or in the folder that SNAPBACK_TORCH names.

It is large and no part of what is locked; `make test-torch` fetches it.
"""

from __future__ import annotations

import os
import sys

VARIABLE = "SNAPBACK_TORCH"


def path_with_torch() -> list[str]:
    """Return `sys.path` with the folder at its end, so that what is locked comes first."""
    folder = os.environ.get(VARIABLE)
    return [*sys.path, folder] if folder else list(sys.path)
