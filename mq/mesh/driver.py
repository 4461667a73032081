"""Runs a mesh: who polls, who waits, and the blocking calls on top.

One thread leads at a time. A blocking call takes the lead and polls the engine in its
own thread, so the hot path has no thread hop; other callers follow on a condition. When
no call has led for `IDLE_SECONDS`, the keeper thread leads and does everything. All
protocol code runs under one lock, which is free while the leader sleeps in the poller,
so `publish` sends from its own thread at any time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NoReturn

from mq.errors import Closed, ForkedProcess, MessagesLost, PublishTimeout
from mq.mesh import wire
from mq.mesh.incoming import Entry
from mq.mesh.mesh import Mesh
from mq.mesh.outgoing import Feed, Outgoing, Topic
from mq.mesh.poller import Poller
from mq.mesh.session import Session

if TYPE_CHECKING:
    from mq.frames import Frames

logger = logging.getLogger(__name__)

IDLE_SECONDS: Final = 0.02
"""How long the lead stays free for the next call before the keeper takes it."""
CALM_SECONDS: Final = 0.25
"""After so long in one wait of a leader, the keeper sleeps until the wait ends."""
STALE_SECONDS: Final = 0.005
"""`recv` polls at least this often, even while its inbox is full."""
COMPLAIN_SECONDS: Final = 5.0
"""After which a waiting `publish` logs whom it waits for; then each minute."""
COPY_BYTES_PER_SECOND: Final = 2e9
"""Assumed speed of copying a large message aside; see `_stream`."""
_KEEPER: Final = -1


def check_timeout(timeout: float | None) -> None:
    """Raises: ValueError, TypeError, if this is no time to wait."""
    if timeout is not None and not timeout >= 0:
        raise ValueError(f"timeout is {timeout} s; give 0 or more, or None to wait")


class Driver:
    """One mesh, its lock, its keeper thread, and the calls that wait."""

    def __init__(self, mesh: Mesh, poller: Poller, where: str) -> None:
        self.mesh = mesh
        self.poller = poller
        self.lock = threading.Lock()
        self.closing = False
        self.forked = False
        self._where = where
        self._publisher = mesh.publisher
        self._subscriber = mesh.subscriber
        self._changes = threading.Condition(self.lock)
        self._followers = 0
        self._leader: int | None = None
        self._asleep_until = 0.0
        self._asleep_since = 0.0
        self._hurry = False
        self._led_at = 0.0
        self._polled_at = 0.0
        self._doze = threading.Condition(self.lock)
        self._dozing_long = False
        self._ready: list[int] = []
        self._seen = 0
        self._stop = False
        self._listeners: list[Callable[[], None]] = []
        mesh.watch_added = poller.register
        mesh.watch_removed = poller.unregister
        self.upkeep: Callable[[], None] = lambda: None
        self.upkeep_seconds = 1.0
        self._upkeep_at = 0.0
        self._keeper = threading.Thread(
            target=self._keep, name="mq-keeper", daemon=True
        )

    def start(self) -> None:
        """Start the keeper."""
        self._keeper.start()

    def stop(self) -> None:
        """End the keeper and wait for it."""
        with self.lock:
            self._stop = True
            self._doze.notify_all()
        self.poller.wake()
        if threading.current_thread() is not self._keeper:
            self._keeper.join(5.0)

    # -- the lead ----------

    def _poll(self, flush: bool = False, until_message: bool = False) -> None:
        """Let the mesh work; the lock is held."""
        ready, self._ready = self._ready, []
        mesh = self.mesh
        try:
            mesh.poll(ready, flush=flush, until_message=until_message)
        except BaseException:
            mesh.recover()
            raise
        finally:
            self._polled_at = time.monotonic()
            if mesh.changed != self._seen:
                self._seen = mesh.changed
                if self._followers:
                    self._changes.notify_all()
                for listener in self._listeners:
                    listener()

    def _sleep(self, deadline: float | None) -> bool:
        """Wait until something may have changed; the lock is held before and after.

        Returns:
            False if the deadline has passed.
        """
        now = time.monotonic()
        if deadline is not None and now >= deadline:
            return False
        me = threading.get_ident()
        if self._leader in (None, _KEEPER, me):
            # A keeper that leads sleeps on, and dozes when the next event wakes it.
            self._leader = me
            until = self.mesh.next_deadline()
            if deadline is not None:
                until = min(until, deadline)
            self._wait_for_events(until, now, me)
        else:
            self._followers += 1
            try:
                self._changes.wait(None if deadline is None else deadline - now)
            finally:
                self._followers -= 1
        return True

    def _wait_for_events(self, until: float, now: float, me: int) -> None:
        self._asleep_until = until
        self._asleep_since = now
        ready: list[int] = []
        self.lock.release()
        try:
            ready = self.poller.wait(max(0.0, until - now))
        finally:
            self.lock.acquire()
            if self._leader == me:
                self._asleep_until = 0.0
                self._ready = ready
            else:
                # A call took the lead meanwhile; this wake-up was meant for it.
                self.poller.wake()

    def _leave(self) -> None:
        """A call ends; the lead stays free for the next one. The lock is held."""
        if self._leader == threading.get_ident():
            self._leader = None
            self._led_at = time.monotonic()
            if self._followers:
                self._changes.notify_all()
            if self._dozing_long or self._listeners:
                self._doze.notify_all()
        elif self.mesh.next_deadline() < self._asleep_until:
            self.poller.wake()  # what this call left unfinished is the leader's

    def _keep(self) -> None:
        with self.lock:
            while not self._stop:
                self._run_upkeep()
                now = time.monotonic()
                if self._leader is not None and self._leader != _KEEPER:
                    # Short naps while calls come and go: then nobody has to wake us.
                    calm = now - self._asleep_since > CALM_SECONDS
                    nap = min(1.0, self.upkeep_seconds) if calm else IDLE_SECONDS
                    self._doze_for(nap, long=calm)
                    continue
                idle = now - self._led_at
                if idle < IDLE_SECONDS and not (self._listeners or self._hurry):
                    self._doze_for(IDLE_SECONDS - idle, long=False)
                    continue
                self._hurry = False
                self._leader = _KEEPER
                try:
                    self._poll()
                    now = time.monotonic()
                    if not self._stop:
                        until = self.mesh.next_deadline()
                        self._wait_for_events(until, now, _KEEPER)
                except Exception:
                    logger.exception("the keeper of %s failed; it goes on", self._where)
                    self._doze_for(IDLE_SECONDS, long=False)

    def _run_upkeep(self) -> None:
        """Look after the rendezvous now and then, without the lock."""
        now = time.monotonic()
        if now < self._upkeep_at or self.closing:
            return
        self._upkeep_at = now + self.upkeep_seconds
        self.lock.release()
        try:
            self.upkeep()
        except Exception:
            if not self.closing:
                logger.exception("the upkeep of %s failed; it goes on", self._where)
        finally:
            self.lock.acquire()

    def _doze_for(self, seconds: float, *, long: bool) -> None:
        self._dozing_long = long
        self._doze.wait(seconds)
        self._dozing_long = False

    def _nudge(self) -> None:
        """After sending outside of the lead: keep the sleeping leader up to date."""
        if self._leader is None:
            if self._dozing_long:
                self._doze.notify_all()
            return
        if self._leader != threading.get_ident():
            # The engine may have taken in, while sending, what would have woken it.
            before = self.mesh.changed
            self._poll()
            if (
                self.mesh.changed != before
                or self.mesh.next_deadline() < self._asleep_until
            ):
                self.poller.wake()

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener`, under the lock, whenever something changed."""
        with self.lock:
            self._listeners.append(listener)
            self._doze.notify_all()

    def unlisten(self, listener: Callable[[], None]) -> None:
        """Undo `listen`."""
        with self.lock:
            self._listeners.remove(listener)

    # -- state ----------

    def check(self) -> None:
        """Raises: Closed, ForkedProcess, if the queue cannot be used any more."""
        if self.closing or self.mesh.replaced or self.forked:
            self._refuse()

    def _refuse(self) -> NoReturn:
        if self.forked:
            raise ForkedProcess(
                f"{self._where} was connected before this process was forked; connect "
                "in the child, or start children with 'spawn' or 'forkserver'"
            )
        raise Closed(f"{self._where} is closed: {self.mesh.replaced or 'close()'}")

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

    def take(self, timeout: float | None) -> Entry | None:
        """The next entry of the inbox; None if none came in time.

        Raises:
            Closed: The queue is closed.
            MessagesLost: A publisher had given this member up.
        """
        if self.closing or self.forked:
            self._refuse()
        if timeout is not None and not timeout >= 0:
            check_timeout(timeout)
        with self.lock:
            if self.closing or self.mesh.replaced:
                self._refuse()
            item: Entry | MessagesLost | None = None
            try:
                item = self._subscriber.take()
                if item is not None:
                    now = time.monotonic()
                    if now - self._polled_at > STALE_SECONDS:
                        self._poll()
                        self._nudge()
                    self._led_at = now
                else:
                    item = self._wait_for_item(timeout)
                if type(item) is Entry and item[0].session.credit_due:
                    self._send_credit(item[0].session)
            except BaseException:
                self.mesh.recover()
                if type(item) is Entry:
                    self._subscriber.inbox.put_back(item)
                elif item is not None:
                    self._subscriber.inbox.fifo.appendleft(item)
                raise
        if type(item) is MessagesLost:
            raise item
        return item  # type: ignore[return-value]

    def _send_credit(self, session: Session) -> None:
        """Tell a publisher at once that it may go on: it may be waiting for that."""
        session.credit_due = False
        session.pump(time.monotonic())
        self._nudge()

    def _wait_for_item(self, timeout: float | None) -> Entry | MessagesLost | None:
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

    def put_back(self, entry: Entry) -> None:
        """Undo `take` of a call that was interrupted."""
        with self.lock:
            self._subscriber.inbox.put_back(entry)

    # -- publish ----------

    def publish(
        self,
        name: str,
        frames: Frames,
        *,
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
        if self.closing or self.forked:
            self._refuse()
        if timeout is not None and not timeout >= 0:
            check_timeout(timeout)
        with self.lock:
            if self.closing or self.mesh.replaced:
                self._refuse()
            publisher = self._publisher
            topic = publisher.topics.get(name) or publisher.topic(name)
            if frames.nbytes > topic.limit_message or frames.needs:
                publisher.check(topic, frames)
            if not topic.has_credit():
                if timeout == 0 and not stream:
                    return False
                self._wait_for_credit(topic, frames, timeout)
            message: Outgoing | None = None
            try:
                message = publisher.publish(topic, frames, time.time(), retain)
                pumped = False
                for feed in topic.feeds:
                    session = feed.session
                    if urgent or not session.holds_batch():
                        pumped = True
                        session.pump(time.monotonic(), urgent)
            except BaseException:
                self.mesh.recover()
                if message is not None:
                    self._release(message, topic)
                raise
            if message.data is None:
                self._stream(message, topic, stream)
            if pumped:
                self._after_publish(topic)
        return True

    def _after_publish(self, topic: Topic) -> None:
        if self._leader is not None:
            self._nudge()
            return
        for feed in topic.feeds:
            batch_at = feed.session.batch_at
            if batch_at is not None:
                # Nobody would send it in time, unless the keeper leads at once.
                self._hurry = True
                self._doze.notify_all()
                return

    def _release(self, message: Outgoing, topic: Topic) -> None:
        self._publisher.release(message, list(self.mesh.sessions.values()))

    def _stream(self, message: Outgoing, topic: Topic, wait: bool) -> None:
        """Send a large message as the wire takes it; copy the rest aside.

        Memory for a few chunks serves the whole message that way. Waiting for the wire
        costs at most about as long as copying the rest would, so the sum is never more
        than twice the better of the two.
        """
        budget = 0.002 + message.nbytes / COPY_BYTES_PER_SECOND
        deadline = time.monotonic() + (budget if wait else 0.0)
        sessions = [feed.session for feed in topic.feeds]
        try:
            while any(s.conn is not None and s.unsent(message) for s in sessions):
                if not self._sleep(deadline):
                    break
                self._poll()
                self._publisher.free_received(message, sessions)
        finally:
            self._release(message, topic)
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
