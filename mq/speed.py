"""The hottest functions: compiled, or their twins in Python.

A wheel that was built where there is a compiler has ``mq._speed``. With `MQ_COMPILED=0`
in the environment Python is used all the same.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from operator import methodcaller
from typing import TYPE_CHECKING, Any, Final, Protocol

from mq import bell, plain, repeated
from mq.mesh import atomic, gate, ready
from mq.repeated import BytesOf, Packed
from mq.stream import passing

_asked = os.environ.get("MQ_COMPILED") or "1"
if _asked not in ("0", "1"):
    raise ValueError(f"MQ_COMPILED is {_asked!r}, but must be 0 or 1")
try:
    if _asked == "0":
        raise ImportError("it is not wanted")
    from mq import _speed
except ImportError:
    _speed = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from mq.message import Message

COMPILED: Final = _speed is not None


class _Complete:
    """The compiled part; an error with a remedy where it lacks what is asked of it."""

    def __init__(self, module: object) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if hasattr(self._module, name):
            return getattr(self._module, name)
        raise ImportError(
            f"{getattr(self._module, '__file__', self._module)} is older than the rest "
            f"of mq: it has no {name}. Install it again with pip, as it was installed "
            "before, or set MQ_COMPILED=0 to do without it"
        )


if COMPILED and not TYPE_CHECKING:
    _speed = _Complete(_speed)  # an editable install is not built anew by `git pull`


class Spinner(Protocol):
    """Looks at a copy of an epoll set, without the interpreter lock."""

    def spin(self, seconds: float) -> list[int]:
        """Look again and again; which descriptors are ready, none after the time.

        From several threads. It ends at once where it is closed meanwhile.
        """

    def close(self) -> None:
        """Let go of the copy, with the last thread that looks; idempotent."""


def _copy(source: memoryview, target: memoryview, past_cache: bool) -> None:
    import numpy as np  # small messages do without it

    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _are_bools(memory: memoryview) -> bool:
    import numpy as np

    return not memory.nbytes or bool(np.frombuffer(memory, np.uint8).max() <= 1)


def _fill(
    pieces: list[tuple[int, memoryview]], target: memoryview, counter: memoryview
) -> None:
    if int.from_bytes(counter, sys.byteorder) == len(target):
        return
    for start, piece in pieces:
        _copy(piece, target[start : start + len(piece)], past_cache=False)
    counter[:] = len(target).to_bytes(8, sys.byteorder)


def _follow(
    source: memoryview,
    counter: memoryview,
    done: int,
    stop: int,
    target: memoryview,
) -> int:
    filled = min(int.from_bytes(counter, sys.byteorder), stop)
    if filled > done:
        _copy(source[done:filled], target[done:filled], past_cache=False)
    return max(filled, done)


_decode_compiled: Final[Any] = _speed.decode_run if COMPILED else None


def _decode_run(*run: Any) -> list[Message]:
    found: list[Message] = _decode_compiled(*run)
    return found or plain.decode_run(*run)  # which takes what is rare


def _may_be_mine(lock: threading.Lock) -> bool:
    frame = sys._getframe(1).f_back if lock.locked() else None  # who asks is no call
    while frame is not None:
        # Where there is none of these, this thread is in none of the queue's calls.
        if frame.f_globals.get("__name__", "").startswith("mq.mesh."):
            return True
        frame = frame.f_back
    return False


def _none(*arguments: object) -> int:
    return 0


def _nothing(*arguments: object) -> None:
    pass


Gate: Final[type[gate.Gate]] = _speed.Gate if COMPILED else gate.Gate
Bell: Final[type[bell.Bell]] = _speed.Bell if COMPILED else bell.Bell
SPINNER: Final[Callable[[int], Spinner] | None] = (
    _speed.Spinner if COMPILED and hasattr(select, "epoll") else None
)
"""Makes a `Spinner` of an epoll set; None where none is compiled, or there is no epoll.

Raises:
    OSError: There is no descriptor for its copy.
"""
encode_plain: Final[Callable[[Any], bytes | None]] = (
    _speed.encode_plain if COMPILED else plain.encode_plain
)
decode_run: Final[plain.DecodeRun] = _decode_run if COMPILED else plain.decode_run
pop_ready: Final[ready.PopReady] = _speed.pop_ready if COMPILED else ready.pop_ready
copy: Final[Callable[[memoryview, memoryview, bool], None]] = (
    _speed.copy if COMPILED else _copy
)
"""Copies all bytes of the first to the second, contiguous, format 'B', of one size.

Other threads run meanwhile; compiled, several of its own copy, and past the cache if
the third says so: that is quicker for what does not stay there anyway.
"""
expect_copy: Final[Callable[[int], object]] = (
    _speed.expect_copy if COMPILED else _nothing
)
"""Says that so many bytes are about to be copied: who helps is awake by then."""
fill: Final[Callable[[list[tuple[int, memoryview]], memoryview, memoryview], None]] = (
    _speed.fill if COMPILED else _fill
)
"""Copies pieces to their places, where others may read on behind it.

Args:
    The pieces, in order of their places, and where they begin; the target; and 8
    aligned bytes for how much of the target is there. What is there already stays, so
    that doing it again is harmless.
"""
follow: Final[Callable[[memoryview, memoryview, int, int, memoryview], int]] = (
    _speed.follow if COMPILED else _follow
)
"""Copies what is being filled, as far as it is there, and waits a little for more.

Args:
    What is filled; its counter; how many bytes were copied; after how many it is
    enough; and the target.

Returns:
    How many bytes were copied in all; as many as before if no more came.
