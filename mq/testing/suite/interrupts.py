"""Interrupt: Ctrl-C while calls wait, and in the middle of a stream."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import mq
from mq.testing import programs
from mq.testing.cases import case
from mq.testing.harness import Group
from mq.testing.member import Member
from mq.testing.waiting import STEP


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


def _make_full_pair(worker: Any, backend: str, options: dict[str, Any]) -> None:
    worker.queue = _full_pair(backend, options)


def _main_thread_waits(worker: Any) -> bool:
    """Whether the worker's main thread waits inside the library."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    names = set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return not names.isdisjoint(("_waits", "_waits_in_close")) and _sleeps()


def _sleeps() -> bool:
    with open("/proc/self/stat") as file:  # of the main thread
        return file.read().rpartition(")")[2].split()[0] == "S"


def _check_after_interrupts(worker: Any) -> None:
    writer, reader, filled = worker.queue
    worker.queue = None
    programs.receive(reader, filled)
    writer.publish("t", "next", timeout=STEP)
    (message,) = programs.receive(reader, 1)
    assert (message.digest, message.sequence) == ("next", filled)
    reader.close()
    writer.close()


def _interrupt(host: Member, call: Callable[..., float], *args: object) -> float:
    """Interrupt a call once it waits; the seconds until it has ended."""
    waiting = host.ask(call, *args)
    asks = host.ask(_main_thread_waits, worker_main=False)
    while not asks.result():
        asks = host.ask(_main_thread_waits, worker_main=False)
    sent = time.monotonic()
    host.interrupt()
    return float(waiting.result()) - sent


@case("Interrupt")
def interrupt_ends_every_waiting_call(group: Group) -> None:
    """Within half a second, and an interrupted `publish` did nothing."""
    host = group.process("host")
    host.ask(_make_full_pair, group.backend, group.options()).result()
    calls = ("recv", "publish", "loan", "wait_for_members", "wait_for_subscribers")
    taken = [_interrupt(host, _interrupted, call) for call in calls]
    assert max(taken) < 0.5, dict(zip(calls, taken, strict=True))
    host.ask(_check_after_interrupts).result()


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


_INTERRUPTS = 40
"""How often `recv`, and how often `publish`, of a stream has to be interrupted."""
_ECHOED = 4
"""One number of so many is sent back."""

Echoed = tuple[list[tuple[int, Any]], set[Any]]


class _Application:
    """Echoes a stream although interrupts come all the time.

    Those that come between two calls are the application's to handle, here by nothing.

    Attributes:
        queue: Set once it is connected.
        got: The sequence numbers and payloads that were received.
        unsure: What was published or not: the call was interrupted.
    """

    def __init__(self) -> None:
        self.queue: Any = None
        self.got: list[tuple[int, Any]] = []
        self.unsure: set[Any] = set()
        self._calling = ""
        self._interrupted = {"recv": 0, "publish": 0}

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Raise in the library's code, and in what it calls."""
        if self._calling and frame and frame.f_code.co_filename != __file__:
            self._interrupted[self._calling] += 1
            raise KeyboardInterrupt

    def has_enough(self) -> bool:
        """Whether it has been interrupted often enough."""
        return min(self._interrupted.values()) >= _INTERRUPTS

    def _recv(self) -> mq.Message:
        while True:
            self._calling = "recv"
            try:
                message: mq.Message = self.queue.recv(timeout=STEP)
                return message
            except KeyboardInterrupt:
                continue
            finally:
                self._calling = ""

    def _publish(self, payload: Any) -> bool:
        """Whether it returned."""
        self._calling = "publish"
        try:
            self.queue.publish("echo", payload, timeout=STEP)
            return True
        except KeyboardInterrupt:
            return False
        finally:
            self._calling = ""

    def echo(self) -> None:
        """Until the stream ends, which it is asked to do after enough interrupts."""
        asked = False
        while not self.got or self.got[-1][1] != "end":
            message = self._recv()
            self.got.append((message.sequence, message.payload))
            if message.sequence % _ECHOED == 0 and not self._publish(message.payload):
                self.unsure.add(message.payload)
            if not asked and self.has_enough():
                asked = self._publish("enough")
        while not self._publish("over"):
            pass


