"""Ten thousand hostile frames at every listening address of one member."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

import mq
from mq import process, registry
from mq.mesh import wire
from mq.mesh.handshake import Greeting, Handshake
from mq.mesh.poller import Poller
from mq.testing import STEP, Group, programs, wait_until
from mq.transport import Conn, What

SECRET = "known to the attacker too"
BACKEND = "zmq"
MIB = 1 << 20


class Stranger:
    """A peer without a mesh: it speaks the engine's protocol, and sends anything."""

    def __init__(self, directory: str, versions: dict[str, str], seed: int) -> None:
        self._poller = Poller()
        self._link = registry.create(BACKEND, {})
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
            backend=BACKEND,
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


def _raw_garbage(address: str, seed: int) -> None:
    """What a program that speaks no ZeroMQ sends: noise, sometimes after its magic."""
    chance = random.Random(seed)
    raw = chance.randbytes(1 << chance.randrange(13))
    if seed % 2:
        raw = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48) + raw
    _, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    sock = socket.socket(socket.AF_UNIX if rest.startswith("/") else socket.AF_INET)
    sock.settimeout(STEP)
    with sock:
        sock.connect(rest if rest.startswith("/") else (host, int(port)))
        try:
            sock.sendall(raw)
        except OSError:  # it has been closed on us already
            pass


def _counted(stats: dict[str, Any]) -> int:
    mesh = stats["mesh"]
    return int(mesh["malformed"] + mesh["unauthenticated"] + mesh["refused"])


@pytest.fixture
def group() -> Iterator[Group]:
    """A group over ZeroMQ, on Unix sockets and TCP at once."""
    made = Group(BACKEND, registry.capabilities(BACKEND), {"secret": SECRET})
    yield made
    made.end()


@pytest.mark.slow
def test_ten_thousand_hostile_frames_disturb_nobody(group: Group) -> None:
    """None ends the process or takes memory, each is counted, others go on."""
    a, b = group.members("a", "b")
    victim = group.member("victim", max_message_bytes=MIB, peer_timeout=0.5)
    victim.subscribe("t")
    receiving = victim.begin(_swallow)
    described = victim.call("describe")
    addresses, versions = described["addresses"], described["versions"]
    assert {address.partition(":")[0] for address in addresses} == {"ipc", "tcp"}
    memory = victim.rss()
    counted = _counted(victim.call("stats"))
    b.subscribe("pair", depth=100)
    sending = a.begin(programs.publish_range, "pair", 0, 5000)
    reading = b.begin(programs.receive, 5000)

    for number in range(2500):
        _raw_garbage(addresses[number % len(addresses)], number)
    wait_until(
        lambda: _counted(victim.call("stats")) - counted >= 2500,
        "every connection that spoke no ZeroMQ to be counted",
    )
    counted = _counted(victim.call("stats"))
    broken = 0
    stranger = Stranger(group.directory, versions, seed=1)
    try:
        for number in range(2500):
            broken += stranger.send_before_greeting(addresses[number % 2])
        for number in range(5000):
            broken += stranger.send_after_greeting(addresses[number % 2], group.name)
    finally:
        stranger.close()

    assert broken > 4000, "most spoilt frames are malformed"
    wait_until(
        lambda: _counted(victim.call("stats")) - counted >= broken,
        "every bad frame to be counted",
    )
    assert [m.digest for m in reading.result()] == list(range(5000))
    sending.result()
    assert victim.rss() - memory < 32 * MIB
    for member in (a, b):
        member.subscribe("after")
    victim.publish("after", "alive")
    assert [m.recv().payload for m in (a, b)] == ["alive", "alive"]
    assert not receiving.done()
    victim.call("close")
    receiving.result()
