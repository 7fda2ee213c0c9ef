from __future__ import annotations

import contextlib
from collections.abc import Iterator


class Allocator:
    """What is in vLLM's own allocator, by tag."""

    def __init__(self) -> None:
        self.used: list[str] = []
        self.calls: list[tuple[str, object]] = []

    @contextlib.contextmanager
    def use_memory_pool(self, tag: str | None = None) -> Iterator[None]:
        self.used.append(tag or "default")
        yield

    def sleep(self, offload_tags: tuple[str, ...] | str | None = None) -> None:
        self.calls.append(("sleep", offload_tags))

    def discard(self, tags: tuple[str, ...] | str) -> None:
        self.calls.append(("discard", tags))

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.calls.append(("wake_up", tags))


_INSTANCE = Allocator()


def get_mem_allocator_instance() -> Allocator:
    return _INSTANCE
