"""The log, the batches and the inbox where something ends at the wrong moment."""

from __future__ import annotations

import contextlib
import dis
import functools
import itertools
import os
import signal
import threading
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
from interrupter import Interrupter
from scripted import Parcel, ScriptedConn
from test_mesh_flow import LARGE, publish_once
from world import Got, Member, World, subscribed

from mq import borrowing, signals, speed
from mq.errors import CodecError
from mq.frames import Frames
from mq.mesh import wire
from mq.mesh.dial import Dial
from mq.mesh.outgoing import Topic
from mq.mesh.ready import pop_ready
from mq.mesh.taking import Taking
from mq.receiving import Receiving

pytestmark = pytest.mark.usefixtures("small_messages")


def test_a_large_retained_message_stays_whole() -> None:
    """Its chunks are not freed when those who are subscribed have them."""
    world = subscribed("a", "b")
    publisher = world["a"].mesh.publisher
    topic = publisher.topic("t")
    frames = Frames(LARGE[:64], (memoryview(LARGE[64:]),), len(LARGE), frozenset())
    message = publisher.publish(topic, frames, world.now, True, world.now)
    world.settle()
    publisher.free_received(topic, message, [world["a"].session(world["b"])])
    world.join("late").subscribe("t")
    world.settle()
    assert world["late"].payloads() == [LARGE]


def test_a_large_message_is_let_go_when_it_was_framed() -> None:
    """Nothing of the topic holds its memory until the next publish."""
    world = subscribed("a", "b")
    assert world["a"].publish("t", LARGE)
    topic = world["a"].mesh.publisher.topic("t")
    topic.total()
    world.settle()
    assert world["b"].payloads() == [LARGE]
    assert topic._summed[0] is topic.view[2]
    assert topic.view[2] == []
    assert topic.total() == len(LARGE)


def test_the_log_of_a_stopped_keep_last_subscriber_is_bounded() -> None:
    """However many messages it keeps, and however many come."""
    world = subscribed("a", "b", keep=100)
    world.stall("b")
    for number in range(2000):
        assert world["a"].publish("t", b"%d" % number)
        if number % 50 == 0:
            world.advance(0.002)
    assert len(world["a"].mesh.publisher.topic("t").view[2]) <= 200


def test_a_batch_whose_subscription_ends_leaves_no_deadline() -> None:
    """Else whoever leads would never sleep again."""
    world = World("a", "b")
    a, b = world["a"], world["b"]
    for topic in "tu":
        b.subscribe(topic)
    a.subscribe("r")
    world.settle()
    assert b.publish("r", b"first")
    assert a.publish("u", b"first")
    world.settle()
    for member in (a, b):
        member.payloads()
    world.settle()
    assert a.publish("t", b"alone")
    assert a.publish("t", b"held")
    world.net.deliver_all()
    b.mesh.poll()
    b.unsubscribe("t")
    assert b.publish("r", b"ping")
    world.net.deliver_all()
    a.mesh.poll(until_message=True)
    assert isinstance(a.recv(), Got)
    assert a.publish("u", b"pong")
    a.mesh.poll(until_message=True)
    world.settle()
    assert a.session(b).batch_at is None


def test_the_keeper_does_not_wait_for_who_cannot_be_sent_to() -> None:
    """A batch for a broken connection has no deadline until there is another."""
    world = subscribed("a", "b", "c")
    a = world["a"]
    publish_once(world)
    world.partition("a", "b")
    for _ in range(2):
        assert a.publish("t", b"x")
    world.cut("a", "b")
    a.mesh.disconnect(a.session(world["b"]), "broken")
    world.advance(0.1)
    a.mesh.poll()
    assert a.mesh.batch_deadline() > world.now


def test_what_was_taken_before_unsubscribing_is_counted() -> None:
    """Received and discarded together are all that came."""
    world = subscribed("a", "b")
    publish_once(world)
    a, b = world["a"], world["b"]
    inbox = b.mesh.subscriber.inbox
    inbox.prepare = lambda run, start, stop: [bytes(x) for x in run.areas[start:stop]]
    for number in range(21):
        assert a.publish("t", b"%d" % number)
    world.settle()
    stats = b.mesh.publisher.topic("t").stats
    before = stats.received
    for _ in range(6):
        if len(inbox.ready) > 1:
            inbox.ready.popleft()
        else:
            b.mesh.subscriber.take()
    b.unsubscribe("t")
    assert stats.received - before == 6
    assert stats.discarded == 15


