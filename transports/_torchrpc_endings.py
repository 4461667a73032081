"""Whether the application is in a call of torch's, which does not tell."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Final

from mq.threads import current_frames

_LOOK_SECONDS: Final = 0.005


def is_in(function: Callable[..., Any], *, others: bool = False) -> bool:
    """Whether a thread is in a function, or one that it calls.

    Args:
        others: Whether only threads beside this one count.
    """
    code = inspect.unwrap(function).__code__
    frames = current_frames()
    try:
        if others:
            frames.pop(threading.get_ident(), None)
        return any(_is_below(frame, code) for frame in frames.values())
    finally:
        # This call is below one of them: together they would keep what its callers
        # have, such as an agent, until the next garbage collection.
        frames.clear()


def _is_below(frame: FrameType | None, code: CodeType) -> bool:
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def ends_within(function: Callable[..., Any], seconds: float) -> bool:
    """Wait until no other thread is in a function; whether that is so in time."""
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while is_in(function, others=True):
        if time.monotonic() >= deadline:
            return False
        pause.wait(_LOOK_SECONDS)
    return True
