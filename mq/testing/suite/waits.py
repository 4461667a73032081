"""Interrupt, Fork: Ctrl-C while a call waits, and a handler that forks."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np

import mq
from mq.testing import programs
from mq.testing.cases import case
from mq.testing.harness import Group
from mq.testing.member import Member
from mq.testing.waiting import STEP, Stopwatch, state_of, wait_until
from mq.threads import current_frames

_CALLS = ("recv", "publish", "loan", "wait_for_members", "wait_for_subscribers")


def _full_pair(backend: str, options: dict[str, Any]) -> tuple[mq.MQ, mq.MQ, int]:
    writer = mq.connect(backend, name="writer", **options)
    reader = mq.connect(backend, name="reader", **options)
    reader.subscribe("t", depth=1)
    return writer, reader, programs.fill(writer, "t")


def _publish_a_loan(writer: mq.MQ) -> None:
    with writer.loan("t", (4,), "u1") as array:
        array[:] = 1


def _waits(writer: mq.MQ, reader: mq.MQ, call: str) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "recv": writer.recv,
        "publish": lambda: writer.publish("t", "interrupted"),
        "loan": lambda: _publish_a_loan(writer),
        "wait_for_members": lambda: writer.wait_for_members(9, timeout=None),
        "wait_for_subscribers": lambda: writer.wait_for_subscribers(
            "t", 9, timeout=None
        ),
    }
    calls[call]()


def _interrupted(worker: Any, call: str) -> float:
    """The time, by the clock of all processes, when a waiting call was interrupted."""
    writer, reader, _ = worker.queue
    try:
        _waits(writer, reader, call)
    except KeyboardInterrupt:
        return time.monotonic()
    raise AssertionError(f"{call} ended by itself")


def _closed_by_a_handler(worker: Any, call: str) -> str:
    """What a waiting call raised when a signal's handler closed its queue."""
    writer, reader, _ = worker.queue
    worker.queue = None

    def close(number: int, frame: FrameType | None) -> None:
        writer.close(linger=0.0)

    before = signal.signal(signal.SIGTERM, close)
    try:
        _waits(writer, reader, call)
    except Exception as error:  # whichever it is, the script looks at it
        return type(error).__name__
    finally:
        signal.signal(signal.SIGTERM, before)
        reader.close(linger=0.0)
    raise AssertionError(f"{call} ended by itself")


class _Forked(Exception):
    """A signal's handler has forked, and its child has ended."""


def _forked_by_a_handler(worker: Any, call: str) -> str:
    """What a waiting call raised in the child which a signal's handler forked."""
    writer, reader, _ = worker.queue
    parent = os.getpid()
    pipe = os.pipe()

    def fork(number: int, frame: FrameType | None) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads and fork
            child = os.fork()
        if child == 0:
            faulthandler.dump_traceback_later(STEP / 2, exit=True)  # where it hangs
            return
        os.close(pipe[1])
        os.waitpid(child, 0)
        raise _Forked

    before = signal.signal(signal.SIGTERM, fork)
    try:
        _waits(writer, reader, call)
    except BaseException as error:
        if os.getpid() != parent:
            os.write(pipe[1], type(error).__name__.encode())
            os._exit(0)
        if not isinstance(error, _Forked):
            raise
        with os.fdopen(pipe[0]) as said:
            return said.read()
    finally:
        if os.getpid() != parent:
            os._exit(1)
        signal.signal(signal.SIGTERM, before)
    raise AssertionError(f"{call} ended by itself")


def _make_full_pair(worker: Any, backend: str, options: dict[str, Any]) -> None:
    worker.queue = _full_pair(backend, options)


def _main_thread_waits(worker: Any, call: str = "") -> bool:
    """Whether the worker's main thread waits inside the library, and in such a call."""
    names = _calls_of(threading.main_thread())
    is_there = not names.isdisjoint(("_waits", "_waits_in_close"))
    return is_there and (not call or call in names) and state_of(os.getpid()) == "S"


def _calls_of(thread: threading.Thread) -> set[str]:
    frame = current_frames().get(thread.ident or 0)
    names = set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return names


def _check_after_interrupts(worker: Any) -> None:
    writer, reader, filled = worker.queue
    worker.queue = None
    programs.receive(reader, filled)
    writer.publish("t", "next", timeout=STEP)
    (message,) = programs.receive(reader, 1)
    assert (message.digest, message.sequence) == ("next", filled)
    reader.close()
    writer.close()


def _take_interrupt(worker: Any) -> None:
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)


def _interrupt_elsewhere(host: Member) -> None:
    host.ask(_take_interrupt, worker_main=False).result()


def _wait_until_asleep(host: Member, call: str = "") -> None:
    while not host.ask(_main_thread_waits, call, worker_main=False).result():
        pass


def _interrupt(
    host: Member,
    call: Callable[..., float],
    *args: object,
    interrupt: Callable[[Member], None] = Member.interrupt,
) -> float:
    """Interrupt a call once it waits; the seconds until it has ended."""
    waiting = host.ask(call, *args)
    _wait_until_asleep(host)
    watch = Stopwatch(host.pid)
    interrupt(host)
    return watch.seconds(waiting.result())


def _interrupt_each_call(host: Member, interrupt: Callable[[Member], None]) -> None:
    taken = [_interrupt(host, _interrupted, c, interrupt=interrupt) for c in _CALLS]
    assert max(taken) < 0.5, dict(zip(_CALLS, taken, strict=True))


@case("Interrupt")
def interrupt_ends_every_waiting_call(group: Group) -> None:
    """Within half a second, and an interrupted `publish` did nothing."""
    host = group.process("host")
    host.ask(_make_full_pair, group.backend, group.options()).result()
    _interrupt_each_call(host, Member.interrupt)
    host.ask(_check_after_interrupts).result()


