"""Thousands of hostile frames at every listening address of one member."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from tls_files import tls_options

import mq
from mq import process, registry
from mq.mesh import wire
from mq.mesh.handshake import Greeting, Handshake
from mq.mesh.poller import Poller
from mq.stream.conn import StreamConn
from mq.testing import STEP, Group, programs, wait_until
from mq.transport import Conn, What

SECRET = "known to the attacker too"
MIB = 1 << 20


class Flood(NamedTuple):
    """What is sent at the members of one backend.

    Attributes:
        schemes: Of the victim's addresses.
        frames: How many: a quarter before a handshake or in that of the link, a quarter
            in that of the mesh, and half after both.
    """

    schemes: set[str]
    frames: int
    options: dict[str, Any]


FLOODS = {
    "zmq": Flood({"ipc", "tcp"}, 10_000, {}),
    "tcp": Flood({"tcp"}, 4_000, {}),
    "shm": Flood({"shm"}, 4_000, {}),
    "tls": Flood({"tls"}, 2_000, tls_options()),
}


class Stranger:
    """A peer without a mesh: it speaks the engine's protocol, and sends anything."""

    def __init__(
        self, backend: str, directory: str, versions: dict[str, str], seed: int
    ) -> None:
        self._backend = backend
        self._poller = Poller()
        self._link = registry.create(backend, FLOODS[backend].options)
        self._link.open(self._poller, [], directory)
        self._versions = versions
        self._chance = random.Random(seed)
        self._members = 0

    def close(self) -> None:
        """Free the engine."""
        self._link.close()
        self._poller.close()

    def _await(self, conn: Conn, what: What) -> bytes | None:
        """The next message, b"" once `what` happens, or None if it breaks."""
        deadline = time.monotonic() + STEP
        while True:
            happened = [e.what for e in self._link.poll() if e.conn is conn]
            message = conn.receive() if What.READABLE in happened else None
            if message is not None and what is What.READABLE:
                if message[1]:
                    conn.discard_body()
                return bytes(message[0])
            if What.LOST in happened:
                return None
            if what in happened and what is not What.READABLE:
                return b""
            assert time.monotonic() < deadline, "the member neither answers nor closes"
            if not happened:
                self._poller.wait(0.2)

    def dial(self, address: str) -> Conn:
        """A connection on which nothing was said yet."""
        conn = self._link.dial(address)
        assert self._await(conn, What.OPENED) is not None, "cannot connect"
        return conn

    def greet(self, address: str, group: str) -> Conn:
        """A connection on which the handshake of the mesh is done."""
        conn = self.dial(address)
        shake = Handshake(SECRET.encode(), dialler=True)
        conn.try_send(shake.hello())
        challenge = self._await(conn, What.READABLE)
        assert challenge is not None
        assert shake.check_challenge(challenge)
        self._members += 1
        me = Greeting(
            group=group,
            name=f"stranger-{self._members}",
            incarnation=f"{self._chance.getrandbits(128):032x}",
            generation=1,
            backend=self._backend,
            process=process.here(),
            labels=[],
            since=0.0,
            addresses=[],
            peer_timeout=0.5,
            max_message_bytes=MIB,
            accepts=[],
            versions=self._versions,
        )
        conn.try_send(shake.seal(wire.GREETING, me))
        welcome = self._await(conn, What.READABLE)
        assert welcome is not None
        assert welcome[0] == wire.WELCOME, welcome
        return conn

    def send_noise(self, address: str) -> None:
        """What no link sends, where the link's own handshake has been done.

        Noise of another program for ZeroMQ, whose engine lets no other through.
        """
        conn = None if self._backend == "zmq" else self.dial(address)
        if conn is None:
            magic = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
            _raw_garbage(address, magic + self._noise(1))
        else:
            assert isinstance(conn, StreamConn)
            conn._send((self._noise(8),))
            assert self._await(conn, What.READABLE) is None

    def send_raw_noise(self, address: str) -> None:
        """What a program that does not speak this at all sends."""
        _raw_garbage(address, self._noise(1))

    def _noise(self, least: int) -> bytes:
        return self._chance.randbytes(max(least, 1 << self._chance.randrange(13)))

    def spoil(self, frame: bytes) -> bytes:
        """The frame cut off, with flipped bits, or quite another one."""
        chance = self._chance
        kind = chance.randrange(3)
        if kind == 0:
            return chance.randbytes(1 << chance.randrange(12))
        if kind == 1:
            return frame[: chance.randrange(1, len(frame))]
        spoilt = bytearray(frame)
        for _ in range(chance.randrange(1, 6)):
            spoilt[chance.randrange(len(spoilt))] ^= 1 << chance.randrange(8)
        return bytes(spoilt)

    def send_before_greeting(self, address: str) -> bool:
        """A spoilt HELLO, then a spoilt GREETING; whether the connection was broken."""
        conn = self.dial(address)
        shake = Handshake(SECRET.encode(), dialler=True)
        conn.try_send(self.spoil(shake.hello()))
        answer = self._await(conn, What.READABLE)
        if answer is None or answer[0] == wire.REFUSED:
            conn.close()
            return True
        conn.try_send(self.spoil(shake.hello() + bytes(100)))
        answer = self._await(conn, What.READABLE)
        conn.close()
        return answer is None or answer[0] == wire.REFUSED

    def send_after_greeting(self, address: str, group: str) -> bool:
        """A spoilt frame of the session; whether the connection was broken."""
        conn = self.greet(address, group)
        frame, body = self._chance.choice(_frames())
        conn.try_send(self.spoil(frame), memoryview(body) if body else None)
        head = wire.HEADER.pack(wire.WAITING, wire.FLAG_ANSWER, 0, 2, 0)
        conn.try_send(head + wire.encode(False))
        while (answer := self._await(conn, What.READABLE)) is not None:
            if wire.HEADER.unpack_from(answer)[4] >= 2:
                conn.close()
                return False
        return True


