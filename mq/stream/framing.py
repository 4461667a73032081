"""Messages on a stream socket that never waits.

**On the wire** a message is the size of its head, the size of its body (4 bytes each,
little-endian), the head and the body.

**Sending** is one system call per message. Of a message that the kernel takes only in
part the rest is kept, the head copied, the body by reference until `let_go`; until it
has left, the next message is refused.

**Receiving** is one system call for as many small messages as have arrived, into a
buffer of the connection. A body goes straight to where the mesh wants it. After a large
body, where another one is likely, only the next head is read into the buffer, so that
the body behind it is not copied twice. A call that brings less than it asked for has
emptied the socket, so that no call is made to find nothing.
"""

from __future__ import annotations

import struct
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final

from mq.sigpipe import QUIET
from mq.transport import CHUNK_BYTES, MAX_HEAD_BYTES, Conn

if TYPE_CHECKING:
    from mq.stream.link import StreamLink

SIZES: Final = struct.Struct("<II")
"""What stands before a message."""
_SIZES_BYTES: Final = SIZES.size
_FIRST_BUFFER_BYTES: Final = 16 * 1024
_BUFFER_BYTES: Final = 256 * 1024
_LARGE_BYTES: Final = 64 * 1024
_SIP_BYTES: Final = 4 * 1024
_LOST: Final = "the connection was lost"


def not_open(*arguments: Any) -> int:
    raise BlockingIOError


