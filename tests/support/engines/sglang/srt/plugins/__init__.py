from __future__ import annotations

import logging
from importlib.metadata import entry_points

from sglang.srt.plugins.hook_registry import HookRegistry

GENERAL_PLUGINS_GROUP = "sglang.srt.plugins"


def load_plugins() -> None:
    for plugin in entry_points(group=GENERAL_PLUGINS_GROUP):
        try:
            plugin.load()()
        except Exception:
            logging.getLogger(__name__).exception("Failed to execute plugin %s", plugin.name)
    HookRegistry.apply_hooks()
