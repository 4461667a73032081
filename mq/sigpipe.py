"""SIGPIPE, by which the kernel tells who writes to a connection that has ended.

Python ignores it; programs that print into pipes have it end the process, as it does
by default, and a peer that has died must not do that.
"""

from __future__ import annotations

import importlib
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

QUIET: Final = int(getattr(socket, "MSG_NOSIGNAL", 0))  # macOS has none
"""The flag with which to send to who may have gone."""
_PIPE: Final = int(signal.SIGPIPE)
_OURS: Final = {signal.SIGPIPE}
_DEFAULT: Final = int(signal.SIG_DFL)
# As that of `signal`, which takes half a microsecond to name what it returns.
_handler_of: Final[Callable[[int], object]] = importlib.import_module(
    "_signal"
).getsignal
T = TypeVar("T")


def spared(call: Callable[..., T], *arguments: object) -> T:
    """Call an engine that writes, in this thread, without `QUIET`."""
    if _handler_of(_PIPE) != _DEFAULT:
        return call(*arguments)
    with blocked():
        return call(*arguments)


@contextmanager
def blocked() -> Iterator[None]:
    """This thread is not sent it meanwhile, nor ever are those that it begins."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _OURS)
    try:
        yield
    finally:
        if not before & _OURS:
            signal.sigtimedwait(_OURS, 0)  # one that waits is of a write meanwhile
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _OURS)
