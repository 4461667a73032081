"""Times that users give, in seconds."""

from __future__ import annotations

import math
import threading
import time
from numbers import Integral, Rational, Real

LONGEST = threading.TIMEOUT_MAX / 2
"""Over a hundred years; a lock takes no more than twice that."""

PLAIN = frozenset({float, int})
"""Types of numbers that need no closer look, as those of NumPy's and bool do."""


def positive_seconds(what: str, value: float) -> float:
    """A time that somebody gave for something.

    Raises:
        TypeError, ValueError: It is not a positive, finite number; names `what`.
    """
    value = _number(what, value)
    if not 0 < value < float("inf"):
        raise ValueError(f"{what} is {value}, but must be a positive number of seconds")
    return min(value, LONGEST)


def seconds(what: str, value: float) -> float:
    """The same, but 0 and infinity are times, too: it is how long something waits.

    Raises:
        TypeError, ValueError: It is no number, or less than 0; names `what`.
    """
    value = _number(what, value)
    if not value >= 0:
        raise ValueError(f"{what} is {value} s, but must be 0 or more")
    return min(value, LONGEST)


def deadline_after(timeout: float | None) -> float | None:
    """When a call gives up, on `time.monotonic`'s clock; None: never.

    Raises:
        TypeError, ValueError: As by `seconds`.
    """
    if timeout is None:
        return None
    if type(timeout) not in PLAIN or not 0 <= timeout <= LONGEST:
        timeout = seconds("timeout", timeout)
    return time.monotonic() + timeout


def _number(what: str, value: object) -> float:
    """A plain one, as one of NumPy's would overflow, or round the deadline."""
    # One of NumPy's may be, but no Fraction, which has no format for messages.
    whole = isinstance(value, Integral) or not isinstance(value, Rational)
    wrong = f"{what} is {value!r}, not a number of seconds"
    if isinstance(value, bool) or not isinstance(value, Real) or not whole:
        raise TypeError(wrong)
    try:
        return float(value)
    except OverflowError:
        return -math.inf if isinstance(value, int) and value < 0 else math.inf
    except TypeError as error:  # NumPy says that its spans of time are whole numbers
        raise TypeError(wrong) from error
