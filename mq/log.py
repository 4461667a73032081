"""The library's log: handed to the application's handlers by a thread of its own.

Much of it is written in the middle of a queue's work, or by a thread that others wait
for; and a handler may take its time, publish what it gets, on any queue, or connect
one. Called where the record is made it would hold that work up, and wait for ever for
who, in turn, waits for the handler's lock. For the same reason nothing here takes a
lock of `logging`'s in the thread that has something to say: `logging.config` holds one
while it makes handlers.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import logging
import mmap
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Hashable
from typing import Any, Final, TypeAlias

BEGIN_SECONDS: Final = 1.0
"""After so long a thread that was to begin is taken for interrupted before it could."""
MOST_ONCE: Final = 1024
"""So many things one `WarnOnce` says, and knows that it has."""
MOST_STRANGERS: Final = 64
"""Of so many that are not known by name a kind of offence is told: who floods a member
with connections comes from another port each time."""
MOST_CHARACTERS: Final = 500
"""Of what others have a part in, as they may send something else each time."""
FLUSH_SECONDS: Final = 1.0
"""For so long `flush` waits for handlers, which may wait for who calls it."""
_ROOM_BYTES: Final = 4 << 20
"""What must be free for a thread to begin: more than the 1 MiB that Python maps."""

_Said: TypeAlias = "tuple[str, logging.LogRecord] | _Once"


def printable(text: str) -> str:
    """What others have a part in, as logs and errors show it: in one line, not long."""
    text = text[:MOST_CHARACTERS]
    return text if text.isprintable() else repr(text)[:MOST_CHARACTERS]


class Log:
    """What a module of this library says, under the module's name.

    Args:
        name: Of the logger of `logging`'s.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def debug(self, text: str, *args: object) -> None:
        """Of interest to who looks for an error."""
        self._say(logging.DEBUG, text, args)

    def info(self, text: str, *args: object) -> None:
        """What was chosen, and what happened as it should."""
        self._say(logging.INFO, text, args)

    def warning(self, text: str, *args: object) -> None:
        """What somebody may have to do something about."""
        self._say(logging.WARNING, text, args)

    def error(self, text: str, *args: object) -> None:
        """What has failed."""
        self._say(logging.ERROR, text, args)

    def exception(self, text: str, *args: object) -> None:
        """The same, with the traceback of the exception that is being handled."""
        self._say(logging.ERROR, text, args, sys.exc_info())

    def _say(
        self, level: int, text: str, args: tuple[object, ...], exc_info: Any = None
    ) -> None:
        try:
            if self._is_wanted(level):
                frame = sys._getframe(2)
                code = frame.f_code
                make = logging.getLogRecordFactory()
                said = code.co_filename, frame.f_lineno, text, args, exc_info
                record = make(self._name, level, *said, code.co_name)
                _teller.tell((self._name, record))
        except Exception:  # the factory is the application's, too
            _print()

    def _is_wanted(self, level: int) -> bool:
        """What `Logger.isEnabledFor` says, which may take a lock."""
        if level <= logging.root.manager.disable:
            return False
        name, loggers = self._name, logging.root.manager.loggerDict
        while name:
            if isinstance(logger := loggers.get(name), logging.Logger):
                return level >= logger.getEffectiveLevel()
            name = name.rpartition(".")[0]
        return level >= logging.root.level


class WarnOnce:
    """Has a log say each thing once, of so many things at most.

    Without a lock, as all that is said: a handler of a signal may come to it, too.

    Args:
        most: One of it may be for anything that strangers come up with.
    """

    def __init__(self, log: Log, most: int = MOST_ONCE) -> None:
        self._log = log
        self._most = most
        self._said: dict[Hashable, object] = {}

    def __call__(self, key: Hashable, text: str, *args: object) -> bool:
        """Warn of what is known by a key; whether that was not said before."""
        is_new = self._is_new(key)
        if is_new:
            self._log._say(logging.WARNING, text, args)
        return is_new

    def exception(self, key: Hashable, text: str, *args: object) -> None:
        """The same of an error, with the traceback of the one that is being handled."""
        if self._is_new(key):
            self._log._say(logging.ERROR, text, args, sys.exc_info())

    def or_raise(self, error: Exception, *, strict: bool) -> None:
        """Warn of a problem, or raise it where one is strict."""
        if strict:
            raise error
        self(str(error), "%s", error)

    def _is_new(self, key: Hashable) -> bool:
        if len(self._said) >= self._most:
            return False
        mine = object()
        return self._said.setdefault(key, mine) is mine


