"""A connection: batches of messages, each a call of the peer's `deliver`, or an answer.

**Sending.** A few calls are under way at a time; what comes meanwhile joins the next.
A call is answered on reception, as long as the receiver's backlog is small: so the
bytes ahead of the wire are bounded, and a peer that does not read is refused. But the
last one may wait for a batch the other way, and then that batch is its answer.

**Receiving.** Calls arrive in threads of TensorPipe's, with several of them in any
order; they are numbered and put in order in the mesh's thread (`_torchrpc_arrivals`).
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

from mq.devices import Piece, leaving
from mq.transport import MAX_HEAD_BYTES, Event, What
from transports import _torchrpc_calls as calls
from transports._torchrpc_arrivals import GRACE_SECONDS, KEPT_BYTES, Arrivals
from transports._torchrpc_bodies import Body, is_plain, is_tensor, outgoing
from transports._torchrpc_descriptors import Promise
from transports._torchrpc_lanes import has_parcels
from transports._torchrpc_outboxes import Inline, Parcel
from transports._torchrpc_pieces import is_small, weight, wrapped
from transports._torchrpc_reading import ReadingConn
from transports._torchrpc_signs import Signs
from transports._torchrpc_under_way import UnderWay

if TYPE_CHECKING:
    from transports._torchrpc_control import Control, Greeting
    from transports.torchrpc import TorchRpcLink

CALLS: Final = 4
"""Calls under way at a time: enough to keep a host busy, few enough to batch."""
BATCH_BYTES: Final = 512 * 1024
"""A batch is closed once it has so much, but for its last message. To another host it
leaves then, however many calls are under way: a long wire holds more than a few."""


class RpcConn(ReadingConn):
    """One end of a connection, from its greeting on.

    Attributes:
        lane: Its own way from GPU to GPU; None: it has none.
        promise: The descriptors that TensorPipe may take for it.
        refused: Whether it broke since the ends do not fit.
        signs: Of life, beside calls that take long.
        whom: The address that was dialled, or the agent of who has dialled.
    """

    def __init__(self, link: TorchRpcLink, address: str, control: Control) -> None:
        self.address = address
        self.control = control
        self.token = secrets.token_bytes(16)  # what the peer must say
        self.reason = self.whom = ""
        self.refused = False
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
        self._calls = UnderWay(self.notice)
        self.signs = Signs(self._calls)
        self._ahead = self._waiting = self._sent = 0
        self._issuing = self._refused = self._is_far = False
        self._unheard_at: float | None = None
        # Whether calls may wait for a batch the other way, and any of theirs got one.
        self._may_wait = self._has_answered = False
        # receiving
        self._arrivals = Arrivals(self._agent, link.max_ahead, self.notice)
        sharing = link.sharing
        self.lane = None if sharing is None else sharing.lane(self, self._arrivals)

    # -- greeting and end ----------

    def expect(self) -> None:
        """The peer will learn the token: its calls may come before its greeting."""
        calls.receivers[self.token] = self

    def begin(self, greeting: Greeting, first: What) -> None:
        """Both ends know each other: report `first`, and carry messages.

        Raises:
            OSError: The peer is gone, or cannot be added, or its memory not mapped.
        """
        self._is_far = not self.control.is_within_host
        self.promise = self.promise or self._agent.descriptors.promise()
        self.whom = self.whom or greeting.agent
        pairs = self._link.pairs(greeting)
        try:
            self._peer = self._agent.peer(
                greeting.agent, greeting.url, greeting.worker, pairs
            )
            self.devices = self._link.carried(greeting, self._peer.mapped)
            if self.lane is not None:
                mapped = self._peer.mapped
                self.lane.meet(greeting, self.devices, mapped, self.whom)
        except BaseException:
            self.promise.end(met=self._peer is not None)
            raise
        self._theirs = bytes.fromhex(greeting.token)
        self._greeting = greeting
        self.signs.url = greeting.url
        # A graceful shutdown of an agent of the application's waits for all answers.
        self._may_wait = not (self._agent.worker or greeting.worker)
        self._peer.listeners[self] = self._peer_lost
        self._first = first
        self._link.notice(self)

    def describe(self) -> Mapping[str, str]:
        if self._greeting is None or self._peer is None:
            return {}
        return self._link.describe_peer(self._greeting, self.devices, self._peer.mapped)

    def quiet_seconds(self) -> float | None:
        if self.lane is not None and self.lane.is_busy:
            return 0.0  # all that has come after it waits for a GPU of ours
        return self.signs.quiet_seconds()

    @property
    def unanswered(self) -> bool:
        """Whether calls are under way; their tensors are in use."""
        self._settle()
        self._calls.watch()
        if not self._calls and self.lane is not None and self.closed:
            self.lane.forget()
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
        self._arrivals.end_at(count)
        self._link.notice(self)

    def control_ended(self) -> None:
        """The peer's socket has ended, after its goodbye or without."""
        if not self._arrivals.has_end:
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
        if not 0 < len(head) <= MAX_HEAD_BYTES:
            self.fail(f"a head of {len(head)} bytes is outside the limits")
            return True
        if self._calls:
            self._settle()
        if self._ahead and self._ahead + nbytes > self._link.max_ahead:
            self._refused = True
            self._calls.watch()
            return False
        if not isinstance(body, Piece):
            sent = outgoing(body)
        elif self.lane is None:
            sent = body
        elif (sent := self.lane.pack(body)) is None:
            self._refused = True
            return False
        self._unsent.append((head, sent, nbytes))
        self._ahead += nbytes
        self._waiting += nbytes
        self._flush(CALLS)
        if self._unsent:
            self._calls.watch()
        return True

    def _flush(self, most: int) -> None:
        """Send what waits, as far as so many calls may be under way."""
        if self._issuing:  # a Ctrl-C came in the middle of a call
            self.fail("a message was interrupted while it was sent")
        while self._unsent and not self.reason:
            answers = self._arrivals.keeps and is_plain(self._unsent[0][1])
            leaves = answers or (self._is_far and self._waiting >= BATCH_BYTES)
            if not leaves and len(self._calls) >= most:
                return
            if not self._is_ready(self._unsent[0][1]):
                return
            self._issuing = True
            heads: list[bytes] = []
            bodies: list[Body] = []
            nbytes = 0
            while self._unsent and nbytes < BATCH_BYTES:
                if answers and not is_plain(self._unsent[0][1]):
                    break
                if heads and not self._is_ready(self._unsent[0][1]):
                    break
                head, body, size = self._unsent.popleft()
                heads.append(head)
                bodies.append(body)
                nbytes += size
            self._waiting -= nbytes
            if answers and self._answer(heads, bodies):
                self._ahead -= nbytes
            else:
                self._issue(heads, bodies, nbytes)
            self._sent += 1
            self._issuing = False

    def _is_ready(self, body: Body) -> bool:
        """Whether it can leave; where not, `notice` is called once it may."""
        if self.lane is None or not isinstance(body, Parcel | Inline):
            return True
        ready = self.lane.is_ready(body)
        self._calls.waiting = None if ready else body
        return ready

    def _answer(self, heads: list[bytes], bodies: list[Body]) -> bool:
        self._has_answered = True
        return self._arrivals.answer((self._sent, heads, wrapped(bodies)[0]))

    def _issue(self, heads: list[bytes], bodies: list[Body], nbytes: int) -> None:
        assert self._peer is not None
        bodies, pieces, parcels = wrapped(bodies)
        with_tensors = bool(pieces) or any(map(is_tensor, bodies))
        waits = nbytes <= KEPT_BYTES and not pieces and self._may_call_wait()
        if parcels and self.lane is not None:  # it keeps their places for so long
            waits = waits and len(parcels) == 1 and self.lane.is_roomy()
        arguments = (self._theirs, self._sent, heads, bodies, waits)
        try:
            with leaving(pieces) if pieces else nullcontext():
                future = self._peer.call(calls.deliver, arguments, with_tensors)
        except RuntimeError as error:
            self.fail(f"TensorPipe cannot reach the peer: {error}")
            return
        self._calls.add(future, nbytes, pieces, parcels)
        if self.promise is not None and self.promise.call is None:
            self.promise.call = future
        if waits or parcels:  # others may wait for the places of these
            self._calls.watch()

    def _may_call_wait(self) -> bool:
        """Whether a batch may come as an answer: it waits for no room here.

        Not before each end was called, and so has the descriptors for that.
        """
        known = self.promise is not None and self.promise.count() == 0
        return self._may_wait and known and self._arrivals.has_room

    def notice(self, _: object = None) -> None:
        """Have the mesh's thread look at this connection; from any thread."""
        self._link.notice(self)

    def _settle(self) -> None:
        """Take note of the answers."""
        for call in self._calls.answered():
            problem = calls.failure(call.future)
            if problem:
                if self._peer is not None:
                    # So that the next dial takes a new connection.
                    self._peer.fail(problem)
                self.fail(f"TensorPipe lost the peer: {problem}")
            elif type(answer := call.future.value()) is tuple and len(answer) == 3:
                self._take_answer(*answer)
            elif answer is not True and answer is not False:
                self.malformed()
            elif not answer:
                # Its goodbye, which says how much to wait for, may still be coming.
                self._unheard_at = self._unheard_at or time.monotonic()
            for parcel in () if problem else call.parcels:
                parcel.give_back()
            # Last, so that an interrupt loses no batch.
            self._ahead -= call.nbytes
            self._calls.remove(call)

    # -- receiving ----------

    def arrive(self, sequence: int, heads: Any, bodies: Any, waits: Any) -> Any:
        """Take a batch; in a thread of TensorPipe's, as little as can be."""
        if self.promise is not None:
            self.promise.heard = True
        batch = sequence, heads, bodies
        if self.lane is not None and has_parcels(bodies):
            return self.lane.take(batch, waits is True)
        if (nbytes := self.weigh(*batch)) is None:
            return calls.done(False)
        return self._arrivals.take(batch, nbytes, waits is True)

    def _take_answer(self, sequence: Any, heads: Any, bodies: Any) -> None:
        if type(bodies) is not list or not all(map(is_small, bodies)):
            return self.malformed()
        bodies = list(bodies)  # for after an interrupt the answer is looked at again
        nbytes = self.weigh(sequence, heads, bodies)
        if nbytes is not None:
            self._arrivals.answered((sequence, heads, bodies), nbytes)

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
            yield Event(What.LOST, self, self.reason, self.refused, self.broke_rules)

    def _next_event(self) -> Event | None:
        if self._first is not None:
            first, self._first = self._first, None
            return Event(first, self)
        if self.lane is not None:
            self.lane.settle()
        self._settle()
        self._flush(CALLS)
        if self._refused or self._unsent:
            self._calls.watch()
        has_place = self.lane is None or self.lane.has_place
        if self._refused and has_place and 2 * self._ahead <= self._link.max_ahead:
            self._refused = False
            if not self.reason:
                return Event(What.WRITABLE, self)
        return Event(What.READABLE, self) if self._sort() else None

    def _over(self) -> bool:
        """Whether the connection has ended and everything of it was read."""
        now, has_end = time.monotonic(), self._arrivals.has_end
        if self._unheard_at is not None and not has_end and not self.reason:
            if now - self._unheard_at < GRACE_SECONDS:
                self._link.look_again(self)
            else:
                self.reason = "the peer does not know this connection"
        if has_end and not self.reason:
            is_busy = self.lane is not None and self.lane.is_busy
            if self._arrivals.are_over(now) and not is_busy:
                self.reason = "the peer closed the connection"
            else:
                self._link.look_again(self)
        return bool(self.reason)

    def _shut(self) -> None:
        self._arrivals.close()
        if self.lane is not None:  # before it counts as done, for a Ctrl-C may come
            self.lane.close()
            if self.reason != "closed" or not self._calls:
                self.lane.forget()  # else the peer goes on copying what was sent
        self.closed = True
        calls.receivers.pop(self.token, None)
        if self.promise is not None:
            self.promise.end(met=self._peer is not None)
        if self._peer is not None:
            self._peer.listeners.pop(self, None)
        self._unsent.clear()
        self._body = None
        self._link.forget(self)

    def close(self) -> None:
        if self.closed:
            return
        if self._peer is not None and not self.reason and not self._issuing:
            self._flush(1 << 30)
            if self._has_answered and not self.reason:
                # Nobody tells when an answer has left, so this one waits at the peer
                # until it has read everything up to the goodbye.
                self._issue([], [], 0)
                self._sent += 1
            self.control.send({"goodbye": self._sent})
        self.reason = self.reason or "closed"
        self._shut()
