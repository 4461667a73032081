"""The member's side of the harness: a loop that does what the case's script asks.

It runs in a process of its own or, for transports whose members are threads, in a
thread of the test. Requests come through a pipe; each is executed in the worker's main
thread or, where the script goes on meanwhile, in a thread of its own.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import pickle
import queue
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Final

from mq import log, registry
from mq.errors import Closed
from mq.mesh.poller import Poller


@dataclass(frozen=True)
class Request:
    """One thing to do; `function` is called with the `Worker` first."""

    number: int
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    main: bool = True


@dataclass(frozen=True)
class Failure:
    """An exception as data: some cannot be pickled, and the traceback must come too."""

    module: str
    qualname: str
    args: tuple[Any, ...]
    state: dict[str, Any]
    text: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        kind = type(error)
        text = "".join(traceback.format_exception(kind, error, error.__traceback__))
        state = {k: v for k, v in vars(error).items() if not k.startswith("__")}
        return cls(kind.__module__, kind.__qualname__, error.args, state, text)

    def rebuild(self, member: str) -> BaseException:
        """The exception again, with the member's traceback as its cause."""
        kind: Any = importlib.import_module(self.module)
        for part in self.qualname.split("."):
            kind = getattr(kind, part)
        error: BaseException = kind.__new__(kind)
        error.args = self.args
        vars(error).update(self.state)
        error.__cause__ = RemoteTraceback(f"in member {member!r}:\n{self.text}")
        return error


class RemoteTraceback(Exception):
    """Carries the traceback of a member to the case's own."""


ORPHAN_SECONDS: Final = 5.0
_BREAKS: Final = ("lost_connections", "forgotten")
_OF_A_PEER: Final = ("resent_frames", "duplicate_frames", "malformed", "connections")


class Worker:
    """One member: its queue and the thread that executes requests in order.

    Args:
        channel: Requests and answers.
        ends_process: Whether a call that goes on although the script is gone, as after
            a kill, ends with the process after `ORPHAN_SECONDS`.
    """

    def __init__(self, channel: Connection, ends_process: bool = False) -> None:
        self._channel = channel
        self._ends_process = ends_process
        self._over = threading.Event()
        self._sending = threading.Lock()
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self.queue: Any = None
        self.baseline = resources()

    def loop(self) -> None:
        """Execute requests until the script's end of the pipe is closed."""
        reader = threading.Thread(target=self._read, name="mq-test-reader", daemon=True)
        reader.start()
        while True:
            try:
                request = self._requests.get()
            except KeyboardInterrupt:  # it came just after the call that it was for
                continue
            if request is None:
                break
            self._execute(request)
        self._over.set()
        reader.join()
        self._channel.close()

    def _read(self) -> None:
        while True:
            try:
                request: Request = pickle.loads(self._channel.recv_bytes())
            except (EOFError, OSError):
                self._requests.put(None)
                break
            if request.main:
                self._requests.put(request)
            else:
                threading.Thread(
                    target=self._execute, args=(request,), name="mq-test-call"
                ).start()
        if self._ends_process and not self._over.wait(ORPHAN_SECONDS):
            os._exit(1)

    def _execute(self, request: Request) -> None:
        answer: Any
        try:
            answer = request.function(self, *request.args, **request.kwargs)
        except BaseException as error:  # whatever it is, the script must see it
            answer = Failure.of(error)
        try:
            raw = pickle.dumps((request.number, answer))
        except Exception as error:  # pickle raises anything
            raw = pickle.dumps((request.number, Failure.of(error)))
        with self._sending:
            try:
                self._channel.send_bytes(raw)
            except OSError:  # the script is gone, and so will this worker be
                pass


@dataclass(frozen=True)
class Setting:
    """What a process of a case needs before all else.

    Attributes:
        directory: Where the library makes its rendezvous and its socket files.
        backend: The transport under test.
        entry: How the test's own process knows it, which may be by `mq.register`; None:
            by an entry point.
    """

    directory: str
    backend: str
    entry: registry.Entry | None

    def take(self) -> None:
        """Make it so in this process."""
        os.environ["XDG_RUNTIME_DIR"] = os.environ["TMPDIR"] = self.directory
        tempfile.tempdir = None
        if (entry := self.entry) is not None:
            registry.register(
                self.backend,
                entry.target,
                library=entry.library,
                replace=True,
                **entry.options,
            )