def interrupt_polls(member: Member, interrupter: Interrupter) -> None:
    """Have a member's polls interrupted from now on; it recovers each time."""
    poll = member.poll

    def interrupted() -> None:
        try:
            with interrupter.armed():
                poll()
        except KeyboardInterrupt:
            member.mesh.recover()

    member.poll = interrupted  # type: ignore[method-assign]


def test_an_interrupt_of_an_attempt_does_not_end_the_dial() -> None:
    """Wherever it comes: what was begun by then is begun again."""

    def dial(interrupter: Interrupter) -> Dial:
        world = World("a")
        b = world.add("b")
        world.net.on_dial = lambda source, target: "error"
        dial = b.dial_blindly(world["a"].link.address)
        world.net.on_dial = lambda source, target: "open"
        interrupt_polls(b, interrupter)
        world.advance(4.0)
        assert len(b.mesh.sessions) == 1, interrupter.where
        world.close()
        return dial

    survey = Interrupter(None)
    assert dial(survey).done
    points = {
        points[0]
        for (code, _, _), points in survey.visited.items()
        if code.co_filename.endswith(("/dial.py", "/dialling.py", "/greeting.py"))
    }
    assert len(points) > 50
    for point in sorted(points):
        interrupter = Interrupter(point)
        dial(interrupter)
        assert interrupter.where


def begun_again(interrupter: Interrupter) -> tuple[list[bytes], int, int]:
    """What a keep-last reader gets of a publisher that was killed and started again.

    And how many it counts as received, and as dropped.
    """
    world = World("b")
    b = world["b"]
    b.subscribe("t", keep=1)
    poll = b.poll
    for life in (b"12", b"3"):
        world.join("a")
        world.settle()
        for n in range(len(life)):
            assert world["a"].publish("t", life[n : n + 1])
        world.settle()
        world.advance(1.0)
        if life == b"12":
            interrupt_polls(b, interrupter)
            world.kill("a")
    b.poll = poll  # type: ignore[method-assign]
    world.settle()
    got = [bytes(item.payload) for item in b.recv_all() if isinstance(item, Got)]
    stats = b.mesh.subscriber.topics["t"].stats
    world.close()
    return got, stats.received, stats.dropped


def test_an_interrupt_as_a_publisher_is_outlived_leaves_no_stale_message() -> None:
    """Whatever of its earlier life was kept, and it is counted once."""
    survey = Interrupter(None)
    expected = begun_again(survey)
    assert expected == ([b"3"], 1, 2)
    points = {
        point
        for (code, _, _), points in survey.visited.items()
        if code.co_name in ("outlive", "drop_source", "arrived", "remove")
        for point in points
    }
    assert len(points) > 15
    for point in sorted(points):
        interrupter = Interrupter(point)
        assert begun_again(interrupter) == expected, interrupter.where


