"""A subscriber written from `docs/wire.md` alone, as one in another language would be.

It imports nothing of this project. It is no model of how to do it fast, or of how to
go on after a break: it reads what a publisher sends, and breaks at what it cannot read.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import time
from collections import deque
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import msgspec
from foreign_wires import SECONDS, Shm, Stream, Wire

LAST = 2  # a flag
DATA, CHUNK, SUBSCRIBE, SUBSCRIBED = 10, 11, 12, 13
CREDIT, RELEASE, BYE, ACCEPTS = 15, 16, 17, 18
WAITING, LENT, RECEIVED = 19, 20, 30
HEADER = struct.Struct("<BBHQQ")
PREFIX = struct.Struct("<B6sH")
encode = msgspec.msgpack.encode


# -- payloads ----------


class Tensor(msgspec.Struct, frozen=True):
    """What a message says of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes


def decode(area: bytes) -> Any:
    """The payload of a plain or tabled message without registered types."""
    magic, version, kind = struct.unpack_from("<2sBB", area)
    assert (magic, version) == (b"MQ", 1)
    if kind == 0:
        return msgspec.msgpack.decode(area[4:])
    assert kind == 1
    nskeleton, count = struct.unpack_from("<II", area, 4)
    sizes = struct.unpack_from(f"<{count}Q", area, 12)
    start = 12 + 8 * count
    skeleton = area[start : start + nskeleton]
    end, buffers = start + nskeleton, deque[bytes]()
    for size in sizes:
        begin = -(-end // 64) * 64
        end = begin + size
        buffers.append(area[begin:end])
    assert end == len(area)

    def extension(code: int, body: memoryview) -> Any:
        if code == 1:
            return tuple(inner(body))
        if code == 13:
            return buffers.popleft()
        assert code == 18, f"extension {code} is not in this test"
        dtype, *shape = inner(body)
        return Tensor(dtype, tuple(shape), buffers.popleft())

    def inner(body: bytes | memoryview) -> Any:
        return msgspec.msgpack.decode(body, ext_hook=extension)

    payload = inner(skeleton)
    assert not buffers
    return payload


# -- the session ----------


def greeting(group: str, name: str, backend: str) -> dict[str, Any]:
    """What this member tells of itself."""
    return {
        "group": group,
        "name": name,
        "incarnation": secrets.token_hex(16),
        "generation": 0,
        "backend": backend,
        "process": {
            "host": "elsewhere",
            "pid": os.getpid(),
            "boot_id": "",
            "pid_namespace": 0,
            "time_namespace": 0,
            "started": 0,
        },
        "labels": [],
        "since": time.time(),
        "addresses": [],
        "peer_timeout": SECONDS,
        "max_message_bytes": 1 << 30,
        "accepts": [],
        "versions": {"codec": "1"},
    }


class Refused(Exception):
    """The listener's code and text."""


class Session:
    """A session with one publisher, begun by this side."""

    def __init__(self, wire: Wire, hello: dict[str, Any], secret: bytes) -> None:
        self.wire = wire
        self.sent = self.received = self.acknowledged = 0
        self._parts: dict[int, bytearray] = {}
        try:
            self.peer = self._greet(hello, secret)
        except BaseException:
            wire.close()
            raise

    def _greet(self, hello: dict[str, Any], secret: bytes) -> dict[str, Any]:
        mine = secrets.token_bytes(32)
        self.wire.send(PREFIX.pack(1, b"MQMESH", 1) + mine)
        theirs, proof = self._answer(2)[:32], self._answered[32:]

        def prove(kind: int, content: bytes) -> bytes:
            said = bytes([kind]) + mine + theirs + content
            return hmac.new(secret, said, hashlib.sha256).digest()

        if proof != prove(2, b""):
            self.wire.send(PREFIX.pack(5, b"MQMESH", 1))
            raise Refused("secret", "the listener's proof is wrong")
        content = encode(hello)
        self.wire.send(PREFIX.pack(3, b"MQMESH", 1) + prove(3, content) + content)
        answer = self._answer(4)
        assert answer[:32] == prove(4, answer[32:])
        peer: dict[str, Any] = msgspec.msgpack.decode(answer[32:])
        assert peer["session"]
        return peer

    def _answer(self, expected: int) -> bytes:
        head, body = self.wire.receive()
        kind, magic, version = PREFIX.unpack_from(head)
        assert (magic, version, body) == (b"MQMESH", 1, b"")
        self._answered = head[PREFIX.size :]
        if kind == 5:
            raise Refused(*msgspec.msgpack.decode(self._answered[32:]))
        assert kind == expected
        return self._answered

    def send(self, kind: int, content: object, flags: int = 0) -> None:
        """A numbered frame."""
        self.sent += 1
        head = HEADER.pack(kind, flags, 0, self.sent, self.received)
        self.wire.send(head + encode(content))

    def answer(self) -> None:
        """RECEIVED."""
        self.wire.send(HEADER.pack(RECEIVED, 0, 0, 0, self.received))

    def frames(self) -> Iterator[tuple[int, int, bytes, bytes]]:
        """Kind, flags, what follows the header, and body of each numbered frame."""
        while True:
            head, body = self.wire.receive()
            kind, flags, zero, number, acknowledged = HEADER.unpack_from(head)
            assert zero == 0
            self.acknowledged = acknowledged
            if not number:
                assert (kind, body) == (RECEIVED, b"")
                yield kind, flags, b"", b""
                continue
            assert number == self.received + 1
            self.received = number
            yield kind, flags, head[HEADER.size :], body
            self.answer()

    def messages(
        self, subscription: int, topic: str, window: tuple[int, int], count: int
    ) -> Generator[tuple[int, bytes], None, None]:
        """Subscribe, and give sequence and area of so many messages, or fewer."""
        window_messages, window_bytes = window
        self.send(SUBSCRIBE, [[subscription, topic, None, *window, -1]], flags=LAST)
        got = got_bytes = 0
        for kind, flags, content, body in self.frames():
            found: list[tuple[int, bytes]] = []
            if kind == DATA:
                found = list(self._runs(content, subscription))
            elif kind == CHUNK:
                found = list(self._chunk(content, body, bool(flags & LAST)))
            elif kind == LENT:
                found = [self._lent(content)]
            elif kind == SUBSCRIBED:
                ((answered, _, retained),) = msgspec.msgpack.decode(content)
                assert (answered, retained) == (subscription, -1)
            elif kind == BYE:
                self.answer()
                return
            else:
                assert kind in (SUBSCRIBE, CREDIT, WAITING, RECEIVED)
            for sequence, area in found:
                got, got_bytes = got + 1, got_bytes + len(area)
                yield sequence, area
            if found:
                grant = [got + window_messages, got_bytes + window_bytes]
                self.send(CREDIT, [[subscription, *grant]])
            if got == count:
                return

    @staticmethod
    def _runs(content: bytes, expected: int) -> Iterator[tuple[int, bytes]]:
        at = 0
        while at < len(content):
            subscription, count, first = struct.unpack_from("<IIQ", content, at)
            assert subscription == expected
            sizes = struct.unpack_from(f"<{count}I", content, at + 16 + 8 * count)
            at += 16 + 12 * count
            for place, size in enumerate(sizes):
                yield first + place, content[at : at + size]
                at += size

    def _chunk(
        self, content: bytes, body: bytes, last: bool
    ) -> Iterator[tuple[int, bytes]]:
        subscription, npart, sequence, _, total, offset = struct.unpack_from(
            "<IIQdQQ", content
        )
        part = content[40:]
        assert len(part) == npart
        area = self._parts.setdefault(subscription, bytearray(total))
        assert len(area) == total
        end = offset + npart
        area[offset:end] = part
        if body:
            begin = -(-end // 64) * 64 if part else offset
            if not (part or offset) and len(body) == total + 8:  # `zmq`
                body = body[8:]
            area[begin : begin + len(body)] = body
            assert len(area) == total
        if last:
            yield sequence, bytes(self._parts.pop(subscription))

    def _lent(self, content: bytes) -> tuple[int, bytes]:
        subscription, segment, sequence, _, offset, nbytes = struct.unpack(
            "<IIQdQQ", content
        )
        assert isinstance(self.wire, Shm)
        area = self.wire.segments[segment][offset : offset + nbytes]
        self.send(RELEASE, [[subscription, sequence]])
        return sequence, area

    def leave(self, reason: str) -> None:
        """Say BYE, wait until it was received, and close."""
        self.answer()
        self.send(BYE, reason)
        with contextlib.closing(self.wire):
            for _ in self.frames():
                if self.acknowledged == self.sent:
                    return


# -- where members meet ----------


def group_directory(base: Path, group: str) -> Path:
    """Where a group meets below the directory for all groups."""
    plain = "".join(c if c.isascii() and c.isalnum() else "_" for c in group)
    return base / f"{plain[:12]}-{hashlib.sha256(group.encode()).hexdigest()[:16]}"


def records_in(directory: Path) -> list[dict[str, Any]]:
    """The records of all names that are held."""
    newest: dict[str, tuple[int, Path]] = {}
    for path in directory.glob("m-*-*"):
        _, name, generation = path.name.split("-")
        newest[name] = max(newest.get(name, (0, path)), (int(generation), path))
    texts = [path.read_text() for _, path in newest.values()]
    return [json.loads(text) for text in texts if text]


class Service:
    """A client of the service at `tcp://host:port`."""

    MAGIC = b"mq-rdv1\n"

    def __init__(self, address: str, secret: bytes, group: str) -> None:
        self._stream = Stream.__new__(Stream)
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        sock = socket.create_connection((host, int(port)), SECONDS)
        self._stream.socket = sock
        hello = self._stream.take(40)
        assert hello[:8] == self.MAGIC
        nonces = hello[8:] + secrets.token_bytes(32)

        def prove(role: bytes) -> bytes:
            said = b"mq rendezvous " + role + nonces
            return hmac.new(secret, said, hashlib.sha256).digest()

        sock.sendall(self.MAGIC + nonces[32:] + prove(b"client"))
        if self._stream.take(32) != prove(b"service"):
            sock.close()
            raise Refused("secret", "the service knows another secret")
        self._key = prove(b"session")
        self._group = group
        self._number = 0

    def ask(self, **request: Any) -> dict[str, Any]:
        """One request and its answer."""
        body = json.dumps({**request, "group": self._group}).encode()
        frame = struct.pack(">I", len(body)) + self._mac(b"c", body) + body
        self._stream.socket.sendall(frame)
        (size,) = struct.unpack(">I", self._stream.take(4))
        mac, body = self._stream.take(32), self._stream.take(size)
        assert mac == self._mac(b"s", body)
        self._number += 1
        answer: dict[str, Any] = json.loads(body)
        return answer

    def _mac(self, direction: bytes, body: bytes) -> bytes:
        said = direction + struct.pack(">Q", self._number) + body
        return hmac.new(self._key, said, hashlib.sha256).digest()

    def close(self) -> None:
        self._stream.close()
