"""The calls that the queue's methods make: they wait, under the lead's rules."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from mq.mesh.feed import Feed, in_words
from mq.mesh.lead import Lead
from mq.mesh.memory import Memory
from mq.mesh.mesh import Mesh
from mq.mesh.poller import Poller
from mq.mesh.publishing import Publishing
from mq.mesh.taking import Taking
from mq.mesh.waiting import Waits
from mq.seconds import deadline_after

T = TypeVar("T")

FAREWELL_SECONDS: Final = 0.1
"""For the others to answer the BYE where there is no time left to deliver: some round
trips."""
MOST_FAREWELL_SECONDS: Final = 1.0
"""However much time is left: all was delivered, and who does not answer will find that
the connection ends."""


class Driver:
    """The blocking calls on a mesh; any thread may make them.

    Attributes:
        lead: By whose rules they wait.
        waits: Those that wait for other members.
        memory: Those that take shared memory.
        publishing: Those that publish.
        taking: Those that take messages.
    """

    def __init__(self, mesh: Mesh, poller: Poller, where: str) -> None:
        self.mesh = mesh
        self.lead = Lead(mesh, poller, where)
        self.waits = Waits(self.lead)
        self.memory = Memory(self.lead, self.waits)
        self.publishing = Publishing(self.lead, self.waits, self.memory)
        self.taking = Taking(self.lead)
        self._publisher = mesh.publisher
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
        self.lead.check()
        deadline = deadline_after(timeout)
        with self.lead.lock:
            try:
                while True:
                    self.lead.poll(flush=True)
                    self.lead.check()
                    if reached():
                        return True
                    if not self.lead.sleep(deadline):
                        return False
            finally:
                self.lead.step_down()

    def look(self, read: Callable[[], T]) -> T:
        """What `read` finds under the lock.

        Where nothing is compiled, only frames of this package's tell that a thread has
        it: see `Lead.is_in_the_middle`.
        """
        with self.lead.lock:
            return read()

    def run(self, action: Callable[[], object]) -> None:
        """Change the mesh under the lock and send what that causes."""
        self.lead.check()
        with self.lead.lock:
            self.lead.check()
            try:
                action()
            except BaseException:
                self.mesh.recover()
                raise
            self.lead.poll(flush=True)
            self.lead.nudge()

    def replace(self, reason: str) -> None:
        """This member must stop: its calls end with `Closed`."""
        with self.lead.lock:
            self.mesh.replace(reason)
            self.lead.tell()

    # -- flush and close ----------

    def marks(self) -> list[tuple[Feed, int]]:
        """What has been published so far."""
        with self.lead.lock:
            return self.mesh.marks()

    def hurry(self, deadline: float) -> None:
        """Have `leave` deliver no longer than that, if it is under way, too.

        From any thread, and never waits.
        """
        self._leave_by.append(deadline)
        self.lead.poller.wake()

    def leave(self, reason: str, deadline: float) -> list[tuple[Feed, int]]:
        """Deliver what was published, say BYE, stop the mesh.

        Other calls must already have been ended, by `Lead.end_calls`.

        Args:
            reason: What the others are told.
            deadline: Until when to deliver, unless `hurry` says an earlier time.

        Returns:
            What could not be delivered until the deadline.
        """
        mesh, leave_by = self.mesh, self._leave_by
        leave_by.append(deadline)
        with self.lead.lock:
            self.lead.tell_all()
            try:
                self._publisher.close_gates()
                marks = self.mesh.marks()
                try:
                    while True:
                        self.lead.poll(flush=True)
                        marks = self._publisher.unsettled(marks)
                        if not marks or self._is_over():
                            break
                        if not self.lead.sleep(min(leave_by)):
                            break
                finally:
                    mesh.leave(reason)  # after a Ctrl-C, too
                said = time.monotonic()
                while True:
                    self.lead.poll(flush=True)
                    last = max(min(leave_by), said + FAREWELL_SECONDS)
                    last = min(last, said + MOST_FAREWELL_SECONDS)
                    if mesh.has_left() or mesh.faults.deaf or not self.lead.sleep(last):
                        break
            finally:
                self.lead.step_down()
            # What arrived meanwhile; who is gone by now may not have got it.
            return [(feed, last) for feed, last in marks if feed.received < last]

    def _is_over(self) -> bool:
        """Whether nothing is heard any more of who receives what was published."""
        mesh = self.mesh
        return mesh.faults.deaf or all(link.ended for link in mesh.links)

    def describe_feeds(self, marks: Sequence[tuple[Feed, int]]) -> str:
        """Who has not received what, in words; the lock is held."""
        assert self.lead.is_in_the_middle()
        found: dict[str, list[tuple[int, str]]] = {}
        for feed, mark in marks:
            # One at least: of those up to the mark newer ones may have replaced all.
            lacking = max(1, feed.lacks(mark)), feed.topic.name
            found.setdefault(feed.session.name, []).append(lacking)
        return "; ".join(f"{name!r} lacks {in_words(of)}" for name, of in found.items())
