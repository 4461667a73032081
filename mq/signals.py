"""Keeps signals' handlers out of what the main thread does under the library's locks.

A handler in Python runs in the main thread between any two bytecodes, and may raise:
KeyboardInterrupt, what ``DataLoader`` raises when a worker dies, a time-out of the
application's. In the middle of an engine's bookkeeping that would lose what the engine
had just handed over. So it waits until `mq.speed.Lock` is released, which calls do
before they wait for anything; if that takes over a second, the next signal does not
wait.

Nor does every signal wake the main thread: see `one_piece`.

Without the compiled part handlers run wherever they are: the mesh then drops the
connections that may have been left in the middle of a message, and begins them again.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

from mq.speed import hold_signals

LOOK_SECONDS: Final = 0.1
"""How long the main thread sleeps in one piece."""
T = TypeVar("T")

_OWN: Final = ("SEGV", "BUS", "FPE", "ILL", "ABRT", "TRAP", "SYS", "KILL", "STOP")
"""What a thread does to itself cannot wait, and two have no handlers."""
_MAY_WAIT: Final[list[int]] = sorted(
    {number for number in signal.Signals if number.name[3:] not in _OWN}
)


def hold() -> None:
    """Have signals wait for `mq.speed.Lock`.

    Handlers stay what they are: `signal.getsignal` knows nothing of this. One that is
    installed later is held from the next call on, or within 20 ms.
    """
    hold_signals(_MAY_WAIT)


def one_piece(timeout: float | None) -> float | None:
    """How long this thread may sleep before its caller looks about.

    The kernel ends the main thread's sleep for a signal, but not for one that comes
    just before the sleep begins, or that another thread takes. So that thread wakes up
    now and then, which runs the handlers of signals that have come.

    Args:
        timeout: How long in all; None: for ever.
    """
    if timeout is not None and timeout <= LOOK_SECONDS:
        return timeout
    if threading.get_ident() != threading.main_thread().ident:
        return timeout
    return LOOK_SECONDS


def attentive(wait: Callable[[float | None], T], timeout: float | None) -> T:
    """Sleep piece by piece, until that was not in vain.

    Args:
        wait: Waits so many seconds, None: for ever, for something that stays as it is
            until it is seen. What it returns is false if that was in vain.
        timeout: How long in all.

    Returns:
        What `wait` returned last.
    """
    piece = one_piece(timeout)
    if piece == timeout:
        return wait(timeout)
    until = float("inf") if timeout is None else time.monotonic() + timeout
    left = until
    while left > LOOK_SECONDS:
        if found := wait(LOOK_SECONDS):
            return found
        left = until - time.monotonic()
    return wait(max(0.0, left))
