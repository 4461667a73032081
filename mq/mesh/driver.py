"""The calls that the queue's methods make: they wait, under the lead's rules."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from mq.mesh.feed import Feed
from mq.mesh.mesh import Mesh
from mq.mesh.poller import Poller
from mq.mesh.publishing import Publishing
from mq.seconds import deadline_after

T = TypeVar("T")

STALE_SECONDS: Final = 0.005
"""`recv` polls at least this often, even while its inbox is full."""
FAREWELL_SECONDS: Final = 0.1
"""For the others to answer the BYE where there is no time left to deliver: some round
trips."""
MOST_FAREWELL_SECONDS: Final = 1.0
"""However much time is left: all was delivered, and who does not answer will find that
the connection ends."""


class Driver(Publishing):
    """The blocking calls on a mesh; any thread may make them.

    Attributes:
        stranded: The boxes of calls of `recv` that were interrupted, with what they had
            taken, for `put_back`. To append one is one call into C, before which no
            further interrupt can come.
    """

    def __init__(self, mesh: Mesh, poller: Poller, where: str) -> None:
        super().__init__(mesh, poller, where)
        self._subscriber = mesh.subscriber
        self._inbox = mesh.subscriber.inbox
        self.stranded: deque[list[Any]] = deque()
        self._leave_by: list[float] = []  # the first of these counts

    def wait_until(self, reached: Callable[[], bool], timeout: float | None) -> bool:
        """Wait for something to become true.

        Args:
            reached: Asked under the lock.
            timeout: Seconds; None waits for ever, 0 only asks.

        Returns:
            Whether it became true in time.

        Raises:
            Closed: The queue was closed meanwhile.
            TypeError, ValueError: The timeout is no number, or negative.
        """
        self.check()
        deadline = deadline_after(timeout)
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

    def look(self, read: Callable[[], T]) -> T:
        """What `read` finds under the lock.

        Where nothing is compiled, only frames of this package's tell that a thread has
        it: see `is_in_the_middle`.
        """
        with self.lock:
            return read()

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

    def replace(self, reason: str) -> None:
        """This member must stop: its calls end with `Closed`."""
        with self.lock:
            self.mesh.replace(reason)
            self._tell()

    # -- recv ----------

    def take(self, box: list[Any], timeout: float | None) -> bool:
        """Move what `Inbox.take` returns next into a list of one element.

        Returns:
            Whether there was anything in time. After an exception nothing is lost: what
            is in the box then is to be `stranded`.

        Raises:
            Closed: The queue is closed.
            TypeError, ValueError: The timeout is no number, or negative.
        """
        if self.closing or self.forked:
            self._refuse()
        deadline = deadline_after(timeout)
        self._wanted |= self.lock.locked()
        with self.lock:
            self._wanted = False
            if self.closing or self.mesh.replaced or self.forked:
                self._refuse()
            try:
                box[0] = self._take_now(deadline)
                self._inbox.hand_over()
            except BaseException:
                if self._inbox.undo_take():
                    box[0] = None
                self.mesh.recover()
                raise
        return box[0] is not None

    def _take_now(self, deadline: float | None) -> Any:
        subscriber = self._subscriber
        item = subscriber.take()
        if item is None:
            item = self._wait_for_item(deadline)
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
        owed, send = self._subscriber.owed, self.mesh.setbacks.send
        now = time.monotonic()
        while owed:
            send(owed.pop(), now)
        self._nudge()

    def _wait_for_item(self, deadline: float | None) -> Any:
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

    def put_back(self) -> None:
        """Have what interrupted calls had taken come next again; see `stranded`."""
        with self.lock:
            while self.stranded:
                box = self.stranded[0]
                if box[0] is not None:
                    self._inbox.put_back(box[0])
                    box[0] = None
                self.stranded.popleft()
            self._changes.notify_all()  # another thread may be waiting for it
            self._listeners.tell()
            self.poller.wake()

    # -- flush and close ----------

    def marks(self) -> list[tuple[Feed, int]]:
        """What has been published so far."""
        with self.lock:
            return self._publisher.marks()

    def hurry(self, deadline: float) -> None:
        """Have `leave` deliver no longer than that, if it is under way, too.

        From any thread, and never waits.
        """
        self._leave_by.append(deadline)
        self.poller.wake()

    def leave(self, reason: str, deadline: float) -> list[tuple[Feed, int]]:
        """Deliver what was published, say BYE, stop the mesh.

        Other calls must already have been ended by `closing`.

        Args:
            reason: What the others are told.
            deadline: Until when to deliver, unless `hurry` says an earlier time.

        Returns:
            What could not be delivered until the deadline.
        """
        mesh, leave_by = self.mesh, self._leave_by
        leave_by.append(deadline)
        with self.lock:
            self._changes.notify_all()
            self._listeners.tell()
            try:
                self._publisher.close_gates()
                marks = self._publisher.marks()
                try:
                    while True:
                        self._poll(flush=True)
                        marks = self._publisher.unsettled(marks)
                        if not marks or self._is_over():
                            break
                        if not self._sleep(min(leave_by)):
                            break
                finally:
                    mesh.leave(reason)  # after a Ctrl-C, too
                said = time.monotonic()
                while True:
                    self._poll(flush=True)
                    last = max(min(leave_by), said + FAREWELL_SECONDS)
                    last = min(last, said + MOST_FAREWELL_SECONDS)
                    if mesh.has_left() or mesh.faults.deaf or not self._sleep(last):
                        break
            finally:
                self._leave()
            # What arrived meanwhile; who is gone by now may not have got it.
            return [(feed, last) for feed, last in marks if feed.received < last]

    def _is_over(self) -> bool:
        """Whether nothing is heard any more of who receives what was published."""
        mesh = self.mesh
        return mesh.faults.deaf or all(link.ended for link in mesh.links)

    def discard_inbox(self) -> None:
        """Count what `recv` will never take."""
        with self.lock:
            self._subscriber.discard_all()

    def describe_feeds(self, marks: Sequence[tuple[Feed, int]]) -> str:
        """Who has not received what, in words; the lock is held."""
        assert self.is_in_the_middle()
        return ", ".join(
            # One at least: of those up to the mark newer ones may have replaced all.
            f"{feed.session.name!r} lacks {max(1, feed.lacks(mark))} on "
            f"{feed.topic.name!r}"
            for feed, mark in marks
        )
