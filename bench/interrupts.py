"""Ctrl-C and SIGTERM end the measuring, and not the report on it at once."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_ENDING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def raised() -> Iterator[None]:
    """Within this block either of them raises KeyboardInterrupt."""
    with _handled(signal.default_int_handler):
        yield


@contextmanager
def deferred() -> Iterator[None]:
    """Within this block they wait for its end."""
    came: list[int] = []
    with _handled(lambda number, _: came.append(number)):
        yield
    if came:
        signal.raise_signal(came[0])


@contextmanager
def held(words: str) -> Iterator[None]:
    """Within this block the first has only `words` said; the next one raises."""

    def say(*_: Any) -> None:
        for number in _noticed():
            signal.signal(number, signal.default_int_handler)
        print(words, file=sys.stderr, flush=True)

    with _handled(say):
        yield


@contextmanager
def _handled(handler: Callable[..., Any]) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in _noticed()}
    try:
        for number in before:
            signal.signal(number, handler)
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def _noticed() -> list[signal.Signals]:
    """All but those that a shell has ignored by what it starts in the background."""
    return [n for n in _ENDING if signal.getsignal(n) is not signal.SIG_IGN]