"""
Lock: Final[Callable[[], threading.Lock]] = _speed.Lock if COMPILED else threading.Lock
"""A lock; compiled, signals wait while the main thread has it. See `mq.signals`."""
hold_signals: Final[Callable[[list[int]], int]] = (
    _speed.hold_signals if COMPILED else _none
)
"""Have these signals wait for `Lock`, each while it has a handler in Python.

Returns:
    How many have one by now.
"""
signal_waits: Final[Callable[[], int]] = _speed.signal_waits if COMPILED else _none
"""Whether a signal waits for the main thread to release a `Lock`."""
take_back: Final[Callable[[threading.Lock, deque[object]], None]] = (
    _speed.take_back if COMPILED else atomic.take_back
)
"""Takes a lock again after `mq.mesh.atomic.give_up`; compiled, it is a `Lock`.

Compiled, no interrupt comes as it begins either, however many there are.
"""
renew: Final[Callable[[threading.Lock], None]] = methodcaller("_at_fork_reinit")
"""In a forked child: free a `Lock`, unless compiled and held by the thread that forked.

Python's own modules use this method of its locks, too.
"""
is_mine: Final[Callable[[threading.Lock], bool]] = (
    methodcaller("is_mine") if COMPILED else _may_be_mine
)
"""Whether this thread has a `Lock`; with nothing compiled, whether it may have it."""
has_other_locks: Final[Callable[[object], bool]] = (
    _speed.has_other_locks if COMPILED else lambda lock: False
)
"""Whether this thread has a `Lock` but for this one; with nothing compiled, False."""
know_arrivals: Final[Callable[[type, type, type], None]] = (
    _speed.know_arrivals if COMPILED else _nothing
)
"""Tells those below of `Run`, `Arrivals` and `Entry` of `mq.mesh.incoming`."""
know_frames: Final[Callable[[type], None]] = (
    _speed.know_frames if COMPILED else _nothing
)
"""Tells `send_alone` of `mq.mesh.frame.Frame`."""
arrive_alone: Final[
    Callable[[dict[int, Any], int, Any, Any, bytes | memoryview, float], object]
] = _speed.arrive_alone if COMPILED else _nothing
"""Carries out a DATA frame without a body, if its only message is the next one.

Args:
    Subscriptions by id; the most bytes of a message; the inbox; the session; the
    frame; and the mesh's time.

Returns:
    Whether it did so, and so the inbox has the message; never where nothing is
    compiled.
"""
take_alone: Final[Callable[[Any], Any]] = _speed.take_alone if COMPILED else _nothing
"""What `Inbox.take` returns, if the first in the inbox is the only one of its run.

Returns:
    None where it is not as simple as that, and where nothing is compiled.
"""
send_alone: Final[Callable[[Any, Any, Any, float], bool] | None] = (
    _speed.send_alone if COMPILED else None
)
"""`Session.send_alone`, of the session, the feed, the message and the time, or None."""
are_bools: Final[Callable[[memoryview], bool]] = (
    _speed.are_bools if COMPILED else _are_bools
)
"""Whether every byte of contiguous memory is 0 or 1."""
know_arrays: Final[Callable[..., None]] = _speed.know_arrays if COMPILED else _nothing
"""Tells those below of `numpy.ndarray`, what makes arrays by their descriptions, and
what gives the bytes of one; of NumPy's scalars, by their types, what is before the
bytes of one, and by that what makes one of its bytes."""
know_objects: Final[Callable[..., None]] = _speed.know_objects if COMPILED else _nothing
"""Tells those below of the registered types, a list of them by type and by name, and of
`attempt`, `Raised`, `build` and `fail` of `mq.foreign`."""
know_tensors: Final[Callable[[type, Any, dict[bytes, Any], BytesOf], None]] = (
    _speed.know_tensors if COMPILED else _nothing
)
"""The same of `torch.Tensor`, with `torch.strided`."""
pack_repeated: Final[Callable[[Any, dict[Any, Any]], Packed | None]] = (
    _speed.pack_repeated if COMPILED else _nothing
)
"""A message of a tensor or array, or dict of a few, whose header is known.

Args:
    The payload; and by what they depend on, headers and the sizes of their areas.

Returns:
    None where it is not as simple as that, and where nothing is compiled.
"""
unpack_repeated: Final[Callable[[memoryview, dict[bytes, Any], bool], Any]] = (
    _speed.unpack_repeated if COMPILED else repeated.unpack
)
"""The payload of a message that begins as one before; None: it is none.

Args:
    The message; by their headers, how those are decoded; whether to make arrays
    read-only.
"""
receive_passing: Final[Callable[[socket.socket, memoryview], passing.Received]] = (
    _speed.receive_passing if COMPILED else passing.receive_passing
)
pack_mixed: Final[Callable[[Any, dict[Any, Any]], Packed | list[Any] | None]] = (
    _speed.pack_mixed if COMPILED else _nothing
)
"""A message of tensors and arrays among plain data, where they are described.

Plain data and, here, tuples, OrderedDicts, NumPy's scalars and registered types.

Args:
    The payload; and by what they depend on, the extension types that stand for them.

Returns:
    None where it is not as simple as that, and where nothing is compiled; or, if there
    are any, functions and registered objects, the first ones, and what those made of
    these: they are not to be called again. The last of these may be a `Raised`.
"""
take_aligned: Final[Callable[[int], memoryview]] = (
    _speed.take_aligned if COMPILED else repeated.take_aligned
)
unpack_mixed: Final[Callable[..., Any]] = _speed.unpack_mixed if COMPILED else _nothing
"""The payload of tensors and arrays, whose descriptions are known, among plain data.

Args:
    The message, of which a copy is unpacked if it is read-only; whether to make arrays
    read-only; and a list for the objects of registered types, in the order in which
    they are built, or None, where none are to be.

Returns:
    None where it is not as simple as that, and where nothing is compiled.

Raises:
    BaseException: As `mq.foreign.build` does.
"""
