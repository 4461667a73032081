"""What a link raises where its contract has no error, or answers in place of an answer.

It costs the connection, as if that were lost, and where nothing can be heard any more
the queue; the log has the traceback, once.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from mq.log import Log, WarnOnce

if TYPE_CHECKING:
    from mq.mesh.copying import Borrow
    from mq.mesh.large import Take
    from mq.transport import Conn, Link

T = TypeVar("T")
logger = Log(__name__)

HEADS: Final = (bytes, bytearray, memoryview)
"""What a head may be, and `receive` have made of it."""

Message = tuple[bytes | memoryview, int]


class LinkFault(Exception):
    """A call to a link has failed in a way of its own; the text says which and how."""


class Faults:
    """Makes the calls to the links of one mesh that may fail; the log is told once.

    Args:
        end: Called with the reason when the mesh hears nothing any more.

    Attributes:
        deaf: Whether that is so: a link has failed to say what has arrived.
        keeper: The thread in which nothing but the mesh runs.
    """

    def __init__(self, end: Callable[[str], None]) -> None:
        self._warn = WarnOnce(logger)
        self._end = end
        self.deaf = False
        self.keeper: int | None = None

    def fault(
        self,
        call: Callable[..., object],
        error: Exception,
        cost: str = "its connection is broken",
    ) -> LinkFault:
        """What to make of an error of a call to a link, which is being handled.

        Raises:
            Exception: The error itself, which may be none of the link's: the system has
                no memory, or a handler of a signal's has raised it.
        """
        if isinstance(error, MemoryError) or _may_be_a_handlers():
            try:
                raise error
            finally:
                del error  # else it keeps itself, and what was called, by this frame
        name = getattr(call, "__qualname__", repr(call))
        found = LinkFault(f"{name} failed: {type(error).__name__}: {error}")
        key = name, type(error)
        self._warn.exception(key, "%s; %s (this is told once)", str(found), cost)
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
            if answer is None:
                raise neither()
            return answer
        except Exception as error:
            raise self.fault(call, error) from error

    def received(self, conn: Conn) -> Message | None:
        """What `Conn.receive` returns.

        Raises:
            LinkFault: It has raised something, or returned something else.
        """
        try:
            message = conn.receive()
            if message is not None:
                head, nbody = message
                if (
                    not isinstance(head, HEADS)
                    or not isinstance(nbody, int)
                    or nbody < 0
                ):
                    raise no_message(message)
            return message
        except Exception as error:
            raise self.fault(conn.receive, error) from error

    def borrow(self, conn: Conn) -> Borrow:
        """`Conn.borrow`: LinkFault, where it raises something or returns no such part.

        But for what it may raise, which is the peer's doing.
        """

        def borrow(segment: int, offset: int, nbytes: int, take: Take) -> memoryview:
            try:
                area = conn.borrow(segment, offset, nbytes, take)
                if not isinstance(area, memoryview) or len(area) != nbytes:
                    raise TypeError(f"it returned no memory of {nbytes} bytes")
                return area
            except ValueError:
                raise
            except Exception as error:
                raise self.fault(conn.borrow, error) from error

        return borrow

    def close(self, of: Conn | Link, *arguments: float) -> None:
        """Close a connection, or a link; where that fails it counts as closed."""
        try:
            of.close(*arguments)
        except Exception as error:
            self.fault(of.close, error, "what it has may stay open")

    def deafen(self, link: Link, error: Exception) -> None:
        """A link has raised something, which is being handled, in place of an event.

        Raises:
            Exception: The error itself, in any thread but the keeper's: it may be the
                application's, thrown into its thread. If it is not, the keeper meets
                it, too.
        """
        if threading.get_ident() != self.keeper:
            raise error
        cost = "the queue hears nothing more and can only be closed"
        reason = str(self.fault(link.poll, error, cost))
        self.deaf = True
        self._end(reason)


def neither() -> TypeError:
    """What is wrong where a call has no `return`."""
    return TypeError("it returned None, which is neither True nor False")


def no_message(found: object) -> TypeError:
    """What is wrong with what `receive` has returned."""
    return TypeError(f"it returned {found!r:.100}, no head and size of a body")


def _may_be_a_handlers() -> bool:
    """Handlers run in the main thread; that of Ctrl-C raises no `Exception`."""
    if threading.current_thread() is not threading.main_thread():
        return False
    handlers = map(signal.getsignal, signal.valid_signals())
    return any(callable(h) and h is not signal.default_int_handler for h in handlers)