def test_an_interrupt_while_a_subscription_ends_harms_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is looked for in the log on behalf of one that has half ended."""
    world = subscribed("a", "b", "c")
    publish_once(world)
    a, b, c = (world[name] for name in "abc")
    (feed,) = a.session(b).feeds.values()
    for number in range(4):
        assert a.publish("t", b"held %d" % number)
    b.unsubscribe("t")
    (back,) = world.net.between(b.link, a.link)
    while back.flight:
        world.net.deliver(back)
    topic = a.mesh.publisher.topic("t")
    refresh = Topic.refresh

    def interrupted(self: Topic) -> None:
        if self is topic and feed not in self.feeds:
            monkeypatch.setattr(Topic, "refresh", refresh)
            raise KeyboardInterrupt
        refresh(self)

    monkeypatch.setattr(Topic, "refresh", interrupted)
    with pytest.raises(KeyboardInterrupt):
        a.mesh.poll()
    a.mesh.recover()
    world.net.on_dial = lambda source, target: "fail" if "/b-" in source else "open"
    world.advance(0.5)
    assert len(c.payloads()) == 4
    world.net.on_dial = lambda source, target: "open"
    world.advance(1.0)
    assert a.publish("t", b"on")
    world.settle()
    assert c.payloads() == [b"on"]


def test_keep_last_has_one_message_on_the_wire_after_a_break_too() -> None:
    """A large one that had begun when the connection broke still counts."""
    world = subscribed("a", "b", keep=1)
    a, b = world["a"], world["b"]
    a.link.capacity = 2
    assert a.publish("t", LARGE)
    for _ in range(2):
        for conn in world.net.steps():
            world.net.deliver(conn)
        b.poll()
        a.poll()
    (feed,) = a.session(b).feeds.values()
    assert feed.progress is not None
    world.cut("a", "b")
    a.link.capacity = 1000
    for _ in range(300):
        a.poll()
        b.poll()
        if a.session(b).conn is not None and a.session(b).stats.connections == 2:
            break
        for conn in world.net.steps():
            world.net.deliver(conn)
        world.now += 0.01
    for number in range(3):
        assert a.publish("t", bytes([number]) * 2000)
        a.poll()
    flying = {
        wire.parse_chunk(memoryview(head)).sequence
        for conn in world.net.between(a.link, b.link)
        for head, _ in conn.flight
        if head[0] == wire.CHUNK
    }
    assert flying == {0}


def test_a_sequence_that_no_publisher_reaches_is_malformed() -> None:
    """It could not be told to a publisher again."""
    world = subscribed("a", "b")
    subscription = world["b"].mesh.subscriber.topics["t"].id

    def exaggerate(conn: ScriptedConn, parcel: Parcel) -> Parcel:
        head, body = parcel
        if head[0] != wire.DATA:
            return parcel
        run = b"".join(wire.pack_run(subscription, 2**64 - 1, [0.0], [b"x"]))
        return head[: wire.HEADER_BYTES] + run, body

    world.net.tamper = exaggerate
    assert world["a"].publish("t", b"x")
    world.advance(0.5)
    assert world["b"].mesh.stats.malformed >= 1
    assert not any(isinstance(item, Got) for item in world["b"].recv_all())


def lead_of(ready: deque[str], **attributes: Any) -> Any:
    """What `pop_ready` and `Taking` need."""
    inbox = SimpleNamespace(ready=ready, put_back=ready.appendleft)
    values: dict[str, Any] = {
        "mesh": SimpleNamespace(subscriber=SimpleNamespace(inbox=inbox)),
        "lock": threading.Lock(),
        "closing": False,
        "forked": False,
        "poller": SimpleNamespace(wake=lambda: None),
        "tell_all": lambda: None,
    }
    return SimpleNamespace(**values | attributes)


def pop(lead: Any) -> Any:
    """What is popped, or None."""
    box: list[Any] = [None]
    inbox = lead.mesh.subscriber.inbox
    assert speed.pop_ready(lead, inbox, box) == (box[0] is not None)
    return box[0]


def queue_of(lead: Any, **attributes: Any) -> Any:
    """What `Receiving.recv` needs."""
    queue, taking = SimpleNamespace(), Taking(lead)
    values = {
        "_lead": lead,
        "_inbox": lead.mesh.subscriber.inbox,
        "_pop_ready": speed.pop_ready,
        "_stranded": taking.stranded,
        "_strand": taking.stranded.append,
        "_put_back": taking.put_back,
        "_receive": functools.partial(Receiving._receive, queue),
        "_finish": lambda item: item,
        "_whole": speed.Lock,
        "_let_go": borrowing.let_go,
    }
    queue.__dict__.update(values | attributes)
    return queue


@pytest.fixture(params=["python", "compiled"])
def _either_pop(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Have each of the twins used."""
    if request.param == "compiled" and not speed.COMPILED:
        pytest.skip("mq._speed was not built, or is not wanted")
    if request.param == "python":
        monkeypatch.setattr(speed, "pop_ready", pop_ready)


