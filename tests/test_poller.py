"""When a wait spins, by a clock and events of the test's own."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import mq
from mq import signals, speed
from mq.mesh import poller as module
from mq.mesh.poller import SPIN_SECONDS, Poller

LOOK_SECONDS = SPIN_SECONDS / 40
EVENT = 4711


class ScriptedPoller(Poller):
    """Looks at events that the test has planned, by the test's clock.

    Attributes:
        now: The time.
        due: When the next event comes.
        spun: Looks that did not wait.
        slept: Looks that did.
        seen: What it says has come.
        whole: Whether each event is something whole.
    """

    now = 0.0
    due = 0.0
    spun = 0
    slept = 0
    seen = 0
    whole = True

    def monotonic(self) -> float:
        return self.now

    def _look(self, timeout: float | None) -> list[int]:
        if timeout == 0:
            self.spun += 1
            self.now += LOOK_SECONDS
        else:
            self.slept += 1
            end = float("inf") if timeout is None else self.now + timeout
            self.now = max(self.now, min(self.due, end))
        return [EVENT] if self.now >= self.due else []

    def wait_for_event(self, seconds: float, timeout: float | None = None) -> list[int]:
        """Wait, while the event comes in so many seconds."""
        self.due = self.now + seconds
        self.spun = self.slept = 0
        self.seen += self.whole
        return self.wait(timeout, self.seen)


@pytest.fixture
def poller(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedPoller]:
    made = ScriptedPoller()
    made.spins = True
    made._spinner = None  # which looks at no events of a test's, nor at its clock
    clock: Any = type("Clock", (), {"monotonic": made.monotonic})
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(signals, "time", clock)
    yield made
    made.close()


def test_after_a_short_wait_the_next_one_spins(poller: ScriptedPoller) -> None:
    """And goes on doing so while that finds the event."""
    assert poller.wait_for_event(SPIN_SECONDS / 2) == [EVENT]
    assert (poller.spun, poller.slept) == (0, 1)
    for _ in range(100):
        assert poller.wait_for_event(SPIN_SECONDS / 2) == [EVENT]
        assert poller.spun
        assert not poller.slept


def test_where_events_are_rare_no_wait_spins(poller: ScriptedPoller) -> None:
    """For it would be in vain."""
    for _ in range(100):
        assert poller.wait_for_event(2 * SPIN_SECONDS) == [EVENT]
        assert (poller.spun, poller.slept) == (0, 1)


def test_spinning_in_vain_becomes_ever_rarer(poller: ScriptedPoller) -> None:
    """As where the other side can run only while this one sleeps."""
    spinning = 0
    for _ in range(10_000):
        poller.due = poller.now + SPIN_SECONDS / 2
        if not poller._short_waits_left:
            poller.due = poller.now + 2 * SPIN_SECONDS
        poller.spun = 0
        assert poller.wait(None, seen=0) == [EVENT]
        spinning += bool(poller.spun)
    assert 1 < spinning < 60


def test_it_spins_again_when_that_pays_again(poller: ScriptedPoller) -> None:
    """After at most as many short waits as there are between two trials."""
    for _ in range(20):
        poller._short_waits_left = 0
        poller.wait_for_event(2 * SPIN_SECONDS)
    spinning = [
        bool(poller.wait_for_event(SPIN_SECONDS / 2) and poller.spun)
        for _ in range(1000)
    ]
    first = spinning.index(True)
    assert 1 < first <= 256
    assert all(spinning[first:])


def test_the_packets_of_a_slow_wire_are_not_spun_for(poller: ScriptedPoller) -> None:
    """A large message of 50 Mbit/s comes in thousands of them, each soon enough."""
    gap = SPIN_SECONDS / 2
    for _ in range(5):
        poller.wait_for_event(gap)
    poller.whole = False
    spun = sum(bool(poller.wait_for_event(gap) and poller.spun) for _ in range(1000))
    assert spun * gap < 0.01
    poller.whole = True
    assert poller.wait_for_event(gap) == [EVENT]
    assert poller.spun


def test_the_parts_of_a_fast_wire_are_spun_for(poller: ScriptedPoller) -> None:
    """They are as many, but waking up would take longer than they do."""
    poller.wait_for_event(SPIN_SECONDS / 2)
    poller.whole = False
    for _ in range(1000):
        assert poller.wait_for_event(SPIN_SECONDS / 8) == [EVENT]
        assert poller.spun


def test_a_short_timeout_is_kept(poller: ScriptedPoller) -> None:
    """However long spinning would take."""
    poller.wait_for_event(SPIN_SECONDS / 2)
    began = poller.now
    assert poller.wait_for_event(1.0, timeout=SPIN_SECONDS / 4) == []
    assert poller.now == began + SPIN_SECONDS / 4
    assert not poller.spun
    assert poller.wait_for_event(1.0, timeout=0.5) == []
    assert poller.now - began < 0.51 + 2 * SPIN_SECONDS


def test_who_waits_for_nobody_does_not_spin(poller: ScriptedPoller) -> None:
    """The keeper's waits are not on anybody's way."""
    poller.wait_for_event(SPIN_SECONDS / 2)
    poller.due = poller.now + SPIN_SECONDS / 2
    assert poller.wait(None) == [EVENT]
    assert not poller.spun


def test_a_wake_up_is_seen_while_spinning() -> None:
    """As while sleeping."""
    poller = Poller()
    poller.spins = True
    try:
        for _ in range(3):
            poller.wake()
            assert poller.wait(5.0, seen=0) == []
            assert not poller._short_waits_left
    finally:
        poller.close()


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity"), reason="cores cannot be counted here"
)
def test_on_one_core_nothing_spins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever one waits for needs it."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    poller = Poller()
    poller.close()
    assert not poller.spins


def test_threads_of_one_process_do_not_spin() -> None:
    """Whom one waits for needs the interpreter lock."""
    with mq.connect("inproc", group="no-spinning", name="a") as queue:
        assert not queue._lead.poller.spins


def test_an_interrupt_that_took_a_wake_up_does_not_swallow_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C may come just after the kernel has reported an event."""
    poller = Poller()
    look = poller._look

    def interrupted(timeout: float | None) -> list[int]:
        assert look(timeout)
        raise KeyboardInterrupt

    try:
        poller.wake()
        with monkeypatch.context() as patch:
            patch.setattr(poller, "_look", interrupted)
            with pytest.raises(KeyboardInterrupt):
                poller.wait(5.0)
        poller.wake()
        assert look(0)
    finally:
        poller.close()


