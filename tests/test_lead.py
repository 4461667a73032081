"""Who is woken when: the leader, and the keeper wherever it sleeps."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
from fresh_python import output_of
from interrupter import Interrupter

import mq
from mq import signals, speed
from mq.mesh import atomic
from mq.mesh import changes as changes_module
from mq.mesh import lead as lead_module
from mq.mesh.changes import Changes
from mq.mesh.lead import IDLE_SECONDS, Lead
from mq.mesh.poller import Poller
from mq.testing.waiting import wait_until
from mq.threads import current_frames


class CountingPoller:
    """Counts `wake`."""

    def __init__(self) -> None:
        self.wakes = 0
        self.wake_fd = -1

    def register(self, fd: int) -> None: ...

    def unregister(self, fd: int) -> None: ...

    def wait(self, timeout: float | None, spin: bool) -> list[int]:
        return []

    def wake(self) -> None:
        self.wakes += 1


def test_a_child_forked_as_recv_begins_gets_no_message() -> None:
    """A handler runs as the lock is taken; the parent gets it."""
    options = {"group": f"forked-{os.getpid()}"}
    with mq.connect("inproc", **options) as a, mq.connect("inproc", **options) as b:
        b.subscribe("t")
        for number in range(2):
            a.publish("t", number)
        a.flush()
        assert b.recv(0).payload == 0
        lead = b._lead
        lock = lead.lock

        class Forking:
            locked = lock.locked

            def __enter__(self) -> None:
                lock.acquire()
                lead.forked = True

            def __exit__(self, *exc_info: object) -> None:
                lock.release()

        lead.lock = Forking()  # type: ignore[assignment]
        lead.polled_at = time.monotonic() + 60.0  # it need not look at the engine
        with pytest.raises(mq.ForkedProcess):
            b.recv(0)
        lead.lock, lead.forked = lock, False
        assert b.recv(0).payload == 1


@pytest.fixture
def lead() -> Lead:
    """A lead whose mesh finds something with every poll; its keeper does not run."""
    mesh: Any = SimpleNamespace(changed=0, batch_deadline=lambda: float("inf"))
    mesh.faults = SimpleNamespace(deaf=False)

    def poll(*args: object, **options: object) -> None:
        mesh.changed += 1

    mesh.poll = poll
    poller: Any = CountingPoller()
    return Lead(mesh, poller, "a queue")


def wakes(lead: Lead) -> int:
    poller: Any = lead.poller
    return int(poller.wakes)


def test_a_sleeping_leader_is_told_what_another_thread_found(lead: Lead) -> None:
    """What it waits for may be among it; else it would sleep to its deadline."""
    lead._leader, lead._asleep_until = threading.get_ident() + 1, 1.0
    lead.poll()
    assert wakes(lead) == 1
    lead._leader, lead._asleep_until = threading.get_ident(), 0.0
    lead.poll()
    assert wakes(lead) == 1


class HandlingPoller(CountingPoller):
    """Has a signal's handler run in the middle of its first `wait`."""

    def __init__(self, handle: Callable[[], object]) -> None:
        super().__init__()
        self._handlers = [handle]

    def wait(self, timeout: float | None, spin: bool) -> list[int]:
        if self._handlers:
            self._handlers.pop()()
        return []


@pytest.mark.parametrize("what", ["polls", "waits", "leaves", "sends"])
def test_a_leader_is_told_what_its_own_handler_found(lead: Lead, what: str) -> None:
    """It goes on sleeping where the handler came, and leads as before."""
    me = threading.get_ident()
    lead.mesh.next_deadline = lambda: 2.0  # type: ignore[method-assign]
    states: list[tuple[int | None, float, int]] = []

    def handle() -> None:
        with lead.lock:
            if what == "polls":
                lead.poll()
            elif what == "sends":
                lead.after_sending(0.0, 1.0)
            elif what == "waits":
                lead.sleep(None)
                lead.step_down()
            else:
                lead.step_down()
            states.append((lead._leader, lead._asleep_until, wakes(lead)))

    lead.poller = HandlingPoller(handle)  # type: ignore[assignment]
    with lead.lock:
        assert lead.sleep(None)
        assert lead._asleep_until == 0.0
        lead.step_down()
        assert lead._leader is None
    ((leader, asleep_until, woken),) = states
    assert (leader, asleep_until) == (me, 2.0)
    assert woken >= 1


