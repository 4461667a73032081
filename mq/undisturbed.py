"""Work that must be done to the end, whatever signals come: in a thread of its own.

Handlers of signals run in the main thread, and may raise there between any two
bytecodes. So what opens and closes engines is not run in that one: it waits for it, and
can be interrupted as it waits.
"""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from mq import forks
from mq.errors import ForkedProcess
from mq.log import Log
from mq.signals import attentive
from mq.speed import Lock, has_other_locks

logger = Log(__name__)

GRACE_SECONDS: Final = 0.25
"""How long an interrupted caller waits until nothing is left."""
_BEGIN_SECONDS: Final = 10.0
T = TypeVar("T")


def check_may_wait(lock: threading.Lock | None = None) -> None:
    """Have nothing be waited for in the middle of another queue's work.

    The collector runs destructors anywhere, and types are decoded there. That queue
    would hear and say nothing meanwhile, until its peers give it up; or it is the very
    one that is waited for.

    Args:
        lock: Of the queue that is to wait, if this thread has that.

    Raises:
        RuntimeError: This thread has another queue's lock.
    """
    if has_other_locks(lock):
        raise RuntimeError(
            "this thread is in the middle of another queue's work, and this call would "
            "hold that up: a destructor or a decode= of a type called it; call it from "
            "another thread"
        )


class Stopper:
    """Tells work under way that nobody wants it any more.

    Attributes:
        stopped: Whether it has been told so.
    """

    def __init__(self) -> None:
        self.stopped = False
        self._stop: Callable[[], object] = lambda: None

    def on_stop(self, stop: Callable[[], object]) -> None:
        """Have `stop` called in that case, from any thread, maybe twice."""
        self._stop = stop
        if self.stopped:
            stop()

    def stop(self) -> None:
        """Nobody wants it any more."""
        self.stopped = True
        self._stop()


class _Work(Generic[T]):
    def __init__(
        self,
        work: Callable[[], T],
        undo: Callable[[T], object],
        stopper: Stopper | None,
    ) -> None:
        self._work = work
        self._undo = undo
        self._stopper = stopper
        self._context = contextvars.copy_context()
        self._device = _cuda_device()
        self._begun = threading.Event()
        self._ended = threading.Event()
        # What the main thread waits for: an interrupt may leave an Event's lock taken.
        self._result_is_there = _taken_lock()
        self._nothing_is_left = _taken_lock()
        self._is_called_off = self._is_forked = False
        self._threads: list[threading.Thread] = []
        self.results: list[T] = []
        self.error: BaseException | None = None
        forks.register(self)

    def start(self) -> None:
        try:
            with Lock():  # half started, it would be listed by `threading` for ever
                self._start_thread(self._run)
        except RuntimeError:  # the interpreter is ending, or no thread is to be had
            self._run()

    def _start_thread(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name="mq-undisturbed", daemon=True)
        thread.start()
        self._threads.append(thread)

    def _join_threads(self) -> None:
        """They have nothing more to do."""
        with Lock():
            for thread in self._threads:
                thread.join()

    def _run(self) -> None:
        self._begun.set()
        try:
            if self._device is not None:
                sys.modules["torch.cuda"].set_device(self._device)
            self.results.append(self._context.run(self._work))
        except BaseException as error:
            self.error = error
        finally:
            self._ended.set()
            self._result_is_there.release()

    def wait(self) -> None:
        """Until there is a result, or an error; once.

        Raises:
            ForkedProcess: A signal's handler has forked meanwhile; this is the child.
        """
        acquire = self._result_is_there.acquire
        attentive(lambda seconds: acquire(timeout=seconds or -1), None)
        if self._is_forked:
            raise ForkedProcess(
                "this process was forked in the middle of a call that goes on in its "
                "parent; connect in the child"
            )
        self._join_threads()

    def abandon(self) -> None:
        """In a forked child: the thread that works does not exist there."""
        self._is_forked = True
        if self._result_is_there.locked():
            self._result_is_there.release()

    def call_off(self) -> None:
        """Undo it once it is done, and wait a little for that; may be repeated."""
        with Lock():
            if self._is_called_off or self._is_forked:
                return
            self._start_thread(self._clean)
            self._is_called_off = True
        if self._nothing_is_left.acquire(timeout=GRACE_SECONDS):
            self._join_threads()

    def _clean(self) -> None:
        try:
            if self._stopper is not None:
                self._stopper.stop()
            # Else the interrupt came before it was started.
            if self._begun.wait(_BEGIN_SECONDS) and self._ended.wait():
                for result in self.results:
                    self._undo(result)
        except Exception:
            logger.exception("could not undo what was interrupted")
        finally:
            self._nothing_is_left.release()


def _taken_lock() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


def _cuda_device() -> int | None:
    """CUDA's current device is a thread's own."""
    cuda: Any = sys.modules.get("torch.cuda")
    # Another thread may just be importing it.
    if cuda is None or not getattr(cuda, "is_initialized", bool)():
        return None
    return int(cuda.current_device())


def undisturbed(
    work: Callable[[], T],
    undo: Callable[[T], object] = lambda result: None,
    stopper: Stopper | None = None,
) -> T:
    """Do something that no signal's handler comes into the middle of.

    In the main thread an exception of such a handler ends the call within half a
    second; the work goes on to its end, and is undone.

    Args:
        work: What to do; it may run in another thread.
        undo: Called with its result where the caller was interrupted.
        stopper: Is told of that.

    Returns:
        What `work` returns. What it raises is raised here.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    task = _Work(work, undo, stopper)
    try:
        task.start()
        task.wait()
        if task.error is None:
            return task.results[0]
    except BaseException:
        try:
            task.call_off()
        finally:
            task.call_off()  # another interrupt came before the first did so
        raise
    error, task.error = task.error, None
    try:
        raise error
    finally:
        del error  # it refers to this frame, and must not refer to itself
