"""A connection: batches of messages, each one call of the peer's `deliver`.

**Sending.** A few calls are under way at a time; what comes meanwhile joins the next.
A call is answered on reception, as long as the receiver's backlog is small: so the
bytes ahead of the wire are bounded, and a peer that does not read is refused.

**Receiving.** Calls arrive in threads of TensorPipe's, with several of them in any
order; they are numbered and put in order in the mesh's thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from mq.devices import Piece, leaving
from mq.transport import MAX_HEAD_BYTES, Conn, Event, What
from transports import _torchrpc_calls as calls
from transports._torchrpc_bodies import Body, is_tensor, outgoing, size_of
from transports._torchrpc_descriptors import Promise
from transports._torchrpc_pieces import unwrap, weight, wrapped

if TYPE_CHECKING:
    from transports._torchrpc_control import Control, Greeting
    from transports.torchrpc import TorchRpcLink

CALLS: Final = 4
"""Calls under way at a time: enough to keep the wire busy, few enough to batch."""
BATCH_BYTES: Final = 512 * 1024
"""A batch is closed once it has so much, but for its last message."""
GRACE_SECONDS: Final = 2.0
"""How long what was sent before a goodbye may take to arrive after it."""


class RpcConn(Conn):
    """One end of a connection, from its greeting on.

    Attributes:
        promise: The descriptors that TensorPipe may take for it.
        refused: Whether it broke since the ends do not fit.
    """

    keeps_body: ClassVar[bool] = True

    def __init__(self, link: TorchRpcLink, address: str, control: Control) -> None:
        self.address = address
        self.control = control
        self.token = link.new_token()
        self.reason = ""
        self.closed = self.refused = False
        self.promise: Promise | None = None
        self.whole_bytes = link.chunk_bytes
        self._link = link
        self._agent = link.agent
        self._first: What | None = None
        self._peer: calls.Peer | None = None
        self._theirs = b""
        self._greeting: Greeting | None = None
        # sending
        self._unsent: deque[tuple[bytes, Body, int]] = deque()
        self._calls: deque[tuple[Any, int]] = deque()
        self._watched = False
        self._ahead = self._sent = 0
        self._issuing = False
        self._refused = False
        self._unheard_at: float | None = None
        # receiving
        self._lock = threading.Lock()
        self._arrived: deque[tuple[int, list[bytes], list[Body]]] = deque()
        self._backlog = 0
        self._held: list[Any] = []
        self._early: dict[int, tuple[list[bytes], list[Body]]] = {}
        self._expected = 0
        self._inbox: deque[tuple[bytes, Body]] = deque()
        self._body: Body = None
        self._final: int | None = None
        self._final_at = 0.0

    # -- greeting and end ----------

    def expect(self) -> None:
        """The peer will learn the token: its calls may come before its greeting."""
        calls.receivers[self.token] = self

    def begin(self, greeting: Greeting, first: What) -> None:
        """Both ends know each other: report `first`, and carry messages.

        Raises:
            OSError: The peer cannot be added to the agent.
        """
        self.promise = self.promise or self._agent.descriptors.promise()
        pairs = self._link.pairs(greeting)
        try:
            self._peer = self._agent.peer(
                greeting.agent, greeting.url, greeting.worker, pairs
            )
        except BaseException:
            self.promise.end(met=False)
            raise
        self.devices = self._link.carried(greeting, self._peer.mapped)
        self._theirs = bytes.fromhex(greeting.token)
        self._greeting = greeting
        self._peer.listeners[self] = self._peer_lost
        self._first = first
        self._link.notice(self)

    def describe(self) -> Mapping[str, str]:
        return (
            {}
            if self._greeting is None
            else self._link.describe_peer(self._greeting, self.devices)
        )

    @property
    def unanswered(self) -> bool:
        """Whether calls are under way; their tensors are in use."""
        self._settle()
        self._watch()
        return bool(self._calls)

    def _peer_lost(self, reason: str) -> None:
        self.reason = self.reason or f"TensorPipe lost the peer: {reason}"
        self._link.notice(self)

    def fail(self, reason: str) -> None:
        """The connection is broken; LOST comes once what arrived has been read."""
        self.reason = self.reason or reason
        self._link.notice(self)

    def goodbye(self, count: int) -> None:
        """The peer has closed, after so many batches."""
        self._final = count
        self._final_at = time.monotonic()
        self._link.notice(self)

    def control_ended(self) -> None:
        """The peer's socket has ended, after its goodbye or without."""
        if self._final is None:
            self.fail(f"the connection was lost ({self.control.ended})")

    # -- sending ----------

    def try_send(
        self, head: bytes | bytearray | memoryview, body: memoryview | None = None
    ) -> bool:
        nbytes = len(head) + (0 if body is None else body.nbytes)
        if nbytes > self._link.largest:
            self.fail(f"a message of {nbytes} bytes is outside the limits")
            return True
        return self._send(bytes(head), nbytes, body)

    def try_send_piece(self, head: bytes, piece: Piece) -> bool:
        return self._send(head, len(head) + weight(piece), piece)

    def _send(self, head: bytes, nbytes: int, body: memoryview | Piece | None) -> bool:
        if self._peer is None or self.reason or self.closed:
            return True
        if self._issuing:  # a Ctrl-C came in the middle of a call
            self.fail("a message was interrupted while it was sent")
            return True
        if not 0 < len(head) <= MAX_HEAD_BYTES:
            self.fail(f"a head of {len(head)} bytes is outside the limits")
            return True
        if self._calls:
            self._settle()
        if self._ahead and self._ahead + nbytes > self._link.max_ahead:
            self._refused = True
            self._watch()
            return False
        if not isinstance(body, Piece):
            body = outgoing(body)
        self._unsent.append((head, body, nbytes))
        self._ahead += nbytes
        self._flush(CALLS)
        if self._unsent:
            self._watch()
        return True

    def _flush(self, most: int) -> None:
        """Send what waits, as far as so many calls may be under way."""
        while self._unsent and len(self._calls) < most and not self.reason:
            heads: list[bytes] = []
            bodies: list[Body] = []
            nbytes = 0
            while self._unsent and nbytes < BATCH_BYTES:
                head, body, size = self._unsent.popleft()
                heads.append(head)
                bodies.append(body)
                nbytes += size
            self._issue(heads, bodies, nbytes)

    def _issue(self, heads: list[bytes], bodies: list[Body], nbytes: int) -> None:
        assert self._peer is not None
        bodies, pieces = wrapped(bodies)
        arguments = (self._theirs, self._sent, heads, bodies)
        with_tensors = bool(pieces) or any(map(is_tensor, bodies))
        self._issuing = True
        try:
            with leaving(pieces) if pieces else nullcontext():
                call = self._peer.call(calls.deliver, arguments, with_tensors)
            self._calls.append((call, nbytes))
            if self.promise is not None and self.promise.call is None:
                self.promise.call = call
        except RuntimeError as error:
            self.fail(f"TensorPipe cannot reach the peer: {error}")
        self._sent += 1
        self._issuing = False

    def _watch(self) -> None:
        """Have the link look here when the oldest call is answered.

        Only where something waits for that: a callback runs Python in a thread of
        TensorPipe's, just when the mesh's thread wants to run.
        """
        if self._calls and not self._watched:
            self._watched = True
            self._calls[0][0].add_done_callback(self._answered)

    def _answered(self, future: Any) -> None:
        """In a thread of TensorPipe's, or within `_watch`."""
        self._watched = False
        self._link.notice(self)

    def _settle(self) -> None:
        """Take note of the answers, in the order of the calls."""
        while self._calls and self._calls[0][0].done():
            future, nbytes = self._calls.popleft()
            self._ahead -= nbytes
            problem = calls.failure(future)
            if problem:
                if self._peer is not None:
                    # So that the next dial takes a new connection.
                    self._peer.fail(problem)
                self.fail(f"TensorPipe lost the peer: {problem}")
            elif not future.value():
                # Its goodbye, which says how much to wait for, may still be coming.
                self._unheard_at = self._unheard_at or time.monotonic()

    # -- receiving ----------

    def arrive(self, sequence: int, heads: Any, bodies: Any) -> Any:
        """Take a batch; in a thread of TensorPipe's, as little as can be."""
        link = self._link
        if self.promise is not None:
            self.promise.heard = True
        known = unwrap(bodies, link.devices, link.piece_bytes)
        nbytes = size_of(heads, bodies, link.chunk_bytes) if known else None
        if nbytes is None or type(sequence) is not int:
            link.malformed += 1
            self.fail("the peer sent what no member does")
            return calls.done(False)
        answer = None
        nbytes += sum(weight(body) for body in bodies if isinstance(body, Piece))
        with self._lock:
            if self.closed:
                return calls.done(False)
            self._backlog += nbytes
            if self._backlog > link.max_ahead:
                answer = calls.Future[bool]()
                self._held.append(answer)
            self._arrived.append((sequence, heads, bodies))
        link.notice(self)
        return answer or calls.done(True)

    def _sort(self) -> bool:
        """Put what has arrived in order; whether a message can be taken."""
        while self._arrived:
            sequence, heads, bodies = self._arrived.popleft()
            self._early[sequence] = (heads, bodies)
        while (batch := self._early.pop(self._expected, None)) is not None:
            self._inbox.extend(zip(*batch, strict=True))
            self._expected += 1
        return bool(self._inbox) and self._body is None

    def receive(self) -> tuple[bytes, int] | None:
        if self.closed or not (self._inbox or self._sort()) or self._body is not None:
            return None
        head, self._body = self._inbox.popleft()
        nbody = 0 if self._body is None else len(self._body)
        with self._lock:
            self._backlog -= len(head) + weight(self._body)
            room = 2 * self._backlog <= self._link.max_ahead
            held, self._held = (self._held, []) if room else ([], self._held)
        self._answer(held, True)
        return head, nbody

    def _answer(self, held: list[Any], value: bool) -> None:
        if self._agent.alive:  # else it would crash
            for future in held:
                future.set_result(value)

    def receive_body(self, into: memoryview) -> bool:
        body, self._body = self._body, None
        if body is None:
            return False
        content = body if isinstance(body, bytes) else body.numpy()
        # NumPy copies without the GIL, which the next call needs.
        np.frombuffer(into, np.uint8)[:] = np.frombuffer(content, np.uint8)
        return True

    def take_body(self) -> memoryview | None:
        body = self._body
        if body is None or isinstance(body, bytes | Piece):
            return None
        self._body = None
        return memoryview(body.numpy())

    @property
    def holds_piece(self) -> bool:  # type: ignore[override]
        return isinstance(self._body, Piece)

    def take_piece(self) -> Piece:
        piece, self._body = self._body, None
        assert isinstance(piece, Piece)  # asked for where `holds_piece`
        return piece

    def discard_body(self) -> None:
        self._body = None

    # -- what happened ----------

    def report(self) -> Iterator[Event]:
        """What happened to this end; it stays noticed while something is left."""
        noticed = self._link.noticed
        while True:
            noticed.pop(self, None)  # before the look: other threads add to it
            if self.closed or (self._peer is None and not self.reason):
                return  # an answer came late, or a call before the greeting
            event = self._next_event()
            if event is None:
                break
            noticed[self] = None
            yield event
            if event.what is What.READABLE and (self._body is not None or self._sort()):
                return  # the mesh comes back, after others had their turn
        if self._body is None and self._over():
            self._shut()
            yield Event(What.LOST, self, self.reason, self.refused)

    def _next_event(self) -> Event | None:
        if self._first is not None:
            first, self._first = self._first, None
            return Event(first, self)
        self._settle()
        self._flush(CALLS)
        if self._refused or self._unsent:
            self._watch()
        if self._refused and 2 * self._ahead <= self._link.max_ahead:
            self._refused = False
            if not self.reason:
                return Event(What.WRITABLE, self)
        return Event(What.READABLE, self) if self._sort() else None

    def _over(self) -> bool:
        """Whether the connection has ended and everything of it was read."""
        now = time.monotonic()
        if self._unheard_at is not None and self._final is None and not self.reason:
            if now - self._unheard_at < GRACE_SECONDS:
                self._link.look_again(self)
            else:
                self.reason = "the peer does not know this connection"
        if self._final is not None and not self.reason:
            arrived = self._expected >= self._final
            if arrived or now - self._final_at > GRACE_SECONDS:
                self.reason = "the peer closed the connection"
            else:
                self._link.look_again(self)
        return bool(self.reason)

    def _shut(self) -> None:
        with self._lock:
            self.closed = True
            held, self._held = self._held, []
            self._arrived.clear()
        calls.receivers.pop(self.token, None)
        if self.promise is not None:
            self.promise.end(met=self._peer is not None)
        if self._peer is not None:
            self._peer.listeners.pop(self, None)
        self._answer(held, False)
        self._inbox.clear()
        self._unsent.clear()
        self._early.clear()
        self._body = None
        self._link.forget(self)

    def close(self) -> None:
        if self.closed:
            return
        if self._peer is not None and not self.reason and not self._issuing:
            self._flush(1 << 30)
            self.control.send({"goodbye": self._sent})
        self.reason = self.reason or "closed"
        self._shut()
