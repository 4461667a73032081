"""torch.multiprocessing as its documentation says: a Queue per participant.

A tensor that is put into a queue is moved into shared memory, and only a handle
travels. That happens once in a tensor's life; a program that sends new values sends a
new tensor, as `send` does here, over the same values and without a copy of its own. The
receiver maps what the sender filled. A queue holds at most 1000 messages, or four of a
megabyte and more, which would fill the memory.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.multiprocessing  # has tensors travel by handle

from bench.payloads import Payload
from bench.peer import Peer
from bench.wire import Wire


class QueueWire(Wire):
    """Queues that the starter of the processes made, one for each of them."""

    def __init__(self, peer: Peer, quiet: float) -> None:
        self._quiet = quiet
        self._own = peer.queues[peer.rank]
        self._others = list(peer.queues[1:]) if peer.rank == 0 else [peer.queues[0]]
        peer.meet()

    def send(self, payload: Payload) -> None:
        fresh = _fresh(payload)
        try:
            for other in self._others:
                other.put(fresh, timeout=self._quiet)
        except queue.Full as error:
            raise TimeoutError("raw queue: the peer took nothing in time") from error

    def recv(self) -> Payload:
        try:
            payload: Payload = self._own.get(timeout=self._quiet)
        except queue.Empty as error:
            raise TimeoutError("raw queue: no message came in time") from error
        return payload

    @contextmanager
    def bulk(self, payload: Payload) -> Iterator[Callable[[], int]]:
        left = 0

        def turn() -> int:
            nonlocal left
            try:
                self._others[0].put_nowait(_fresh(payload))
                left += 1
            except queue.Full:
                pass
            return left

        yield turn

    def close(self) -> None:
        for one in (self._own, *self._others):
            one.cancel_join_thread()
            one.close()


def _fresh(payload: Payload) -> Payload:
    """The same values as tensors that have not been moved into shared memory yet."""
    if isinstance(payload, torch.Tensor):
        return torch.from_numpy(payload.numpy())
    if isinstance(payload, dict):
        return {
            key: _fresh(value) if isinstance(value, torch.Tensor) else value
            for key, value in payload.items()
        }
    return payload
