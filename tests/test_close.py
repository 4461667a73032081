"""`close` beside another `close`, in another thread or in a signal's handler."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fresh_python import output_of, printed_by
from meeting import held_elsewhere

import mq
from mq import speed
from mq.testing.waiting import wait_until
from mq.threads import current_frames

PROGRAM = """
import os, signal, threading
import mq
from mq import speed
from mq.testing.waiting import wait_until
from test_close import is_in, unanswered

def handle(number, frame):
    queue.close()
    print("the handler's close returned", flush=True)
    raise SystemExit

def send():
    wait_until(lambda: is_in("sleep"), "close")
    os.kill(os.getpid(), signal.SIGTERM)

signal.signal(signal.SIGTERM, handle)
for queue in unanswered(f"handler-{os.getpid()}"):
    threading.Thread(target=send).start()
    try:
        queue.close(linger=60.0)
    finally:
        assert queue._closed
"""


def is_in(function: str) -> bool:
    """Whether the main thread is in a call of that name."""
    frame = current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame is not None


def unanswered(group: str) -> Iterator[mq.MQ]:
    """A queue that has published what is not answered."""
    with (
        mq.connect("inproc", group=group, name="silent", peer_timeout=None) as silent,
        mq.connect("inproc", group=group, name="loud", peer_timeout=None) as loud,
    ):
        silent.subscribe("t")
        with held_elsewhere(silent._lead.lock):
            loud.publish("t", 1)
            yield loud


def test_a_handler_may_close_what_is_being_closed() -> None:
    """It waits for nobody, least of all for itself."""
    where = os.path.dirname(__file__)
    program = f"import sys; sys.path.insert(0, {where!r})\n{PROGRAM}"
    assert output_of(program, timeout=60.0) == "the handler's close returned\n"


def test_who_waits_for_another_close_can_be_interrupted() -> None:
    """By a signal that another thread takes, too."""
    for queue in unanswered(f"second-{os.getpid()}"):
        over, late = threading.Event(), threading.Event()
        first = threading.Thread(target=queue.close, kwargs={"linger": 60.0})
        first.start()
        wait_until(queue._close_lock.locked, "the first close")

        def send(over: threading.Event = over, late: threading.Event = late) -> None:
            wait_until(lambda: is_in("close"), "the second close")
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
            if not over.wait(5.0):
                late.set()

        sender = threading.Thread(target=send)
        sender.start()
        with pytest.raises(KeyboardInterrupt):
            queue.close()
        over.set()
        sender.join()
        assert not late.is_set()
    first.join()


def test_close_complains_only_of_what_did_not_arrive(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """However short `linger`: what its last words came after has arrived."""
    with mq.connect("tcp", group=f"linger-{os.getpid()}", name="reader") as reader:
        reader.subscribe("t")
        for _ in range(5):
            writer = mq.connect("tcp", group=f"linger-{os.getpid()}", name="writer")
            for number in range(300):
                writer.publish("t", number)
            caplog.clear()
            writer.close(linger=0.0)
            wait_until(lambda: len(reader.members()) == 1, "its end")
            got = 0
            with contextlib.suppress(mq.RecvTimeout):
                while reader.recv(0):
                    got += 1
            assert got == 300 or "'reader' lacks" in caplog.text
            assert got < 300 or "lacks" not in caplog.text


@pytest.fixture(params=["0", "1"])
def compiled_or_not(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New interpreters with nothing compiled, and as usual."""
    monkeypatch.setenv("MQ_COMPILED", request.param)


IN_THE_MIDDLE = """
import mq

with mq.connect("inproc", group="middle", name="one") as queue:
    queue._driver.run(queue.close)
    assert queue._freed.wait(60.0)
    try:
        queue.recv()
    except mq.Closed:
        print("closed")
"""


@pytest.mark.usefixtures("compiled_or_not")
def test_a_handler_may_close_in_the_middle_of_the_queues_work() -> None:
    """Of a signal that did not wait; it is closed when that work has ended."""
    assert output_of(IN_THE_MIDDLE, timeout=60.0) == "closed\n"


AS_IT_LOOKS = """
import mq

class Sessions(dict):
    def values(self):
        if not queue._lead.closing:
            queue.close()  # as a signal's handler does that comes just now
        return super().values()

for call in ("members", "stats", "describe"):
    with mq.connect("inproc", group="looks", name="one") as queue:
        queue._mesh.sessions = Sessions()
        getattr(queue, call)()
        assert queue._freed.wait(60.0)
print("closed")
"""


