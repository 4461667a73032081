"""`recv`: it takes what is next in the inbox, or waits for it."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from mq.seconds import deadline_after

if TYPE_CHECKING:
    from mq.mesh.lead import Lead

STALE_SECONDS: Final = 0.005
"""`recv` polls at least this often, even while its inbox is full."""


class Taking:
    """The calls that take messages out of the inbox; any thread may make them.

    Attributes:
        stranded: The boxes of calls of `recv` that were interrupted, with what they had
            taken, for `put_back`. To append one is one call into C, before which no
            further interrupt can come.
    """

    def __init__(self, lead: Lead) -> None:
        self._lead = lead
        self._mesh = lead.mesh
        self._subscriber = lead.mesh.subscriber
        self._inbox = lead.mesh.subscriber.inbox
        self.stranded: deque[list[Any]] = deque()

    def take(self, box: list[Any], timeout: float | None) -> bool:
        """Move what `Inbox.take` returns next into a list of one element.

        Returns:
            Whether there was anything in time. After an exception nothing is lost: what
            is in the box then is to be `stranded`.

        Raises:
            Closed: The queue is closed.
            TypeError, ValueError: The timeout is no number, or negative.
        """
        lead = self._lead
        if lead.closing or lead.forked:
            lead.refuse()
        deadline = deadline_after(timeout)
        lead.wanted |= lead.lock.locked()
        with lead.lock:
            lead.wanted = False
            if lead.closing or self._mesh.replaced or lead.forked:
                lead.refuse()
            try:
                box[0] = self._take_now(deadline)
                self._inbox.hand_over()
            except BaseException:
                if self._inbox.undo_take():
                    box[0] = None
                self._mesh.recover()
                raise
        return box[0] is not None

    def _take_now(self, deadline: float | None) -> Any:
        lead, subscriber = self._lead, self._subscriber
        item = subscriber.take()
        if item is None:
            item = self._wait_for_item(deadline)
        else:
            now = time.monotonic()
            if now - lead.polled_at > STALE_SECONDS:
                lead.poll()
                lead.nudge()
            lead.led_at = now
        if subscriber.owed:
            self._send_credit()
        return item

    def _send_credit(self) -> None:
        """Tell publishers at once that they may go on: they may be waiting for that."""
        owed, send = self._subscriber.owed, self._mesh.setbacks.send
        now = time.monotonic()
        while owed:
            send(owed.pop(), now)
        self._lead.nudge()

    def _wait_for_item(self, deadline: float | None) -> Any:
        lead = self._lead
        try:
            flush = True
            while True:
                lead.poll(flush, until_message=True)
                if lead.closing or self._mesh.replaced:
                    lead.refuse()
                item = self._subscriber.take()
                if item is not None:
                    return item
                if not flush:
                    flush = True
                    continue
                if not lead.sleep(deadline):
                    return None
                flush = False
        finally:
            lead.step_down()

    def put_back(self) -> None:
        """Have what interrupted calls had taken come next again; see `stranded`."""
        with self._lead.lock:
            while self.stranded:
                box = self.stranded[0]
                if box[0] is not None:
                    self._inbox.put_back(box[0])
                    box[0] = None
                self.stranded.popleft()
            self._lead.tell_all()  # another thread may be waiting for it
            self._lead.poller.wake()

    def discard_inbox(self) -> None:
        """Count what `recv` will never take."""
        with self._lead.lock:
            self._subscriber.discard_all()
