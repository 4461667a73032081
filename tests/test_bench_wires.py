"""Bare libraries are measured once all their connections are as ours."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from bench import workloads
from bench.rows import Cell
from mq.testing import STEP

SPOKES = 2


class Net:
    """Three participants in three threads; the second spoke is as late as can be.

    Attributes:
        hub: What the spokes have sent.
    """

    def __init__(self) -> None:
        self.hub: SimpleQueue[object] = SimpleQueue()
        self.spokes = [SimpleQueue[object]() for _ in range(SPOKES)]
        self.barrier = threading.Barrier(1 + SPOKES, timeout=STEP)
        self.fast = threading.Event()


class Peer:
    """What a workload asks of one."""

    def __init__(self, net: Net, rank: int) -> None:
        self.net = net
        self.rank = rank
        self.spokes = SPOKES
        self.cell = Cell("raw:nng:tcp", "fanin", 1000, 0)

    def remaining(self) -> float:
        return STEP

    def meet(self) -> None:
        if self.rank == 1:
            self.net.fast.set()  # it can go no further before the other has come
        self.net.barrier.wait()


class Wire:
    """A hub and its spokes."""

    def __init__(self, peer: Peer, quiet: float) -> None:
        self.net, self.rank = peer.net, peer.rank
        self.sent = 0

    def send(self, payload: object) -> None:
        net = self.net
        if not self.rank:
            for spoke in net.spokes:
                spoke.put(payload)
            return
        if self.rank == 2 and not self.sent:
            assert net.fast.wait(STEP)
        net.hub.put(payload)
        self.sent += 1
        if self.rank == 1 and self.sent == 2:
            net.fast.set()

    def recv(self) -> Any:
        queue = self.net.spokes[self.rank - 1] if self.rank else self.net.hub
        return queue.get(timeout=STEP)

    def close(self) -> None:
        pass


def peer_of(net: Net, rank: int) -> Any:
    return Peer(net, rank)


def test_no_spokes_first_batch_passes_for_anothers_empty_message(
    monkeypatch: Any,
) -> None:
    """Which opens the connections; of those some are there before others."""
    monkeypatch.setattr(workloads, "wire_of", lambda _: Wire)
    net, found = Net(), []

    def spoke(rank: int) -> None:
        with workloads.open_wire(peer_of(net, rank)) as wire:
            wire.send(rank)

    def hub() -> None:
        with workloads.open_wire(peer_of(net, 0)) as wire:
            found.extend(wire.recv() for _ in range(SPOKES))

    ends: list[Callable[[], None]] = [hub, lambda: spoke(1), lambda: spoke(2)]
    threads = [threading.Thread(target=end, daemon=True) for end in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(STEP)
    assert sorted(found) == [1, 2]
