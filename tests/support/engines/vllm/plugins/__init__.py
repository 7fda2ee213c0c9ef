from __future__ import annotations

from importlib.metadata import entry_points

DEFAULT_PLUGINS_GROUP = "vllm.general_plugins"


def load_general_plugins() -> None:
    for plugin in entry_points(group=DEFAULT_PLUGINS_GROUP):
        plugin.load()()