def _stream(queue: mq.MQ) -> list[tuple[int, Any]]:
    """Publish numbers until told that they are enough; the echoes."""
    enough = threading.Event()
    echoes: list[tuple[int, Any]] = []

    def publish() -> None:
        number = 0
        while not enough.is_set():
            queue.publish("t", number, timeout=STEP)
            number += 1
        queue.publish("t", "end", timeout=STEP)

    publisher = threading.Thread(target=publish, name="mq-test-stream")
    publisher.start()
    try:
        while not echoes or echoes[-1][1] != "over":
            message = queue.recv(timeout=STEP)
            echoes.append((message.sequence, message.payload))
            if message.payload == "enough":
                enough.set()
    finally:
        enough.set()
        publisher.join()
    return echoes


def _begin_application(worker: Any) -> None:
    """Handle interrupts; before it connects, as the library looks only at times."""
    worker.application = _Application()
    signal.signal(signal.SIGINT, worker.application.on_signal)


def _echo_stream(worker: Any) -> None:
    worker.application.queue = worker.queue
    worker.application.echo()


def _echo_stream_within(worker: Any, backend: str, options: dict[str, Any]) -> Any:
    """Both sides in one process, where no other is possible; the echoes."""
    near = worker.queue = mq.connect(backend, name="near", **options)
    far = mq.connect(backend, name="far", **options)
    near.subscribe("t")
    far.subscribe("echo")
    echoes: list[Any] = []
    streaming = threading.Thread(
        target=lambda: echoes.extend(_stream(far)), name="mq-test-far"
    )
    streaming.start()
    _echo_stream(worker)
    streaming.join()
    far.close()
    return echoes


def _end_application(worker: Any) -> Echoed:
    """What was received, and what may not be echoed."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return worker.application.got, worker.application.unsure


def _progress(worker: Any) -> tuple[int, bool]:
    """How much was received, and whether enough was interrupted."""
    application: _Application = worker.application
    return len(application.got), application.has_enough()


def _interrupt_echo(host: Member, call: Callable[..., Any], *args: Any) -> Any:
    """Interrupt a call again whenever it has received something; what it returned."""
    echoing = host.ask(call, *args)
    enough, received = False, 0
    while not (enough or echoing.done()):
        now, enough = host.ask(_progress, worker_main=False).result()
        if now > received:
            host.interrupt()
            received = now
    return echoing.result()


def _check_echo(echoed: Echoed, echoes: list[tuple[int, Any]]) -> None:
    """No gap, nothing twice; what an interrupted `publish` had may be missing."""
    got, unsure = echoed
    last = len(got) - 1
    wrong = [n for n, each in enumerate(got[:last]) if each != (n, n)]
    assert not wrong, f"{len(wrong)} of {last} wrong, from {got[wrong[0]]} on"
    assert got[last] == (last, "end")
    assert [sequence for sequence, _ in echoes] == list(range(len(echoes)))
    numbers = [payload for _, payload in echoes if isinstance(payload, int)]
    assert numbers == sorted(set(numbers))
    missing = set(range(0, last, _ECHOED)) - set(numbers)
    assert missing <= unsure, f"{len(missing - unsure)} echoes are missing"


def _interrupt_within_a_process(group: Group) -> None:
    host = group.process("host")
    host.ask(_begin_application).result()
    options = group.options()
    echoes = _interrupt_echo(host, _echo_stream_within, group.backend, options)
    _check_echo(host.ask(_end_application).result(), echoes)


@case(
    "Interrupt",
    needs="separate_processes",
    otherwise=_interrupt_within_a_process,
    compiled=True,
)
def interrupts_in_a_stream_lose_and_repeat_nothing(group: Group) -> None:
    """Wherever in `recv` and `publish` they come, and nothing is left behind."""
    near, far = group.unconnected("near"), group.member("far")
    near.ask(_begin_application).result()
    group.connecting(near).result()
    near.subscribe("t")
    far.subscribe("echo")
    streaming = far.begin(_stream)
    _interrupt_echo(near, _echo_stream)
    _check_echo(near.ask(_end_application).result(), streaming.result())
