"""Bare torch.distributed.rpc, as its tutorials use it: what torchrpc is judged by.

Every participant joins by `init_rpc` with a fixed world. A message is one `rpc_async`
of a function of the receiver's, with the payload as its argument, which puts it into a
queue there; at most `IN_FLIGHT` calls are unanswered. One thread runs the calls, since
with the default of 16 they overtake each other. ``raw:torchrpc`` lets TensorPipe
choose among its transports and channels, ``raw:torchrpc:tcp`` leaves it plain TCP.
With tensors on a GPU, ``raw:torchrpc:cuda`` sends them by a device map, and
``raw:torchrpc:staged`` through host memory, as the tutorial does without one.
"""

from __future__ import annotations

import os
import queue
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed.rpc

from bench.gpu import Gpu, move
from bench.payloads import Payload
from bench.peer import Peer, Unusable
from bench.wire import Wire

IN_FLIGHT = 64
_LARGE = 1_000_000
_FEW = 4
"""Unanswered calls of `_LARGE` bytes and more, which would fill the memory."""

rpc: Any = torch.distributed.rpc  # most of it has no types
_inbox: queue.SimpleQueue[Payload] = queue.SimpleQueue()


def deliver(payload: Payload) -> None:
    """What the sender calls in the receiver's process."""
    _inbox.put(payload)


class RawRpcWire(Wire):
    """The hub is worker 0; a spoke answers to it."""

    def __init__(self, peer: Peer, quiet: float) -> None:
        if not rpc.is_available():
            raise Unusable("this torch has no torch.distributed.rpc")
        self._quiet = quiet
        self._peers = list(range(1, peer.size)) if peer.rank == 0 else [0]
        self._most = _FEW if peer.cell.nbytes >= _LARGE else IN_FLIGHT
        self._futures: deque[Any] = deque()
        os.environ.setdefault("TP_SOCKET_IFNAME", "lo")  # never the network
        with warnings.catch_warnings():
            # torch's own: "You are using a Backend ... as a ProcessGroup".
            warnings.simplefilter("ignore")
            rpc.init_rpc(
                f"worker{peer.rank}",
                rank=peer.rank,
                world_size=peer.size,
                rpc_backend_options=self._options(peer),
            )
        peer.meet()

    def _options(self, peer: Peer) -> Any:
        tcp = peer.cell.transport.endswith(":tcp")
        return rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=1,
            rpc_timeout=0,
            init_method=f"file://{peer.directory}/rpc",
            _transports=["uv"] if tcp else None,
            _channels=["basic"] if tcp else None,
        )

    def send(self, payload: Payload) -> None:
        for rank in self._peers:
            call = rpc.rpc_async(f"worker{rank}", deliver, args=(payload,))
            self._futures.append(call)
        while self._futures and (
            self._futures[0].done() or len(self._futures) > self._most
        ):
            self._futures.popleft().wait()

    def recv(self) -> Payload:
        try:
            return _inbox.get(timeout=self._quiet)
        except queue.Empty as error:
            raise TimeoutError("raw torchrpc: no message came in time") from error

    @contextmanager
    def bulk(self, payload: Payload) -> Iterator[Callable[[], int]]:
        left = 0
        call = rpc.rpc_async("worker1", deliver, args=(payload,))

        def turn() -> int:
            nonlocal call, left
            if call.done():
                left += 1
                call = rpc.rpc_async("worker1", deliver, args=(payload,))
            return left

        yield turn
        self._futures.append(call)

    def close(self) -> None:
        rpc.shutdown(graceful=False)


class CudaRpcWire(RawRpcWire):
    """From GPU to GPU: each participant's first device to that of the others."""

    def __init__(self, peer: Peer, quiet: float) -> None:
        self._gpu = Gpu()
        super().__init__(peer, quiet)

    def _options(self, peer: Peer) -> Any:
        options = super()._options(peer)
        for rank in self._peers:
            options.set_device_map(f"worker{rank}", {0: 0})
        return options

    def send(self, payload: Payload) -> None:
        super().send(self._gpu.place(payload))

    def recv(self) -> Payload:
        payload = super().recv()
        self._gpu.wait()
        return payload

    @contextmanager
    def bulk(self, payload: Payload) -> Iterator[Callable[[], int]]:
        with super().bulk(self._gpu.place(payload)) as turn:
            yield turn


class StagedRpcWire(RawRpcWire):
    """From GPU to GPU with a stop in the host memory of both."""

    def __init__(self, peer: Peer, quiet: float) -> None:
        self._gpu = Gpu()
        super().__init__(peer, quiet)

    def send(self, payload: Payload) -> None:
        super().send(move(self._gpu.place(payload), "cpu"))

    def recv(self) -> Payload:
        payload = move(super().recv(), self._gpu.device)
        self._gpu.wait()
        return payload

    @contextmanager
    def bulk(self, payload: Payload) -> Iterator[Callable[[], int]]:
        with super().bulk(move(self._gpu.place(payload), "cpu")) as turn:
            yield turn
