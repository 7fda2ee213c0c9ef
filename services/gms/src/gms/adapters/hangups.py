"""Detects that waiting clients have hung up, also with frames that are not read yet."""

from __future__ import annotations

import asyncio
import contextlib
import select


class Hangups:
    """Watches sockets and processes beside the event loop's own selector.

    That one waits for input only: with an unread frame it would wake in a busy loop.
    """

    def __init__(self) -> None:
        """Start without any client."""
        # EPOLLRDHUP comes also with input pending; the selector of asyncio cannot ask for it.
        self._epoll = select.epoll()
        self._watched: dict[int, asyncio.Future[None]] = {}

    def start(self) -> None:
        """Add the epoll instance to the event loop."""
        asyncio.get_running_loop().add_reader(self._epoll.fileno(), self._handle_events)

    async def of(self, sock: int, pidfd: int) -> None:
        """Wait until the other end is closed, or the process that connected has ended.

        A socket outlives its client when a copy of it is in flight. `pidfd` may be -1.
        """
        gone = asyncio.get_running_loop().create_future()
        with contextlib.ExitStack() as watched:
            for descriptor, events in ((sock, select.EPOLLRDHUP), (pidfd, select.EPOLLIN)):
                if descriptor >= 0:
                    self._epoll.register(descriptor, events)
                    self._watched[descriptor] = gone
                    watched.callback(self._forget, descriptor)
            await gone

    def close(self) -> None:
        """Stop watching."""
        asyncio.get_running_loop().remove_reader(self._epoll.fileno())
        self._epoll.close()

    def _forget(self, descriptor: int) -> None:
        self._epoll.unregister(descriptor)
        del self._watched[descriptor]

    def _handle_events(self) -> None:
        for descriptor, _ in self._epoll.poll(0):
            gone = self._watched[descriptor]
            if not gone.done():
                gone.set_result(None)