@pytest.mark.usefixtures("_either_pop")
@pytest.mark.parametrize("state", ["closing", "forked"])
def test_what_is_ready_is_not_handed_out_when_all_is_over(state: str) -> None:
    """Neither in a forked child nor while the queue is being closed."""
    ready = deque(["one", "two", "three"])
    assert pop(lead_of(ready, **{state: True})) is None
    assert len(ready) == 3


@pytest.mark.usefixtures("_either_pop")
def test_the_last_that_is_ready_is_not_popped() -> None:
    """With it the run is done, of which the mesh must hear."""
    lead = lead_of(deque(["one", "two", "three"]))
    assert [pop(lead) for _ in range(4)] == ["one", "two", None, None]
    assert not lead.lock.locked()


@pytest.mark.skipif(not speed.COMPILED, reason="mq._speed was not built or not wanted")
def test_nothing_is_popped_while_the_lock_is_taken() -> None:
    """Its holder may be changing what is ready; the compiled pop does not wait."""
    lead = lead_of(deque(["one", "two", "three"]))
    with lead.lock:
        assert pop(lead) is None
    assert pop(lead) == "one"


@pytest.mark.usefixtures("_either_pop")
def test_many_threads_pop_each_message_once() -> None:
    """And each thread in their order."""
    ready = deque(map(str, range(20_001)))
    lead = lead_of(ready)
    got: list[list[int]] = [[] for _ in range(4)]

    def pop_all(mine: list[int]) -> None:
        while len(ready) > 1:
            if (found := pop(lead)) is not None:
                mine.append(int(found))

    threads = [threading.Thread(target=pop_all, args=(mine,)) for mine in got]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(mine == sorted(mine) for mine in got)
    assert sorted(itertools.chain(*got)) == list(range(20_000))


@pytest.mark.skipif(not speed.COMPILED, reason="mq._speed was not built or not wanted")
def test_a_recv_interrupted_anywhere_loses_nothing() -> None:
    """Between any two bytecodes until it has emptied its box to return what was there.

    What it had taken comes first again. From there on nothing is called, and so no
    signal looked for, nor where a test for truth jumps ahead.
    """

    def recv(interrupter: Interrupter) -> list[str]:
        ready = deque(["one", "two", "three"])
        queue = queue_of(lead_of(ready))
        found = None
        with contextlib.suppress(KeyboardInterrupt), interrupter.armed():
            found = Receiving.recv(queue)
        return [*([] if found is None else [found]), *ready]

    for _ in range(2):  # Python 3.13 sees all bytecodes the second time
        survey = Interrupter(None, opcodes=True)
        assert recv(survey) == ["one", "two", "three"]
    code = Receiving.recv.__code__
    names = {each.offset: each.opname for each in dis.get_instructions(code)}
    visited = sorted(
        (point, names[place[1]] if place[0] is code else "")
        for place, points in survey.visited.items()
        for point in points
    )
    (emptied,) = (n for n, (_, name) in enumerate(visited) if name == "STORE_SUBSCR")
    left = {name for _, name in visited[emptied + 1 :]}
    assert "RETURN_VALUE" in left
    jumps = {name for name in left if "JUMP" in name}
    assert jumps <= {"JUMP_IF_TRUE_OR_POP", "POP_JUMP_IF_TRUE"}
    assert not any("CALL" in name or name in {"", "RESUME"} for name in left)
    points = [point for point, _ in visited[: emptied + 1]]
    assert len(points) > 10
    for point in points:
        recv(Interrupter(None, opcodes=True))  # what is raised ends the looking, too
        interrupter = Interrupter(point, opcodes=True)
        assert recv(interrupter) == ["one", "two", "three"], interrupter.where
        assert interrupter.where


