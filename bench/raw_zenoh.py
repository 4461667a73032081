"""Bare zenoh, as its examples use it, over TCP on this host and without scouting.

A payload is joined into one ``bytes`` for `put`, as for NNG, and rebuilt over the
``bytes`` that the sample turns into. Publishers block where the network is congested;
the default drops. Samples come to a callback, which hands them to the receiver.
"""

from __future__ import annotations

import json
import queue
import socket
import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import zenoh

from bench.payloads import Payload
from bench.peer import Peer
from bench.raw import decode, encode
from bench.raw_nng import join, split
from bench.wire import Wire


class ZenohWire(Wire):
    """The hub listens, its spokes connect; a key for each direction."""

    def __init__(self, peer: Peer, quiet: float) -> None:
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        self._quiet = quiet
        self._peer = peer
        self._hub = peer.rank == 0
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._session = self._open()
        try:
            self._join()
        except BaseException:
            self.close()
            raise

    def _open(self) -> Any:
        # Two meetings, so that the hub listens before anybody connects.
        address = f"tcp/127.0.0.1:{_free_port()}"
        found = self._peer.meet(address)[0]
        if self._hub:
            session = zenoh.open(_config("listen", found))
        self._peer.meet()
        if not self._hub:
            session = zenoh.open(_config("connect", found))
        return session

    def _join(self) -> None:
        group, rank = self._peer.group, self._peer.rank
        sending, receiving = ("out", "back") if self._hub else ("back", "out")
        self._subscribers = [
            self._session.declare_subscriber(
                f"{group}/{receiving}", lambda sample: self._inbox.put(sample.payload)
            ),
            # Declared last: who sees it has seen the other one.
            self._session.declare_subscriber(f"{group}/here/{rank}", lambda _: None),
        ]
        for other in range(1, self._peer.size) if self._hub else (0,):
            self._await(f"{group}/here/{other}")
        self._publisher = self._session.declare_publisher(
            f"{group}/{sending}", congestion_control=zenoh.CongestionControl.BLOCK
        )
        self._peer.meet()

    def _await(self, key: str) -> None:
        there = threading.Event()
        publisher = self._session.declare_publisher(key)
        listener = publisher.declare_matching_listener(
            lambda status: there.set() if status.matching else None
        )
        if publisher.matching_status.matching:
            there.set()
        if not there.wait(self._peer.remaining()):
            raise TimeoutError("raw zenoh: the others did not come in time")
        listener.undeclare()
        publisher.undeclare()

    def send(self, payload: Payload) -> None:
        self._publisher.put(join(encode(payload)))

    def recv(self) -> Payload:
        try:
            received = self._inbox.get(timeout=self._quiet)
        except queue.Empty as error:
            raise TimeoutError("raw zenoh: no message came in time") from error
        return decode(split(received.to_bytes()))

    def bulk(self, payload: Payload) -> AbstractContextManager[Callable[[], int]]:
        raise TypeError("a publisher that blocks does nothing else")

    def close(self) -> None:
        self._session.close()


def _config(kind: str, address: str) -> Any:
    config = zenoh.Config()
    config.insert_json5("mode", json.dumps("peer"))
    config.insert_json5("scouting/multicast/enabled", "false")
    config.insert_json5("listen/endpoints", "[]")
    config.insert_json5(f"{kind}/endpoints", json.dumps([address]))
    return config


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
