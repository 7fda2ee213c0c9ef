from __future__ import annotations

from typing import Any

from sglang.srt.model_loader.loader import BaseModelLoader


class IpcModelLoader(BaseModelLoader):
    @staticmethod
    def _rebuild_stale_views(model: Any) -> None:
        """Find the kernel again, which loading would have found."""
        model.projection.pack(is_packed=True)
