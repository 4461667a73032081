"""One connection of NNG's link, from dialling or accepting to its end."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

from mq.transport import LINGER_SECONDS, MAX_HEAD_BYTES, Conn, Event, What
from transports._nng_pair import PREFIX_BYTES, Channel

if TYPE_CHECKING:
    from transports.nng import NngLink

_HELLO = b"tensormq nng 1"
_BYE = b"bye"
_BURST = 32  # messages thrown away at a time while a connection closes
_BREAK = "the connection was lost"

# The phases of a connection, in order: no hello has come; the mesh has it; this end has
# closed it, and says so; it is lost, which is to be reported; nothing is reported.
_OPENING, _OPEN, _CLOSING, _LOST, _OVER = range(5)


class Attempt(Protocol):
    """An attempt to connect that the engine makes."""

    def fileno(self) -> int: ...
    def close(self) -> None: ...


Dialling: TypeAlias = "socket.socket | Attempt"


class NngConn(Conn):
    """One connection, from dialling or accepting to its end.

    Attributes:
        reason: Why it is lost or closed.
        news: What is to be reported once the peer's link has said hello.
        target: The host and port that are dialled, or a path; None: no dial has begun.
    """

    descriptors_taken: ClassVar[int] = 6  # its socket, a copy, and NNG's two pairs

    def __init__(self, link: NngLink, address: str, news: What) -> None:
        self.address = address
        self.reason = ""
        self.news: What | None = news
        self.target: tuple[str, int] | str | None = None
        self._link = link
        self._channel: Channel | None = None
        self._dialling: Dialling | None = None
        self._readable = Event(What.READABLE, self)
        self._message: memoryview | None = None
        self._body = 0  # where in the message it begins; 0: there is none
        self._taking = False
        self._room_fd = -1
        self._refused = self._broke_rules = False
        self._broken = False  # the wire; the engine may still hold messages
        self._phase = _OPENING
        self._said_bye = False

    # -- opening ----------

    def dial(self, sock: socket.socket, target: tuple[str, int] | str) -> None:
        """Begin to connect."""
        self.target = target
        code = sock.connect_ex(target)
        if code == errno.EINPROGRESS:
            self.wait(sock, lambda: self._dialled(sock, _error(sock)))
        else:
            self._dialled(sock, code)

    def wait(self, dialling: Dialling, done: Callable[[], None]) -> None:
        """Have `done` called when an attempt to connect has ended."""

        def ended() -> None:
            self._link.unwatch(dialling.fileno())
            self._dialling = None
            done()

        self._dialling = dialling
        events = select.EPOLLIN | select.EPOLLOUT
        self._link.watch(dialling.fileno(), events, ended)

    def _dialled(self, sock: socket.socket, code: int) -> None:
        if code:
            sock.close()
            self.fail(f"cannot dial {self.address}: {os.strerror(code)}")
        else:
            self.start(sock)

    def start(self, connected: Any) -> None:
        """Have the engine take the connection, and greet the peer."""
        try:
            channel = self._channel = self._link.channel(connected)
        except OSError as error:
            self.fail(f"cannot open {self.address}: {error}")
            return
        for fd, events in channel.watches:
            self._link.watch(fd, events, self._watched)
        self._link.read(channel.recv_fd, self)
        channel.send(b"", memoryview(_HELLO))

    def _watched(self) -> None:
        if self._channel is not None:
            self._broken |= self._channel.watched()
        self.notice()

    def notice(self) -> None:
        """Have the next `poll` look at it."""
        self._link.busy.setdefault(self, False)

    def fail(self, reason: str) -> None:
        """Have LOST reported next, unless nobody waits for that."""
        self.reason = self.reason or reason
        if self._phase < _LOST:
            untold = self._phase == _CLOSING or self.news is What.ACCEPTED
            self._phase = _OVER if untold else _LOST
        self.notice()

    def _malformed(self, what: str, *, misfit: bool = False) -> None:
        self._link.malformed += 1
        self._broke_rules = True
        self.fail(f"the peer sent {what}, which no member does")
        if self.news is What.ACCEPTED:  # else LOST tells of it
            self._link.refusals.tell(self.address, self.reason, misfit=misfit)

    # -- messages ----------

    def try_send(
        self, head: bytes | bytearray | memoryview, body: memoryview | None = None
    ) -> bool:
        channel = self._channel
        if self.reason or channel is None or channel.send(head, body):
            return True
        self._wait_for_room(channel)
        return False

    def _wait_for_room(self, channel: Channel) -> None:
        self._refused = True
        self._room_fd = channel.room_fd()
        self._link.watch(self._room_fd, select.EPOLLIN, self.notice)

    def receive(self) -> tuple[bytes, int] | None:
        if self._phase != _OPEN or self._body:
            return None
        message = self._take()
        return message if message is not None and message[0] else None

    def _take(self) -> tuple[bytes, int] | None:
        """The next message; one with an empty head was for the link itself."""
        channel = self._channel
        if channel is None or self._phase >= _LOST:
            return None
        if self._taking:
            self.fail("a message was interrupted while it was received")
            return None
        self._taking = True
        head, nbody = b"", 0
        view = channel.receive()
        if view is None:
            self._taking = False
            return None
        nhead = int.from_bytes(view[:PREFIX_BYTES], "little")
        start = PREFIX_BYTES + nhead
        nbody = len(view) - start
        if nhead > MAX_HEAD_BYTES or not 0 <= nbody <= self._link.chunk_bytes:
            self._malformed(f"{len(view)} bytes with a head of {nhead}")
        elif not nhead:
            self._hear(bytes(view[start : start + len(_HELLO) + 1]))
        else:
            head = bytes(view[PREFIX_BYTES:start])
        if head and nbody:
            self._message, self._body = view, start
        else:
            channel.release()
        self._taking = False
        return head, nbody

    def _hear(self, said: bytes) -> None:
        """What the peer's link said."""
        if said == _BYE:
            self.fail("the peer closed the connection")
        elif said != _HELLO:
            self._malformed(f"{said!r}", misfit=True)

    def receive_body(self, into: memoryview) -> bool:
        if self._message is None:
            return False
        into[:] = self._message[self._body :]
        self.discard_body()
        return True

    def discard_body(self) -> None:
        self._body = 0
        if self._message is not None and self._channel is not None:
            self._message = None
            self._channel.release()

    def describe(self) -> Mapping[str, str]:
        wire = {"wire": self.address.partition(":")[0]}
        return wire if self._channel is None else {**wire, **self._channel.describe()}

    def quiet_seconds(self) -> float | None:
        return None if self._channel is None else self._channel.quiet_seconds()

    # -- events ----------

    def report(self, readable: bool) -> Iterator[Event]:
        """What happened; called when something may have."""
        channel = self._channel
        if channel is not None:
            may_end = self._broken or channel.in_band
            if may_end and self._phase < _LOST and channel.ended():
                self._end(channel)
            if self._phase == _OPENING and readable and self._greeted():
                yield self._open()
            if self._phase == _OPEN:
                if self._refused and channel.has_room():
                    yield self._found_room()
                    readable &= self._phase == _OPEN
                if readable and not self._body:
                    yield self._readable
            elif self._phase == _CLOSING:
                self._wind_up(channel)
        if self._phase >= _LOST and self in self._link.conns:
            told = self._phase == _LOST
            self.drop()
            if told:
                broke = self._broke_rules
                yield Event(What.LOST, self, self.reason, malformed=broke)

    def _greeted(self) -> bool:
        """Take the peer's first message, which says hello."""
        first = self._take()
        if first is None or self._phase != _OPENING:
            return False
        if first[0]:
            self._malformed("something else before it said hello")
            return False
        self._link.strangers.pop(self, None)
        return True

    def _open(self) -> Event:
        assert self.news is not None
        news, self.news, self._phase = self.news, None, _OPEN
        self.notice()
        return Event(news, self)

    def _found_room(self) -> Event:
        self._refused = False
        self._link.unwatch(self._room_fd)
        self.notice()
        return Event(What.WRITABLE, self)

    def _end(self, channel: Channel) -> None:
        if self.news is What.ACCEPTED:
            self._link.malformed += 1  # as port scanners are
            if why := channel.refusal():
                self._link.refusals.tell(self.address, why, misfit=False)
        elif channel.refused():
            self._malformed("what NNG does not accept")
        problem = f": {channel.problem}" if channel.problem else ""
        self.fail(_BREAK + problem)

    # -- closing ----------

    def close(self) -> None:
        if self._phase == _CLOSING or self not in self._link.conns:
            return
        self.reason = self.reason or "closed"
        channel = self._channel
        if self._phase != _OPEN or channel is None:
            self.drop()
            return
        # NNG drops what it has queued when a socket is closed. So the last message is a
        # farewell, and the peer, which has then read everything, breaks the connection.
        self._phase = _CLOSING
        self.discard_body()
        self._link.closing[self] = time.monotonic() + LINGER_SECONDS
        self._wind_up(channel)

    def _wind_up(self, channel: Channel) -> None:
        if not self._said_bye:
            self._said_bye = channel.send(b"", memoryview(_BYE))
            if self._said_bye:
                self._link.unwatch(self._room_fd)
            else:
                self._wait_for_room(channel)
        for _ in range(_BURST):
            if self._take() is None:
                break
            self.discard_body()

    def drop(self) -> None:
        """Free everything at once."""
        if self._phase != _LOST:  # else an interrupt would have that never reported
            self._phase = _OVER
        link = self._link
        link.forget(self)
        self._message = None
        dialling, self._dialling = self._dialling, None
        if dialling is not None:
            link.unwatch(dialling.fileno())
            dialling.close()
        channel, self._channel = self._channel, None
        if channel is not None:
            for fd in (self._room_fd, *(fd for fd, _ in channel.watches)):
                link.unwatch(fd)
            link.unread(channel.recv_fd)
            channel.close()
            link.freeing.append(channel)
        # Python may not look for cycles for a long time.
        with contextlib.suppress(AttributeError):  # an interrupt had this repeated
            del self._readable

    def abandon(self) -> None:
        """Close what is not NNG's in a forked child."""
        if isinstance(self._dialling, socket.socket):
            self._dialling.close()


def _error(sock: socket.socket) -> int:
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
