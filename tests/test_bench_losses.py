"""What gets lost in a cell is told, whenever that was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from bench import plan, workloads
from bench.command import measure
from bench.payloads import Payload
from bench.peer import Metrics, Peer
from bench.rows import Cell
from bench.wire import Wire
from bench.workloads import open_wire

LIMIT = 12.0  # a third of it passes until a message counts as lost


class Leak:
    """Sends all but one message, of the first trial."""

    def __init__(self, wire: Wire) -> None:
        self._send = wire.send
        self._sent = 0

    def send(self, payload: Payload) -> None:
        self._sent += 1
        if self._sent != 7:
            self._send(payload)


@contextmanager
def leaking(peer: Peer, quiet: float | None = None) -> Iterator[Wire]:
    """The wire of a cell, with a leak at its first sender."""
    with open_wire(peer, quiet) as wire:
        if peer.rank == int(peer.cell.workload == "fanin"):
            wire.send = Leak(wire).send  # type: ignore[method-assign]
        yield wire


def leaks(peer: Peer) -> Metrics | None:
    """The timed loop of the cell, in its own process."""
    workloads.open_wire = leaking
    body: Metrics | None = getattr(workloads, peer.cell.workload)(peer)
    return body


@pytest.mark.parametrize("transport", ["tcp", "raw:zmq:ipc"])
@pytest.mark.parametrize(
    ("workload", "nbytes"), [("rate", 64), ("fanin", 2016), ("stream", 20_000)]
)
def test_a_message_lost_in_an_early_trial_fails_its_cell(
    workload: str, nbytes: int, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though all that follow are whole; of ours, and of what waits for its receiver."""
    leaky = replace(plan.WORKLOADS[workload], body=f"{__name__}:leaks")
    monkeypatch.setitem(plan.WORKLOADS, workload, leaky)
    result = measure(Cell(transport, workload, nbytes, 0, 0.05, LIMIT), {})
    assert (result.status, result.metrics.get("lost")) == ("failed", 1), result.reason
    assert result.reason == "1 message(s) were lost that should have arrived"


def test_what_may_lose_tells_of_the_trial_that_it_reports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rate, losses and what was sent are of one trial, and no failure."""
    leaky = replace(plan.WORKLOADS["rate"], body=f"{__name__}:leaks")
    monkeypatch.setitem(plan.WORKLOADS, "rate", leaky)
    cell = Cell("raw:zmq:ipc:pubsub", "rate", 64, 0, 0.05, LIMIT)
    result = measure(cell, {})
    assert result.status == "ok", result.reason
    found = result.metrics
    assert found["carried_bytes"] == 64 * (found["sent"] - found["lost"])
