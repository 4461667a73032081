"""What arrives on a connection: batches in order, and what their calls wait for.

A call is answered when it arrives, with two exceptions. While much is unread it is
answered when there is room again. And of the calls that allow it the newest waits for
the next batch to the peer, which is its answer: TensorPipe has the same work with an
answer as with a call, so a message and the answer to it are two ways through it, not
four. The wait ends in any case with the next call and with the connection.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from mq.transport import MAX_HEAD_BYTES
from transports import _torchrpc_calls as calls
from transports._torchrpc_bodies import Body
from transports._torchrpc_pieces import weight

if TYPE_CHECKING:
    from transports._torchrpc_agent import Agent

KEPT_BYTES: Final = 2 * MAX_HEAD_BYTES + (2 << 20)
"""The largest batch whose call may wait for a batch the other way. It counts among what
its sender has ahead of the wire meanwhile, where the largest message must still fit."""

GRACE_SECONDS: Final = 2.0
"""How long what was sent before a goodbye may take to arrive after it."""

Batch: TypeAlias = "tuple[int, list[bytes], list[Body]]"
"""Its number, and the heads and bodies of its messages."""


class Arrivals:
    """The receiving side of a connection; calls come to it in threads of TensorPipe's.

    Args:
        agent: Whose calls they are.
        most: How many bytes may be unread before calls wait for room.
        notice: Wakes the mesh's thread, from any thread.

    Attributes:
        expected: The number of the next batch.
    """

    def __init__(self, agent: Agent, most: int, notice: Callable[[], None]) -> None:
        self.expected = 0
        self._agent = agent
        self._most = most
        self._notice = notice
        self._lock = threading.Lock()
        self._closed = False
        self._final: int | None = None
        self._final_at = 0.0
        self._backlog = 0
        self._held: list[Any] = []
        self._kept: Any = None
        self._arrived: deque[Batch] = deque()
        self._early: dict[int, Batch] = {}
        self._messages: deque[tuple[bytes, Body]] = deque()

    # -- in threads of TensorPipe's ----------

    def take(self, batch: Batch, nbytes: int, keep: bool) -> Any:
        """A call has brought a batch.

        Args:
            keep: Whether the call may wait for a batch the other way.

        Returns:
            A future of the answer: True, False where the connection is closed, or a
            batch.
        """
        # Before the lock is taken: what is made may begin a collection of garbage, and
        # a destructor call a queue, which waits for the mesh's thread.
        scarce = 2 * (self._backlog + nbytes) > self._most
        future = calls.Future[Any]() if keep or scarce else None
        answer = None
        with self._lock:
            if self._closed:
                return calls.done(False)
            self._backlog += nbytes
            self._agent.heap.received += nbytes
            before, self._kept = self._kept, None
            if future is not None and self._backlog > self._most:
                answer = future
                self._held.append(answer)
            elif keep:
                answer = self._kept = future
            self._arrived.append(batch)
        self._notice()
        if before is not None and not before.done():
            before.set_result(True)
        return answer or calls.done(True)

    # -- in the mesh's thread ----------

    def take_late(self, batch: Batch, nbytes: int, keep: bool, answer: Any) -> None:
        """The same of a batch whose call waits for this future."""
        done = []
        with self._lock:
            if not self._closed:
                self._backlog += nbytes
                self._arrived.append(batch)
            if self._kept is not None:
                done.append(self._kept)
            self._kept = None
            if not self._closed and self._backlog > self._most:
                self._held.append(answer)
            elif not self._closed and keep:
                self._kept = answer
            else:
                done.append(answer)
        self.resolve(done, not self._closed)

    @property
    def keeps(self) -> bool:
        """Whether a call waits for a batch."""
        return self._kept is not None

    @property
    def has_room(self) -> bool:
        """Whether the peer may send more than what it gets an answer for."""
        return 2 * self._backlog <= self._most

    def answer(self, batch: Batch) -> bool:
        """Answer the call that waits for a batch; False: none does any more."""
        return self._answer(batch)

    def _answer(self, value: Batch | bool) -> bool:
        # It counts as waiting until it was answered: after an interrupt `close` answers
        # it. With the lock, for the next call answers it, too.
        with self._lock:
            kept = self._kept
            waits = kept is not None and not kept.done() and self._agent.alive
            if waits:  # an agent that is dead would crash
                calls.resolve(kept, value)
            self._kept = None
        return waits

    def answered(self, batch: Batch, nbytes: int) -> None:
        """The answer to a call has brought a batch; the same one again is nothing."""
        if batch[0] < self.expected or batch[0] in self._early or self._closed:
            return
        self._early[batch[0]] = batch
        with self._lock:
            self._backlog += nbytes

    def sort(self) -> bool:
        """Put what has arrived in order; whether there is a message."""
        while self._arrived:
            batch = self._arrived.popleft()
            self._early[batch[0]] = batch
        while (found := self._early.pop(self.expected, None)) is not None:
            self._messages.extend(zip(*found[1:], strict=True))
            self.expected += 1
        return bool(self._messages)

    def end_at(self, count: int) -> None:
        """The peer has said goodbye, after so many batches."""
        self._final = count
        self._final_at = time.monotonic()

    @property
    def has_end(self) -> bool:
        """Whether the peer has said goodbye."""
        return self._final is not None

    def are_over(self, now: float) -> bool:
        """Whether all up to the goodbye has come, or has had its time to."""
        assert self._final is not None  # asked for where `has_end`
        return self.expected >= self._final or now - self._final_at > GRACE_SECONDS

    def next(self) -> tuple[bytes, Body] | None:
        """The next message, if there is one."""
        if not (self._messages or self.sort()):
            return None
        head, body = self._messages.popleft()
        with self._lock:
            self._backlog -= len(head) + weight(body)
            held = list(self._held) if self.has_room else []
        if held:
            self.resolve(held, True)
        return head, body

    def close(self) -> None:
        """Answer every call, and forget what has arrived."""
        with self._lock:
            self._closed = True
            held = list(self._held)
            self._arrived.clear()
        self._answer(False)
        self.resolve(held, False)
        self._messages.clear()
        self._early.clear()

    def resolve(self, held: list[Any], value: bool) -> None:
        """Answer calls, those that still can be."""
        if self._agent.alive:
            for future in held:
                if not future.done():
                    calls.resolve(future, value)
        with self._lock:
            self._held = [future for future in self._held if not future.done()]
