"""Imported at the start of each program that finds this folder first: its artifact root hangs."""

import os
from pathlib import Path

from tests.support import hanging

hanging.hang_while_locked(Path(os.environ[hanging.ROOT]), Path(os.environ[hanging.LOCK]))