class _Once:
    """As an Event of `threading`, which a handler of a signal that raises may break."""

    def __init__(self) -> None:
        self.is_set = False
        self._lock = _thread.allocate_lock()
        self._lock.acquire()

    def set(self) -> None:
        """Let go who waits; once."""
        self.is_set = True
        self._lock.release()

    def wait(self, deadline: float) -> None:
        """Until it is set, or the time is over."""
        left = max(0.0, deadline - time.monotonic())
        if not self.is_set and self._lock.acquire(timeout=left):
            self._lock.release()


class _Begun:
    """A thread that was begun, and may not have come into being yet."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.known = _Once()

    @property
    def is_over(self) -> bool:
        """Whether nothing of it is left, nor will be."""
        is_alive = self.thread is not None and self.thread.is_alive()
        return self.known.is_set and not is_alive

    def wait(self, deadline: float) -> None:
        """Until it is over, or the time is."""
        self.known.wait(deadline)
        if self.thread is not None:
            self.thread.join(max(0.0, deadline - time.monotonic()))


class _Teller:
    """Has handlers called in the order in which it was told, by one thread at a time.

    The thread ends when there is nothing to tell. Who has something to say takes no
    lock: it may be interrupted at any moment, and may have any lock already, of
    `threading`'s too, which a thread is begun under. Hence a thread that begins one.
    """

    def __init__(self) -> None:
        self._said: deque[_Said] = deque()
        self._telling = threading.Lock()
        self._thread = 0
        self._begun: set[_Begun] = set()
        self._begun_at = -BEGIN_SECONDS
        self._flushes_at_exit = False

    def tell(self, said: _Said) -> None:
        """Never waits, unless no thread can be started."""
        self._said.append(said)
        util = sys.modules.get("multiprocessing.util")
        if util is not None and not self._flushes_at_exit:
            self._flushes_at_exit = True
            # Its children leave by os._exit, before Python 3.13 without atexit.
            util.Finalize(None, flush, exitpriority=0)
        now = time.monotonic()
        if not self._telling.locked() and now - self._begun_at >= BEGIN_SECONDS:
            self._begun_at = now
            self._begin()

    def _begin(self) -> None:
        begun = _Begun()
        self._begun.add(begun)
        try:
            _thread.start_new_thread(self._start, (begun,))
        except RuntimeError:  # too many, or the process ends
            self._begun.discard(begun)
            self._run()

    def flush(self) -> None:
        """Wait until what was said has been told, for `FLUSH_SECONDS` at most."""
        if self._thread == threading.get_ident():
            return
        deadline = time.monotonic() + FLUSH_SECONDS
        if self._said or self._telling.locked():
            told = _Once()
            self._said.append(told)
            self._begin()
            told.wait(deadline)
        for begun in list(self._begun):
            begun.wait(deadline)
            if begun.is_over or not begun.known.is_set:  # it was interrupted
                self._begun.discard(begun)

    def _start(self, begun: _Begun) -> None:
        for other in list(self._begun):
            if other.is_over:
                self._begun.discard(other)
        thread = threading.Thread(target=self._run, name="mq-log", daemon=True)
        try:
            # Who begins one that dies of want as it begins waits for it for ever.
            mmap.mmap(-1, _ROOM_BYTES).close()
            thread.start()
            begun.thread = thread
        except (RuntimeError, MemoryError, OSError):
            self._run()
        finally:
            begun.known.set()

    def _run(self) -> None:
        self._begun_at = -BEGIN_SECONDS  # from here on what is said is found, or begins
        # Again, for who spoke when this was about to end has started no other.
        while self._said and self._telling.acquire(blocking=False):
            try:
                self._thread = threading.get_ident()
                while self._said:
                    _handle(self._said.popleft())
            finally:
                self._thread = 0
                self._telling.release()


def _handle(said: _Said) -> None:
    if isinstance(said, _Once):
        said.set()
        return
    name, record = said
    try:
        logging.getLogger(name).handle(record)
    except (Exception, SystemExit):
        _print()
    except BaseException:
        if threading.get_ident() == threading.main_thread().ident:
            raise  # there was no thread to be had; it may be a signal's handler's
        _print()  # it would end the thread, and nobody else there wants it


def _print() -> None:
    """As `logging.Handler.handleError` does; where there is no stderr, nothing."""
    if logging.raiseExceptions:
        with contextlib.suppress(Exception):
            traceback.print_exc()


_teller = _Teller()


def flush() -> None:
    """Wait until the handlers have been told what was said, for a second at most.

    And no thread is left that did so.
    """
    _teller.flush()


def _after_fork() -> None:
    global _teller
    # What was said before is the parent's to tell, even if a log handler forked:
    # this thread is still telling then.
    _teller._said.clear()
    _teller = _Teller()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(flush)