def _frames() -> list[tuple[bytes, bytes]]:
    """One frame of each kind, heads and bodies, some of them promising too much."""

    def frame(kind: int, content: bytes) -> bytes:
        return wire.HEADER.pack(kind, wire.FLAG_ANSWER, 0, 1, 0) + content

    message = bytes(40)
    huge = 1 << 40
    return [
        (
            frame(
                wire.DATA,
                wire.pack_run(1, 0, [0.0], [message])[0] + bytes(12) + message,
            ),
            b"",
        ),
        (frame(wire.DATA, wire.RUN.pack(1, 1 << 31, 0) + message), b""),
        (frame(wire.CHUNK, wire.CHUNK_HEAD.pack(1, 0, 0, 0.0, 4096, 0)), bytes(4096)),
        (frame(wire.CHUNK, wire.CHUNK_HEAD.pack(1, 0, 0, 0.0, huge, 0)), bytes(4096)),
        (frame(wire.CHUNK, wire.CHUNK_HEAD.pack(1, 0, 0, 0.0, 99, huge)), bytes(MIB)),
        (frame(wire.SUBSCRIBE, wire.encode([[1, "u", None, 1 << 62, 1 << 62]])), b""),
        (frame(wire.SUBSCRIBED, wire.encode([[1, 5]])), b""),
        (frame(wire.CREDIT, wire.encode([[1, 1 << 62, 1 << 62]])), b""),
        (frame(wire.UNSUBSCRIBE, wire.encode(1)), b""),
        (frame(wire.ACCEPTS, wire.encode(["x" * 1000])), b""),
        (frame(wire.LENT, wire.LENT_HEAD.pack(1, 7, 0, 0.0, huge, MIB)), b""),
        (wire.HEADER.pack(wire.RECEIVED, 0, 0, 0, 1 << 60), b""),
    ]


def _swallow(queue: mq.MQ) -> int:
    """Receive until closed; how many messages could not be decoded."""
    bad = 0
    while not _swallow_good(queue):
        bad += 1
    return bad


def _swallow_good(queue: mq.MQ) -> bool:
    """Receive until closed (True) or until something cannot be decoded."""
    try:
        for _ in queue:
            pass
    except (mq.CodecError, mq.MessagesLost):
        return False
    return True


def _raw_garbage(address: str, raw: bytes) -> None:
    _, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    is_path = rest.startswith("/")
    sock = socket.socket(socket.AF_UNIX if is_path else socket.AF_INET)
    sock.settimeout(STEP)
    target = rest if is_path else (host, int(port))
    with sock:
        wait_until(lambda: _connected(sock, target), "room for a connection")
        try:
            sock.sendall(raw)
        except OSError:  # it has been closed on us already
            pass