class Framing(Conn):
    """The messages of one connection, whatever opens and closes it.

    An interrupt inside a call into the socket leaves nobody knowing what it moved:
    `torn` stays set then, and the stream ends there.

    Attributes:
        reason: Why it is lost or closed.
        special: Whether there is more to report than READABLE.
        drained: Whether the socket has been found empty since it last signalled.
        torn: Whether a call into the socket is under way, or was interrupted.
        max_note_bytes: The largest note that the link sends of its own accord, as a
            message without a head; see `_noted`.
    """

    max_note_bytes: ClassVar[int] = 0

    def __init__(self, link: StreamLink, address: str) -> None:
        self.address = address
        self.reason = ""
        self.special = True
        self.drained = False
        self.torn = False
        self._link = link
        self._shut = True  # not open, or lost, or a rest must leave first
        self._rest: list[memoryview] = []
        self._sealed = memoryview(b"")  # what a subclass took and has not sent
        self._borrows = False  # the last of the rest is the caller's memory
        self._aside = bytearray()
        self._refused = False
        self.broke_rules = False
        self._buffer = bytearray(_FIRST_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = self._end = 0  # of what was received and not taken
        self._body = 0  # bytes of the body that are still to be taken
        self._skip = 0  # bytes of a discarded body that are still to come
        self._sips = False
        self._gone = False  # nothing more comes from the socket
        self._exhausted = False  # nor from the buffer
        self._closed = False
        self._chunk_bytes = link.chunk_bytes
        # Both raise BlockingIOError where they would wait, and never move nothing but
        # at the end of the stream.
        self._send: Callable[[Sequence[Any], Sequence[Any], int], int] = not_open
        self._receive_into: Callable[[memoryview], int] = not_open

    # -- sending ----------

    def try_send(
        self, head: bytes | bytearray | memoryview, body: memoryview | None = None
    ) -> bool:
        if self._shut or self.torn:
            return self._refuse()
        nhead = len(head)
        self.torn = True
        try:
            if body is None:
                total = _SIZES_BYTES + nhead
                sent = self._send((SIZES.pack(nhead, 0), head), (), QUIET)
            else:
                nbody = body.nbytes
                total = _SIZES_BYTES + nhead + nbody
                sent = self._send((SIZES.pack(nhead, nbody), head, body), (), QUIET)
        except BlockingIOError:
            self.torn = False
            self._refused = True
            self._await_room()
            return False
        except OSError as error:
            self.torn = False
            self._cut(f"{_LOST}: {error}")
            return True
        if sent != total or self._sealed:
            self._keep_rest(sent, head, body)
        self.torn = False
        return True

    def _refuse(self) -> bool:
        """Why nothing can be sent at the moment: True where it never can."""
        if self.torn:
            self.end("a call was interrupted in the middle of a message")
        if self.reason:
            return True
        self._refused = True
        return False

    def _keep_rest(
        self,
        sent: int,
        head: bytes | bytearray | memoryview,
        body: memoryview | None,
    ) -> None:
        """The kernel took only so much of a message; the rest leaves when it can."""
        nbody = 0 if body is None else body.nbytes
        front = SIZES.pack(len(head), nbody) + head
        if sent < len(front):
            self._rest.append(memoryview(front)[sent:])
        if body is not None and sent < len(front) + nbody:
            self._rest.append(body[max(0, sent - len(front)) :])
            self._borrows = True
        self._shut = True
        self._await_room()

    def let_go(self) -> None:
        if self._borrows and self._rest:
            body = self._rest[-1]
            if len(self._aside) < len(body):
                try:
                    self._aside = bytearray(max(len(body), CHUNK_BYTES))
                except MemoryError as error:
                    self._cut(f"no memory for what was to be sent: {error}")
                    self._borrows = False
                    return
            copy = memoryview(self._aside)[: len(body)]
            copy[:] = body
            self._rest[-1] = copy
        self._borrows = False

    def flush(self) -> None:
        """The socket has room: send the rest, then let messages be tried again."""
        if self.torn:
            self._refuse()
        if self._gone:
            return
        rest = self._rest
        if rest or self._sealed:
            self.torn = True
            try:
                sent = self._send(rest, (), QUIET)
                while rest and sent >= len(rest[0]):
                    sent -= len(rest.pop(0))
                self._borrows &= bool(rest)
                if rest:
                    rest[0] = rest[0][sent:]
            except BlockingIOError:
                pass
            except OSError as error:
                self._cut(f"{_LOST}: {error}")
            self.torn = False
        if not (rest or self._sealed or self.reason):
            self._shut = False
            self._found_room()

    def _cut(self, reason: str) -> None:
        """Nothing more can be sent; what has arrived is still read."""
        self.reason = self.reason or reason
        self._shut = True
        self._rest.clear()
        self._found_room()
        self._hang_up()

    @abstractmethod
    def _hang_up(self) -> None:
        """Have the socket signal its end, whatever became of it."""

    @abstractmethod
    def _await_room(self) -> None:
        """Have `flush` called when the socket has room."""

    @abstractmethod
    def _found_room(self) -> None:
        """Nothing waits for room any more."""

    # -- receiving ----------

    def receive(self) -> tuple[bytes, int] | None:
        if self._body or self._closed:
            return None
        needed = _SIZES_BYTES
        while True:
            start, end = self._start, self._end
            if end - start >= _SIZES_BYTES:
                nhead, nbody = SIZES.unpack_from(self._buffer, start)
                if not nhead and 0 < nbody <= self.max_note_bytes:
                    stop = start + _SIZES_BYTES + nbody
                    if stop <= end:
                        self._start = stop
                        self._noted(bytes(self._view[stop - nbody : stop]))
                        if self._closed:
                            return None
                        continue
                    if self.drained or not self._fill(_SIZES_BYTES + nbody):
                        self._idle()
                        return None
                    continue
                if not 0 < nhead <= MAX_HEAD_BYTES or nbody > self._chunk_bytes:
                    self.malformed(f"a message of {nhead} + {nbody} bytes")
                    return None
                begin = start + _SIZES_BYTES
                stop = begin + nhead
                if stop <= end:
                    head = self._view[begin:stop].tobytes()
                    self._body = nbody
                    self._sips = nbody >= _LARGE_BYTES
                    self._start = stop
                    return head, nbody
                needed = _SIZES_BYTES + nhead
            if self.drained or not self._fill(needed):
                self._idle()
                return None

    def _noted(self, note: bytes) -> None:
        """The peer's link said something that is not for the mesh."""
        self.malformed(f"a note of {len(note)} bytes")

    def receive_body(self, into: memoryview) -> bool:
        left = self._body
        at = len(into) - left
        if have := min(self._end - self._start, left):
            into[at : at + have] = self._view[self._start : self._start + have]
            self._start += have
            at += have
            self._body = left = left - have
        while left and not self.drained:
            count = self._take(into[at:] if at else into)
            if not count:
                break
            at += count
            self._body = left = left - count
        if left:
            self._idle()
        return not left

    def discard_body(self) -> None:
        left, self._body = self._body, 0
        have = min(self._end - self._start, left)
        self._start += have
        self._skip = left - have

    def _fill(self, needed: int) -> bool:
        """Receive more into the buffer; whether anything came.

        Args:
            needed: Bytes from the first one not taken that there must be room for.
        """
        start, end = self._start, self._end
        capacity = len(self._buffer)
        if start == end:
            start = end = self._start = self._end = 0
        if end == capacity or start + needed > capacity:
            self._make_room(needed)
            end, capacity = self._end, len(self._buffer)
        limit = min(end + _SIP_BYTES, capacity) if self._sips else capacity
        count = self._take(self._view[end:limit])
        if not count:
            return False
        self._end = end + count
        if not self.drained:  # there is more
            self._sips = False
            if not start and capacity < _BUFFER_BYTES:
                self._make_room(4 * capacity)
        if self._skip:
            skipped = min(self._skip, count)
            self._skip -= skipped
            self._start += skipped
        return True

    def _make_room(self, needed: int) -> None:
        """Move what is in the buffer to its front, and enlarge it where it must be."""
        rest = self._view[self._start : self._end]
        if needed > len(self._buffer):
            self._buffer = bytearray(max(needed, 4 * len(self._buffer)))
            self._view = memoryview(self._buffer)
        self._view[: len(rest)] = rest
        self._start, self._end = 0, len(rest)

    def _take(self, target: memoryview) -> int:
        """Receive from the socket; 0: nothing, now or ever."""
        if self.torn:
            self.end("a call was interrupted in the middle of a message")
        if self._gone:
            self.drained = True
            return 0
        self.torn = True
        try:
            count = self._receive_into(target)
        except BlockingIOError:
            count = -1
        except OSError as error:
            self.end(f"{_LOST}: {error}")
            count = -1
        self.torn = False
        if count < len(target):
            self.drained = True
            if not count:
                self.end("the peer closed the connection")
        return max(0, count)

    @abstractmethod
    def _idle(self) -> None:
        """There is no message to receive until the socket signals."""

    # -- the end ----------

    @abstractmethod
    def end(self, reason: str) -> None:
        """Nothing more comes from the socket: LOST follows what is in the buffer."""

    def malformed(self, what: str) -> None:
        """The peer broke the rules: nothing more of it is read."""
        self.turn_away(f"the peer sent {what}, which no member does")

    def turn_away(self, reason: str) -> None:
        """As `stop_reading`, of who has broken the rules."""
        self._link.malformed += 1
        self.broke_rules = True
        self.stop_reading(reason)

    def stop_reading(self, reason: str) -> None:
        """Nothing more of the peer is read, whatever it has sent."""
        self._start = self._end = self._body = self._skip = 0
        self._exhausted = True
        self.end(reason)
