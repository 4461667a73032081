"""`publish` and `loan`: they wait for credit and for memory, then commit."""

from __future__ import annotations

import time
from enum import Enum
from typing import TYPE_CHECKING, Final

from mq import speed
from mq.buffers import cache_bytes, copy
from mq.mesh.large import INLINE_BYTES, Large
from mq.seconds import deadline_after

if TYPE_CHECKING:
    from mq.frames import Frames
    from mq.mesh.lead import Lead
    from mq.mesh.memory import Memory
    from mq.mesh.outgoing import Outgoing, Topic
    from mq.mesh.waiting import Wait, Waits
    from mq.segments import Block


COPY_BYTES_PER_SECOND: Final = 2e9
"""Assumed speed of copying a large message aside; see `_stream`."""
STREAM_SECONDS: Final = 0.002
"""For how long the wire is waited for beyond that: a peer may have to wake up first."""
RETRY_SECONDS: Final = 0.02
"""Between tries to copy, where there is no memory for it."""

OWN_BYTES: Final = 8 << 20
"""How much is copied aside at a time, between looks at what else there is to do."""

FOLLOWED_BYTES: Final = 512 * 1024
"""Messages of this size, up to what stays in the cache, are announced before they are
written: who reads behind the writer reads what is still in the cache."""
MOST_FOLLOWED_BYTES: Final = 16 << 20
"""However large the cache is: it is written with the lock."""


