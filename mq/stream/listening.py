"""Which connections a link has: how they come in, and who has to go."""

from __future__ import annotations

import select
import socket
import time
from abc import abstractmethod
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from mq.addresses import origin
from mq.descriptors import most_open, out_of_descriptors, pushed_out
from mq.log import Log, printable
from mq.strangers import WarnOfStrangers
from mq.stream.watching import Watching
from mq.transport import Link, What

logger = Log(__name__)

DEAF_SECONDS: Final = 0.5
"""How long a listener rests that could not accept for want of descriptors."""
SILENT_SECONDS: Final = 60.0
"""How long that is not said again."""
_BACKLOG: Final = 1024
_ACCEPTS: Final = 32  # at a time, before the others have their turn
_STRANGERS: Final = 128
_GREETING_SECONDS: Final = 5.0


class Complaint:
    """Tells the log what goes wrong with others who come, once in a while."""

    def __init__(self) -> None:
        self._next_at = 0.0

    def make(self, error: OSError) -> None:
        """Say that nobody can be accepted, and what to do about it."""
        what = out_of_descriptors(error) or error
        self.say("cannot accept a connection, but tries again: %s", what)

    def say(self, text: str, *args: object) -> None:
        """Say so, unless something was said not long ago."""
        now = time.monotonic()
        if now >= self._next_at:
            self._next_at = now + SILENT_SECONDS
            logger.warning(text, *args)


class Refusals:
    """Tells the log of strangers that are refused: see `WarnOfStrangers`."""

    def __init__(self) -> None:
        self._misfits = WarnOfStrangers(logger, each=True)
        self._strays = WarnOfStrangers(logger)

    def tell(self, address: str, why: str, *, misfit: bool) -> None:
        """Say so.

        Args:
            misfit: Whether it is of another version, which it is told; else it may be
                anything.
        """
        warn = self._misfits if misfit else self._strays
        warn(address, why, "refused %s: %s", address, printable(why))


class Listener(Protocol):
    """A socket that never waits, or what an engine has in its place."""

    def fileno(self) -> int: ...
    def listen(self, backlog: int, /) -> None: ...
    def accept(self) -> tuple[Any, Any]: ...
    def close(self) -> None: ...


class Listened(Protocol):
    """A connection, as `Listening` knows it."""

    @property
    def descriptors_taken(self) -> int: ...
    def start(self, accepted: Any, /) -> None: ...
    def drop(self) -> None: ...
    def abandon(self) -> None: ...


class Stranger(NamedTuple):
    """What is known of who was accepted, and has not said hello.

    Attributes:
        since: When it came, by `time.monotonic`.
        origin: Where from, as `mq.addresses.origin` has it.
    """

    since: float
    origin: str


ConnT = TypeVar("ConnT", bound=Listened)


class Listening(Watching[ConnT], Link):
    """The part of a link that listens, and keeps its connections until their end.

    Attributes:
        busy: Connections to be looked at by the next `poll`.
        conns: All connections, until they are closed.
        closing: Those that still deliver, and until when.
        strangers: Those accepted that have not said hello.
        refusals: Tells of those that do not fit.
    """

    def __init__(self) -> None:
        super().__init__()
        self.malformed = 0
        self.busy: dict[ConnT, Any] = {}
        self.conns: dict[ConnT, None] = {}
        self.closing: dict[ConnT, float] = {}
        self.strangers: dict[ConnT, Stranger] = {}
        self._listeners: dict[Listener, None] = {}
        self._deaf: dict[Listener, float] = {}
        self._complaint = Complaint()
        self.refusals = Refusals()
        self._is_open = False

    @abstractmethod
    def _new(self, address: str, news: What) -> ConnT:
        """A connection, among `conns`."""

    def name_peer(self, accepted: Any, peer: Any) -> str:
        """The address of an accepted peer, for people to read.

        Args:
            accepted, peer: What `Listener.accept` has returned.
        """
        return str(peer)

    def _hear(self, listener: Listener) -> None:
        """Listen from now on, or again after a rest."""
        self._listeners[listener] = None  # before it can fail: `close` closes it
        listener.listen(_BACKLOG)
        self.watch(listener.fileno(), select.EPOLLIN, lambda: self._accept(listener))

    def _accept(self, listener: Listener) -> None:
        for _ in range(_ACCEPTS):
            try:
                accepted, peer = listener.accept()
            except (BlockingIOError, ConnectionError):  # none, or it has left again
                return
            except OSError as error:  # out of descriptors: for a while, or one is free
                self._complaint.make(error)
                self.unwatch(listener.fileno())
                self._deaf[listener] = time.monotonic() + DEAF_SECONDS
                return
            address = self.name_peer(accepted, peer)
            conn = self._new(address, What.ACCEPTED)
            full = len(self.strangers) >= most_open(_STRANGERS, conn.descriptors_taken)
            if full:
                origins = {one: s.origin for one, s in self.strangers.items()}
                self._turn_away(pushed_out(origins))
            self.strangers[conn] = Stranger(time.monotonic(), origin(address))
            conn.start(accepted)
            if full:  # an engine frees the other's descriptors in a while
                return

    def _turn_away(self, stranger: ConnT) -> None:
        self.malformed += 1
        stranger.drop()

    def forget(self, conn: ConnT) -> None:
        """A connection is over."""
        self.conns.pop(conn, None)
        self.busy.pop(conn, None)
        self.closing.pop(conn, None)
        self.strangers.pop(conn, None)

    def _expire(self) -> None:
        """What time brings; wanted while some are `closing`, `strangers` or deaf."""
        now = time.monotonic()
        for conn, deadline in list(self.closing.items()):
            if now >= deadline:
                conn.drop()
        for conn, stranger in list(self.strangers.items()):
            if now < stranger.since + _GREETING_SECONDS:
                break
            self._turn_away(conn)
        for listener, until in list(self._deaf.items()):
            if now >= until:
                del self._deaf[listener]
                self._hear(listener)

    def _stop_listening(self) -> None:
        self._deaf.clear()
        for listener in self._listeners:
            self.unwatch(listener.fileno())
            listener.close()
        self._listeners.clear()

    def abandon(self) -> None:
        # The sets of descriptors are shared with the parent: nothing is taken out.
        self._is_open = False
        for conn in self.conns:
            conn.abandon()
        for listener in self._listeners:
            if isinstance(listener, socket.socket):  # an engine's are let go of by it
                listener.close()
        self._abandon_watching()
