"""Bare pyzmq, written as its documentation recommends: what the library is judged by.

A tensor travels as two frames, a JSON header with dtype and shape and the memory
itself with ``copy=False`` (which pyzmq turns into a copy below 64 KiB), and is rebuilt
over the received frame. A plain dictionary is one frame of msgpack. One hub and one
spoke are joined by a PUSH/PULL pair for each direction; a hub publishes to several
spokes, or to one on ``...:pubsub``, by PUB/SUB, and they answer by PUSH/PULL. The
high-water marks are the default of 1000 messages, but 4 for PUSH/PULL of messages of a
megabyte or more, which would fill the memory. ``...:curve`` encrypts by CURVE.
``...:copy`` has pyzmq copy what it sends, its default: the caller may change a payload
once it is sent, as with ours; by ``copy=False`` not until the peer has it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import msgspec
import torch
import zmq

from bench.payloads import Payload
from bench.peer import Peer
from bench.wire import Wire

Parts: TypeAlias = "list[Any]"

_DTYPES = {"float32": torch.float32, "int64": torch.int64}
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode
_LARGE = 1_000_000


def encode(payload: Payload) -> Parts:
    """The frames of a payload."""
    if payload is None:
        return [b""]
    if isinstance(payload, torch.Tensor):
        return [json.dumps(_describe(payload)).encode(), _memory(payload)]
    if not isinstance(next(iter(payload.values())), torch.Tensor):
        return [_encode(payload)]
    header = {key: _describe(value) for key, value in payload.items()}
    return [json.dumps(header).encode(), *map(_memory, payload.values())]


def decode(parts: Parts) -> Payload:
    """The payload of received frames (anything with the buffer interface)."""
    if len(parts) == 1:
        return _decode(parts[0]) if len(parts[0]) else None
    header = json.loads(bytes(parts[0]))
    if "dtype" in header:
        return _rebuild(header, parts[1])
    pairs = zip(header.items(), parts[1:], strict=True)
    return {key: _rebuild(described, part) for (key, described), part in pairs}


def _describe(value: torch.Tensor) -> dict[str, Any]:
    return {"dtype": str(value.dtype)[6:], "shape": list(value.shape)}


def _memory(value: torch.Tensor) -> memoryview:
    return value.numpy().data.cast("B")


def _rebuild(described: dict[str, Any], part: Any) -> torch.Tensor:
    dtype = _DTYPES[described["dtype"]]
    return torch.frombuffer(part, dtype=dtype).reshape(described["shape"])


class RawZmqWire(Wire):
    """Two sockets: `out` from the hub to its spokes, `back` from them to it."""

    def __init__(self, peer: Peer, quiet: float) -> None:
        _, _, scheme, *pattern = peer.cell.transport.split(":")
        fan = peer.spokes > 1 or pattern == ["pubsub"]
        self._curve = pattern == ["curve"]
        self._copy = pattern == ["copy"]
        self._hub = peer.rank == 0
        self._one_frame = peer.cell.workload == "rate"
        self._context = zmq.Context()
        self._directory = peer.directory
        try:
            self._open(peer, scheme, fan, int(quiet * 1000))
        except BaseException:
            self.close()
            raise

    def _open(self, peer: Peer, scheme: str, fan: bool, quiet_ms: int) -> None:
        kinds = (zmq.XPUB if fan else zmq.PUSH, zmq.PULL)
        if not self._hub:
            kinds = (zmq.SUB if fan else zmq.PULL, zmq.PUSH)
        few = not fan and peer.cell.nbytes >= _LARGE
        out, back = (self._socket(kind, quiet_ms, few) for kind in kinds)
        self._sender, self._receiver = (out, back) if self._hub else (back, out)
        if self._curve:
            self._encrypt(peer)
        if self._hub:
            out.bind(self._address(scheme, "out"))
            back.bind(self._address(scheme, "back"))
        ends = [socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in (out, back)]
        addresses = peer.meet(ends)[0]
        if not self._hub:
            out.connect(addresses[0])
            back.connect(addresses[1])
        if fan:
            self._join(out, peer)

    def _socket(self, kind: int, quiet_ms: int, few: bool) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.rcvtimeo = socket.sndtimeo = quiet_ms
        if few:  # PUB drops at so low a mark even where it waits for every answer
            socket.set_hwm(4)
        return socket

    def _encrypt(self, peer: Peer) -> None:
        public, secret = zmq.curve_keypair()
        servers = peer.meet(public)[0]
        for socket in (self._sender, self._receiver):
            socket.curve_publickey, socket.curve_secretkey = public, secret
            if self._hub:
                socket.curve_server = True
            else:
                socket.curve_serverkey = servers

    def _address(self, scheme: str, name: str) -> str:
        if scheme == "tcp":
            return "tcp://127.0.0.1:*"
        return f"ipc://{self._directory}/{name}"

    def _join(self, out: zmq.Socket[bytes], peer: Peer) -> None:
        # XPUB differs from PUB only in telling of subscriptions: no sleep is needed.
        if self._hub:
            out.setsockopt(zmq.XPUB_VERBOSE, 1)
        peer.meet()
        if self._hub:
            for _ in range(peer.spokes):
                out.recv()
        else:
            out.subscribe(b"")
        peer.meet()

    def send(self, payload: Payload) -> None:
        parts = encode(payload)
        try:
            if len(parts) == 1:
                self._sender.send(parts[0])
            else:
                self._sender.send_multipart(parts, copy=self._copy)
        except zmq.Again as error:
            raise TimeoutError("raw zmq: the peer took no message in time") from error

    def recv(self) -> Payload:
        try:
            if self._one_frame:  # for small messages pyzmq's copy is the fast way
                return decode([self._receiver.recv()])
            first = self._receiver.recv(copy=False)
            if not first.more:
                return decode([first.buffer])
            rest = self._receiver.recv_multipart(copy=False)
        except zmq.Again as error:
            raise TimeoutError("raw zmq: no message came in time") from error
        return decode([first.buffer, *(frame.buffer for frame in rest)])

    @contextmanager
    def bulk(self, payload: Payload) -> Iterator[Callable[[], int]]:
        parts = encode(payload)
        left = 0
        tracker = self._sender.send_multipart(parts, copy=False, track=True)

        def turn() -> int:
            nonlocal tracker, left
            if tracker is None or tracker.done:
                left += 1
                tracker = self._sender.send_multipart(parts, copy=False, track=True)
            return left

        yield turn

    def close(self) -> None:
        self._context.destroy(linger=0)
