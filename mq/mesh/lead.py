"""Who polls: one thread leads at a time.

A blocking call takes the lead and polls the engine in its own thread, so the hot path
has no thread hop; other callers follow on a condition. When no call has led for
`IDLE_SECONDS`, or the one that leads sleeps on after its time, the keeper thread leads
and does everything. All protocol code runs under one lock, which is free while the
leader sleeps in the poller, so `publish` sends from its own thread at any time.

The keeper costs the other threads the interpreter lock whenever it wakes. So while
calls come and go it only naps, looks at the clock without any lock, and naps again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, NoReturn, TypeVar

from mq import forks, signals
from mq.errors import Closed, ForkedProcess
from mq.log import Log
from mq.mesh.atomic import give_up
from mq.mesh.changes import Changes
from mq.mesh.listeners import Listener, Listeners
from mq.mesh.mesh import Mesh
from mq.mesh.poller import Poller
from mq.mesh.recovery import abandon
from mq.speed import Lock, has_other_locks, is_mine, renew, signal_waits, take_back
from mq.undisturbed import check_may_wait

T = TypeVar("T")
logger = Log(__name__)

IDLE_SECONDS: Final = 0.02
"""How long the lead stays free for the next call before the keeper takes it."""
LOOK_SECONDS: Final = 0.001
"""`publish` looks at what has arrived when nobody has for so long."""
CALM_SECONDS: Final = 0.25
"""After so long in one call that leads, the keeper sleeps until the call ends."""
GIVE_WAY_SECONDS: Final = 50e-6
"""Enough for a waiting thread to wake up and take the lock."""
STOP_SECONDS: Final = 5.0
"""For the keeper to end, which may be in the middle of its upkeep; it is a daemon."""
_KEEPER: Final = -1
_NEVER: Final = float("inf")


class Lead:
    """A mesh, its lock, its keeper thread, and turns at polling it.

    Attributes:
        mesh, poller, lock: What works under the lock, and what sleeps without it.
        where: Of which queue it is, for errors.
        closing, ender: Whether calls must end, and what ends them, for the error.
        forked: Whether this is the copy of another process's queue.
        upkeep, upkeep_seconds: What the keeper calls without the lock, and how often.
        chore: What it calls in each of its turns with the lock; there is one at most.
        wanted: A thread has found the lock taken; who gets it takes that back.
        led_at: When a call last led, or did what lets the keeper nap on.
        polled_at: When the mesh worked for the last time.
    """

    def __init__(self, mesh: Mesh, poller: Poller, where: str) -> None:
        self.mesh = mesh
        self.poller = poller
        self.lock = Lock()
        self.closing = self.forked = self.wanted = False
        self._stop = self._keeper_polls = False
        self.ender = "close()"
        self.upkeep: Callable[[], None] = lambda: None
        self.upkeep_seconds = 1.0
        self.chore: Callable[[], None] = lambda: None
        self.led_at = self.polled_at = self._upkeep_at = self._asleep_until = 0.0
        self.where = where
        self._changes = Changes(self.lock)
        self._followers = self._seen = 0
        self._leader: int | None = None
        self._batch_at = self._nap_until = _NEVER
        self._ready: list[int] = []
        self._listeners = Listeners()
        mesh.wake, mesh.wake_fd = poller.wake, poller.wake_fd
        mesh.watch_added, mesh.watch_removed = poller.register, poller.unregister
        self._bell = threading.Lock()
        self._bell.acquire()
        self._keeper = threading.Thread(
            target=self._keep, name="mq-keeper", daemon=True
        )
        forks.register(self)

    def start(self) -> None:
        """Start the keeper."""
        signals.hold()
        self._keeper.start()

    def upkeep_soon(self) -> None:
        """Have `upkeep` called within a second; from any thread, and never waits."""
        self._upkeep_at = 0.0

    def stop(self) -> None:
        """End the keeper, if it was started, and wait for it."""
        with self.lock:
            self._stop = True
            self._ring()
        self.poller.wake()
        begun = self._keeper.ident is not None
        if begun and threading.current_thread() is not self._keeper:
            self._keeper.join(STOP_SECONDS)

    def abandon(self) -> None:
        """In a forked child: whoever else held the lock does not exist here."""
        self.forked = True
        in_the_middle = self.is_in_the_middle()
        renew(self.lock)
        abandon(self.mesh, in_the_middle)

    def end_calls(self) -> None:
        """Have every call end with `Closed`."""
        self.closing = True
        self.poller.wake()

    def is_in_the_middle(self) -> bool:
        """Whether this thread has the lock; then this is a handler, or a hook."""
        return is_mine(self.lock)

    def check(self) -> None:
        """Raises: Closed, ForkedProcess, if the queue cannot be used any more."""
        if self.closing or self.mesh.replaced or self.forked:
            self.refuse()

    def refuse(self) -> NoReturn:
        """Raises: Closed, ForkedProcess."""
        if self.forked:
            raise ForkedProcess(
                f"{self.where} was connected before this process was forked; connect "
                "in the child, or start children with 'spawn' or 'forkserver'"
            )
        raise Closed(f"{self.where} is closed: {self.mesh.replaced or self.ender}")

    # -- what a call does ----------

    def poll(self, flush: bool = False, until_message: bool = False) -> None:
        """Let the mesh work; the lock is held."""
        if self.forked:
            self.refuse()
        ready, self._ready = self._ready, []
        try:
            self.mesh.poll(ready, flush=flush, until_message=until_message)
        except BaseException:
            self.mesh.recover()
            raise
        finally:
            self.polled_at = time.monotonic()
            if self.mesh.changed != self._seen:
                self.tell()

    def tell(self) -> None:
        """Have who waits look at what has changed; the lock is held."""
        self._seen = self.mesh.changed
        if self._followers:
            self._changes.notify_all()
        if self._asleep_until and self._leader not in (None, _KEEPER):
            self.poller.wake()  # what it waits for may be what was found
        self._listeners.tell()

    def tell_all(self) -> None:
        """Have everybody look again who waits and does not lead; the lock is held."""
        self._changes.notify_all()
        self._listeners.tell()

    def sleep(self, deadline: float | None) -> bool:
        """Wait until something may have changed; the lock is held before and after.

        Returns:
            False if the deadline has passed.
        """
        now = time.monotonic()
        if deadline is not None and now >= deadline:
            return False
        check_may_wait(self.lock)
        me = threading.get_ident()
        if self._leader in (None, _KEEPER, me):
            if self._leader != me:
                # A keeper that leads sleeps on, and naps when the next event wakes it.
                self._leader, self._asleep_until = me, 0.0
            until = self.mesh.next_deadline()
            if deadline is not None:
                until = min(until, deadline)
            self._wait_for_events(until, now, me)
        else:
            if self.mesh.next_deadline() < self._asleep_until:
                self.poller.wake()  # what this call left unfinished is the leader's
            self._followers += 1
            try:
                self._changes.wait(None if deadline is None else deadline - now)
            finally:
                self._followers -= 1
        return True

    def _wait_for_events(self, until: float, now: float, me: int) -> None:
        outer, self._asleep_until = self._asleep_until, until
        ready: list[int] = []
        self._keeper_polls |= me == _KEEPER
        given: deque[object] = deque()
        try:
            try:
                seen = None if me == _KEEPER else self.mesh.changed
                give_up(self.lock, given)
                self._let_others_in()
                ready = self.poller.wait(max(0.0, until - now), seen)
                self.wanted |= self.lock.locked()
            finally:
                take_back(self.lock, given)
        finally:
            take_back(self.lock, given)  # a Ctrl-C came before the first did so
            self.wanted = False
            if me == _KEEPER:
                self._keeper_polls = False
                self._nap_until = _NEVER
            if self._leader == me:
                self._asleep_until = outer
                self._ready = ready
            else:
                # A call took the lead meanwhile; this wake-up was meant for it.
                self.poller.wake()

    def give_way(self) -> None:
        """In the middle of something long: let who waits have the lock.

        And signals their handlers, which may raise.
        """
        if (self.wanted or signal_waits()) and not has_other_locks(self.lock):
            self.outside(self._let_others_in)

    def outside(self, work: Callable[[], T]) -> T:
        """Do what may take long without the lock, which is held before and after.

        The keeper leads meanwhile, if this thread did and does not come back soon.
        """
        me, outer = threading.get_ident(), self._asleep_until
        given: deque[object] = deque()
        try:
            try:
                if self._leader == me:
                    self._asleep_until = time.monotonic()
                give_up(self.lock, given)
                return work()
            finally:
                take_back(self.lock, given)
        finally:
            take_back(self.lock, given)  # a Ctrl-C came before the first did so
            if self._leader == me:
                self._asleep_until = outer

    def _let_others_in(self) -> None:
        """The lock is free, but not fair: who takes it back at once is always first."""
        if self.wanted:
            # Not to wait for anything: it is long enough off the processor for a thread
            # that found the lock taken, and nothing is wrong if that comes later.
            time.sleep(GIVE_WAY_SECONDS)

    def step_down(self) -> None:
        """A call ends; the lead stays free for the next one. The lock is held."""
        if self._leader == threading.get_ident():
            if self._asleep_until:  # a call that this one's handler came into
                self.poller.wake()  # for what this one has seen or left unfinished
                return
            self._leader = None
            self.led_at = time.monotonic()
            self._batch_at = self.mesh.batch_deadline()
            if self._followers:
                self._changes.notify_all()
            self._need_keeper(self.led_at)
        elif self.mesh.next_deadline() < self._asleep_until:
            self.poller.wake()  # what this call left unfinished is the leader's

    def after_sending(self, now: float, held_until: float | None) -> None:
        """Something was sent outside of the lead; see to what follows of it.

        Args:
            now: The time.
            held_until: When a batch that was held back must leave, if there is one.
        """
        if self._leader == _KEEPER and held_until is not None:
            self._leader = None  # it must watch the clock, not the engine
            self.poller.wake()
        if self._leader is None:
            self.led_at = now
            if now - self.polled_at > LOOK_SECONDS:
                self.poll()
            if held_until is not None:
                self._batch_at = held_until
            self._need_keeper(now)
        else:
            self.nudge()

    def nudge(self) -> None:
        """After sending outside of the lead: keep the sleeping leader up to date."""
        if self._leader is None:
            self._batch_at = self.mesh.batch_deadline()
            self._need_keeper(time.monotonic())
        elif self._asleep_until or self._leader != threading.get_ident():
            # The engine may have taken in, while sending, what would have woken it.
            before = self.mesh.changed
            self.poll()
            if (
                self.mesh.changed != before
                or self.mesh.next_deadline() < self._asleep_until
            ):
                self.poller.wake()

    # -- the keeper ----------

    def _need_keeper(self, now: float) -> None:
        """Nobody leads any more: the keeper must not sleep for long."""
        latest = min(now + 2 * IDLE_SECONDS, self._batch_at + LOOK_SECONDS)
        if self._listeners or self._nap_until > latest:
            self._ring()

    def _ring(self) -> None:
        self._nap_until = 0.0
        if self._keeper_polls:
            self.poller.wake()
        if self._bell.locked():
            self._bell.release()

    def _keep(self) -> None:
        self.mesh.faults.keeper = threading.get_ident()
        nap = 0.0
        while not self._stop:
            if nap > 0.0:
                self._nap_until = time.monotonic() + nap
                self._bell.acquire(timeout=nap)
                # From here on it is to be told of what it may not have seen.
                self._nap_until = _NEVER
            # Without the lock: two numbers are all that most turns look at.
            now = time.monotonic()
            nap = min(self.led_at + IDLE_SECONDS, self._batch_at) - now
            if nap <= 0.0 or self._listeners or now >= self._upkeep_at:
                with self.lock:
                    nap = self._turn()

    def _turn(self) -> float:
        """What is due; seconds until the next turn. The lock is held."""
        self.chore()
        self._run_upkeep()
        if self.mesh.faults.deaf:
            return self.upkeep_seconds  # what is readable would stay so
        now = time.monotonic()
        if self._leader is not None and self._leader != _KEEPER:
            late_at = self._asleep_until + IDLE_SECONDS
            if now < late_at or not self._asleep_until:
                self._batch_at = _NEVER  # the leader sees to it
                calm = now - self.led_at > CALM_SECONDS
                longest = min(1.0, self.upkeep_seconds, late_at - now)
                return max(IDLE_SECONDS, longest) if calm else IDLE_SECONDS
            # It does not wake up: a signal's handler runs in its thread, and may take
            # as long as it likes. It will find that it does not lead any more.
            self._leader, self._asleep_until = None, 0.0
            self._batch_at = self.mesh.batch_deadline()
        try:
            if now - self.led_at < IDLE_SECONDS and not self._listeners:
                if now >= self._batch_at:
                    self.poll()
                    self._batch_at = self.mesh.batch_deadline()
                return min(self.led_at + IDLE_SECONDS, self._batch_at) - now
            self._leader = _KEEPER
            self.poll()
            if not self._stop:
                until = self.mesh.next_deadline()
                self._wait_for_events(until, time.monotonic(), _KEEPER)
        except Exception:
            logger.exception("the keeper of %s failed; it goes on", self.where)
            return IDLE_SECONDS
        return 0.0

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
                logger.exception("the upkeep of %s failed; it goes on", self.where)
        finally:
            self.lock.acquire()

    def listen(self, listener: Listener) -> None:
        """Call `listener`, under the lock, whenever something changed; it is held."""
        if self._listeners.add(listener):
            self._ring()

    def unlisten(self, listener: Listener) -> None:
        """Undo `listen`; the lock is held."""
        self._listeners.remove(listener)
