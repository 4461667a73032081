"""Close, what remains after it, exit without it, and fork."""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import mq
from mq.testing import programs
from mq.testing.cases import case
from mq.testing.harness import Group, expect
from mq.testing.waiting import STEP, wait_until


@case("Close")
def close_wakes_every_waiting_call(group: Group) -> None:
    """From another thread, twice: `recv` and `publish` end with `Closed`."""
    a, b = group.members("a", "b")
    b.subscribe("t", depth=1)
    a.run(programs.fill, "t")
    waiting = [
        a.start("recv", timeout=None),
        a.start("publish", "t", 1, timeout=None),
        a.start("wait_for_members", 9, timeout=None),
        a.start("wait_for_subscribers", "t", 9, timeout=None),
    ]
    assert not any(future.done(0.05) for future in waiting)
    closing = [a.start("close", linger=0.1) for _ in range(2)]
    for future in waiting:
        with expect(mq.Closed):
            future.result()
    for future in closing:
        future.result()
    a.call("close")


def _publish_and_close(queue: mq.MQ, count: int) -> None:
    for number in range(count):
        queue.publish("t", programs.pattern(number, 20_000), timeout=STEP)
    queue.close(linger=STEP)


@case("Close")
def close_delivers_what_was_published_before(group: Group) -> None:
    """To a subscriber that takes it only afterwards, when the publisher is gone."""
    a, b = group.members("a", "b")
    b.subscribe("t")
    a.run(_publish_and_close, 150)
    got = b.run(programs.receive, 150)
    assert [m.sequence for m in got] == list(range(150))
    assert {m.name for m in b.call("members")} == {"b"}


@case("Close")
def every_call_after_close_raises_closed(group: Group) -> None:
    """Whatever it is; `close` itself stays silent."""
    a = group.member("a")
    a.call("close")
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("publish", ("t", 1)),
        ("subscribe", ("t",)),
        ("unsubscribe", ("t",)),
        ("recv", ()),
        ("flush", ()),
        ("members", ()),
        ("subscribers", ("t",)),
    ]
    for method, arguments in calls:
        with expect(mq.Closed):
            a.call(method, *arguments)
    a.call("close")


def _undelivered(queue: mq.MQ) -> str:
    programs.listen(queue)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        queue.close(linger=0.3)
    said = programs.heard(queue)
    return " ".join(said + [str(warning.message) for warning in caught])


def _close_with_everything_delivered(group: Group) -> None:
    """Where no member can be stopped alone: all is delivered and nobody warned."""
    a, b = group.members("a", "b")
    b.subscribe("t")
    a.run(programs.publish_range, "t", 0, 5)
    assert a.run(_undelivered) == ""
    b.run(programs.receive, 5)


@case("Close", needs="separate_processes", otherwise=_close_with_everything_delivered)
def close_counts_what_could_not_be_delivered(group: Group) -> None:
    """A stopped subscriber: `close` ends after `linger` with a warning."""
    a, b = group.members("a", "b")
    b.subscribe("t")
    b.stop()
    for number in range(7):
        a.publish("t", [number, programs.pattern(number, 100_000)])
    said = a.run(_undelivered)
    assert "'b' lacks 7 on 't'" in said, said
    counters = a.run(programs.topic_stats, "t")
    assert counters["undelivered"] == 7
    assert counters["queued"] == {}


def _closing_warns_nobody(group: Group) -> None:
    """Where members are threads, they end only by `close`."""
    a, b = group.members("a", "b")
    b.subscribe("t")
    a.run(programs.listen)
    a.run(programs.publish_range, "t", 0, 7)
    b.call("close", linger=0)
    a.call("flush", timeout=STEP)
    assert a.run(programs.heard) == []


@case("Death", needs="separate_processes", otherwise=_closing_warns_nobody)
def what_a_killed_subscriber_lacked_is_logged_and_counted(group: Group) -> None:
    """Though nobody calls `close`; one that closes is warned of by none."""
    a, b, c = group.members("a", "b", "c", peer_timeout=60)
    for member in (b, c):
        member.subscribe("t")
    b.stop()
    a.run(programs.listen)
    for number in range(7):
        a.publish("t", [number, programs.pattern(number, 100_000)])
    c.call("close", linger=0)
    b.kill()
    a.call("flush", timeout=STEP)
    (said,) = a.run(programs.heard)
    assert said == "b is gone: its process ended; messages undelivered: 7 on 't'"
    assert a.run(programs.topic_stats, "t")["undelivered"] >= 7