def test_a_handlers_wait_is_woken_though_the_one_below_took_a_wake_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A signal may come just after the kernel has reported an event, too."""
    poller = Poller()
    look = poller._look
    woken: list[list[int]] = []

    def interrupted(timeout: float | None) -> list[int]:
        monkeypatch.setattr(poller, "_look", wakened)
        found = look(timeout)
        poller.wait(5.0)  # the handler's
        return found

    def wakened(timeout: float | None) -> list[int]:
        poller.wake()  # in another thread
        found = look(0)
        woken.append(list(found))
        return found

    try:
        poller.wake()
        monkeypatch.setattr(poller, "_look", interrupted)
        poller.wait(5.0)
        assert woken == [[poller.wake_fd]]
    finally:
        poller.close()


def test_who_comes_to_wait_once_it_is_closed_is_woken() -> None:
    """And then finds the queue closed."""
    poller = Poller()
    poller.close()
    assert poller.wait(60.0) == []


needs_spinner = pytest.mark.skipif(
    speed.SPINNER is None, reason="nothing is compiled, or there is no epoll"
)


@pytest.fixture
def spinner() -> Iterator[tuple[Any, int]]:
    """A spinner, and a descriptor that makes what it looks at readable."""
    assert speed.SPINNER is not None
    with contextlib.closing(select.epoll()) as epoll:
        event = os.eventfd(0, os.EFD_NONBLOCK)
        epoll.register(event, select.EPOLLIN)
        with contextlib.closing(speed.SPINNER(epoll.fileno())) as made:
            yield made, event
        os.close(event)


@needs_spinner
def test_a_spinner_tells_what_is_ready_until_it_is_time(
    spinner: tuple[Any, int],
) -> None:
    """Without a time it looks once."""
    made, event = spinner
    assert made.spin(0.0) == []
    os.eventfd_write(event, 1)
    assert made.spin(0.0) == made.spin(60.0) == [event]
    with pytest.raises(TypeError):
        made.spin("long")


@needs_spinner
def test_a_spinner_that_is_closed_meanwhile_ends_and_frees_its_copy(
    spinner: tuple[Any, int],
) -> None:
    """Not before: the number might be another file's, whose events it would take."""
    made, event = spinner
    before = set(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(1) as pool:
        begun = threading.Event()
        looking = pool.submit(lambda: (begun.set(), made.spin(60.0))[1])
        assert begun.wait(60.0)
        made.close()
        assert looking.result(60.0) == []
    made.close()
    assert len(set(os.listdir("/proc/self/fd"))) == len(before) - 1
    os.eventfd_write(event, 1)
    assert made.spin(60.0) == []


@needs_spinner
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_frees_the_copy_that_a_thread_was_looking_at(
    spinner: tuple[Any, int],
) -> None:
    """That thread is not in the child, and never closes it."""
    made, _ = spinner
    with ThreadPoolExecutor(1) as pool:
        begun = threading.Event()
        looking = pool.submit(lambda: (begun.set(), made.spin(60.0))[1])
        assert begun.wait(60.0)
        before = len(os.listdir("/proc/self/fd"))
        child = os.fork()
        if not child:
            made.close()
            os._exit(len(os.listdir("/proc/self/fd")) != before - 1)
        _, status = os.waitpid(child, 0)
        made.close()
        assert looking.result(60.0) == []
    assert os.waitstatus_to_exitcode(status) == 0


@needs_spinner
def test_a_spinner_needs_a_descriptor_of_its_own() -> None:
    """And says so, where there is none."""
    assert speed.SPINNER is not None
    with pytest.raises(OSError, match="Bad file descriptor"):
        speed.SPINNER(-1)