def process_main(channel: Connection, stacks: Connection, setting: Setting) -> None:
    """Run a worker as the main thread of a process of its own.

    Args:
        channel: Requests and answers.
        stacks: Where all stacks are written on SIGUSR1.
        setting: Of the case.
    """
    faulthandler.register(signal.SIGUSR1, file=stacks.fileno(), all_threads=True)
    # Ignored where a shell started all this in the background, and blocked where who
    # started the server of these processes has that, as the bench does.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    setting.take()
    worker = Worker(channel, ends_process=True)
    worker.loop()
    # What a normal exit does is the subject of cases of its own; here it costs time.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def plain_main(setting: Setting, function: Callable[..., None], *args: Any) -> None:
    """Be a process that calls one function and ends."""
    setting.take()
    function(*args)


def thread_main(channel: Connection) -> None:
    """Run a worker in a thread of the test's process."""
    Worker(channel).loop()


def connect(worker: Worker, backend: str, options: dict[str, Any]) -> int:
    """Connect the worker's queue.

    Returns:
        The process id.
    """
    import mq

    worker.baseline = resources()
    worker.queue = mq.connect(backend, **options)
    return os.getpid()


def start_engine(worker: Worker, backend: str, options: dict[str, Any]) -> None:
    """Use the engine once; what it keeps from then on is no leak of a queue."""
    use_engine(backend, options)
    worker.baseline = resources()


def use_engine(backend: str, options: dict[str, Any]) -> None:
    """Open and close a link in this process."""
    own = registry.option_names(backend)
    link = registry.create(backend, {k: v for k, v in options.items() if k in own})
    poller = Poller()
    try:
        link.open(poller, [], None)
    finally:
        link.close()
        poller.close()


def call(worker: Worker, method: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of the worker's queue."""
    return getattr(worker.queue, method)(*args, **kwargs)


def run(worker: Worker, function: Callable[..., Any], *args: Any, **kw: Any) -> Any:
    """Call a function with the worker's queue."""
    return function(worker.queue, *args, **kw)


def close(worker: Worker, linger: float) -> list[str]:
    """Close the queue, if there is one; in words, which of its connections broke."""
    if worker.queue is None:
        log.flush()  # of a `connect` that failed; else `close` does
        return []
    found = breaks(worker.queue)
    worker.queue.close(linger=linger)
    return found


def breaks(queue: Any) -> list[str]:
    """What a member counted that an undisturbed one does not, in words.

    A connection that ends before its peer has said hello is none of these: members that
    dial each other at once have one too many. Nor is what a member counts that has
    left: of two that leave at once, one may be gone before it answers.
    """
    try:
        queue.members()
    except Closed:
        return []
    stats = queue.stats()
    found = [f"{name} {stats['mesh'][name]}" for name in _BREAKS if stats["mesh"][name]]
    for peer, counters in stats["peers"].items():
        again = {**counters, "connections": counters["connections"] - 1}
        found += [
            f"{name} {counters[name]} of {peer!r}" for name in _OF_A_PEER if again[name]
        ]
    return found


def leaks(worker: Worker) -> list[str]:
    """Threads and descriptors that are there now and were not before `connect`."""
    worker.queue = None
    return [
        name
        for now, before in zip(resources(), worker.baseline, strict=True)
        for name in sorted(now - before)
        if not name.startswith("thread mq-test-")
    ]


def measure(worker: Worker, what: str) -> Any:
    """Resident bytes, descriptors or threads of this process."""
    if what == "resident_bytes":
        return resident_bytes()
    if what == "descriptors":
        return descriptors()
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if not name.startswith("mq-test-")]


def resources() -> tuple[set[str], set[str]]:
    """The threads and the open descriptors of this process, in words."""
    threads = {f"thread {t.name} {t.ident}" for t in threading.enumerate()}
    return threads, set(descriptors())


def descriptors() -> list[str]:
    """The open descriptors of this process, each with what it refers to."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that listed the directory
            target = os.readlink(f"/proc/self/fd/{fd}")
            # glibc reads it once, in the first thread that gives memory back.
            if target != "/proc/sys/vm/overcommit_memory":
                found.append(f"descriptor {fd} {target}")
    return found


def resident_bytes() -> int:
    """The resident memory of this process in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
