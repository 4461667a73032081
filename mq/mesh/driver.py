"""The calls that the queue's methods make: they wait, under the lead's rules."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

from mq.errors import PublishTimeout
from mq.mesh import wire
from mq.mesh.large import INLINE_BYTES
from mq.mesh.lead import Lead
from mq.mesh.mesh import Mesh
from mq.mesh.outgoing import Feed, Outgoing, Topic
from mq.mesh.poller import Poller
from mq.mesh.session import Session

if TYPE_CHECKING:
    from mq.frames import Frames

logger = logging.getLogger(__name__)

STALE_SECONDS: Final = 0.005
"""`recv` polls at least this often, even while its inbox is full."""
COMPLAIN_SECONDS: Final = 5.0
"""After which a waiting `publish` logs whom it waits for; then each minute."""
COPY_BYTES_PER_SECOND: Final = 2e9
"""Assumed speed of copying a large message aside; see `_stream`."""


def check_timeout(timeout: float | None) -> None:
    """Raises: ValueError, TypeError, if this is no time to wait."""
    if timeout is not None and not timeout >= 0:
        raise ValueError(f"timeout is {timeout} s; give 0 or more, or None to wait")


class Driver(Lead):
    """The blocking calls on a mesh; any thread may make them."""

    def __init__(self, mesh: Mesh, poller: Poller, where: str) -> None:
        super().__init__(mesh, poller, where)
        self._publisher = mesh.publisher
        self._subscriber = mesh.subscriber
        self._inbox = mesh.subscriber.inbox
        self._topics = mesh.publisher.topics

    def wait_until(self, reached: Callable[[], bool], timeout: float | None) -> bool:
        """Wait for something to become true.

        Args:
            reached: Asked under the lock.
            timeout: Seconds; None waits for ever, 0 only asks.

        Returns:
            Whether it became true in time.

        Raises:
            Closed: The queue was closed meanwhile.
            ValueError: The timeout is negative or not a number.
        """
        self.check()
        check_timeout(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        with self.lock:
            try:
                while True:
                    self._poll(flush=True)
                    self.check()
                    if reached():
                        return True
                    if not self._sleep(deadline):
                        return False
            finally:
                self._leave()

    def run(self, action: Callable[[], object]) -> None:
        """Change the mesh under the lock and send what that causes."""
        self.check()
        with self.lock:
            self.check()
            try:
                action()
            except BaseException:
                self.mesh.recover()
                raise
            self._poll(flush=True)
            self._nudge()

    # -- recv ----------

    def pop(self) -> Any:
        """A message that is ready, or None: then `take` knows more. Never waits."""
        if len(self._inbox.ready) < 2:
            return None
        found = None
        try:
            with self.lock:
                ready = self._inbox.ready
                if len(ready) > 1 and not (self.closing or self.forked):
                    try:
                        found = ready[0]
                        ready.popleft()
                    except BaseException:
                        if ready[0] is found:  # it is still there
                            found = None
                        raise
            return found
        except BaseException:
            if found is not None:
                with self.lock:
                    if ready is self._inbox.ready:
                        ready.appendleft(found)
                    else:
                        self._inbox.put_back(found)
            raise

    def take(self, timeout: float | None) -> Any:
        """What `Inbox.take` returns next; None if nothing came in time.

        Raises:
            Closed: The queue is closed.
        """
        if self.closing or self.forked:
            self._refuse()
        if timeout is not None and not timeout >= 0:
            check_timeout(timeout)
        item = None
        try:
            with self.lock:
                if self.closing or self.mesh.replaced:
                    self._refuse()
                try:
                    item = self._take_now(timeout)
                    self._inbox.hand_over()
                except BaseException:
                    if not self._inbox.undo_take() and item is not None:
                        self._inbox.put_back(item)
                    item = None
                    self.mesh.recover()
                    raise
            return item
        except BaseException:
            if item is not None:
                self.put_back(item)
            raise

    def _take_now(self, timeout: float | None) -> Any:
        subscriber = self._subscriber
        item = subscriber.take()
        if item is None:
            item = self._wait_for_item(timeout)
        else:
            now = time.monotonic()
            if now - self._polled_at > STALE_SECONDS:
                self._poll()
                self._nudge()
            self._led_at = now
        if subscriber.owed:
            self._send_credit()
        return item

    def _send_credit(self) -> None:
        """Tell publishers at once that they may go on: they may be waiting for that."""
        owed = self._subscriber.owed
        now = time.monotonic()
        while owed:
            owed.pop().pump(now)
        self._nudge()

    def _wait_for_item(self, timeout: float | None) -> Any:
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            flush = True
            while True:
                self._poll(flush, until_message=True)
                if self.closing or self.mesh.replaced:
                    self._refuse()
                item = self._subscriber.take()
                if item is not None:
                    return item
                if not flush:
                    flush = True
                    continue
                if not self._sleep(deadline):
                    return None
                flush = False
        finally:
            self._leave()

    def put_back(self, item: Any) -> None:
        """Undo `take` of a call that was interrupted."""
        with self.lock:
            self._inbox.put_back(item)
            self._changes.notify_all()  # another thread may be waiting for it
            self.poller.wake()

    # -- publish ----------

    def join(self, name: str, data: bytes) -> bool:
        """Commit a small message that only joins batches that are held.

        Returns:
            False where there is more to do, or nobody to ask: then `publish` does it.
        """
        topic = self._topics.get(name)
        if topic is None:
            return False
        published_at = time.time()
        with self.lock:
            return topic.pass_gate(published_at, data)

    def publish(
        self,
        name: str,
        frames: Frames,
        retain: bool,
        urgent: bool,
        timeout: float | None,
        stream: bool = True,
    ) -> bool:
        """Commit a message to all subscribers, or to none.

        Args:
            stream: Wait while large chunks leave straight from the caller's memory,
                as far as that is quicker than a copy.

        Returns:
            False only for `timeout` 0 without credit.

        Raises:
            PublishTimeout, MessageTooLarge, CodecError, Closed: Nobody got it.
        """
        with self.lock:
            if self.closing or self.forked or self.mesh.replaced:
                self._refuse()
            if timeout is not None:
                check_timeout(timeout)
            publisher = self._publisher
            topic = self._topics.get(name) or publisher.topic(name)
            if frames.nbytes > topic.limit_message or frames.needs:
                publisher.check(topic, frames)
            if not topic.has_credit():
                if timeout == 0 and not stream:
                    return False
                self._wait_for_credit(topic, frames, timeout)
            self._commit(topic, frames, retain, urgent, stream)
        return True

    def _commit(
        self,
        topic: Topic,
        frames: Frames,
        retain: bool,
        urgent: bool,
        stream: bool,
    ) -> None:
        published_at = time.time()
        message: Outgoing | None = None
        held_until: float | None = None
        try:
            now = time.monotonic()
            message = self._publisher.publish(
                topic, frames, published_at, retain, now, urgent
            )
            for feed in topic.feeds:
                if feed.session.batch_at is not None:
                    held_until = feed.session.batch_at
        except BaseException:
            self.mesh.recover()
            if message is not None:
                self._release(topic, message)
            raise
        if frames.nbytes > INLINE_BYTES:
            self._stream(topic, message, stream)
            now = time.monotonic()
        self._sent(now, held_until)
        if held_until is not None:
            topic.open_gate(now, published_at)

    def _release(self, topic: Topic, message: Outgoing) -> None:
        sessions = list(self.mesh.sessions.values())
        self._publisher.release(topic, message, sessions)

    def _stream(self, topic: Topic, message: Outgoing, wait: bool) -> None:
        """Send a large message as the wire takes it; copy the rest aside.

        Memory for a few chunks serves the whole message that way. Waiting for the wire
        costs at most about as long as copying the rest would, so the sum is never more
        than twice the better of the two.
        """
        budget = 0.002 + len(message.data) / COPY_BYTES_PER_SECOND
        deadline = time.monotonic() + (budget if wait else 0.0)
        sessions = [feed.session for feed in topic.feeds]
        try:
            while any(
                s.conn is not None and s.unsent(topic, message) for s in sessions
            ):
                if not self._sleep(deadline):
                    break
                self._poll()
                self._publisher.free_received(topic, message, sessions)
        finally:
            self._release(topic, message)
            self._leave()

    def _wait_for_credit(
        self, topic: Topic, frames: Frames, timeout: float | None
    ) -> None:
        begin = time.monotonic()
        deadline = None if timeout is None else begin + timeout
        complain_at = begin + COMPLAIN_SECONDS
        told: set[Session] = set()
        try:
            while True:
                self._poll(flush=True)
                if self.closing or self.mesh.replaced:
                    self._refuse()
                if topic.has_credit():
                    self._publisher.check(topic, frames)
                    return
                now = time.monotonic()
                if deadline is not None and now >= deadline:
                    self._raise_publish_timeout(topic, timeout or 0.0)
                if now >= complain_at:
                    complain_at = now + 60.0
                    logger.warning(
                        "publish on %r has waited %.0f s: %s",
                        topic.name,
                        now - begin,
                        self._who_blocks(topic),
                    )
                    self._tell_waiting(topic, told)
                until = complain_at if deadline is None else min(deadline, complain_at)
                self._sleep(until)
        finally:
            topic.stats.blocked_seconds += time.monotonic() - begin
            for session in told:
                if session.alive:
                    session.control(wire.WAITING, False)
            self._leave()

    def _tell_waiting(self, topic: Topic, told: set[Session]) -> None:
        for feed in topic.waits_for():
            if feed.session not in told:
                told.add(feed.session)
                feed.session.control(wire.WAITING, True)

    def _who_blocks(self, topic: Topic) -> str:
        parts = []
        for feed in topic.waits_for():
            session = feed.session
            text = f"{session.name!r} has not taken what it has"
            if session.conn is None:
                text += " (its connection is broken)"
            if session.peer_waits:
                text += " and is itself waiting in publish for this member to recv"
            parts.append(text)
        return "; ".join(parts)

    def _raise_publish_timeout(self, topic: Topic, timeout: float) -> NoReturn:
        names = [feed.session.name for feed in topic.waits_for()]
        raise PublishTimeout(
            f"{self._where}: no credit on {topic.name!r} within {timeout:g} s, nobody "
            f"got the message: {self._who_blocks(topic)}. Let them recv faster, raise "
            "depth or window_bytes of their subscription, or use mq.keep_last",
            names,
        )

    # -- flush and close ----------

    def marks(self) -> list[tuple[Feed, int]]:
        """What has been published so far."""
        with self.lock:
            return self._publisher.marks()

    def leave(self, reason: str, linger: float) -> list[tuple[Feed, int]]:
        """Deliver what was published, say BYE, stop the mesh.

        Other calls must already have been ended by `closing`.

        Returns:
            What could not be delivered within `linger` seconds.
        """
        deadline = time.monotonic() + linger
        mesh = self.mesh
        with self.lock:
            self._changes.notify_all()
            try:
                marks = self._publisher.marks()
                while True:
                    self._poll(flush=True)
                    marks = self._publisher.unsettled(marks)
                    if not marks or not self._sleep(deadline):
                        break
                mesh.leave(reason)
                last = max(deadline, time.monotonic() + 0.1)
                last = min(last, time.monotonic() + 1.0)
                while True:
                    self._poll(flush=True)
                    if mesh.has_left() or not self._sleep(last):
                        break
            finally:
                self._leave()
        return marks

    def discard_inbox(self) -> None:
        """Count what `recv` will never take."""
        with self.lock:
            self._subscriber.discard_all()

    def describe_feeds(self, marks: Sequence[tuple[Feed, int]]) -> str:
        """Who has not received what, in words."""
        return ", ".join(
            f"{feed.session.name!r} lacks {sequence - feed.received} on "
            f"{feed.topic.name!r}"
            for feed, sequence in marks
        )
