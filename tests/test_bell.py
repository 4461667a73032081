"""The bell: what has ended is noted, who waits is told, and no Ctrl-C is lost."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import weakref
from collections import deque
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
def test_it_notes_and_then_tells(kind: type[Bell], pipe: tuple[int, int]) -> None:
    """Whom there is to tell, and that is nobody at first."""
    reader, writer = pipe
    noted: list[tuple[object, bytes]] = []
    bell = kind(lambda ended: noted.append((ended, read(reader))))
    assert bell.fd == -1
    bell("first")
    bell.fd = writer
    bell("second")
    assert read(reader) == ONE
    bell.fd = -1
    bell("third")
    assert noted == [("first", b""), ("second", b""), ("third", b"")]
    assert read(reader) == b""


@pytest.mark.parametrize("kind", BELLS)
def test_who_has_enough_to_read_is_told_all_the_same(
    kind: type[Bell], pipe: tuple[int, int]
) -> None:
    """What cannot be written any more is not missed, and nothing is raised."""
    _, writer = pipe
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(1 << 16))
    noted: deque[object] = deque()
    bell = kind(noted.append)
    bell.fd = writer
    bell("noted")
    assert list(noted) == ["noted"]


@pytest.mark.parametrize("kind", BELLS)
def test_what_cannot_be_noted_is_an_error(kind: type[Bell]) -> None:
    """Of the caller's, as are other numbers of arguments than one."""

    def refuse(ended: object) -> None:
        raise LookupError(str(ended))

    bell: Any = kind(refuse)
    with pytest.raises(LookupError, match="this"):
        bell("this")
    for arguments in ((), (1, 2)):
        with pytest.raises(TypeError):
            bell(*arguments)
        if arguments:
            with pytest.raises(TypeError):
                kind(*arguments)


@pytest.mark.parametrize("kind", BELLS)
def test_nothing_keeps_a_bell(kind: type[Bell]) -> None:
    """Not even what it notes in, which may refer to it."""

    class Notes(deque[object]):
        bell: Bell

    notes = Notes()
    notes.bell = kind(notes.append)
    end = weakref.ref(notes)
    del notes
    gc.collect()
    assert end() is None


@needs_compiled
def test_a_death_keeps_no_interrupt_from_the_application(
    pipe: tuple[int, int],
) -> None:
    """One that came while the application called what had the last reference."""
    noted: deque[object] = deque()
    bell = speed.Bell(noted.append)
    interrupt = ctypes.CDLL(None)["raise"]
    for fd in (-1, pipe[1]):
        bell.fd = fd
        held = [np.ndarray.__new__(_Watched, (8,), np.uint8)]
        ending = weakref.ref(held[0], bell)
        with pytest.raises(KeyboardInterrupt):
            interrupt(int(signal.SIGINT), ctypes.py_object(held.pop()))
        assert noted.pop() is ending


class _Watched(np.ndarray[Any, Any]):
    """An array that weak references may watch."""
