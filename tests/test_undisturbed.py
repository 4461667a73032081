"""What is opened and closed in a thread of its own, where no interrupt comes."""

from __future__ import annotations

import contextvars
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable

import pytest

from mq import undisturbed as module
from mq.errors import ForkedProcess
from mq.threads import current_frames
from mq.undisturbed import Stopper, undisturbed

SLEEPERS = ("wait", "<lambda>")
"""What a thread is in, of the module, that waits for the work."""
colour: contextvars.ContextVar[str] = contextvars.ContextVar("colour")


def fail() -> int:
    raise LookupError("no")


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def interrupt_here() -> None:
    """One that this thread takes, and that does not wake the one that sleeps."""
    main = threading.main_thread().ident
    assert main is not None
    while True:
        code = current_frames()[main].f_code
        if code.co_filename == module.__file__ and code.co_name in SLEEPERS:
            break
        time.sleep(0)
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)


def test_it_returns_what_the_work_returns_and_raises_what_it_raises() -> None:
    """Nothing is undone then."""
    undone: list[int] = []
    assert undisturbed(lambda: 7, undone.append) == 7
    with pytest.raises(LookupError, match="no"):
        undisturbed(fail, undone.append)
    assert undone == []


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_that_a_handler_forks_does_not_wait_for_the_work() -> None:
    """The thread that does it is its parent's."""
    begun, ended = threading.Event(), threading.Event()
    statuses: list[int] = []

    def fork(number: int, frame: object) -> None:
        child = os.fork()
        if child == 0:
            signal.alarm(60)  # where it hangs
            return
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        ended.set()

    def work() -> int:
        begun.set()
        ended.wait(60.0)
        return 7

    def send() -> None:
        begun.wait(60.0)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, fork)
    sender = threading.Thread(target=send)
    sender.start()
    try:
        found = undisturbed(work)
    except ForkedProcess:
        os._exit(0)
    finally:
        signal.signal(signal.SIGTERM, before)
    sender.join()
    assert (found, statuses) == (7, [0])


def test_an_error_does_not_keep_alive_what_it_was_about() -> None:
    """A link, for example, whose descriptors would be freed by the next collection."""

    class Link:
        pass

    links: list[weakref.ref[Link]] = []

    def work() -> None:
        link = Link()
        links.append(weakref.ref(link))
        raise LookupError

    try:
        undisturbed(work)
    except LookupError:
        pass
    wait_for_threads()
    assert links[0]() is None


def wait_for_threads() -> None:
    """Those of earlier calls have ended."""
    for thread in threading.enumerate():
        if thread.name == "mq-undisturbed":
            thread.join(20.0)
            assert not thread.is_alive()


def test_the_work_sees_the_context_of_its_caller() -> None:
    """Variables of the application's, as those of tracing."""
    colour.set("green")
    assert undisturbed(colour.get) == "green"


def test_the_work_has_the_current_device_of_its_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA keeps one for each thread; torch may be half imported."""
    devices = threading.local()
    devices.current = 3

    class Cuda:
        @staticmethod
        def is_initialized() -> bool:
            return True

        @staticmethod
        def current_device() -> int:
            return getattr(devices, "current", 0)

        @staticmethod
        def set_device(index: int) -> None:
            devices.current = index

    monkeypatch.setitem(sys.modules, "torch.cuda", Cuda)
    assert undisturbed(Cuda.current_device) == 3
    monkeypatch.setitem(sys.modules, "torch.cuda", object())
    assert undisturbed(Cuda.current_device) == 0


def test_only_the_main_thread_needs_another_one() -> None:
    """Interrupts come to no other."""
    assert undisturbed(threading.current_thread) is not threading.current_thread()
    found: list[bool] = []

    def work() -> None:
        found.append(
            undisturbed(threading.current_thread) is threading.current_thread()
        )

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [True]


@pytest.mark.parametrize("interrupt", [interrupt, interrupt_here])
def test_an_interrupt_ends_the_call_and_the_work_is_undone_when_it_ends(
    interrupt: Callable[[], None],
) -> None:
    """It is told so."""
    ends, undone, told = threading.Event(), list[str](), list[str]()
    stopper = Stopper()
    stopper.on_stop(lambda: told.append("stop"))

    def work() -> str:
        interrupt()
        assert ends.wait(20.0)
        return "opened"

    with pytest.raises(KeyboardInterrupt):
        undisturbed(work, undone.append, stopper)
    assert (undone, told) == ([], ["stop"])
    ends.set()
    wait_for_threads()
    assert undone == ["opened"]


def test_work_that_stops_when_told_is_over_when_the_call_ends() -> None:
    """Then nothing is left when the interrupt reaches the caller."""
    ends = threading.Event()
    stopper = Stopper()
    over: list[bool] = []

    def work() -> None:
        stopper.on_stop(ends.set)
        interrupt()
        over.append(ends.wait(20.0))
        raise LookupError  # as `Closed`

    with pytest.raises(KeyboardInterrupt):
        undisturbed(work, stopper=stopper)
    wait_for_threads()
    assert over == [True]


def test_who_listens_late_is_told_at_once() -> None:
    """The interrupt may come before there is anything to stop."""
    stopper, told = Stopper(), list[int]()
    stopper.stop()
    stopper.on_stop(lambda: told.append(1))
    assert stopper.stopped
    assert told == [1]


def test_without_threads_the_caller_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As while the interpreter ends."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert undisturbed(threading.current_thread) is threading.current_thread()
    with pytest.raises(LookupError):
        undisturbed(fail)


def test_work_that_had_not_begun_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The interrupt came before its thread was started."""
    start, starts = threading.Thread.start, list[threading.Thread]()

    def start_but_the_first(thread: threading.Thread) -> None:
        starts.append(thread)
        if len(starts) == 1:
            raise KeyboardInterrupt
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_but_the_first)
    monkeypatch.setattr(module, "_BEGIN_SECONDS", 0.01)
    done: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        undisturbed(lambda: done.append(1), done.append)
    wait_for_threads()
    assert done == []
