"""Whether the application is in a call of torch's, which does not tell."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from mq.threads import current_frames

_LOOK_SECONDS: Final = 0.005


def is_in(function: Callable[..., Any], *, others: bool = False) -> bool:
    """Whether a thread is in a function, or one that it calls.

    Args:
        others: Whether only threads beside this one count.
    """
    code = inspect.unwrap(function).__code__
    for thread, top in current_frames().items():
        if others and thread == threading.get_ident():
            continue
        frame: FrameType | None = top
        while frame is not None:
            if frame.f_code is code:
                return True
            frame = frame.f_back
    return False


def ends_within(function: Callable[..., Any], seconds: float) -> bool:
    """Wait until no other thread is in a function; whether that is so in time."""
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while is_in(function, others=True):
        if time.monotonic() >= deadline:
            return False
        pause.wait(_LOOK_SECONDS)
    return True
