"""Interrupt: Ctrl-C in the middle of a stream, of `connect` and of `close`."""

from __future__ import annotations

import contextlib
import signal
import threading
from abc import abstractmethod
from collections.abc import Callable
from types import FrameType
from typing import Any

import mq
from mq.testing.cases import case
from mq.testing.harness import Group
from mq.testing.member import Member
from mq.testing.waiting import STEP, StepTimeout, wait_until
from mq.testing.worker import resources

_INTERRUPTS = 50
"""How often `recv`, and how often `publish`, of a stream has to be interrupted."""
_ECHOED = 4
"""One number of so many is sent back."""

Echoed = tuple[list[tuple[int, Any]], set[Any]]


class _Interrupted:
    """An application to which interrupts come all the time.

    Those that come between two calls are its own to handle, here by nothing.

    Attributes:
        interrupted: How often each call was.
        progress: Grows.
    """

    def __init__(self, *calls: str) -> None:
        self.interrupted = dict.fromkeys(calls, 0)
        self.progress = 0
        self._calling = ""

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Raise in the library's code, and in what it calls."""
        if self._calling and frame and frame.f_code.co_filename != __file__:
            self.interrupted[self._calling] += 1
            raise KeyboardInterrupt

    @abstractmethod
    def has_enough(self) -> bool:
        """Whether it has been interrupted often enough."""


class _Echo(_Interrupted):
    """Sends a stream back.

    Attributes:
        queue: Set once it is connected.
        got: The sequence numbers and payloads that were received.
        unsure: What was published or not: the call was interrupted.
    """

    def __init__(self) -> None:
        super().__init__("recv", "publish")
        self.queue: Any = None
        self.got: list[tuple[int, Any]] = []
        self.unsure: set[Any] = set()

    def has_enough(self) -> bool:
        return min(self.interrupted.values()) >= _INTERRUPTS

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
            self.progress += 1
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


def _begin(worker: Any, application: type[_Interrupted]) -> None:
    """Handle interrupts; before it connects, as the library looks only at times."""
    worker.application = application()
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


def _end_echo(worker: Any) -> Echoed:
    """What was received, and what may not be echoed."""
    _end(worker)
    return worker.application.got, worker.application.unsure


def _end(worker: Any) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _progress(worker: Any) -> tuple[int, bool]:
    """How far it is, and whether enough was interrupted."""
    application: _Interrupted = worker.application
    return application.progress, application.has_enough()


def _interrupt_on(
    host: Member, call: Callable[..., Any], *args: Any, spread: int = 1
) -> Any:
    """Interrupt a call again whenever there is progress; what it returned.

    Args:
        host: The member.
        call: What to call in it, with `args`.
        spread: Up to so many questions are answered between progress and interrupt.
    """
    calling = host.ask(call, *args)
    enough, seen = False, 0
    while not (enough or calling.done()):
        now, enough = host.ask(_progress, worker_main=False).result()
        if now > seen:
            for _ in range(now % spread):
                host.ask(_progress, worker_main=False).result()
            host.interrupt()
            seen = now
    return calling.result()


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
    host.ask(_begin, _Echo).result()
    options = group.options()
    echoes = _interrupt_on(host, _echo_stream_within, group.backend, options)
    _check_echo(host.ask(_end_echo).result(), echoes)


@case(
    "Interrupt",
    needs="separate_processes",
    otherwise=_interrupt_within_a_process,
    compiled=True,
)
def interrupts_in_a_stream_lose_and_repeat_nothing(group: Group) -> None:
    """Wherever in `recv` and `publish` they come, and nothing is left behind."""
    near, far = group.unconnected("near"), group.member("far")
    near.ask(_begin, _Echo).result()
    group.connecting(near).result()
    near.subscribe("t")
    far.subscribe("echo")
    streaming = far.begin(_stream)
    _interrupt_on(near, _echo_stream)
    _check_echo(near.ask(_end_echo).result(), streaming.result())


class _Visitor(_Interrupted):
    """Connects and closes, again and again."""

    def __init__(self) -> None:
        super().__init__("connect", "close")

    def has_enough(self) -> bool:
        return self.interrupted["connect"] >= 20 and self.progress >= 40

    def visit(self, backend: str, options: dict[str, Any]) -> None:
        """Be a member for a moment, unless it is interrupted."""
        self.progress += 1
        queue = None
        try:
            self._calling = "connect"
            queue = mq.connect(backend, name=f"visitor {self.progress}", **options)
            self._calling = "close"
            queue.close(linger=0.0)
        except KeyboardInterrupt:
            self._calling = ""
            if queue is not None:
                queue.close(linger=0.0)  # the interrupt may have come before it began
        finally:
            self._calling = ""


def _visit(worker: Any, backend: str, options: dict[str, Any]) -> list[str]:
    """Visit a member of this process; what is left in the end."""
    application: _Visitor = worker.application
    with mq.connect(backend, name="host", **options) as host:
        mq.connect(backend, name="first", **options).close()
        before = resources()
        while not application.has_enough():
            application.visit(backend, options)
        with mq.connect(backend, name="last", **options) as last:
            last.subscribe("t")
            host.publish("t", "whole", timeout=STEP)
            assert last.recv(timeout=STEP).payload == "whole"

        def left() -> list[str]:
            now = set().union(*resources()) - set().union(*before)
            return [
                name for name in sorted(now) if not name.startswith("thread mq-test")
            ]

        with contextlib.suppress(StepTimeout):  # the script asserts that nothing is
            wait_until(lambda: not left(), "what was interrupted", STEP / 2)
        return left()


@case("Interrupt", compiled=True)
def interrupted_connect_and_close_leave_nothing_behind(group: Group) -> None:
    """Wherever in them it comes; the group goes on."""
    host = group.process("host")
    host.ask(_begin, _Visitor).result()
    options = group.options()
    left = _interrupt_on(host, _visit, group.backend, options, spread=40)
    assert not left, f"it left {', '.join(left)}"
    host.ask(_end).result()