def test_what_was_taken_is_there_though_another_interrupt_comes() -> None:
    """People press Ctrl-C twice: the next call puts it back."""

    class Lock:
        """Is interrupted as it is about to be taken for the first time."""

        taken = 0

        def __enter__(self) -> None:
            self.taken += 1
            if self.taken == 1:
                raise KeyboardInterrupt

        def __exit__(self, *exc: object) -> None:
            pass

    def take(box: list[str], timeout: float | None) -> bool:
        box[0] = ready.popleft()
        if box[0] == "one" and not lead.lock.taken:
            raise KeyboardInterrupt
        return True

    ready = deque(["one", "two"])
    lead = lead_of(ready, lock=Lock())
    queue = queue_of(lead, _take=take, _pop_ready=lambda *arguments: False)
    with pytest.raises(KeyboardInterrupt):
        Receiving.recv(queue)
    assert list(ready) == ["two"]
    assert [Receiving.recv(queue) for _ in range(2)] == ["one", "two"]
    assert not queue._stranded


@pytest.mark.skipif(not speed.COMPILED, reason="mq._speed was not built or not wanted")
def test_what_a_handler_raises_while_a_message_is_made_does_not_lose_it() -> None:
    """It is no error of the message's, whatever it is: a time-out, for example."""

    class Late(Exception):
        pass

    def raises(number: int, frame: object) -> None:
        raise Late

    def finish(item: str) -> str:
        if len(made) == 0:
            os.kill(os.getpid(), signal.SIGALRM)
        made.append(item)
        return item

    def take(box: list[str], timeout: float | None) -> bool:
        box[0] = ready.popleft()
        return True

    made: list[str] = []
    ready = deque(["one", "two"])
    lead = lead_of(ready)
    queue = queue_of(
        lead, _take=take, _finish=finish, _pop_ready=lambda *arguments: False
    )
    before = signal.signal(signal.SIGALRM, raises)
    signals.hold()
    try:
        with pytest.raises(Late):
            Receiving.recv(queue)
        assert [Receiving.recv(queue) for _ in range(2)] == ["one", "two"]
    finally:
        signal.signal(signal.SIGALRM, before)


def test_an_error_of_the_message_itself_ends_it() -> None:
    """The next call goes on."""

    def finish(item: str) -> str:
        if item == "one":
            raise CodecError("malformed")
        return item

    def take(box: list[str], timeout: float | None) -> bool:
        box[0] = ready.popleft()
        return True

    ready = deque(["one", "two"])
    lead = lead_of(ready)
    queue = queue_of(
        lead, _take=take, _finish=finish, _pop_ready=lambda *arguments: False
    )
    with pytest.raises(CodecError):
        Receiving.recv(queue)
    assert Receiving.recv(queue) == "two"


def test_a_pop_interrupted_before_it_had_an_effect_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Even if another thread takes that message before the interrupt is handled."""

    class Ready(deque[str]):
        def popleft(self) -> str:
            if threading.current_thread() is threading.main_thread():
                raise KeyboardInterrupt
            return super().popleft()

    class Lock:
        """Lets another thread in as soon as the interrupted one has left."""

        def __enter__(self) -> None:
            pass

        def __exit__(self, *exc: object) -> None:
            if exc[0] is KeyboardInterrupt:
                thread = threading.Thread(target=lambda: got.append(pop(lead)))
                thread.start()
                thread.join()

    monkeypatch.setattr(speed, "pop_ready", pop_ready)  # the other one takes no lock
    got: list[Any] = []
    ready = Ready(["one", "two", "three", "four"])
    lead = lead_of(ready, lock=Lock())
    with pytest.raises(KeyboardInterrupt):
        pop(lead)
    assert got == ["one"]
    assert list(ready) == ["two", "three", "four"]


def test_a_connection_that_was_to_close_closes_after_an_interrupt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else it would stay open, and nobody know of it."""
    world = subscribed("a", "b")
    a = world["a"]
    close, interrupts = ScriptedConn.close, [KeyboardInterrupt()]

    def interrupted(conn: ScriptedConn) -> None:
        if interrupts:
            raise interrupts.pop()
        close(conn)

    monkeypatch.setattr(ScriptedConn, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        a.mesh.disconnect(a.session(world["b"]), "it broke")
    a.mesh.recover()
    world.advance(1.0)
    assert len(a.link.conns) == 1
    assert set(a.link.conns) == set(a.mesh.conns)
