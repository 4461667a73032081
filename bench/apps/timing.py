"""Where the time of a process goes that computes, publishes and receives in turn."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

import mq


class Received(NamedTuple):
    """A tensor and what was said beside it."""

    tensor: Tensor
    facts: dict[str, Any]


@dataclass
class Timed:
    """A queue whose calls are timed, for members on one host.

    Every message says when `publish` was called for it. What a receiver waits before
    that moment it waits for its peer's work; what it waits afterwards, and what its own
    `publish` takes, is the transport's.

    Attributes:
        queue: What messages go through.
        timeout: Seconds that each call may take.
        transport: Seconds so far in the transport.
        waiting: Seconds so far in which the peer was not done yet.
        nbytes: Of all tensors published so far.
    """

    queue: mq.MQ
    timeout: float
    transport: float = 0.0
    waiting: float = 0.0
    nbytes: int = 0

    def publish(self, topic: str, tensor: Tensor, **facts: Any) -> None:
        """Publish a tensor.

        Raises:
            mq.PublishTimeout: The subscriber had no room in time.
        """
        begin = time.monotonic()
        payload = {"tensor": tensor, "facts": facts, "at": begin}
        self.queue.publish(topic, payload, timeout=self.timeout)
        self.transport += time.monotonic() - begin
        self.nbytes += tensor.nbytes

    def recv(self) -> Received:
        """The next tensor of any topic.

        Raises:
            mq.RecvTimeout: None came in time.
        """
        begin = time.monotonic()
        payload = self.queue.recv(timeout=self.timeout).payload
        end = time.monotonic()
        ready = min(max(begin, payload["at"]), end)
        self.waiting += ready - begin
        self.transport += end - ready
        return Received(payload["tensor"], payload["facts"])

    def reset(self) -> None:
        """Forget what was timed so far."""
        self.transport = self.waiting = 0.0
        self.nbytes = 0
