"""What the hardware and the kernel can do at best: no framing, no copies but theirs."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import numpy as np
import torch

from bench.gpu import Gpu
from bench.payloads import Payload
from bench.peer import Metrics, Peer
from bench.rows import percentiles
from bench.wire import Wire

_SLICE = 1 << 20  # measured best of 0.25 to 8 MiB on loopback
_SIZE = struct.Struct("<q")


class SocketWire(Wire):
    """A stream socket to one spoke, received into one buffer made beforehand."""

    def __init__(self, peer: Peer, quiet: float) -> None:
        nbytes = peer.cell.nbytes // 4 * 4
        self._memory = np.ones(max(nbytes, 4), np.uint8)  # touched: memory in use
        self._view = memoryview(self._memory.data).cast("B")
        self._tensor = torch.from_numpy(self._memory).view(torch.float32)
        self._head = memoryview(bytearray(_SIZE.size))
        family = (
            socket.AF_INET if peer.cell.transport == "limit:tcp" else socket.AF_UNIX
        )
        self._socket = _joined(peer, family)
        # Not settimeout(), which puts a poll() before every call.
        limit = struct.pack("@ll", int(quiet), 0)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def send(self, payload: Payload) -> None:
        if payload is None:
            self._socket.sendall(_SIZE.pack(0))
            return
        if not isinstance(payload, torch.Tensor):
            raise TypeError("a limit carries tensors and empty messages only")
        view = payload.numpy().data.cast("B")
        try:
            sent = self._socket.sendmsg([_SIZE.pack(len(view)), view[:_SLICE]])
            for start in range(sent - _SIZE.size, len(view), _SLICE):
                self._socket.sendall(view[start : start + _SLICE])
        except BlockingIOError as error:
            raise TimeoutError("socket: the peer took nothing in time") from error

    def recv(self) -> Payload:
        self._fill(self._head)
        (size,) = _SIZE.unpack(self._head)
        if not size:
            return None
        self._fill(self._view[:size])
        return self._tensor

    def _fill(self, view: memoryview) -> None:
        start = 0
        while start < len(view):
            try:
                count = self._socket.recv_into(
                    view[start : start + _SLICE], 0, socket.MSG_WAITALL
                )
            except BlockingIOError as error:
                raise TimeoutError("socket: nothing came in time") from error
            if not count:
                raise ConnectionError("socket: the peer is gone")
            start += count

    def bulk(self, payload: Payload) -> AbstractContextManager[Callable[[], int]]:
        raise TypeError("a single stream carries nothing beside its messages")

    def close(self) -> None:
        self._socket.close()


def _joined(peer: Peer, family: socket.AddressFamily) -> socket.socket:
    if peer.rank:
        address = peer.meet()[0]
        joined = _stream(family)
        joined.connect(address)
        peer.meet()
        return joined
    with _stream(family) as listener:
        path = os.path.join(peer.directory, "socket")
        listener.bind(path if family == socket.AF_UNIX else ("127.0.0.1", 0))
        listener.listen(1)
        listener.settimeout(peer.remaining())
        peer.meet(listener.getsockname())
        joined, _ = listener.accept()
    joined.setblocking(True)
    _tune(joined)
    peer.meet()
    return joined


def _stream(family: socket.AddressFamily) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    _tune(made)
    return made


def _tune(made: socket.socket) -> None:
    if made.family == socket.AF_INET:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    else:  # TCP tunes its own buffers; a unix socket's default costs half the speed
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)


def copy_memory(peer: Peer) -> Metrics:
    """One copy of the payload into memory in use: what "one copy" can cost at best.

    Of the host, or of the first GPU, until that is done.
    """
    nbytes = peer.cell.nbytes
    copy: Callable[[], object]
    if peer.cell.transport == "limit:cuda":
        gpu = Gpu()
        ours, theirs = torch.ones(2, nbytes, dtype=torch.uint8, device=gpu.device)

        def copy() -> None:
            theirs.copy_(ours)
            gpu.wait()

    else:
        source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
        copy = partial(np.copyto, target, source)
    samples: list[float] = []
    end = time.monotonic() + peer.cell.budget
    while len(samples) < 5 or (time.monotonic() < end and len(samples) < 10_000):
        start = time.perf_counter_ns()
        copy()
        samples.append((time.perf_counter_ns() - start) / 1e6)
    found = percentiles(samples)
    if peer.cell.workload == "stream":
        return {"value": nbytes / found["p50"] / 1e6}
    return {"value": found["p50"], **found}
