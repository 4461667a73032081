"""Calls between processes: what a peer calls here, and how it is called.

This is what runs in TensorPipe's threads, in Python of necessity: `deliver`, `hold` and
a few callbacks. They only append to a deque and wake a poller.
"""

from __future__ import annotations

import importlib
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, Protocol

import torch

from mq.transport import SIGNALS_WAIT

rpc: Any = None  # untyped, as most of it is; None where torch has none
try:
    rpc = importlib.import_module("torch.distributed.rpc")
except (ImportError, AttributeError, RuntimeError):  # `_torchrpc_agent` says why
    pass
else:
    rpc = rpc if rpc.is_available() else None

Future = torch.futures.Future


class Receiver(Protocol):
    """Where the calls of a peer go."""

    def arrive(self, sequence: int, heads: Any, bodies: Any, waits: Any) -> Any:
        """Take a batch; runs in a thread of TensorPipe's. Returns the answer."""

    def fail(self, reason: str) -> None:
        """Nothing more can be taken; from any thread."""


ANSWER_SECONDS: Final = 10.0
receivers: dict[bytes, Receiver] = {}
"""By the token that a connection's peer was told."""
lifelines: list[Any] = []
"""Futures that peers wait for to learn of the end of this process."""


def _later(function: Callable[..., Any]) -> Any:
    """Mark a function whose answer is a future, which may be resolved later."""
    return function if rpc is None else rpc.functions.async_execution(function)


@_later
def deliver(token: bytes, sequence: int, heads: Any, bodies: Any, waits: bool) -> Any:
    """What a peer calls to hand over a batch of messages.

    Args:
        waits: Whether the answer may wait for a batch the other way.

    Returns:
        A future of True once there is room for more, of False where the connection is
        closed, or of a batch: its sequence, heads and bodies.
    """
    receiver = receivers.get(token)
    if receiver is None:
        return done(False)
    try:
        return receiver.arrive(sequence, heads, bodies, waits)
    except Exception as error:  # torch would print it to stderr, and send it back
        receiver.fail(f"what the peer has sent cannot be taken in: {error}")
        return done(False)


@_later
def hold() -> Any:
    """What a peer calls to learn of the end of this process: never answered."""
    future = Future[None]()
    lifelines.append(future)
    return future


@_later
def echo(value: Any) -> Any:
    """What this process calls to see whether calls work."""
    return done(value)


@_later
def total(tensors: list[Any]) -> Any:
    """What this process calls to see whether tensors on its GPUs arrive on them."""
    return done([(str(tensor.device), int(tensor.sum())) for tensor in tensors])


def resolve(future: Any, value: Any) -> None:
    """Give a call its answer; a Ctrl-C meanwhile is raised afterwards.

    torch pickles the answer in Python, within a function of C++ that would send what is
    raised there to the peer and keep it from the caller. With the compiled part the
    queue's lock, which is held, sees to it for all signals.
    """
    if SIGNALS_WAIT:
        future.set_result(value)
        return
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(
        handler
    ):
        future.set_result(value)
        return
    noted: list[FrameType | None] = []

    def note(number: int, frame: FrameType | None) -> Any:
        if _resolves(frame):
            noted.append(frame)
        else:  # another signal's handler has raised before ours was put back
            handler(number, frame)

    try:
        signal.signal(signal.SIGINT, note)
        future.set_result(value)
    finally:
        signal.signal(signal.SIGINT, handler)
    if noted:
        handler(signal.SIGINT, noted[0])


def _resolves(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code is resolve.__code__:
            return True
        frame = frame.f_back
    return False


def done(value: Any) -> Any:
    """A future that is resolved."""
    future = Future[Any]()
    future.set_result(value)
    return future


Call = Callable[[Any, Any, tuple[Any, ...], bool], Any]
"""Calls a worker's function: worker, function, arguments, whether with tensors."""


class Peer:
    """Another process as this one's agent knows it; shared by all connections to it.

    Attributes:
        mapped: Whether tensors on GPUs may be sent to it.
        lost: Why no call reaches it any more; "" while one may.
        listeners: Called with the reason, from any thread.
    """

    def __init__(
        self, worker: Any, call: Call, has_lifeline: bool, mapped: bool = False
    ) -> None:
        self.worker = worker
        self.mapped = mapped
        self.lost = ""
        self.listeners: dict[object, Callable[[str], None]] = {}
        self._call = call
        if has_lifeline:
            self.call(hold, ()).add_done_callback(self._ended)

    def call(
        self, function: Any, args: tuple[Any, ...], with_tensors: bool = False
    ) -> Any:
        """Call a function there; never waits.

        Args:
            function: `deliver`, `hold`, `echo` or `total`.
            args: Tensors among them must not change until the answer.
            with_tensors: Whether there are any.

        Returns:
            A future of the answer.

        Raises:
            RuntimeError: The agent or the peer is gone.
        """
        return self._call(self.worker, function, args, with_tensors)

    def ask(
        self, function: Any, args: tuple[Any, ...], with_tensors: bool = False
    ) -> Any:
        """`call` a function and wait for its answer.

        Raises:
            RuntimeError: There is none.
        """
        answered = threading.Event()
        future = self.call(function, args, with_tensors)
        future.add_done_callback(lambda _: answered.set())
        if not answered.wait(ANSWER_SECONDS):
            raise RuntimeError(f"no answer within {ANSWER_SECONDS:g} s")
        return failure(future) or future.value()

    def _ended(self, future: Any) -> None:
        self.fail(failure(future) or "the peer ended the lifeline")

    def fail(self, reason: str) -> None:
        """Its connection is broken for good: tell everyone who uses it, once."""
        if not self.lost:
            self.lost = reason
            for listener in list(self.listeners.values()):
                listener(reason)


def failure(future: Any) -> str:
    """Why a call failed, or "" if it was answered."""
    try:
        future.value()
    except Exception as error:  # a plain RuntimeError; its text has the C++ trace
        return str(error).partition("\n")[0].partition(" (this error orig")[0]
    return ""
