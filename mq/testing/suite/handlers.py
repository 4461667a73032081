"""Interrupt, Close, Death: signals, and handlers that use a queue or take long."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
from collections import Counter
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, Final

import mq
from mq.testing import programs, worker
from mq.testing.cases import case
from mq.testing.harness import Group
from mq.testing.waiting import STEP

_LARGE = 100_000


class _Handler:
    """Publishes whenever a signal comes, whatever the process is doing."""

    def __init__(self) -> None:
        self.queue: Any = None
        self.calls = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.queue.publish("t", f"signal {self.calls}", timeout=STEP)
        self.queue.stats()
        self.calls += 1


def _handle(worker: Any) -> None:
    worker.handler = _Handler()
    signal.signal(signal.SIGTERM, worker.handler)


def _publish_and_handle(worker: Any, least: int) -> tuple[int, int]:
    """Publish until the handler has run so often; how many of either there were.

    Every second message is a large one, for which a link may have memory of its own.
    """
    handler = worker.handler
    number = 0
    while handler.calls < least:
        payload = bytes(_LARGE) if number % 2 else number
        worker.queue.publish("t", payload, timeout=STEP)
        number += 1
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # no more of them
    worker.queue.publish("t", "end", timeout=STEP)
    return number, handler.calls


def _set_queue(worker: Any) -> None:
    worker.handler.queue = worker.queue


def _handled(worker: Any) -> int:
    return int(worker.handler.calls)


def _no_signals(group: Group) -> None:
    """Where members are threads, none but the main one has handlers."""
    a, b = group.members("a", "b")
    b.subscribe("t")
    a.publish("t", 1)
    assert b.recv().payload == 1


@case("Interrupt", needs="separate_processes", otherwise=_no_signals, compiled=True)
def the_handler_of_a_signal_may_publish(group: Group) -> None:
    """Though it comes while the same thread publishes."""
    a, b = group.unconnected("a"), group.member("b")
    a.ask(_handle).result()
    group.connecting(a).result()
    a.ask(_set_queue).result()
    b.subscribe("t")
    reading = b.begin(programs.receive_until, "end")
    publishing = a.ask(_publish_and_handle, 30)
    for sent in range(30):
        a.signal(signal.SIGTERM)
        while a.ask(_handled, worker_main=False).result() <= sent:
            assert sent == 29 or not publishing.done(), "it has ended"
    numbers, calls = publishing.result()
    got = reading.result()
    assert [m.sequence for m in got] == list(range(numbers + calls + 1))
    own = [m.digest for m in got if isinstance(m.digest, int)]
    assert own == list(range(0, numbers, 2))
    handled = [m.digest for m in got[:-1] if isinstance(m.digest, str)]
    assert handled == [f"signal {number}" for number in range(calls)]


class _LongHandler:
    """Stays until it is let go.

    Attributes:
        entered: Set once it runs.
        left: To be set so that it ends.
    """

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.left = threading.Event()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.entered.set()
        self.left.wait(2 * STEP)


def _handle_for_long(worker: Any) -> None:
    worker.handler = _LongHandler()
    signal.signal(signal.SIGTERM, worker.handler)


def _leads(worker: Any) -> bool:
    """Whether the main thread waits for what comes, for all threads."""
    return bool(worker.queue._lead._leader == threading.main_thread().ident)


def _handler_runs(worker: Any) -> bool:
    return bool(worker.handler.entered.wait(STEP))


def _end_handler(worker: Any) -> None:
    worker.handler.left.set()


@case("Interrupt", needs="separate_processes", otherwise=_no_signals, compiled=True)
def a_handler_of_a_signal_that_takes_long_holds_nobody_up(group: Group) -> None:
    """Neither peers nor other threads: the call that it came in does not lead on."""
    a = group.unconnected("a")
    b = group.member("b", peer_timeout=3 * STEP)
    a.ask(_handle_for_long).result()
    group.connecting(a, peer_timeout=3 * STEP).result()
    a.subscribe("t")
    reading = a.begin(programs.receive, 1, main=True)
    while not a.ask(_leads, worker_main=False).result():
        assert not reading.done(), "nothing was published"
    a.signal(signal.SIGTERM)
    assert a.ask(_handler_runs, worker_main=False).result()
    b.publish("t", 1)
    b.call("flush", timeout=STEP)
    a.ask(worker.call, "subscribe", "u", timeout=STEP, worker_main=False).result()
    a.ask(_end_handler, worker_main=False).result()
    assert [m.digest for m in reading.result()] == [1]


def _end_by_sigpipe(worker: Any) -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def _publish_while_it_listens(queue: mq.MQ, topic: str) -> None:
    """Publish as fast as its subscriber takes it, until there is none."""
    sizes = itertools.cycle([_LARGE, 10 * _LARGE])
    while queue.subscribers(topic):
        queue.publish(topic, bytes(next(sizes)), timeout=STEP)


@case("Death", needs="separate_processes", otherwise=_no_signals)
def peers_that_die_end_no_program_that_sigpipe_ends(group: Group) -> None:
    """As it ends those that print into pipes, and by default all but Python's."""
    a, *doomed = group.members("a", "b", "c", "d")
    a.ask(_end_by_sigpipe).result()
    for member in doomed:
        topic = f"to {member.name}"
        member.subscribe(topic)
        running = a.begin(_publish_while_it_listens, topic)
        member.run(programs.receive, 50)
        member.begin(programs.receive, 1_000_000)
        member.kill()
        running.result()
    a.publish("t", "alive")


_CALLS: Final[dict[str, tuple[Any, ...]]] = {
    "publish": ("t", "more"),
    "recv": (0,),
    "flush": (),
    "members": (),
    "subscribers": ("t",),
    "stats": (),
    "describe": (),
}


def _publish_until_closed(queue: mq.MQ, call: str) -> int:
    """Call this again and again until a handler has closed the queue.

    Returns:
        How many messages `publish` has returned for.
    """
    begun = threading.Event()
    ended: list[int] = []

    def close(number: int, frame: FrameType | None) -> None:
        queue.close(linger=STEP)
        ended.append(number)

    def end() -> None:
        begun.wait()
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, close)
    threading.Thread(target=end, name="mq-test-end").start()
    published = 0
    while not ended:
        try:
            if published < 10 or call == "publish":
                queue.publish("t", published, timeout=STEP)
                published += 1
            getattr(queue, call)(*_CALLS[call])
            published += call == "publish"
        except mq.Closed:
            break
        except TimeoutError:
            assert call == "recv"
        begun.set()
    return published


def _end_by_signals(
    backend: str, options: dict[str, Any], published: Connection
) -> None:
    """Be a member for each call in turn, and end with the last."""
    for call in _CALLS:
        queue = mq.connect(backend, name=call, **options)
        published.send((call, _publish_until_closed(queue, call)))


@case("Close")
def the_handler_of_a_signal_may_close(group: Group) -> None:
    """In the middle of any call: all arrives, and the process just ends."""
    listener = None
    if group.capabilities.separate_processes:
        listener = group.member("listener")
        listener.subscribe("t", depth=100_000)
    reader, writer = multiprocessing.Pipe(duplex=False)
    with reader, writer:
        assert (
            group.run_process(_end_by_signals, group.backend, group.options(), writer)
            == 0
        )
        published = dict(reader.recv() for _ in _CALLS)
    if listener is not None:
        got = listener.run(programs.receive, sum(published.values()))
        assert Counter(m.sender for m in got) == published
        assert {m.name for m in listener.call("members")} == {"listener"}
