"""The one interface that the timed loops use, whatever carries the payloads."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

import mq
from bench import certificates
from bench.baselines import encrypts, split
from bench.gpu import Gpu
from bench.payloads import Payload
from bench.peer import Peer


class Wire(ABC):
    """A hub and its spokes: the hub sends to all spokes, a spoke to the hub.

    Args:
        quiet: Seconds without a message after which `recv` gives up.
    """

    @abstractmethod
    def __init__(self, peer: Peer, quiet: float) -> None:
        """Join the others; all of them do so together."""

    @abstractmethod
    def send(self, payload: Payload) -> None:
        """Send a payload, or None for an empty message."""

    @abstractmethod
    def recv(self) -> Payload:
        """The next payload, ready for use.

        Raises:
            TimeoutError: Nothing came within the time that the wire was made with.
        """

    @abstractmethod
    def bulk(self, payload: Payload) -> AbstractContextManager[Callable[[], int]]:
        """In this block `payload` flows from the hub again and again, beside `send`.

        The block must call what it is given once per turn of its loop; this returns
        how many times the payload has left so far.
        """

    @abstractmethod
    def close(self) -> None:
        """Free everything."""


def connect(peer: Peer) -> mq.MQ:
    """A member of the cell's group, over its transport."""
    backend, _ = split(peer.cell.transport)
    options: dict[str, Any] = {}
    if encrypts(backend):
        if peer.rank == 0:
            certificates.options(peer.directory)
        peer.meet()
        options = certificates.options(peer.directory)
    return mq.connect(
        backend,
        group=peer.group,
        name=f"rank{peer.rank}",
        connect_timeout=peer.remaining(),
        **options,
    )


class MqWire(Wire):
    """The library itself: one topic outwards, one inwards, one for bulk.

    With "+view" subscribers read the publisher's memory; with "+loan" the publisher
    fills it in place, too, which is not timed: its values are there from the first
    message on.
    """

    def __init__(self, peer: Peer, quiet: float) -> None:
        self._quiet = quiet
        self._peer = peer
        hub = peer.rank == 0
        self._gpu = Gpu() if peer.cell.transport.endswith("cuda") else None
        self._topic = "out" if hub else "in"
        _, self._mode = split(peer.cell.transport)
        self._filled = False
        self._queue = connect(peer)
        try:
            self._subscribe(peer, hub)
        except BaseException:
            self._queue.close(linger=0)
            raise

    def _subscribe(self, peer: Peer, hub: bool) -> None:
        for topic in ["in"] if hub else ["out", "bulk"]:
            self._queue.subscribe(
                topic,
                zero_copy=self._mode != "",
                device=None if self._gpu is None else str(self._gpu.device),
                timeout=peer.remaining(),
            )
        expected = peer.spokes if hub else 1
        self._queue.wait_for_subscribers(
            self._topic, expected, timeout=peer.remaining()
        )
        peer.meet()

    def send(self, payload: Payload) -> None:
        if self._gpu is not None:
            payload = self._gpu.place(payload)
        if self._mode == "loan" and isinstance(payload, torch.Tensor):
            self._lend(payload)
        else:
            self._queue.publish(self._topic, payload, timeout=self._quiet)

    def _lend(self, payload: torch.Tensor) -> None:
        with self._queue.loan(
            self._topic, payload.shape, payload.dtype, timeout=self._quiet
        ) as area:
            if not self._filled:  # the one message that the receiver checks
                area.copy_(payload)
                self._filled = True

    def recv(self) -> Payload:
        payload: Payload = self._queue.recv(timeout=self._quiet).payload
        if self._gpu is not None:
            self._gpu.wait()
        return payload

    @contextmanager
    def bulk(self, payload: Payload) -> Iterator[Callable[[], int]]:
        if self._gpu is not None:
            payload = self._gpu.place(payload)
        stop = threading.Event()
        errors: list[BaseException] = []
        left = 0

        def flow() -> None:
            nonlocal left
            try:
                while not stop.is_set():
                    self._queue.publish("bulk", payload, timeout=self._quiet)
                    left += 1
            except BaseException as error:  # the outermost frame: raised below
                errors.append(error)

        thread = threading.Thread(target=flow, name="bench-bulk", daemon=True)
        thread.start()
        try:
            yield lambda: left
        finally:
            stop.set()
            thread.join(self._quiet)
        if errors:
            raise errors[0]

    def close(self) -> None:
        self._queue.close(linger=self._peer.remaining())
