"""What becomes of the library's log where an application sends it on."""

from __future__ import annotations

import _thread
import logging
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fresh_python import output_of

import mq
from mq import log
from mq.log import Log, WarnOnce
from mq.mesh import waiting
from mq.testing import worker

SECONDS = 60.0


class PublishingHandler(logging.Handler):
    """Sends the log on, to a queue that its first record connects."""

    def __init__(self, queue: mq.MQ | None = None) -> None:
        super().__init__()
        self.queue = queue

    def emit(self, record: logging.LogRecord) -> None:
        if self.queue is None:
            self.queue = mq.connect("inproc", group="logging", name="log")
        self.queue.publish("log", record.getMessage())


@pytest.fixture
def library() -> Iterator[logging.Logger]:
    """The logger of all of the library, at DEBUG."""
    logger = logging.getLogger("mq")
    before = list(logger.handlers)
    logger.setLevel(logging.DEBUG)
    yield logger
    logger.setLevel(logging.NOTSET)
    logger.handlers[:] = before


def test_the_log_can_be_published_on_the_queue_that_it_is_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And so tell all members of one that waits."""
    monkeypatch.setattr(waiting, "COMPLAIN_SECONDS", 0.0)
    logger = logging.getLogger(waiting.__name__)
    with (
        mq.connect("inproc", group="logging", name="a") as a,
        mq.connect("inproc", group="logging", name="b") as b,
    ):
        b.subscribe("t", depth=1)
        b.subscribe("log")
        a.publish("t", 1)
        handler = PublishingHandler(a)
        logger.addHandler(handler)
        try:
            with pytest.raises(mq.PublishTimeout):
                a.publish("t", 2, timeout=0.1)
        finally:
            logger.removeHandler(handler)
        found = {message.topic: message.payload for message in (b.recv(10), b.recv(10))}
        assert found["t"] == 1
        assert "has waited" in found["log"]
        a.publish("t", 3, timeout=10)
        assert b.recv(timeout=10).payload == 3


class WaitingHandler(logging.Handler):
    """In the middle of a record of the application's until a queue was used."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.may_leave = threading.Event(), threading.Event()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())
        if record.name == "application":
            self.entered.set()
            assert self.may_leave.wait(SECONDS)


