"""Shared memory for messages: taken without the lock, or waited for."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Final

from mq.mesh.large import INLINE_BYTES
from mq.seconds import deadline_after

if TYPE_CHECKING:
    from mq.mesh.lead import Lead
    from mq.mesh.outgoing import Topic
    from mq.mesh.session import Session
    from mq.mesh.waiting import Wait, Waits
    from mq.segments import Block

NEW_BYTES_PER_SECOND: Final = 20e9
"""New memory is several times slower than that; see `_returned`."""
WAITED_FOR_BYTES: Final = 8_000_000
"""For less, a poller sleeps longer than new memory takes."""


class Memory:
    """Calls that take shared memory; any thread may make them.

    Attributes:
        lender: Whom it is taken from; None: the transport has none of its own.
    """

    def __init__(self, lead: Lead, waits: Waits) -> None:
        mesh = lead.mesh
        self._lead = lead
        self._waits = waits
        self._publisher = mesh.publisher
        self._topics = mesh.publisher.used
        lenders = [link.lender for link in mesh.links if link.lender is not None]
        self.lender = lenders[0] if lenders else None
        if self.lender is not None:
            self.lender.freed = self._freed

    def _freed(self) -> None:
        """Memory is there, or does not come, that left none for others."""
        with self._lead.lock:
            self._lead.mesh.changed += 1
            self._lead.tell()

    def take_in_turn(
        self,
        name: str,
        nbytes: int,
        deadline: float | None,
        turns: Wait | None = None,
        followed: bool = False,
    ) -> tuple[Block | None, bool]:
        """Shared memory for a message, and whether it has to be waited for.

        There is none where it does not fit, and where no subscriber who keeps all of
        the topic holds any: the message then goes through the connection. So a topic
        whose messages are hoarded delays no other one.

        Raises:
            PublishTimeout: Subscribers held all of it until the deadline.
        """
        lender = self.lender
        assert lender is not None
        block = lender.take(nbytes, followed, grow=False)
        if block is None:
            block = self._returned(name, nbytes, followed, deadline)
        if block is not None or not lender.fits(nbytes):
            return block, False
        found: list[Block] = []

        def blockers() -> list[Session]:
            return self._publisher.borrowers(topic)

        def reached() -> bool:
            if not found:
                taken = self._lead.outside(lambda: lender.take(nbytes, followed))
                if taken is not None:
                    found.append(taken)
            return bool(found) or not (lender.full and blockers())

        with self._lead.lock:
            topic = self._topics.get(name) or self._publisher.topic(name)
            if not reached():
                if turns is None or not turns.told:
                    lender.waits += 1
                who = self._who_borrows
                if not self._waits.wait_for(
                    topic, reached, blockers, who, deadline, turns, memory=True
                ):
                    return None, True
        return (found[0] if found else None), False

    def _returned(
        self, name: str, nbytes: int, followed: bool, deadline: float | None
    ) -> Block | None:
        """A block that has just come back, or new memory.

        The RELEASE of a subscriber may be on its way behind its answer, and new memory
        takes longer than that. Who keeps the last, or hoards another topic's messages,
        is not waited for.
        """
        lead, lender = self._lead, self.lender
        assert lender is not None
        size = lender.block_bytes(nbytes, followed)
        until = time.monotonic()
        if nbytes >= WAITED_FOR_BYTES:
            until += nbytes / NEW_BYTES_PER_SECOND
        if deadline is not None:
            until = min(until, deadline)
        with lead.lock:
            topic = self._topics.get(name) or self._publisher.topic(name)
            try:
                while self._is_lent(topic, size):
                    lead.poll()
                    lead.check()
                    block = lender.take(nbytes, followed, grow=False)
                    if block is not None:
                        return block
                    if not lead.sleep(until):
                        break
            finally:
                lead.step_down()
        return lender.take(nbytes, followed)

    def _is_lent(self, topic: Topic, size: int) -> bool:
        return any(
            block.segment.block_bytes == size
            for session in self._publisher.borrowers(topic)
            for block in session.lent.values()
        )

    def take_for_loan(
        self, name: str, nbytes: int, timeout: float | None
    ) -> Block | None:
        """Shared memory to fill in place; None where there is none to be had.

        Raises:
            PublishTimeout: Subscribers held all of it for `timeout` seconds.
        """
        self._lead.check()
        deadline = deadline_after(timeout)
        if self.lender is None or nbytes <= INLINE_BYTES:
            return None
        return self.take_in_turn(name, nbytes, deadline)[0]

    def _who_borrows(self, borrowers: Collection[Session]) -> str:
        assert self.lender is not None
        held = ", ".join(
            f"{session.name!r} holds {session.lent_bytes()}" for session in borrowers
        )
        stats, refusal = self.lender.stats(), self.lender.refusal
        remedy = (
            f"the system gives no more: {refusal}"
            if refusal
            else ("connect with more shm_bytes")
        )
        return (
            f"of the {stats.limit_bytes} bytes of shared memory {stats.in_use_bytes} "
            f"are in use: {held} in messages unread or viewed with zero_copy. Let them "
            f"recv and drop what they have; or {remedy}"
        )
