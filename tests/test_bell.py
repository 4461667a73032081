"""The bell: who waits for what has ended is told, and no Ctrl-C is lost."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mq import speed
from mq.bell import Bell

needs_compiled = pytest.mark.skipif(
    not speed.COMPILED,
    reason="mq._speed is not there: installed without a compiler, or MQ_COMPILED=0",
)
BELLS = [Bell, pytest.param(speed.Bell, id="compiled", marks=needs_compiled)]
ONE = (1).to_bytes(8, sys.byteorder)


@pytest.fixture
def pipe() -> Any:
    """Both ends, which do not block."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    yield reader, writer
    os.close(reader)
    os.close(writer)


def read(fd: int) -> bytes:
    """What is there."""
    try:
        return os.read(fd, 1 << 20)
    except BlockingIOError:
        return b""


@pytest.mark.parametrize("kind", BELLS)
def test_it_rings_where_somebody_listens(
    kind: type[Bell], pipe: tuple[int, int]
) -> None:
    """And that is nobody at first."""
    reader, writer = pipe
    bell = kind()
    assert bell.fd == -1
    heard = []
    for fd in (-1, writer, writer, -1):
        bell.fd = fd
        bell("what has ended")
        heard.append(read(reader))
    assert heard == [b"", ONE, ONE, b""]
    with pytest.raises(TypeError):
        kind(1)  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", BELLS)
def test_who_has_enough_to_read_is_told_all_the_same(
    kind: type[Bell], pipe: tuple[int, int]
) -> None:
    """What cannot be written any more is not missed, and nothing is raised."""
    reader, writer = pipe
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(1 << 16))
    bell = kind()
    bell.fd = writer
    bell("what has ended")
    assert not any(read(reader))


@pytest.mark.parametrize("kind", BELLS)
def test_a_death_is_noted_though_an_interrupt_comes(
    kind: type[Bell], pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the application calls what has the last reference.

    Compiled, the interrupt is the application's, too; in Python the callback has it.
    """
    lost: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda event: lost.append(event))
    noted: deque[object] = deque()
    bell = kind()
    interrupt = ctypes.CDLL(None)["raise"]
    for fd in (-1, pipe[1]):
        bell.fd = fd
        held = [np.ndarray.__new__(_Watched, (8,), np.uint8)]
        alarm = weakref.ref(held[0], bell)
        ending = weakref.ref(held[0], noted.append)
        with expect_interrupt(lost):
            interrupt(int(signal.SIGINT), ctypes.py_object(held.pop()))
        assert noted.pop() is ending
        assert alarm() is None
        assert len(lost) == (kind is Bell)
        lost.clear()


@contextlib.contextmanager
def expect_interrupt(lost: list[Any]) -> Iterator[None]:
    """It comes out of the block, or has been lost in there."""
    try:
        yield
    except KeyboardInterrupt:
        assert not lost
    else:
        assert lost


class _Watched(np.ndarray[Any, Any]):
    """An array that weak references may watch."""
