"""Large messages on a slow wire: little of them is ahead of other messages."""

from __future__ import annotations

import itertools
import statistics

import pytest
from scripted import ScriptedConn
from world import Member, World

from mq.mesh import wire
from mq.mesh.backlog import Backlog
from mq.mesh.config import Config
from mq.mesh.frame import Frame
from mq.mesh.large import INLINE_BYTES, SMALL_BYTES
from mq.mesh.pace import _PROBE_BYTES, FIRST_BYTES, LEAST_BYTES, WAIT_SECONDS, Pace

SLOW = 50e6 / 8
FAST = 2e9
MIB = 1 << 20
LARGE = bytes(range(251)) * 80_000  # 20 MB
SMALL = b"small"
LONGEST = 1.3 * max(LEAST_BYTES, SLOW * WAIT_SECONDS)
"""May be under way on the slow wire, whose delay seems longer than it is at times."""
MOST = 1.5
"""Times the window: a chunk that begins in it may end beyond it."""


@pytest.fixture(autouse=True)
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members on several hosts."""
    monkeypatch.setattr(Config, "is_near", lambda *_: False)


class Wire:
    """From `a` to `b`, who is subscribed to two topics, so many bytes a second."""

    def __init__(self, speed: float, chunk_bytes: int, whole_bytes: int) -> None:
        self.world = world = World()
        self.speed = speed
        world.chunk_bytes = chunk_bytes
        for name in "ab":
            world.add(name).link.whole_bytes = whole_bytes
        world["b"].dial(world["a"])
        world.settle()
        for topic in ("t", "u"):
            world["b"].subscribe(topic, window_bytes=1 << 32)
        world.settle()

    @property
    def a(self) -> Member:
        return self.world["a"]

    @property
    def b(self) -> Member:
        return self.world["b"]

    def _conn(self, one: Member, other: Member) -> ScriptedConn:
        (conn,) = self.world.net.between(one.link, other.link)
        return conn

    def flight(self) -> list[tuple[bytes, bytes]]:
        """What has left `a` and has not arrived."""
        return [
            (head, body)
            for head, body in self._conn(self.a, self.b).flight
            if isinstance(body, bytes)
        ]

    def under_way(self) -> int:
        """How many bytes of that are bodies."""
        return sum(len(body) for _, body in self.flight())

    def bodies(self) -> list[int]:
        """Their sizes."""
        return [len(body) for _, body in self.flight() if body]

    def send(self, payload: bytes) -> None:
        """Have `a` publish, and send what it sends before any answer."""
        assert self.a.publish("t", payload)
        sent = -1
        while sent != (sent := len(self.flight())):
            self.a.poll()

    def carry(self) -> int:
        """The next message arrives, and the answer to it; size of its body."""
        ahead, back = self._conn(self.a, self.b), self._conn(self.b, self.a)
        head, body = self.flight()[0]
        self.world.now += (len(head) + len(body)) / self.speed
        self.world.net.deliver(ahead)
        self.b.poll()
        self.world.now += 0.001
        self.b.poll()
        while back.flight:
            self.world.net.deliver(back)
        self.a.poll()
        return len(body)

    def carry_all(self) -> list[int]:
        """All messages arrive one after another; sizes of their bodies."""
        sizes = []
        while self.flight():
            sizes.append(self.carry())
        return [size for size in sizes if size]

    def pass_by(self) -> float:
        """How long a small message of another topic takes."""
        began = self.world.now
        assert self.a.publish("u", SMALL)
        self.a.mesh.pump(self.world.clock(), flush=True)
        while not any(head[0] == wire.DATA for head, _ in self.flight()):
            self.carry()
        while any(head[0] == wire.DATA for head, _ in self.flight()):
            self.carry()
        return self.world.now - began


LINKS = pytest.mark.parametrize(
    ("chunk_bytes", "whole_bytes"),
    [(MIB, 0), (4 * MIB, 24 * MIB), (12 * MIB, 12 * MIB)],
)


@LINKS
def test_a_small_message_waits_for_little_on_a_slow_wire(
    chunk_bytes: int, whole_bytes: int
) -> None:
    """A fraction of a second from the first answers on, and the wire is always busy."""
    path = Wire(SLOW, chunk_bytes, whole_bytes)
    for _ in range(3):
        path.send(LARGE)
    assert path.under_way() < MOST * FIRST_BYTES
    for _ in range(8):
        path.carry()
    for _ in range(20):
        assert path.pass_by() < MOST * LONGEST / SLOW
        assert _PROBE_BYTES <= path.under_way() < MOST * LONGEST
    path.carry_all()
    path.world.settle()

    got = path.b.payloads()
    assert [m for m in got if m != SMALL] == [LARGE] * 3
    assert len(got) == 3 + 20


@pytest.mark.parametrize("nbytes", [SMALL_BYTES + 1, INLINE_BYTES])
def test_a_small_message_waits_for_few_that_have_no_body(nbytes: int) -> None:
    """Also while a publisher waits for credit, for which it has all sent at once."""
    path = Wire(SLOW, MIB, 0)
    stream = bytes(nbytes)
    count = 4 * FIRST_BYTES // nbytes

    def in_flight() -> int:
        path.a.mesh.pump(path.world.clock(), flush=True)
        return sum(len(head) for head, _ in path.flight())

    assert path.a.publish("t", SMALL)  # who publishes gets more of the window
    path.carry_all()
    path.world.settle()
    assert path.b.payloads() == [SMALL]
    path.world.settle()
    for _ in range(count):
        assert path.a.publish("t", stream)
    assert MIB < in_flight() < MOST * FIRST_BYTES
    while in_flight() >= MOST * LONGEST:
        path.carry()
    got = path.b.payloads()
    for _ in range(6):
        began = path.world.now
        assert path.a.publish("u", SMALL)
        arrived: list[bytes] = []
        while SMALL not in arrived:
            assert _PROBE_BYTES <= in_flight() < MOST * LONGEST
            path.carry()
            arrived += path.b.payloads()
        assert path.world.now - began < 2 * LONGEST / SLOW
        got += arrived
    path.carry_all()
    path.world.settle()
    got += path.b.payloads()
    assert got.count(stream) == count
    assert got.count(SMALL) == 6 == len(got) - count


@LINKS
@pytest.mark.parametrize("speed", [SLOW, FAST])
def test_messages_without_a_body_have_their_share(
    speed: float, chunk_bytes: int, whole_bytes: int
) -> None:
    """As many bytes of 100 KB each leave as of 20 MB each, or about so."""
    path = Wire(speed, chunk_bytes, whole_bytes)
    middle = bytes(100_000)
    for topic in "tu":  # who publishes gets more of the window
        assert path.a.publish(topic, SMALL)
        path.carry_all()
        path.world.settle()
    path.b.payloads()
    path.world.settle()
    for _ in range(3):
        path.send(LARGE)
    for _ in range(400):
        assert path.a.publish("u", middle)
    bodies = heads = 0
    for _ in range(10):
        bodies += path.carry()
    while bodies < 2 * len(LARGE):
        heads += len(path.flight()[0][0])
        bodies += path.carry()
    assert heads > 0.3 * bodies


@LINKS
def test_a_fast_wire_carries_messages_as_they_are_cut(
    chunk_bytes: int, whole_bytes: int
) -> None:
    """From the first answer on, and in as many frames as before."""
    path = Wire(FAST, chunk_bytes, whole_bytes)
    assert path.a.publish("t", LARGE)
    path.carry_all()
    for _ in range(3):
        path.send(LARGE)
        sizes = path.bodies()
        assert sum(sizes) >= len(LARGE) - 64
        most = max(chunk_bytes, whole_bytes)
        assert len(sizes) == -(-len(LARGE) // most)
        path.carry_all()
    assert path.b.payloads() == [LARGE] * 4


def test_a_wire_that_becomes_slow_is_noticed() -> None:
    """What was too much once is not sent again, and what is cut goes in parts."""
    path = Wire(FAST, 12 * MIB, 12 * MIB)
    assert path.a.publish("t", LARGE)
    path.carry_all()
    path.speed = SLOW
    for _ in range(3):
        path.send(LARGE)
    for _ in range(len(path.flight())):
        path.carry()
    assert path.pass_by() < MOST * LONGEST / SLOW
    path.speed = FAST
    path.carry_all()
    path.send(LARGE)
    path.carry_all()
    path.send(LARGE)
    assert len(path.bodies()) == 2
    path.carry_all()
    assert [m for m in path.b.payloads() if m != SMALL] == [LARGE] * 6


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("leads", [(0,), (8,), (8, 0)])
def test_parts_that_were_lost_are_sent_again(
    lost: int,
    leads: tuple[int, ...],
    small_messages: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As parts, or what of them has not left as a whole: the message is the same."""
    monkeypatch.setattr("mq.mesh.pace.FIRST_BYTES", 400)
    world = World("a", "b", wholes="ab", leads=leads)
    world["b"].subscribe("t")
    world.settle()
    messages = [bytes(range(n, 250)) * 6 for n in range(4)]
    monkeypatch.setattr("mq.mesh.pace.WAIT_SECONDS", 0.0)
    a, b = world["a"], world["b"]
    a.session(b).pace.begin()
    for message in messages:
        assert a.publish("t", message)
    (conn,) = world.net.between(a.link, b.link)
    assert [len(body) for _, body in conn.flight] == [200, 200]
    world.net.deliver(conn)
    world.cut("a", "b", lose_one=lost)
    world.advance(5.0)

    assert b.payloads() == messages
    assert b.mesh.stats.malformed == 0


