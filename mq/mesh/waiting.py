"""Waiting in `publish` for other members, who are told so and named."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Final, NoReturn

from mq.errors import PublishTimeout
from mq.mesh import wire
from mq.mesh.lead import Lead
from mq.mesh.mesh import Mesh
from mq.mesh.poller import Poller

if TYPE_CHECKING:
    from mq.mesh.outgoing import Topic
    from mq.mesh.session import Session

logger = logging.getLogger(__name__)

COMPLAIN_SECONDS: Final = 5.0
"""After which a waiting `publish` logs whom it waits for; then each minute."""


class Waiting(Lead):
    """Calls that wait until others let them go on."""

    def __init__(self, mesh: Mesh, poller: Poller, where: str) -> None:
        super().__init__(mesh, poller, where)
        self._waits: Counter[Session] = Counter()

    def _wait_for(
        self,
        topic: Topic,
        reached: Callable[[], bool],
        blockers: Callable[[], Collection[Session]],
        describe: Callable[[Collection[Session]], str],
        deadline: float | None,
        at_once: bool = False,
    ) -> None:
        """Wait until nobody keeps the message from being published.

        Args:
            blockers: Whom it waits for.
            describe: That in words, with the remedy.
            at_once: Tell them so at once, not only after a while.
        """
        begin = time.monotonic()
        complain_at = begin + COMPLAIN_SECONDS
        told: set[Session] = set()
        try:
            while True:
                self._poll(flush=True)
                self.check()
                if reached():
                    return
                now = time.monotonic()
                if deadline is not None and now >= deadline:
                    self._raise_timeout(topic, now - begin, blockers(), describe)
                if at_once:
                    self._tell_waiting(blockers(), told)
                if now >= complain_at:
                    complain_at = now + 60.0
                    logger.warning(
                        "publish on %r has waited %.0f s: %s",
                        topic.name,
                        now - begin,
                        describe(blockers()),
                    )
                    self._tell_waiting(blockers(), told)
                until = complain_at if deadline is None else min(deadline, complain_at)
                self._sleep(until)
        finally:
            topic.stats.blocked_seconds += time.monotonic() - begin
            self._tell_going_on(told)
            self._leave()

    def _tell_waiting(self, sessions: Collection[Session], told: set[Session]) -> None:
        for session in sessions:
            if session not in told:
                told.add(session)
                self._waits[session] += 1
                if self._waits[session] == 1:
                    session.control(wire.WAITING, True)
                    session.pump(time.monotonic(), flush=True)

    def _tell_going_on(self, told: set[Session]) -> None:
        """The call does not wait any more; perhaps others of this member do."""
        while told:
            session = told.pop()
            self._waits[session] -= 1
            if self._waits[session] > 0:
                continue
            del self._waits[session]
            if session.alive:
                session.control(wire.WAITING, False)

    def _raise_timeout(
        self,
        topic: Topic,
        seconds: float,
        blockers: Collection[Session],
        describe: Callable[[Collection[Session]], str],
    ) -> NoReturn:
        raise PublishTimeout(
            f"{self._where}: not published on {topic.name!r} within {seconds:.3g} s, "
            f"nobody got the message: {describe(blockers)}",
            [session.name for session in blockers],
        )
