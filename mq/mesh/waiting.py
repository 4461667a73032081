"""Waiting in `publish` for other members, who are told so and named."""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Final, NoReturn

from mq.errors import PublishTimeout
from mq.log import Log
from mq.mesh import wire
from mq.seconds import deadline_after

if TYPE_CHECKING:
    from mq.frames import Frames
    from mq.mesh.lead import Lead
    from mq.mesh.outgoing import Topic
    from mq.mesh.session import Session

logger = Log(__name__)

COMPLAIN_SECONDS: Final = 5.0
"""After which a waiting `publish` logs whom it waits for; then each minute."""


class Wait:
    """A call that waits for others.

    Attributes:
        begin: When it began.
        deadline: When it gives up; None: never.
        complain_at: When it is next to be logged.
        blocked: Whether anybody kept it waiting.
        lacks: The topic without credit; None: it is memory that it waits for.
        told: Who was told that it waits.
    """

    __slots__ = (
        "__weakref__",
        "begin",
        "blocked",
        "complain_at",
        "deadline",
        "lacks",
        "told",
    )

    def __init__(self, deadline: float | None) -> None:
        self.begin = time.monotonic()
        self.deadline = deadline
        self.complain_at = self.begin + COMPLAIN_SECONDS
        self.blocked = False
        self.lacks: Topic | None = None
        self.told: set[Session] = set()

    def until(self) -> float:
        """When it is to look again, if nothing changes before."""
        if self.deadline is None:
            return self.complain_at
        return min(self.deadline, self.complain_at)


class Waits:
    """Calls that wait until others let them go on."""

    def __init__(self, lead: Lead) -> None:
        self._lead = lead
        self._mesh = lead.mesh
        self._waited_for: Counter[Session] = Counter()
        self._left_alone: deque[tuple[str, Wait]] = deque()
        # By topic. What an interrupt kept from its end is none when its call is gone.
        self._running = weakref.WeakKeyDictionary[Wait, str]()
        lead.chore = self._end_left_alone

    def wait_for(
        self,
        topic: Topic,
        reached: Callable[[], bool],
        blockers: Callable[[], Collection[Session]],
        describe: Callable[[Collection[Session]], str],
        deadline: float | None,
        turns: Wait | None = None,
        memory: bool = False,
    ) -> bool:
        """Wait until nobody keeps the message from being published.

        Args:
            reached: Whether nobody does; the lock may be free while it looks.
            blockers: Whom it waits for.
            describe: That in words, with the remedy.
            turns: Of a call that does not wait here, but comes again for its next
                turn, up to its own deadline.
            memory: It is memory that they hold: they are told so at once, not only
                after a while.

        Returns:
            False only for `turns`: it has to go on waiting.
        """
        lead, wait = self._lead, Wait(deadline) if turns is None else turns
        wait.blocked = True
        self._running[wait] = topic.name
        try:
            while True:
                lead.poll(flush=True)
                lead.check()
                seen = self._mesh.changed
                if reached():
                    return True
                now = time.monotonic()
                if wait.deadline is not None and now >= wait.deadline:
                    self._raise_timeout(topic, now - wait.begin, blockers(), describe)
                if memory:
                    self._tell_waiting(blockers(), wait.told)
                if now >= wait.complain_at:
                    wait.complain_at = now + 60.0
                    logger.warning(
                        "publish on %r has waited %.0f s: %s",
                        topic.name,
                        now - wait.begin,
                        describe(blockers()),
                    )
                    self._tell_waiting(blockers(), wait.told)
                if turns is not None:
                    turns.lacks = None if memory else topic
                    return False
                if self._mesh.changed == seen:
                    lead.sleep(wait.until())
        finally:
            if turns is None:
                self._end(topic, wait)
            lead.step_down()

    @contextlib.contextmanager
    def turns(self, name: str, timeout: float | None) -> Iterator[Wait]:
        """What a call that waits elsewhere passes to `publish`, again and again."""
        wait = Wait(deadline_after(timeout))
        try:
            yield wait
        except GeneratorExit:
            # The task is no more: in any thread, and maybe under the lock.
            if wait.blocked:
                wait.blocked = False
                self._left_alone.append((name, wait))
                self._lead.upkeep_soon()
            raise
        finally:
            if wait.blocked:
                with self._lead.lock:
                    self._end(self._mesh.publisher.topic(name), wait)
                    self._lead.step_down()

    def waited(self) -> dict[str, float]:
        """For how many seconds calls that still wait have done so, by topic."""
        now = time.monotonic()
        found: dict[str, float] = {}
        for wait, name in self._running.items():
            found[name] = found.get(name, 0.0) + now - wait.begin
        return found

    def _end_left_alone(self) -> None:
        while self._left_alone:
            name, wait = self._left_alone.popleft()
            self._end(self._mesh.publisher.topic(name), wait)

    def _end(self, topic: Topic, wait: Wait) -> None:
        self._running.pop(wait, None)
        topic.stats.blocked_seconds += time.monotonic() - wait.begin
        self._tell_going_on(wait.told)

    def _tell_waiting(self, sessions: Collection[Session], told: set[Session]) -> None:
        for session in sessions:
            if session not in told:
                told.add(session)
                self._waited_for[session] += 1
                if self._waited_for[session] == 1:
                    session.control(wire.WAITING, True)
                    self._mesh.setbacks.send(session, time.monotonic(), flush=True)

    def _tell_going_on(self, told: set[Session]) -> None:
        """The call does not wait any more; perhaps others of this member do."""
        while told:
            session = told.pop()
            self._waited_for[session] -= 1
            if self._waited_for[session] > 0:
                continue
            del self._waited_for[session]
            if session.alive:
                session.control(wire.WAITING, False)
                self._mesh.setbacks.send(session, time.monotonic(), flush=True)

    def _raise_timeout(
        self,
        topic: Topic,
        seconds: float,
        blockers: Collection[Session],
        describe: Callable[[Collection[Session]], str],
    ) -> NoReturn:
        raise PublishTimeout(
            f"{self._lead.where}: not published on {topic.name!r} within "
            f"{round(seconds, 3):g} s, nobody got the message: {describe(blockers)}",
            [session.name for session in blockers],
        )

    # -- credit ----------

    def wait_for_credit(
        self,
        topic: Topic,
        frames: Frames,
        deadline: float | None,
        turns: Wait | None,
    ) -> bool:
        """As `wait_for`, until the topic has credit for another message.

        Raises:
            MessageTooLarge, CodecError: Who subscribed meanwhile would refuse it.
        """
        if not self.wait_for(
            topic,
            topic.has_credit,
            lambda: [feed.session for feed in topic.waits_for()],
            functools.partial(_who_lags, topic),
            deadline,
            turns,
        ):
            return False
        self._mesh.publisher.check(topic, frames)
        return True


def _who_lags(topic: Topic, sessions: Collection[Session]) -> str:
    parts = []
    for feed in topic.feeds:
        session = feed.session
        if session not in sessions:
            continue
        text = f"{session.name!r} has not taken what it has"
        if under_way := topic.newest - feed.received:
            text += f" ({under_way} messages are still on their way to it)"
        if session.conn is None:
            text += " (its connection is broken)"
        if session.peer_waits:
            text += " and is itself waiting in publish for this member to recv"
        parts.append(text)
    return (
        f"no credit: {'; '.join(parts)}. Let them recv faster, raise depth or "
        "window_bytes of their subscription, or use mq.keep_last"
    )