@pytest.mark.usefixtures("compiled_or_not")
def test_a_handler_may_close_while_a_call_looks_what_is_there() -> None:
    """That is done under the lock, too."""
    assert output_of(AS_IT_LOOKS, timeout=60.0) == "closed\n"


AGAIN = """
import threading
import mq

def start(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")

def poll(**options):
    if threading.get_ident() == queue._closer and threading.Thread.start is real:
        threading.Thread.start = start
        queue.close()  # as a signal's handler does that comes just now
        queue._lead.poll, threading.Thread.start = work, real
        print("again")
    return work(**options)

real = threading.Thread.start
queue = mq.connect("inproc", group="again", name="one")
work, queue._lead.poll = queue._lead.poll, poll
queue.close()
print("closed" * queue._freed.is_set())
"""


@pytest.mark.usefixtures("compiled_or_not")
def test_a_handler_in_the_middle_of_close_needs_no_thread() -> None:
    """At exit there is none to be had, from Python 3.12 on."""
    assert output_of(AGAIN, timeout=60.0) == "again\nclosed\n"


AT_EXIT = """
import atexit
import mq
from mq import speed
from mq.testing.waiting import wait_until

queue = mq.connect("inproc", group="exit", name="one")
free = queue._joined.close

def close(linger):
    wait_until(lambda: ended, "exit")
    free(linger)
    print("closed", flush=True)

ended = []
queue._joined.close = close
queue._driver.run(queue.close)
wait_until(lambda: queue._closed, "the other thread")
atexit.register(ended.append, True)
"""


def test_exit_waits_for_the_thread_that_closes() -> None:
    """Else files and what engines have to send would be left to themselves."""
    assert output_of(AT_EXIT, timeout=60.0) == "closed\n"


INTERRUPTED = """
import atexit, os, signal
import mq
from mq import speed
from mq.testing.waiting import wait_until

queue = mq.connect("inproc", group="interrupted", name="one")
free = queue._joined.close

def close(linger):
    os.kill(os.getpid(), signal.SIGINT)
    wait_until(lambda: ended, "exit")
    free(linger)
    print("closed", flush=True)

ended = []
queue._joined.close = close
try:
    queue.close()
except KeyboardInterrupt:
    print("interrupted", flush=True)
atexit.register(ended.append, True)
"""


def test_exit_waits_for_what_an_interrupted_close_left_to_a_thread() -> None:
    """That frees the engine, whose threads would else come to find nothing there."""
    assert output_of(INTERRUPTED, timeout=60.0) == "interrupted\nclosed\n"


AS_IT_FREES = """
import logging, threading
import mq

class CloseAll(logging.Handler):
    def emit(self, record):
        queue.close()
        print(record.getMessage(), flush=True)

def close(linger):
    logging.getLogger("mq").warning("a record is left")
    free(linger)

logging.getLogger("mq").addHandler(CloseAll())
for of_its_own in (False, True):
    queue = mq.connect("inproc", group="frees", name="one")
    free, queue._joined.close = queue._joined.close, close
    if of_its_own:
        threading.Thread(target=queue.close).start()
    else:
        queue.close()
    assert queue._freed.wait(60.0)
print("closed")
"""


def test_a_handler_of_the_log_may_close_as_the_queue_is_freed() -> None:
    """By another thread than calls `close`, which waits for that."""
    record = "a record is left\n"
    assert output_of(AS_IT_FREES, timeout=60.0) == f"{record}{record}closed\n"


AS_IT_WAITS = """
import sys, threading
import mq
from mq import speed
from mq.testing.waiting import wait_until

def trace(frame, event, arg):
    if not frame.f_code.co_filename.endswith(("/threading.py", "/membership.py")):
        return None
    lines.append(frame.f_lineno)
    if len(lines) == at:
        sys.settrace(None)
        queue.close()  # as a signal's handler does that comes just now
        lines.append("again")
    return trace

def close(linger):
    wait_until(lambda: len(lines) >= at, "a handler")
    free(linger)

for at in range(1, 60):
    lines = []
    queue = mq.connect("inproc", group="waits", name="one")
    free, queue._joined.close = queue._joined.close, close
    first = threading.Thread(target=queue.close)
    first.start()
    wait_until(lambda: queue._closed, "the other thread")
    sys.settrace(trace)
    queue.close()
    sys.settrace(None)
    assert "again" in lines
    first.join()
print("closed")
"""