@pytest.mark.parametrize("wholes", ["", "ab"])
def test_what_an_interrupt_has_framed_again_is_framed_alike(
    wholes: str,
    small_messages: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However much the wire takes by then: its peer has the one and drops the other."""
    monkeypatch.setattr("mq.mesh.pace.FIRST_BYTES", 400)
    world = World("a", "b", wholes=wholes)
    a, b = world["a"], world["b"]
    b.subscribe("t")
    world.settle()
    session = a.session(b)
    session.pace.begin()
    message = bytes(range(250)) * 6
    append = Backlog._append

    def interrupted(backlog: Backlog, frame: Frame) -> None:
        append(backlog, frame)
        if backlog is session and frame.kind == wire.CHUNK:
            monkeypatch.setattr(Backlog, "_append", append)
            raise KeyboardInterrupt

    monkeypatch.setattr(Backlog, "_append", interrupted)
    with pytest.raises(KeyboardInterrupt):
        a.publish("t", message)
    topic = a.mesh.publisher.topic("t")
    a.mesh.recover()
    assert topic.newest == 0
    session.pace.window = 1 << 20
    world.advance(5.0)

    assert b.payloads() == [message]
    assert b.mesh.stats.malformed == 0


def bounded() -> Pace:
    """That of a connection to another host."""
    pace = Pace()
    pace.is_bounded = True
    pace.begin()
    return pace


SPEEDS = pytest.mark.parametrize("speed", [1e6, SLOW, 125e6])
DELAYS = pytest.mark.parametrize("delay", [0.0, 0.05, 0.1, 0.6])


def use(pace: Pace, speed: float, delay: float, rounds: int = 60) -> float:
    """Have all of the window under way, over and over; for how long at most in the end.

    Returns:
        Seconds; and the window at that time stays.
    """
    taken = []
    for number in range(1, rounds):
        ahead = pace.window
        taken.append((max(delay, ahead / speed), ahead))
        pace.left(number, ahead, 0.0)
        pace.answered(taken[-1][0])
    longest, pace.window = max(taken[-16:])
    return longest


@SPEEDS
@DELAYS
@pytest.mark.parametrize("window", [LEAST_BYTES, FIRST_BYTES, 1 << 30])
def test_a_wire_is_full_and_its_queue_is_short(
    speed: float, delay: float, window: int
) -> None:
    """Whatever was thought of it before, and however long it is."""
    pace = bounded()
    pace.left(0, 0, 0.0)
    pace.answered(delay)
    pace.window = window
    taken = use(pace, speed, delay)
    assert delay < taken <= delay + 1.2 * WAIT_SECONDS + MOST * LEAST_BYTES / speed
    assert pace.window >= speed * delay


@pytest.mark.parametrize("speed", [*SPEEDS.args[1], 1e9])
@DELAYS
def test_what_a_long_wire_holds_is_no_queue(speed: float, delay: float) -> None:
    """A link that takes only so much at a time keeps it full, and takes no more."""
    backlog = Backlog(lambda *_: [])
    backlog.most_unanswered, backlog.pace = 16 * MIB, bounded()
    backlog.pace.left(0, 0, 0.0)
    backlog.pace.answered(delay)
    ahead = []
    for number in range(1, 100):
        backlog.under_way = 0
        while not backlog.is_ahead():
            backlog.under_way += LEAST_BYTES // 4
        ahead.append(backlog.under_way)
        backlog.pace.left(number, ahead[-1], 0.0)
        backlog.pace.answered(max(delay, ahead[-1] / speed))
    assert max(ahead[-16:]) >= speed * delay
    assert max(ahead) <= max(backlog.most_unanswered, 1.6 * speed * delay)


@SPEEDS
def test_a_wire_that_others_fill_is_shared(speed: float) -> None:
    """Their queue is no reason to send ever less."""
    pace = bounded()
    pace.left(0, 0, 0.0)
    pace.answered(0.001)
    use(pace, speed, 0.001)
    use(pace, speed, 0.5, rounds=100)
    assert pace.window >= speed * 0.5


@pytest.mark.parametrize("first", [True, False])
def test_an_answer_that_was_late_is_forgotten_with_the_next(first: bool) -> None:
    """A process that did not run for a second is no slow wire."""
    pace = bounded()
    if not first:
        pace.left(0, MIB, 0.0)
        pace.answered(0.002)
        assert pace.window > 16 * MIB
    pace.left(1, 8 * MIB, 0.0)
    pace.answered(1.0)
    late = pace.window
    pace.left(2, late, 0.0)
    pace.answered(late / FAST)
    assert _PROBE_BYTES <= late < 2 * MIB
    assert pace.window > 16 * MIB


@pytest.mark.parametrize("number", [0, 2])
def test_an_answer_that_was_late_is_no_delay_of_the_wire(number: int) -> None:
    """Not even the first one, with nothing ahead, when nothing else is known."""
    pace = bounded()
    for _ in range(number):
        pace.left(0, 0, 0.0)
        pace.answered(0.001)
    pace.left(0, 0, 0.0)
    pace.answered(3.0)
    assert use(pace, SLOW, 0.001) < MOST * LONGEST / SLOW


def use_until_little_is_ahead(pace: Pace) -> None:
    """Have all of the window under way on the slow wire, until little is to be."""
    use(pace, SLOW, 0.001)
    while pace.window >= LEAST_BYTES:
        pace.left(0, pace.window, 0.0)
        pace.answered(pace.window / SLOW)


@pytest.mark.parametrize("seconds", [0.5, 2.0, 8.0])
def test_an_answer_that_was_late_with_little_ahead_is_no_delay_either(
    seconds: float,
) -> None:
    """It took longer than with more ahead: the next ones wait no longer for that."""
    pace = bounded()
    use_until_little_is_ahead(pace)
    pace.left(0, pace.window, 0.0)
    pace.answered(seconds)
    assert use(pace, SLOW, 0.001, rounds=10) < MOST * LONGEST / SLOW


@pytest.mark.parametrize("delay", [0.1, 0.3, 0.6])
def test_a_delay_that_has_grown_is_learned(delay: float) -> None:
    """Even if that happens when it is looked at."""
    pace = bounded()
    use_until_little_is_ahead(pace)
    use(pace, SLOW, delay)
    assert pace.window >= SLOW * delay


def test_a_peer_that_is_slow_with_each_frame_is_no_slow_wire() -> None:
    """However little is ahead its answers take as long: less would be slower."""
    pace = bounded()
    seconds = itertools.cycle((0.21, 0.45, 0.3, 0.5, 0.26, 0.4, 0.33))
    windows = []
    for number in range(200):
        pace.left(number, ahead := min(pace.window, 64 * MIB), 0.0)
        pace.answered(next(seconds))
        windows.append(ahead)
    assert statistics.median(windows[20:]) > FIRST_BYTES


def test_between_processes_of_one_host_nothing_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There, who takes long is busy."""
    monkeypatch.setattr(Config, "is_near", lambda *_: True)
    path = Wire(SLOW, 12 * MIB, 12 * MIB)
    for _ in range(3):
        path.send(LARGE)
        for _ in range(8):
            path.carry_all()
    path.send(LARGE)
    assert len(path.bodies()) == 2
