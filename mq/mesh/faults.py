"""What a link raises where its contract has no error, or answers in place of an answer.

It costs the connection, as if that were lost; the log has the traceback, once.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from mq.log import Log, WarnOnce

T = TypeVar("T")
logger = Log(__name__)


class LinkFault(Exception):
    """A call to a link has failed in a way of its own; the text says which and how."""


class Faults:
    """Makes the calls to the links of one mesh that may fail; the log is told once."""

    def __init__(self) -> None:
        self._warn = WarnOnce(logger)

    def fault(self, call: Callable[..., object], error: Exception) -> LinkFault:
        """What to make of an error of a call to a link, which is being handled.

        Raises:
            Exception: The error itself, which may be none of the link's: the system has
                no memory, or a handler of a signal's has raised it.
        """
        if isinstance(error, MemoryError) or _may_be_a_handlers():
            raise error
        name = getattr(call, "__qualname__", repr(call))
        found = LinkFault(f"{name} failed: {type(error).__name__}: {error}")
        self._warn.exception(
            (name, type(error)),
            "%s; its connection is broken (this is told once)",
            str(found),
        )
        return found

    def asked(self, call: Callable[..., T], *arguments: Any) -> T:
        """What a call to a link returns.

        Raises:
            LinkFault: It has raised something.
        """
        try:
            return call(*arguments)
        except Exception as error:
            raise self.fault(call, error) from error

    def is_true(self, call: Callable[..., bool], *arguments: Any) -> bool:
        """What a call to a link that says yes or no returns.

        Raises:
            LinkFault: It has raised something, or said neither.
        """
        try:
            answer = call(*arguments)
            if answer is None:  # there is no `return`
                raise TypeError("it returned None, which is neither True nor False")
            return answer
        except Exception as error:
            raise self.fault(call, error) from error


def _may_be_a_handlers() -> bool:
    """Handlers run in the main thread; that of Ctrl-C raises no `Exception`."""
    if threading.current_thread() is not threading.main_thread():
        return False
    handlers = map(signal.getsignal, signal.valid_signals())
    return any(callable(h) and h is not signal.default_int_handler for h in handlers)
