"""Tasks that wait for a queue stand in line: what changes wakes who can go on.

Each event loop has lines of its own, one for each thing that is waited for: a message,
credit for a topic. It is told once of what has changed, looks which lines move, and
calls the first of each. Who leaves a line, as it has gone on or was cancelled before it
could, calls the next. So nothing is left while a task sleeps that could take it, and
few look in vain: where another thread, or another loop, was faster.

Lines are changed in the thread of their loop, and as a whole: with the queue's lock, or
in one step, as a handler of a signal may raise in between.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import asyncio  # which takes as long as all of ours; who uses it has imported it

    from typing_extensions import Self

    from mq.mesh.lead import Lead

LOOP_SECONDS: Final = 0.005
"""How long calls that need not wait keep an event loop."""


class _Line:
    """Places of tasks that wait for the same, in the order in which they came.

    Attributes:
        moves: Whether one of them could go on; asked under the queue's lock.
    """

    __slots__ = ("moves", "places")

    def __init__(self, moves: Callable[[], bool]) -> None:
        self.moves = moves
        # Of a dict the first is sought among all that have been taken from its front.
        self.places: OrderedDict[Place, None] = OrderedDict()

    def call(self) -> None:
        """Wake the first, if it could go on and sleeps.

        None before it has looked: who comes later would be served before it.
        """
        if self.moves():
            while self.places:
                place = next(iter(self.places))
                if place.call():
                    return
                self.places.pop(place, None)

    def deserted(self) -> list[Place]:
        """Those at the front whose calls are over; asked between the loop's tasks.

        None of them is awake then, but one that two interrupts kept from leaving.
        """
        return list(takewhile(lambda place: place.woken is None, self.places))

    def call_all(self) -> None:
        """Wake all that sleep."""
        for place in self.places:
            place.call()


class Lines:
    """Those of the tasks of one event loop that wait for one queue.

    They are known as long as there are any: they refer to their loop, and whether that
    has ended nobody may ever tell.

    Attributes:
        due: What the loop has been told and has not come to; None: nothing.
    """

    def __init__(
        self,
        lead: Lead,
        loop: asyncio.AbstractEventLoop,
        known: dict[asyncio.AbstractEventLoop, Lines],
    ) -> None:
        self._lead = lead
        self.loop = loop
        self._known = known
        self._places: set[Place] = set()
        self._lines: dict[object, _Line] = {}
        self._left_alone: deque[Place] = deque()
        self.due: object = None

    def enter(self, place: Place) -> None:
        """From now on the loop is told of what changes."""
        with self._lead.lock:
            self._known[self.loop] = self
            self._places.add(place)
            self._lead.listen(self._tell)

    def stand(self, place: Place, what: object, moves: Callable[[], bool]) -> None:
        """Put a place at the end of a line, unless it is in that already."""
        if place not in self._places:
            self.enter(place)  # it seemed deserted, in a loop that runs within another
        if place.what is not what:
            if place.what is not None:
                with self._lead.lock:
                    self._step_out(place)
            place.what = what
        line = self._lines.get(what)
        if line is None:
            line = self._lines[what] = _Line(moves)
        line.places[place] = None

    def leave(self, place: Place) -> None:
        """The call ends; may be repeated."""
        with self._lead.lock:
            self._leave(place)

    def leave_alone(self, place: Place) -> None:
        """The task is no more: in any thread, and maybe under the lock."""
        self._left_alone.append(place)
        self._tell()

    def _leave(self, place: Place) -> None:
        self._step_out(place)
        self._places.discard(place)
        if not self._places:
            self._lead.unlisten(self._tell)
            self._known.pop(self.loop, None)

    def _step_out(self, place: Place) -> None:
        line = self._lines.get(place.what)
        if line is not None:
            line.places.pop(place, None)
            if line.places:
                line.call()
            else:
                del self._lines[place.what]
        place.what = None  # last: an interrupt before has the next called once more

    def _tell(self, again: bool = False) -> bool:
        """Something has changed; whether there is anybody to be told again."""
        if self.loop.is_closed():
            self._known.pop(self.loop, None)
            self._places.clear()
            self._lines.clear()
            return False
        if self.due is None:
            look = partial(self._look)
            # Not an argument: what a handler raises may hold the frame for long.
            look.errand = _Errand(self, again)  # type: ignore[attr-defined]
            with contextlib.suppress(RuntimeError):  # it was closed meanwhile
                self.loop.call_soon_threadsafe(look)
        return True

    def _look(self) -> None:
        self.due = None
        lead = self._lead
        try:
            with lead.lock:
                while self._left_alone:
                    self._leave(self._left_alone[0])
                    self._left_alone.popleft()
                has_ended = lead.closing or lead.mesh.replaced or lead.forked
                for line in list(self._lines.values()):
                    for place in line.deserted():
                        self._leave(place)
                    if has_ended:
                        line.call_all()
                    else:
                        line.call()
        except BaseException:
            self._tell()  # a handler came before that was done
            raise

    def make_sure(self, place: Place, woken: asyncio.Future[None]) -> None:
        """In the loop, after a task that was called: it has looked, or never will."""
        if place.woken is woken:
            with self._lead.lock:
                self._step_out(place)


class _Errand:
    """What a loop has been told, and is told once more if it never comes to it.

    A handler that raises may come in the loop itself, which then drops what it was
    about to call.
    """

    __slots__ = ("_again", "_lines", "_token")

    def __init__(self, lines: Lines, again: bool) -> None:
        self._lines = lines
        self._again = again
        self._token = lines.due = object()

    def __del__(self) -> None:
        if self._lines.due is self._token:
            self._lines.due = None
            if not self._again:
                self._lines._tell(again=True)


class Place:
    """Of a call that may have to wait, while entered.

    Attributes:
        woken: What the task sleeps on; None: it is awake.
        what: What it waits for, by which its line is known; None: nothing yet.
    """

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self.woken: asyncio.Future[None] | None = None
        self.what: object = None

    def __enter__(self) -> Self:
        try:
            self._lines.enter(self)
        except BaseException:
            self._lines.leave(self)  # an interrupt came as that ended
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if kind is GeneratorExit:
            self._lines.leave_alone(self)
        else:
            self._lines.leave(self)

    def call(self) -> bool:
        """Wake the task, if it sleeps; False: it was cancelled, and takes nothing."""
        woken = self.woken
        if woken is not None and not woken.done():
            woken.set_result(None)
            self._lines.loop.call_soon(self._lines.make_sure, self, woken)
        return woken is None or not woken.cancelled()

    async def wait(
        self, what: object, moves: Callable[[], bool], deadline: float | None
    ) -> bool:
        """Wait in the line for `what` until called, or for the deadline.

        Args:
            what: Who has been called, and has found nothing, keeps its place.
            moves: Whether there is some of it; asked under the queue's lock.

        Returns:
            False if the deadline had passed already.
        """
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0.0:
            return False
        loop = self._lines.loop
        woken = self.woken = loop.create_future()
        self._lines.stand(self, what, moves)
        # Not `asyncio.wait_for`, which up to Python 3.11 returns in spite of `cancel`
        # where it was called just before.
        timer = None if left is None else loop.call_later(left, self.call)
        before = _turn.until
        try:
            await woken
        finally:
            self.woken = None
            if timer is not None:
                timer.cancel()
        if _turn.until == before:  # of several in one turn of the loop the first counts
            _turn.until = time.monotonic() + LOOP_SECONDS
        return True


class _Turn(threading.local):
    """Of the thread whose event loop calls.

    Attributes:
        until: When the loop's other tasks are due.
        resting: A token of each call that lets them have their turn.
    """

    def __init__(self) -> None:
        self.until = 0.0
        self.resting: set[object] = set()


_turn = _Turn()


async def let_others_run() -> None:
    """Now and then, as asyncio changes tasks, and cancels them, only where one waits.

    A task that always finds a message would be the only one, and deaf to a Ctrl-C.
    Several of them have equal parts of the time.
    """
    if time.monotonic() > _turn.until:
        import asyncio

        resting, token = _turn.resting, object()
        resting.add(token)
        try:
            await asyncio.sleep(0)
            _turn.until = time.monotonic() + LOOP_SECONDS / len(resting)
        finally:
            resting.discard(token)