def test_a_queue_does_not_wait_for_a_handler_that_waits(
    library: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one that publishes, which waits for the queue."""
    monkeypatch.setattr(log, "FLUSH_SECONDS", 0.01)
    handler = WaitingHandler()
    application = logging.getLogger("application")
    library.addHandler(handler)
    application.addHandler(handler)
    thread = threading.Thread(target=application.error, args=("of its own",))
    thread.start()
    try:
        assert handler.entered.wait(SECONDS)
        with mq.connect("inproc", group="logging", name="a") as a:
            with mq.connect("inproc", group="logging", name="b") as b:
                b.subscribe("t")
                a.publish("t", 1, timeout=SECONDS)
                assert b.recv(timeout=SECONDS).payload == 1
            assert handler.seen == ["of its own"]
    finally:
        handler.may_leave.set()
        thread.join()
        application.removeHandler(handler)
    monkeypatch.undo()
    log.flush()
    assert any("session with b" in text for text in handler.seen)


def test_a_handler_may_connect_at_the_first_record(library: logging.Logger) -> None:
    """Of the application's or of the library's own."""
    application = logging.getLogger("application")
    handler = PublishingHandler()
    application.addHandler(handler)
    library.addHandler(handler)
    try:
        application.error("of its own")
        assert handler.queue is not None
        handler.queue.close()
    finally:
        application.removeHandler(handler)
        library.removeHandler(handler)


CONFIGURED = """
import logging
import logging.config
import mq

class Handler(logging.Handler):
    def __init__(self):
        super().__init__()
        self.queue = mq.connect("tcp", group="configured", name="log")

    def emit(self, record):
        self.queue.publish("log", record.getMessage(), timeout=30)

logging.config.dictConfig({
    "version": 1,
    "handlers": {"sent": {"()": Handler}},
    "root": {"handlers": ["sent"], "level": "DEBUG"},
})
with mq.connect("tcp", group="configured", name="reader") as reader:
    reader.subscribe("log")
    logging.getLogger("application").info("of its own")
    while "of its own" not in reader.recv(timeout=30).payload:
        pass
logging.getLogger().handlers[0].queue.close()
print("configured")
"""


def test_a_handler_may_connect_while_logging_is_configured() -> None:
    """Which has a lock then that every logger is made and asked under."""
    assert output_of(CONFIGURED, timeout=SECONDS) == "configured\n"


BETWEEN = """
import logging, multiprocessing, os, signal, threading
import mq

def join(may_join, joined):
    may_join.wait()
    with mq.connect("tcp", group="between", name="peer") as queue:
        queue.subscribe("t")
        joined.set()
        assert queue.recv(timeout=30).payload == 1

def interrupted(number, frame):
    # In the middle of `threading.enumerate`, whose lock a new thread needs.
    may_join.set()
    assert joined.wait(10)
    queue.publish("t", 1, timeout=30)

if __name__ == "__main__":
    logging.getLogger("mq").setLevel(logging.DEBUG)
    signal.signal(signal.SIGUSR1, interrupted)
    context = multiprocessing.get_context("fork")
    may_join, joined = context.Event(), context.Event()
    process = context.Process(target=join, args=(may_join, joined))
    process.start()
    with mq.connect("tcp", group="between", name="one") as queue:
        with threading._active_limbo_lock:
            os.kill(os.getpid(), signal.SIGUSR1)
        process.join(30)
        print(process.exitcode)
"""


def test_who_says_something_takes_no_lock_of_threading() -> None:
    """A handler of a signal waits for the queue under such a lock."""
    assert output_of(BETWEEN, timeout=SECONDS) == "0\n"


INTERRUPTED = """
import logging, signal
from mq import log

class Counting(logging.Handler):
    def emit(self, record):
        seen.append(record.getMessage())

def interrupt(number, frame):
    raise KeyboardInterrupt

seen = []
logging.getLogger("mq").addHandler(Counting())
signal.signal(signal.SIGALRM, interrupt)
for number in range(3000):
    try:
        log.Log("mq.tried").warning("%d", number)
        signal.setitimer(signal.ITIMER_REAL, 2e-5 * (number % 30 + 1))
        log.flush()
    except KeyboardInterrupt:
        pass
    try:
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        pass
    log.flush()
print(len(seen))
"""


def test_interrupts_while_it_waits_stop_no_later_flush() -> None:
    """Nor the thread that tells: all is told in the end."""
    assert int(output_of(INTERRUPTED, timeout=SECONDS)) > 2900


IN_A_CHILD = """
import logging
import multiprocessing
import sys
import mq
from mq.log import Log

def child():
    for number in range(5):
        Log("mq.tried").warning("%d", number)

if __name__ == "__main__":
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
"""


def test_the_end_of_a_child_waits_until_all_was_told() -> None:
    """Those of multiprocessing end without what other processes do at exit."""
    said = output_of(IN_A_CHILD, timeout=SECONDS)
    assert said.split() == ["0", "1", "2", "3", "4"]


FORKING = """
import logging, os, threading
from mq import log

class Forking(logging.Handler):
    def emit(self, record):
        whose = "parent" if os.getpid() == parent else "child"
        os.write(1, f"{whose} {record.getMessage()}\\n".encode())
        if record.getMessage() == "0":
            assert all_said.wait(30)
            if child := os.fork():
                os.waitpid(child, 0)
            else:
                log.Log("mq.tried").warning("of its own")
                log.flush()

log.FLUSH_SECONDS = 30
parent, all_said = os.getpid(), threading.Event()
logging.getLogger("mq").addHandler(Forking())
for number in range(3):
    log.Log("mq.tried").warning("%d", number)
all_said.set()
log.flush()
"""


def test_what_a_handler_forks_tells_only_what_it_says_itself() -> None:
    """The thread that tells goes on in the child, where the rest is the parent's."""
    said = output_of(FORKING, timeout=SECONDS).splitlines()
    assert said == ["parent 0", "child of its own", "parent 1", "parent 2"]


def _end_of_a_member_that_never_was() -> None:
    worker.close(SimpleNamespace(queue=None), 0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("end", [log.flush, _end_of_a_member_that_never_was])
def test_once_all_was_told_no_thread_is_left(
    library: logging.Logger, end: Callable[[], None]
) -> None:
    """As after `close`: who looks for leaks finds none, not for a moment.

    Nor does the harness, where the `connect` of a case has failed.
    """
    told: list[logging.LogRecord] = []
    library.addHandler(handler := logging.Handler())
    handler.emit = told.append  # type: ignore[method-assign]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for number in range(1000):
            for _ in range(number % 3):
                Log("mq.tried").info("said")
            end()
            threads = [thread.name for thread in threading.enumerate()]
            assert "mq-log" not in threads, f"after {number} times"
    finally:
        sys.setswitchinterval(before)
    assert len(told) == 999


class Panic(BaseException):
    """No Exception, as what Rust code raises in Python is not."""


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt, Panic])
def test_what_a_handler_raises_holds_no_other_record_up(
    library: logging.Logger,
    kind: type[BaseException],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Even if it would end a thread; it is printed."""
    seen: list[str] = []

    class Failing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())
            raise kind

    library.addHandler(Failing())
    for text in ("one", "two"):
        Log("mq.tried").info(text)
    log.flush()
    assert seen == ["one", "two"]
    assert capsys.readouterr().err.count(f"raise kind\n{_shown(kind)}") == 2


def _shown(kind: type[BaseException]) -> str:
    return kind.__name__ if kind.__module__ == "builtins" else f"{__name__}.Panic"


def test_what_a_signal_raises_in_a_handler_ends_the_call(
    library: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no thread can be started: it is not the log's, and is not kept from it."""

    class Interrupted(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise KeyboardInterrupt

    def refuse(*arguments: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(log, "_teller", log._Teller())
    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    library.addHandler(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        Log("mq.tried").info("said")


def test_what_a_factory_of_records_raises_ends_nothing(
    library: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    """It runs in the middle of what is being told of."""

    def fail(*arguments: Any, **options: Any) -> logging.LogRecord:
        raise KeyError("request")

    before = logging.getLogRecordFactory()
    logging.setLogRecordFactory(fail)
    try:
        with mq.connect("inproc", group="logging", name="a") as a:
            a.publish("t", 1)
    finally:
        logging.setLogRecordFactory(before)
    assert "KeyError: 'request'" in capsys.readouterr().err


def test_a_thread_that_was_to_begin_and_did_not_stops_nothing(
    library: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who was to begin it may have been interrupted."""
    teller = log._Teller()
    monkeypatch.setattr(log, "_teller", teller)
    told: list[Any] = []
    monkeypatch.setattr(log, "_handle", told.append)
    monkeypatch.setattr(teller, "_begin", lambda: None)
    Log("mq.tried").info("one")
    monkeypatch.undo()
    monkeypatch.setattr(log, "_handle", told.append)
    monkeypatch.setattr(log, "BEGIN_SECONDS", 0.0)
    teller.tell(said := log._Once())
    while len(told) < 2:
        threading.Event().wait(0.001)
    assert told[1] is said


def test_what_a_handler_raises_ends_nothing(
    library: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is printed, as `logging` does."""

    class Failing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise ValueError(record.getMessage())

    library.addHandler(Failing())
    with mq.connect("inproc", group="logging", name="a") as a:
        a.publish("t", 1)
    assert "ValueError: inproc queue 'a'" in capsys.readouterr().err


def test_a_record_is_as_if_it_had_been_told_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where it is from and of which thread."""

    def say() -> None:
        Log("mq.tried").info("%d", 1)
        try:
            raise ValueError("a reason")
        except ValueError:
            Log("mq.tried").exception("two")

    with caplog.at_level(logging.DEBUG, logger="mq.tried"):
        thread = threading.Thread(target=say, name="who said it")
        thread.start()
        thread.join()
        records: list[Any] = list(caplog.records)
    assert [record.funcName for record in records] == ["say"] * 2
    assert {record.filename for record in records} == {"test_logging.py"}
    assert {record.threadName for record in records} == {"who said it"}
    assert "a reason" in caplog.text


def test_each_thing_is_said_once_and_so_many_at_most(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing is remembered beyond that: strangers may come up with any number."""
    warn = WarnOnce(Log("mq.tried"), 3)
    for number in (0, 0, 1):
        warn(number, "%d is wrong", number)
    try:
        raise ValueError("a reason")
    except ValueError:
        for number in (1, 2, 3, 0, 2):
            warn.exception(number, "%d has failed", number)

    said = [(record.getMessage(), bool(record.exc_info)) for record in caplog.records]
    assert said == [
        ("0 is wrong", False),
        ("1 is wrong", False),
        ("2 has failed", True),
    ]
    assert {record.filename for record in caplog.records} == {"test_logging.py"}


@pytest.mark.parametrize(
    ("levels", "disabled", "wanted"),
    [
        ({}, 0, {"warning", "error"}),
        ({"mq": logging.ERROR}, 0, {"error"}),
        ({"mq": logging.ERROR, "mq.a": logging.INFO}, 0, {"info", "warning", "error"}),
        ({"mq.a.b": logging.DEBUG}, 0, {"debug", "info", "warning", "error"}),
        ({"mq.a.b": logging.DEBUG}, logging.WARNING, {"error"}),
    ],
)
def test_levels_are_those_of_logging(
    monkeypatch: pytest.MonkeyPatch,
    levels: dict[str, int],
    disabled: int,
    wanted: set[str],
) -> None:
    """Without its lock: see `Logger.isEnabledFor`."""
    manager = logging.Manager(logging.RootLogger(logging.WARNING))
    monkeypatch.setattr(logging, "root", manager.root)
    monkeypatch.setattr(manager.root, "manager", manager, raising=False)
    told: list[str] = []
    monkeypatch.setattr(log, "_handle", lambda said: told.append(said[1].levelname))
    manager.disable = disabled
    for name, level in levels.items():
        manager.getLogger(name).setLevel(level)
    library = Log("mq.a.b")
    for name in ("debug", "info", "warning", "error"):
        getattr(library, name)("said")
    while log._teller._said or log._teller._telling.locked():
        threading.Event().wait(0.001)
    assert {name.lower() for name in told} == wanted


_WITHOUT_MEMORY = """
import logging, os, resource, threading, time
from mq import log

by = []

class Handler(logging.Handler):
    def emit(self, record):
        known = {thread.ident: thread.name for thread in threading.enumerate()}
        by.append(known.get(threading.get_ident()))

logging.getLogger("mq").addHandler(Handler())
log.Log("mq.tried").warning("with memory")
log.flush()
# The C library keeps a thread's stack for the next one, once the thread has ended.
deadline = time.monotonic() + 30
while len(os.listdir("/proc/self/task")) > 1:
    assert time.monotonic() < deadline
    time.sleep(0)
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 20), resource.RLIM_INFINITY))
log.Log("mq.tried").warning("without")
log.flush()
assert by == ["mq-log", None], by
"""


def test_without_memory_no_thread_is_begun_that_might_die_as_it_begins() -> None:
    """`threading` would list it for good, and who began it wait for it for ever."""
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        pytest.skip("the address space is limited already")
    subprocess.run(
        [sys.executable, "-c", _WITHOUT_MEMORY],
        check=True,
        timeout=SECONDS,
        cwd=Path(__file__).parents[1],
    )