@case("edge: After close")
def unread_messages_are_dropped_at_close(group: Group) -> None:
    """`recv` raises `Closed` at once although messages wait; they are counted."""
    a, b = group.members("a", "b")
    b.subscribe("t")
    a.run(programs.publish_range, "t", 0, 30)
    a.call("flush", timeout=STEP)
    b.run(programs.receive, 10)
    b.call("close")
    with expect(mq.Closed):
        b.recv(timeout=0)
    assert b.run(programs.topic_stats, "t")["discarded"] == 20


@case("edge: After close")
def messages_of_a_member_that_left_stay_readable(group: Group) -> None:
    """Also when another member of that name has come meanwhile."""
    a, b = group.members("a", "b")
    b.subscribe("t")
    a.run(programs.publish_range, "t", 0, 20)
    a.call("close")
    a.close()
    again = group.unconnected("a")
    group.connecting(again).result()
    again.run(programs.publish_range, "t", 100, 120)
    got = b.run(programs.receive, 40)
    assert [m.digest for m in got] == [*range(20), *range(100, 120)]


_EXIT = """
import faulthandler, json, sys, threading
import mq
backend, options, ending, patience = json.loads(sys.argv[1])
faulthandler.dump_traceback_later(patience, exit=True)  # where it hangs, if it does
reader = mq.connect(backend, name="exit-reader", **options)
reader.subscribe("t")
queue = mq.connect(backend, name="exit", **options)
queue.publish("t", "inside", timeout=10)
if queue.subscribers("outside"):
    queue.publish("outside", "last words", timeout=10)
print("published", flush=True)
if ending == "raise":
    raise SystemExit(7)
"""


