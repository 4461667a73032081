"""How messages travel, written from `docs/wire.md` alone: see `foreign_member`."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import socket
import struct
from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Callable

import zmq

SECONDS = 60.0
"""The longest wait for anything."""


class Wire(ABC):
    """One connection: whole messages, a head and perhaps a body."""

    @abstractmethod
    def send(self, head: bytes) -> None: ...

    @abstractmethod
    def receive(self) -> tuple[bytes, bytes]: ...

    @abstractmethod
    def close(self) -> None: ...


class Stream(Wire):
    """*Stream sockets*: `tcp`."""

    hello = b"MQSTRM\x01\n"

    def __init__(self, address: str) -> None:
        host, _, port = address.partition("://")[2].rpartition(":")
        self._begin(socket.create_connection((host.strip("[]"), int(port)), SECONDS))

    def _begin(self, sock: socket.socket) -> None:
        self.socket = sock
        sock.settimeout(SECONDS)
        self.greet()

    def greet(self) -> None:
        self.socket.sendall(self.hello)
        assert self.take(len(self.hello)) == self.hello

    def take(self, count: int) -> bytes:
        """Exactly so many bytes."""
        pieces = []
        while count:
            piece = self.take_some(count)
            assert piece, "the stream ended"
            pieces.append(piece)
            count -= len(piece)
        return b"".join(pieces)

    def take_some(self, count: int) -> bytes:
        return self.socket.recv(count)

    def send(self, head: bytes) -> None:
        self.socket.sendall(struct.pack("<II", len(head), 0) + head)

    def receive(self) -> tuple[bytes, bytes]:
        nhead, nbody = struct.unpack("<II", self.take(8))
        return self.take(nhead), self.take(nbody)

    def close(self) -> None:
        self.socket.close()


class Shm(Stream):
    """*Unix sockets of `shm`* and *Memory over unix sockets*."""

    hello = b"MQSHM\x00\x01\n"

    def __init__(self, address: str) -> None:
        self.descriptors: deque[int] = deque()
        self.segments: dict[int, mmap.mmap] = {}
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(address.removeprefix("shm://"))
        self._begin(sock)

    def greet(self) -> None:
        number = secrets.token_bytes(16)
        mine = os.memfd_create("proof", os.MFD_ALLOW_SEALING)
        os.write(mine, number)
        fcntl.fcntl(mine, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        socket.send_fds(self.socket, [b"?"], [mine])
        os.close(mine)
        self.take(1)
        theirs = self.descriptors.popleft()
        self.socket.sendall(os.pread(theirs, 16, 0))
        os.close(theirs)
        assert self.take(16) == number
        super().greet()

    def take_some(self, count: int) -> bytes:
        data, ancillary, _, _ = self.socket.recvmsg(count, socket.CMSG_SPACE(1024))
        for _, _, rights in ancillary:
            self.descriptors.extend(array("i", rights))
        return data

    def receive(self) -> tuple[bytes, bytes]:
        while True:
            head, body = super().receive()
            if head:
                return head, body
            kind, number, nbytes = struct.unpack("<BIQ", body)
            if kind == 1:
                fd = self.descriptors.popleft()
                memory = mmap.mmap(fd, nbytes, prot=mmap.PROT_READ)
                os.close(fd)
                self.segments[number] = memory
            else:
                assert kind == 2
                self.segments.pop(number).close()

    def close(self) -> None:
        super().close()
        for memory in self.segments.values():
            memory.close()


class Nng(Stream):
    """*NNG*, over TCP and unix sockets."""

    hello = bytes.fromhex("0053500000100000")

    def __init__(self, address: str) -> None:
        if address.startswith("ipc://"):
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(address.removeprefix("ipc://"))
            self._begin(sock)
        else:
            super().__init__(address)

    def greet(self) -> None:
        super().greet()
        self._say(b"", b"tensormq nng 1")
        assert self.receive() == (b"", b"tensormq nng 1")

    def _say(self, head: bytes, body: bytes) -> None:
        size = struct.pack(">Q", 4 + len(head) + len(body))
        self.socket.sendall(size + struct.pack("<I", len(head)) + head + body)

    def send(self, head: bytes) -> None:
        self._say(head, b"")

    def receive(self) -> tuple[bytes, bytes]:
        (size,) = struct.unpack(">Q", self.take(8))
        (nhead,) = struct.unpack("<I", self.take(4))
        return self.take(nhead), self.take(size - 4 - nhead)

    def close(self) -> None:
        self._say(b"", b"bye")
        super().close()


class Zmq(Wire):
    """*ZeroMQ*: the engine is ZeroMQ's own, which every language has."""

    def __init__(self, address: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.ROUTING_ID, secrets.token_bytes(16))
        self.socket.setsockopt(zmq.PROBE_ROUTER, 1)
        self.socket.setsockopt(zmq.RCVTIMEO, int(SECONDS * 1000))
        self.socket.connect(address)

    def send(self, head: bytes) -> None:
        self.socket.send(head)

    def receive(self) -> tuple[bytes, bytes]:
        while True:
            head, *body = self.socket.recv_multipart()
            if body:
                assert head, "goodbye"
                assert int.from_bytes(head[-4:], "little") == len(body[0])
                return head[:-4], body[0]
            if head:
                return head, b""

    def close(self) -> None:
        self.socket.close(1000)
        self.context.term()


WIRES: dict[str, Callable[[str], Wire]] = {
    "tcp": Stream,
    "shm": Shm,
    "nng": Nng,
    "zmq": Zmq,
}