NESTED = """
import os, signal, threading, time
import mq

def handle(number, frame):
    b.publish("t", 1)
    while not a.stats()["inbox"]:
        a.flush(0)

def interrupt():
    for queue in a, b:
        while queue._mesh._next_tick < time.monotonic() + 500.0:
            time.sleep(0.001)
    while a._lead._asleep_until < time.monotonic() + 500.0:
        time.sleep(0.001)
    signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
    if not seen.wait(10.0):
        os._exit(1)

seen = threading.Event()
signal.signal(signal.SIGUSR1, handle)
options = {"group": f"nested-{os.getpid()}"}
with mq.connect("shm", **options) as a, mq.connect("shm", **options) as b:
    a.subscribe("t")
    for queue in a, b:  # nothing else ends the wait
        queue._mesh.liveness.tick_seconds = 1e9
    thread = threading.Thread(target=interrupt)
    thread.start()
    assert a.recv().payload == 1
    seen.set()
    thread.join()
print("seen")
"""


@pytest.mark.skipif(not speed.COMPILED, reason="mq._speed was not built or not wanted")
def test_recv_returns_what_a_handler_in_its_middle_took_in() -> None:
    """Not only when it looks after its connections the next time."""
    assert output_of(NESTED).strip() == "seen"


def test_a_keeper_that_sleeps_on_the_engine_is_told_that_nobody_leads(
    lead: Lead,
) -> None:
    """A call took the lead from it and left; its old deadline is too late."""
    lead._keeper_polls = True
    lead._leader = threading.get_ident()
    lead.step_down()
    assert wakes(lead) == 1


def test_a_keeper_that_is_about_to_nap_is_told_of_a_batch(lead: Lead) -> None:
    """It may have looked before the batch was held: the bell ends its nap at once."""
    lead._leader = None
    lead.after_sending(1.0, 1.001)
    assert lead._bell.acquire(timeout=0)


def test_a_keeper_that_naps_briefly_is_left_alone(lead: Lead) -> None:
    """Waking it costs the other threads the interpreter lock."""
    lead._nap_until = 1.0005
    lead.after_sending(1.0, 1.001)
    assert not lead._bell.acquire(timeout=0)
    assert wakes(lead) == 0


@pytest.mark.parametrize(
    ("led_ago", "asleep_for", "naps"),
    [(0.0, 10.0, IDLE_SECONDS), (10.0, 10.0, 1.0), (10.0, 0.2, 0.2 + IDLE_SECONDS)],
)
def test_a_keeper_sleeps_while_one_call_waits_for_long(
    lead: Lead, led_ago: float, asleep_for: float, naps: float
) -> None:
    """However often that looks after the connections; until it should have done so."""
    me = lead._leader = threading.get_ident()
    now = time.monotonic()
    lead.led_at = now - led_ago
    with lead.lock:
        lead._wait_for_events(now, now, me)
        lead._asleep_until = now + asleep_for
        assert lead._turn() == pytest.approx(naps, abs=0.1 * naps)


def test_a_keeper_leads_in_place_of_who_does_not_wake_up(lead: Lead) -> None:
    """A handler of a signal runs in its thread, for as long as it likes."""
    sleeper = lead._leader = threading.get_ident()
    lead._asleep_until = time.monotonic() - 2 * IDLE_SECONDS
    lead.mesh.next_deadline = lambda: 0.0  # type: ignore[method-assign]
    with lead.lock:
        assert lead._turn() == 0.0
        assert lead._leader != sleeper
    assert lead.mesh.changed == 1