def _read_in_a_thread(worker: Any) -> None:
    writer, _, _ = worker.queue

    def read() -> None:
        with contextlib.suppress(mq.Closed):
            writer.recv()

    thread = threading.Thread(target=read, name="mq-test-reader", daemon=True)
    thread.start()
    wait_until(lambda: "recv" in _calls_of(thread), "the other thread's recv")


@case("Interrupt")
def interrupt_that_does_not_wake_the_call_ends_it_too(group: Group) -> None:
    """One that comes just before the call falls asleep, or that another thread takes.

    Handlers run in the main thread, but only a signal which comes as that sleeps, and
    which that takes, ends its sleep.
    """
    host = group.process("host")
    host.ask(_make_full_pair, group.backend, group.options()).result()
    _interrupt_each_call(host, _interrupt_elsewhere)
    host.ask(_read_in_a_thread).result()  # which looks after the engine from now on
    _interrupt_each_call(host, _interrupt_elsewhere)
    host.ask(_check_after_interrupts).result()


@case("Interrupt")
def the_handler_of_a_signal_may_close_the_queue(group: Group) -> None:
    """What waits says so, as for any other `close`."""
    host = group.process("host")
    for call in _CALLS:
        host.ask(_make_full_pair, group.backend, group.options()).result()
        waiting = host.ask(_closed_by_a_handler, call)
        _wait_until_asleep(host)
        host.signal(signal.SIGTERM)
        assert waiting.result() == "Closed", call


@case("Fork")
def the_handler_of_a_signal_may_fork(group: Group) -> None:
    """The child, which goes on in the call, is told; the parent's queue is whole."""
    host = group.process("host")
    host.ask(_make_full_pair, group.backend, group.options()).result()
    for call in _CALLS:
        waiting = host.ask(_forked_by_a_handler, call)
        # Not for the interpreter lock: uncompiled, it may have the queue's lock then.
        _wait_until_asleep(host, "wait")
        host.signal(signal.SIGTERM)
        raised = waiting.result()
        assert raised == "ForkedProcess", f"{call}: {raised!r}"
    host.ask(_check_after_interrupts).result()


def _interrupt_while_dropped(worker: Any, nbytes: int) -> list[str]:
    """What became of signals that were sent as a payload went, where one was lost."""
    writer, reader = worker.queue
    send = ctypes.CDLL(None)["raise"]
    lost: list[str] = []
    swallowed: list[str] = []
    hook, sys.unraisablehook = sys.unraisablehook, lambda u: swallowed.append(repr(u))
    try:
        for number in range(5):
            writer.publish("t", np.full(nbytes, number, np.uint8), timeout=STEP)
            payloads = [reader.recv(timeout=STEP).payload]
            assert (payloads[0] == number).all()
            try:
                # Its last reference goes as the call returns, which the signal came in.
                send(int(signal.SIGINT), ctypes.py_object(payloads.pop()))
                lost.append(f"number {number} of {nbytes} bytes: {swallowed or None}")
            except KeyboardInterrupt:
                pass
    finally:
        sys.unraisablehook = hook
    return lost


def _make_pair(
    worker: Any, backend: str, options: dict[str, Any], zero_copy: bool
) -> None:
    writer, reader = (mq.connect(backend, name=n, **options) for n in "wr")
    reader.subscribe("t", zero_copy=zero_copy, timeout=STEP)
    worker.queue = writer, reader


def _close_pair(worker: Any) -> None:
    for queue in worker.queue:
        queue.close(linger=0.0)
    worker.queue = None


def _interrupt_as_it_goes(group: Group, zero_copy: bool) -> None:
    host = group.process("host")
    host.ask(_make_pair, group.backend, group.options(), zero_copy).result()
    for nbytes in (40_000, 200_000, 2_000_000):
        lost = host.ask(_interrupt_while_dropped, nbytes).result()
        assert not lost, f"no interrupt came with {'; '.join(lost)}"
    host.ask(_close_pair).result()


@case("Interrupt")
def interrupt_is_not_lost_as_a_payload_goes(group: Group) -> None:
    """What its memory's return does runs no handler, whose exception would be lost."""
    _interrupt_as_it_goes(group, zero_copy=False)


@case("Interrupt", compiled=True)
def interrupt_is_not_lost_as_a_view_goes(group: Group) -> None:
    """Nor does what tells the publisher that its memory is not viewed any more."""
    _interrupt_as_it_goes(group, zero_copy=True)


def _waits_in_close(queue: mq.MQ) -> None:
    queue.close(linger=STEP)


def _interrupted_in_close(worker: Any) -> float:
    """The time, by the clock of all processes, when `close` was interrupted."""
    try:
        _waits_in_close(worker.queue)
    except KeyboardInterrupt:
        return time.monotonic()
    raise AssertionError("close ended by itself")


def _close_beside_a_full_peer(group: Group) -> None:
    """Where members are threads, none can hang; what it has not read keeps nobody."""
    a, b = group.members("a", "b")
    b.subscribe("t", depth=1)
    a.run(programs.fill, "t")
    a.call("close", linger=0.0)


@case("Interrupt", needs="separate_processes", otherwise=_close_beside_a_full_peer)
def interrupt_ends_close_though_a_peer_hangs(group: Group) -> None:
    """Within half a second, and nothing of the queue is left."""
    a, b = group.members("a", "b")
    b.subscribe("t")
    b.stop()
    a.publish("t", "never read")
    assert _interrupt(a, _interrupted_in_close) < 0.5
