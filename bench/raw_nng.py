"""Bare pynng, written as its documentation recommends; and NNG as DI-engine uses it.

pynng has no multipart messages: a payload is the size of a JSON header with dtype and
shape, the header and the memory, joined into one ``bytes`` for ``send``, and rebuilt
over the ``bytes`` that ``recv`` returns. A hub and one spoke are joined by Pair0; a hub
publishes to several spokes, or to one on ``...:pubsub``, by Pub0/Sub0, and they answer
by Push0/Pull0. Buffers are of the default size, but 1000 messages for Pub0/Sub0, as for
the bare pyzmq.

``raw:nng-bus`` is what DI-engine's message queue does: one Bus0 socket for both ways,
over unix sockets, and ``topic::`` before a pickled payload.
"""

from __future__ import annotations

import pickle
import threading
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pynng

from bench.payloads import Payload
from bench.peer import Peer
from bench.raw import Parts, decode, encode
from bench.wire import Wire

_PREFIX = 4
_QUEUE = 1000
_TOPIC = b"bench::"


def join(parts: Parts) -> bytes:
    """One message of the frames of a payload."""
    if len(parts) == 1:
        return b"".join([bytes(_PREFIX), *parts])
    sizes = [len(parts[0]), *(len(part) for part in parts[1:-1])]
    head = b"".join(size.to_bytes(_PREFIX, "little") for size in [len(sizes), *sizes])
    return b"".join([head, *parts])


def split(message: bytes | bytearray) -> Parts:
    """The frames of a message, over its memory."""
    view = memoryview(message)
    count, start = int.from_bytes(view[:_PREFIX], "little"), _PREFIX
    if not count:
        return [view[start:]]
    sizes = []
    for _ in range(count):
        sizes.append(int.from_bytes(view[start : start + _PREFIX], "little"))
        start += _PREFIX
    parts = []
    for size in sizes:
        parts.append(view[start : start + size])
        start += size
    return [*parts, view[start:]]


class _NngWire(Wire):
    """Sockets of pynng, opened by a subclass: `_sender` and `_receiver`."""

    def __init__(self, peer: Peer, quiet: float) -> None:
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        self._hub = peer.rank == 0
        self._sockets: list[Any] = []
        self._directory = peer.directory
        self._timeouts = dict.fromkeys(
            ("recv_timeout", "send_timeout"), int(quiet * 1000)
        )
        self._sender: Any = None
        self._receiver: Any = None
        try:
            self._open(peer)
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _open(self, peer: Peer) -> None:
        """Open the sockets and have them find their peers."""

    def _socket(self, kind: Any, **options: Any) -> Any:
        made = kind(**self._timeouts, **options)
        self._sockets.append(made)
        return made

    def _join(self, made: Any, peer: Peer, scheme: str, name: str) -> None:
        """Have the hub's socket and those of its spokes find each other."""
        connected = threading.Semaphore(0)
        made.add_post_pipe_connect_cb(lambda pipe: connected.release())
        address = f"ipc://{self._directory}/{name}"
        if self._hub:
            made.listen("tcp://127.0.0.1:0" if scheme == "tcp" else address)
            if scheme == "tcp":
                address = f"tcp://{made.listeners[0].local_address}"
        found: str = peer.meet(address)[0]
        if not self._hub:
            made.dial(found, block=True)
        for _ in range(peer.spokes if self._hub else 1):
            if not connected.acquire(timeout=peer.remaining()):
                raise TimeoutError("raw nng: the others did not connect in time")
        peer.meet()

    def _encode(self, payload: Payload) -> bytes:
        return join(encode(payload))

    def _decode(self, message: bytes) -> Payload:
        return decode(split(message))

    def send(self, payload: Payload) -> None:
        try:
            self._sender.send(self._encode(payload))
        except pynng.Timeout as error:
            raise TimeoutError("raw nng: the peer took no message in time") from error

    def recv(self) -> Payload:
        try:
            message = self._receiver.recv()
        except pynng.Timeout as error:
            raise TimeoutError("raw nng: no message came in time") from error
        return self._decode(message)

    @contextmanager
    def bulk(self, payload: Payload) -> Iterator[Callable[[], int]]:
        message = self._encode(payload)
        left = 0

        def turn() -> int:
            nonlocal left
            try:
                self._sender.send(message, block=False)
                left += 1
            except pynng.TryAgain:
                pass
            return left

        yield turn

    def close(self) -> None:
        for made in self._sockets:
            made.close()


class RawNngWire(_NngWire):
    """Pair0 with one spoke, else Pub0/Sub0 outwards and Push0/Pull0 back."""

    def _open(self, peer: Peer) -> None:
        _, _, scheme, *pattern = peer.cell.transport.split(":")
        if peer.spokes == 1 and not pattern:
            self._sender = self._receiver = self._socket(pynng.Pair0)
            self._join(self._sender, peer, scheme, "pair")
            return
        if self._hub:
            out = self._socket(pynng.Pub0, send_buffer_size=_QUEUE)
            back = self._socket(pynng.Pull0)
            self._sender, self._receiver = out, back
        else:
            out = self._socket(pynng.Sub0, recv_buffer_size=_QUEUE, topics=b"")
            back = self._socket(pynng.Push0)
            self._sender, self._receiver = back, out
        self._join(out, peer, scheme, "out")
        self._join(back, peer, scheme, "back")


class NngBusWire(_NngWire):
    """What DI-engine's queue over NNG does."""

    def _open(self, peer: Peer) -> None:
        _, _, *scheme = peer.cell.transport.split(":")
        self._sender = self._receiver = self._socket(pynng.Bus0)
        self._join(self._sender, peer, scheme[0] if scheme else "ipc", "bus")

    def _encode(self, payload: Payload) -> bytes:
        return _TOPIC + pickle.dumps(payload)

    def _decode(self, message: bytes) -> Payload:
        _, data = message.split(b"::", maxsplit=1)
        payload: Payload = pickle.loads(data)
        return payload