def _connected(sock: socket.socket, target: str | tuple[str, int]) -> bool:
    """Connect; False: a listener has no room, for which a unix socket does not wait."""
    try:
        sock.connect(target)
    except BlockingIOError:
        return False
    return True


def _counted(stats: dict[str, Any]) -> int:
    mesh = stats["mesh"]
    return int(mesh["malformed"] + mesh["unauthenticated"] + mesh["refused"])


def _talk(queue: mq.MQ) -> int:
    """Publish numbers to the other of the pair until it says stop; how many."""
    for number in itertools.count():
        queue.publish("pair", number, timeout=STEP)
        with contextlib.suppress(mq.RecvTimeout):
            queue.recv(timeout=0.001)  # no faster, for the flood needs the cores, too
            queue.publish("pair", "end", timeout=STEP)
            return number + 1
    raise AssertionError("the numbers have ended")


class Pair:
    """Two members that exchange messages, and are to notice nothing."""

    def __init__(self, group: Group) -> None:
        self.members = group.members("a", "b")
        talker, self._reader = self.members
        talker.subscribe("stop")
        self._reader.subscribe("pair", depth=100)
        self._sending = talker.begin(_talk)
        self._reading = self._reader.begin(programs.receive_until, "end")
        wait_until(lambda: self.received() > 0, "the pair to begin")

    def received(self) -> int:
        """How many messages have arrived so far."""
        stats = self._reader.run(programs.topic_stats, "pair")
        return int(stats.get("received", 0))

    def end(self) -> None:
        """Nothing was lost, doubled or reordered."""
        self._reader.publish("stop", None)
        count = self._sending.result()
        *numbers, _ = self._reading.result()
        assert [message.digest for message in numbers] == list(range(count))


FLOOD_SECONDS = 600.0
"""Ten thousand frames take half a minute alone, and long beside other work."""


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    """A group on all wires that the backend has."""
    options = {"secret": SECRET, **FLOODS[request.param].options}
    made = Group(request.param, registry.capabilities(request.param), options)
    made.deadline = time.monotonic() + FLOOD_SECONDS
    yield made
    made.end()


@pytest.mark.slow
@pytest.mark.parametrize("group", FLOODS, indirect=True)
def test_thousands_of_hostile_frames_disturb_nobody(group: Group) -> None:
    """None ends the process or takes memory, each is counted, others go on."""
    flood = FLOODS[group.backend]
    victim = group.member("victim", max_message_bytes=MIB, peer_timeout=0.5)
    victim.subscribe("t")
    receiving = victim.begin(_swallow)
    described = victim.call("describe")
    addresses = itertools.cycle(described["addresses"])
    assert {a.partition(":")[0] for a in described["addresses"]} == flood.schemes
    memory = victim.rss()
    counted = _counted(victim.call("stats"))
    pair = Pair(group)
    stranger = Stranger(group.backend, group.directory, described["versions"], seed=1)

    def send(frames: int, *ways: Callable[[str], bool | None]) -> int:
        """In turn by each of these ways; how many connections were broken for it."""
        exchanged = pair.received()
        broken = 0
        for number in range(frames):
            broken += bool(ways[number % len(ways)](next(addresses)))
        assert pair.received() > exchanged, "the pair has come to a stand"
        return broken

    try:
        noises = flood.frames // 4
        send(noises, stranger.send_raw_noise, stranger.send_noise)
        wait_until(
            lambda: _counted(victim.call("stats")) - counted >= noises,
            "every connection that broke the rules of the link to be counted",
        )
        counted = _counted(victim.call("stats"))
        broken = send(flood.frames // 4, stranger.send_before_greeting)
        broken += send(
            flood.frames // 2,
            lambda address: stranger.send_after_greeting(address, group.name),
        )
    finally:
        stranger.close()

    assert broken > 0.4 * flood.frames, "most spoilt frames are malformed"
    wait_until(
        lambda: _counted(victim.call("stats")) - counted >= broken,
        "every bad frame to be counted",
    )
    pair.end()
    assert victim.rss() - memory < 32 * MIB
    for member in pair.members:
        member.subscribe("after")
    victim.publish("after", "alive")
    assert [m.recv().payload for m in pair.members] == ["alive", "alive"]
    assert not receiving.done()
    victim.call("close")
    receiving.result()
