"""SIGPIPE, by which the kernel tells who writes to a connection that has ended.

Python ignores it; programs that print into pipes have it end the process, as it does
by default, and a peer that has died must not do that.
"""

from __future__ import annotations

import importlib
import signal
import socket
from collections.abc import Callable
from typing import Final, TypeVar

QUIET: Final = int(getattr(socket, "MSG_NOSIGNAL", 0))  # macOS has none
"""The flag with which to send to who may have gone."""
_PIPE: Final = int(signal.SIGPIPE)
_OURS: Final = {signal.SIGPIPE}
_IGNORED: Final = int(signal.SIG_IGN)
# As that of `signal`, which takes half a microsecond to name what it returns.
_handler_of: Final[Callable[[int], object]] = importlib.import_module(
    "_signal"
).getsignal
T = TypeVar("T")


def spared(call: Callable[..., T], *arguments: object) -> T:
    """Call an engine that writes, in this thread, without `QUIET`."""
    if _handler_of(_PIPE) == _IGNORED:  # it takes 5 us to block it
        return call(*arguments)
    with blocked():
        return call(*arguments)


class blocked:
    """A context: this thread is not sent it, nor ever are those that it begins.

    No generator: a handler of a signal that raises might come between its steps.
    """

    def __enter__(self) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._was_blocked = bool(before & _OURS)
        self._waited = self._was_blocked and bool(signal.sigpending() & _OURS)
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, _OURS)
        except BaseException:  # a handler's, once that was done
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            if not self._waited:  # one that waits now is of a write meanwhile
                signal.sigtimedwait(_OURS, 0)
        finally:
            if not self._was_blocked:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, _OURS)
