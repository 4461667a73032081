"""What a link that does not keep its contract costs, and what its author is told."""

from __future__ import annotations

import logging
import re
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from scripted import Parcel, ScriptedConn, ScriptedLink
from world import subscribed

import mq
from mq import log, registry
from mq.errors import MessagesLost
from mq.mesh import wire
from mq.mesh.large import Chunk
from mq.mesh.setbacks import TRIES
from mq.testing.waiting import STEP, wait_until
from mq.transport import What
from transports.inproc import InprocLink

pytestmark = pytest.mark.usefixtures("small_messages")
LARGE = bytes(range(200)) * 5


@pytest.fixture
def said(
    link_faults: list[logging.LogRecord], caplog: pytest.LogCaptureFixture
) -> Iterator[Callable[[], list[str]]]:
    """Of which faults the log has told, each with its traceback."""

    def told() -> list[str]:
        log.flush()
        assert all(r.levelno == logging.ERROR and r.exc_info for r in link_faults)
        return [r.getMessage() for r in link_faults]

    yield told
    for records in (link_faults, caplog.get_records("call")):
        records.clear()  # tracebacks keep what calls were made with


def fail(
    patch: pytest.MonkeyPatch,
    call: str,
    times: float = 1e9,
    when: Callable[..., bool] = lambda *arguments: True,
) -> list[object]:
    """Have a call of scripted connections raise, so often; what it was called with."""
    usual = getattr(ScriptedConn, call)
    failed: list[object] = []

    def faulty(conn: ScriptedConn, *arguments: Any) -> Any:
        if len(failed) < times and when(conn, *arguments):
            failed.append(arguments)
            raise ZeroDivisionError("by a fault of the link")
        return usual(conn, *arguments)

    faulty.__qualname__ = f"ScriptedConn.{call}"
    patch.setattr(ScriptedConn, call, faulty)
    return failed