def test_a_handler_may_close_wherever_close_waits_for_another_thread() -> None:
    """So nothing is waited for there that a thread cannot wait for twice."""
    assert output_of(AS_IT_WAITS, timeout=60.0) == "closed\n"


ELSEWHERE = """
import threading
import mq

def hold():
    with queue._lead.lock:
        held.set()
        end.wait(60.0)

held, end = threading.Event(), threading.Event()
with mq.connect("inproc", group="elsewhere", name="one") as queue:
    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    print(queue._lead.is_in_the_middle())
    end.set()
    holder.join()
"""


@pytest.mark.usefixtures("compiled_or_not")
def test_the_work_of_another_thread_is_waited_for() -> None:
    """Only in the middle of its own does `close` leave it to another."""
    assert output_of(ELSEWHERE, timeout=60.0) == "False\n"


FORKING = """
import os, signal, threading
import mq
from mq import speed
from mq.testing.waiting import wait_until
from test_close import is_in, unanswered

freeing, go_on = threading.Event(), threading.Event()

def handle(number, frame):
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        go_on.set()
        raise KeyboardInterrupt
    signal.alarm(60)  # where it hangs

def send():
    if linger:
        wait_until(lambda: is_in("sleep"), "close")
    else:
        freeing.wait(60.0)
    os.kill(os.getpid(), signal.SIGTERM)

def hold_up(joined):
    close = joined.close

    def held_up(to_send):
        freeing.set()
        go_on.wait(60.0)
        close(to_send)

    joined.close = held_up

signal.signal(signal.SIGTERM, handle)
for queue in unanswered(f"forking-{os.getpid()}"):
    if linger == 0.0:
        hold_up(queue._joined)
    threading.Thread(target=send).start()
    try:
        queue.close(linger)
    except KeyboardInterrupt:
        print("the parent was interrupted", queue._closed, flush=True)
    else:
        print("the child's close returned", queue._closed, flush=True)
        os._exit(0)
"""


@pytest.mark.parametrize("linger", [60.0, 0.0])
def test_a_child_forked_in_the_middle_of_close_closes_nothing(
    monkeypatch: pytest.MonkeyPatch, linger: float
) -> None:
    """By a signal's handler: it returns there, in silence; the parent's goes on.

    As it delivers what was published, and as it frees what it had.
    """
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    lines = output_of(f"linger = {linger}\n{FORKING}").splitlines()
    assert [line.rpartition(" ")[0] for line in lines] == [
        "the child's close returned",
        "the parent was interrupted",
    ]


CHILDREN = """
import multiprocessing, os, threading
import mq
from mq import speed
from mq.testing.waiting import wait_until
from mq.threads import current_frames

def is_waited_for():
    frame = current_frames().get(threading.main_thread().ident)
    while frame is not None and frame.f_code.co_name != "_shutdown":
        frame = frame.f_back
    return frame is not None

def answer(queue):
    wait_until(is_waited_for, "the end of the main thread")
    queue.publish("answer", queue.recv(timeout=20.0).payload)

def child(group):
    queue = mq.connect("tcp", group=group)
    queue.subscribe("question")
    threading.Thread(target=answer, args=(queue,)).start()

if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        group = f"children-{os.getpid()}-{method}"
        with mq.connect("tcp", group=group) as parent:
            parent.subscribe("answer")
            context = multiprocessing.get_context(method)
            process = context.Process(target=child, args=(group,))
            process.start()
            parent.wait_for_subscribers("question", 1, timeout=60.0)
            parent.publish("question", method)
            print(parent.recv(timeout=60.0).payload)
            process.join()
            print(process.exitcode)
"""


def test_a_thread_of_a_child_keeps_its_queue_open(tmp_path: Path) -> None:
    """Before 3.13 multiprocessing calls its finalizers before it waits for threads."""
    answers = ["fork", "0", "spawn", "0", "forkserver", "0"]
    assert printed_by(CHILDREN, tmp_path) == answers


POOLED = """
import concurrent.futures, multiprocessing, os, threading
import mq

def child():
    queue = mq.connect("inproc", group="pooled")
    pool = concurrent.futures.ThreadPoolExecutor(1)
    pool.submit(queue.members).result()

if __name__ == "__main__":
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(60.0)
    print(process.exitcode)
"""


