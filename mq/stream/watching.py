"""Which descriptors of a link are ready: connections at once, all else on the side."""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from mq.mesh.poller import Poller

ConnT = TypeVar("ConnT")
EVENTS: Final = 64
"""How many descriptors are looked at in one call."""


class Watching(Generic[ConnT]):
    """The part of a link that keeps its descriptors.

    What seldom happens is behind one descriptor; messages wake the poller directly,
    which is some microseconds faster.
    """

    def __init__(self) -> None:
        self._readers: dict[int, ConnT] = {}
        self._handlers: dict[int, Callable[[], None]] = {}
        self._sets: list[select.epoll] = []  # all, and that of what seldom happens

    def _begin_watching(self, poller: Poller) -> None:
        self._poller = poller
        self._epoll = self._new_set()
        self._rare = self._new_set()
        self._epoll.register(self._rare.fileno(), select.EPOLLIN)
        poller.register(self._rare.fileno())

    def _new_set(self) -> select.epoll:
        self._sets.append(select.epoll())
        return self._sets[-1]

    def watch(self, fd: int, events: int, handler: Callable[[], None]) -> None:
        """Have `poll` call `handler` as long as a descriptor is ready."""
        if fd >= 0 and fd not in self._handlers:
            self._handlers[fd] = handler
            self._rare.register(fd, events)

    def unwatch(self, fd: int) -> None:
        """Forget a descriptor, before it is closed; idempotent."""
        if self._handlers.pop(fd, None) is not None:
            self._rare.unregister(fd)

    def read(self, fd: int, conn: ConnT) -> None:
        """Have `poll` look at `conn` when the descriptor is readable."""
        self._readers[fd] = conn
        self._epoll.register(fd, select.EPOLLIN)
        self._poller.register(fd)

    def unread(self, fd: int) -> None:
        """Forget a descriptor, before it is closed; idempotent."""
        if self._readers.pop(fd, None) is not None:
            self._epoll.unregister(fd)
            self._poller.unregister(fd)

    def _look(self) -> None:
        """Call the handlers that are due."""
        for fd, _ in self._rare.poll(0, EVENTS):
            if (handler := self._handlers.get(fd)) is not None:
                handler()

    def _end_watching(self) -> None:
        for rare in self._sets[1:]:  # none where the system would not make it
            self._poller.unregister(rare.fileno())
        self._abandon_watching()

    def _abandon_watching(self) -> None:
        """Close the sets and nothing else: a forked child shares what is in them."""
        for known in self._sets:
            known.close()