@case("Close")
def normal_exit_without_close_delivers_and_leaves_nothing(group: Group) -> None:
    """An interpreter that just ends: what it published arrives, nothing remains."""
    options = group.options()
    listener = None
    if group.capabilities.separate_processes:
        listener = group.member("listener")
        listener.subscribe("outside")
    environment = {
        **os.environ,
        "XDG_RUNTIME_DIR": group.directory,
        "TMPDIR": group.directory,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    for ending, status in (("fall off", 0), ("raise", 7)):
        arguments = json.dumps([group.backend, options, ending, 3 * STEP])
        ended = subprocess.run(
            [sys.executable, "-c", _EXIT, arguments],
            env=environment,
            capture_output=True,
            timeout=4 * STEP,
            check=False,
        )
        said = ended.stderr.decode()
        assert (ended.returncode, ended.stdout) == (status, b"published\n"), said
        assert not said, said
        if listener is not None:
            assert listener.recv().payload == "last words"
            assert {m.name for m in listener.call("members")} == {"listener"}


def _child_connects(backend: str, options: dict[str, Any]) -> None:
    queue = mq.connect(backend, name="child", **options)
    queue.subscribe("to child")
    if queue.subscribers("t"):
        queue.publish("t", "from child", timeout=STEP)


@case("Close")
def multiprocessing_child_without_close_delivers_and_leaves(group: Group) -> None:
    """`atexit` does not run there; the members see it leave all the same."""
    listener = None
    if group.capabilities.separate_processes:
        listener = group.member("listener")
        listener.subscribe("t")
    options = group.options()
    assert group.run_process(_child_connects, group.backend, options) == 0
    if listener is not None:
        assert listener.recv().payload == "from child"
        assert {m.name for m in listener.call("members")} == {"listener"}


def in_forked_child(function: Callable[[], Any]) -> Any:
    """What `function` returns in a forked child, which then ends without clean-up."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads and fork
        pid = os.fork()
    if pid == 0:
        status = 1
        faulthandler.dump_traceback_later(STEP / 2, file=2)  # where it hangs, if so
        try:
            os.close(reader)
            with os.fdopen(writer, "w") as file:
                try:
                    json.dump(function(), file)
                    status = 0
                except Exception as error:  # for the parent's assertion
                    file.write(f"{type(error).__name__}: {error}")
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as file:
        said = file.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the forked child ended with wait status {status}: {said}"
    return json.loads(said)


def _raised(use: Callable[[], Any]) -> str:
    try:
        use()
    except Exception as error:
        return type(error).__name__
    return ""


def _use_in_child(queue: mq.MQ) -> dict[str, str]:
    def child() -> dict[str, str]:
        calls: dict[str, Callable[[], Any]] = {
            "publish": lambda: queue.publish("t", 1, timeout=0),
            "recv": lambda: queue.recv(timeout=0),
            "subscribe": lambda: queue.subscribe("other"),
            "flush": lambda: queue.flush(timeout=0),
            "members": queue.members,
            "close": queue.close,
            "exit": lambda: queue.__exit__(None, None, None),
        }
        return {name: _raised(use) for name, use in calls.items()}

    said: dict[str, str] = in_forked_child(child)
    return said


@case("Fork")
def use_in_a_forked_child_raises_forked_process(group: Group) -> None:
    """In place of the engine's crash; `close` and the like do nothing there."""
    a, b = group.process("a"), group.process("b")
    group.connecting(a).result()
    if group.capabilities.separate_processes:
        group.connecting(b).result()
        b.subscribe("t")
        a.subscribe("u")
    said = a.run(_use_in_child)
    silent = {"close": "", "exit": ""}
    others = dict.fromkeys(
        ("publish", "recv", "subscribe", "flush", "members"), "ForkedProcess"
    )
    assert said == {**others, **silent}
    if group.capabilities.separate_processes:  # and the parent is not harmed
        a.publish("t", 1)
        b.publish("u", 2)
        assert (b.recv().payload, a.recv().payload) == (1, 2)


def _connect_in_child(
    worker: object, backend: str, options: dict[str, Any]
) -> list[Any]:
    def child() -> list[Any]:
        mine = {**options, "group": options["group"] + "-child"}
        with (
            mq.connect(backend, name="x", **mine) as x,
            mq.connect(backend, name="y", **mine) as y,
        ):
            y.subscribe("t")
            x.publish("t", "in the child", timeout=STEP)
            return [y.recv(timeout=STEP).payload]

    with mq.connect(backend, name="parent", **options) as parent:
        said: list[Any] = in_forked_child(child)
        with mq.connect(backend, name="second", **options) as second:
            second.subscribe("t")
            parent.publish("t", "in the parent", timeout=STEP)
            said.append(second.recv(timeout=STEP).payload)
    return said


def _try_in_child(worker: object, backend: str, options: dict[str, Any]) -> list[Any]:
    parent = mq.connect(backend, name="parent", **options)
    said = [in_forked_child(lambda: _raised(lambda: mq.connect(backend, **options)))]
    with mq.connect(backend, name="second", **options) as second, parent:
        second.subscribe("t")
        parent.publish("t", "in the parent", timeout=STEP)
        said.append(second.recv(timeout=STEP).payload)
    return said


def _connect_in_child_is_refused(group: Group) -> None:
    """Where the engine does not survive it: an error, and the parent's go on."""
    host = group.process("host")
    said = host.ask(_try_in_child, group.backend, group.options()).result()
    assert said == ["ForkedProcess", "in the parent"]


@case("edge: Fork", needs="survives_fork", otherwise=_connect_in_child_is_refused)
def connect_works_in_a_forked_child(group: Group) -> None:
    """With new members in the child, while the parent's go on."""
    host = group.process("host")
    said = host.ask(_connect_in_child, group.backend, group.options()).result()
    assert said == ["in the child", "in the parent"]


def _fork_and_wait(queue: mq.MQ) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        parent = os.getppid()
        try:
            wait_until(lambda: os.getppid() != parent, "the parent to end")
        finally:
            os._exit(0)
    return pid


@case("edge: Fork")
def death_of_a_parent_is_seen_although_its_child_lives(group: Group) -> None:
    """The child has closed what it inherited; nothing keeps the connection open."""
    a = group.process("a")
    group.connecting(a, peer_timeout=60).result()
    if not group.capabilities.separate_processes:
        a.run(_fork_and_wait)
        return a.kill()
    b = group.member("b", peer_timeout=60)
    b.call("wait_for_members", 2, timeout=STEP)
    a.run(_fork_and_wait)
    a.kill()
    wait_until(lambda: len(b.call("members")) == 1, "b to see the death of a")
    return None