@pytest.mark.parametrize("call", ["receive", "receive_body", "take_body"])
def test_a_call_to_receive_that_raises_costs_a_connection(
    call: str, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    """That one only, whose session is resumed; the log has the traceback once."""
    world = subscribed(
        "a", "b", "c", by="b", wholes="abc" if call == "take_body" else ""
    )
    b = world["b"]
    failed = fail(monkeypatch, call, TRIES - 1, lambda conn, *_: conn.link is b.link)
    assert world["a"].publish("t", LARGE)
    world.advance(2.0)

    assert len(failed) == TRIES - 1
    assert b.payloads() == [LARGE]
    assert b.session(world["c"]).stats.connections == 1
    assert b.mesh.stats.forgotten == 0
    (text,) = said()
    assert f"ScriptedConn.{call} failed: ZeroDivisionError: by a fault" in text


def test_a_fault_of_each_queue_is_told_of(
    monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    """Whatever those of other queues in the process have had before."""
    for _ in range(2):
        world = subscribed("a", "b")
        fail(monkeypatch, "receive_body", 1)
        assert world["a"].publish("t", LARGE)
        world.advance(2.0)
        assert world["b"].payloads() == [LARGE]
    assert len(said()) == 2


def answers_wrongly(
    patch: pytest.MonkeyPatch,
    call: str,
    answer: Any,
    when: Callable[..., bool] = lambda *arguments: True,
) -> list[object]:
    """Have a call of scripted connections do its part, and once answer otherwise."""
    usual = getattr(ScriptedConn, call)
    failed: list[object] = []

    def faulty(conn: ScriptedConn, *arguments: Any) -> Any:
        found = usual(conn, *arguments)
        if found is not None and not failed and when(conn, *arguments):
            failed.append(arguments)
            return answer
        return found

    faulty.__qualname__ = f"ScriptedConn.{call}"
    patch.setattr(ScriptedConn, call, faulty)
    return failed


@pytest.mark.parametrize("what", ["body", "sign of life", "loan"])
def test_a_call_to_send_that_answers_nothing_costs_a_connection(
    what: str, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    """Taken for "not now" it would be waited for until the peer is given up."""
    world = subscribed(
        "a", "b", lends={"a": 1 << 20, "b": 1 << 20} if what == "loan" else None
    )
    a, b = world["a"], world["b"]
    call = "lend" if what == "loan" else "try_send"

    def is_meant(conn: ScriptedConn, head: Any, body: object = None) -> bool:
        signs = what == "sign of life"
        return bool(body) or what == "loan" or (signs and head[0] == wire.RECEIVED)

    failed = answers_wrongly(monkeypatch, call, None, is_meant)
    assert a.publish("t", LARGE)
    world.advance(4.0)

    assert len(failed) == 1
    assert b.payloads() == [LARGE]
    assert a.session(b).stats.connections == 2
    world.close()
    (text,) = said()
    assert text.startswith(f"ScriptedConn.{call} failed: TypeError: it returned None")


@pytest.mark.parametrize(
    "answer",
    [
        0,
        b"",
        b"xy",
        (b"x",),
        (b"x", 0, 0),
        (b"x", None),
        ("x", 0),
        (0, b"x"),
        (b"x", -1),
    ],
    ids=repr,
)
@pytest.mark.parametrize("when", ["handshake", "session"])
def test_what_is_no_message_costs_a_connection(
    answer: Any,
    when: str,
    monkeypatch: pytest.MonkeyPatch,
    said: Callable[[], list[str]],
) -> None:
    """Or refuses a dial; it is none of the peer's doing."""
    world = subscribed("a", "b")
    member = world["b"] if when == "session" else world.add("x")
    failed = answers_wrongly(
        monkeypatch, "receive", answer, lambda conn: conn.link is member.link
    )
    if when == "session":
        assert world["a"].publish("t", LARGE)
        world.advance(2.0)
        assert world["b"].payloads() == [LARGE]
        assert world["a"].session(world["b"]).stats.connections == 2
    else:
        dial = member.dial(world["a"])
        world.settle()
        assert "ScriptedConn.receive failed" in dial.error
    assert len(failed) == 1
    assert not world["b"].mesh.stats.malformed
    (text,) = said()
    assert re.match(r"ScriptedConn\.receive failed: (Type|Value)Error: ", text)


@pytest.mark.parametrize("call", ["close", "let_go"])
def test_a_call_as_a_connection_ends_that_raises_costs_no_other(
    call: str, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    """It is broken anyway, and its session resumed."""
    world = subscribed("a", "b", "c", by="b")
    link = world["a"].link
    failed = fail(monkeypatch, call, when=lambda conn: conn.link is link)
    for _ in range(2):
        world.cut("a", "b")
        world.advance(2.0)
    assert world["a"].publish("t", LARGE)
    world.settle()

    assert len(failed) > 1
    assert world["b"].payloads() == [LARGE]
    assert world["a"].session(world["b"]).stats.connections == 3
    assert world["a"].session(world["c"]).stats.connections == 1
    (text,) = said()
    assert text.startswith(f"ScriptedConn.{call} failed: ZeroDivisionError")


@pytest.mark.parametrize("answer", ["raises", None, b"x" * 1000, memoryview(b"x")])
def test_memory_that_cannot_be_borrowed_costs_a_connection(
    answer: Any, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    """Unlike memory that the peer never lent it is none of its doing."""
    world = subscribed("a", "b", lends={"a": 1 << 20, "b": 1 << 20})
    if answer == "raises":
        failed = fail(monkeypatch, "borrow", 1)
    else:
        failed = answers_wrongly(monkeypatch, "borrow", answer)
    assert world["a"].publish("t", LARGE)
    world.advance(2.0)

    assert len(failed) == 1
    assert world["b"].payloads() == [LARGE]
    assert not world["b"].mesh.stats.malformed
    world.close()
    (text,) = said()
    assert text.startswith("ScriptedConn.borrow failed: ")


def test_a_farewell_that_raises_is_no_fault_of_who_comes_instead(
    monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    """The earlier life of a name is told that it is over, if it can be."""
    world = subscribed("a", "b")
    world.members["old"] = world.members.pop("b")
    fail(
        monkeypatch,
        "try_send",
        when=lambda conn, head, body=None: head[0] == wire.FENCED,
    )
    new = world.join("b")
    world.settle()

    assert list(world["a"].mesh.sessions) == [new.incarnation]
    assert world["a"].session(new).stats.connections == 1
    assert len(said()) == 1


def none(conn: ScriptedConn, into: memoryview) -> None:
    """A `receive_body` that forgets to say that it is done."""
    into[:] = conn._body  # type: ignore[assignment, call-overload]


@pytest.mark.parametrize("fault", ["raises", "answers None"])
def test_a_message_that_is_never_taken_ends_the_session(
    fault: str, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    """After a few tries, and not for ever; the next session tells what is lost."""
    world = subscribed("a", "b")
    with monkeypatch.context() as patch:
        if fault == "raises":
            fail(patch, "receive_body")
        else:
            patch.setattr(ScriptedConn, "receive_body", none)
        assert world["a"].publish("t", LARGE)
        world.advance(5.0)
    assert world["b"].mesh.stats.forgotten == 1
    assert world["a"].publish("t", LARGE)
    world.settle()

    lost, got = world["b"].recv_all()
    assert isinstance(lost, MessagesLost)
    assert lost.count == 1
    assert not isinstance(got, MessagesLost)
    assert got.payload == LARGE
    (text,) = said()
    assert ("None, which is neither True nor False" in text) == (fault != "raises")


@pytest.mark.parametrize("times", [TRIES - 1, TRIES])
def test_a_try_send_that_raises_costs_its_connection_in_the_end_its_session(
    times: int, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    """The call that publishes has done its part, and others get the message."""
    world = subscribed("a", "b", "c", by="b")
    a, b, c = (world[name] for name in "abc")
    c.subscribe("t")
    world.settle()
    peer = a.session(b)

    def to_b(conn: ScriptedConn, head: bytes, body: object = None) -> bool:
        return bool(body) and a.mesh.conns.get(conn) is peer

    failed = fail(monkeypatch, "try_send", times, to_b)
    assert a.publish("t", LARGE)
    assert isinstance(peer.conn, ScriptedConn)
    a.link.report(What.WRITABLE, peer.conn)
    world.pump()
    assert len(failed) == 1
    assert peer.conn is None, "nothing more is sent there"
    world.advance(5.0)

    assert len(failed) == times
    assert c.payloads() == [LARGE]
    assert a.session(c).stats.connections == 1
    assert a.mesh.stats.forgotten == (times == TRIES)
    assert peer.alive == (times < TRIES)
    if peer.alive:
        assert b.payloads() == [LARGE]
    assert len(said()) == 1


def test_of_two_calls_the_one_that_raises_is_told_of(
    monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    """What is lent is mapped first, and then told of."""
    room = {"a": 1 << 20, "b": 1 << 20}
    world = subscribed("a", "b", lends=room)
    failed = fail(monkeypatch, "lend", 1)
    assert world["a"].publish("t", LARGE)
    world.advance(2.0)

    assert len(failed) == 1
    assert world["b"].payloads() == [LARGE]
    world.close()
    (text,) = said()
    assert text.startswith("ScriptedConn.lend failed: ZeroDivisionError")


def test_a_mistake_of_ours_is_not_blamed_on_the_link(
    monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    """It goes to who calls, and no session is given up for it."""
    world = subscribed("a", "b")
    monkeypatch.setattr(ScriptedConn, "keeps_body", True)
    with monkeypatch.context() as patch:
        patch.setattr(Chunk, "own", lambda chunk, take: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            world["a"].publish("t", LARGE)
        assert world["a"].session(world["b"]).fault is None
    world["a"].mesh.recover()
    world.advance(2.0)

    assert world["b"].payloads() == [LARGE]
    assert not said()


def test_each_direction_has_its_own_tries(
    monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    """Where both go wrong in turn, either ends the session all the same."""
    world = subscribed("a", "b")
    a, b = world["a"], world["b"]
    peer = a.session(b)
    fail(monkeypatch, "try_send", when=lambda conn, head, body=None: bool(body))
    begun: set[ScriptedConn] = set()

    def spoil_every_other(conn: ScriptedConn, parcel: Parcel) -> Parcel:
        if conn.link is b.link and parcel[0][0] == wire.RECEIVED and conn not in begun:
            begun.add(conn)
            if len(begun) % 2:
                return bytes([wire.FENCED + 100]) + parcel[0][1:], parcel[1]
        return parcel

    world.net.tamper = spoil_every_other
    assert a.publish("t", LARGE)
    world.advance(10.0)

    assert not peer.alive
    assert peer.stats.malformed == TRIES - 1
    assert len(said()) == 1


def test_a_sign_of_life_that_raises_costs_a_connection(
    monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    """It is sent when nothing else is."""
    world = subscribed("a", "b")
    failed = fail(
        monkeypatch, "try_send", 1, lambda conn, head: head[0] == wire.RECEIVED
    )
    world.advance(10.0)

    assert len(failed) == 1
    assert world["a"].session(world["b"]).stats.connections == 2
    assert len(said()) == 1


@pytest.mark.parametrize("call", ["try_send", "receive"])
def test_a_handshake_that_raises_refuses_the_dial(
    call: str, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    """At once, and with what was raised; the others' sessions go on."""
    world = subscribed("a", "b")
    x = world.add("x")
    fail(monkeypatch, call, when=lambda conn, *_: conn.link is x.link)
    dial = x.dial(world["a"])
    world.settle()

    assert dial.done
    assert dial.refusal
    assert f"ScriptedConn.{call} failed: ZeroDivisionError" in dial.error
    assert world["a"].session(world["b"]).stats.connections == 1
    assert len(said()) == 1


@pytest.mark.parametrize("refuser", ["a", "x"])
def test_a_refusal_that_raises_costs_its_connection_alone(
    refuser: str, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    """Of who dials, or of who listens and hears from it that their secrets differ."""
    world = subscribed("a", "b")
    world.add("x", secret=b"another")
    link = world[refuser].link
    fail(
        monkeypatch,
        "try_send",
        when=lambda conn, head: conn.link is link and head[0] == wire.REFUSED,
    )
    dial = world["x"].dial_blindly(world["a"].link.address)
    world.settle()

    assert dial.refusal
    assert not world["x"].link.conns
    assert len(world["a"].link.conns) == 1
    assert world["a"].session(world["b"]).stats.connections == 1
    assert len(said()) == 1


@pytest.mark.parametrize("fault", ["raises", "returns None"])
def test_a_dial_that_fails_in_another_way_than_it_may_is_told_at_once(
    fault: str, monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    """One that resumes a session is repeated as ever."""
    world = subscribed("a", "b")
    x = world.add("x")

    def dial(link: ScriptedLink, address: str) -> Any:
        if fault == "raises":
            raise ZeroDivisionError("by a fault of the link")

    with monkeypatch.context() as patch:
        patch.setattr(ScriptedLink, "dial", dial)
        first = x.dial(world["a"])
        world.cut("a", "b")
        world.advance(2.0)
        assert first.done
        assert first.refusal
        word = "ZeroDivisionError" if fault == "raises" else "None, which is no Conn"
        assert word in first.error
    world.advance(1.0)

    assert world["a"].session(world["b"]).stats.connections == 2
    texts = said()
    assert len(texts) == 2, "each of two has dialled"
    assert all(word in text for text in texts)


def test_what_may_be_of_a_signals_handler_goes_to_who_calls(
    monkeypatch: pytest.MonkeyPatch, said: Callable[[], list[str]]
) -> None:
    """A time-out of the application's, say. In other threads there are no handlers."""
    world = subscribed("a", "b")
    fail(monkeypatch, "receive_body")
    assert world["a"].publish("t", LARGE)
    before = signal.signal(signal.SIGALRM, lambda number, frame: None)
    try:
        with pytest.raises(ZeroDivisionError):
            world.settle()
        world["b"].mesh.recover()
        thread = threading.Thread(target=world.advance, args=(5.0,))
        assert not said()
        thread.start()
        thread.join()
    finally:
        signal.signal(signal.SIGALRM, before)

    assert world["b"].mesh.stats.forgotten == 1
    assert len(said()) == 1


@pytest.mark.parametrize("answer", [None, "inproc://here", [1]])
def test_a_link_that_opens_without_a_list_of_addresses_is_told(
    answer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By an error that has what it returned in place of one."""

    class Faulty(InprocLink):
        def open(self, *arguments: Any) -> Any:
            super().open(*arguments)
            return answer

    monkeypatch.setitem(registry._TABLE, "faulty", registry.Entry(Faulty))
    with pytest.raises(TypeError, match=r"Faulty\.open returned .*no list of address"):
        mq.connect("faulty", group="faults")


class Failing(InprocLink):
    """Does its part until a test says otherwise.

    Attributes:
        poll_fails: How `poll` does.
        close_fails: Whether `close` does.
        polls: How often it was polled since.
    """

    def __init__(self) -> None:
        super().__init__()
        self.poll_fails = ""
        self.close_fails = False
        self.polls = 0

    def poll(self) -> Any:
        is_main = threading.current_thread() is threading.main_thread()
        if not self.poll_fails or (self.poll_fails == "raises here" and not is_main):
            return super().poll()
        self.polls += 1
        if self.poll_fails == "returns None":
            return None
        return self._report()

    def _report(self) -> Iterator[Any]:
        yield from super().poll()
        if self.poll_fails == "yields None":
            yield None
        raise ZeroDivisionError("by a fault of the link")

    def close(self, linger: float = 0.0) -> None:
        super().close(linger)
        if self.close_fails:
            raise ZeroDivisionError("by a fault of the link")


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[mq.MQ, mq.MQ, Failing]]:
    """Two queues, and the link of the first one."""
    monkeypatch.setitem(registry._TABLE, "failing", registry.Entry(Failing))
    with (
        mq.connect("failing", group="faults", name="a") as a,
        mq.connect("failing", group="faults", name="b") as b,
    ):
        b.subscribe("t")
        a.wait_for_subscribers("t", 1, timeout=STEP)
        link = a._joined.link
        assert isinstance(link, Failing)
        yield a, b, link


@pytest.mark.parametrize("by", ["a call", "the keeper"])
@pytest.mark.parametrize("fault", ["raises", "yields None", "returns None"])
def test_a_poll_that_fails_ends_its_queue_with_its_name(
    fault: str,
    by: str,
    failing: tuple[mq.MQ, mq.MQ, Failing],
    said: Callable[[], list[str]],
) -> None:
    """Nothing more can arrive. It is not polled again, by the keeper either."""
    a, b, link = failing
    link.poll_fails = fault
    if by == "a call":
        with pytest.raises((ZeroDivisionError, TypeError, mq.Closed)):
            a.recv(timeout=STEP)
    wait_until(lambda: bool(a._mesh.replaced), "the keeper has polled")
    polls = link.polls
    for call in (lambda: a.recv(timeout=STEP), lambda: a.publish("t", 1)):
        with pytest.raises(mq.Closed, match=r"Failing\.poll failed: \w+Error: "):
            call()
    assert a._lead._keeper.is_alive()
    assert a._lead._turn() > 0.0
    a.close()

    assert link.polls == polls
    b.publish("t", "goes on")
    (text,) = said()
    assert re.match(r"Failing\.poll failed.* can only be closed", text)


def test_what_is_thrown_into_a_call_that_polls_ends_that_call_alone(
    failing: tuple[mq.MQ, mq.MQ, Failing], said: Callable[[], list[str]]
) -> None:
    """As by `PyThreadState_SetAsyncExc`: it is the application's, not the link's."""
    a, b, link = failing
    a.subscribe("u")
    b.wait_for_subscribers("u", 1, timeout=STEP)
    link.poll_fails = "raises here"
    with pytest.raises(ZeroDivisionError):
        a.recv(timeout=STEP)
    link.poll_fails = ""
    b.publish("u", 1)
    assert a.recv(timeout=STEP).payload == 1
    assert not said()


def test_a_link_whose_close_raises_leaves_nothing_else_open(
    failing: tuple[mq.MQ, mq.MQ, Failing], said: Callable[[], list[str]]
) -> None:
    """And whoever closes the queue has closed it."""
    a, _, link = failing
    link.close_fails = True
    a.close()

    assert not a._lead._keeper.is_alive()
    (text,) = said()
    assert text.startswith("Failing.close failed: ZeroDivisionError")
