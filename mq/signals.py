"""Keeps signals' handlers out of what the main thread does under the library's locks.

A handler in Python runs in the main thread between any two bytecodes, and may raise:
KeyboardInterrupt, what ``DataLoader`` raises when a worker dies, a time-out of the
application's. In the middle of an engine's bookkeeping that would lose what the engine
had just handed over. So it waits until `mq.speed.Lock` is released, which calls do
before they wait for anything; if that takes over a second, the next signal does not
wait.

Without the compiled part handlers run wherever they are: the mesh then drops the
connections that may have been left in the middle of a message, and begins them again.
"""

from __future__ import annotations

import signal
from typing import Final

from mq.speed import hold_signals

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
    hold_signals(_MAY_WAIT, [n for n in _MAY_WAIT if callable(signal.getsignal(n))])