def test_threads_that_only_python_itself_ends_are_waited_for_last(
    tmp_path: Path,
) -> None:
    """Those of a pool, which nobody shut down: Python tells them to end at exit."""
    assert printed_by(POOLED, tmp_path) == ["0"]


AFTER_EXIT = """
import atexit
import mq

def tell():
    try:
        queue.recv(timeout=0)
    except mq.Closed as closed:
        print(closed)

atexit.register(tell)
queue = mq.connect("inproc", group="after", name="one")
"""


def test_what_was_closed_at_exit_does_not_blame_a_call_of_close() -> None:
    """The user never made one."""
    closed = "inproc queue 'one' of group 'after' is closed: the process ends\n"
    assert output_of(AFTER_EXIT, timeout=60.0) == closed


ENDING = """
import asyncio, os, signal, threading
import mq
from mq import exits
from mq.testing.waiting import wait_until
from mq.threads import current_frames

def hold():
    with silent._lead.lock:
        held.set()
        threading.Event().wait()

def lingers():
    for frame in current_frames().values():
        while frame is not None and frame.f_code.co_name != "leave":
            frame = frame.f_back
        if frame is not None:
            return True
    return False

def interrupt():
    wait_until(lingers, "close")
    os.kill(os.getpid(), signal.SIGINT)

async def block():
    async with loud:
        pass

silent, loud = (
    mq.connect("inproc", group="ending", name=name, peer_timeout=None)
    for name in ("silent", "loud")
)
silent.subscribe("t")
held = threading.Event()
threading.Thread(target=hold, daemon=True).start()
held.wait()
exits.unregister(silent)  # its lock is never given back
loud.publish("t", 1)
leave = loud._driver.leave
loud._driver.leave = lambda reason, deadline: leave(reason, float("inf"))
"""

CANCELLED = """
threading.Thread(target=interrupt).start()
try:
    asyncio.run(block())
except KeyboardInterrupt:
    print("interrupted")
"""


def test_an_interrupt_at_the_end_of_an_asynchronous_block_ends_the_process() -> None:
    """As one at the end of a plain block does, however long it may linger."""
    assert output_of(ENDING + CANCELLED, timeout=60.0) == "interrupted\n"


STOPPED = """
async def stop():
    task = asyncio.create_task(block())
    while not lingers():
        await asyncio.sleep(0)
    raise SystemExit

exits.EXIT_LINGER = 0.0
asyncio.new_event_loop().run_until_complete(stop())
"""

IN_A_DAEMON = """
exits.EXIT_LINGER = 0.0
threading.Thread(target=loud.close, daemon=True).start()
wait_until(lingers, "close")
"""


@pytest.mark.parametrize("under_way", [STOPPED, IN_A_DAEMON])
def test_exit_gives_a_close_under_way_no_longer_than_its_own(under_way: str) -> None:
    """Of a block whose loop runs no more, or in a thread that is not waited for."""
    output_of(ENDING + under_way, timeout=60.0)


@pytest.mark.skipif(not speed.COMPILED, reason="nothing is compiled: it is not noticed")
def test_a_destructor_in_the_middle_of_one_queue_does_not_wait_for_another() -> None:
    """It held the former up, until that was given up: 14 s, and messages were lost."""
    group = f"destructors-{os.getpid()}"
    with mq.connect("inproc", group=group, name="other") as other:
        slow = mq.connect("inproc", group=group, name="slow")
        slow.subscribe("t", depth=1)
        mine = mq.connect("inproc", group=group, name="mine")
        # As where a collection begins in the work of one; nor does the other answer.
        with other._lead.lock, held_elsewhere(slow._lead.lock):
            mine.publish("t", 0)  # has room
            calls: list[Callable[[], object]] = [
                lambda: mine.publish("t", 1),
                lambda: mine.publish("t", 1, timeout=60.0),
                lambda: mine.recv(timeout=60.0),
                lambda: mine.wait_for_members(9, timeout=60.0),
                lambda: mine.flush(timeout=60.0),
                lambda: mq.connect("inproc", group=group, name="another"),
            ]
            for call in calls:
                with pytest.raises(RuntimeError, match="from another thread"):
                    call()
            mine.close()  # by another thread
        wait_until(lambda: mine._closed, "the other thread to close it")
        assert slow.recv(timeout=10).payload == 0
        slow.close()
