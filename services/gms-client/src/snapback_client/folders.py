"""The paths of folders that settings name."""

from __future__ import annotations

import re

from snapback_client.errors import InvalidInput

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def check_folder(setting: str, value: str) -> str:
    """Return the path of a folder that a setting names. InvalidInput names setting and value.

    It is absolute and written without `.`, `..`, blanks at its ends and control characters: every
    process that is given it has to find the same folder, whatever its working directory is.
    """
    parts = value.split("/")
    is_clean = value == value.strip() and not _CONTROL.search(value)
    if not value.startswith("/") or not is_clean or "." in parts or ".." in parts:
        raise InvalidInput(
            f"{setting}={value!r} is no absolute path of a folder without '.', '..' and blanks at "
            "its ends",
            next_step=f"set {setting} to the absolute path of the folder",
            setting=setting,
            found=value,
        )
    return value