def _most_followed_bytes() -> int:
    return min(MOST_FOLLOWED_BYTES, cache_bytes() // 2)


class _Way(Enum):
    """How a message that could be lent goes to its subscribers.

    Attributes:
        SENT: Through the connections.
        LAID_OUT: In shared memory, written before anybody is told of it.
        FOLLOWED: In shared memory, and they read it behind the writer.
        LATER: Not yet: there is no credit.
    """

    SENT = 0
    LAID_OUT = 1
    FOLLOWED = 2
    LATER = 3


class Publishing:
    """The publishing calls on a mesh; any thread may make them.

    Attributes:
        devices: Of which some connection may carry tensors.
    """

    def __init__(self, lead: Lead, waits: Waits, memory: Memory) -> None:
        mesh = lead.mesh
        self._lead = lead
        self._waits = waits
        self._memory = memory
        self._publisher = mesh.publisher
        self._topics = mesh.publisher.used
        self.devices = frozenset[str]().union(*(link.devices for link in mesh.links))

    def publish(
        self,
        name: str,
        frames: Frames,
        retain: bool,
        urgent: bool,
        timeout: float | None,
        turns: Wait | None = None,
        block: Block | None = None,
    ) -> bool:
        """Commit a message to all subscribers, or to none.

        Args:
            turns: Of a call that does not wait here, and so has `timeout` 0: neither
                for subscribers, nor while large chunks leave straight from the
                caller's memory, as far as that is quicker than a copy.
            block: All of the message, where it already lies in shared memory.

        Returns:
            False only for `turns`: there is no credit or memory.

        Raises:
            PublishTimeout, MessageTooLarge, CodecError, Closed: Nobody got it.
        """
        deadline = deadline_after(timeout)
        if (
            block is None
            and self._memory.lender is not None
            and frames.nbytes > INLINE_BYTES
            and not frames.areas
        ):
            block, must_wait = self._lay_out(name, frames, retain, deadline, turns)
            if must_wait:
                return False
        only_joins = False
        if frames.areas:
            self._publisher.fill_pieces(frames)
        elif frames.nbytes <= INLINE_BYTES and block is None:
            if frames.buffers:
                frames = frames.packed()
            only_joins = not (retain or urgent or frames.needs)
        lead = self._lead
        lead.wanted |= lead.lock.locked()
        with lead.lock:
            lead.wanted = False
            if lead.closing or lead.forked or lead.mesh.replaced:
                lead.refuse()
            publisher = self._publisher
            topic = self._topics.get(name) or publisher.topic(name)
            if only_joins and topic.gate.admit(time.time(), frames.header):
                return True
            if frames.nbytes > topic.limit_message or frames.needs:
                publisher.check(topic, frames)
            if not (
                topic.has_credit()
                or self._waits.wait_for_credit(topic, frames, deadline, turns)
            ):
                return False
            if block is not None and not publisher.is_followed(topic):  # any more
                block.fill(frames.segments())
            self._commit(topic, frames, retain, urgent, turns is None, block)
        return True

    def _lay_out(
        self,
        name: str,
        frames: Frames,
        retain: bool,
        deadline: float | None,
        turns: Wait | None,
    ) -> tuple[Block | None, bool]:
        """Have a message in shared memory, if that is how it goes.

        Returns:
            As `Memory.take_in_turn`. Where the subscribers follow, it is empty yet.
        """
        way = self._way(name, frames, retain, deadline, turns)
        if way is _Way.LATER or way is _Way.SENT:
            return None, way is _Way.LATER
        if way is _Way.LAID_OUT:
            speed.expect_copy(frames.nbytes)
        block, must_wait = self._memory.take_in_turn(
            name, frames.nbytes, deadline, turns, way is _Way.FOLLOWED
        )
        if block is not None and block.counter is None:
            for start, piece in frames.segments():
                if self._lead.forked:  # by a handler: it is the parent's to write
                    self._lead.refuse()
                stop = start + len(piece)
                copy(piece, block.area[start:stop], frames.nbytes)
        return block, must_wait

    def _commit(
        self,
        topic: Topic,
        frames: Frames,
        retain: bool,
        urgent: bool,
        stream: bool,
        block: Block | None,
    ) -> None:
        published_at = time.time()
        view = topic.view
        newest = view[0] + len(view[2]) - 1
        message: Outgoing | None = None
        held_until: float | None = None
        try:
            now = time.monotonic()
            message = self._publisher.publish(
                topic, frames, published_at, retain, now, urgent, block
            )
            for feed in topic.feeds:
                due = feed.session.batch_at
                if due is not None and (held_until is None or due < held_until):
                    held_until = due
        except BaseException as error:
            self._lead.mesh.recover()
            if topic.newest == newest:  # nobody got it
                raise
            message = message or topic.message(newest + 1, view)
            self._let_go(topic, message)
            if not isinstance(error, MemoryError):
                raise
            now = time.monotonic()
        if type(message.data) is Large and block is None:
            self._stream(topic, message, stream)
            now = time.monotonic()
        self._lead.after_sending(now, held_until)
        if held_until is not None and type(message.data) is bytes:
            topic.open_gate(now, published_at)

    def _own(self, topic: Topic, message: Outgoing, most_bytes: int | None) -> bool:
        sessions = list(self._lead.mesh.sessions.values())
        return self._publisher.own(topic, message, sessions, most_bytes)

    def _stream(self, topic: Topic, message: Outgoing, wait: bool) -> None:
        """Send a large message as the wire takes it; copy the rest aside.

        Memory for a few chunks serves the whole message that way, and for a few
        messages where they are copied together: also then it waits. Waiting for the
        wire costs at most about as long as copying the rest would, so the sum is never
        more than twice the better of the two. All is waited for where memory is short.
        """
        assert isinstance(message.data, Large)
        lead = self._lead
        to_copy = len(message.data) - sum(message.data.areas)
        budget = STREAM_SECONDS + to_copy / COPY_BYTES_PER_SECOND
        deadline = time.monotonic() + (budget if wait else 0.0)
        sessions = [feed.session for feed in topic.feeds]
        try:
            while any(
                s.conn is not None and s.unsent(topic, message) for s in sessions
            ):
                if not lead.sleep(deadline):
                    break
                lead.poll()
                lead.give_way()
                self._publisher.free_received(topic, message, sessions)
            while not self._own(topic, message, OWN_BYTES):
                lead.poll()  # new memory may be slow, and peers must hear of us
                lead.give_way()
        except MemoryError:
            pass
        finally:
            self._let_go(topic, message)

    def _let_go(self, topic: Topic, message: Outgoing) -> None:
        """Have nothing of a committed message in the caller's memory any more.

        What cannot be copied leaves from there, and an interrupt waits for that.
        """
        interrupt: BaseException | None = None
        while True:
            try:
                self._own(topic, message, None)
                break
            except MemoryError:
                pass
            try:
                self._lead.sleep(time.monotonic() + RETRY_SECONDS)
                self._lead.poll()
            except BaseException as error:
                interrupt = interrupt if isinstance(error, MemoryError) else error
        self._lead.step_down()
        if interrupt is not None:
            raise interrupt

    def carried(self, name: str) -> frozenset[str]:
        """Devices whose tensors are to stay there for the next message on a topic.

        All of the transport's, while nobody listens.
        """
        with self._lead.lock:
            topic = self._publisher.topics.get(name)
            found = None if topic is None else self._publisher.carried(topic)
        return self.devices if found is None else frozenset(found)

    def _way(
        self,
        name: str,
        frames: Frames,
        retain: bool,
        deadline: float | None,
        turns: Wait | None,
    ) -> _Way:
        """How a message goes to its subscribers."""
        lead = self._lead
        with lead.lock:
            if lead.closing or lead.forked or lead.mesh.replaced:
                lead.refuse()
            topic = self._topics.get(name) or self._publisher.topic(name)
            if not (retain or self._publisher.is_read_in_place(topic)):
                return _Way.SENT
            # What cannot be published need not be copied.
            self._publisher.check(topic, frames)
            if not (
                topic.has_credit()
                or self._waits.wait_for_credit(topic, frames, deadline, turns)
            ):
                return _Way.LATER
            if (
                FOLLOWED_BYTES <= frames.nbytes <= _most_followed_bytes()
                and not retain
                and self._publisher.is_followed(topic)
            ):
                return _Way.FOLLOWED
            return _Way.LAID_OUT