def test_a_keeper_leads_while_who_gives_way_does_not_come_back(
    lead: Lead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handlers run then, too; afterwards nobody takes it for asleep."""
    since: list[float] = []
    monkeypatch.setattr(
        lead, "_let_others_in", lambda: since.append(lead._asleep_until)
    )
    for leader in (threading.get_ident(), None):
        lead._leader, lead.wanted = leader, True
        with lead.lock:
            lead.give_way()
        assert lead._asleep_until == 0.0
    assert since[0] == pytest.approx(time.monotonic(), abs=10.0)
    assert since[1] == 0.0


def test_in_the_middle_of_something_long_others_get_the_lock(lead: Lead) -> None:
    """However soon it is wanted back."""
    got = threading.Event()

    def want() -> None:
        with lead.lock:
            got.set()

    with lead.lock:
        thread = threading.Thread(target=want)
        thread.start()
        lead.wanted = True
        for _ in range(10_000):  # half a second
            lead.give_way()
            if got.is_set():
                break
        assert got.is_set()
        assert lead.lock.locked()
    thread.join()


@pytest.mark.skipif(not speed.COMPILED, reason="mq._speed was not built or not wanted")
def test_in_the_middle_of_something_long_an_interrupt_is_raised(lead: Lead) -> None:
    """Where the mesh is as it must be; the lock is held again."""
    signals.hold()
    with lead.lock:
        lead.give_way()
        os.kill(os.getpid(), signal.SIGINT)
        assert speed.signal_waits()
        with pytest.raises(KeyboardInterrupt):
            lead.give_way()
        assert lead.lock.locked()


@pytest.mark.parametrize(("asleep_until", "woken"), [(2.0, 1), (1.0, 0)])
def test_a_leader_is_told_what_a_follower_left_unfinished(
    lead: Lead, asleep_until: float, woken: int
) -> None:
    """A turn that ended early; else both would sleep until something arrives.

    Not if it wakes in time by itself: waking it costs a system call and more.
    """
    lead._leader = threading.get_ident() + 1
    lead._asleep_until = asleep_until
    lead.mesh.next_deadline = lambda: 1.0  # type: ignore[method-assign]
    with lead.lock:
        assert lead.sleep(time.monotonic() + 0.001)
    assert wakes(lead) == woken


def test_a_keeper_that_naps_is_told_of_a_turn_that_ended_early(lead: Lead) -> None:
    """`recv` of what is ready never leads, and keeps the keeper from leading."""
    lead._nap_until = time.monotonic() + IDLE_SECONDS
    lead.mesh.batch_deadline = lambda: 0.0  # type: ignore[method-assign]
    lead.nudge()
    assert lead._bell.acquire(timeout=0)
    assert lead._batch_at == 0.0


@pytest.mark.parametrize("where", ["leading", "following"])
def test_an_interrupt_that_does_not_wake_who_sleeps_is_seen_soon(
    lead: Lead, where: str
) -> None:
    """It came just before the sleep, or another thread took it, as here."""
    poller = lead.poller = Poller()
    main = threading.get_ident()
    seen, late = threading.Event(), threading.Event()

    def take() -> None:
        while current_frames()[main].f_code.co_name not in ("_look", "wait"):
            time.sleep(0)
        with lead.lock:  # it is asleep
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        if not seen.wait(5.0):
            late.set()
        with lead.lock:
            lead._changes.notify_all()
            poller.wake()

    calls = {
        "leading": lambda: lead._wait_for_events(60.0, 0.0, main),
        "following": lambda: lead._changes.wait(60.0),
    }
    thread = threading.Thread(target=take)
    with lead.lock:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            calls[where]()
        seen.set()
    thread.join()
    poller.close()
    assert not late.is_set()


def test_what_changes_as_a_piece_of_a_wait_ends_is_not_slept_over(lead: Lead) -> None:
    """Who is told of it then waits for the lock, and must look before it sleeps on."""
    main = threading.get_ident()
    changed = list[bool]()
    seen, late = threading.Event(), threading.Event()

    def change() -> None:
        with lead.lock:  # it is asleep
            at_end = ("take_back", "_acquire_restore")  # compiled it has no frame
            while current_frames()[main].f_code.co_name not in at_end:
                time.sleep(0)
            changed.append(True)
            lead._changes.notify_all()
        if not seen.wait(5.0):
            late.set()
        with lead.lock:
            lead._changes.notify_all()

    thread = threading.Thread(target=change)
    with lead.lock:
        thread.start()
        while not changed:
            lead._changes.wait(60.0)
        seen.set()
    thread.join()
    assert not late.is_set()


class InterruptedLock:
    """A lock whose first `acquire` is interrupted while it waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._interrupted = False
        self.locked = self._lock.locked
        self.release = self._lock.release

    def acquire(self, blocking: bool = True) -> bool:
        if self._interrupted or not blocking:
            return self._lock.acquire(blocking)
        self._interrupted = True
        raise KeyboardInterrupt

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()


def giving_up_the_lock(lead: Lead, where: str) -> Callable[[], object]:
    """A call that gives up the lock and takes it back, for the thread that leads."""
    me = threading.get_ident()
    calls: dict[str, Callable[[], object]] = {
        "giving way": lead.give_way,
        "waking up": lambda: lead._wait_for_events(0.0, 0.0, me),
        "following": lambda: lead._changes.wait(0.0),
    }
    return calls[where]


places = pytest.mark.parametrize("where", ["giving way", "waking up", "following"])


@places
def test_an_interrupt_of_who_takes_the_lock_back_waits_until_it_is_taken(
    lead: Lead, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would release what is another thread's by then."""
    for module in (lead_module, changes_module):  # as with nothing compiled
        monkeypatch.setattr(module, "take_back", atomic.take_back)
    lock: Any = InterruptedLock()
    lead.lock = lock
    lead.wanted = True
    me = threading.get_ident()
    lead._leader = me
    lead._changes = Changes(lock)
    call = giving_up_the_lock(lead, where)
    with lock:
        with pytest.raises(KeyboardInterrupt):
            call()
        assert lock.locked()


@pytest.mark.skipif(not speed.COMPILED, reason="mq._speed was not built or not wanted")
@places
def test_interrupts_one_upon_another_leave_who_waits_with_the_lock(
    lead: Lead, where: str
) -> None:
    """The first comes as the lock is taken back, the second as that is tried again."""
    me = threading.get_ident()
    call = giving_up_the_lock(lead, where)
    lead.wanted, lead._leader = True, me

    def interrupt(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_name == "take_back":
            raise KeyboardInterrupt

    before, profile = sys.gettrace(), sys.getprofile()
    with lead.lock:
        sys.settrace(interrupt)  # each ends with what it raises
        sys.setprofile(interrupt)
        try:
            with contextlib.suppress(KeyboardInterrupt):
                call()
        finally:
            sys.setprofile(profile)
            sys.settrace(before)
        assert lead.lock.locked()


@pytest.mark.skipif(not speed.COMPILED, reason="mq._speed was not built or not wanted")
def test_handlers_run_and_raise_while_a_lock_is_taken_back() -> None:
    """It is taken nevertheless, and what the last one raised comes then."""
    lock = speed.Lock()
    held = threading.Event()
    handled = [threading.Event(), threading.Event()]
    me = threading.get_ident()
    taking = map(speed.take_back, [lock], [deque[object]()])
    begin = sys._getframe().f_lineno

    def on_signal(number: int, frame: FrameType | None) -> None:
        left = [event for event in handled if not event.is_set()]
        if left and frame and frame.f_lineno == begin + 21:  # it is being taken
            left[0].set()
            raise KeyboardInterrupt(len(left))

    def hold() -> None:
        with lock:
            held.set()
            for event in handled:
                while not event.wait(0.01):
                    signal.pthread_kill(me, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, on_signal)
    thread = threading.Thread(target=hold)
    try:
        thread.start()
        held.wait()
        with pytest.raises(KeyboardInterrupt, match="1"):
            next(taking)
        assert speed.is_mine(lock)
        speed.take_back(lock, deque())  # and now it does not wait for itself
        lock.release()
        thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_who_is_interrupted_before_the_lock_is_given_up_still_has_it(
    lead: Lead, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And does not wait for itself."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(lead_module, "give_up", interrupted)
    lead.wanted = True
    with lead.lock:
        with pytest.raises(KeyboardInterrupt):
            lead.give_way()
        with pytest.raises(KeyboardInterrupt):
            lead._wait_for_events(0.0, 0.0, threading.get_ident())
        assert lead.lock.locked()


@places
def test_an_interrupt_between_any_bytecodes_leaves_who_waits_with_the_lock(
    lead: Lead, where: str
) -> None:
    """`with` releases it in any case, and would raise another error if it were free."""
    me = threading.get_ident()
    call = giving_up_the_lock(lead, where)
    at, interrupts = 0, 0
    lead.wanted, lead._leader = True, me
    with lead.lock, Interrupter(None, opcodes=True).armed():
        call()  # from 3.13 on a bytecode is seen only where it was looked at before
    while True:
        at += 1
        lead.wanted, lead._leader = True, me
        interrupter = Interrupter((1, at), opcodes=True)
        with lead.lock:
            try:
                with interrupter.armed():
                    call()
            except KeyboardInterrupt:
                interrupts += 1
            assert lead.lock.locked(), interrupter.where
        if not interrupter.where:
            break
    assert interrupts == at - 1 > 20


@pytest.mark.parametrize("again", [False, True], ids=["ended", "begun anew"])
def test_who_waits_for_an_acknowledgement_is_told_that_another_thread_ended_it(
    again: bool,
) -> None:
    """No peer answers any more, and none is to blame."""
    errors: list[BaseException] = []

    def subscribe(depth: int, timeout: float) -> None:
        try:
            queue.subscribe("t", depth=depth, timeout=timeout)
        except mq.MQError as error:
            errors.append(error)

    with (
        mq.connect("inproc", group="ended", name="silent") as silent,
        mq.connect("inproc", group="ended", name="queue") as queue,
    ):
        with silent._lead.lock:
            waiting = threading.Thread(target=subscribe, args=(1, 60.0))
            waiting.start()
            wait_until(lambda: is_in("sleep", waiting), "subscribe")
            queue.unsubscribe("t")
            if again:
                subscribe(2, 0.0)
            waiting.join(30.0)
            assert not waiting.is_alive()
        assert [type(error) for error in errors] == [mq.SubscribeTimeout] * again


def is_in(function: str, thread: threading.Thread) -> bool:
    """Whether a thread is in a call of that name."""
    frame = current_frames().get(thread.ident or 0)
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame is not None
