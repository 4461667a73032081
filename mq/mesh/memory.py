"""Shared memory for messages: taken without the lock, or waited for."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Final

from mq.mesh.large import INLINE_BYTES
from mq.mesh.mesh import Mesh
from mq.mesh.outgoing import Topic
from mq.mesh.poller import Poller
from mq.mesh.session import Session
from mq.mesh.waiting import Wait, Waiting
from mq.seconds import deadline_after

if TYPE_CHECKING:
    from mq.segments import Block

NEW_BYTES_PER_SECOND: Final = 20e9
"""New memory is several times slower than that; see `_returned`."""
WAITED_FOR_BYTES: Final = 8_000_000
"""For less, a poller sleeps longer than new memory takes."""


class Memory(Waiting):
    """Calls that take shared memory; any thread may make them."""

    def __init__(self, mesh: Mesh, poller: Poller, where: str) -> None:
        super().__init__(mesh, poller, where)
        self._publisher = mesh.publisher
        self._topics = mesh.publisher.used
        lenders = [link.lender for link in mesh.links if link.lender is not None]
        self._lender = lenders[0] if lenders else None
        if self._lender is not None:
            self._lender.freed = self._freed

    def _freed(self) -> None:
        """Memory is there, or does not come, that left none for others."""
        with self.lock:
            self.mesh.changed += 1
            self._tell()

    def _take_block(
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
        lender = self._lender
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
                taken = self._outside(lambda: lender.take(nbytes, followed))
                if taken is not None:
                    found.append(taken)
            return bool(found) or not (lender.full and blockers())

        with self.lock:
            topic = self._topics.get(name) or self._publisher.topic(name)
            if not reached():
                if turns is None or not turns.told:
                    lender.waits += 1
                who = self._who_borrows
                if not self._wait_for(
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
        lender = self._lender
        assert lender is not None
        size = lender.block_bytes(nbytes, followed)
        until = time.monotonic()
        if nbytes >= WAITED_FOR_BYTES:
            until += nbytes / NEW_BYTES_PER_SECOND
        if deadline is not None:
            until = min(until, deadline)
        with self.lock:
            topic = self._topics.get(name) or self._publisher.topic(name)
            try:
                while self._is_lent(topic, size):
                    self._poll()
                    self.check()
                    block = lender.take(nbytes, followed, grow=False)
                    if block is not None:
                        return block
                    if not self._sleep(until):
                        break
            finally:
                self._leave()
        return lender.take(nbytes, followed)

    def _is_lent(self, topic: Topic, size: int) -> bool:
        return any(
            block.segment.block_bytes == size
            for session in self._publisher.borrowers(topic)
            for block in session.lent.values()
        )

    def take_block(self, name: str, nbytes: int, timeout: float | None) -> Block | None:
        """Shared memory to fill in place; None where there is none to be had.

        Raises:
            PublishTimeout: Subscribers held all of it for `timeout` seconds.
        """
        self.check()
        deadline = deadline_after(timeout)
        if self._lender is None or nbytes <= INLINE_BYTES:
            return None
        return self._take_block(name, nbytes, deadline)[0]

    def _who_borrows(self, borrowers: Collection[Session]) -> str:
        assert self._lender is not None
        held = ", ".join(
            f"{session.name!r} holds {session.lent_bytes()}" for session in borrowers
        )
        stats, refusal = self._lender.stats(), self._lender.refusal
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
