"""The deadlines of the harness, and its one way to wait for a state without events."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

STEP = 20.0
"""Seconds that any step of a case may take."""
CASE = 120.0
"""Seconds that a whole case may take; its steps are shorter, but it may repeat them."""
PEER_TIMEOUT = 2.0
"""The `peer_timeout` of cases in which a member falls silent, in seconds."""


class StepTimeout(AssertionError):
    """A step took longer than its deadline; the text holds all stacks."""


class MemberDied(AssertionError):
    """A member's process ended although the case did not end it."""


def wait_until(
    holds: Callable[[], bool], what: str, timeout: float = STEP, every: float = 0.005
) -> None:
    """Wait for a state of another process or of a counter, which tells nobody.

    Raises:
        StepTimeout: It did not hold within `timeout` seconds.
    """
    never = threading.Event()
    deadline = time.monotonic() + timeout
    while not holds():
        if time.monotonic() > deadline:
            raise StepTimeout(f"waited {timeout} s for {what}")
        never.wait(every)
